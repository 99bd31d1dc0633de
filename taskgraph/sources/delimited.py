"""CSV files as a source: ranges of bytes that begin and end with records, also if quoted fields have newlines."""

from __future__ import annotations

import csv as standard
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.errors import JobError
from taskgraph.sources.locations import Url, find_files, is_compressed, open_file
from taskgraph.sources.text import (
    BLOCK_BYTES,
    Range,
    byte_ranges,
    check_count,
    decode_line,
    lines_between,
    read_range_as_text,
    skip_byte_order_mark,
)

__all__ = ["Csv", "csv"]

_NEWLINE: Final = 10
_RETURN: Final = 13
_QUOTE: Final = 34


class _UnusualQuotes(Exception):
    """A quote stands within a field that does not begin with one: counting quotes does not find where records end."""


class Csv:
    """The source that `csv` makes; the same arguments."""

    def __init__(self, url: Url, size: int, delimiter: str) -> None:
        self._url, self._size = url, check_count(size, "tg.csv")
        if not isinstance(delimiter, str) or len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise JobError(f"tg.csv(delimiter={delimiter!r}): must be one ASCII character, as ',' or '\\t'")
        self._delimiter = delimiter
        self._headers: dict[tuple[str, int | None], tuple[list[str], int]] = {}

    def pieces(self) -> list[Range]:
        """Returns ranges of bytes, sorted by path. Reads all files once, apart from compressed ones."""
        found: list[Range] = []
        for path, size in find_files(self._url, "tg.csv"):
            if is_compressed(path):
                found.append((path, size, 0, -1))
                continue
            with open_file(path, size) as file:
                found += [(path, size, *between) for between in self._ranges(file, path, size)]
        return found

    def _ranges(self, file: IO[bytes], path: str, size: int | None) -> list[tuple[int, int]]:
        try:
            _, start = self._header(file, path, size)
            try:
                file.seek(start)
                return list(byte_ranges(_record_ends(file, start, self._delimiter), start, self._size))
            except _UnusualQuotes:
                file.seek(start)
                return list(byte_ranges(_parsed_ends(file, start, self._delimiter), start, self._size))
        except standard.Error as error:
            raise _csv_error(path, error, 0) from error

    def _header(self, file: IO[bytes], path: str, size: int | None) -> tuple[list[str], int]:
        """Returns the names of the columns, and the byte where the first record begins. Reads a file's header once."""
        if (path, size) not in self._headers:
            file.seek(0)
            start = skip_byte_order_mark(file)
            read = _CountedLines(lines_between(file, start, -1), path)
            names = next(standard.reader(read, delimiter=self._delimiter), [])
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise JobError(f"{path} has two columns {twice!r} in its header: rename one, since rows are dicts")
            self._headers[path, size] = names, start + read.bytes
        return self._headers[path, size]

    def read(self, piece: Range, /) -> Iterator[dict[str, str]]:
        """Yields the records, as dicts by the names in the file's header."""
        path, size, first, end = piece
        with open_file(path, size, decompress=True) as file:
            names, start = self._header(file, path, size)
            at, text = first or start, None
            if 0 <= end - first <= BLOCK_BYTES:
                text = read_range_as_text(path, size, first, end)
            file.seek(at)
            lines: Iterable[str] = _CountedLines(lines_between(file, at, end), path)
            if text is not None:
                lines = io.StringIO(text, newline="\n")  # no newline of another kind is translated, or ends a line
            records = standard.reader(lines, delimiter=self._delimiter)
            try:
                for record in records:
                    if len(record) == len(names):
                        yield dict(zip(names, record, strict=True))
                    elif record:
                        raise JobError(
                            f"{path} has a record with {len(record)} fields, and {len(names)} names in its header: "
                            f"{self._delimiter.join(record)[:80]!r}: correct the file, or give delimiter=..."
                        )
            except standard.Error as error:
                raise _csv_error(path, error, at) from error


def csv(url: Url, size: int = 1000, delimiter: str = ",") -> Csv:
    """CSV files as a source: rows are dicts of strings, by the names in the first line of each file.

    Quoted fields may have delimiters, newlines and doubled quotes, as Python's `csv` reads them. Empty lines are left
    out.

    Args:
        url: as in `files`.
        size: records of a piece; the last one of a file has fewer. A compressed file is one piece.
        delimiter: one ASCII character.

    Raises:
        JobError: as `files`; a record has not as many fields as the header; the text is not UTF-8.
    """
    return Csv(url, size, delimiter)


def _csv_error(path: str, error: standard.Error, at: int) -> JobError:
    return JobError(f"Python's csv cannot read {path}, from byte {at} on: {error}")


class _CountedLines:
    """Decodes lines for Python's csv reader, which takes as many as it needs, and counts the bytes taken."""

    def __init__(self, lines: Iterator[bytes], path: str) -> None:
        self.bytes = 0
        self._lines, self._path = lines, path

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.bytes += len(line)
            yield decode_line(line, self._path)


def _record_ends(file: IO[bytes], at: int, delimiter: str) -> Iterator[NDArray[np.int64]]:
    """Yields the bytes behind the records, block by block: they end at newlines with an even number of quotes before.

    Raises:
        _UnusualQuotes: an opening quote does not begin a field.
    """
    within, before = False, _NEWLINE
    beginning = (ord(delimiter), _NEWLINE, _RETURN, _QUOTE)
    while block := file.read(BLOCK_BYTES):
        data = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE)
        quotes = np.flatnonzero(data == _QUOTE)
        if len(quotes):
            opening = quotes[within::2]
            left = np.where(opening > 0, data[opening - 1], before)
            if not np.isin(left, beginning).all():
                raise _UnusualQuotes
            ends = ends[(np.searchsorted(quotes, ends) + within) % 2 == 0]
            within ^= len(quotes) % 2 == 1
        elif within:
            ends = ends[:0]
        yield ends + (at + 1)
        at, before = at + len(block), block[-1]
    if before != _NEWLINE or within:
        yield np.array([at])


def _parsed_ends(file: IO[bytes], at: int, delimiter: str) -> Iterator[Sequence[int]]:
    """Yields the bytes behind the records, one by one, as Python's csv reader finds them: slower, and always right."""
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for line in file:
            read += len(line)
            yield line.decode("latin-1")  # the signs that count are the same in UTF-8

    for _ in standard.reader(lines(), delimiter=delimiter):
        yield [at + read]
