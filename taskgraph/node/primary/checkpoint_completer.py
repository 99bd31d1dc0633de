"""The leader's part in checkpoints: it makes a checkpoint of the files that primaries wrote.

    `WrittenFiles`, from every primary (`checkpoint_writer.py`) ──► manifest, pointer, manifest

`protocol.checkpointing` decides which boundaries become checkpoints, and when one is complete. A file that the leader
does not find costs only that checkpoint.

Files that no leader gets reports of were written by dead primaries. After each takeover, its own included, the leader
lists the place and removes files that can never be part of a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.checkpoint.files import FileInfo
from taskgraph.checkpoint.manifest import CheckpointName, Manifest
from taskgraph.errors import CheckpointError
from taskgraph.node.primary.checkpoint_reader import SAME_PLACE
from taskgraph.node.primary.failed_checkpoints import FailedCheckpoints, since_text
from taskgraph.protocol import transactions
from taskgraph.protocol.checkpointing import CheckpointCollector, is_open
from taskgraph.protocol.messages import Accepted, Stamp, WrittenFile, WrittenFiles
from taskgraph.protocol.records import CheckpointRecord, name_of

if TYPE_CHECKING:
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.services import NodeServices

__all__ = ["CheckpointCompleter"]

_RETRY_S = 1.0
"""Pause after the place refused a manifest."""
_LOOK_AGAIN_S = 1.0
"""Pause before the leader looks again for a missing file: some stores list files a moment late."""
_MIB = 1 << 20


class CheckpointCompleter:
    """Completes checkpoints: writes manifests, and the pointer (etcd's record of the newest one); removes old ones."""

    def __init__(self, node: NodeServices, primary: Primary) -> None:
        self._node = node
        self._primary = primary
        self._collected = CheckpointCollector(node.job.all_tasks)
        self._wake = asyncio.Event()
        self._failed: dict[str, int] = {}  # last failures -> the checkpoint's epoch at which each was emitted
        self._cleaned = False  # True once files of earlier runs are removed
        self._others: set[str] = set()  # other runs in the same place that have been emitted
        self._failures = FailedCheckpoints(node)
        self._last_given_up = Stamp(0, 0)
        self._stamp_at_look = primary.took_over_at  # the stamp at work at the last look at terms, or an earlier one
        self._terms: dict[int, int] = {}
        self._terms_generation = 0  # the revision of `generation` at that look
        self._sweep_wanted = asyncio.Event()  # there may be new useless files
        self._removing = asyncio.Lock()
        self._collected.note_primary(0, primary.took_over_at)
        self._finished = ""  # the last checkpoint whose manifest was written again after the pointer

    def note_files(self, message: WrittenFiles) -> Accepted:
        """Notes the files that a primary wrote, or could not write, and wakes `run` to complete checkpoints."""
        for written in message.files:
            self._collected.note_file(written)
        self._wake.set()
        return Accepted(self._primary.term)

    async def run(self) -> None:
        """Completes checkpoints whose files are all written, and gives others up, until cancelled."""
        stop = self._node.keeper.on_change(self._wake.set)
        try:
            await self._node.keeper.wait_for_revision(self._primary.revision)
            self._emit_short_terms()
            while True:
                self._wake.clear()
                await self._node.wait_while_paused()
                view = self._node.keeper.view
                self._note_takeovers()
                if view.checkpoint is not None and view.checkpoint.record.name != self._finished:
                    # An earlier leader may have died between pointer and last manifest; or the disk was full.
                    await self._finish(view.checkpoint.record)
                await self._give_up()
                ready = self._collected.find_complete(self._node.keeper.view)
                if ready is not None and not await self._complete(*ready):
                    await asyncio.sleep(_RETRY_S)
                    continue
                await self._wake.wait()
        finally:
            stop()

    def _note_takeovers(self) -> None:
        """Notes takeovers: a new primary writes no files of boundaries that committed before its term."""
        view = self._node.keeper.view
        if view.generation_revision != self._terms_generation:  # every takeover writes it
            terms = {task: primary.record.term for task, primary in view.primaries.items()}
            for task, term in terms.items():
                if term > self._terms.get(task, term):
                    self._collected.note_primary(task, self._stamp_at_look)
            self._terms, self._terms_generation = terms, view.generation_revision
            self._sweep_wanted.set()
        if view.stamp is not None:
            self._stamp_at_look = view.stamp

    async def sweep(self) -> None:
        """Removes useless files after takeovers, until cancelled; beside `run`, since the place may be slow."""
        while True:
            await self._sweep_wanted.wait()
            self._sweep_wanted.clear()
            await self._remove_useless_files()

    async def _remove_useless_files(self) -> None:
        """Removes the files of checkpoints that can no longer become complete, of all nodes, reported or not."""
        node, view, checkpoints, spec = self._node, self._node.keeper.view, self._node.checkpoints, self._node.spec
        store = checkpoints.store
        lacking: tuple[Stamp, int] | None = None
        stays: OSError | None = None
        try:
            names = await checkpoints.call(lambda: store.names_of_run(spec.checkpoint_series, spec.run[:8]))
        except OSError as error:
            names, stays = [], error
        for name in names:
            # The present state: once a checkpoint is complete, its reports are dropped.
            newest = CheckpointName.parse(view.checkpoint.record.name) if view.checkpoint is not None else None
            if newest is not None and name <= newest:
                continue  # it is removed with that one, or kept
            stamp = Stamp(name.attempt, name.epoch)
            if (task := self._collected.blocking_task(view, stamp)) is None:
                continue
            if task != 0:
                lacking = stamp, task
            await node.wait_while_paused()
            try:
                async with self._removing:
                    await checkpoints.call(partial(store.remove_unfinished, name, self._may_write, self._leads))
            except OSError as error:  # it must not stop the others
                stays = stays or error
        if stays is not None:
            node.log.info("files of incomplete checkpoints cannot be removed: %s", stays)
        if lacking is not None and lacking[0] > self._last_given_up:
            self._count_given_up(*lacking)

    def _may_write(self, task: int, writer: str) -> bool:
        """True if the writer of a task's file is its primary, which may still write. May be called in any thread."""
        primary = self._node.keeper.view.primary_node(task)
        return primary is not None and self._node.checkpoints.writer_of(primary) == writer

    def _leads(self) -> bool:
        """True if this node leads, as far as it knows. May be called in any thread."""
        return not self._node.paused and self._node.keeper.view.is_primary(0, self._node.id, self._primary.term)

    def _emit_short_terms(self) -> None:
        """Emits an event if terms of earlier leaders were too short for any checkpoint."""
        node, pointer, at = self._node, self._node.keeper.view.checkpoint, self._primary.took_over_at
        base, term = (pointer.record.epoch, pointer.record.term) if pointer is not None else (0, 1)
        every, leaders = node.spec.checkpoint_every, self._primary.term - max(1, term)
        due = (at.epoch - 1) // every - base // every
        if leaders < 2 or leaders & (leaders - 1) or due < 2:
            return  # like failed ones
        node.events.emit(
            "no checkpoint",
            f"no checkpoint is complete {since_text(node)}: {due} were due, and {leaders} times in a row task 0, which "
            f"leads, got another primary before one was: nodes end, or hand tasks over, sooner than "
            f"{node.checkpoints.store} takes the files of one",
            epoch=at.epoch,
        )

    async def _give_up(self) -> None:
        """Removes reported files of checkpoints that cannot become complete, to make room for the next."""
        node, checkpoints, view = self._node, self._node.checkpoints, self._node.keeper.view
        for stamp, task in self._collected.give_up(view).items():
            name, still = checkpoints.name_of(stamp), partial(self._may_give_up, stamp)
            await node.wait_while_paused()
            try:
                await checkpoints.call(partial(checkpoints.store.discard, name, still))
            except OSError as error:  # the next complete checkpoint removes it; the failure was emitted
                node.log.info("files of checkpoint %s cannot be removed: %s", name, error)
            if task is not None and stamp > self._last_given_up:
                self._count_given_up(stamp, task)

    def _count_given_up(self, stamp: Stamp, task: int) -> None:
        """Counts a checkpoint that failed, for want of the file of a task."""
        self._last_given_up = stamp
        last = f"of epoch {stamp.epoch}, because the file of task {task} is missing"
        self._failures.note_failed(last, stamp.epoch)

    def _may_give_up(self, stamp: Stamp) -> bool:
        """True if this leader may still give that checkpoint up: a new leader could complete it.

        May be called in any thread.
        """
        return self._leads() and is_open(self._node.keeper.view, stamp)

    async def _complete(self, boundary: Stamp, files: tuple[WrittenFile, ...]) -> bool:
        """Makes a checkpoint: writes staged manifest, pointer and final manifest, and removes old checkpoints.

        Returns False if the pointer was not written: try again.
        """
        node, view, checkpoints = self._node, self._node.keeper.view, self._node.checkpoints
        old = view.checkpoint.record if view.checkpoint is not None else None
        kept = (old.name, *old.before)[: node.settings.checkpoints_kept - 1] if old is not None else ()
        name, writer = checkpoints.name_of(boundary), node.new_writer()
        infos = [FileInfo(w.task, w.size, w.digest) for w in files]
        manifest = checkpoints.store.make_manifest(name, infos, kept)
        record = CheckpointRecord(
            epoch=boundary.epoch,
            attempt=boundary.attempt,
            name=str(name),
            before=kept,
            term=self._primary.term,
            writer=writer,
        )
        # Before any await: the transaction must compare what `complete` decided from.
        txn = transactions.advance_checkpoint(view, record, primary_revision=self._primary.revision)
        others: list[CheckpointName] = []
        known = (old.name, *old.before) if old is not None else ()
        looked = await self._try_work(
            boundary.epoch,
            "its place cannot be listed",
            lambda: others.extend(checkpoints.store.names_of_other_runs(name.run, known)),
        )
        if not looked:
            return False
        self._emit_other_runs(name, others)
        if not await self._finds_all_files(manifest):
            return False
        if not await self._try_work(
            boundary.epoch, "its manifest cannot be written", lambda: checkpoints.store.stage(manifest)
        ):
            return False
        await node.point("checkpointed", 0, boundary.epoch)
        revision = await node.transact(txn, key=view.keys.checkpoint, writer=writer)
        if revision is None:
            await node.keeper.refresh()
            return False
        await node.keeper.wait_for_revision(revision)
        self._failures.note_complete()
        if not await self._finish(record):
            return True  # it is tried again with the next commit
        size = sum(w.size for w in files)
        node.events.emit(
            "checkpoint",
            f"checkpoint of epoch {boundary.epoch} is complete ({len(files)} files, {size / _MIB:.1f} MiB)",
            epoch=boundary.epoch,
            attempt=boundary.attempt,
            transient=True,
        )
        return True

    async def _finds_all_files(self, manifest: Manifest) -> bool:
        """Returns True if this node finds all files of the manifest; False, with an event, if it does not, as when each
        host has a disk of its own.
        """
        node, store, epoch = self._node, self._node.checkpoints.store, manifest.parsed_name.epoch
        failed = f"{node.name} does not see all of its files"
        find_damaged: list[tuple[FileInfo, str]] = []

        def look() -> None:
            find_damaged[:] = store.find_damaged(manifest)

        for pause_s in (_LOOK_AGAIN_S, None):
            if not await self._try_work(epoch, "its place cannot be listed", look):
                return False
            if not find_damaged:
                self._failed.pop(failed, None)
                return True
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        (info, what), primary = find_damaged[0], node.keeper.view.primaries.get(find_damaged[0][0].task)
        of = f"task {info.task}" + (f" on {name_of(primary.record.node)}" if primary is not None else "")
        more = f" (so it is with {len(find_damaged)} of {len(manifest.files)} files)" if len(find_damaged) > 1 else ""
        why = f"the file of {of}, {what}{more}: {SAME_PLACE} The job goes on with the checkpoint before, if any"
        self._emit_failed(epoch, failed, why)
        return False

    async def _finish(self, record: CheckpointRecord) -> bool:
        """Writes the final manifest of the checkpoint that the pointer names, by which readers without etcd find it.

        Then removes old checkpoints, if possible. Returns False if the manifest could not be written.
        """
        store = self._node.checkpoints.store
        if not await self._try_work(record.epoch, "its last manifest is not there", lambda: store.finish(record.name)):
            return False
        self._finished = record.name
        kept = (record.name, *record.before)
        async with self._removing:
            cleaned = await self._try_work(
                record.epoch,
                "it is complete, but some before it cannot be removed",
                lambda: store.keep_only(kept, record.name),
            )
        # Files after the resumed checkpoint are left over from the dead run.
        own = CheckpointName.parse(record.name)
        self._cleaned = cleaned and own is not None and own.run == self._node.spec.run[:8]
        return True

    def _emit_other_runs(self, mine: CheckpointName, others: Iterable[CheckpointName]) -> None:
        """Emits an event, once each, about other runs that write checkpoints of this job to the same place.

        The run that began later removes the files of the other. Of two runs that began at the same time, the one
        that is ahead removes the files of the other.
        """
        for other in others:
            later, beside = other > mine, (other.series, other.attempt) == (mine.series, mine.attempt)
            if other.run in self._others or not (later or beside or self._cleaned):
                continue
            self._others.add(other.run)
            if beside:
                began, whose = "", "each of the two removes what the other wrote"
            elif later:
                began, whose = ", which began later,", "it removes this run's"
            else:
                began, whose = ", which began earlier,", "this run removes them"
            self._node.events.emit(
                "checkpoint shared",
                f"another run ({other.run}){began} keeps checkpoints of this job in {self._node.checkpoints.store}, "
                f"too, and {whose}: end one of the two, or give one of them another name (--name) or another "
                f"checkpoint=...",
                epoch=mine.epoch,
            )

    async def _try_work(self, epoch: int, failed: str, work: Callable[[], object]) -> bool:
        """Runs `work` in a thread. If it fails, emits an event with the text `failed` and returns False."""
        try:
            await self._node.checkpoints.call(work)
        except (OSError, CheckpointError) as error:
            self._emit_failed(epoch, failed, str(error))
            return False
        self._failed.pop(failed, None)
        return True

    def _emit_failed(self, epoch: int, failed: str, why: str) -> None:
        """Emits the failure `failed` once for each epoch, although the work is retried each second."""
        if self._failed.get(failed) == epoch:
            return
        again = failed in self._failed
        self._failed[failed] = epoch
        text = f"checkpoint of epoch {epoch}: {failed}: {why}"
        self._node.events.emit("checkpoint failed", text, epoch=epoch, transient=again)
