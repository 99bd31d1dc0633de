"""A node that stands still: how long the job does, with everything else healthy."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

import taskgraph as tg
from taskgraph.testing.simulate.loop import SimLoop
from taskgraph.testing.simulate.workload import Workload
from taskgraph.testing.simulate.world import SimNode, World

BAR_S = 0.3
"""How much longer than the TTL a frozen primary may cost."""


def calm(seed: int, *, ttl_s: float, backups: int) -> World:
    """A long job whose messages and watches take a millisecond or so."""
    rng = random.Random(seed)
    drawn = Workload.draw(rng)
    plan = drawn.plan * 300
    workload = dataclasses.replace(
        drawn,
        backups=backups,
        plan=plan,
        epochs=len(plan),
        erratic=frozenset(),
        finishes=False,
    )
    world = World(workload, tg.Settings(lease_ttl_s=ttl_s), 1, rng, random.Random(seed))
    world.etcd.delay_s = world.network.delay_s = 0.0005
    world.etcd.lag_s = 0.002
    world.compute_s, world._etcd_timeout_s = 0.01, 3.0
    return world


async def until(world: World, what: str, true: object, *, within_s: float = 0.001) -> float:
    """Returns the virtual time at which it was so, to `within_s`."""
    assert callable(true)
    limit = world.loop.time() + 60.0
    while not true():
        assert world.loop.time() < limit, f"waited in vain for {what}:\n" + world.transcript.text()
        assert not world.failed.done(), world.failed.exception()
        await asyncio.sleep(within_s)
    return world.loop.time()


async def frozen(seed: int, ttl_s: float, backups: int) -> tuple[float, float]:
    """How long after a freeze an epoch committed again, and how long after the key was deleted its task was taken over:
    less than 0 where it was before that."""
    world = calm(seed, ttl_s=ttl_s, backups=backups)
    view, chance = world.invariants.view, random.Random(seed)
    await world.start(backups + 2)
    for known in world.nodes.values():
        known.coordinator.lag = 1.0
    try:

        def whole() -> bool:
            tasks = range(world.workload.tasks)
            return (
                view.epoch is not None
                and view.epoch.record.epoch > 2
                and all(len(view.in_sync(task)) == 1 + backups for task in tasks)
            )

        await until(world, "all backups", whole, within_s=0.05)
        await asyncio.sleep(chance.random())
        task = chance.randrange(world.workload.tasks)
        victim, term = world.nodes[view.primary_node(task) or ""], view.term(task)
        stop(victim)
        began = world.loop.time()
        taken = await until(world, "a successor", lambda: view.term(task) > term)
        assert view.epoch is not None
        at = view.epoch.record.epoch
        committed = await until(world, "a commit", lambda: view.epoch is not None and view.epoch.record.epoch > at)
        deleted = await until(world, "the end of its key", lambda: victim.id not in view.nodes)
        victim.process.thaw(world.loop)
        victim.threads.thaw(world.loop)
        await until(world, "its return", lambda: victim.id in view.nodes, within_s=0.05)
        await until(world, "all backups again", whole, within_s=0.05)
        assert not world.failed.done(), world.failed.exception()
    finally:
        await world.stop()
    return committed - began, taken - deleted


def stop(node: SimNode) -> None:
    node.process.frozen = node.threads.frozen = True


@pytest.mark.parametrize(("ttl_s", "backups"), [(2.0, 1), pytest.param(5.0, 2, marks=pytest.mark.slow)])
def test_a_frozen_primary_costs_the_ttl_and_300_ms_at_most(ttl_s: float, backups: int) -> None:
    """Whenever it is frozen, between two renewals of its lease, and between two looks of etcd for leases that ended."""
    costs, before_deletion = [], 0
    for seed in range(8):
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            cost_s, late_s = runner.run(frozen(seed, ttl_s, backups))
        costs.append(cost_s)
        before_deletion += late_s < 0
    assert max(costs) < ttl_s + BAR_S, [round(cost, 3) for cost in costs]
    assert before_deletion >= 4, "etcd's own look was first"
