"""Checks the protocol's invariants after every write to etcd, within the write.

The checks read etcd's own state, and the replicas of every process that exists, also frozen ones. They change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from taskgraph.graph.values import decode
from taskgraph.protocol.assignment import Wish
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.kv import KeyEvent, KeyValue
from taskgraph.protocol.messages import Encoded, Stamp
from taskgraph.protocol.records import CheckpointRecord, EpochRecord, JobStatus, MemberRecord, PrimaryRecord
from taskgraph.protocol.view import JobView
from taskgraph.testing.simulate.executions import TaskExecutions, Violation
from taskgraph.testing.simulate.shared import Sharing
from taskgraph.testing.simulate.workload import reported_number

if TYPE_CHECKING:
    from taskgraph.node.node import Node
    from taskgraph.results import JobResult

__all__ = ["Invariants", "kind_of"]

Key = tuple[int, int, int]

_ENDED_BEFORE = (JobStatus.FAILED, JobStatus.CANCELLED)
"""States of jobs that ended early."""


class Invariants:
    """Follows etcd's writes, and checks each against the history of the job.

    Args:
        first: task -> state before epoch 0.
        living: returns node id -> node of every process that exists, frozen or not.
        expected: boundary -> task -> state in a run without failures; None for tasks that are not deterministic.
        without_state: tasks without state.
        sharing: the shared state of tasks.
        listening: tasks with an `on_commit`.
        files: returns the values of a checkpoint by task; None if the disk damaged them.
        ahead: how many epochs a task may be ahead of the last commit.
        epochs: how many epochs the job has; None if a task decides.
        min_in_sync: how many replicas must store a boundary before its epoch may commit.
    """

    def __init__(
        self,
        job: str,
        tasks: int,
        runs: TaskExecutions,
        first: Mapping[int, int],
        *,
        living: Callable[[], Mapping[str, Node]],
        expected: list[list[int]] | None,
        without_state: frozenset[int],
        sharing: Sharing,
        listening: frozenset[int],
        files: Callable[[CheckpointRecord], Mapping[int, Encoded] | None],
        ahead: int = 0,
        epochs: int | None = None,
        min_in_sync: int = 1,
    ) -> None:
        self.view = JobView(job)  # of etcd, after its last write
        self._tasks = tasks
        self._runs = runs
        self._living = living
        self._expected = expected
        self._without_state = without_state
        self._sharing = sharing
        self._listening = listening
        self._keys: dict[int, Key] = {}  # task -> key of its committed boundary; none for boundary 0
        self.states: dict[int, dict[int, int]] = {0: dict(first)}  # boundary -> task -> state
        self._state_by_digest: dict[bytes, int] = {}
        self._checkpoint_values = files
        self._ahead = ahead
        self._epochs = epochs
        self._min_in_sync = min_in_sync
        self._member_counts: dict[int, list[tuple[int, int]]] = {}  # task -> (revision, number of members from then on)
        self._is_over = False  # the job's last epoch has committed
        self._attempts: dict[int, int] = {}  # boundary -> the attempt that computed it
        self._checkpoints: dict[str, int] = {}  # checkpoints for a roll-back -> boundary
        self._undone_states: dict[int, list[dict[int, int]]] = {}  # boundary -> its states that roll-backs undid
        self._first_logged_epoch = 0  # reports of epochs before this one were lost with all replicas of task 0
        self._in_checkpoint: set[int] = set()  # tasks whose committed boundary may exist only in a checkpoint
        self._commit_calls: set[tuple[int, int]] = set()  # (task, epoch) since the last roll-back
        self._wishes: dict[int, Mapping[int, Wish]] = {}  # revision of the placement's input -> task -> wish

    # -- another run --------------------------------------------------------------------------------

    def check_resubmission(self, before: Invariants, revision: int, items: Iterable[KeyValue]) -> None:
        """Checks a second submission of the job's name: it begins anew, or from a checkpoint of the run before.

        Raises Violation.
        """
        view = self.view
        view.reset(revision, items)
        assert view.epoch is not None and before.view.epoch is not None
        if view.primaries or view.members or view.gone or view.collected or not view.running:
            raise Violation("a run begins with something of the run before")
        now, was = view.epoch.record, before.view.epoch.record
        if view.checkpoint is None:
            if (now.epoch, now.lineage, now.base) != (0, 0, 0):
                raise Violation(f"a run begins at {now}, and from no checkpoint")
            return
        pointer, lineage = view.checkpoint.record, now.attempt
        if before._checkpoints.get(pointer.name) != now.epoch or pointer.epoch != now.epoch:
            raise Violation(f"a run begins at {now}, and from {pointer}, which is no checkpoint of it")
        if lineage <= was.attempt or (now.lineage, now.base) != (lineage, now.epoch):
            raise Violation(f"a run that goes on from a checkpoint begins at {now}, after {was}")
        self.states = {boundary: states for boundary, states in before.states.items() if boundary <= now.epoch}
        self._attempts = {boundary: attempt for boundary, attempt in before._attempts.items() if boundary <= now.epoch}
        self._checkpoints = {name: epoch for name, epoch in before._checkpoints.items() if epoch <= now.epoch}
        self._in_checkpoint = set(range(self._tasks))
        self._first_logged_epoch = before._first_logged_epoch

    # -- after every write ------------------------------------------------------------------------

    def check_write(self, revision: int, events: tuple[KeyEvent, ...]) -> None:
        """Applies a write to the view, and raises Violation if the protocol forbids the write."""
        view = self.view
        at = view.epoch.record if view.epoch is not None else None
        state = view.status.record.state if view.status is not None else JobStatus.RUNNING
        before = dict(view.primaries)
        held = {task: view.in_sync(task) for task in range(self._tasks)}
        gone_before = dict(view.gone)
        pointer = view.checkpoint.record if view.checkpoint is not None else None
        view.apply(revision, events)
        for event in events:
            if event.kind == "put":
                self._check_put(event.kv, before, gone_before)
            elif event.kv.key.endswith("/primary"):
                raise Violation(f"{event.kv.key} was deleted")
        written = {event.kv.key for event in events if event.kind == "put"}
        if at is not None and view.keys.epoch in written:
            assert view.epoch is not None
            self._check_epoch_change(at, view.epoch.record, written, held)
            if view.epoch.record.epoch < at.epoch and pointer is not None:
                self._check_rolled_back_to_newest(pointer)
        elif at is not None and view.keys.checkpoint in written:
            self._check_pointer()
        if view.status is not None and view.status.record.state != state and state != JobStatus.RUNNING:
            back = view.running and at is not None and view.epoch is not None and view.epoch.record.epoch < at.epoch
            if state != JobStatus.FINISHED or not (back or view.status.record.state == JobStatus.FAILED):
                raise Violation(f"the job {state}, and then it was {view.status.record.state}")
        if view.running == self._is_over and view.status is not None and view.status.record.state not in _ENDED_BEFORE:
            ended = "was the job's last one" if self._is_over else "was not, and the job ended"
            raise Violation(f"the last epoch that committed {ended}")
        for task, known in view.primaries.items():
            if known.mod_revision == revision and known.record.node not in held[task]:
                self._check_primary_without_boundary(task, held[task])
        for node, record in gone_before.items():
            if view.gone.get(node) != record:
                raise Violation(f"node {node} was declared gone, and then something else was written about it")
        if self._min_in_sync > 1:
            self._count_members(revision)
        self.check_holders()
        self._check_wishes_agree()

    def _check_put(self, kv: KeyValue, before: Mapping[int, object], gone: Container[str]) -> None:
        """Checks one written key: a primary has the next term, and only a primary writes its members' keys.

        Args:
            before: task -> its primary before the write.
            gone: nodes that were gone before the write.
        """
        keys = self.view.keys
        if kv.lease and not kv.key.startswith(keys.nodes):
            raise Violation(f"{kv.key} hangs on a lease")
        if not kv.key.startswith(keys.tasks):
            return
        parts = kv.key[len(keys.tasks) :].split("/")
        task = int(parts[0])
        known = before.get(task)
        if parts[1] == "primary":
            record = PrimaryRecord.from_bytes(kv.value)
            term = known.record.term if known is not None else 0  # type: ignore[attr-defined]
            if record.term != term + 1:
                raise Violation(f"task {task}: term {term} was followed by term {record.term} of {record.node}")
        else:
            writer = MemberRecord.from_bytes(kv.value).writer.rpartition(":")[0]
            primary = self.view.primary_node(task)
            if writer != primary:
                raise Violation(f"task {task}: {kv.key} was written by {writer}, its primary is {primary}")
            member = parts[-1]
            if member != writer and member in gone and MemberRecord.from_bytes(kv.value).until is None:
                raise Violation(f"task {task}: {member} was admitted, although it is gone")

    def _check_epoch_change(
        self, at: EpochRecord, now: EpochRecord, written: set[str], held: Mapping[int, list[str]]
    ) -> None:
        """Checks a change of the epoch's key: a commit, a restart or a roll-back."""
        several = now.epoch - at.epoch
        if 1 <= several <= 1 + self._ahead and now == structs.replace(at, epoch=now.epoch, writer=now.writer):
            for epoch in range(at.epoch, now.epoch):
                self._check_commit(Stamp(at.attempt, epoch))
        elif now == structs.replace(at, attempt=at.attempt + 1, writer=now.writer):
            pass  # a restart
        elif now.epoch < at.epoch:
            self._check_roll_back(at, now, written, held)
        else:
            raise Violation(f"the epoch went from {at} to {now}")

    def _check_roll_back(
        self, at: EpochRecord, now: EpochRecord, written: set[str], held: Mapping[int, list[str]]
    ) -> None:
        """Checks a roll-back: it goes to a checkpoint, with the next attempt, and only if a task was lost."""
        view = self.view
        attempt = at.attempt + 1
        if now != structs.replace(
            at, epoch=now.epoch, attempt=attempt, lineage=attempt, base=now.epoch, writer=now.writer
        ):
            raise Violation(f"a roll-back went from {at} to {now}")
        if view.checkpoint is None or view.keys.checkpoint not in written:
            raise Violation(f"the epoch went back from {at} to {now}, and to no checkpoint")
        name = view.checkpoint.record.name
        if self._checkpoints.get(name) != now.epoch or view.checkpoint.record.epoch != now.epoch:
            raise Violation(f"a roll-back to boundary {now.epoch}, and to {name}, which is not a checkpoint of it")
        lost = [
            task
            for task, holders in held.items()
            if task not in self._without_state
            and not any(name in self._living() and name not in view.gone for name in holders)
        ]
        if not any(view.keys.primary(task) in written for task in lost):
            raise Violation(f"a roll-back, although somebody holds each task: {held}")
        if not view.running:
            raise Violation(f"a job that went back to boundary {now.epoch} passes for finished")
        for boundary in [b for b in self.states if b > now.epoch]:
            self._undone_states.setdefault(boundary, []).append(self.states.pop(boundary))
        self._checkpoints = {name: epoch for name, epoch in self._checkpoints.items() if epoch <= now.epoch}
        self._in_checkpoint = set(range(self._tasks))
        self._commit_calls = set()
        self._is_over = False

    def _check_rolled_back_to_newest(self, pointer: CheckpointRecord) -> None:
        """Checks that a roll-back went to the newest checkpoint, `pointer`, if that is usable."""
        assert self.view.checkpoint is not None
        name = self.view.checkpoint.record.name
        if name != pointer.name and self._checkpoint_values(pointer) is not None:
            raise Violation(f"a roll-back to {name}, although {pointer.name} is complete")

    def _check_pointer(self) -> None:
        """Checks that a new checkpoint has the states of a boundary that is committed and not undone."""
        assert self.view.checkpoint is not None
        record = self.view.checkpoint.record
        if self._attempts.get(record.epoch) != record.attempt or record.epoch not in self.states:
            raise Violation(f"{record} is a checkpoint of a boundary that is not committed")
        if unknown := [name for name in record.before if name not in self._checkpoints]:
            raise Violation(f"{record} names checkpoints before it that are none: {unknown}")
        files = self._checkpoint_values(record)
        for task in range(self._tasks):
            if files is None or task in self._without_state:
                continue
            if task not in files:
                raise Violation(f"{record} is complete without a file of task {task}")
            if self._decode_state(files[task]) != self.states[record.epoch][task]:
                raise Violation(f"{record}: the file of task {task} has another state than was committed")
            self._sharing.check_value(task, files[task], record.epoch, str(record))
        self._checkpoints[record.name] = record.epoch

    def is_of_last_commit(self, boundary: Stamp) -> bool:
        """True if this boundary is the last committed one, in the attempt that computed it."""
        at = self.view.epoch.record if self.view.epoch is not None else None
        return at is not None and at.epoch == boundary.epoch and self._attempts.get(at.epoch) == boundary.attempt

    def _check_primary_without_boundary(self, task: int, held: list[str]) -> None:
        """Checks that a primary without a boundary began only since all nodes that had one (`held`) are gone."""
        view = self.view
        assert view.epoch is not None
        if present := [name for name in held if name not in view.gone or name in view.nodes]:
            raise Violation(f"task {task} began from nothing, although {present} held it")
        if task == 0 and not view.is_checkpointed:
            self._first_logged_epoch = view.epoch.record.epoch
        if view.epoch.record.epoch > 0 and task not in self._without_state:
            if not view.is_checkpointed:
                raise Violation(f"task {task} began from nothing, and no checkpoint has boundary {view.epoch.record}")
            self._in_checkpoint.add(task)

    def _check_commit(self, stamp: Stamp) -> None:
        """Checks an epoch that was committed against what user code did in it, and keeps its states."""
        assert self.view.epoch is not None
        terms = {task: self.view.term(task) for task in range(self._tasks)}
        self._check_min_in_sync(stamp, terms)
        if self._is_over:
            raise Violation(f"epoch {stamp.epoch} committed, and the one before it was the job's last one")
        self._sharing.check_commit(stamp.epoch)
        after = self._runs.check_commit(stamp, terms, self.states[stamp.epoch], self.view.epoch.record.base)
        self._is_over = self._runs.finish_was_called(stamp, terms) or stamp.epoch + 1 == self._epochs
        self.states[stamp.epoch + 1] = after
        self._attempts[stamp.epoch + 1] = stamp.attempt
        self._in_checkpoint = set()
        if self._expected is not None and stamp.epoch + 1 >= len(self._expected):
            raise Violation(f"epoch {stamp.epoch} committed, and the job has {len(self._expected) - 1}")
        if self._expected is not None and [after[t] for t in range(self._tasks)] != self._expected[stamp.epoch + 1]:
            wrong = [t for t in range(self._tasks) if after[t] != self._expected[stamp.epoch + 1][t]]
            raise Violation(f"epoch {stamp.epoch} committed with other states than without failures: tasks {wrong}")
        self._keys = {task: (stamp.epoch + 1, stamp.attempt, term) for task, term in terms.items()}

    def _count_members(self, revision: int) -> None:
        """Notes the number of each task's members, if it changed at this revision."""
        for task in range(self._tasks):
            count = sum(member.record.until is None for member in self.view.members_of(task).values())
            counts = self._member_counts.setdefault(task, [])
            if not counts or counts[-1][1] != count:
                counts.append((revision, count))

    def _check_min_in_sync(self, stamp: Stamp, terms: Mapping[int, int]) -> None:
        """Checks that `min_in_sync` members existed at one time since the epoch's states were computed."""
        for task, since in self._runs.end_revisions(stamp, terms).items() if self._min_in_sync > 1 else ():
            counts = self._member_counts[task]
            at_first = max(at for at, _ in counts if at <= since)
            most = max(count for at, count in counts if at >= at_first)
            if most < self._min_in_sync:
                raise Violation(
                    f"epoch {stamp.epoch} committed, and {most} of min_in_sync={self._min_in_sync} replicas of task "
                    f"{task} hold what came out"
                )

    # -- I3 ---------------------------------------------------------------------------------------

    def check_holders(self) -> None:
        """Checks that every living in-sync member has the committed boundary, with the committed content."""
        view = self.view
        if not self._keys or view.stamp is None:
            return
        epoch, living = view.stamp.epoch, self._living()
        for task in range(self._tasks):
            if task in self._without_state:
                continue  # the successor creates the state anew
            if task in self._in_checkpoint:
                continue  # the successor reads the checkpoint
            key, state = self._keys[task], self.states[epoch][task]
            for name in view.in_sync(task):
                node = living.get(name)
                if node is None:
                    continue
                replica = node.roles.replicas.get(task)
                held = _boundary_to_commit(replica.boundaries, epoch) if replica is not None else None
                if held is None:
                    raise Violation(f"{name} is in sync for task {task}, and does not hold boundary {epoch}")
                self._sharing.check_boundary(task, held, name)
                if self._decode_state(held.value) != state:
                    # A later term may offer the boundary under its own key: only the content must match.
                    raise Violation(
                        f"{name} is in sync for task {task}; what it holds as boundary {held.key} has another content "
                        f"than {key}, which was committed"
                    )

    def _decode_state(self, value: Encoded) -> int:
        """Returns the state, a number, in a snapshot."""
        known = self._state_by_digest.get(value.digest)
        if known is None:
            known = self._state_by_digest[value.digest] = int(decode(value)["state"]["value"][0])
        return known

    # -- placement --------------------------------------------------------------------------------

    def _check_wishes_agree(self) -> None:
        """Checks that nodes with the same view compute the same placement."""
        for name, node in self._living().items():
            if node.placement.by_task:
                wishes = self._wishes.setdefault(node.placement.revision, node.placement.by_task)
                if node.placement.by_task != wishes:
                    raise Violation(
                        f"{name} wishes for {node.placement.by_task}, and another by what it read for {wishes}"
                    )

    # -- on_commit, and the end -------------------------------------------------------------------

    def check_commit_calls(self) -> None:
        """Checks that `on_commit` was called only with committed epochs and their states."""
        for task, number, state in self._runs.take_commit_calls():
            self._commit_calls.add((task, number))
            # The call may come late, with an epoch that was undone meanwhile.
            known = [
                *self._undone_states.get(number + 1, ()),
                *([self.states[number + 1]] if number + 1 in self.states else ()),
            ]
            if not known:
                raise Violation(f"on_commit of task {task} was called with epoch {number}, which is not committed")
            if state is not None and all(after[task] != state for after in known):
                raise Violation(f"on_commit of task {task} got a state of epoch {number} that is not committed")

    def check_result(self, result: JobResult) -> None:
        """Checks that the result has the last committed states, and the reports of each committed epoch."""
        epochs, values = result.epochs, result.values
        last = max(self.states)
        for task in sorted(self._listening):
            if (task, last - 1) not in self._commit_calls:
                raise Violation(f"on_commit of task {task} was never called with epoch {last - 1}, the last one")
        if epochs != last:
            raise Violation(f"the result says {epochs} epochs, committed are {last}")
        if dict(values) != self.states[last]:
            raise Violation(f"the result {values} is not what was committed: {self.states[last]}")
        reports = {report.epoch: report.by_task for report in result.reports}
        for epoch in range(last):
            known = reports.get(epoch, {})
            expected = {task: {f"t{task}": reported_number(state)} for task, state in self.states[epoch + 1].items()}
            # Reports are lost with the leader and all replicas of its boundary, and for tasks without state.
            lost = expected.keys() - known.keys() - self._without_state if epoch >= self._first_logged_epoch else ()
            if lost or any(known[task] != expected[task] for task in known):
                raise Violation(f"the reports of epoch {epoch} are {known}, and not {expected}")


