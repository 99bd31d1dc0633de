"""Writes a checkpoint again for another number of servers of a table: `--resume` may change that.

The files of the user's tasks are copied. Those of a table are read, and each new server gets the rows that are its own
now. The new checkpoint is of the same epoch, and names the run that resumes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from taskgraph.checkpoint.manifest import Manifest
from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded
from taskgraph.tables.moving import move_rows

__all__ = ["move"]


def move(store: CheckpointStore, manifest: Manifest, services: dict[str, int], run: str) -> Manifest:
    """Writes a checkpoint again, with the rows of tables moved to other numbers of servers; returns its manifest.

    Args:
        store: of the job as it is now.
        manifest: a checkpoint of the job with the same tasks of the user, and the same services by title.
        services: title -> count of tasks, as they are now.
        run: the run that is resumed.

    Raises:
        CheckpointError: a file cannot be read.
        OSError: a file cannot be written.
    """
    name = replace(manifest.parsed_name, run=run[:8])
    files = [store.write(name, task, value) for task, value in _moved_values(store, manifest, services)]
    made = store.make_manifest(name, files)
    store.stage(made)
    store.finish(made.name)
    return made


def _moved_values(
    store: CheckpointStore, manifest: Manifest, services: dict[str, int]
) -> Iterator[tuple[int, Encoded]]:
    """Yields number and value of each task that gets a file in the new checkpoint."""
    first = manifest.tasks - sum(manifest.services.values())
    for task in range(first):
        if (value := store.read(manifest, task)) is not None:
            yield task, value
    old = new = first
    for title, count in services.items():
        before = manifest.services[title]
        values = [store.read(manifest, task) for task in range(old, old + before)]
        there = [value for value in values if value is not None]
        if count != before:
            wholes = [decode(value) for value in there]
            states = move_rows([whole["state"] for whole in wholes], count)
            there = [encode({**wholes[0], "state": state}, ordered=True) for state in states]
        yield from enumerate(there, new)
        old, new = old + before, new + count
