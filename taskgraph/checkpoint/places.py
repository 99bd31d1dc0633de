"""Places for checkpoints: a local directory, or a file system of fsspec. They hold bytes under paths.

A file appears whole or not at all. In a directory it is written under a temporary name, synced and renamed; fsspec
does not sync local files, so directories have code of their own. Other stores put whole objects; if one tears a file
all the same, the file does not match its digest.
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

from taskgraph.errors import JobError, error_text

__all__ = [
    "Bytes",
    "Directory",
    "FsspecPlace",
    "Place",
    "UnusableFile",
    "check_url",
    "open_place",
    "split_temporary_name",
]

Bytes = bytes | memoryview
_LOCAL_SCHEMES: Final = ("file", "local", "")
_TEMPORARY_NAME: Final = re.compile(r"\.(.+)\.([0-9a-z]*)\.[0-9a-f]{12}\.tmp")
"""The temporary name of a file: its final name, its writer, a random part."""


class UnusableFile(OSError):
    """The path to read is no regular file, or the file is longer than the limit: reading it again is no use."""


class Place(Protocol):
    """Bytes under relative paths, with `/` between their parts. Calls block; they raise OSError."""

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        """Writes a whole file, and replaces an existing one."""

    def read(self, path: str, limit_bytes: int) -> memoryview:
        """Returns a whole file. Takes memory for the file's size, and never for more than the limit.

        Raises:
            FileNotFoundError: there is no such file.
            UnusableFile: the path is no regular file, or longer than the limit.
        """

    def names(self, path: str) -> list[str]:
        """Lists a directory, sorted; a missing one is empty."""

    def file_sizes(self, path: str) -> dict[str, int | None]:
        """Lists a directory: name -> size in bytes, or None if the place does not know it; a missing one is empty."""

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with its content, if it exists."""

    def remove_empty(self, path: str) -> None:
        """Removes a directory if it exists and is empty."""


def check_url(url: str) -> None:
    """Checks `Job(checkpoint=...)` when the job is made, before a wrong URL fails in every node.

    Raises:
        JobError: the URL names no place that every node can find, or needs a package that is not installed.
    """
    if not isinstance(url, str) or not url:
        raise JobError(f"Job(checkpoint={url!r}): must be a URL, e.g. 'file:///scratch/checkpoints'")
    if _local_path(url) is None:
        _open_fsspec(url)


def open_place(url: str, by: str = "") -> Place:
    """Returns the place that a URL names; makes and reads nothing yet.

    Args:
        by: the writer; see `Directory`.

    Raises:
        JobError: as `check_url`.
    """
    check_url(url)
    local = _local_path(url)
    return Directory(Path(local), by) if local is not None else FsspecPlace(url)


def split_temporary_name(name: str) -> tuple[str, str] | None:
    """Splits a temporary name into the file's final name and its writer; None for other names."""
    found = _TEMPORARY_NAME.fullmatch(name)
    return (found[1], found[2]) if found else None


def _local_path(url: str) -> str | None:
    """Returns the path of a directory of this host; None if the URL names another kind of place.

    Raises:
        JobError: the path is relative, begins with `~`, or has characters that no path of the system may have.
    """
    scheme, has_scheme, rest = url.partition("://")
    if not has_scheme:
        path = url.removeprefix("file:")
    elif scheme.lower() in _LOCAL_SCHEMES:  # the path may have a # or a ?: a file has no query and no fragment
        path = unquote(rest[len("localhost") :] if rest.startswith("localhost/") else rest)
    else:
        return None
    if os.path.isabs(path) and path.lstrip("/").partition("/")[0] != "~" and _is_valid_path(path):
        return path
    raise JobError(
        f"Job(checkpoint={url!r}): not the whole path of a directory, as in {_suggest_url(path)!r}. Nodes share no "
        f"working directory, ~ is not expanded, and file:// is followed by a slash."
    )


def _is_valid_path(text: str) -> bool:
    """True if the system accepts the text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _suggest_url(path: str) -> str:
    """Returns the URL that the user probably meant."""
    if not _is_valid_path(path):
        return "file:///scratch/checkpoints"
    from_home = path.lstrip("/") if path.lstrip("/").startswith("~") else path
    return Path(os.path.abspath(os.path.expanduser(from_home))).as_uri()


def _open_fsspec(url: str) -> tuple[Any, str]:
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
    except Exception as error:  # some file systems connect at once, and raise their client's errors
        raise JobError(f"Job(checkpoint={url!r}): {error_text(error)}") from error


class Directory:
    """A directory of this host, or of a network file system that all hosts mount.

    Args:
        by: the writer, in lower-case letters and digits. Temporary names have it, so that half-written files show
            their writer.
    """

    def __init__(self, root: Path, by: str = "") -> None:
        self._root = root
        self._by = by

    def __str__(self) -> str:
        return str(self._root)

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        target = self._root / path
        # Two writers of one file (an old primary and its successor) need different temporary files.
        beside = target.with_name(f".{target.name}.{self._by}.{uuid.uuid4().hex[:12]}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True)  # outside `try`: it raises FileNotFoundError, too
        try:
            with _create(beside) as file:
                for part in parts:
                    _write_all(file.fileno(), memoryview(part))
                os.fsync(file.fileno())
            os.replace(beside, target)
            _sync_directory(target.parent)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{target.parent} was removed while {target.name} was written there, by hand or by another run "
                f"that keeps its checkpoints in the same place"
            ) from error
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()
            raise

    def read(self, path: str, limit_bytes: int) -> memoryview:
        with open(self._root / path, "rb", buffering=0, opener=_open_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UnusableFile("it is no regular file")
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

    def file_sizes(self, path: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name in self.names(path):
            with contextlib.suppress(FileNotFoundError):  # a temporary file was renamed meanwhile
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


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens a path; does not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise UnusableFile(f"it has {size_bytes} bytes, and the checkpoint's at most {limit_bytes}")


def _create(path: Path) -> FileIO:
    """Creates a file. Tries twice, since another process may remove the empty directory meanwhile."""
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
    """Makes renames in this directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FsspecPlace:
    """A folder in one of fsspec's file systems."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, self._root = _open_fsspec(url)

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
            raise UnusableFile(f"it has more than {limit_bytes} bytes, and the checkpoint's at most that")
        return memoryview(data)

    def names(self, path: str) -> list[str]:
        return sorted(self.file_sizes(path))

    def file_sizes(self, path: str) -> dict[str, int | None]:
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
    """Turns errors of fsspec's stores in the `with` block, which have no common base class, into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
