"""Tables as Parquet files: column `id`, and a column for each number of a row, `0`, `1`, ... Ids ascend.

So any tool reads them, without taskgraph: `pandas.read_parquet(url)`, `polars.read_parquet(url)`. `read_table` also
reads tables of a job's own checkpoints.
"""

from __future__ import annotations

import os
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from taskgraph.checkpoint.manifest import CheckpointName
from taskgraph.checkpoint.places import Place, open_place
from taskgraph.errors import JobError, TableError
from taskgraph.tables.checkpointed import checkpointed_rows
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
    place, name = _open_folder_of(url, "save")
    arrow = _import_pyarrow("save")
    if rows.shape[1] > _MOST_COLUMNS:
        raise TableError(f"save({url!r}): {rows.shape[1]} columns are too many for a Parquet file")
    order = np.argsort(ids)
    columns = {"id": ids[order], **{str(at): rows[order, at] for at in range(rows.shape[1])}}
    whole = BytesIO()
    arrow.parquet.write_table(arrow.table(columns), whole)
    place.write(name, [whole.getbuffer()])


def read_table(url: str, name: str | None = None) -> DataFrame:
    """Reads a table: a file that `table.save(url)` wrote, or, by its name, one of a job's own checkpoint. Needs pandas.

    Args:
        url: the file, as it was given to `save`; it needs the extra `parquet`. With a name: the folder of a job in the
            place of its checkpoints, of which the newest complete one is read, or the folder of one of them.
        name: of the table. None: `url` is a file.

    Returns:
        A DataFrame with the ids as its index, ascending, and columns 0 to width - 1, of the table's dtype. It has the
        rows that somebody had pushed to, without the optimizer's slots.

    Raises:
        TableError: there is no such file or table, or it is no saved table; pandas or pyarrow is not installed.
        CheckpointError: there is no complete checkpoint, or it is damaged, or another version of taskgraph wrote it.
    """
    if name is not None:
        return _read_from_job(url, name)
    place, file = _open_folder_of(url, "read_table")
    arrow = _import_pyarrow("read_table")
    try:
        found = arrow.parquet.read_table(arrow.BufferReader(place.read(file, _LARGEST_BYTES)))
        frame = found.to_pandas()
    except ImportError:
        raise TableError("read_table needs pandas: pip install pandas") from None
    except (OSError, arrow.ArrowException) as error:
        raise TableError(
            f"read_table({url!r}): it cannot be read: {error}. If it is a job's checkpoint, say which table of it: "
            f"read_table({url!r}, name)"
        ) from None
    if list(frame.columns) != ["id", *map(str, range(frame.shape[1] - 1))]:
        raise TableError(f"read_table({url!r}): it is no table that save(url) wrote: use pandas.read_parquet(url)")
    frame = frame.set_index("id")
    frame.columns = range(frame.shape[1])
    return frame


def _read_from_job(url: str, name: str) -> DataFrame:
    """Reads a table of a job's own checkpoint."""
    try:
        from pandas import DataFrame, Index
    except ImportError:
        raise TableError("read_table needs pandas: pip install pandas") from None
    folder, _, last = _absolute_url(url, "read_table", "a job's folder").rstrip("/").rpartition("/")
    which = CheckpointName.parse(last)
    if which is not None:
        folder, _, last = folder.rpartition("/")
    ids, rows = checkpointed_rows(_open(folder, f"read_table({url!r})"), last, which, name)
    return DataFrame(rows, index=Index(ids, name="id"))


def check_saving(url: str) -> None:
    """Raises TableError if the URL names no place for a file, or pyarrow is missing; before rows are asked for."""
    _open_folder_of(url, "save")
    _import_pyarrow("save")


def _open_folder_of(url: str, call: str) -> tuple[Place, str]:
    """Returns the folder that a file is in, opened, and the file's name. Raises TableError if the URL names no file."""
    folder, _, name = _absolute_url(url, call, "a file").rpartition("/")
    if not name:
        raise TableError(f"{call}({url!r}): must be the path or the URL of a file, not of a folder")
    return _open(folder, f"{call}({url!r})"), name


def _absolute_url(url: str, call: str, what: str) -> str:
    """Returns a URL as given, or a path made absolute. Raises TableError, which says that `url` must name `what`."""
    try:
        path = os.fspath(url)
    except TypeError:
        path = ""
    if not isinstance(path, str) or not path:
        raise TableError(f"{call}({url!r}): must be the path or the URL of {what}")
    return path if path.startswith("file:") or "://" in path else os.path.join(os.getcwd(), path)


def _open(folder: str, call: str) -> Place:
    """Opens a folder. Raises TableError if the URL names no place."""
    try:
        return open_place(folder or "/")
    except JobError as error:
        _, _, why = str(error).partition("): ")
        raise TableError(f"{call}: {why}") from None


def _import_pyarrow(call: str) -> Any:
    """Imports pyarrow, and returns it. Raises TableError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise TableError(f"{call} needs pyarrow: pip install 'taskgraph-aio[parquet]'") from None
    return pyarrow
