"""What one node may do in the model, on the parts of a state that it touches: decided by the classes that nodes use.

Every method takes numbers of parts and returns numbers of parts, or None where it does not apply; `model_kit` makes
them for many states at once. Where an invariant breaks, they raise Violation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from model_states import Etcd, Interned, Key, Role, Slot, Violation, Write
from numpy.typing import NDArray
from protocol_kit import boundary, report

from taskgraph.protocol import transactions
from taskgraph.protocol.boundaries import Boundaries
from taskgraph.protocol.commit import Commit, Leader, Restart
from taskgraph.protocol.insync import InSyncSet, MemberState
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.records import GoneRecord, MemberRecord
from taskgraph.protocol.takeover import TakeoverMove, succession

__all__ = ["Decision", "Plants", "Steps"]

_REFUSED, _EXECUTED, _KNOWN = range(3)  # how a write went

Done = tuple[int, int]
"""A task is done with the epoch at work, in a term."""


@dataclass
class Plants:
    """Bugs of the code around the protocol's classes, which the model stands for; all off unless a test plants one.

    Attributes:
        joiner_puts_key: a candidate that holds what it was offered puts its own member key.
        answers_are_kept: a primary's successful writes answer for those it makes in a later term, too.
    """

    joiner_puts_key: bool = False
    answers_are_kept: bool = False


@dataclass(frozen=True)
class Decision:
    """A transaction that somebody decided on. `counted`: the boundaries that become committed, if it is a commit."""

    txn: Txn
    counted: tuple[Key, ...] = ()


def _same(part: Hashable) -> Hashable:
    return part


class Steps:
    """Steps of nodes called `names` in a job of `tasks` tasks. Node key revisions are 1: a node registers once."""

    def __init__(self, names: str, tasks: int, epochs: int, plants: Plants, reduced: bool) -> None:
        self.names, self.tasks, self.epochs = names, tasks, epochs
        self.plants, self.reduced = plants, reduced
        self.etcds: Interned[Etcd | None] = Interned(lambda etcd: etcd and etcd.key)
        self.slots: Interned[Slot | None] = Interned(lambda slot: slot and slot.key)
        self.etcds.number(None)  # number 0: what a dead node read, and what it holds
        self.slots.number(None)
        self.dones: Interned[frozenset[Done]] = Interned(_same)
        self.dones.number(frozenset())
        self._choices: list[int] = []
        self.committed: Interned[tuple[Key, ...]] = Interned(_same)  # per task, as the last commit counted it
        self.committed.number(())
        self.decisions: Interned[Decision] = Interned(_same)
        self._results: dict[tuple[int, int], int | None] = {}

    def etcd(self, number: int) -> Etcd:
        found = self.etcds[number]
        assert found is not None
        return found

    def slot(self, number: int) -> Slot:
        found = self.slots[number]
        assert found is not None
        return found

    # -- etcd -------------------------------------------------------------------------------------

    def _execute(self, txn: Txn, etcd: Etcd) -> tuple[TxnResult, Etcd]:
        """Executes a transaction, and holds it to what every transaction must keep."""
        result, after = etcd.execute(txn)
        (attempt, epoch), (new_attempt, new_epoch) = etcd.stamp, after.stamp
        _check(new_epoch - epoch in (0, 1), f"the epoch went from {epoch} to {new_epoch}")
        _check(new_attempt - attempt in (0, 1), f"the attempt went from {attempt} to {new_attempt}")
        _check(new_epoch == epoch or new_attempt == attempt, "a commit changed the attempt")
        for task in range(self.tasks):
            _check(after.view.term(task) - etcd.view.term(task) in (0, 1), f"the term of task {task} leapt")
            primary = after.view.primary_node(task) or ""
            own = after.view.members_of(task).get(primary)
            _check(own is not None and own.record.until is None, f"{primary} is primary of {task}, and no member")
            if epoch == new_epoch:
                lost = set(etcd.view.in_sync(task)) - set(after.view.in_sync(task)) - set(after.view.gone)
                _check(not lost, f"boundary {epoch} of task {task} is still committed, and {lost} no heirs")
        return result, after

    def execute(self, decision: int, etcd: int) -> tuple[int, int] | None:
        """What etcd holds after it; None where it is refused: whoever decided reads etcd, and that is a step anyway."""
        after = self._executed(decision, etcd)
        if after is None:
            return None
        counted = self.decisions[decision].counted
        for task, (_, _, term) in enumerate(counted):
            _check(self.etcd(etcd).view.term(task) == term, f"a commit counted term {term} of task {task}")
        return after, self.committed.number(counted)

    def _executed(self, decision: int, etcd: int) -> int | None:
        """What etcd holds after a transaction, or None where it was refused."""
        if (decision, etcd) not in self._results:
            result, after = self._execute(self.decisions[decision].txn, self.etcd(etcd))
            self._results[decision, etcd] = self.etcds.number(after) if result.succeeded else None
        return self._results[decision, etcd]

    def die(self, node: int, etcd: int) -> int:
        """Its key goes, and its launcher says that it is gone: at once, as nothing but compares ever looks at it."""
        name, at = self.names[node], self.etcd(etcd)
        at = at.without(at.view.keys.node(name))
        return self.etcds.number(self._execute(transactions.declare_gone(at.view, name, GoneRecord(reason="")), at)[1])

    # -- reading ----------------------------------------------------------------------------------

    def read(self, node: int, task: int, slot: int, before: int, now: int) -> int:
        """The node reads etcd; what that means for one of its tasks, as `Primary._moved` and `Replica.follow` do."""
        name, found = self.names[node], self.slot(slot).copy()
        view, stamp = self.etcd(now).view, self.etcd(now).stamp
        held, role = found.boundaries, found.role
        held.note_committed(stamp.epoch)
        if role is not None and not view.is_primary(task, name, role.term):
            if self.plants.answers_are_kept:
                kept = {other for other, write in role.writes.items() if write.done and write.kind == "evict"}
                found.answers = tuple(sorted({*found.answers, *kept}))
            found.role = role = None
        if role is not None:
            _check(
                held.has_committed(stamp.epoch), f"{name}: an epoch of its task {task} committed without its boundary"
            )
            assert held.committed is not None
            if stamp.attempt > self.etcd(before).stamp.attempt:
                held.drop_pending()
                role.insync.drop_pending(held.committed.stamp.epoch)
            role.insync.drop_before(stamp.epoch)
            role.insync.add(held.committed.key)
        return self.slots.number(found)

    # -- a primary's own steps ----------------------------------------------------------------------

    def _next_boundary(self, slot: int, view: int) -> Key | None:
        """The boundary that a primary works towards, if it does."""
        found, (attempt, epoch) = self.slot(slot), self.etcd(view).stamp
        if found.role is None or epoch >= self.epochs or not found.boundaries.has_committed(epoch):
            return None
        return (epoch + 1, attempt, found.role.term)

    def snapshot(self, slot: int, view: int) -> int | None:
        key = self._next_boundary(slot, view)
        if key is None or key in self._role(slot).insync.current:
            return None  # there is nothing to do, or it is made
        found = self.slot(slot).copy()
        assert found.role is not None
        found.boundaries.store(boundary(*key), committed=False)
        found.role.insync.add(key)
        return self.slots.number(found)

    def done(self, slot: int, view: int) -> int | None:
        """The term in which a task is done, by all that its primary knows."""
        key, role = self._next_boundary(slot, view), self.slot(slot).role
        if key is None or role is None or key not in role.insync.current or role.insync.waits_for(key):
            return None
        return role.term

    def _role(self, slot: int) -> Role:
        role = self.slot(slot).role
        assert role is not None
        return role

    def begin_admit(self, node: int, other: int, task: int, slot: int, view: int) -> int | None:
        name, candidate = self.names[node], self.names[other]
        if candidate not in self.etcd(view).view.nodes or not self._role(slot).insync.may_admit(candidate):
            return None
        found = self.slot(slot).copy()
        role = found.role
        assert role is not None
        txn = transactions.admit(
            self.etcd(view).view,
            task,
            primary_revision=role.revision,
            node=name,
            node_revision=1,
            candidate=candidate,
            writer="",
        )
        role.insync.begin_admission(candidate)
        role.writes[candidate] = Write("admit", self.decisions.number(Decision(txn)))
        return self.slots.number(found)

    def begin_evict(self, node: int, other: int, task: int, slot: int, view: int) -> int | None:
        name, member, seen = self.names[node], self.names[other], self.etcd(view).view
        if self._role(slot).insync.state_of(member) not in (MemberState.MEMBER, MemberState.MARKED):
            return None
        if member not in seen.members_of(task):
            return None  # its view is behind its own admission: it waits
        found = self.slot(slot).copy()
        role = found.role
        assert role is not None
        txn = transactions.evict(
            seen, task, primary_revision=role.revision, node=name, node_revision=1, member=member, writer=""
        )
        role.insync.begin_eviction(member)
        decision = self.decisions.number(Decision(txn))
        role.writes[member] = Write("evict", decision, done=member in found.answers)
        return self.slots.number(found)

    def pending(self, other: int, slot: int) -> int | None:
        """The write about another node that was decided and not executed yet."""
        write = self._role(slot).writes.get(self.names[other])
        return None if write is None or write.done else write.decision

    def write(self, other: int, decision: int, etcd: int) -> tuple[int, int]:
        """It is executed: what etcd holds then, and how it went.

        A refusal is known at once, see `Write`. That a dead node was evicted is, too: who does not know it may do
        nothing that who knows it may not.
        """
        after = self._executed(decision, etcd)
        if after is None:
            return etcd, _REFUSED
        at, name = self.etcd(after), self.names[other]
        return after, _KNOWN if self.reduced and name in at.view.gone else _EXECUTED

    def written(self, other: int, slot: int, outcome: int) -> int:
        """What its primary makes of that."""
        name, found = self.names[other], self.slot(slot).copy()
        assert found.role is not None
        found.role.writes[name].done = True
        if outcome != _EXECUTED:
            self._known(found, name, outcome == _KNOWN)
        return self.slots.number(found)

    def learn(self, other: int, slot: int) -> int | None:
        """It learns that its write was executed."""
        write = self._role(slot).writes.get(self.names[other])
        if write is None or not write.done:
            return None
        found = self.slot(slot).copy()
        self._known(found, self.names[other], True)
        return self.slots.number(found)

    @staticmethod
    def _known(slot: Slot, other: str, written: bool) -> None:
        assert slot.role is not None
        if slot.role.writes.pop(other).kind == "admit":
            slot.role.insync.end_admission(other, written)
        else:
            slot.role.insync.end_eviction(other, written)

    # -- boundaries on other nodes ------------------------------------------------------------------

    def offer(
        self, node: int, other: int, task: int, invited: bool, slot: int, others: int, others_view: int
    ) -> tuple[int, int] | None:
        """A boundary is offered, held and acknowledged, as `Serving._take_offer` does it; None where it is refused.

        Held and acknowledged at once: who has not heard of an acknowledgement may do nothing that who has heard may
        not. `invited`: the first offer makes a candidate. One that has accepted nothing counts for nothing, so being
        invited is no step of its own.
        """
        name, receiver, sender = self.names[node], self.names[other], self.slot(slot).copy()
        role, committed = sender.role, sender.boundaries.committed
        if role is None or committed is None or (role.insync.state_of(receiver) is None) != invited:
            return None
        role.insync.invite(receiver)
        missing = role.insync.missing(receiver)
        view, stamp = self.etcd(others_view).view, self.etcd(others_view).stamp
        if not missing or view.term(task) < role.term or stamp.attempt < missing[0][1]:
            return None  # nothing to offer, or the receiver reads etcd first
        key = missing[0]
        is_committed = key[0] <= committed.stamp.epoch
        received = self.slot(others).copy()
        dead_attempt = not is_committed and key[1] < stamp.attempt
        if not view.is_primary(task, name, role.term) or received.role is not None or dead_attempt:
            return None
        received.boundaries.store(boundary(*key), committed=is_committed)
        received.boundaries.note_committed(stamp.epoch)
        role.insync.acknowledge(receiver, key)
        return self.slots.number(sender), self.slots.number(received)

    def put_own_key(self, other: int, task: int, slot: int, etcd: int) -> int | None:
        """The planted bug: a candidate that just held something puts its own member key."""
        if self._role(slot).insync.state_of(self.names[other]) is not MemberState.CANDIDATE:
            return None
        at = self.etcd(etcd)
        put = Put(at.view.keys.member(task, self.names[other]), MemberRecord().to_bytes())
        return self.etcds.number(self._execute(Txn(success=(put,)), at)[1])

    # -- the leader -----------------------------------------------------------------------------------

    def revision(self, slot: int) -> int:
        """Of the key `primary` that a primary put."""
        return self._role(slot).revision

    def commit(self, choice: int, revision: int, view: int, dones: int) -> int | None:
        """The leader decides to commit, knowing one done of each task: any of those that were ever reported.

        Reports may be late or lost, so whatever was sent may be all it knows. They may also come to a leader that the
        reporter never heard of: that is more than can happen, and must be safe.
        """
        at = self.etcd(view)
        known = next(itertools.islice(itertools.product(*self._terms(dones)), choice, None), None)
        if known is None:
            return None
        leader = Leader(self.tasks, None)
        leader.begin(at.stamp)
        for task, term in enumerate(known):
            leader.receive_reports(report(task, at.stamp, term=term))
        if not isinstance(leader.decide(at.view), Commit):
            return None
        txn = transactions.commit(at.view, primary_revision=revision, finished=False, writer="")
        counted = tuple((at.stamp.epoch + 1, at.stamp.attempt, term) for term in known)
        return self.decisions.number(Decision(txn, counted))

    def _terms(self, dones: int) -> list[list[int]]:
        """Of each task the terms that were reported done."""
        return [[term for task, term in sorted(self.dones[dones]) if task == t] for t in range(self.tasks)]

    def choices(self) -> NDArray[np.int64]:
        """How many choices `commit` has, by the number of what was reported done."""
        known = range(len(self._choices), len(self.dones))
        self._choices += [math.prod(map(len, self._terms(dones))) for dones in known]
        return np.array(self._choices)

    def restart(self, revision: int, view: int) -> int:
        """Somebody asks the leader for a restart, and it agrees."""
        at = self.etcd(view)
        leader = Leader(self.tasks, None)
        leader.begin(at.stamp)
        leader.request_restart(at.stamp, "tried")
        assert isinstance(leader.decide(at.view), Restart)
        return self.decisions.number(Decision(transactions.restart(at.view, primary_revision=revision, writer="")))

    # -- takeovers -----------------------------------------------------------------------------------

    def take_over(self, node: int, task: int, view: int) -> tuple[int, int] | None:
        """A member's decision, and whom it means to replace. Anyone may be suspected; who is gone is what etcd says."""
        if self._succession(node, task, view) is not TakeoverMove.TAKE_OVER:
            return None
        seen = self.etcd(view).view
        primary = seen.primary_node(task)
        assert primary is not None
        txn = transactions.take_over(seen, task, self.names[node], 1, stateful=True, failure=False, writer="")
        return self.decisions.number(Decision(txn)), self.names.index(primary)

    def take_over_from_nothing(self, node: int, task: int, view: int) -> tuple[int, int] | None:
        if self._succession(node, task, view) is not TakeoverMove.FROM_NOTHING:
            return None
        seen = self.etcd(view).view
        primary = seen.primary_node(task)
        assert primary is not None
        txn = transactions.take_over_from_nothing(seen, task, self.names[node], 1, stateful=True, writer="")
        return self.decisions.number(Decision(txn)), self.names.index(primary)

    def _succession(self, node: int, task: int, view: int) -> TakeoverMove:
        seen = self.etcd(view).view
        primary = seen.primary_node(task)
        suspects = {primary} - {None, self.names[node]}
        gone = set(seen.gone)
        return succession(
            seen,
            task,
            self.names[node],
            suspects={*gone, *(n for n in suspects if n)},
            gone=gone,
            wished=True,
            stateful=True,
        ).move

    def begin_term(self, node: int, task: int, nothing: bool, slot: int, view: int, now: int) -> int:
        """As `Primary` begins: from what the takeover read at `now`, and the boundary it has in its own hands."""
        name, found, at = self.names[node], self.slot(slot).copy(), self.etcd(now)
        held, keys = found.boundaries, at.view.keys
        if nothing:
            held.clear()
        reads = (
            tuple(kv for kv in at.listing if kv.key == keys.epoch),
            tuple(kv for kv in at.listing if kv.key.startswith(keys.members(task))),
            tuple(kv for kv in at.listing if kv.key == keys.primary(task)),
        )
        revision = at.view.primaries[task].mod_revision
        taken = transactions.decode_takeover(TxnResult(True, revision, reads), self.etcd(view).view, task)
        held.note_committed(taken.epoch)
        if not held.has_committed(taken.epoch):
            _check(taken.epoch == 0, f"{name} took over task {task} without boundary {taken.epoch}")
            held.store(boundary(0, taken.attempt, taken.term), committed=True)
        assert held.committed is not None
        others = {n: m.until for n, (_, m) in taken.members.items() if n != name}
        members = [n for n, until in others.items() if until is None]
        marked = [n for n, until in others.items() if until is not None and until >= taken.epoch]
        found.role = Role(taken.term, revision, InSyncSet(members, marked=marked))
        found.role.insync.add(held.committed.key)
        return self.slots.number(found)

    # -- what must hold ---------------------------------------------------------------------------------

    def check_taken(self, node: int, task: int, slot: int, etcd: int, committed: int) -> None:
        """Who took over begins from the boundary that was committed."""
        held, epoch = self.slot(slot).boundaries.committed, self.etcd(etcd).stamp.epoch
        found = held and held.key
        if epoch:
            _check(
                found == self.committed[committed][task],
                f"{self.names[node]} took over task {task} from {found}, not {self.committed[committed][task]}",
            )

    def check_member(self, node: int, task: int, slot: int, etcd: int, committed: int) -> None:
        """I3: a living member that may take over holds the boundary that the last commit counted."""
        name, at = self.names[node], self.etcd(etcd)
        if not slot or not at.stamp.epoch or name not in at.view.in_sync(task):
            return  # in epoch 0 nothing is lost: boundary 0 is made anew
        held = self.slot(slot).copy().boundaries
        held.note_committed(at.stamp.epoch)
        found, right = held.committed and held.committed.key, self.committed[committed][task]
        _check(found == right, f"{name} may take over task {task} and holds {found}, not the committed {right}")

    # -- the beginning ----------------------------------------------------------------------------------

    def first_slot(self, node: int, task: int, etcd: int, members: str) -> int:
        """What a node holds as a job begins, with the task's `members` in sync."""
        name, at = self.names[node], self.etcd(etcd)
        slot = Slot(Boundaries())
        if name in members:
            slot.boundaries.store(boundary(0), committed=True)
        if at.view.primary_node(task) == name:
            revision = at.view.primaries[task].mod_revision
            insync = InSyncSet([other for other in members if other != name])
            insync.add((0, 1, 1))
            for other in insync.members():
                insync.acknowledge(other, (0, 1, 1))
            slot.role = Role(1, revision, insync)
        return self.slots.number(slot)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
