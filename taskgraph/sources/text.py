"""Lines of text files as a source: ranges of bytes that begin and end with lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.errors import JobError
from taskgraph.sources.locations import Url, find_files, is_compressed, open_file

__all__ = [
    "BLOCK_BYTES",
    "Lines",
    "Range",
    "byte_ranges",
    "check_count",
    "decode_line",
    "line_ends",
    "lines",
    "lines_between",
    "read_range_as_text",
    "skip_byte_order_mark",
]

BLOCK_BYTES: Final = 1 << 22
"""How much is read at once while line ends are searched: more is no faster."""

Range = tuple[str, int | None, int, int]
"""(path, size of the file in bytes or None, first byte, byte behind the last one); -1: to the end of the file."""

_NEWLINE: Final = 10
_MARK: Final = b"\xef\xbb\xbf"  # some editors begin UTF-8 files with it


class Lines:
    """The source that `lines` makes; the same arguments."""

    def __init__(self, url: Url, size: int) -> None:
        self._url, self._size = url, check_count(size, "tg.lines")

    def pieces(self) -> list[Range]:
        """Returns ranges of bytes, sorted by path. Reads all files once, apart from compressed ones."""
        found: list[Range] = []
        for path, size in find_files(self._url, "tg.lines"):
            if is_compressed(path):
                found.append((path, size, 0, -1))
                continue
            with open_file(path, size) as file:
                start = skip_byte_order_mark(file)
                found += [(path, size, *between) for between in byte_ranges(line_ends(file, start), start, self._size)]
        return found

    def read(self, piece: Range, /) -> Iterator[str]:
        """Yields the lines, without their ends."""
        path, size, first, end = piece
        if 0 <= end - first <= BLOCK_BYTES and (text := read_range_as_text(path, size, first, end)) is not None:
            found = text.removesuffix("\n").split("\n")
            yield from [line.removesuffix("\r") for line in found] if "\r" in text else found
            return
        with open_file(path, size, decompress=True) as file:
            at = skip_byte_order_mark(file) if first == 0 else file.seek(first)
            for line in lines_between(file, at, end):
                yield decode_line(line, path).removesuffix("\n").removesuffix("\r")


def lines(url: Url, size: int = 1000) -> Lines:
    r"""Lines of UTF-8 text files as a source: rows are strings without their line ends (`\n` or `\r\n`).

    Args:
        url: as in `files`.
        size: lines of a piece; the last one of a file has fewer. A compressed file (.gz, .bz2, .xz) is one piece, since
            it can only be read from its beginning.

    Raises:
        JobError: as `files`; a line is not UTF-8.
    """
    return Lines(url, size)


def check_count(size: int, call: str) -> int:
    """Returns `size`; raises JobError unless it is an int from 1 on."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise JobError(f"{call}(size={size!r}): must be a whole number from 1 on")
    return size


def skip_byte_order_mark(file: IO[bytes]) -> int:
    """Reads the mark that some editors put before UTF-8 text, if there is one. Returns where the text begins."""
    return len(_MARK) if file.read(len(_MARK)) == _MARK else file.seek(0)


def byte_ranges(ends: Iterable[Sequence[int] | NDArray[np.int64]], start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields ranges (first byte, byte behind the last one) that have `size` lines or records each; the last has fewer.

    Args:
        ends: the bytes behind the lines or records, block by block.
        start: the byte where the first one begins.
    """
    first = last = start
    missing = size
    for block in ends:
        for index in range(missing - 1, len(block), size):
            yield first, int(block[index])
            first = int(block[index])
        missing = size - (size - missing + len(block)) % size
        last = int(block[-1]) if len(block) else last
    if first < last:
        yield first, last


def line_ends(file: IO[bytes], at: int) -> Iterator[Sequence[int] | NDArray[np.int64]]:
    """Yields the bytes behind the lines of an open file, block by block. Reads from its position, which is `at`."""
    block = b"\n"
    while read := file.read(BLOCK_BYTES):
        block = read
        yield np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE) + (at + 1)
        at += len(block)
    if not block.endswith(b"\n"):
        yield [at]


def read_range_as_text(path: str, size: int | None, first: int, end: int) -> str | None:
    """Reads a range of bytes at once, which is several times as fast as line by line. None: it is not UTF-8."""
    with open_file(path, size) as file:
        file.seek(first)
        try:
            return file.read(end - first).decode()
        except UnicodeDecodeError:
            return None


def lines_between(file: IO[bytes], at: int, end: int) -> Iterator[bytes]:
    """Yields the lines of an open file from its position, which is `at`, to the byte `end`; -1: to the file's end."""
    for line in file:
        yield line
        at += len(line)
        if at >= end >= 0:
            return


def decode_line(line: bytes, path: str) -> str:
    """Decodes a line of UTF-8, with its end.

    Raises:
        JobError: it is not UTF-8.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        shown = line if len(line) <= 60 else line[:60] + b"..."
        raise JobError(
            f"{path} has a line that is not UTF-8: {shown!r} ({error.reason}): convert the file, as with iconv"
        ) from None
