"""Draws the faults of an elastic job, and injects them."""

from __future__ import annotations

import random
from typing import cast

from taskgraph.testing.simulate.drawing import Fault
from taskgraph.testing.simulate.elastic.world import ElasticProcess, ElasticWorld
from taskgraph.testing.simulate.faults import FaultInjector
from taskgraph.testing.simulate.world import SimNode, World

__all__ = ["KINDS", "ElasticFaultInjector", "draw", "draw_around_checkpoints"]

KINDS = {
    "crash": 12,
    "host crash": 3,
    "freeze": 7,
    "stuck loop": 2,
    "slow node": 2,
    "etcd pause": 3,
    "etcd restart": 2,
    "etcd leader loss": 2,
    "etcd unknown outcome": 4,
    "etcd slow request": 4,
    "etcd slow answers": 2,
    "etcd cut": 4,
    "etcd compaction": 1,
    "watch break": 2,
    "watch stall": 5,
    "cut one way": 3,
    "cut both ways": 3,
    "isolation": 3,
    "reset": 4,
    "half-open": 2,
    "join": 12,
    "drain": 5,
    "keys deleted": 1,
    "called gone": 1,
    "massacre": 0,
}
"""Kind of fault -> its weight."""

_MOMENTS = (
    "sending view", "sending view", "before view", "after view", "after view", "sending end", "before end",
    "after register", "after gone", "message WorkerReport", "message WorkerReport", "answer WorkerReport",
    "message PartSums", "message PartSums", "answer PartSums", "sending PartSums", "message Totals", "sending Totals",
    "message HoldsTotals", "sending HoldsTotals", "message CopyState", "message StateCopy", "message FollowTotals",
    "message TotalsPage",
)  # fmt: skip

_FLUSH_MOMENTS = (
    "message WorkerReport", "answer WorkerReport", "sending WorkerReport", "message Totals", "sending Totals",
    "answer Totals", "after view", "sending view",
)  # fmt: skip
_JOIN_MOMENTS = (
    "message CopyState", "message StateCopy", "message FollowTotals", "message TotalsPage", "sending view",
    "after view", "message WorkerReport", "sending Totals", "message Totals",
)  # fmt: skip

_CHECKPOINT_MOMENTS = (
    "sending checkpoint", "before checkpoint", "after checkpoint", "after checkpoint", "place listed", "place cleared",
)  # fmt: skip

_OVERTAKEN_BY = {"sending view": ("view", "view", "gone", "register"), "sending end": ("view", "gone")}
"""Writes that arrive late -> writes right before them that must make them fail."""


def draw(rng: random.Random) -> list[Fault]:
    """Draws the faults of a seed."""
    faults = [_draw_chain(rng, follows=False) for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 7, 10)))]
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        faults.append(_draw_chain(rng, follows=False))
        faults[-1].kind = "join"
    if rng.random() < 0.6:
        faults += rng.choice((_death_in_flush, _excluded_alive, _donor_that_dies, _heard_by_some, _heard_by_some))(rng)
    return faults


def draw_around_checkpoints(rng: random.Random) -> list[Fault]:
    """Draws faults of a seed whose job has checkpoints."""
    faults = []
    for _ in range(rng.choice((0, 1, 2, 3))):
        fault = _draw_chain(rng, follows=True)
        fault.kind = rng.choice(("massacre", "massacre", "place slow", "place full", "crash", "freeze", "etcd cut"))
        fault.moment, fault.count = rng.choice(_CHECKPOINT_MOMENTS), rng.choice((1, 1, 2, 3))
        faults.append(fault)
    return faults


