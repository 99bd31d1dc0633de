"""A primary's files of checkpoints.

    a primary read a commit ──► its file, in a thread ──► `WrittenFiles` ──► the leader (`checkpoint_completer.py`)

A file that cannot be written costs only that checkpoint. If writing takes longer than the epochs between two
checkpoints, the epochs wait, and `status` says so. A slow leader delays nothing: it later gets several reports at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.errors import CheckpointError, DecodeError, TransportError
from taskgraph.node.primary.failed_checkpoints import unwritten_text
from taskgraph.protocol.checkpointing import is_due, is_open, select_sparse
from taskgraph.protocol.messages import Encoded, Stamp, WrittenFile, WrittenFiles

if TYPE_CHECKING:
    from taskgraph.node.services import NodeServices

__all__ = ["CheckpointWriter"]

_MAX_UNREPORTED = 16
"""The most files, written or failed, that wait to be reported. The leader considers as many."""
_MAX_REPORTED = 16
"""The most reported files that a primary reports again to a new leader."""


class CheckpointWriter:
    """Writes one primary's files of checkpoints, and reports them to the leader."""

    def __init__(self, node: NodeServices, task: int) -> None:
        self._node = node
        self._task = task
        self._waiting: tuple[Stamp, Callable[[], Encoded]] | None = None
        self._begun = Stamp(0, 0)
        self._writing: Stamp | None = None
        self._written: dict[Stamp, WrittenFile] = {}
        self._reported: set[tuple[Stamp, int]] = set()  # (file, revision of the leader that knows of it)
        self._changed = asyncio.Event()
        self._failing = False

    def is_due(self, boundary: Stamp, *, stateful: bool) -> bool:
        """True if a boundary is to be written once it is committed, and is not the last one that was queued."""
        spec = self._node.spec
        return (
            spec.checkpoint is not None
            and (stateful or self._task == 0)
            and boundary != self._begun
            and is_due(self._node.keeper.view, boundary, spec.checkpoint_every)
        )

    @property
    def stage(self) -> str:
        """Names what callers of `wait_for_room` wait for."""
        epoch = self._writing.epoch if self._writing is not None else 0
        return f"its file of the checkpoint of epoch {epoch}: {self._node.checkpoints.store} is slow"

    async def wait_for_room(self) -> None:
        """Waits while one file is being written and another is queued, so that the queue stays short."""
        while self._waiting is not None:
            self._changed.clear()
            await self._changed.wait()

    def queue(self, stamp: Stamp, value: Callable[[], Encoded]) -> None:
        """Queues a boundary for writing. `value`, called in a thread, returns it encoded."""
        self._begun = stamp
        self._waiting = (stamp, value)
        self._changed.set()

    async def write(self) -> None:
        """Writes the queued boundaries as files, until cancelled; skips undone ones."""
        while True:
            while self._waiting is None:
                self._changed.clear()
                await self._changed.wait()
            (stamp, value), self._waiting = self._waiting, None
            self._changed.set()
            if not is_open(self._node.keeper.view, stamp):
                continue  # undone meanwhile
            self._writing = stamp
            await self._node.point("checkpoint", self._task, stamp.epoch)
            await self._write_file(stamp, value)
            self._writing = None
            self._changed.set()
            self._node.keeper.notify_later()

    async def _write_file(self, stamp: Stamp, value: Callable[[], Encoded]) -> None:
        """Writes one file, and notes it, or that it failed, to be reported to the leader."""
        checkpoints = self._node.checkpoints
        name = checkpoints.name_of(stamp)
        try:
            info = await checkpoints.call(lambda: checkpoints.store.write(name, self._task, value()))
        except (OSError, CheckpointError, DecodeError, MemoryError) as error:
            # On a full disk every checkpoint fails: etcd keeps the first event.
            again, self._failing = self._failing, True
            self._node.events.emit(
                "checkpoint failed",
                f"checkpoint of epoch {stamp.epoch}: the file of task {self._task} "
                f"{unwritten_text(f'{checkpoints.store}/{name}', error)}",
                task=self._task,
                epoch=stamp.epoch,
                transient=again,
            )
            # Reported, too: the others' files of that checkpoint would take the room of the next.
            self._written[stamp] = WrittenFile(stamp, self._task, 0, "")
        else:
            self._failing = False
            self._written[stamp] = WrittenFile(stamp, self._task, info.size, info.digest)
        unreported = self._unreported_files(self._leader_revision)
        reported = sorted(self._written.keys() - set(unreported))
        kept = {*select_sparse(unreported, _MAX_UNREPORTED), *reported[-_MAX_REPORTED:]}
        self._written = {at: written for at, written in self._written.items() if at in kept}

    async def report(self) -> None:
        """Reports files to the leader, and to every new leader again, until etcd's record shows a checkpoint with them.

        Files are reported in the order they were written, all unreported ones together: one by one, short
        epochs would outrun the reports.
        """
        keeper = self._node.keeper
        while True:
            await self._node.wait_while_paused()
            view, leader = keeper.view, self._leader_revision
            self._written = {stamp: w for stamp, w in self._written.items() if is_open(view, stamp)}
            self._reported = {(stamp, of) for stamp, of in self._reported if stamp in self._written and of == leader}
            unreported = self._unreported_files(leader)
            if not unreported or not leader:
                await keeper.wait_until(
                    lambda _: bool(self._leader_revision and self._unreported_files(self._leader_revision))
                )
            elif await self._send_to_leader(WrittenFiles(tuple(self._written[stamp] for stamp in unreported))):
                self._reported.update((stamp, leader) for stamp in unreported)

    async def _send_to_leader(self, written: WrittenFiles) -> bool:
        """Reports files to the leader once. False, after a short pause, if the leader cannot be reached."""
        try:
            await self._node.router.to_primary(0, lambda: written, timeout_s=self._node.settings.call_s)
        except TransportError as error:
            self._node.log.debug("task %d: the leader does not hear of its files: %s", self._task, error)
            await self._node.short_pause()
            return False
        return True

    @property
    def _leader_revision(self) -> int:
        """The revision of the leader's takeover; 0: no leader."""
        leader = self._node.keeper.view.primaries.get(0)
        return leader.mod_revision if leader is not None else 0

    def _unreported_files(self, leader: int) -> list[Stamp]:
        """Returns the files not reported to the leader of this revision, in the order they were written."""
        return [stamp for stamp in self._written if (stamp, leader) not in self._reported]
