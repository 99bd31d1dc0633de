"""Row groups of Parquet files as a source, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from taskgraph.errors import JobError
from taskgraph.sources.locations import Url, find_files, open_file

__all__ = ["Parquet", "parquet"]

_Group = tuple[str, int | None, int]
"""(path, size of the file in bytes or None, number of the row group)."""


class Parquet:
    """The source that `parquet` makes; the same arguments."""

    def __init__(self, url: Url, columns: Sequence[str] | None) -> None:
        self._url = url
        if isinstance(columns, str) or (columns is not None and not all(isinstance(name, str) for name in columns)):
            raise JobError(f"tg.parquet(columns={columns!r}): must be a list of names, or None for all")
        self._columns = None if columns is None else list(columns)

    def pieces(self) -> list[_Group]:
        """Returns the row groups that are not empty, sorted by path. Reads the end of each file."""
        arrow = _load_pyarrow()
        found: list[_Group] = []
        for path, size in find_files(self._url, "tg.parquet"):
            with open_file(path, size) as file:
                footer = arrow.ParquetFile(file).metadata
                groups = range(footer.num_row_groups)
                found += [(path, size, group) for group in groups if footer.row_group(group).num_rows]
        return found

    def read(self, piece: _Group, /) -> Iterator[dict[str, Any]]:
        """Yields the rows of a row group as dicts."""
        path, size, group = piece
        arrow = _load_pyarrow()
        with open_file(path, size) as file:
            opened = arrow.ParquetFile(file)
            if missing := set(self._columns or ()) - set(opened.schema_arrow.names):
                raise JobError(
                    f"tg.parquet(columns=...): {path} has no column {min(missing)!r}, only "
                    f"{', '.join(map(repr, opened.schema_arrow.names))}"
                )
            for batch in opened.iter_batches(row_groups=[group], columns=self._columns, use_threads=False):
                yield from batch.to_pylist()


def parquet(url: Url, columns: Sequence[str] | None = None) -> Parquet:
    """Row groups of Parquet files as a source: rows are dicts of Python values. Needs the extra `parquet`.

    Args:
        url: as in `files`.
        columns: which to read; None: all.

    Raises:
        JobError: as `files`; a file is no Parquet, or lacks a column; pyarrow is not installed.
    """
    return Parquet(url, columns)


def _load_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise JobError("tg.parquet(...) needs pyarrow: pip install 'taskgraph-aio[parquet]'") from None
    return pyarrow.parquet