def _death_in_flush(rng: random.Random) -> list[Fault]:
    """Draws a change of the view, and a worker that dies or stands still during the flush that follows."""
    first, then = _draw_chain(rng, follows=True), _draw_chain(rng, follows=True)
    first.kind, first.at_s = rng.choice(("crash", "join", "drain")), rng.choice((0.1, 0.5, 2.0)) * rng.random()
    first.gone_s, first.then = 0.0, None
    then.kind, then.moment = rng.choice(("crash", "crash", "freeze", "isolation")), rng.choice(_FLUSH_MOMENTS)
    then.count, then.lasts_s = rng.choice((1, 2, 3, 4)), rng.choice((0.3, 3.0))
    then.gone_s = rng.choice((0.0, 0.01, 0.3))
    return [first, then]


def _excluded_alive(rng: random.Random) -> list[Fault]:
    """Draws a worker that is excluded from the view while it lives, and learns of that late."""
    fault = _draw_chain(rng, follows=True)
    fault.kind, fault.moment = rng.choice(("freeze", "isolation", "etcd cut", "called gone")), "message PartSums"
    fault.count, fault.lasts_s = rng.choice((1, 2, 5, 9, 15)), rng.choice((2.2, 3.0, 4.5, 6.0))
    if rng.random() < 0.5:
        fault.then = _draw_chain(rng, follows=True)
        fault.then.kind, fault.then.target = rng.choice(("watch stall", "cut one way", "etcd slow answers")), "who"
        fault.then.at_s, fault.then.lasts_s = 0.0, 6.0
    return [fault]


def _death_of_all_but_newcomers(rng: random.Random) -> list[Fault]:
    """Draws newcomers, and the death of all workers while the newcomers copy the state, follow totals, or enter."""
    joins = [_draw_chain(rng, follows=True) for _ in range(rng.choice((1, 2)))]
    for join in joins:
        join.kind, join.at_s, join.then = "join", rng.choice((0.1, 0.5, 2.0)) * rng.random(), None
    dies = _draw_chain(rng, follows=True)
    dies.kind, dies.gone_s, dies.then = "massacre", rng.choice((0.0, 0.01, 0.3)), None
    dies.moment, dies.count = rng.choice((*_JOIN_MOMENTS, "message PartSums")), rng.choice((1, 2, 3, 5, 9, 20, 40))
    return [*joins, dies]


def _heard_by_some(rng: random.Random) -> list[Fault]:
    """Draws a worker whose messages reach only some of the others, and that then dies, freezes or is excluded."""
    cut, then = _draw_chain(rng, follows=True), _draw_chain(rng, follows=True)
    cut.kind, cut.target, cut.to_peer = "cut one way", "who", rng.random() < 0.5
    cut.moment = rng.choice(("sending PartSums", "message PartSums", "answer PartSums", "sending HoldsTotals"))
    cut.count, cut.lasts_s = rng.choice((1, 2, 3, 5, 9, 15)), rng.choice((0.1, 1.0, 4.0))
    then.kind, then.target = rng.choice(("crash", "crash", "freeze", "etcd cut", "drain")), "who"
    then.at_s, then.gone_s, then.lasts_s = rng.choice((0.001, 0.01, 0.1, 0.5)) * rng.random(), 0.0, 4.5
    cut.then, then.then = then, None
    return [cut]


def _donor_that_dies(rng: random.Random) -> list[Fault]:
    """Draws a newcomer, and a node that dies while the newcomer copies the state, follows totals, or enters."""
    first, then = _draw_chain(rng, follows=True), _draw_chain(rng, follows=True)
    first.kind, first.at_s, first.then = "join", rng.choice((0.1, 0.5, 2.0)) * rng.random(), None
    then.kind, then.gone_s = "crash", rng.choice((0.0, 0.01, 0.3))
    then.moment = rng.choice(_JOIN_MOMENTS)
    then.count = rng.choice((1, 1, 2, 3))
    return [first, then]


