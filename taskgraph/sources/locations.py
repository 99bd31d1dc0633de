"""Files by name, glob pattern or URL: finds them and opens them, here or in a file system of fsspec."""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final
from urllib.parse import unquote

from taskgraph.errors import JobError, error_text

__all__ = ["Files", "FoundFile", "Url", "check_size", "files", "find_files", "is_compressed", "open_file"]

Url = str | os.PathLike[str] | Sequence[str]
FoundFile = tuple[str, int | None]
"""The path or URL of a file, and its size in bytes if it is known."""

_LOCAL_SCHEMES: Final = ("file", "local")
_COMPRESSED: Final = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
"""The end of a name -> the module of the standard library that opens such files."""


class Files:
    """Files as a source. A piece is a file, its only row the path.

    Args:
        url: as in `files`.
    """

    whole = True

    def __init__(self, url: Url) -> None:
        self._url = url

    def pieces(self) -> list[FoundFile]:
        """Returns (path, size in bytes) of each file, sorted by path."""
        return find_files(self._url, "tg.files")

    def read(self, piece: FoundFile, /) -> Iterable[str]:
        path, size = piece
        with open_file(path, size):
            return (path,)


def files(url: Url) -> Files:
    """Files as a source: a piece is a file, and what user code gets is its path.

    Args:
        url: a path, or a pattern with `*`, `?`, `[...]` and `**`, of this host or, with the extra `checkpoint`, a URL
            that fsspec knows; or several of them. Relative paths begin in each node's working directory.

    Raises:
        JobError: (when the pieces are asked for) no file matches; or a file is not the one that the pieces name.
    """
    return Files(url)


def find_files(url: Url, call: str) -> list[FoundFile]:
    """Returns the files that a URL, or one of several, names: sorted, each once.

    Args:
        call: the user's call, for messages.

    Raises:
        JobError: one names no file, or needs a package that is not installed.
    """
    urls = [os.fspath(url)] if isinstance(url, str | os.PathLike) else list(url)
    if not urls or not all(isinstance(item, str) and item for item in urls):
        raise JobError(f"{call}({url!r}): must be a path or a URL, or a list of them")
    found: dict[str, int | None] = {}
    for item in urls:
        local = _local_path(item)
        matching = _find_remote(item, call) if local is None else _find_local(local, call)
        if not matching:
            raise JobError(_no_match_text(call, item, local))
        found.update(matching)
    return sorted(found.items())


@contextlib.contextmanager
def open_file(path: str, size: int | None, *, decompress: bool = False) -> Iterator[IO[bytes]]:
    """Opens a file that `find_files` found, for a `with` block. Errors of reading in the block become JobError, too.

    Args:
        size: in bytes, as `find_files` returned it.
        decompress: read the content of a compressed file.

    Raises:
        JobError: the file cannot be read here, or has another size.
    """
    local = _local_path(path)
    with contextlib.ExitStack() as closing:
        try:
            if local is not None:
                file: Any = closing.enter_context(open(local, "rb"))
                here: int | None = os.fstat(file.fileno()).st_size
            else:
                place, inner = _open_file_system(path, "open")
                file = closing.enter_context(place.open(inner, "rb"))
                here = getattr(file, "size", None)
            check_size(path, here, size)
            if decompress and is_compressed(path):
                file = closing.enter_context(importlib.import_module(_COMPRESSED[_suffix(path)]).open(file))
            yield file
        except JobError:
            raise
        except Exception as error:  # stores of fsspec have errors of their own
            raise JobError(
                f"cannot read {path} on this node: {error_text(error)}\ngive every node the same files under the same "
                f"paths"
            ) from error


def is_compressed(path: str) -> bool:
    """True if the name says that the file is compressed (.gz, .bz2, .xz)."""
    return _suffix(path) in _COMPRESSED


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def check_size(path: str, here: int | None, size: int | None) -> None:
    """Raises JobError if a file's size `here` differs from `size`, when its pieces were made; None: unknown, passes."""
    if None not in (here, size) and here != size:
        raise JobError(
            f"{path} has {here} bytes on this node, and had {size} where the pieces were made: give every node the "
            f"same file, and leave it as it is while the job runs"
        )


def _local_path(url: str) -> str | None:
    """Returns a path of this host; None if the URL names another place."""
    scheme, has_scheme, rest = url.partition("://")
    if not has_scheme:
        return url
    if scheme.lower() in _LOCAL_SCHEMES and "::" not in url:
        return unquote(rest[len("localhost") :] if rest.startswith("localhost/") else rest)
    return None


def _find_local(path: str, call: str) -> dict[str, int | None]:
    if os.path.isdir(path):
        raise JobError(f"{call}({path!r}) is a directory: name its files, as in {os.path.join(path, '*')!r}")
    names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    return {name: os.stat(name).st_size for name in names if os.path.isfile(name)}


def _find_remote(url: str, call: str) -> dict[str, int | None]:
    place, path = _open_file_system(url, call)
    has_pattern = any(sign in path for sign in "*?[")
    if has_pattern and "::" in url:
        raise JobError(f"{call}({url!r}): a URL with '::' names one file, without a pattern")
    try:
        matching = place.glob(path, detail=True) if has_pattern else {path: place.info(path)}
    except FileNotFoundError:
        return {}
    except Exception as error:  # stores of fsspec have errors of their own
        raise JobError(f"{call}({url!r}): {error_text(error)}") from error
    if not has_pattern and matching[path].get("type") == "directory":
        raise JobError(f"{call}({url!r}) is a directory: name its files, as in {url.rstrip('/') + '/*'!r}")
    return {
        url if not has_pattern else str(place.unstrip_protocol(name)): info.get("size")
        for name, info in matching.items()
        if info.get("type") == "file"
    }


def _open_file_system(url: str, call: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise JobError(
            f"{call}({url!r}): places other than this host's files need fsspec: pip install 'taskgraph-aio[checkpoint]'"
        ) from None
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found
    except Exception as error:  # an unknown scheme, a missing package, or a store that connects at once
        raise JobError(f"{call}({url!r}): {error_text(error)}") from error


def _no_match_text(call: str, url: str, local: str | None) -> str:
    if local is None or os.path.isabs(local):
        return f"{call}({url!r}): no file matches"
    if local.startswith("~"):
        return f"{call}({url!r}): no file matches: ~ is not expanded, give the whole path"
    return f"{call}({url!r}): no file matches in {os.getcwd()}, where this node runs: give the whole path"
