"""Elastic workers of the real core on a network and an etcd that a seed drives, one event at a time.

User code is not deterministic here: each computation of a part is an instance of its own, so a total that mixes two
of them differs from every other. A message, once sent, arrives late, or never if its sender has died.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from taskgraph.protocol.elastic import actions as core
from taskgraph.protocol.elastic.actions import Contribution
from taskgraph.protocol.elastic.tree import Span, cover, halves
from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Phase, Worker

NEWCOMERS_PROPOSE = False
LATE_COPIES = False
KEEP_TOTALS = True
IN_TREE_ORDER = True
"""Switches for mistakes planted in what the caller does."""

Message = tuple[str, str, object, dict[Span, str]]  # sender, receiver, message, sums


@dataclass(frozen=True)
class SliceSum:
    """A message: the sum of the slice that its sender owns."""

    view: int
    position: int


class Broken(AssertionError):
    """An invariant does not hold."""


def stable_of(donor: Peer) -> int:
    """The number of totals that a donor may give."""
    return donor.core.stable


def leaves(total: str) -> list[str]:
    return total.replace("(", "").replace(")", "").split("+")


@dataclass
class Peer:
    """A worker with its user code, its values and its process."""

    name: str
    core: Worker
    alive: bool = True
    own: dict[Span, str] = field(default_factory=dict)
    received: dict[tuple[int, int, Span], str] = field(default_factory=dict)  # by view, position and span
    early: list[tuple[str, Contribution, dict[Span, str]]] = field(default_factory=list)
    totals: list[str] = field(default_factory=list)
    user: int = 0  # the position that user code is at
    begun: int = -1  # the last position that user code has begun
    hand: tuple[int, dict[Span, str]] | None = None  # position and sums of the parts that user code computes
    ended: bool = False
    calls: int = 0
    outvoted: tuple[str, ...] = ()
    summing: tuple[int, int] | None = None  # view and position of the sum that it makes together with the others
    summed: str = ""
    slice_due: core.SumTogether | None = None  # it is about to add up its slice
    joining: core.SumTogether | None = None  # it waits for the sums of all slices
    slices: dict[tuple[int, int, str], str] = field(default_factory=dict)  # their sums, by view, position and owner


class World:
    def __init__(
        self,
        seed: int,
        *,
        workers: int,
        steps: int,
        parts: int,
        deaths: int,
        exclusions: int,
        joins: int,
        together: bool = False,
        large: bool = False,
    ):
        self.together, self.large = together, large
        self.operations: dict[int, list[tuple[int, dict[str, str]]]] = {}  # view -> position and sums, in order
        self.rng = random.Random(seed)
        self.weights = {what: self.rng.choice((0.03, 0.3, 1.0)) for what in ("read", "kill", "exclude", "join", "copy")}
        self.cut = self.rng.choice((None, None, *"ABC")) if exclusions else None
        """A worker of which the others hear late, and which reads views late."""
        self.slow = {name: self.rng.choice((0.1, 1.0, 1.0)) for name in "ABCDEFGH"}
        self.steps, self.parts = steps, parts
        self.deaths, self.exclusions, self.joins = deaths, exclusions, joins
        self.view = View(0, 0, tuple(ViewEntry(name, 0) for name in "ABCDEFGH"[:workers]))
        self.peers: dict[str, Peer] = {}
        self.net: list[Message] = []
        self.out: dict[int, str] = {}
        self.lost = False
        self.trace: list[str] = []
        self.liars: set[str] = set()  # workers with wrong tags
        self.entered = set(self.view.workers)
        for name in self.view.workers:
            self.peers[name] = Peer(name, Worker(name, whole=True, together=together))
            self.peers[name].core.note_entry(0)
        for peer in list(self.peers.values()):
            self.read(peer, self.view)
        if self.joins and self.rng.random() < 0.5:
            self.start_newcomer()

    # -- what may happen --------------------------------------------------------------------------

    def events(self, *, faults: bool) -> list[tuple[float, object]]:
        found: list[tuple[float, object]] = []
        weights = self.weights if faults else dict.fromkeys(self.weights, 0.3)
        for message in self.net:
            if self.peers[message[1]].alive:
                late = 0.01 if message[0] == self.cut and faults else 1.0
                found.append((late * self.slow.get(message[1], 1.0), lambda m=message: self.deliver(m)))
        for peer in self.peers.values():
            if not peer.alive:
                continue
            if peer.summing is not None and self.operation(peer) is not None:
                found.append((self.slow.get(peer.name, 1.0), lambda p=peer: self.get_sum(p)))
            if peer.slice_due is not None:
                found.append((self.slow.get(peer.name, 1.0), lambda p=peer: self.add_slice(p)))
            if self.has_work(peer) and (peer.core.phase != Phase.OUTSIDE or peer.hand or peer.core.view is None):
                found.append((self.slow.get(peer.name, 1.0), lambda p=peer: self.run_user(p)))
            if (peer.core.view is None or peer.core.view.number < self.view.number) and (
                peer.core.phase != Phase.OUTSIDE or self.view.since(peer.name) is not None
            ):
                late = 0.01 if peer.name == self.cut and faults else 1.0
                found.append(
                    (late * weights["read"] * self.slow.get(peer.name, 1.0), lambda p=peer: self.read(p, self.view))
                )
            up_to_date = peer.core.view is not None and peer.core.view.number == self.view.number
            if peer.core.phase != Phase.OUTSIDE and (peer.core.whole or NEWCOMERS_PROPOSE) and up_to_date:
                for other in self.view.workers:
                    known = self.peers[other]
                    dead = (
                        other in peer.outvoted
                        or not known.alive
                        or (known.core.phase == Phase.OUTSIDE and known.core.view is not None)
                    )
                    if other != peer.name and (dead or (faults and self.exclusions and len(self.view.workers) > 1)):
                        likely = 2.0 if dead else 0.2 if other != self.cut else 5.0
                        found.append(
                            (likely * weights["exclude"] / 2, lambda o=other, d=dead, p=peer: self.exclude(p, o, d))
                        )
            if faults and self.deaths and peer.core.phase != Phase.OUTSIDE:
                found.append((weights["kill"] / 10, lambda p=peer: self.kill(p)))
            gone = peer.name not in self.view.workers
            if LATE_COPIES and gone and peer.name in self.entered and self.joins:
                found.append((0.1, lambda p=peer: self.put_back(p)))
            if peer.core.phase == Phase.OUTSIDE and peer.name not in self.view.workers and peer.core.view is None:
                found += [(weights["copy"], lambda p=peer, d=d: self.catch_up(p, d)) for d in self.donors()]
        if faults and self.joins:
            found.append((weights["join"] / 4, self.start_newcomer))
        return found

    def donors(self) -> list[Peer]:
        return [
            p
            for p in self.peers.values()
            if p.alive and p.core.phase in (Phase.WORKING, Phase.LACKING) and p.core.whole
        ]

    def step(self, *, faults: bool) -> bool:
        events = self.events(faults=faults)
        if not events:
            return False
        self.rng.choices([e for _, e in events], [w for w, _ in events])[0]()  # type: ignore[operator]
        self.check()
        return True

    def note(self, text: str) -> None:
        self.trace.append(text)

    def kill(self, peer: Peer) -> None:
        self.note(f"{peer.name} dies")
        self.deaths -= 1
        peer.alive = False
        self.net = [m for m in self.net if m[0] != peer.name or self.rng.random() < 0.5]

    def exclude(self, by: Peer, other: str, dead: bool) -> None:
        self.exclusions -= 0 if dead else 1
        self.view = self.view.without({other})
        self.note(f"{by.name} puts {self.view} without {other}")

    def start_newcomer(self) -> None:
        self.joins -= 1
        name = f"N{len(self.peers)}"
        self.note(f"{name} starts")
        self.peers[name] = Peer(name, Worker(name, together=self.together))

    def catch_up(self, peer: Peer, donor: Peer) -> None:
        """A newcomer copies stable totals of a donor, then enters against the donor's view."""
        stable = stable_of(donor)
        if peer.core.position < stable:
            peer.totals += donor.totals[peer.core.position : stable]
            peer.core.catch_up(len(peer.totals))
            self.note(f"{peer.name} has {peer.core.position} totals of {donor.name}")
        elif (
            donor.core.view is not None and donor.core.view.number == self.view.number and len(peer.totals) < self.steps
        ):
            self.view = self.view.joined_by(peer.name)
            peer.core.note_entry(self.view.number)
            peer.user = max(peer.user, 0)
            self.note(f"{peer.name} enters {self.view}")

    def put_back(self, peer: Peer) -> None:
        """A late copy of a request to enter is carried out."""
        self.joins -= 1
        self.view = self.view.joined_by(peer.name)
        self.note(f"a late request puts {peer.name} back: {self.view}")

    def read(self, peer: Peer, view: View) -> None:
        self.note(f"{peer.name} reads view {view.number}")
        peer.core.read_view(view)
        self.carry_out(peer)

    def deliver(self, message: Message) -> None:
        sender, receiver, content, sums = message
        peer = self.peers[receiver]
        self.net.remove(message)
        self.note(f"{receiver} takes {content} of {sender}")
        if isinstance(content, core.SendReport):
            if not peer.core.receive_report(sender, content.view, content.report):
                self.net.append(message)
        elif isinstance(content, Contribution):
            self.take(peer, sender, content, sums)
        elif isinstance(content, SliceSum):
            peer.slices.setdefault((content.view, content.position, sender), sums[Span(0, 0)])
            self.join_slices(peer)
        elif isinstance(content, core.GiveTotals):
            before = peer.core.position
            if content.first > before or not peer.core.receive_total(content.view, content.first):
                self.net.append(message)  # too early
            elif peer.core.position > before:
                peer.totals.append(sums[Span(0, 0)])
                peer.own = {}
        elif isinstance(content, core.SendPosition) and not peer.core.receive_holds_totals(
            sender, content.view, content.position
        ):
            self.net.append(message)
        self.carry_out(peer)

    def join_operation(self, peer: Peer, action: core.SumTogether) -> None:
        """The operations of a process group have no names: the first of one worker is the first of all others."""
        operations = self.operations.setdefault(action.view, [])
        number = sum(peer.name in sums for _, sums in operations)
        if number == len(operations):
            operations.append((action.position, {}))
        position, sums = operations[number]
        if position != action.position:
            raise Broken(f"{peer.name} adds up {action.position} while others do {position}")
        sums[peer.name] = "+".join(peer.own[span] for span in sorted(peer.own))
        peer.summing = action.view, action.position

    def operation(self, peer: Peer) -> str | None:
        """Returns what the operation gave that the worker is in; None: not all workers of the view are in it."""
        assert peer.summing is not None and peer.core.view is not None
        view, position = peer.summing
        sums = dict(self.operations[view])[position]
        if peer.core.view.number != view or sums.keys() != set(peer.core.view.workers):
            return None
        return "+".join(f"({sums[name]})" for name in sorted(sums) if sums[name])

    def get_sum(self, peer: Peer) -> None:
        peer.summed = self.operation(peer) or ""
        (view, position), peer.summing = peer.summing or (-1, -1), None
        self.note(f"{peer.name} gets the sum of {position}")
        peer.core.note_summed(view, position)
        self.carry_out(peer)

    def add_slice(self, peer: Peer) -> None:
        """A worker has added up its slice, in a while in which it may have read another view."""
        action, peer.slice_due = peer.slice_due, None
        assert action is not None
        if peer.joining is not action:
            return
        assert peer.core.view is not None
        value = self.slice_sum(peer, action)
        self.note(f"{peer.name} adds up its slice of {action.position}: {value}")
        peer.slices[action.view, action.position, peer.name] = value
        others = [w for w in peer.core.view.workers if w != peer.name]
        self.net += [(peer.name, w, SliceSum(action.view, action.position), {Span(0, 0): value}) for w in others]
        self.join_slices(peer)
        self.carry_out(peer)

    def slice_sum(self, peer: Peer, action: core.SumTogether) -> str:
        held = {span: peer.own.get(span) or peer.received[action.view, action.position, span] for span in action.spans}
        return self.added(held, Span(0, self.parts))

    def join_slices(self, peer: Peer) -> None:
        """A total has the same instance of each part in all slices."""
        action = peer.joining
        if action is None:
            return
        there = [self.slice_of(peer, action, owner) for owner in action.owners]
        if None in there:
            return
        if len(set(there)) > 1:
            raise Broken(f"E1: {peer.name} joins the slices {there} of {action.position}")
        peer.summed, peer.joining = str(there[0]), None
        peer.core.note_summed(action.view, action.position)

    def slice_of(self, peer: Peer, action: core.SumTogether, owner: str) -> str | None:
        return peer.slices.get((action.view, action.position, owner))

    def take(self, peer: Peer, sender: str, content: Contribution, sums: dict[Span, str]) -> None:
        for span, value in sums.items():
            peer.received.setdefault((content.view, content.position, span), value)
        if not peer.core.receive_contribution(sender, content):
            peer.early.append((sender, content, sums))

    # -- one worker -------------------------------------------------------------------------------

    def has_work(self, peer: Peer) -> bool:
        """Whether `run_user` would do anything."""
        if peer.hand is not None or peer.user < peer.core.position:
            return True
        if peer.user == self.steps:
            return not peer.ended
        return peer.begun < peer.user or bool(peer.core._round.waiting)

    def run_user(self, peer: Peer) -> None:
        worker = peer.core
        if peer.hand is not None:
            position, sums = peer.hand
            peer.hand = None
            if position == worker.position and worker.phase != Phase.OUTSIDE:
                peer.own |= sums
            self.note(f"{peer.name} finished {', '.join(map(str, sums))} of {position}")
            self.reach(peer)
            worker.note_computed(position, tuple(sums), large=self.large)
        elif peer.user < worker.position:
            peer.user += 1
            if peer.user == worker.position < self.steps and self.rng.random() < 0.7:
                self.compute(peer, worker.give_parts_ahead()[1])
        elif peer.user == self.steps:
            peer.ended = True
            worker.note_ended()
        elif peer.begun < peer.user:
            self.reach(peer)
        else:
            self.compute(peer, worker.take_parts(self.rng.choice((1, 2, None))))
        self.carry_out(peer)

    def reach(self, peer: Peer) -> None:
        if peer.begun < peer.user == peer.core.position:
            peer.begun = peer.user
            self.note(f"{peer.name} is at {peer.user}")
            lie = f"wrong {peer.name}" if peer.name in self.liars and peer.user == self.steps - 1 else ""
            peer.core.begin(self.parts, f"{'|'.join(peer.totals)}{lie}".encode())

    def compute(self, peer: Peer, taken: Sequence[int]) -> None:
        if taken:
            peer.calls += 1
            self.note(f"{peer.name} begins parts {taken} of {peer.core.position}")
            leaves = {Span(part, part + 1): f"{part}{peer.name}{peer.calls}" for part in taken}
            peer.hand = peer.core.position, {span: self.added(leaves, span) for span in cover(taken, self.parts)}

    def carry_out(self, peer: Peer) -> None:
        while actions := peer.core.take_actions():
            for action in actions:
                self.act(peer, action)
            early, peer.early = peer.early, []
            for sender, content, sums in early:
                self.take(peer, sender, content, sums)

    def act(self, peer: Peer, action: object) -> None:
        worker = peer.core
        others = [w for w in worker.view.workers if w != peer.name] if worker.view else []
        if isinstance(action, core.SendReport):
            if worker.view == action.view:
                number, position = action.view.number, action.report.position
                peer.own = {s: peer.own.get(s) or self.received(peer, number, position, s) for s in action.report.held}
                peer.joining, peer.summed = None, ""
            others = [w for w in action.view.workers if w != peer.name]
            self.net += [(peer.name, w, action, {}) for w in others]
        elif isinstance(action, core.Contribute):
            sums = {} if self.together else {span: peer.own[span] for span in action.contribution.spans}
            for w in others:
                its = sums if not action.owners or w in action.owners else {}
                self.net.append((peer.name, w, action.contribution, its))
        elif isinstance(action, core.Merge):
            first, second = halves(action.span)
            peer.own[action.span] = f"({peer.own.pop(first)}+{peer.own.pop(second)})"
        elif isinstance(action, core.Drop):
            for span in action.spans:
                peer.own.pop(span, None)
        elif isinstance(action, core.SumTogether) and self.together:
            self.join_operation(peer, action)
        elif isinstance(action, core.SumTogether):
            peer.joining = action
            peer.slice_due = action if peer.name in action.owners else None
            self.join_slices(peer)
        elif isinstance(action, core.Complete) and peer.summed:
            peer.totals.append(peer.summed)
            peer.own, peer.summed = {}, ""
            self.note(f"{peer.name} completes {action.position}: {peer.totals[-1]}")
        elif isinstance(action, core.Complete):
            assert worker.view is not None
            held = {
                span: peer.own.get(span) or peer.received[worker.view.number, action.position, span]
                for span in action.spans
            }
            peer.totals.append(self.added(held, Span(0, self.parts)))
            peer.own = {}
            self.note(f"{peer.name} completes {action.position}: {peer.totals[-1]}")
        elif isinstance(action, core.GiveTotals):
            for position in range(action.first, action.end):
                given = core.GiveTotals(action.view, action.to, position, position + 1)
                if KEEP_TOTALS or peer.user <= position:
                    self.net.append((peer.name, action.to, given, {Span(0, 0): peer.totals[position]}))
        elif isinstance(action, core.SendPosition):
            self.net += [(peer.name, w, action, {}) for w in others]
        elif isinstance(action, core.TotalsStable):
            for position in range(action.position):
                if position >= len(peer.totals):
                    raise Broken(f"{peer.name} calls {position} stable and does not hold it")
                given = self.out.setdefault(position, peer.totals[position])
                if given != peer.totals[position]:
                    raise Broken(f"E3: {position} was given out as {given}, {peer.name} holds {peer.totals[position]}")
        elif isinstance(action, core.UnequalTags):
            if set(action.outvoted) != self.liars:
                raise Broken(f"E2: the totals of {action.outvoted} differ before {action.position}")
            peer.outvoted = action.outvoted
        elif isinstance(action, core.NoWholeWorker):
            self.lost = True

    def received(self, peer: Peer, before: int, position: int, span: Span) -> str:
        """Returns the sum that the worker received in the last view that it has read before this one."""
        there = [key for key in peer.received if key[0] < before and key[1] == position and key[2] == span]
        return peer.received[max(there)]

    def added(self, held: dict[Span, str], span: Span) -> str:
        if span in held:
            return held[span]
        if span.end - span.first == 1:
            raise Broken(f"E1: part {span.first} is missing")
        first, second = halves(span)
        if not IN_TREE_ORDER and self.rng.random() < 0.5:
            first, second = second, first
        return f"({self.added(held, first)}+{self.added(held, second)})"

    # -- invariants -------------------------------------------------------------------------------

    def check(self) -> None:
        at = [
            p
            for p in self.peers.values()
            if p.alive
            and p.core.view is not None
            and p.core.view.number == self.view.number
            and p.core.phase in (Phase.WORKING, Phase.LACKING)
        ]
        for peer in at:
            if peer.core.position != len(peer.totals):
                raise Broken(f"{peer.name} is at {peer.core.position} with {len(peer.totals)} totals")
            for position, total in enumerate(peer.totals):
                counted = sorted(int(leaf[: len(leaf.rstrip("ABCDEFGHN0123456789")) or 1]) for leaf in leaves(total))
                if counted != list(range(self.parts)):
                    raise Broken(f"E1: {total}")
                other = at[0].totals[position] if position < len(at[0].totals) else total
                if total != other:
                    raise Broken(f"E2: {peer.name} holds {total} at {position}, {at[0].name} {other}")
                if position in self.out and self.out[position] != total:
                    raise Broken(f"E3: {position} was given out as {self.out[position]}, {peer.name} holds {total}")

    def end(self) -> None:
        """Without further faults, all living workers of the view reach the end, and know it."""
        for _ in range(20_000):
            living = [self.peers[w] for w in self.view.workers if self.peers[w].alive]
            if self.lost or not living:
                return
            if (
                len(living) == len(self.view.workers)
                and all(p.core.phase != Phase.OUTSIDE for p in living)
                and all(p.core.stable == self.steps for p in living)
            ):
                return
            whole = [p for p in living if (p.core.whole or NEWCOMERS_PROPOSE) and p.core.phase != Phase.OUTSIDE]
            if not whole:
                return  # only a return goes on
            if not self.step(faults=False):
                raise Broken("nothing can happen")
        states = [(p.name, p.core.phase, p.core.position, p.core.stable) for p in living]
        raise Broken(f"E6: no end: {states}, view {self.view}")


def walk(seed: int, *, together: bool = False, large: bool = False) -> World:
    rng = random.Random(seed)
    world = World(
        seed,
        workers=rng.choice((1, 2, 3, 3, 4)),
        steps=rng.choice((1, 2, 3)),
        parts=rng.choice((1, 2, 3, 4, 7)),
        deaths=rng.choice((0, 1, 1, 2)),
        exclusions=rng.choice((0, 0, 1, 1)),
        joins=rng.choice((0, 0, 1, 2)),
        together=together,
        large=large,
    )
    for _ in range(rng.choice((20, 60, 150))):
        if world.lost or not world.step(faults=True):
            break
    world.end()
    return world
