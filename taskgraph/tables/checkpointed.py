"""Tables in a job's own checkpoints, for programs that are no part of the job.

A task graph has a file for each server of a table, with that server's rows. An elastic job has one file, with the rows
of all tables beside its state. A reader need not have the job's classes: they are not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taskgraph.checkpoint.manifest import CheckpointName, ExpectedJob, Manifest, MissingFile
from taskgraph.checkpoint.places import Place
from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.errors import CheckpointError, DecodeError, TableError
from taskgraph.graph.outline import decode_untyped
from taskgraph.tables.rows import Ids
from taskgraph.tables.store import store_of

__all__ = ["checkpointed_rows"]

_TABLE = "table "
"""Titles of tables begin with it: those of services, and of what travels with the state of an elastic job."""
_TRIES = 3
"""The job may remove a checkpoint that is being read, once it has newer ones."""


def checkpointed_rows(place: Place, job: str, which: CheckpointName | None, table: str) -> tuple[Ids, NDArray[Any]]:
    """Reads from a checkpoint the rows of a table that somebody had pushed to.

    Args:
        place: of the checkpoints.
        job: the job's folder there.
        which: a checkpoint of the job; None: the newest complete one.
        table: its name.

    Returns:
        The ids, ascending, of shape (n,); and their rows, of shape (n, width).

    Raises:
        TableError: the checkpoint has no such table.
        CheckpointError: there is no complete checkpoint, or it is damaged or of another version.
    """
    kept = CheckpointStore("", ExpectedJob(job=job, fingerprint="", tasks=0), place=place)
    for _ in range(_TRIES):
        name = which or _newest(kept)
        try:
            return _rows(kept, kept.open_any(str(name)), table)
        except MissingFile:
            if which is not None or _newest(kept) == name:
                raise
    raise CheckpointError(
        f"{kept}: the job removes its checkpoints faster than they can be read: let it keep more, with "
        f"Settings(checkpoints_kept=...)"
    )


def _newest(kept: CheckpointStore) -> CheckpointName:
    """Returns the newest complete checkpoint. Raises CheckpointError if there is none."""
    try:
        names, found = kept.complete_names(), kept.list_folder()
    except OSError as error:
        raise CheckpointError(f"{kept} cannot be read: {error}") from error
    if not names and any(map(CheckpointName.parse, found)):
        raise CheckpointError(f"{kept} has no complete checkpoint yet: none of {', '.join(found)} has a manifest.json")
    if not names:
        raise CheckpointError(
            f"{kept} has no complete checkpoint; there is: {', '.join(found) or 'nothing'}. Give the folder of a job, "
            f"{{place}}/{{job}}, or that of one of its checkpoints"
        )
    return names[0]


def _rows(kept: CheckpointStore, manifest: Manifest, table: str) -> tuple[Ids, NDArray[Any]]:
    """Returns the ids and rows of a table in one checkpoint, by ascending id."""
    try:
        # `map` drops the file of one server before it reads the next.
        parts = list(map(_live_rows, _captured(kept, manifest, table)))
    except DecodeError as error:
        raise CheckpointError(f"{kept}/{manifest.name}: {error}") from error
    ids, rows = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(ids)
    return ids[order], rows[order]


def _live_rows(captured: Mapping[str, Any]) -> tuple[Ids, NDArray[Any]]:
    """Returns the ids and rows that a store had when it was captured."""
    store = store_of(captured)
    return store.ids, store.pull(store.ids)


def _captured(kept: CheckpointStore, manifest: Manifest, table: str) -> Iterator[Mapping[str, Any]]:
    """Yields what `store_of` takes, from the file of each server of the table; an elastic job has one for all rows."""
    if tasks := manifest.tasks_of(f"{_TABLE}{table}"):
        for task in tasks:
            yield _content(kept, manifest, task)["state"]
        return
    known = [repr(title.removeprefix(_TABLE)) for title in manifest.services if title.startswith(_TABLE)]
    if not manifest.services and "position" in (whole := _content(kept, manifest, 0)):  # an elastic job
        carried = whole["state"]["carried"]
        if (captured := carried.get(f"{_TABLE}{table!r}")) is not None:
            yield captured
            return
        known = [title.removeprefix(_TABLE) for title in carried if title.startswith(_TABLE)]
    raise TableError(
        f"{kept}/{manifest.name} has no table {table!r}; the tables in it are: {', '.join(known) or 'none'}"
    )


def _content(kept: CheckpointStore, manifest: Manifest, task: int) -> dict[str, Any]:
    """Returns the content of a task's file in a checkpoint."""
    value = kept.read(manifest, task)
    return {} if value is None else decode_untyped(value)
