"""Reads the job's checkpoints; `taskgraph.checkpoint` knows the files and their contents.

Everything that blocks runs in threads of its own, so that neither the event loop nor user code waits for storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from taskgraph.checkpoint.manifest import CheckpointName, ExpectedJob, MissingFile
from taskgraph.checkpoint.places import Place
from taskgraph.checkpoint.store import CheckpointStore, NewestCheckpoint
from taskgraph.errors import CheckpointError
from taskgraph.node.usercode.threads import Threads
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded, Stamp
from taskgraph.protocol.records import CheckpointRecord

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["FILES_AT_A_TIME", "SAME_PLACE", "CheckpointReader"]

R = TypeVar("R")

FILES_AT_A_TIME = 4
"""Files that a node writes or reads at a time; more make no disk faster."""
SAME_PLACE = "do all hosts see the same place?"


class CheckpointReader:
    """Reads the job's checkpoints; its calls run in threads."""

    def __init__(self, node: NodeCore, threads: Threads, place: Place | None = None) -> None:
        self._node = node
        self._threads = threads
        self._place = place
        self._store: CheckpointStore | None = None

    @property
    def store(self) -> CheckpointStore:
        """The store of the job's checkpoints, made at the first use. Only for a job that keeps checkpoints."""
        spec = self._node.spec
        if self._store is None:
            assert spec.checkpoint is not None
            expected = ExpectedJob(
                job=spec.name,
                fingerprint=spec.fingerprint,
                tasks=spec.tasks,
                services=spec.services,
                any_driver=spec.checkpoint_changed,
            )
            self._store = CheckpointStore(
                spec.checkpoint, expected, place=self._place, by=self.writer_of(self._node.id)
            )
        return self._store

    @staticmethod
    def writer_of(node: str) -> str:
        """Returns the part of a node's id that marks its unfinished files."""
        return node.rpartition("-")[2]

    async def call(self, function: Callable[[], R]) -> R:
        """Calls a function in a thread, since it may block, and returns its result."""
        return await self._threads.run(function)

    def name_of(self, boundary: Stamp) -> CheckpointName:
        """Returns the name of the checkpoint of a boundary."""
        spec = self._node.spec
        return CheckpointName(spec.checkpoint_series, boundary.attempt, boundary.epoch, spec.run[:8])

    async def newest_usable(self, pointer: CheckpointRecord) -> NewestCheckpoint:
        """Returns the newest checkpoint of which every file can be read, of those that `pointer`, etcd's record, names;
        and why newer ones were refused.
        """

        def find_newest() -> NewestCheckpoint:
            found = self.store.find_newest((pointer.name, *pointer.before))
            if found.manifest is None and found.was_refused_for(MissingFile):
                *others, last = found.refused
                found = replace(found, refused=(*others, f"{last}: {self._why_missing(pointer)}"))
            return found

        return await self.call(find_newest)

    def _why_missing(self, pointer: CheckpointRecord) -> str:
        """Says why a file may be missing: another run that keeps checkpoints here, or what to check."""
        current, mine = CheckpointName.parse(pointer.name), self._node.spec.run[:8]
        with contextlib.suppress(OSError):
            for other in self.store.names_of_other_runs(mine, (pointer.name, *pointer.before)):
                # Unfinished files of earlier runs are older than this run, or belong to the run that it resumes.
                if current is not None and other > current and other.run != current.run:
                    return (
                        f"another run ({other.run}) keeps checkpoints of this job there, too, and may have removed it"
                    )
        return SAME_PLACE

    async def boundary_of(self, task: int, term: int) -> Boundary | None:
        """Reads the committed boundary of a task from its checkpoint. None: there is none, or it has no such file.

        Raises:
            CheckpointError: the file is missing, torn, corrupt or foreign.
        """
        view = self._node.keeper.view
        if not view.is_checkpointed or view.checkpoint is None or view.epoch is None:
            return None
        record, lineage = view.checkpoint.record, view.epoch.record.lineage

        def read() -> Encoded | None:
            try:
                return self.store.read(self.store.open(record.name), task)
            except MissingFile as error:
                raise CheckpointError(f"{error}: {self._why_missing(record)}") from error

        value = await self.call(read)
        # After a roll-back the boundary belongs to the attempt that began then: older ones were undone.
        stamp = Stamp(max(record.attempt, lineage), record.epoch)
        return Boundary(stamp, term, value) if value is not None else None
