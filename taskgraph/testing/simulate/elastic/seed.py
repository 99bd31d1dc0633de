"""Runs one seed of an elastic job: draws the job and its faults, simulates them, and judges the outcome."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
import traceback

import taskgraph as tg
from taskgraph.protocol.records import JobStatus
from taskgraph.testing.simulate.elastic.faults import ElasticFaultInjector, draw, draw_around_checkpoints
from taskgraph.testing.simulate.elastic.workload import Workload
from taskgraph.testing.simulate.elastic.world import ElasticWorld
from taskgraph.testing.simulate.executions import Violation
from taskgraph.testing.simulate.loop import SimLoop, SimulationHalted, own_time
from taskgraph.testing.simulate.pace import Pace
from taskgraph.testing.simulate.seed import Outcome, Stuck, with_cpu_limit, without_garbage_collection
from taskgraph.testing.simulate.transcript import Transcript
from taskgraph.testing.simulate.world import errors_as_violations

__all__ = ["run_elastic_seed"]

HEAL_S = 15.0
"""Virtual seconds after which all failures end."""
DEADLINE_S = 90.0
"""Virtual seconds after `HEAL_S` in which the job must end."""
RUTHLESS_SHARE = 0.15
"""Share of the seeds whose faults may end all workers that hold the totals."""


def run_elastic_seed(seed: int) -> Outcome:
    """Runs one seed. The same seed gives the same run in every process."""
    began = time.perf_counter()
    loop = SimLoop()
    outcome = Outcome(seed, "", "", "", Transcript(lambda: loop.at), 0.0, 0.0, 0)
    with with_cpu_limit(loop), without_garbage_collection():
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(_run(outcome))
        except (SimulationHalted, Stuck) as error:
            outcome.problem = outcome.problem or str(error)
    outcome.virtual_s = loop.at - 1.0
    outcome.wall_s = time.perf_counter() - began
    outcome.steps = loop.steps
    return outcome


def _settings(rng: random.Random) -> tg.Settings:
    return tg.Settings(
        lease_ttl_s=2.0,
        lease_stall_s=rng.choice((0.5, 1.0)),
        lost_after_s=rng.choice((3.0, 7.0)),
        start_wait_s=2.0,
        drain_s=8.0,
        connect_s=rng.choice((0.3, 1.0)),
        ping_s=1.0,
        ping_timeout_s=rng.choice((1.5, 4.0)),
        call_s=rng.choice((0.5, 2.0)),
        refresh_s=rng.choice((0.01, 0.05)),
        results_kept_s=60.0,
    )


async def _run(outcome: Outcome) -> None:
    """Draws the seed's job and faults, simulates them, and fills in the outcome."""
    rng = random.Random(f"elastic {outcome.seed}")
    checkpoint_rng = random.Random(f"checkpoints of {outcome.seed}")
    workload = Workload.draw(rng)
    settings = _settings(rng)
    if outcome.seed % 7 == 3:  # few totals are kept for newcomers
        settings = dataclasses.replace(settings, max_totals_bytes=checkpoint_rng.choice((1, 300, 1000)))
    if outcome.seed % 4:  # sums are added up in slices if enough workers have parts
        settings = dataclasses.replace(settings, sliced_bytes=1)
    if outcome.seed % 5 in (1, 3):
        workload.checkpoint_every_s = checkpoint_rng.choice((0.05, 0.3, 1.0))
    pace = Pace.draw(outcome.seed, own_time)
    again = random.Random(f"again {outcome.seed}")
    resumed = outcome.seed % 10 == 1  # all machines go at a time, and others go on from the checkpoint
    world = ElasticWorld(workload, settings, rng, pace, checkpoint_rng)
    nodes = rng.choice((1, 2, 2, 3, 3, 4))
    outcome.transcript = world.transcript
    outcome.described = ", ".join([workload.text, f"{nodes} nodes", *(what for what, so in pace.kinds.items() if so)])
    ruthless = rng.random() < RUTHLESS_SHARE
    drawn = draw(rng)
    if outcome.seed % 4 == 2:
        for fault in drawn:
            fault.moment = fault.moment.replace("PartSums", "SliceSum")
    faults = ElasticFaultInjector(world, drawn, random.Random(rng.getrandbits(64)), ruthless=ruthless)
    if workload.checkpoint_every_s is not None:
        faults.add(draw_around_checkpoints(checkpoint_rng))
    with errors_as_violations(world.loop, world.fail):
        try:
            await world.start(nodes)
            if resumed and await _run_until_checkpoint(world, again.choice((1, 2, 3)), again.choice((0.0, 0.05, 0.5))):
                outcome.described += ", resumed"
                await world.start_again(again.choice((1, 2, 3, 4)))
            outcome.ended = await _wait_for_end(world, faults)
        except Violation as error:
            outcome.problem = str(error)
        except Exception as error:
            outcome.problem = "".join(traceback.format_exception(error))
        finally:
            faults.end()
            await world.stop()


