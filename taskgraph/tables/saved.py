"""Tables as Parquet files: column `id`, and a column for each number of a row, `0`, `1`, ... Ids ascend.

So any tool reads them, without taskgraph: `pandas.read_parquet(url)`, `polars.read_parquet(url)`.
"""

from __future__ import annotations

import os
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from taskgraph.checkpoint.places import Place, open_place
from taskgraph.errors import JobError, TableError
from taskgraph.tables.rows import Ids

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["check_saving", "read_table", "write_table"]

_LARGEST_BYTES = 1 << 40
_MOST_COLUMNS = 10_000
"""Each column costs the reader some microseconds and a kilobyte."""


def write_table(url: str, ids: Ids, rows: NDArray[Any]) -> None:
    """Writes rows as a Parquet file, whole or not at all, in place of an existing one.

    Args:
        url: a path, or with the extra `checkpoint` a URL that fsspec knows.
        ids: each once, of shape (n,), in any order.
        rows: of shape (n, width).

    Raises:
        TableError: the URL names no place, pyarrow is not installed, or there are too many columns.
        OSError: the file cannot be written.
    """
    place, name = _place(url, "save")
    arrow = _arrow("save")
    if rows.shape[1] > _MOST_COLUMNS:
        raise TableError(f"save({url!r}): {rows.shape[1]} columns are too many for a Parquet file")
    order = np.argsort(ids)
    columns = {"id": ids[order], **{str(at): rows[order, at] for at in range(rows.shape[1])}}
    whole = BytesIO()
    arrow.parquet.write_table(arrow.table(columns), whole)
    place.write(name, [whole.getbuffer()])


def read_table(url: str) -> DataFrame:
    """Reads a table that `table.save(url)` wrote. Needs pandas, and the extra `parquet`.

    Args:
        url: as it was given to `save`.

    Returns:
        A DataFrame with the ids as its index, ascending, and columns 0 to width - 1, of the table's dtype. It has the
        rows that somebody had pushed to.

    Raises:
        TableError: there is no such file, or it is no saved table; pandas or pyarrow is not installed.
    """
    place, name = _place(url, "read_table")
    arrow = _arrow("read_table")
    try:
        found = arrow.parquet.read_table(arrow.BufferReader(place.read(name, _LARGEST_BYTES)))
        frame = found.to_pandas()
    except ImportError:
        raise TableError("read_table needs pandas: pip install pandas") from None
    except (OSError, arrow.ArrowException) as error:
        raise TableError(f"read_table({url!r}): it cannot be read: {error}") from None
    if list(frame.columns) != ["id", *map(str, range(frame.shape[1] - 1))]:
        raise TableError(f"read_table({url!r}): it is no table that save(url) wrote: use pandas.read_parquet(url)")
    frame = frame.set_index("id")
    frame.columns = range(frame.shape[1])
    return frame


def check_saving(url: str) -> None:
    """Raises TableError if no table can be saved there, before its rows are asked for."""
    _place(url, "save")
    _arrow("save")


def _place(url: str, call: str) -> tuple[Place, str]:
    """Returns the folder that a file is in, and the file's name."""
    try:
        path = os.fspath(url)
    except TypeError:
        path = ""
    if not isinstance(path, str) or not path or path.endswith("/"):
        raise TableError(f"{call}({url!r}): must be the path or the URL of a file")
    whole = path if "://" in path else os.path.abspath(path)
    folder, _, name = whole.rpartition("/")
    try:
        return open_place(folder or "/"), name
    except JobError as error:
        _, _, why = str(error).partition("): ")
        raise TableError(f"{call}({url!r}): {why}") from None


def _arrow(call: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise TableError(f"{call} needs pyarrow: pip install 'taskgraph-aio[parquet]'") from None
    return pyarrow