def _draw_chain(rng: random.Random, *, follows: bool) -> Fault:
    """Draws one fault, and perhaps others that follow it. `follows`: it follows another one, so it has no moment."""
    fault = Fault(
        kind=rng.choices(list(KINDS), list(KINDS.values()))[0],
        moment=rng.choice(_MOMENTS) if not follows and rng.random() < 0.75 else "",
        count=rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 9, 20)),
        at_s=rng.choice((0.1, 0.5, 3.0)) * rng.random(),
        lasts_s=rng.choice((0.002, 0.02, 0.2, 1.0, 2.0, 3.0, 4.5)) * rng.uniform(0.5, 1.0),
        target=rng.choice(("who", "who", "who", "peer", "leader", "primary", "member", "any")),
        again=rng.random() < 0.6,
        gone_s=rng.choice((0.0, 0.005, 0.05, 0.3, 1.0, None)),
        to_peer=rng.random() < 0.3,
    )
    if rng.random() < 0.35:
        fault.then = _draw_chain(rng, follows=True)
        fault.then.at_s = rng.choice((0.0, 0.001, 0.01, 0.1, 1.0)) * rng.random()
    if fault.kind == "etcd slow request" and not follows:
        fault.target, fault.moment = "who", rng.choice(list(_OVERTAKEN_BY))
        if rng.random() < 0.6:
            fault.until = "after " + rng.choice(_OVERTAKEN_BY[fault.moment])
            fault.lasts_s = max(fault.lasts_s, 0.5)
    return fault


class ElasticFaultInjector(FaultInjector):
    """Injects faults into the world of an elastic job."""

    def __init__(self, world: ElasticWorld, faults: list[Fault], rng: random.Random, *, ruthless: bool) -> None:
        self._elastic = world
        super().__init__(cast(World, world), faults, rng, ruthless=False)
        self.ruthless = ruthless  # True: faults may end all workers that hold the totals
        if ruthless:
            self.add(_death_of_all_but_newcomers(rng))

    def _choose_target(self, fault: Fault, who: str) -> SimNode | None:
        nodes, workers = self._elastic.existing(), self._elastic.workers
        if not nodes:
            return None
        inside = [known for known in nodes if known.id in workers]
        outside = [known for known in nodes if known.id not in workers]
        chosen: ElasticProcess | None = None
        if fault.target in ("who", "peer"):
            chosen = self._elastic.nodes.get(who if fault.target == "who" else self._peer)
        elif fault.target == "leader" and workers:
            chosen = self._elastic.nodes[workers[0]]
        elif fault.target == "primary" and inside:
            chosen = self._rng.choice(inside)
        elif fault.target == "member" and outside:
            chosen = self._rng.choice(outside)
        if chosen is None or not chosen.exists:
            chosen = self._rng.choice(nodes)
        return cast(SimNode, chosen)

    def _is_survivable(self, *victims: SimNode) -> bool:
        """True if a worker that holds the totals stays, the job has a checkpoint, or faults may end all workers."""
        if self.ruthless or self._elastic.view.checkpoint is not None:
            return True
        staying = [
            known
            for known in self._elastic.whole_workers()
            if known not in cast("tuple[ElasticProcess, ...]", victims)
            and not (known.draining or known.declared_gone or known.process.frozen)
            and known.id not in self._elastic.view.gone
        ]
        return bool(staying)

    def _massacre(self, fault: Fault, target: SimNode) -> None:
        """Kills all workers that hold the totals; newcomers live."""
        for known in self._elastic.whole_workers():
            if known.id in self._elastic.workers:
                self._crash(fault, cast(SimNode, known))

    def _called_gone(self, fault: Fault, target: SimNode) -> None:
        """Makes a launcher declare a living node gone, and mostly revoke its lease."""
        if not self._is_survivable(target):
            return
        self._record_fault(fault, target.id)
        target.declared_gone = True
        self._elastic.declare_gone(target.id, "killed")
        registered = self._elastic.view.nodes.get(target.id)
        if registered is not None and self._rng.random() < 0.7:
            self._elastic.etcd.arrive(lambda: self._elastic.etcd.store.revoke(registered.record.lease))
        self._later(self._rng.uniform(0.0, 0.5), self._start_node, target.name if fault.again else "")

    def end(self) -> None:
        super().end()
        self._elastic.workload.slow.clear()