def _boundary_to_commit(boundaries: Boundaries, epoch: int) -> Boundary | None:
    """Returns the boundary that a replica regards as committed once it reads the commit of the epoch.

    That is its committed one, else the newest pending one of the epoch; None: it has none, or is further on.
    """
    committed = boundaries.committed
    if committed is not None and committed.stamp.epoch >= epoch:
        return committed if committed.stamp.epoch == epoch else None
    of_epoch = [b for b in boundaries.pending if b.stamp.epoch == epoch]
    return max(of_epoch, key=lambda b: b.key, default=None)


def kind_of(view: JobView, puts: list[tuple[str, bytes]]) -> str:
    """Returns the kind of a transaction, by the keys that it puts, as in `drawing`'s moments; "" for other keys."""
    keys = view.keys
    by_key = dict(puts)
    if keys.spec in by_key:
        return "submit"
    if keys.epoch in by_key:
        record = EpochRecord.from_bytes(by_key[keys.epoch])
        assert view.stamp is not None
        if record.epoch < view.stamp.epoch:
            return "rollback"
        return "commit" if record.attempt == view.stamp.attempt else "restart"
    if keys.checkpoint in by_key:
        return "checkpoint"
    if keys.status in by_key:
        return "end"
    for key, value in puts:
        if key.endswith("/primary"):
            return "takeover" if PrimaryRecord.from_bytes(value).term > 1 else "first primary"
        if "/members/" in key:
            return "admit" if MemberRecord.from_bytes(value).until is None else "evict"
        if key.startswith(keys.nodes):
            return "register"
        if key.startswith(keys.gone_nodes):
            return "gone"
    return ""
