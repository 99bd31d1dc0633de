"""Places for checkpoints: a local directory, or a file system of fsspec. They hold bytes under paths.

A file appears whole or not at all: on local file systems it is written beside its place, synced and renamed. Elsewhere
that is up to the store behind fsspec (object stores put whole objects); what is torn all the same does not match its
digest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

import numpy as np

from taskgraph.errors import JobError, worded

__all__ = ["Bytes", "Directory", "FsspecPlace", "NoFile", "Place", "check_url", "open_place", "written_by"]

Bytes = bytes | memoryview
_LOCAL: Final = ("file", "local", "")
_BESIDE: Final = re.compile(r"\.(.+)\.([0-9a-z]*)\.[0-9a-f]{12}\.tmp")
"""The name of a file while it is written: its later name, the writer, and a random part."""


class NoFile(OSError):
    """The path is no regular file, or the file is longer than any that was written."""


class Place(Protocol):
    """Bytes under relative paths, with `/` between their parts. Calls block; they raise OSError."""

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        """Puts a whole file, over one that is there."""

    def read(self, path: str, limit_bytes: int) -> memoryview:
        """A whole file; FileNotFoundError where there is none, NoFile where what is there was never written here.

        Memory is taken for what the file has, and never for more than the limit.
        """

    def names(self, path: str) -> list[str]:
        """The entries of a directory, sorted; none if it does not exist."""

    def sizes(self, path: str) -> dict[str, int | None]:
        """The entries of a directory, with their sizes in bytes if the place knows them."""

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with all that is in it; nothing where there is none."""

    def remove_empty(self, path: str) -> None:
        """Removes a directory where there is nothing in it, not even what is being written."""


def check_url(url: str) -> None:
    """Refuses a wrong URL when the job is made, before it fails in every node.

    Raises:
        JobError: not a place that every node can find.
    """
    if not isinstance(url, str) or not url:
        raise JobError(f"Job(checkpoint={url!r}): must be a URL, e.g. 'file:///scratch/checkpoints'")
    local = _local_path(url)
    if local is not None:
        if not os.path.isabs(local):
            raise JobError(
                f"Job(checkpoint={url!r}): nodes do not share a working directory; give the whole path, e.g. "
                f"'{_whole(local.removeprefix('file:'))}'"
            )
        if (rest := local.lstrip("/")).partition("/")[0] == "~":
            raise JobError(
                f"Job(checkpoint={url!r}): ~ is not expanded there, and means a directory of that name; give the whole "
                f"path, e.g. '{_whole(rest)}'"
            )
        if not _is_path(local):
            raise JobError(f"Job(checkpoint={url!r}): no path of a file: it has a NUL, or what is no Unicode")
        return
    _fsspec(url)


def _is_path(text: str) -> bool:
    """True if the system takes the text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _whole(path: str) -> str:
    """The URL of a path of this host that is relative, or begins with a home."""
    if not _is_path(path):
        return "file:///scratch/checkpoints"
    return Path(os.path.abspath(os.path.expanduser(path))).as_uri()


def open_place(url: str, by: str = "") -> Place:
    """Returns the place that a URL names. Nothing is made or read yet.

    Args:
        by: see `Directory`.

    Raises:
        JobError: the URL is none, or needs a package that is not installed.
    """
    check_url(url)
    local = _local_path(url)
    return Directory(Path(local), by) if local is not None else FsspecPlace(url)


def written_by(name: str) -> tuple[str, str] | None:
    """Splits a name that a directory lists into the file's final name and its writer; None for other names."""
    found = _BESIDE.fullmatch(name)
    return (found[1], found[2]) if found else None


def _local_path(url: str) -> str | None:
    """The path that the URL names on this host, or None: it is not one of this host's."""
    scheme, has_scheme, rest = url.partition("://")
    if not has_scheme:
        return url
    if scheme.lower() not in _LOCAL:
        return None
    host, slash, path = rest.partition("/")  # a path may have a # or a ?: a file has no query and no fragment
    if host not in ("", "localhost"):
        named, whole = f"it names the host {host!r}", _whole(unquote(f"{host}{slash}{path}"))
        if host.startswith((".", "~")):
            raise JobError(f"Job(checkpoint={url!r}): {named}; give the whole path, e.g. '{whole}'")
        raise JobError(
            f"Job(checkpoint={url!r}): {named}; a path has three slashes, and is the whole one, e.g. "
            f"'file:///{host}{slash}{path}', or, from this directory, '{whole}'"
        )
    return unquote(slash + path)


