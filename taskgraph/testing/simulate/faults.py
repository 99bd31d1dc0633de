"""The failures of a seed: what, to whom, and at which moment.

Most are tied to a moment of the protocol (just before or after a write of some kind, when a message of some kind
arrives, at a stage of an epoch), since that is where mistakes hide; the others come at some time.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from taskgraph.testing.simulate.world import SimNode, World

__all__ = ["KINDS", "Fault", "Faults", "draw", "draw_around_checkpoints"]

KINDS = (
    "crash",
    "host crash",
    "freeze",
    "stuck loop",
    "slow node",
    "etcd pause",
    "etcd restart",
    "etcd leader loss",
    "etcd unknown outcome",
    "etcd slow request",
    "etcd slow answers",
    "etcd cut",
    "etcd compaction",
    "watch break",
    "watch stall",
    "cut one way",
    "cut both ways",
    "isolation",
    "reset",
    "half-open",
    "join",
    "drain",
    "massacre",
    "place slow",
    "place full",
    "place forgets",
)
_WEIGHTS = (12, 3, 7, 2, 2, 3, 2, 2, 6, 7, 3, 4, 2, 2, 5, 3, 3, 3, 4, 2, 4, 4, 0, 0, 0, 0)

_MOMENTS = (
    "sending commit", "sending takeover", "sending admit", "sending evict", "sending restart", "sending register",
    "before commit", "after commit", "before takeover", "after takeover", "before admit", "after admit",
    "before evict", "after evict", "before restart", "after restart", "before register", "after register", "after end",
    "message Pull", "message Item", "message Offer", "message Report", "message Seal", "message Accepted",
    "message Release", "message HandOver", "message Request", "message Answer", "message Flag",
    "answer Flag", "answer Request", "answer Offer", "answer Report", "answer Accepted", "answer Item",
    "point compose", "point processor", "point sync", "point snapshot", "point done", "point commit",
    "point committed",
)  # fmt: skip
_OVERTAKEN_BY = {
    "sending commit": ("takeover", "takeover", "restart", "register"),
    "sending takeover": ("commit", "takeover", "admit", "evict", "restart"),
    "sending admit": ("takeover", "takeover", "commit", "evict"),
    "sending evict": ("takeover", "takeover", "commit", "admit"),
    "sending restart": ("takeover", "commit", "restart"),
    "sending register": ("takeover", "gone", "register"),
}
"""A write, and those that must be taken into account when they come right before it."""
_CHECKPOINT_MOMENTS = (
    "after commit", "after commit", "before commit", "point commit", "sending commit", "point snapshot",
    "point checkpoint", "message Written", "point checkpointed", "sending checkpoint", "before checkpoint",
    "after checkpoint", "after checkpoint", "sending rollback", "before rollback", "after rollback",
    "after rollback", "after takeover", "after restart", "point takeover", "point taken",
)  # fmt: skip
_OVERTAKEN_BY_ROLLBACKS = {
    "sending checkpoint": ("rollback", "rollback", "takeover", "commit"),
    "sending commit": ("rollback", "checkpoint"),
    "sending takeover": ("rollback",),
    "sending rollback": ("commit", "takeover", "checkpoint", "rollback"),
    "sending restart": ("rollback",),
    "sending admit": ("rollback",),
    "sending evict": ("rollback",),
}
"""The same, in jobs that keep checkpoints."""
_OFTEN = {"before commit": 3, "after commit": 3, "after takeover": 4, "before takeover": 2, "message Offer": 3}


@dataclass
class Fault:
    """One failure."""

    kind: str
    moment: str  # "" for a time
    count: int  # the how-manyth of those moments
    at_s: float
    lasts_s: float
    target: str  # "who", "leader", "primary", "member", "any"
    again: bool  # a dead node is replaced, by one of the same name
    told_s: float | None  # when a launcher says that it is gone; None: never
    until: str = ""  # the moment at which what is held back goes on, where that comes before `lasts_s`
    then: Fault | None = None  # what happens right after it


_DEADLY = ("crash", "crash", "host crash", "freeze", "isolation")
_DEAFENING = ("reset", "cut one way", "cut one way", "cut one way", "half-open", "freeze", "crash")


def draw(rng: random.Random, *, talks: bool, erratic: bool) -> list[Fault]:
    """The failures of one seed.

    Args:
        talks: its tasks send flags and requests.
        erratic: some of them compute something else each time.
    """
    faults = [_draw_one(rng, follows=False) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 7)))]
    if rng.random() < 0.6:
        recipes = [*_RECIPES, *([_sent_again] * (2 * talks)), *([_recomputed] * (3 * erratic))]
        faults += rng.choice(recipes)(rng)
    return faults


def _draw_one(rng: random.Random, *, follows: bool) -> Fault:
    weights = [_OFTEN.get(m, 1) for m in _MOMENTS]
    fault = Fault(
        kind=rng.choices(KINDS, _WEIGHTS)[0],
        moment=rng.choices(_MOMENTS, weights)[0] if not follows and rng.random() < 0.8 else "",
        count=rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 9)),
        at_s=rng.choice((0.02, 0.1, 0.5, 3.0)) * rng.random(),
        lasts_s=rng.choice((0.002, 0.02, 0.2, 1.0, 2.0, 3.0, 4.5)) * rng.uniform(0.5, 1.0),
        target=rng.choice(("who", "who", "who", "leader", "primary", "member", "any")),
        again=rng.random() < 0.7,
        told_s=rng.choice((0.0, 0.005, 0.05, 0.3, 1.0, None)),
    )
    if rng.random() < 0.3:
        # Two failures at one moment: the second may hit whoever the first concerns, or whoever acts on it.
        fault.then = _draw_one(rng, follows=True)
        fault.then.at_s = rng.choice((0.0, 0.001, 0.01, 0.1, 1.0)) * rng.random()
    if fault.kind == "etcd slow request":
        _hold_back(fault, rng, rng.choice(list(_OVERTAKEN_BY)))
    return fault


def _hold_back(
    fault: Fault, rng: random.Random, moment: str, overtaken_by: Mapping[str, tuple[str, ...]] = _OVERTAKEN_BY
) -> None:
    """Makes it a write that is long on its way: for a time, or until just after another write."""
    fault.kind, fault.target, fault.moment = "etcd slow request", "who", moment
    if rng.random() < 0.6:
        fault.until = "after " + rng.choice(overtaken_by[moment])
        fault.lasts_s = max(fault.lasts_s, 0.5)


# -- failures that meet: each a race that a rule of the protocol is there for -----------------------------


def _overtaken(rng: random.Random) -> list[Fault]:
    """A write is on its way to etcd while somebody whom it rests on dies, and is replaced before it arrives."""
    first, then = _draw_one(rng, follows=True), _draw_one(rng, follows=True)
    first.lasts_s = rng.choice((0.1, 0.5, 2.0)) * rng.uniform(0.5, 1.0)
    _hold_back(first, rng, rng.choice(("sending commit", "sending commit", "sending admit", "sending takeover")))
    then.kind, then.at_s = rng.choice(_DEADLY), rng.choice((0.0, 0.01, 0.1)) * rng.random()
    then.target = rng.choice(
        ("primary", "leader", "member") if first.moment == "sending commit" else ("who", "primary")
    )
    then.told_s, then.lasts_s = rng.choice((0.0, 0.005)), 3.0
    first.then, then.then = then, None
    return [first]


def _late_change_of_members(rng: random.Random) -> list[Fault]:
    """A member dies, stands still for longer than its lease, or moves; the write that evicts it, or admits another one,
    comes late, and perhaps when its writer is primary no more."""
    cause, late = _draw_one(rng, follows=True), _draw_one(rng, follows=True)
    cause.kind = rng.choice(("freeze", "freeze", "isolation", "crash", "join", "drain"))
    cause.target, cause.count, cause.then = "member", rng.choice((1, 1, 2, 4)), None
    cause.moment = rng.choice(("point compose", "after admit", "message Offer", "after commit"))
    cause.lasts_s, cause.told_s = rng.choice((2.2, 3.0, 4.0)), rng.choice((0.0, 0.005))
    late.lasts_s, late.then = rng.choice((0.3, 1.0, 2.0)), None
    _hold_back(late, rng, rng.choice(("sending evict", "sending evict", "sending admit")))
    late.count = rng.choice((1, 1, 2, 3))
    if rng.random() < 0.6:
        late.then = _draw_one(rng, follows=True)
        late.then.kind, late.then.target, late.then.told_s = rng.choice(("crash", "crash", "freeze")), "who", 0.0
        late.then.at_s, late.then.then = rng.choice((0.0, 0.01, 0.1)) * rng.random(), None
        late.then.lasts_s = 3.0
    return [cause, late]


def _deaf_witness(rng: random.Random) -> list[Fault]:
    """Somebody dies around a commit, and whoever takes over has not been told of that commit."""
    first, then = _draw_one(rng, follows=True), _draw_one(rng, follows=True)
    first.kind, first.target = "watch stall", rng.choice(("member", "member", "leader", "any"))
    first.moment = rng.choice(("point done", "point snapshot", "before commit", "sending commit", "message Report"))
    first.lasts_s = rng.choice((0.05, 0.3, 1.0))
    then.kind, then.target = "crash", rng.choice(("primary", "primary", "who"))
    then.at_s, then.told_s = rng.choice((0.0, 0.01, 0.05)) * rng.random(), rng.choice((0.0, None))
    first.then, then.then = then, None
    return [first]


def _late_answers(rng: random.Random) -> list[Fault]:
    """Answers of etcd come late, and then what is asked does not arrive any more."""
    late, then = _draw_one(rng, follows=True), _draw_one(rng, follows=True)
    late.kind, late.moment, late.lasts_s = "etcd slow answers", rng.choice(("after register", "point compose", "")), 1.0
    then.kind, then.at_s, then.lasts_s, then.then = rng.choice(("etcd cut", "isolation", "freeze")), 0.9, 4.5, None
    then.target = late.target = "who"
    late.then = then
    return [late]


def _sent_again(rng: random.Random) -> list[Fault]:
    """A flag, a request or its answer arrives, and whoever sent it does not learn that."""
    fault = _draw_one(rng, follows=True)
    fault.kind, fault.target, fault.lasts_s = rng.choice(_DEAFENING), "who", rng.choice((0.6, 2.2, 4.5))
    fault.moment = rng.choice(("message Request", "message Answer", "message Flag", "message Flag", "answer Flag"))
    return [fault]


def _recomputed(rng: random.Random) -> list[Fault]:
    """A producer dies when some of what it put was taken, and some was not."""
    fault = _draw_one(rng, follows=True)
    fault.kind, fault.target, fault.told_s = rng.choice(("crash", "crash", "freeze")), "who", rng.choice((0.0, 0.05))
    fault.moment = rng.choice(("answer Item", "answer Item", "message Pull", "point snapshot", "answer Report"))
    fault.lasts_s, fault.count = 3.0, rng.choice((1, 1, 2, 3, 5))
    return [fault]


def draw_around_checkpoints(rng: random.Random) -> list[Fault]:
    """What is added to the failures of a seed whose job keeps checkpoints."""
    kinds = ["massacre"] * rng.choice((0, 1, 1, 1, 2, 2, 3))
    kinds += [rng.choice(("place slow", "place full", "place forgets")) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    faults = [_around_checkpoints(rng, kind) for kind in kinds]
    if rng.random() < 0.3:
        faults += rng.choice((_late_around_a_roll_back, _zombie_of_before_a_roll_back))(rng)
    return faults


def _around_checkpoints(rng: random.Random, kind: str) -> Fault:
    fault = _draw_one(rng, follows=False)
    fault.kind, fault.until = kind, ""
    if rng.random() < 0.8:
        fault.moment, fault.count = rng.choice(_CHECKPOINT_MOMENTS), rng.choice((1, 1, 1, 2, 2, 3, 4))
    if kind == "massacre":
        fault.told_s = rng.choice((0.0, 0.0, 0.005, 0.05, 0.3, 1.0, None))
    return fault


def _late_around_a_roll_back(rng: random.Random) -> list[Fault]:
    """A write is on its way while the job is rolled back."""
    late, massacre = _draw_one(rng, follows=True), _around_checkpoints(rng, "massacre")
    _hold_back(late, rng, rng.choice(list(_OVERTAKEN_BY_ROLLBACKS)), _OVERTAKEN_BY_ROLLBACKS)
    late.lasts_s, late.count = rng.choice((0.1, 0.5, 2.0)) * rng.uniform(0.5, 1.0), rng.choice((1, 1, 2, 3))
    massacre.moment, massacre.at_s = "", rng.choice((0.0, 0.01, 0.1)) * rng.random()
    massacre.told_s, massacre.then, late.then = rng.choice((0.0, 0.005)), None, massacre
    return [late]


def _zombie_of_before_a_roll_back(rng: random.Random) -> list[Fault]:
    """Somebody stands still while the job is rolled back, and goes on then."""
    freeze, massacre = _around_checkpoints(rng, "freeze"), _around_checkpoints(rng, "massacre")
    freeze.kind = rng.choice(("freeze", "freeze", "stuck loop", "isolation", "watch stall", "etcd cut"))
    freeze.target, freeze.lasts_s = rng.choice(("leader", "primary", "member", "who")), rng.choice((0.2, 1.5, 3.0, 4.5))
    massacre.moment, massacre.at_s = "", rng.choice((0.0, 0.01, 0.1)) * rng.random()
    massacre.told_s, massacre.then, freeze.then = rng.choice((0.0, 0.005)), None, massacre
    return [freeze]


_RECIPES = (_overtaken, _late_change_of_members, _late_change_of_members, _deaf_witness, _late_answers)


class Faults:
    """Makes them happen in a world."""

    def __init__(self, world: World, faults: list[Fault], rng: random.Random, *, ruthless: bool) -> None:
        self._world = world
        self.ruthless = ruthless  # it kills whoever it likes: a job may lose all that a task has
        self._rng = rng
        if ruthless:
            faults = [*faults, dataclasses.replace(_draw_one(rng, follows=False), kind="massacre")]
        self._waiting: list[Fault] = []
        self._over = False
        self._peer = ""  # the other node at the moment that just came
        self._held: list[tuple[str, Callable[[], None]]] = []  # what goes on at which moment
        self.bold = False  # the same, once there is a checkpoint
        self.add(faults)
        world.moment = self._moment

    def add_around_checkpoints(self, faults: list[Fault]) -> None:
        """These happen, too; what loses all that a task has waits until there is a checkpoint."""
        self.bold = any(f.kind == "massacre" or (f.then is not None and f.then.kind == "massacre") for f in faults)
        self.add(faults)

    def add(self, faults: list[Fault]) -> None:
        """These happen, too."""
        for fault in faults:
            if fault.moment:
                self._waiting.append(fault)
            else:
                self._world.etcd.later(fault.at_s, self._happen, fault, "")

    def _moment(self, name: str, node: str, peer: str = "") -> None:
        due = [go_on for moment, go_on in self._held if moment == name]
        self._held = [held for held in self._held if held[0] != name]
        for go_on in due:
            go_on()
        if self._over:
            return
        for fault in list(self._waiting):
            if fault.moment == name:
                fault.count -= 1
                if fault.count <= 0:
                    self._waiting.remove(fault)
                    self._happen(fault, node, peer)

    # -- whom -------------------------------------------------------------------------------------

    def _target(self, fault: Fault, who: str) -> SimNode | None:
        world = self._world
        view = world.invariants.view
        nodes = world.existing()
        if not nodes:
            return None
        name = ""
        task = self._rng.randrange(world.workload.tasks)
        if fault.target == "who":
            name = who
        elif fault.target == "leader":
            name = view.primary_node(0) or ""
        elif fault.target == "primary":
            name = view.primary_node(task) or ""
        elif fault.target == "member":
            members = [n for n in view.in_sync(task) if n != view.primary_node(task)]
            name = self._rng.choice(members) if members else ""
        known = world.nodes.get(name)
        return known if known is not None and known.exists else self._rng.choice(nodes)

    def _other(self, node: SimNode) -> SimNode | None:
        peer = self._world.nodes.get(self._peer)
        if peer is not None and peer is not node and peer.exists and self._rng.random() < 0.7:
            return peer
        others = [n for n in self._world.existing() if n is not node]
        return self._rng.choice(others) if others else None

    def _survivable(self, victim: SimNode) -> bool:
        """Whether every task has a member in sync elsewhere, in a process that exists."""
        world = self._world
        view = world.invariants.view
        if self.ruthless or (self.bold and view.checkpoint is not None):
            return True
        living = {n.id for n in world.existing() if n is not victim and not n.draining}
        for task in range(world.workload.tasks):
            members = view.members_of(task)
            if victim.id not in view.in_sync(task):
                continue
            if not any(n in living and n not in view.gone and m.record.until is None for n, m in members.items()):
                return False
        return True

    # -- what -------------------------------------------------------------------------------------

    def _happen(self, fault: Fault, who: str, peer: str = "") -> None:
        if self._over:
            return
        if fault.then is not None:
            self._later(fault.then.at_s, self._happen, fault.then, who, peer)
        self._peer = peer
        target = self._target(fault, who)
        if target is None:
            return
        getattr(self, "_" + fault.kind.replace(" ", "_").replace("-", "_"))(fault, target)

    def _later(self, delay_s: float, function: object, *args: object) -> None:
        self._world.etcd.later(delay_s, function, *args)  # type: ignore[arg-type]

    def _note(self, fault: Fault, detail: str) -> None:
        when = f" ({fault.moment})" if fault.moment else ""
        self._world.transcript.fault(fault.kind, detail + when)

    def _crash(self, fault: Fault, target: SimNode, *, host: bool = False) -> None:
        if not self._survivable(target):
            self._world.transcript.add("fault", "spared", f"{target.id}: nobody else holds what it holds")
            return
        self._note(fault, target.id)
        self.kill(target, host=host)
        if fault.told_s is not None:
            self._later(fault.told_s, self._world.say_gone, target.id, "killed")
        if fault.again:
            self._later(self._rng.uniform(0.0, 0.5), self._replace, target.name)
        elif len(self._world.existing()) < 2:
            self._later(0.1, self._replace, "")

    def kill(self, target: SimNode, *, host: bool) -> None:
        """As kill -9, or as a host that loses its power."""
        target.dead = True
        target.coordinator.crash()
        self._world.network.crash(target.id, host=host)
        target.run.cancel()
        target.process.thaw(self._world.loop)
        target.threads.thaw(self._world.loop)

    def _massacre(self, fault: Fault, target: SimNode) -> None:
        """Everybody who holds what some task needs dies."""
        if self.bold and not self.ruthless and self._world.invariants.view.checkpoint is None:
            later = self._rng.choice(("after checkpoint", "after commit", "after commit", "point done"))
            self._waiting.append(dataclasses.replace(fault, moment=later, count=self._rng.choice((1, 1, 2)), then=None))
            return
        task = self._rng.randrange(self._world.workload.tasks)
        holders = [self._world.nodes[name] for name in self._world.invariants.view.in_sync(task)]
        for holder in holders:
            if holder.exists:
                self._crash(fault, holder)

    def _host_crash(self, fault: Fault, target: SimNode) -> None:
        self._crash(fault, target, host=True)

    def _replace(self, name: str) -> None:
        if not self._over and not any(n.name == name for n in self._world.existing()):
            node = self._world.add(name)
            self._world.transcript.add("world", "start", node.id)

    def _freeze(self, fault: Fault, target: SimNode) -> None:
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.process.frozen = target.threads.frozen = True
        self._later(fault.lasts_s, self._thaw, target)

    def _thaw(self, target: SimNode) -> None:
        if target.process.frozen:
            self._world.transcript.add("fault", "thaw", target.id)
        target.process.thaw(self._world.loop)
        target.threads.thaw(self._world.loop)

    def _stuck_loop(self, fault: Fault, target: SimNode) -> None:
        """The main loop does not tick; the lease's thread does."""
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.process.frozen = True
        self._later(fault.lasts_s, self._thaw, target)

    def _slow_node(self, fault: Fault, target: SimNode) -> None:
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        self._crawl(target, self._world.loop.time() + fault.lasts_s)

    def _crawl(self, target: SimNode, until: float) -> None:
        """It runs for a moment, and stands still for many."""
        self._thaw_quietly(target)
        if not self._over and target.exists and self._world.loop.time() < until:
            self._later(0.0005, self._stall, target, until)

    def _stall(self, target: SimNode, until: float) -> None:
        target.process.frozen = True
        self._later(self._rng.uniform(0.005, 0.05), self._crawl, target, until)

    def _thaw_quietly(self, target: SimNode) -> None:
        if not target.threads.frozen:
            target.process.thaw(self._world.loop)

    def _etcd_pause(self, fault: Fault, target: SimNode) -> None:
        etcd = self._world.etcd
        if etcd.serving:
            self._note(fault, f"{fault.lasts_s:.3f} s")
            etcd.pause()
            self._later(fault.lasts_s, etcd.resume)

    def _etcd_restart(self, fault: Fault, target: SimNode) -> None:
        etcd = self._world.etcd
        if etcd.serving:
            self._note(fault, f"{fault.lasts_s:.3f} s")
            etcd.stop()
            self._later(fault.lasts_s, etcd.start)

    def _etcd_leader_loss(self, fault: Fault, target: SimNode) -> None:
        etcd = self._world.etcd
        if etcd.serving:
            self._note(fault, "")
            for node in self._world.existing():
                node.coordinator.lose_next += self._rng.randrange(2)
            etcd.change_leader()

    def _etcd_unknown_outcome(self, fault: Fault, target: SimNode) -> None:
        count = self._rng.choice((1, 1, 2, 3))
        self._note(fault, f"{target.id}, the next {count}")
        target.coordinator.lose_next += count

    def _etcd_slow_request(self, fault: Fault, target: SimNode) -> None:
        """What it is just sending takes long to arrive; nothing else does."""
        self._note(
            fault, f"{target.id}, {fault.lasts_s:.3f} s" + (f", or until just {fault.until}" if fault.until else "")
        )

        def hold(arrive: Callable[[], None]) -> None:
            arrived: list[bool] = []

            def once() -> None:
                if not arrived:
                    arrived.append(True)
                    arrive()

            self._later(fault.lasts_s, once)
            if fault.until:
                self._held.append((fault.until, once))

        target.coordinator.hold_next = hold

    def _etcd_slow_answers(self, fault: Fault, target: SimNode) -> None:
        """What the server sends to it takes long for a while; what it sends does not."""
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.coordinator.answer_s = fault.lasts_s
        self._later(fault.lasts_s, self._quick_answers, target)

    @staticmethod
    def _quick_answers(target: SimNode) -> None:
        target.coordinator.answer_s = 0.0

    def _etcd_cut(self, fault: Fault, target: SimNode) -> None:
        speaks, hears = self._rng.choice(((False, False), (True, False), (False, True)))
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s: speaks {speaks}, hears {hears}")
        target.coordinator.cut(speaks=speaks, hears=hears)
        self._later(fault.lasts_s, self._mend, target)

    def _mend(self, target: SimNode) -> None:
        target.coordinator.cut(speaks=True, hears=True)

    def _etcd_compaction(self, fault: Fault, target: SimNode) -> None:
        self._note(fault, "")
        self._world.etcd.compact()

    def _watch_break(self, fault: Fault, target: SimNode) -> None:
        self._note(fault, target.id)
        target.coordinator.break_streams()

    def _watch_stall(self, fault: Fault, target: SimNode) -> None:
        """It is told nothing for a while; everything else works."""
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.coordinator.stall(True)
        self._later(fault.lasts_s, target.coordinator.stall, False)

    def _cut_one_way(self, fault: Fault, target: SimNode) -> None:
        other = self._other(target)
        if other is not None:
            one, two = (target, other) if self._rng.random() < 0.5 else (other, target)
            self._note(fault, f"{one.id} to {two.id} for {fault.lasts_s:.3f} s")
            self._cut_link(one, two, fault.lasts_s)

    def _cut_link(self, one: SimNode, other: SimNode, lasts_s: float) -> None:
        network = self._world.network
        self._later(lasts_s, network.heal, one.id, other.id, network.cut(one.id, other.id))

    def _cut_both_ways(self, fault: Fault, target: SimNode) -> None:
        other = self._other(target)
        if other is not None:
            self._note(fault, f"{target.id} and {other.id} for {fault.lasts_s:.3f} s")
            self._cut_link(target, other, fault.lasts_s)
            self._cut_link(other, target, fault.lasts_s)

    def _isolation(self, fault: Fault, target: SimNode) -> None:
        """From all nodes, and perhaps from etcd."""
        also = self._rng.random() < 0.5
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s{', also from etcd' if also else ''}")
        for other in self._world.existing():
            if other is not target:
                self._cut_link(target, other, fault.lasts_s)
                self._cut_link(other, target, fault.lasts_s)
        if also:
            target.coordinator.cut(speaks=False, hears=False)
            self._later(fault.lasts_s, self._mend, target)

    def _reset(self, fault: Fault, target: SimNode) -> None:
        other = self._other(target)
        if other is not None:
            self._note(fault, f"{target.id} and {other.id}")
            self._world.network.reset(target.id, other.id)

    def _half_open(self, fault: Fault, target: SimNode) -> None:
        other = self._other(target)
        if other is not None:
            self._note(fault, f"{target.id} and {other.id}")
            self._world.network.half_open(target.id, other.id)

    def _join(self, fault: Fault, target: SimNode) -> None:
        if len(self._world.existing()) < 6:
            self._note(fault, self._world.add().id)

    def _drain(self, fault: Fault, target: SimNode) -> None:
        if self._survivable(target) and len(self._world.existing()) > 1:
            self._note(fault, target.id)
            target.draining = True
            self._world.loop.call_soon(target.node.drain, "told to", context=target.process.fresh())
            if fault.again:
                self._later(self._rng.uniform(0.0, 1.0), self._replace, "")

    def _place_slow(self, fault: Fault, target: SimNode) -> None:
        """Whatever it asks of the place of checkpoints takes long."""
        self._note(fault, f"{target.id}, up to {fault.lasts_s:.3f} s for {2 * fault.lasts_s:.3f} s")
        target.place.extra_s = fault.lasts_s
        self._later(2 * fault.lasts_s, target.place.mend)

    def _place_full(self, fault: Fault, target: SimNode) -> None:
        """It cannot write there."""
        self._note(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.place.full = True
        self._later(fault.lasts_s, target.place.mend)

    def _place_forgets(self, fault: Fault, target: SimNode) -> None:
        """What is written there next is lost, or half of it."""
        count = self._rng.choice((1, 1, 2))
        self._note(fault, f"the next {count}")
        self._world.place.lose_next += count

    # -- the end ----------------------------------------------------------------------------------

    def end(self, *, heal: bool) -> None:
        """No failure more; with `heal`, those that last end now."""
        self._over = True
        if not heal:
            return
        world = self._world
        for node in world.existing():
            node.process.thaw(world.loop)
            node.threads.thaw(world.loop)
            node.coordinator.cut(speaks=True, hears=True)
            node.coordinator.stall(False)
            node.coordinator.lose_next = 0
            node.coordinator.answer_s = 0.0
            node.place.mend()
        world.place.lose_next = 0
        world.network.heal_all()
        if world.etcd.paused:
            world.etcd.resume()
        if world.etcd.down:
            world.etcd.start()
