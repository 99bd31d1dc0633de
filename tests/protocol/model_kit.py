"""A job of a few nodes as a state machine, made of the real decisions and the real transactions.

A state holds etcd, and for every node its view (as old as the node has not read), its boundaries, and what its
primaries know. A step is one thing that one node does: read etcd, make a snapshot, have another node hold one, begin,
execute or learn of a write, report done, commit, restart, take over, or die. `explore` tries every order of steps,
breadth first, and checks after each one what must never break:

- the committed epoch grows by one, by a commit, and by nothing else; attempts and terms only grow;
- a commit counts the current primary of every task, and every living member that may take over from then on holds
  the very boundaries that were committed (invariant I3), also after it reads that they were;
- whoever takes over finds the committed boundary in its own hands.

Messages that are lost, late or doubled are steps that come late, or views that are old: what a node holds or writes is
decided from its own view, by the classes that nodes use.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from protocol_kit import JOB, World, boundary, report

from taskgraph.coordination.memory import MemoryStore
from taskgraph.protocol import transactions
from taskgraph.protocol.boundaries import Boundaries
from taskgraph.protocol.commit import Commit, Leader, Restart
from taskgraph.protocol.insync import InSync, Place
from taskgraph.protocol.kv import KeyValue, Txn, TxnResult
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import GoneRecord
from taskgraph.protocol.takeover import Move, succession
from taskgraph.protocol.view import JobView

__all__ = ["Budget", "Explored", "State", "Violation", "explore", "start"]

Key = tuple[int, int, int]


class Violation(AssertionError):
    """An invariant broke; the message ends with the steps that led there."""


@dataclass(frozen=True)
class Budget:
    """How much may happen in one history; every number bounds the state space."""

    epochs: int = 2
    crashes: int = 0
    takeovers: int = 0
    joins: int = 0
    evictions: int = 0
    restarts: int = 0


@dataclass
class Write:
    """An admission or eviction: decided, executed or not, and not known to the primary yet."""

    kind: str
    txn: Txn
    result: bool | None = None


@dataclass
class Role:
    """What a primary knows, for one task and one term."""

    term: int
    revision: int
    insync: InSync
    done: Stamp | None = None
    writes: dict[str, Write] = field(default_factory=dict)


@dataclass
class Node:
    name: str
    view: JobView
    boundaries: dict[int, Boundaries]
    roles: dict[int, Role] = field(default_factory=dict)
    leader: Leader | None = None


class State:
    """One state; steps change copies of it."""

    def __init__(self, tasks: int, budget: Budget) -> None:
        self.tasks = tasks
        self.budget = budget
        self.store = MemoryStore()
        self.view = JobView(JOB)  # of the store as it is; shared, never changed
        self.nodes: dict[str, Node] = {}
        self.revisions: dict[str, int] = {}
        self.committed: dict[int, Key] = {}  # task -> the boundary that the last commit counted
        self.trail: tuple[str, ...] = ()

    def copy(self) -> State:
        twin = copy.copy(self)
        twin.store = MemoryStore()
        twin.store.revision = self.store.revision
        twin.store._keys = dict(self.store._keys)
        twin.nodes = {name: _copy_node(node) for name, node in self.nodes.items()}
        return twin

    def key(self) -> object:
        """The same for states that differ in nothing a step could notice; revisions count by their order only."""
        views = {id(n.view): n.view for n in self.nodes.values()} | {id(self.view): self.view}
        listings = {number: _listing(view) for number, view in views.items()}
        seen = {r for kvs in listings.values() for kv in kvs for r in (kv.mod_revision, kv.create_revision)}
        seen.update(self.revisions.values())
        rank = {revision: place for place, revision in enumerate(sorted(seen))}
        texts = {
            number: tuple((kv.key, kv.value, rank[kv.mod_revision], rank[kv.create_revision]) for kv in kvs)
            for number, kvs in listings.items()
        }
        nodes = tuple(
            (
                node.name,
                texts[id(node.view)],
                tuple(
                    (t, held.committed and held.committed.key, tuple(held._held)) for t, held in node.boundaries.items()
                ),
                tuple((t, _role_key(role, rank)) for t, role in sorted(node.roles.items())),
                node.leader
                and (node.leader.stamp, tuple(sorted((t, r.term) for t, r in node.leader.reports().items()))),
            )
            for node in self.nodes.values()
        )
        return (texts[id(self.view)], nodes, self.budget, tuple(self.committed.items()))

    # -- etcd ---------------------------------------------------------------------------------

    def execute(self, txn: Txn) -> TxnResult:
        """Executes a transaction, and holds it to what every transaction must keep."""
        before, result = self.view, self.store.execute(txn)
        if self.store.revision != before.revision:
            self.view = JobView(JOB)
            self.view.reset(self.store.revision, self.store.select(self.view.keys.root, prefix=True))
            self._check_growth(before, self.view)
        return result

    def _check_growth(self, before: JobView, after: JobView) -> None:
        assert before.epoch is not None
        assert after.epoch is not None
        old, new = before.epoch.record, after.epoch.record
        self.check(new.epoch - old.epoch in (0, 1), f"the epoch went from {old.epoch} to {new.epoch}")
        self.check(new.attempt - old.attempt in (0, 1), f"the attempt went from {old.attempt} to {new.attempt}")
        self.check(new.epoch == old.epoch or new.attempt == old.attempt, "a commit changed the attempt")
        for task in range(self.tasks):
            self.check(after.term(task) - before.term(task) in (0, 1), f"the term of task {task} leapt")

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation("\n  ".join([what, *self.trail]))

    def check_members(self) -> None:
        """I3: every living member that may take over holds the boundary that the last commit counted."""
        assert self.view.epoch is not None
        epoch = self.view.epoch.record.epoch
        if epoch == 0:
            return  # nothing is lost: boundary 0 is made anew
        for task in range(self.tasks):
            for name in self.view.in_sync(task):
                if name not in self.nodes:
                    continue
                held = _copy_boundaries(self.nodes[name].boundaries[task])
                held.read_epoch(epoch)
                found = held.committed.key if held.committed else None
                self.check(
                    found == self.committed[task],
                    f"{name} may take over task {task} and holds {found}, not the committed {self.committed[task]}",
                )

    # -- steps --------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[str, Callable[[State], None]]]:
        """What may happen next: a name, and what it does to a copy."""
        for name, node in self.nodes.items():
            if node.view.revision != self.view.revision:
                yield f"{name} reads etcd", lambda s, n=name: s.read(n)
            for task in range(self.tasks):
                if task in node.roles:
                    yield from self._steps_of_primary(node, task)
                else:
                    yield from self._steps_of_successor(node, task)
            if node.leader is not None:
                yield from self._steps_of_leader(node)
            if self.budget.crashes:
                yield f"{name} dies", lambda s, n=name: s.die(n)

    def _steps_of_primary(self, node: Node, task: int) -> Iterator[tuple[str, Callable[[State], None]]]:
        name, role = node.name, node.roles[task]
        stamp, held = node.view.stamp, node.boundaries[task]
        assert stamp is not None
        if stamp.epoch >= self.budget.epochs or not held.holds(stamp.epoch):
            return
        key = (stamp.epoch + 1, stamp.attempt, role.term)
        if key not in role.insync.current:
            yield f"{name} makes boundary {key} of {task}", lambda s: s.snapshot(name, task, key)
        elif not role.insync.waits_for(key) and role.done != stamp:
            yield f"{name} is done with {task} at {tuple(stamp)}", lambda s: s.done(name, task)
        for other in self.nodes:
            if role.insync.missing(other):
                yield (
                    f"{name} has {other} hold {role.insync.missing(other)[0]} of {task}",
                    lambda s, o=other: s.offer(name, o, task),
                )
            invited = other == name or role.insync.place(other) is not None
            if not invited and self.budget.joins:
                yield f"{name} invites {other} to {task}", lambda s, o=other: s.invite(name, o, task)
            if role.insync.may_admit(other):
                yield f"{name} decides to admit {other} to {task}", lambda s, o=other: s.begin_admit(name, o, task)
        for other in role.insync.nodes:
            evictable = role.insync.place(other) in (Place.MEMBER, Place.MARKED)
            if evictable and self.budget.evictions and other in node.view.members_of(task):
                yield f"{name} decides to evict {other} from {task}", lambda s, o=other: s.begin_evict(name, o, task)
        for other, write in role.writes.items():
            if write.result is None:
                yield f"{name} writes: {write.kind} {other} at {task}", lambda s, o=other: s.write(name, o, task)
            else:
                yield f"{name} learns: {write.kind} {other} at {task}", lambda s, o=other: s.learn(name, o, task)
        leader = self._leader_for(stamp)
        if role.done == stamp and leader is not None:
            assert leader.leader is not None
            known = leader.leader.reports().get(task) if leader.leader.stamp == leader.view.stamp else None
            if known is None or known.term < role.term:
                yield f"{name} reports {task} done to {leader.name}", lambda s: s.report(name, task, leader.name)

    def _leader_for(self, stamp: Stamp) -> Node | None:
        """Whoever leads and has come as far as `stamp`: an earlier one parks the report until it read that."""
        found = [n for n in self.nodes.values() if n.leader is not None and n.view.stamp == stamp]
        return max(found, key=lambda n: n.roles[0].term, default=None)

    def _steps_of_successor(self, node: Node, task: int) -> Iterator[tuple[str, Callable[[State], None]]]:
        if not self.budget.takeovers:
            return
        name, view = node.name, node.view
        primary = view.primary_node(task)
        # Anyone may be suspected at any time, rightly or not; who is gone is what etcd says.
        suspects = {primary} if primary and primary != name else set()
        gone = set(view.gone)
        decision = succession(view, task, name, suspects=suspects | gone, gone=gone, wished=True, stateful=True)
        if decision.move is Move.TAKE_OVER:
            yield f"{name} takes over {task}", lambda s: s.take_over(name, task)
        elif decision.move is Move.FROM_NOTHING:
            yield f"{name} starts {task} from nothing", lambda s: s.take_over_from_nothing(name, task)

    def _steps_of_leader(self, node: Node) -> Iterator[tuple[str, Callable[[State], None]]]:
        assert node.leader is not None
        if isinstance(node.leader.decide(node.view), Commit):
            yield f"{node.name} commits {tuple(node.view.stamp or ())}", lambda s: s.commit(node.name)
        if self.budget.restarts and node.view.stamp == node.leader.stamp:
            yield f"{node.name} restarts {tuple(node.view.stamp or ())}", lambda s: s.restart(node.name)

    # -- what they do: each on a copy of the state that offered it -------------------------------

    def spend(self, what: str) -> None:
        self.budget = replace(self.budget, **{what: getattr(self.budget, what) - 1})

    def read(self, name: str) -> None:
        node, before = self.nodes[name], self.nodes[name].view
        view = node.view = self.view
        assert before.stamp is not None
        assert view.stamp is not None
        for held in node.boundaries.values():
            held.read_epoch(view.stamp.epoch)
        for task, role in list(node.roles.items()):
            if not view.is_primary(task, name, role.term):
                del node.roles[task]
                if task == 0:
                    node.leader = None
                continue
            held = node.boundaries[task]
            self.check(
                held.holds(view.stamp.epoch), f"{name}: an epoch of its task {task} committed without its boundary"
            )
            assert held.committed is not None
            if view.stamp.attempt > before.stamp.attempt:
                held.drop_pending()
                role.insync.drop_pending(held.committed.stamp.epoch)
            role.insync.keep_from(view.stamp.epoch)
            role.insync.add(held.committed.key)
        if node.leader is not None:
            node.leader.begin(view.stamp)

    def snapshot(self, name: str, task: int, key: Key) -> None:
        node = self.nodes[name]
        node.boundaries[task].hold(boundary(*key), committed=False)
        node.roles[task].insync.add(key)

    def offer(self, name: str, other: str, task: int) -> None:
        """The boundary is offered, held or refused, and acknowledged, as `Serving` does it."""
        node, receiver = self.nodes[name], self.nodes[other]
        role, held = node.roles[task], receiver.boundaries[task]
        key = role.insync.missing(other)[0]
        committed = node.boundaries[task].committed
        assert committed is not None
        is_committed = key[0] <= committed.stamp.epoch
        view, stamp = receiver.view, receiver.view.stamp
        assert stamp is not None
        if view.term(task) < role.term:
            return  # it reads etcd first
        dead_attempt = not is_committed and key[1] < stamp.attempt
        if not view.is_primary(task, name, role.term) or task in receiver.roles or dead_attempt:
            return  # refused
        held.hold(boundary(*key), committed=is_committed)
        held.read_epoch(stamp.epoch)
        role.insync.acknowledge(other, key)

    def invite(self, name: str, other: str, task: int) -> None:
        self.spend("joins")
        self.nodes[name].roles[task].insync.invite(other)

    def begin_admit(self, name: str, other: str, task: int) -> None:
        node = self.nodes[name]
        role = node.roles[task]
        txn = transactions.admit(
            node.view,
            task,
            primary_revision=role.revision,
            node=name,
            node_revision=self.revisions[name],
            candidate=other,
            writer=name,
        )
        role.insync.admitting(other)
        role.writes[other] = Write("admit", txn)

    def begin_evict(self, name: str, other: str, task: int) -> None:
        self.spend("evictions")
        node = self.nodes[name]
        role = node.roles[task]
        txn = transactions.evict(
            node.view,
            task,
            primary_revision=role.revision,
            node=name,
            node_revision=self.revisions[name],
            member=other,
            writer=name,
        )
        role.insync.evicting(other)
        role.writes[other] = Write("evict", txn)

    def write(self, name: str, other: str, task: int) -> None:
        write = self.nodes[name].roles[task].writes[other]
        write.result = self.execute(write.txn).succeeded

    def learn(self, name: str, other: str, task: int) -> None:
        role = self.nodes[name].roles[task]
        write = role.writes.pop(other)
        assert write.result is not None
        if write.kind == "admit":
            role.insync.admitted(other, write.result)
        else:
            role.insync.evicted(other, write.result)

    def done(self, name: str, task: int) -> None:
        node = self.nodes[name]
        node.roles[task].done = node.view.stamp

    def report(self, name: str, task: int, leader: str) -> None:
        role, lead = self.nodes[name].roles[task], self.nodes[leader].leader
        assert lead is not None
        assert role.done is not None
        lead.report(report(task, role.done, term=role.term))

    def commit(self, name: str) -> None:
        node = self.nodes[name]
        assert node.leader is not None
        assert node.view.stamp is not None
        attempt, epoch = node.view.stamp
        counted = node.leader.reports()
        txn = transactions.commit(node.view, primary_revision=node.roles[0].revision, finished=False, writer=name)
        before = self.view
        if not self.execute(txn).succeeded:
            return
        for task in range(self.tasks):
            term = counted[task].term
            self.check(before.term(task) == term, f"a commit counted term {term} of task {task}")
            self.committed = {**self.committed, task: (epoch + 1, attempt, term)}

    def restart(self, name: str) -> None:
        self.spend("restarts")
        node = self.nodes[name]
        assert node.leader is not None
        assert node.leader.stamp is not None
        node.leader.request_restart(node.leader.stamp, "tried")
        assert isinstance(node.leader.decide(node.view), Restart)
        node.leader = Leader(self.tasks, None)  # what was asked for is not asked for again
        if node.view.stamp is not None:
            node.leader.begin(node.view.stamp)
        self.execute(transactions.restart(node.view, primary_revision=node.roles[0].revision, writer=name))

    def take_over(self, name: str, task: int) -> None:
        self.spend("takeovers")
        node = self.nodes[name]
        txn = transactions.take_over(
            node.view, task, name, self.revisions[name], stateful=True, failure=True, writer=name
        )
        self._begin_term(node, task, self.execute(txn))

    def take_over_from_nothing(self, name: str, task: int) -> None:
        self.spend("takeovers")
        node = self.nodes[name]
        txn = transactions.take_over_from_nothing(
            node.view, task, name, self.revisions[name], stateful=True, writer=name
        )
        node.boundaries[task].clear()
        self._begin_term(node, task, self.execute(txn))

    def _begin_term(self, node: Node, task: int, result: TxnResult) -> None:
        """As `Primary` begins: from what the take-over read, and the boundary it has in its own hands."""
        if not result.succeeded:
            return
        taken = transactions.taken_over(result, node.view, task)
        held = node.boundaries[task]
        held.read_epoch(taken.epoch)
        if not held.holds(taken.epoch):
            self.check(taken.epoch == 0, f"{node.name} took over task {task} without boundary {taken.epoch}")
            held.hold(boundary(0, taken.attempt, taken.term), committed=True)
        assert held.committed is not None
        if taken.epoch:
            self.check(
                held.committed.key == self.committed[task],
                f"{node.name} took over task {task} from {held.committed.key}, not {self.committed[task]}",
            )
        others = {n: m.until for n, (_, m) in taken.members.items() if n != node.name}
        members = [n for n, until in others.items() if until is None]
        marked = [n for n, until in others.items() if until is not None and until >= taken.epoch]
        role = Role(taken.term, result.revision, InSync(members, marked=marked))
        role.insync.add(held.committed.key)
        node.roles[task] = role
        if task == 0:
            node.leader = Leader(self.tasks, None)
        self.read(node.name)  # a new primary catches up with its own write before it works

    def die(self, name: str) -> None:
        self.spend("crashes")
        del self.nodes[name]
        keys = self.view.keys
        self.store._keys.pop(keys.node(name), None)
        self.execute(transactions.declare_gone(self.view, name, GoneRecord(reason="killed")))


def _listing(view: JobView) -> tuple[KeyValue, ...]:
    found: tuple[KeyValue, ...] = view.listing  # type: ignore[attr-defined]
    return found


def _role_key(role: Role, rank: dict[int, int]) -> object:
    insync = role.insync
    return (
        role.term,
        role.done,
        tuple((n, insync.place(n), insync.missing(n)) for n in insync.nodes),
        insync.current,
        tuple(
            (
                n,
                w.kind,
                w.result,
                tuple((c.key, rank.get(c.revision, -1)) for c in w.txn.compares) if w.result is None else (),
            )
            for n, w in sorted(role.writes.items())
        ),
    )


def _copy_boundaries(held: Boundaries) -> Boundaries:
    twin = copy.copy(held)
    twin._held = dict(held._held)
    return twin


def _copy_node(node: Node) -> Node:
    twin = copy.copy(node)
    twin.boundaries = {task: _copy_boundaries(held) for task, held in node.boundaries.items()}
    twin.roles = {task: _copy_role(role) for task, role in node.roles.items()}
    if node.leader is not None:
        twin.leader = copy.copy(node.leader)
        twin.leader._reports = dict(node.leader._reports)
    return twin


def _copy_role(role: Role) -> Role:
    twin = copy.copy(role)
    twin.insync = copy.copy(role.insync)
    twin.insync._place = dict(role.insync._place)
    twin.insync._acked = {node: set(acked) for node, acked in role.insync._acked.items()}
    twin.insync._current = list(role.insync._current)
    twin.writes = {node: copy.copy(write) for node, write in role.writes.items()}
    return twin


def start(tasks: int, nodes: str, budget: Budget, *, members: str = "ab") -> State:
    """A job that just began: task t on the (t mod 2)th of `members`, which are all in sync."""
    world = World(*nodes)
    for task in range(tasks):
        first = members[task % len(members)]
        world.first(task, first)
        for other in members:
            if other != first:
                world.admit(task, first, other)
    state = State(tasks, budget)
    state.store, state.revisions, state.view = world.store, world.revisions, world.view()
    for name in nodes:
        held = {task: Boundaries() for task in range(tasks)}
        node = state.nodes[name] = Node(name, state.view, held)
        for task in range(tasks):
            if name in members:
                held[task].hold(boundary(0), committed=True)
            if state.view.primary_node(task) == name:
                revision = state.view.primaries[task].mod_revision
                others = [n for n in members if n != name]
                node.roles[task] = Role(1, revision, InSync(others, [(0, 1, 1)]))
                if task == 0:
                    node.leader = Leader(tasks, None)
                    node.leader.begin(Stamp(1, 0))
    return state


@dataclass
class Explored:
    """What an exploration saw: how many states, and how often each kind of step was taken."""

    states: int
    steps: Counter[str]
    epochs: int


def explore(begin: State, *, limit: int) -> Explored:
    """Every state that can be reached, breadth first, each checked.

    Raises:
        Violation: an invariant broke; the message holds a shortest way there.
    """
    _remember_listing(begin)
    queue, seen = deque([begin]), {hash_of(begin)}
    steps: Counter[str] = Counter()
    epochs = 0
    while queue:
        state = queue.popleft()
        for what, do in state.steps():
            after = state.copy()
            after.trail = (*state.trail, what)
            do(after)
            _remember_listing(after)
            steps[what.split(" ", 1)[1].split(" ")[0]] += 1
            mark = hash_of(after)
            if mark in seen:
                continue
            seen.add(mark)
            after.check_members()
            assert after.view.epoch is not None
            epochs = max(epochs, after.view.epoch.record.epoch)
            if len(seen) > limit:
                raise AssertionError(f"more than {limit} states: {steps}")
            queue.append(after)
    return Explored(len(seen), steps, epochs)


def hash_of(state: State) -> int:
    """64 bits of the state's key: among a million states two collide with a chance of 3e-8."""
    return hash(state.key())


def _remember_listing(state: State) -> None:
    """Keeps with the view what it was made of: all that a state's key says about etcd."""
    if not hasattr(state.view, "listing"):
        state.view.listing = state.store.select(state.view.keys.root, prefix=True)  # type: ignore[attr-defined]