def _fsspec(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise JobError(
            f"Job(checkpoint={url!r}): places other than file:/// need fsspec: pip install 'taskgraph-aio[checkpoint]'"
        ) from None
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found
    except (ValueError, ImportError) as error:
        raise JobError(f"Job(checkpoint={url!r}): {error}") from error
    except Exception as error:  # some connect when they are made, and raise what their client does
        raise JobError(f"Job(checkpoint={url!r}): {worded(error)}") from error


class Directory:
    """A directory of this host, or one that a network file system shows to all of them.

    Args:
        by: who writes, in small letters and digits: of what is left half written that is to be seen.
    """

    def __init__(self, root: Path, by: str = "") -> None:
        self._root = root
        self._by = by

    def __str__(self) -> str:
        return str(self._root)

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        target = self._root / path
        # Two writers of one file (a zombie, and who came after it) must not write into one another.
        beside = target.with_name(f".{target.name}.{self._by}.{uuid.uuid4().hex[:12]}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True)  # raises, if there cannot be one, another error than below
        try:
            with _create(beside) as file:
                for part in parts:
                    _write_all(file.fileno(), memoryview(part))
                os.fsync(file.fileno())
            os.replace(beside, target)
            _sync_directory(target.parent)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{target.parent} was removed while {target.name} was written there, by another run that keeps its "
                f"checkpoints in the same place, or by hand"
            ) from error
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()
            raise

    def read(self, path: str, limit_bytes: int) -> memoryview:
        with open(self._root / path, "rb", buffering=0, opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise NoFile("it is no regular file")
            _check_size(found.st_size, limit_bytes)
            try:
                data = np.fromfile(file, np.uint8, found.st_size)
            except MemoryError:
                raise OSError(errno.ENOMEM, f"no memory for its {found.st_size} bytes") from None
        data.flags.writeable = False
        return data.data

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / path))
        except FileNotFoundError:
            return []

    def sizes(self, path: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name in self.names(path):
            with contextlib.suppress(FileNotFoundError):  # one that was still under its other name
                found[name] = (self._root / path / name).stat().st_size
        return found

    def remove(self, path: str) -> None:
        target = self._root / path
        with contextlib.suppress(FileNotFoundError):
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()

    def remove_empty(self, path: str) -> None:
        try:
            (self._root / path).rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting: a pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise NoFile(f"it has {size_bytes} bytes, and {limit_bytes} at most were written")


def _create(path: Path) -> FileIO:
    """Creates a file. Tries twice, as another process may remove the directory while it is empty."""
    try:
        return open(path, "xb", buffering=0)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb", buffering=0)


def _write_all(descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def _sync_directory(path: Path) -> None:
    """A rename is durable only once its directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FsspecPlace:
    """A place in one of fsspec's file systems."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, self._root = _fsspec(url)

    def __str__(self) -> str:
        return self._url

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        target = self._path(path)
        with _as_os_error(target):
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            with self._fs.open(target, "wb") as file:
                for part in parts:
                    file.write(part)

    def read(self, path: str, limit_bytes: int) -> memoryview:
        with _as_os_error(path):
            data = bytes(self._fs.cat_file(self._path(path), end=limit_bytes + 1))
        if len(data) > limit_bytes:
            raise NoFile(f"it has more than the {limit_bytes} bytes that at most were written")
        return memoryview(data)

    def names(self, path: str) -> list[str]:
        return sorted(self.sizes(path))

    def sizes(self, path: str) -> dict[str, int | None]:
        with _as_os_error(path):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(path), detail=True)
            except FileNotFoundError:
                return {}
            return {str(info["name"]).rstrip("/").rpartition("/")[2]: info.get("size") for info in found}

    def remove(self, path: str) -> None:
        with _as_os_error(path), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(path), recursive=True)

    def remove_empty(self, path: str) -> None:
        if not self.names(path):
            self.remove(path)


@contextlib.contextmanager
def _as_os_error(path: str) -> Iterator[None]:
    """Turns errors of the stores behind fsspec, which have no common base class, into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