async def _run_until_checkpoint(world: ElasticWorld, checkpoints: int, late_s: float) -> bool:
    """Waits until the job has had this many checkpoints, and for `late_s` then. Returns False if the job has ended."""
    seen = set[int]()
    while world.existing() and len(seen) < checkpoints:
        if world.failed.done():
            world.failed.result()
        if world.view.checkpoint is not None:
            seen.add(world.view.checkpoint.mod_revision)
        if not world.view.running:
            return False
        await asyncio.sleep(0.002)
    await asyncio.sleep(late_s)
    return world.view.running


async def _wait_for_end(world: ElasticWorld, faults: ElasticFaultInjector) -> str:
    """Waits for the job's end, first with faults, after `HEAL_S` without. Returns how it ended."""
    right_end = asyncio.ensure_future(_wait_for_right_end(world))
    try:
        await asyncio.wait((right_end, world.failed), timeout=HEAL_S, return_when=asyncio.FIRST_COMPLETED)
        if not right_end.done() and not world.failed.done():
            faults.end()
            world.transcript.add("world", "heal", "no failure from now on")
            await asyncio.wait((right_end, world.failed), timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if world.failed.done():
            world.failed.result()
        if not right_end.done():
            raise Violation(f"E6: it hangs: {_describe_hang(world)}")
        return right_end.result()
    finally:
        right_end.cancel()
        await asyncio.gather(right_end, return_exceptions=True)


async def _wait_for_right_end(world: ElasticWorld) -> str:
    """Waits for the job's end, and checks it. Returns "finished"; "lost": the job failed, and no worker was left that
    held the totals; "all gone": all processes ended before the job, or before its result was read.

    Raises:
        Violation: the job failed for no reason, or its result is wrong.
    """
    status = await world.final_status()
    if status is None:
        return "all gone"
    if status.state == JobStatus.FINISHED:
        result = await world.result()
        if result is None:
            return "all gone"
        world.checks.check_result(result)
        return "finished"
    if world.whole_at_failure:
        raise Violation(f"the job failed, and {world.whole_at_failure} could go on: {status.reason}")
    if world.view.checkpoint is not None and not ("fatal_deaths" in status.reason and _all_died_too_often(world)):
        raise Violation(f"the job failed, and has a checkpoint: {status.reason}")
    return "lost"


def _all_died_too_often(world: ElasticWorld) -> bool:
    """True if all workers died `fatal_deaths` times, and the job has no checkpoint of a later sum than at the first."""
    workers, checkpoint = world.view.workers, world.view.checkpoint
    if workers is None or checkpoint is None:
        return False
    deaths = workers.record.returns + 1  # the last one is no return
    return deaths >= world.job.settings.fatal_deaths and checkpoint.record.epoch <= workers.record.returned_to


def _describe_hang(world: ElasticWorld) -> str:
    """Describes what each node waits for, for a report of a hang."""
    lines = []
    for known in world.existing():
        node, core = known.node, known.node.engine.core
        view = None if core.view is None else core.view.number
        lines.append(
            f"{known.id}: {core.phase} at {core.position}, view {view}{', whole' if core.whole else ''}"
            f"{', paused' if node.paused else ''} {'; '.join(node.status().waits)}".strip()
        )
    return f"{world.view.workers and world.view.workers.record} | " + " | ".join(lines)
