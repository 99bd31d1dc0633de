"""The leader: task 0's primary collects reports, and commits, restarts or fails the epoch.

`protocol.commit.Leader` decides. This module feeds it with reports, writes its transactions, and examines epochs that
stand still or whose sums do not agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from taskgraph.errors import GraphError, TransportError, first_lines
from taskgraph.node.backoff import Backoff
from taskgraph.node.primary import audits
from taskgraph.node.primary.checkpoint_completer import CheckpointCompleter
from taskgraph.node.primary.unequal import explain_unequal
from taskgraph.observe.format import tasks_text
from taskgraph.observe.trace import clock
from taskgraph.protocol import transactions
from taskgraph.protocol.commit import (
    DIFFERENT_RESULTS_TEXT,
    Commit,
    KeepWaiting,
    Leader,
    Restart,
    SealTasks,
    UnequalSharedState,
    UnequalSums,
)
from taskgraph.protocol.cycles import describe_cycle, describe_waits, find_cycle
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.messages import (
    Accepted,
    Report,
    Reports,
    RequestRestart,
    Seal,
    Stamp,
    Wait,
    Waits,
    WaitsPage,
)
from taskgraph.protocol.numbers import compact
from taskgraph.protocol.records import name_of
from taskgraph.system.alongside import alongside, any_done

if TYPE_CHECKING:
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.reports import Rows
    from taskgraph.node.services import NodeServices
    from taskgraph.protocol.view import JobView

__all__ = ["LeaderRole", "within_reach"]

_TIMER_S = 1e-3
"""Event loops may run a timer early by this time."""
_ASK_S = 1.0
"""Timeout for a primary's answer to "what do you wait for?". It doubles after each timeout, and status names the
primary."""
_SETTLE_S = 0.5
"""Idle tasks with unequal sums count as diverged after this time without a report. Reports take far less."""
_REST_S = 25e-6
"""Pause per ledger entry before ledgers are asked for again. Ledgers of hundreds of all-to-all tasks cost a node a
second."""
_LONGEST_PAUSE_S = 5.0
_PAUSE_SHARE = 1 / 4
"""If the ledgers show no mistake, they are asked for again after this share of the time since the last report, at most
`_LONGEST_PAUSE_S`: handlers may be at work for hours."""
_UNUSUAL_FACTOR = 3
"""An epoch gets an event if it takes this many times as long as recent epochs; before that only `status` shows its
waits."""
_SETUP_S = 10.0
"""Epoch 0 includes `setup()`, which often takes seconds, so its event comes later."""
_MAX_SHOWN = 3
"""Waits, or edges that do not agree, per line."""
_MAX_REFUSALS = 20
"""Refused commits in a row, each with a freshly read view, that fail the job: no stale view explains them."""


class _LedgerLook(NamedTuple):
    """When the leader last asked for the tasks' ledgers, and what that explained: decides when it may ask again."""

    at: float
    entries: int
    explained: tuple[UnequalSums, tuple[Compare, ...], float] | None
    """The conclusion and its grounds, if the ledgers showed nothing but waits."""


