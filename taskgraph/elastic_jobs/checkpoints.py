"""Checkpoints of an elastic job: the state, the position and the reports, and no workers. Any number goes on from one.

    state between two steps ──stable──► file ──► staged manifest ──► pointer in etcd ──► final manifest

The most senior worker of the view writes them, and the final manifest of one whose writer died before that. The
pointer's transaction compares the view, so a worker that was taken for lost points to nothing. Files and manifests are
those of task graphs (`taskgraph.checkpoint`), of one task.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any

from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.errors import CheckpointError, CoordinationError, DecodeError, JobError
from taskgraph.graph.values import decode, encode
from taskgraph.node.primary.checkpoint_reader import CheckpointReader
from taskgraph.node.primary.failed_checkpoints import FailedCheckpoints, unwritten_text
from taskgraph.protocol.elastic import transactions
from taskgraph.protocol.elastic.succession import all_drain
from taskgraph.protocol.messages import Encoded, Stamp, StateCopy
from taskgraph.protocol.records import CheckpointRecord

if TYPE_CHECKING:
    from taskgraph.checkpoint.places import Place
    from taskgraph.elastic_jobs.interface import WorkerNode

__all__ = ["Checkpoints"]


def _decode_checkpoint(value: Encoded) -> Any:
    """Decodes a checkpoint; imports PyTorch if its tensors are in it, and user code has not imported it yet."""
    pytorch()
    try:
        return decode(value)
    except DecodeError:
        if importlib.util.find_spec("torch") is None:
            raise
        import taskgraph.torch  # noqa: F401  # declares how tensors travel

        return decode(value)


class Checkpoints:
    """The checkpoints of one elastic job, as one worker reads and writes them.

    Args:
        place: where checkpoints are; None: the place of the job's URL.

    Attributes:
        writing: this worker writes a checkpoint.
    """

    def __init__(self, node: WorkerNode, place: Place | None) -> None:
        self._node = node
        self.writing = False
        self._reader = CheckpointReader(node, node.file_threads, place)
        self._finished = ""  # the checkpoint that has its final manifest
        self._failures = FailedCheckpoints(node)
        self._failed = ""  # what failed last, until nothing fails

    async def read(self) -> StateCopy | None:
        """Returns the state in the checkpoint that the pointer in etcd names; None: there is no pointer.

        Raises:
            JobError: the checkpoint cannot be read here.
        """
        pointer = self._node.keeper.view.checkpoint
        if pointer is None:
            return None
        store, name = self._reader.store, pointer.record.name
        try:
            value = await self._reader.call(lambda: store.read(store.open(name), 0))
        except (OSError, CheckpointError) as error:
            raise JobError(f"the checkpoint {name} cannot be read: {error}. Do all hosts see the same place?") from None
        if value is None:
            raise JobError(f"the checkpoint {name} has no state")
        read = _decode_checkpoint(value)
        return StateCopy(read["step"], read["position"], read["tag"], encode(read["state"]), tuple(read["reports"]))

    async def run(self) -> None:
        """Writes a checkpoint every `checkpoint_every_s`, while this is the most senior worker, until cancelled.

        Writes one at once when all nodes drain, which may leave then.
        """
        node, hurried = self._node, False
        if node.spec.checkpoint is None or node.job.elastic is None:
            return
        while True:
            hurried = await self._wait_until_due(node.job.elastic.checkpoint_every_s, hurry=not hurried)
            if self._is_writer and node.has_begun() and not node.paused:
                mark = node.trace.begin(of_step=False)
                copy = await node.copied_state()
                self.writing = True
                try:
                    if copy is not None:
                        await self._write(copy)
                        node.trace.keep(mark, "checkpoint", f"checkpoint after step {copy.step}")
                finally:
                    self.writing = False
                    if node.draining:
                        node.keeper.notify_later()  # it may leave now

    async def _wait_until_due(self, every_s: float, *, hurry: bool) -> bool:
        """Waits until the next checkpoint is due; then False. With `hurry`: True as soon as all nodes drain."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await self._node.keeper.wait_until(lambda v: hurry and self._is_writer and all_drain(v), structure=True)
                return True
        return False

    async def write_missing_manifests(self) -> None:
        """On the most senior worker, writes a final manifest that a dead writer left out; until cancelled."""
        node, keeper = self._node, self._node.keeper
        if node.spec.checkpoint is None:
            return
        while True:
            await keeper.wait_until(lambda v: self._is_writer and self._unfinished_checkpoint != "", structure=True)
            name = self._unfinished_checkpoint
            with contextlib.suppress(OSError, CheckpointError):  # the next checkpoint takes its place
                await self._reader.call(partial(self._reader.store.finish, name))
            self._finished = name

    @property
    def _is_writer(self) -> bool:
        """True if this is the most senior worker of the view in etcd."""
        known = self._node.keeper.view.workers
        return known is not None and known.record.workers[0][0] == self._node.id

    @property
    def _unfinished_checkpoint(self) -> str:
        """The checkpoint that the pointer in etcd names, if its final manifest may be missing; "": there is none."""
        pointer = self._node.keeper.view.checkpoint
        return pointer.record.name if pointer is not None and pointer.record.name != self._finished else ""

    def _is_useful(self, copy: StateCopy, lineage: int) -> bool:
        """True if the job runs in this lineage, and has no checkpoint that is as new as this state."""
        job = self._node.keeper.view
        if not job.running or job.workers is None or job.workers.record.lineage != lineage:
            return False
        return job.checkpoint is None or job.checkpoint.record.epoch < copy.position

    async def _write(self, copy: StateCopy) -> None:
        """Writes a state as a checkpoint, and points to it in etcd, unless the job has ended or has one as new."""
        node, job, store = self._node, self._node.keeper.view, self._reader.store
        if job.epoch is None or job.workers is None or not self._is_useful(copy, job.workers.record.lineage):
            return
        lineage = job.workers.record.lineage
        state = decode(copy.value)
        content = {
            "step": copy.step,
            "position": copy.position,
            "tag": copy.tag,
            "state": state,
            "reports": list(node.reports.packed()),
        }
        value: Encoded = encode(content, what="the checkpoint")
        attempt = job.epoch.record.attempt
        name = self._reader.name_of(Stamp(attempt, copy.position))
        before = job.checkpoint.record if job.checkpoint is not None else None
        kept = (before.name, *before.before)[: node.settings.checkpoints_kept - 1] if before is not None else ()
        writer = node.new_writer()
        record = CheckpointRecord(epoch=copy.position, attempt=attempt, name=str(name), before=kept, writer=writer)
        try:
            mark = node.trace.begin(of_step=False)
            info = await self._reader.call(lambda: store.write(name, 0, value))
            node.trace.keep(mark, "checkpoint", "writes its file", size_bytes=value.size_bytes)
            await self._reader.call(lambda: store.stage(store.make_manifest(name, [info], kept)))
            if not self._is_useful(copy, lineage):
                return  # the job ended meanwhile, or went back, or another worker was faster
            txn = transactions.point_to_checkpoint(job, record, node=node.id, node_revision=node.node_revision)
            if await node.transact(txn, key=job.keys.checkpoint, writer=writer) is None:
                await node.keeper.refresh()
                return
        except (OSError, CheckpointError, CoordinationError) as error:
            self._emit_failed(copy, unwritten_text(f"{store}/{name}", error))
            self._failures.note_failed(f"after step {copy.step}: {error}")
            try:
                await self._reader.call(partial(store.discard, name, lambda: self._is_writer and not node.paused))
            except OSError as stays:  # the next complete checkpoint removes it
                node.log.info("files of checkpoint %s cannot be removed: %s", name, stays)
            return
        self._failures.note_complete()
        failed = "its last manifest is not there"
        try:
            await self._reader.call(lambda: store.finish(str(name)))
            self._finished = str(name)
            node.events.emit("checkpoint", f"checkpoint after step {copy.step}: {store}/{name}")
            failed = "it is complete, but some before it cannot be removed"
            await self._reader.call(lambda: store.keep_only((str(name), *kept), str(name)))
            self._failed = ""
        except (OSError, CheckpointError) as error:
            self._emit_failed(copy, f"{failed}: {error}", failed)

    def _emit_failed(self, copy: StateCopy, text: str, failed: str = "it is not written") -> None:
        """Emits a failure; etcd keeps the first of equal ones in a row: on a full disk every checkpoint fails."""
        again, self._failed = self._failed == failed, failed
        self._node.events.emit("checkpoint failed", f"checkpoint after step {copy.step}: {text}", transient=again)
