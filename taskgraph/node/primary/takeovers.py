"""Makes this node the primary of a task: after a failure, at a handover, or as the task's first primary.

`protocol.takeover` decides which node may try, and when; the transaction decides which node succeeds. This module
tries, and says what a task without a primary waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from taskgraph.errors import Refused, TaskGraphError
from taskgraph.node.membership.failing import culprit_text, deaths_text, memory_text
from taskgraph.node.primary.primary import Primary
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.observe.format import ids_text
from taskgraph.observe.trace import clock
from taskgraph.protocol import transactions
from taskgraph.protocol.kv import Txn, TxnResult
from taskgraph.protocol.messages import HandOver, Reason, Stamp
from taskgraph.protocol.records import CheckpointRecord, JobStatus, PrimaryRecord, StatusRecord, name_of
from taskgraph.protocol.shared import holds_state
from taskgraph.protocol.takeover import Succession, TakeoverMove, succession

if TYPE_CHECKING:
    from taskgraph.node.membership.fatal import FatalCode
    from taskgraph.node.membership.suspicion import Suspicion
    from taskgraph.node.replica import Replica
    from taskgraph.node.roles import Roles
    from taskgraph.node.services import NodeServices

__all__ = ["TakeOvers"]


class TakeOvers:
    """One node's takeovers; at most one per task at a time."""

    def __init__(self, node: NodeServices, roles: Roles, *, suspicion: Suspicion, fatal_code: FatalCode) -> None:
        self._node = node
        self._roles = roles
        self._suspicion = suspicion
        self._fatal_code = fatal_code
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._orphans: dict[int, str] = {}
        self._reading: set[int] = set()  # tasks for which a usable checkpoint is searched
        self._unplaceable: set[int] = set()  # tasks that no node may hold
        self._emitted_unplaceable: tuple[str, frozenset[int]] = ("", frozenset())

    def is_busy(self, task: int) -> bool:
        """True if this node is the task's primary, tries to become it, or is still stepping down."""
        return task in self._roles.primaries or task in self._under_way or task in self._roles.stepping_down

    @property
    def any_under_way(self) -> bool:
        """True during a takeover."""
        return bool(self._under_way)

    def _decide_succession(self, task: int) -> Succession:
        """Decides what this node may do now for a task that has no living primary; see `protocol.takeover`."""
        view = self._node.keeper.view
        wish = self._node.wish(task)
        return succession(
            view,
            task,
            self._node.id,
            suspects=self._node.suspects,
            gone=self._node.gone,
            wished=wish is not None and wish.primary == self._node.id,
            stateful=holds_state(view, task),
            unseated=wish is not None and wish.primary is None and self._node.emits_for_all(),
            dropped=task not in self._roles.primaries and task not in self._roles.stepping_down,
        )

    @property
    def waits(self) -> tuple[str, ...]:
        """Returns why tasks have no primary, for `status`; empty unless this node reports for all."""
        unseated = [self._unplaceable_text()] if self._unplaceable else []
        reading = [
            f"task {task} lost every replica, and the files of its checkpoint are read before the job goes back to it: "
            f"{self._node.checkpoints.store}"
            for task in sorted(self._reading)
        ]
        return (*unseated, *(why for _, why in sorted(self._orphans.items())), *reading)

    def consider(self, task: int) -> None:
        """Begins a takeover of a task if this node may take over now; otherwise emits why the task has no primary."""
        # Once the results are collected all nodes leave, and their tasks need no primary.
        if self.is_busy(task) or self._node.paused or self._node.keeper.view.collected:
            self._clear_orphan(task)
            return
        decision = self._decide_succession(task)
        if decision.move is not TakeoverMove.NOTHING:
            self._clear_orphan(task)
            self._start_takeover(task, self._take_over(task, decision))
        else:
            self._emit_orphan(task)

    def _emit_orphan(self, task: int) -> None:
        """Emits, once, why a task has no primary, if this node emits for all.

        Tasks that no node may host share one reason: `emit_unplaceable` names them together.
        """
        self._unplaceable.discard(task)
        view = self._node.keeper.view
        primary = view.primaries.get(task)
        wish = self._node.wish(task)
        why = ""
        if primary is None or all(n in self._node.gone for n in (primary.record.node, *view.in_sync(task))):
            if wish is not None and wish.primary is None and self._node.emits_for_all():
                self._unplaceable.add(task)
        elif primary.record.node in self._node.suspects and all(n in self._node.suspects for n in view.in_sync(task)):
            absent = [name_of(n) for n in view.in_sync(task) if n not in self._node.gone]
            if absent:
                why = (
                    f"task {task} has no primary: the nodes that hold its state ({', '.join(absent)}) are absent; they "
                    f"are waited for, {self._node.settings.lost_after_s:g} s at most"
                )
        if not why or not self._node.emits_for_all():
            self._orphans.pop(task, None)
        elif self._orphans.get(task) != why:
            self._orphans[task] = why
            self._node.events.emit("waits", why, task=task)

    def _clear_orphan(self, task: int) -> None:
        """Forgets why a task had no primary: it has one, is about to get one, or needs none."""
        self._orphans.pop(task, None)
        self._unplaceable.discard(task)

    def emit_unplaceable(self) -> None:
        """Emits which tasks no node may host, if there are more of them than before or the reason changed."""
        tasks, (why_emitted, emitted) = frozenset(self._unplaceable), self._emitted_unplaceable
        why = self._why_unplaceable() if tasks else ""
        if not tasks <= emitted or why != why_emitted:
            self._emitted_unplaceable = (why, tasks)
            if tasks:
                self._node.events.emit("waits", self._unplaceable_text())

    def _unplaceable_text(self) -> str:
        tasks = sorted(self._unplaceable)
        if len(tasks) == 1:
            return f"task {tasks[0]} waits for a node that may hold it: {self._why_unplaceable()}"
        return f"tasks {ids_text(tasks)} wait for nodes that may hold them: {self._why_unplaceable()}"

    def _why_unplaceable(self) -> str:
        live = self._node.keeper.view.live_nodes(self._node.spec.run)
        staying = [record for record in live.values() if not record.draining]
        if not staying:
            return f"all {len(live)} nodes of the job are leaving" if len(live) > 1 else "its only node is leaving"
        who = f"none of the {len(staying)} nodes that stay" if len(staying) > 1 else "not the one node that stays"
        needs = "it needs" if len(self._unplaceable) == 1 else "they need"
        return f"{needs} a CUDA device (requires_gpu), and {who} has one"

    def _start_takeover(self, task: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a takeover as an asyncio task; when it has ended, the reconciler runs."""
        running = self._under_way[task] = self._node.own(work, f"take over task {task}")

        def done(_: object) -> None:
            self._under_way.pop(task, None)
            self._roles.reconsider()

        running.add_done_callback(done)
        return running

    async def _take_over(self, task: int, decision: Succession) -> None:
        """Waits, by this node's rank, decides again, and tries a takeover once. `reconcile` tries again if needed."""
        if decision.rank:
            await asyncio.sleep(decision.rank * self._node.settings.takeover_stagger_s)
            if self._fatal_code.fail_if_fatal():
                return
        decision = self._decide_succession(task)
        match decision.move:
            case TakeoverMove.TAKE_OVER:
                await self._become_primary(task, failure=True)
            case TakeoverMove.FROM_NOTHING | TakeoverMove.ROLL_BACK:
                await self._become_first(task)
            case TakeoverMove.LOST:
                await self._fail_lost(task)
            case TakeoverMove.NOTHING:
                pass

    async def _become_primary(self, task: int, *, failure: bool) -> None:
        """Takes a task over as a member of its in-sync set, in one transaction; `failure`: its primary died."""
        view, replica = self._node.keeper.view, self._roles.replica(task)
        old = view.primaries.get(task)
        writer = self._node.new_writer()
        try:
            txn = transactions.take_over(
                view,
                task,
                self._node.id,
                self._node.node_revision,
                stateful=old.record.stateful if old else True,
                failure=failure,
                writer=writer,
            )
        except LookupError as error:
            self._node.log.debug("task %d: %s", task, error)
            await self._reread_view()
            return
        await self._execute_takeover(
            replica, txn, writer, "takeover" if failure else "hand-over", old.record.node if old else None
        )

    async def _become_first(self, task: int) -> None:
        """Becomes the first primary of a task, or the next after all members are gone: then the job may roll back."""
        replica = self._roles.replica(task)
        try:
            await replica.build()
        except (UserCodeError, TaskGraphError) as error:
            if not await self._node.fail_early(error, task, finished=self._must_begin_anew(task)):
                await self._node.short_pause()
            return
        if not self._must_begin_anew(task):
            return  # changed during the build; `reconcile` decides again
        view = self._node.keeper.view
        old = view.primaries.get(task)
        writer = self._node.new_writer()
        usable: CheckpointRecord | None = None
        if old is not None and holds_state(view, task) and view.checkpoint is not None:
            usable = await self._usable_checkpoint(task, writer)
            if usable is None:
                return
        assert view.epoch is not None, "else no takeover begins"
        undone = view.epoch.record.epoch
        target = usable if usable is not None and usable.epoch < undone else None
        me, shape = (self._node.id, self._node.node_revision), replica.shape
        declared: dict[str, Any] = {"stateful": shape.own, "shared": shape.shared, "writer": writer}
        try:
            if target is not None:
                txn = transactions.roll_back(view, task, *me, to=target, **declared)
            else:
                txn = transactions.take_over_from_nothing(view, task, *me, **declared)
        except LookupError as error:
            self._node.log.debug("task %d: %s", task, error)
            await self._reread_view()
            return
        lost = ", ".join(name_of(n) for n in view.in_sync(task)) or "none"
        taken = await self._execute_takeover(
            replica, txn, writer, "takeover" if old else "primary", old.record.node if old else None, anew=True
        )
        if taken and target is not None:  # an event of the job, since events of single tasks are dropped first
            self._node.events.emit(
                "rolled back",
                f"task {task} lost every replica ({lost}): the job goes back from epoch {undone} to the checkpoint of "
                f"epoch {target.epoch}; epochs {target.epoch} to {undone - 1} are computed again",
                epoch=target.epoch,
                fields={"until": undone},
            )

    async def _usable_checkpoint(self, task: int, writer: str) -> CheckpointRecord | None:
        """Returns the checkpoint to roll back to. None: the job failed without one, or needs no roll-back.

        All tasks will restore from it, so every file is read first.
        """
        node, view = self._node, self._node.keeper.view
        checkpoint = view.checkpoint
        assert checkpoint is not None
        read = view.epoch, checkpoint, view.primaries.get(task)
        self._reading.add(task)
        try:
            found = await node.checkpoints.newest_usable(checkpoint.record)
        finally:
            self._reading.discard(task)
        if (view.epoch, view.checkpoint, view.primaries.get(task)) != read or not self._must_begin_anew(task):
            return None  # changed during the read; `reconcile` decides again
        for refused in found.refused:
            node.events.emit("checkpoint refused", refused)
        if (manifest := found.manifest) is None:
            await self._fail_lost(task, f"no checkpoint can be used: {'; '.join(found.refused)}")
            return None
        name = manifest.parsed_name
        return CheckpointRecord(
            epoch=name.epoch,
            attempt=name.attempt,
            name=manifest.name,
            before=manifest.before,
            term=view.term(0),
            writer=writer,
        )

    def _must_begin_anew(self, task: int) -> bool:
        """True if the task must begin from nothing or a checkpoint, which the takeover's transaction cannot check."""
        return self._decide_succession(task).move in (TakeoverMove.FROM_NOTHING, TakeoverMove.ROLL_BACK)

    async def _execute_takeover(
        self, replica: Replica, txn: Txn, writer: str, kind: str, old: str | None, *, anew: bool = False
    ) -> bool:
        """Executes a takeover; returns True if this node is primary now.

        Args:
            anew: the task begins from nothing or a checkpoint, so that boundaries on this node are stale.
        """
        task, view = replica.task, self._node.keeper.view
        await self._node.point("takeover", task, view.epoch.record.epoch if view.epoch is not None else 0)
        refusing = self._suspicion.detector.refusing_port(old)
        began = self._node.tracing.on and clock()
        result = await self._node.writes.execute(txn, view.keys.primary(task), writer)
        if began:
            self._node.tracing.add(kind if result is not None else f"{kind} refused", began, task, view.stamp)
        if result is None:
            await self._reread_view()
            return False
        if not result.reads:  # the answer was lost: read again
            reread = await self._node.writes.execute(
                transactions.reread_take_over(view, task), view.keys.primary(task), writer
            )
            assert reread is not None
            if not any(PrimaryRecord.from_bytes(kv.value).writer == writer for kv in reread.reads[2]):
                return False  # another node has taken over since
            result = TxnResult(True, result.revision, reread.reads)
        taken = transactions.decode_takeover(result, view, task)
        if refusing is not None:
            refusing.taken[task] = taken.revision
        await self._node.point("taken", task, taken.epoch)
        whose = f" after {name_of(old)}" if old and old != self._node.id else ""
        self._node.events.emit(
            kind,
            f"task {task}: {self._node.name} is primary{whose} (term {taken.term})",
            task=task,
            term=taken.term,
            epoch=taken.epoch,
            attempt=taken.attempt,
            transient=kind == "primary",
            fields={"from": old} if whose and old else None,
        )
        if anew:  # not earlier: another primary may rest on boundaries that this node acknowledged
            replica.boundaries.clear()
        replica.actor.stamp, replica.actor.term = Stamp(taken.attempt, taken.epoch), taken.term
        self._roles.begin_term(Primary(self._node, replica, taken))
        return True

    async def accept_handover(self, message: HandOver) -> None:
        """Takes the task over from its primary, which asks for that right after a commit.

        Raises:
            Refused: this node did not become primary, so the old one goes on.
        """
        task = message.task
        await self._node.keeper.wait_until_read(lambda v: v.stamp is not None and v.stamp >= message.stamp)
        view, node = self._node.keeper.view, self._node
        able = node.running and not (self.is_busy(task) or node.paused or node.draining)
        if view.stamp != message.stamp or view.term(task) != message.term or not able:
            raise Refused(Reason.STALE, f"{node.name} cannot take over task {task} just now")
        await asyncio.shield(self._start_takeover(task, self._become_primary(task, failure=False)))
        if task not in self._roles.primaries:
            raise Refused(Reason.STALE, f"{node.name} lost the takeover of task {task} to another node")

    async def _reread_view(self) -> None:
        """Reads a stale view again after a refused write; `reconcile` then decides again."""
        await self._node.keeper.refresh()
        await self._node.short_pause()

    def _backups_advice(self) -> str:
        backups, url = self._node.job.backups, self._node.spec.checkpoint
        there = "its first checkpoint is not complete yet" if url else "checkpoint='file:///...'"
        return f"run with more backups (backups={backups} now), or with checkpoints ({there}), to survive this"

    def _lost_with(self, task: int, epoch: int) -> list[str]:
        """Returns the gone nodes that were members of the task, or that its code killed in this epoch."""
        view = self._node.keeper.view
        its = [n for n in view.deaths_from(epoch) if any(ran.task == task for ran in view.gone[n].record.running_code)]
        return list(dict.fromkeys([*its, *(node for node in view.members_of(task) if node in view.gone)]))

    async def _fail_lost(self, task: int, why: str = "") -> None:
        """Fails the job, since a task has lost all its replicas; does nothing if the view has changed meanwhile.

        Args:
            why: what to say in place of advice to have more backups; "": that advice.
        """
        view = self._node.keeper.view
        members = ", ".join(name_of(n) for n in view.in_sync(task)) or "none"
        epoch = view.epoch.record.epoch if view.epoch else None
        reason = f"task {task}: every replica in sync is gone ({members}), and its state of epoch {epoch} with them"
        deaths = {name_of(node): view.gone[node].record for node in self._lost_with(task, epoch or 0)}
        how = deaths_text(deaths)
        if memory_text(deaths) and not why:
            reason += f": {how}"
        elif culprit_text(deaths) and not why:  # more backups would not help against such code
            reason += f": {how}. Where it is not to blame, {self._backups_advice()}"
        else:
            reason += f"; {why or self._backups_advice()}" + f"\n{how}" * bool(how)
        writer = self._node.new_writer()
        status = StatusRecord(state=JobStatus.FAILED, reason=reason, task=task, epoch=epoch, writer=writer)
        try:
            txn = transactions.fail_lost(view, task, status)
        except LookupError as error:  # the view changed while this waited
            self._node.log.debug("task %d: %s", task, error)
            await self._reread_view()
            return
        if not await self._node.write_failure(txn, status):
            await self._reread_view()