class LeaderRole:
    """Leads the job while this node is task 0's primary."""

    def __init__(self, node: NodeServices, primary: Primary) -> None:
        self._node = node
        self._primary = primary
        self._ahead = node.settings.epochs_ahead
        self._leader = Leader(node.job.all_tasks, node.job.epochs, ahead=self._ahead)
        self._wake = asyncio.Event()
        self._rows_came = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._accepted = Accepted(primary.term)
        self._began = self._last_news = self._clock()
        self._usual_s = 0.0  # the longest recent time between commits
        self._backoff = Backoff()
        self._waits_emitted: Stamp | None = None
        self._cycle_found: tuple[Stamp, object] | None = None
        self._patience: tuple[Stamp | None, float] = (None, _ASK_S)  # timeout for the primaries' answers
        self.waits: tuple[str, ...] = ()
        self._audit_waits: tuple[str, ...] = ()
        self._last_look: _LedgerLook | None = None  # the last look at ledgers with unequal sums
        self._last_differences: tuple[Stamp, list[str]] | None = None  # the differences in the last ledgers
        self._refused: tuple[tuple[Compare, ...], int] = ((), 0)
        """The view after a refused commit, and how often it was the same."""
        self.checkpoint_completer = CheckpointCompleter(node, primary)
        self._next_commit_at = self._clock()
        self._commit_generation = 0  # the revision of `generation` that the last commit rests on
        self._gather_timer: asyncio.TimerHandle | None = None
        self._acting = False  # a transaction is under way
        self._report_came = False  # a report came meanwhile
        self._task_ahead = self._ahead  # the last argument of `set_ahead`
        self._emitted_thinned = False
        self._committed = 0
        """The boundary this leader committed last; the log has all reports before it."""

    def set_ahead(self, ahead: int) -> None:
        """Sets how many epochs task 0 may be ahead of the last commit; from that follows how many epochs one commit
        gathers.

        The other tasks count as equally far.
        """
        self._task_ahead = ahead
        self._leader.set_ahead(ahead)

    # -- messages of primaries --------------------------------------------------------------------

    async def take_report(self, message: Report | Reports) -> Accepted:
        """Takes a primary's report, once its epoch is `within_reach` of the view."""
        while (taken := self.take_report_now(message)) is None:
            await self._node.keeper.wait_until_read(partial(within_reach, message.stamp, self._ahead))
        return taken

    def take_report_now(self, message: Report | Reports) -> Accepted | None:
        """Takes a report at once; None: use `take_report`, since it has to wait."""
        leader, view = self._leader, self._node.keeper.view
        reports = message.reports if isinstance(message, Reports) else (message,)
        if not within_reach(reports[-1].stamp, self._ahead, view):
            return None
        if leader.stamp != view.stamp:
            self._begin_epoch()
        if leader.receive_reports(*reports):
            self._last_news = self._clock()
            self._rows_came.set()
            if leader.ready:
                self._wake_if_due()
            if self.lacks_own_report():
                self._primary.backups.unsent.flush_soon()
        return self._accepted

    def lacks_own_report(self) -> bool:
        """True if a commit lacks only the report of task 0, and a task waits for the commit."""
        return self._leader.commit_waits_only_for_task_0()

    async def take_restart(self, request: RequestRestart) -> Accepted:
        """Takes a primary's request to restart its epoch, once that is `within_reach` of the view."""
        await self._node.keeper.wait_until_read(partial(within_reach, request.stamp, self._ahead))
        self._begin_epoch()
        if self._leader.request_restart(request.stamp, request.why):
            self._wake.set()
        return self._accepted

    async def rows_before(self, stamp: Stamp, own: Mapping[str, float]) -> Rows:
        """Returns the numbers that all tasks reported in the epoch before `stamp`, once all are here.

        Args:
            own: the numbers that task 0 reported in that epoch.
        """
        while (rows := self.rows_now(stamp, own)) is None:
            self._rows_came.clear()
            await self._rows_came.wait()
        return rows

    def rows_now(self, stamp: Stamp, own: Mapping[str, float]) -> Rows | None:
        """Returns what `rows_before` returns, at once; None if some are missing.

        This leader committed that epoch or will commit it, or every task sends it the numbers again.
        """
        if self._leader.stamp != self._node.keeper.view.stamp:
            self._begin_epoch()
        epoch, log, at = stamp.epoch - 1, self._primary.replica.log, self._leader.stamp
        if epoch < self._committed:
            return log.rows_of(epoch)
        if at is None or at.attempt != stamp.attempt:
            return None
        if epoch >= at.epoch:
            return self._leader.keep_numbers(epoch, own)
        numbers = {task: report.previous or {} for task, report in self._leader.reports().items()} | {0: own}
        if at != stamp or len(numbers) < self._node.job.all_tasks:
            return None
        log.add(epoch, numbers)
        return log.rows_of(epoch)

    # -- the role ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commits, restarts or fails epochs until cancelled; writes checkpoints and examines stalled epochs beside.

        Raises the first error of any of these.
        """
        try:
            async with asyncio.TaskGroup() as group:
                if self._node.spec.checkpoint is not None:
                    group.create_task(self.checkpoint_completer.run(), name="checkpoints")
                    group.create_task(self.checkpoint_completer.sweep(), name="unfinished checkpoints")
                group.create_task(self._watch_stalls(), name="stalls")
                group.create_task(self._wake_regularly(), name="looking again")
                await self._lead()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _lead(self) -> None:
        """Carries out the decision of `Leader` each time that something wakes the role, until cancelled."""
        # A new epoch alone decides nothing; its complete reports do.
        stop = self._node.keeper.on_change(self._wake.set, structure=True)
        try:
            while True:
                self._wake.clear()
                if self._node.paused:
                    await self._node.wait_while_paused()
                if self._node.keeper.view.running:
                    self._begin_epoch()
                    self._acting, self._report_came = True, False
                    try:
                        await self._act_on_decision()
                    finally:
                        self._acting = False
                    if self._report_came:  # not earlier: it would have been judged by the old state
                        self._begin_epoch()
                        if self._leader.ready:
                            self._wake_if_due()
                await self._wake.wait()
        finally:
            stop()
            self._stop_gathering()

    async def _wake_regularly(self) -> None:
        """Wakes the role regularly, until cancelled: a report that does not come wakes nothing.

        One asyncio task does this, so that the waits need no timers.
        """
        while True:
            await asyncio.sleep(_SETTLE_S)
            self._wake.set()

    def _begin_epoch(self) -> None:
        """Begins the epoch of the view, if the leader is at another one."""
        stamp = self._node.keeper.view.stamp
        before = self._leader.stamp
        if stamp is not None and before != stamp:
            self._leader.begin(stamp)
            if stamp.epoch < self._committed:  # rolled back
                self._committed = 0
            now = self._last_news = self._clock()
            if before is not None and before.attempt == stamp.attempt:
                self._usual_s = max(now - self._began, self._usual_s / 2)
            self._began = now
            self._waits_emitted = None
            self.waits = self._audit_waits = ()
            self._rows_came.set()

    async def _act_on_decision(self) -> None:
        """Lets `Leader` decide about the epoch at work, and carries the decision out."""
        settled = self._clock() - self._last_news > _SETTLE_S
        decision = self._leader.decide(self._node.keeper.view, settled=settled)
        if not isinstance(decision, UnequalSums):
            self._audit_waits = ()
        match decision:
            case Commit() as commit:
                if not self._may_wait(commit):
                    await self._commit(commit)
            case SealTasks(versions):
                await self._seal(versions)
            case Restart(why):
                await self._restart(why)
            case UnequalSharedState(tasks):
                await self._fail_unequal(tasks)
            case UnequalSums() as diverged:
                if self._may_ask_ledgers(diverged):
                    await self._explain_divergence(diverged)
            case KeepWaiting():
                pass

    def _wake_if_due(self) -> None:
        """Wakes `_lead`, unless it would only go on to gather epochs for the next commit."""
        if self._acting:
            self._report_came = True
        elif self._leader.urgent or not self._gather_more():
            self._wake.set()

    def _may_wait(self, commit: Commit) -> bool:
        """True, with a timer set, if a commit may wait for more epochs: no task waits for it; the last is recent."""
        return not (commit.finished or commit.awaited or commit.epochs >= self._leader.enough) and self._gather_more()

    def _gather_more(self) -> bool:
        """Sets a timer that wakes `_lead` when a commit is due. False: it is due, or a takeover came after the last."""
        if self._node.keeper.view.generation_revision != self._commit_generation:
            return False
        if self._gather_timer is not None:
            return True
        left_s = self._next_commit_at - self._clock()
        if left_s <= _TIMER_S:
            return False
        self._gather_timer = asyncio.get_running_loop().call_later(left_s, self._end_gathering)
        return True

    def _stop_gathering(self) -> None:
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gather_timer = None

    def _end_gathering(self) -> None:
        """Wakes `_lead`, since epochs have been gathered long enough."""
        self._gather_timer = None
        self._wake.set()

    async def _commit(self, commit: Commit) -> None:
        """Writes a commit of one epoch or more, and emits it; if etcd refuses the commit, reads the view again."""
        node, view = self._node, self._node.keeper.view
        stamp = self._leader.stamp
        assert stamp is not None
        numbers = range(stamp.epoch, stamp.epoch + commit.epochs)
        rows, lineage = {number: self._leader.numbers(number) or {} for number in numbers}, self._lineage()
        generation = view.generation_revision
        writer = node.new_writer()
        txn = transactions.commit(  # of the view that was decided from, which may change during awaits
            view,
            primary_revision=self._primary.revision,
            finished=commit.finished,
            writer=writer,
            epochs=commit.epochs,
        )
        if node.injects:
            for number in numbers:
                await node.point("commit", 0, number)
        sent = node.tracing.on and clock()
        revision = await node.transact(txn, key=view.keys.epoch, writer=writer)
        if sent:
            for number in numbers:
                kind, of = "commit" if revision else "commit refused", Stamp(stamp.attempt, number)
                node.tracing.add(kind, sent, 0, of, self._primary.term)
        if revision is None:
            await node.keeper.refresh()
            seen = self._fences()
            self._refused = (seen, self._refused[1] + 1 if self._refused[0] == seen else 1)
            await self._backoff.pause()
            return
        self._backoff.reset()
        self._refused = ((), 0)
        self._next_commit_at = self._clock() + node.commit_interval.seconds(self._task_ahead)
        self._commit_generation = generation
        self._stop_gathering()
        if self._lineage() == lineage:  # else a roll-back undid the commit before its answer came
            for number in numbers:
                if rows[number]:
                    self._primary.replica.log.add(number, rows[number])
            self._announce_thinned_reports(numbers[-1])
            self._committed = numbers.stop
            self._rows_came.set()
        self._emit_committed(stamp.attempt, rows, view)
        if commit.finished:
            node.events.emit("finished", f"the job finished after epoch {numbers[-1]}", epoch=numbers[-1])
        if node.injects:
            for number in numbers:
                await node.point("committed", 0, number)
        await node.keeper.wait_for_revision(revision)
        self._begin_epoch()
        if self._leader.ready:  # tasks that work ahead have reported already
            self._wake_if_due()

    def _announce_thinned_reports(self, epoch: int) -> None:
        """Emits an event, once, when reports are thinned."""
        log = self._primary.replica.log
        if self._emitted_thinned or self._primary.began_thinned or not log.is_thinned:
            return
        self._emitted_thinned, mib = True, log.most_bytes >> 20
        self._node.events.emit(
            "reports thinned",
            f"the tasks' reports take more than {mib} MiB by epoch {epoch}: from now on `reports` of the result "
            "leave out every second of the earliest epochs, then more of them, and never all. To keep each, report "
            "fewer numbers, or not in every epoch",
            epoch=epoch,
        )

    def _emit_committed(self, attempt: int, committed: Mapping[int, Rows], view: JobView) -> None:
        """Emits an event for each committed epoch, with the numbers that tasks reported; before a run's first, that the
        job began.
        """
        node, base = self._node, view.epoch.record.base if view.epoch is not None else 0
        if base in committed:
            holders = {name_of(p.record.node) for p in view.primaries.values()}
            replicas = sum(len(view.in_sync(t)) for t in range(node.job.all_tasks))
            began = "the job began" if base == 0 else f"the job goes on from the checkpoint of epoch {base}"
            tasks = tasks_text(range(node.job.all_tasks), node.job.all_tasks, node.job.services)
            text = f"{began}: {tasks} on {', '.join(sorted(holders))}; {replicas:,} replicas in sync"
            node.events.emit("began", text, epoch=base)  # before the other events
        for epoch, rows in committed.items():
            fields: dict[str, float] = {}
            for task in sorted(rows, reverse=True):
                fields.update(rows[task].items())
            shown = compact(fields) if fields else fields  # many events may wait for a follower
            node.events.emit(
                "commit", f"epoch {epoch} committed", epoch=epoch, attempt=attempt, transient=True, fields=shown
            )

    def _lineage(self) -> int:
        epoch = self._node.keeper.view.epoch
        return epoch.record.lineage if epoch is not None else 0

    async def _seal(self, versions: tuple[tuple[int, int], ...]) -> None:
        """Asks the primaries of these tasks, at once, to close the epoch for messages."""
        stamp = self._leader.stamp
        assert stamp is not None
        reports = self._leader.reports()
        async with asyncio.TaskGroup() as group:
            for task, version in versions:
                group.create_task(self._seal_one(stamp, task, reports[task].term, version))

    async def _seal_one(self, stamp: Stamp, task: int, term: int, version: int) -> None:
        """Asks one task's primary to close the epoch for messages at `version`; notes for `Leader` if it did."""
        view = self._node.keeper.view
        holder = view.primary_node(task)
        if holder is None:
            return
        try:
            reply = await self._node.router.to_node(
                holder, Seal(stamp, task, version), timeout_s=self._node.settings.call_s, task=task
            )
        except TransportError as error:
            # The task moved on, died or was replaced: its next report is sealed again.
            self._node.log.debug("task %d is not sealed: %s", task, error)
            return
        if isinstance(reply, Accepted) and reply.term == term:
            self._leader.note_sealed(task, term, version)

    async def _restart(self, why: str) -> None:
        """Writes a restart of the epoch, and emits it; if etcd refuses it, reads the view again."""
        node, view = self._node, self._node.keeper.view
        stamp = self._leader.stamp
        assert stamp is not None
        writer = node.new_writer()
        txn = transactions.restart(view, primary_revision=self._primary.revision, writer=writer)
        sent = node.tracing.on and clock()
        revision = await node.transact(txn, key=view.keys.epoch, writer=writer)
        if sent:
            node.tracing.add("restart" if revision else "restart refused", sent, 0, stamp, self._primary.term, why)
        if revision is None:
            await node.keeper.refresh()
            await self._backoff.pause()
            return
        node.events.emit(
            "restart",
            f"epoch {stamp.epoch} starts again (attempt {stamp.attempt + 1}): {why}",
            epoch=stamp.epoch,
            attempt=stamp.attempt + 1,
        )
        await node.keeper.wait_for_revision(revision)

    # -- when something is wrong ------------------------------------------------------------------

    async def _fail_unequal(self, tasks: tuple[int, int]) -> None:
        """Fails the job, since the shared state of two tasks differs."""
        stamp, fence, reports = self._leader.stamp, self._fences(), self._leader.reports()
        assert stamp is not None
        wrong = await explain_unequal(self._node, stamp, reports[tasks[0]], reports[tasks[1]])
        if wrong is not None:  # else a task did not answer: it is decided again
            await self._node.fail_job(wrong, None, stamp.epoch, fence)

    async def _explain_divergence(self, diverged: UnequalSums) -> None:
        """Examines unequal sums by the ledgers: names waits; or fails the job, or after a takeover restarts the epoch.

        Gives up with the first new report.
        """
        stamp, news = self._leader.stamp, self._last_news
        assert stamp is not None
        fence, reports = self._fences(), self._leader.reports()
        async with alongside(audits.audit(self._node, stamp, reports)) as (looking,):
            while not looking.done() and self._is_unchanged(diverged, fence, news):
                self._wake.clear()
                async with alongside(self._wake.wait()) as (news_came,):
                    await any_done(looking, news_came)
            if not looking.done() or not self._is_unchanged(diverged, fence, news):
                return
            found = looking.result()
        waits = tuple(found.waits(self._node))
        nothing_but_waits = waits and not (found.differing if diverged.replaced else found.disagreements)
        explained = (diverged, fence, news) if nothing_but_waits else None
        self._last_look = _LedgerLook(self._clock(), found.entries, explained)
        if diverged.replaced:
            # A task at work may just be slow. If it waits for messages of a dead primary, ledgers differ, and still
            # differ when they are asked for again.
            seen, self._last_differences = self._last_differences, (stamp, found.differing)
            if not waits or (found.differing and seen == self._last_differences):
                await self._restart(DIFFERENT_RESULTS_TEXT)
            else:
                self._audit_waits = waits  # and looks again
            return
        lines = found.disagreements
        self._audit_waits = () if lines else waits
        if self._audit_waits:
            return  # and looks again
        lines = lines or ["no edge can be named: please report this as a bug of taskgraph"]
        wrong = GraphError(
            f"epoch {stamp.epoch}: the tasks do not agree on what was exchanged: "
            + "; ".join(first_lines(lines, _MAX_SHOWN))
        )
        await self._node.fail_job(wrong, None, stamp.epoch, fence)

    def _may_ask_ledgers(self, diverged: UnequalSums) -> bool:
        """True if enough time has passed to ask for ledgers again."""
        if (looked := self._last_look) is None:
            return True
        rest_s = looked.entries * _REST_S
        if looked.explained == (diverged, self._fences(), self._last_news):
            rest_s = max(rest_s, min(_LONGEST_PAUSE_S, (looked.at - self._last_news) * _PAUSE_SHARE))
        return self._clock() >= looked.at + rest_s

    def _is_unchanged(self, diverged: UnequalSums, fence: tuple[Compare, ...], news: float) -> bool:
        """True if the reports and the view that the divergence was concluded from are unchanged."""
        decision = self._leader.decide(self._node.keeper.view, settled=True)
        return decision == diverged and self._fences() == fence and self._last_news == news

    async def _watch_stalls(self) -> None:
        """Examines epochs without news for `stall_check_s`, until cancelled; beside `_lead`, which must not wait."""
        limit_s = self._node.settings.stall_check_s
        while True:
            await asyncio.sleep(max(_SETTLE_S, limit_s - (self._node.now() - self._last_news)))
            if self._node.now() - self._last_news > limit_s and self._node.keeper.view.running:
                await self._node.wait_while_paused()
                await self._examine_stall()

    async def _examine_stall(self) -> None:
        """Fails the job if the epoch's waits are a cycle; otherwise emits an event with the waits, once."""
        stamp = self._leader.stamp
        if stamp is None:
            return
        fence = self._fences()
        gathered = await self._gather_waits(stamp)
        if self._leader.stamp != stamp:
            return
        cycle = find_cycle(gathered)
        # Tasks answer at different moments: only a cycle that is found twice is real.
        again, self._cycle_found = self._cycle_found == (stamp, cycle), (stamp, cycle)
        if cycle and again:
            error = GraphError(f"epoch {stamp.epoch}: a cycle of waits: {describe_cycle(cycle)}")
            await self._node.fail_job(error, None, stamp.epoch, fence)
            return
        lines = [*self._describe_unreachable(gathered), *self._audit_waits, *describe_waits(gathered)]
        if self._refused[0] == fence and self._refused[1] >= _MAX_REFUSALS:
            lines.insert(
                0,
                f"etcd refused its commit {self._refused[1]} times, though all that it asks for is as etcd said: "
                "members of its cluster disagree, or it lost what it had acknowledged (3.5.0 to 3.5.2 may, once "
                "killed): compare `etcdctl endpoint hashkv --cluster`, and replace the member that differs",
            )
        self.waits = tuple(lines)
        lines = [*self._node.keeper.waits, *lines, *self._node.writes.waits]  # `status` shows these of every node
        usual_s = _SETUP_S if stamp.epoch == 0 else _UNUSUAL_FACTOR * self._usual_s
        unusual = self._node.now() - self._last_news > usual_s
        if self._waits_emitted != stamp and lines and unusual:
            self._waits_emitted = stamp
            text = f"epoch {stamp.epoch} waits: {'; '.join(first_lines(lines, _MAX_SHOWN))}"
            if len(lines) > _MAX_SHOWN and self._node.spec.driver is not None:  # else the job runs in one process
                text += f"; `taskgraph status {self._node.spec.name} --tasks` shows all"
            self._node.events.emit("waits", text, epoch=stamp.epoch)

    def _describe_unreachable(self, gathered: dict[int, tuple[Wait, ...]]) -> list[str]:
        """Returns a text for each task that blocks the epoch and is not in `gathered`, about its primary and node."""
        view = self._node.keeper.view
        lines = []
        for task in self._leader.blocking(view):
            if task in gathered:
                continue
            holder = view.primary_node(task)
            if holder is None:
                lines.append(f"task {task} has no primary yet")
            elif holder in self._node.suspects:
                heirs = [n for n in view.in_sync(task) if n not in self._node.suspects]
                rest = f"{len(heirs)} members may take over" if heirs else "no member of it is here"
                lines.append(f"task {task}: its primary on {name_of(holder)} is gone: {rest}")
            else:
                lines.append(f"task {task}: its primary on {name_of(holder)} does not answer")
        return lines

    async def _gather_waits(self, stamp: Stamp) -> dict[int, tuple[Wait, ...]]:
        """Asks the tasks that block the epoch what they wait for. Leaves out tasks that do not answer."""
        gathered: dict[int, tuple[Wait, ...]] = {}
        limit_s = self._patience[1] if self._patience[0] == stamp else _ASK_S

        async def ask(task: int) -> None:
            holder = self._node.keeper.view.primary_node(task)
            if holder is None:
                return
            try:
                async with asyncio.timeout(limit_s):  # not the call's own timeout: a late node can be reached
                    reply = await self._node.router.to_node(holder, Waits(stamp, task), timeout_s=None)
            except (TransportError, TimeoutError):  # the text names a node that does not answer
                self._patience = (stamp, min(2 * limit_s, self._node.settings.call_s))
                return
            if isinstance(reply, WaitsPage):
                gathered[task] = reply.waits

        async with asyncio.TaskGroup() as group:
            for task in self._leader.blocking(self._node.keeper.view):
                group.create_task(ask(task))
        return gathered

    def _fences(self) -> tuple[Compare, ...]:
        """Returns the fences of a decision to fail the job: this leader's term, the epoch, the last takeover of all."""
        view = self._node.keeper.view
        epoch = view.epoch.mod_revision if view.epoch else 0
        return (
            Compare(view.keys.primary(0), self._primary.revision),
            Compare(view.keys.epoch, epoch),
            Compare(view.keys.generation, view.generation_revision),  # a takeover meanwhile needs a new decision
        )


def within_reach(stamp: Stamp, ahead: int, view: JobView) -> bool:
    """True if `stamp` is not ahead of the view, or at most `ahead` epochs ahead of it in the view's attempt."""
    at = view.stamp
    return at is not None and (at >= stamp or (at.attempt == stamp.attempt and stamp.epoch <= at.epoch + ahead))
