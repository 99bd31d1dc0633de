"""What must hold after every write to etcd, checked where the write happens.

The checks read etcd's state itself and the replicas of every process that still exists, frozen ones included; they
decide nothing and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from taskgraph.graph.values import decode
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.kv import KeyEvent, KeyValue
from taskgraph.protocol.messages import Encoded, Stamp
from taskgraph.protocol.records import EpochRecord, MemberRecord, PrimaryRecord
from taskgraph.protocol.view import JobView
from taskgraph.testing.simulate.runs import Runs, Violation

if TYPE_CHECKING:
    from taskgraph.node.node import Node

__all__ = ["Invariants", "kind_of"]

Key = tuple[int, int, int]


class Invariants:
    """Etcd as it is, and the history it must have had.

    Args:
        living: node id -> node, of every process that exists, frozen or not.
        expected: boundary -> task -> state of a failure-free run; None where the tasks are not deterministic.
    """

    def __init__(
        self,
        job: str,
        tasks: int,
        runs: Runs,
        first: Mapping[int, int],
        *,
        living: Callable[[], Mapping[str, Node]],
        expected: list[list[int]] | None,
        stateless: frozenset[int],
    ) -> None:
        self.view = JobView(job)  # of the store, after its last write
        self._tasks = tasks
        self._runs = runs
        self._living = living
        self._expected = expected
        self._stateless = stateless
        self._keys: dict[int, Key] = {}  # task -> key of its committed boundary; none for boundary 0
        self.states: dict[int, dict[int, int]] = {0: dict(first)}  # boundary -> task -> state
        self._decoded: dict[bytes, int] = {}

    # -- after every write ------------------------------------------------------------------------

    def wrote(self, revision: int, events: tuple[KeyEvent, ...]) -> None:
        """Raises Violation."""
        view = self.view
        before_stamp = view.stamp
        before = dict(view.primaries)
        gone_before = dict(view.gone)
        view.apply(revision, events)
        for event in events:
            if event.kind == "put":
                self._check_put(event.kv, before)
            elif event.kv.key.endswith("/primary"):
                raise Violation(f"{event.kv.key} was deleted")
        if before_stamp is not None and view.stamp is not None and view.stamp != before_stamp:
            self._moved(before_stamp, view.stamp)
        for node, record in gone_before.items():
            if view.gone.get(node) != record:
                raise Violation(f"node {node} was declared gone, and then something else was written about it")
        self.check_holders()

    def _check_put(self, kv: KeyValue, before: Mapping[int, object]) -> None:
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

    def _moved(self, before: Stamp, now: Stamp) -> None:
        """The epoch's key was written."""
        if now == Stamp(before.attempt, before.epoch + 1):
            self._committed(before)
        elif now == Stamp(before.attempt + 1, before.epoch):
            pass  # a restart
        else:
            raise Violation(f"the epoch went from {before} to {now}")

    def _committed(self, stamp: Stamp) -> None:
        terms = {task: self.view.term(task) for task in range(self._tasks)}
        after = self._runs.committed(stamp, terms, self.states[stamp.epoch])
        self.states[stamp.epoch + 1] = after
        if self._expected is not None and [after[t] for t in range(self._tasks)] != self._expected[stamp.epoch + 1]:
            wrong = [t for t in range(self._tasks) if after[t] != self._expected[stamp.epoch + 1][t]]
            raise Violation(f"epoch {stamp.epoch} committed with other states than without failures: tasks {wrong}")
        self._keys = {task: (stamp.epoch + 1, stamp.attempt, term) for task, term in terms.items()}

    # -- I3 ---------------------------------------------------------------------------------------

    def check_holders(self) -> None:
        """Every living in-sync member holds the committed boundary, with the content that was counted."""
        view = self.view
        if not self._keys or view.stamp is None:
            return
        epoch, living = view.stamp.epoch, self._living()
        for task in range(self._tasks):
            if task in self._stateless:
                continue  # made anew by whoever takes over
            key, state = self._keys[task], self.states[epoch][task]
            for name in view.in_sync(task):
                node = living.get(name)
                if node is None:
                    continue
                replica = node.replicas.get(task)
                held = _held(replica.boundaries, epoch) if replica is not None else None
                if held is None:
                    raise Violation(f"{name} is in sync for task {task}, and does not hold boundary {epoch}")
                if self._state(held.value) != state:
                    # A later term offers the committed boundary under its own name: the content is what counts.
                    raise Violation(
                        f"{name} is in sync for task {task}; what it holds as boundary {held.key} has another content "
                        f"than {key}, which was committed"
                    )

    def _state(self, value: Encoded) -> int:
        known = self._decoded.get(value.digest)
        if known is None:
            known = self._decoded[value.digest] = int(decode(value)["state"]["value"][0])
        return known

    # -- on_commit, and the end -------------------------------------------------------------------

    def check_told(self) -> None:
        """Everything that `on_commit` was told had committed, with that state."""
        for task, number, state in self._runs.told():
            after = self.states.get(number + 1)
            if after is None:
                raise Violation(f"on_commit of task {task} was told of epoch {number}, which is not committed")
            if after[task] != state:
                raise Violation(f"on_commit of task {task} was told a state of epoch {number} that is not committed")

    def check_result(self, epochs: int, values: Mapping[int, object]) -> None:
        """The job's result is the last committed state."""
        last = max(self.states)
        if epochs != last:
            raise Violation(f"the result says {epochs} epochs, committed are {last}")
        if dict(values) != self.states[last]:
            raise Violation(f"the result {values} is not what was committed: {self.states[last]}")


def _held(boundaries: Boundaries, epoch: int) -> Boundary | None:
    """What a replica would take for the committed boundary of that epoch, once it reads that it is committed."""
    committed = boundaries.committed
    if committed is not None and committed.stamp.epoch >= epoch:
        return committed if committed.stamp.epoch == epoch else None
    of_epoch = [b for b in boundaries.pending if b.stamp.epoch == epoch]
    return max(of_epoch, key=lambda b: b.key, default=None)


def kind_of(view: JobView, puts: list[tuple[str, bytes]]) -> str:
    """What a transaction that puts these is about, in one word."""
    keys = view.keys
    by_key = dict(puts)
    if keys.epoch in by_key:
        record = EpochRecord.from_bytes(by_key[keys.epoch])
        if view.stamp is None:
            return "submit"
        return "commit" if record.attempt == view.stamp.attempt else "restart"
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
