"""Runs one seed: draws the job and its faults, simulates them, and judges the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

import taskgraph as tg
from taskgraph.coordination import viewkeeper
from taskgraph.errors import JobRunning
from taskgraph.node import reconciler, replica
from taskgraph.node.epochs import inbound, pulls
from taskgraph.node.primary import primary, unsent_offers
from taskgraph.protocol.records import JobStatus
from taskgraph.testing.simulate.drawing import (
    Resubmission,
    choose_race,
    draw,
    draw_absences,
    draw_between_steps,
    draw_called_gone,
    draw_checkpoint_faults,
    draw_deletions,
    draw_for_epochs_in_flight,
    draw_last_epoch_faults,
    draw_member_changes,
    draw_power_losses,
    draw_race_faults,
    draw_report_crashes,
    draw_resubmission,
)
from taskgraph.testing.simulate.executions import Violation
from taskgraph.testing.simulate.faults import FaultInjector
from taskgraph.testing.simulate.loop import SimLoop, SimulationHalted, own_time
from taskgraph.testing.simulate.pace import Pace
from taskgraph.testing.simulate.transcript import Transcript
from taskgraph.testing.simulate.workload import RaisingMethod, Workload
from taskgraph.testing.simulate.world import World, errors_as_violations

__all__ = ["Outcome", "Stuck", "run_seed", "with_cpu_limit", "without_garbage_collection"]

T = TypeVar("T")

HEAL_S = 15.0
"""Virtual seconds after which all failures end."""
DEADLINE_S = 120.0
"""Virtual seconds after `HEAL_S` in which the job must end."""
CHECKPOINTS_SHARE = 0.25
"""Share of the seeds whose job keeps checkpoints."""
AHEAD_SHARE = 0.5
"""Share of the seeds whose tasks may be ahead of the last commit."""
IN_FLIGHT_SHARE = 0.7
"""Share of the seeds with `AHEAD_SHARE` whose tasks may be in several epochs at a time, if they have no handlers."""

LARGE_VALUES_SHARE = 0.15
"""Share of the seeds in which all values count as large, so that threads encode and decode them."""

LAST_EPOCH_SHARE = 0.2
"""Share of the seeds with failures in the last epoch of the job."""

KEY_DELETION_SHARE = 0.1
"""Share of the seeds in which keys of living nodes are deleted."""

AGAIN_SHARE = 0.15
"""Share of the seeds whose job's name is submitted again: after the end of the run, or while its nodes still end."""

AGAIN_WITH_CHECKPOINTS_SHARE = 0.4
"""Like `AGAIN_SHARE`, for jobs with checkpoints."""

CALLED_GONE_SHARE = 0.1
"""Share of the seeds whose launchers declare living nodes gone."""

POWER_LOSS_SHARE = 0.1
"""Share of the seeds in which all nodes of a host die at once."""

MEMBER_CHANGE_SHARE = 0.1
"""Share of the seeds in which members change while a write that depends on them is late."""

LEAVING_SHARE = 0.15
"""Share of the seeds whose nodes end by themselves, and whose tasks have a `teardown`."""
LEAVES_S = 3.0
"""Virtual seconds after the job's end after which all failures end, in such seeds."""
LEFT_S = 90.0
"""Virtual seconds in which these nodes must end, also if no launcher collects results."""

LATE_LISTING_SHARE = 0.3
"""Share of the seeds with checkpoints whose disk lists files late, after writes and removals."""

PAUSES_SHARE = 0.2
"""Share of the seeds whose nodes pause between checks of all their tasks, as nodes with hundreds of tasks do."""

PAUSES_S = (0.0, 0.0, 0.01, 0.05, 0.2)
"""The drawn durations of such pauses."""

MEMORY_RETRY_S = 0.02
"""The pause between retries of a node without memory; a second outside of simulations."""

ABSENCE_SHARE = 0.1
"""Share of the seeds with a short `lost_after_s`."""

_LOST_AFTER_S = 7.0
"""`lost_after_s` of other seeds: longer than any one failure. Two failures of a node in a row may last longer."""

LIMIT_CPU_S = 10.0
"""Processor seconds after which a seed counts as an endless loop."""


@dataclass
class Outcome:
    """The outcome of a seed.

    Attributes:
        problem: the violation, or the nodes that hang; "" if there is no problem.
        ended: how the job ended: "finished"; "lost": all replicas of a task were gone; "mistaken": its own code raised;
            "shut down": by a command.
        described: the job and its faults, in words.
        rests: True if nodes paused between checks of their tasks.
        large: True if all values counted as large.
    """

    seed: int
    problem: str
    ended: str
    described: str
    transcript: Transcript
    virtual_s: float
    wall_s: float
    steps: int
    rests: bool = False
    large: bool = False


def run_seed(seed: int, *, mistakes: bool = False) -> Outcome:
    """Runs one seed. The same seed gives the same run in every process.

    Args:
        mistakes: the code of one task raises at some time; until then the run is the same as without mistakes.
    """
    began = time.perf_counter()
    loop = SimLoop()
    outcome = Outcome(seed, "", "", "", Transcript(lambda: loop.at), 0.0, 0.0, 0)
    with (
        with_cpu_limit(loop),
        without_garbage_collection(),
        _with_pauses(outcome),
        _with_large_values(outcome),
        _with_quick_memory_retries(),
    ):
        runner = asyncio.Runner(loop_factory=lambda: loop)
        try:
            with runner:
                runner.run(_run(outcome, mistakes))
        except (SimulationHalted, Stuck) as error:
            outcome.problem = outcome.problem or str(error)
    outcome.virtual_s = loop.at - 1.0
    outcome.wall_s = time.perf_counter() - began
    outcome.steps = loop.steps
    return outcome


_seeds = itertools.count(1)
_COLLECT_EVERY = 32


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collects garbage only after the seed: otherwise finalizers run at random times. This is also faster."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)  # objects of this seed are in the youngest generation
        if collects:
            gc.enable()
        if next(_seeds) % _COLLECT_EVERY == 0:
            gc.collect()  # objects that outlived their seed, and are too old for the collection above


@contextlib.contextmanager
def _with_pauses(outcome: Outcome) -> Iterator[None]:
    """Draws pauses between a node's checks of its tasks; most seeds have none."""
    rests = random.Random(f"rests of {outcome.seed}")
    if rests.random() >= PAUSES_SHARE:
        yield
        return
    outcome.rests = True
    with (
        mock.patch.object(reconciler, "pause_after_s", _pause_drawer(rests)),
        mock.patch.object(viewkeeper, "pause_after", _pause_drawer(rests)),
    ):
        yield


def _pause_drawer(rng: random.Random) -> Callable[[float], float]:
    """Returns a function that draws a pause in seconds, whatever time the check took."""
    return lambda took_s: rng.choice(PAUSES_S)


@contextlib.contextmanager
def _with_large_values(outcome: Outcome) -> Iterator[None]:
    """Makes all values count as large, in some seeds. States are single numbers, so they would be small."""
    sizes = random.Random(f"sizes of {outcome.seed}")
    outcome.large = sizes.random() < LARGE_VALUES_SHARE
    with contextlib.ExitStack() as stack:
        if outcome.large:
            stack.enter_context(mock.patch.object(replica, "_SMALL_BYTES", -1))
            if sizes.random() < 0.5:
                stack.enter_context(mock.patch.object(unsent_offers, "_SMALL_BYTES", -1))
            if sizes.random() < 0.5:
                stack.enter_context(mock.patch.object(pulls, "LARGE_BYTES", -1))
                stack.enter_context(mock.patch.object(inbound, "LARGE_BYTES", -1))
        yield


@contextlib.contextmanager
def _with_quick_memory_retries() -> Iterator[None]:
    """Shortens the retries of a node without memory, so that the pauses between them fit into a seed."""
    with mock.patch.object(primary, "_SHORT_S", MEMORY_RETRY_S):
        yield


class Stuck(BaseException):
    """Raised into a callback that does not return."""


@contextlib.contextmanager
def with_cpu_limit(loop: SimLoop) -> Iterator[None]:
    """Raises Stuck in a seed that uses `LIMIT_CPU_S` of processor time; only in the main thread, which gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        where = "".join(traceback.format_stack(frame)[-4:])
        loop.abort = f"something runs for ever, and nothing else can run meanwhile:\n{where}"
        raise Stuck(loop.abort)

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S, LIMIT_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _draw_settings(rng: random.Random, workload: Workload) -> tg.Settings:
    return tg.Settings(
        lease_ttl_s=2.0,
        lease_stall_s=rng.choice((0.5, 1.0)),
        lost_after_s=_LOST_AFTER_S,
        min_in_sync=2 if rng.random() < 0.1 else 1,
        admit_wait_s=rng.choice((0.0, 0.5, 2.0)),
        start_wait_s=2.0,
        hand_over_s=rng.choice((0.05, 0.5)),
        drain_s=8.0,
        takeover_stagger_s=rng.choice((0.0, 0.02, 0.3)),
        connect_s=rng.choice((0.3, 1.0)),
        ping_s=1.0,
        ping_timeout_s=rng.choice((1.5, 4.0)),
        call_s=rng.choice((0.5, 2.0)),
        refresh_s=rng.choice((0.01, 0.05)),
        stall_check_s=2.0,
        cancel_s=30.0,
        setup_s=5.0,
        epochs_ahead=workload.epochs_ahead,
        epochs_in_flight=workload.epochs_in_flight,
        gather_s=workload.gather_s,
        results_kept_s=60.0,
        strict=rng.random() < 0.04 and not workload.erratic and workload.end_whims is None and workload.moody is None,
    )


async def _run(outcome: Outcome, mistakes: bool) -> None:
    """Draws the seed's job and faults, simulates them, and fills in the outcome."""
    rng, checkpoint_rng = random.Random(outcome.seed), random.Random(f"checkpoints of {outcome.seed}")
    has_checkpoints = checkpoint_rng.random() < CHECKPOINTS_SHARE
    ahead_rng = random.Random(f"epochs ahead of {outcome.seed}")
    is_ahead = ahead_rng.random() < AHEAD_SHARE
    in_flight_rng = random.Random(f"epochs in flight of {outcome.seed}")
    is_in_flight = is_ahead and in_flight_rng.random() < IN_FLIGHT_SHARE
    same_plan_rng = random.Random(f"composed once of {outcome.seed}")
    turn_rng = random.Random(f"turns of {outcome.seed}")
    workload = Workload.draw(
        rng,
        checkpoint_rng if has_checkpoints else None,
        ahead_rng if is_ahead else None,
        in_flight_rng if is_in_flight else None,
        same_plan_rng if is_in_flight else None,
        turn_rng,
        random.Random(f"asked on of {outcome.seed}"),
    )
    workload.draw_sharing(random.Random(f"shared state of {outcome.seed}"))
    leaving_rng = random.Random(f"leaves of {outcome.seed}")
    workload.torn_down = leaving_rng.random() < LEAVING_SHARE
    if mistakes:
        workload.mistake = RaisingMethod.draw(random.Random(f"mistakes of {outcome.seed}"), workload.tasks)
    races = random.Random(f"races of {outcome.seed}")
    race = choose_race(races, talks=workload.talks and workload.tasks > 2, has_checkpoints=has_checkpoints)
    if race == "late seal":
        workload.draw_moody_task(races)
    nodes = rng.randint(1, 4) if rng.random() < 0.2 else workload.backups + rng.randint(1, 3)
    planned = draw(rng, talks=workload.talks, erratic=bool(workload.erratic))
    settings = _draw_settings(rng, workload)
    if has_checkpoints:
        settings = dataclasses.replace(settings, checkpoints_kept=checkpoint_rng.choice((1, 2, 3)))
    absences = random.Random(f"absences of {outcome.seed}")
    absent = absences.random() < ABSENCE_SHARE
    if absent:
        settings = dataclasses.replace(settings, lost_after_s=absences.choice((0.5, 0.5, 0.5, 2.0, 7.0)))
    pace = Pace.draw(outcome.seed, own_time)
    world = World(workload, settings, 1, rng, checkpoint_rng, pace)
    outcome.transcript = world.transcript
    outcome.described = f"{workload.tasks} tasks, {workload.epochs} epochs, {workload.backups} backups, {nodes} nodes"
    has = {
        f"up to {workload.epochs_ahead} epochs ahead": workload.epochs_ahead,
        f"up to {workload.epochs_in_flight} in flight": workload.in_flight_tasks,
        "composed once": workload.same_plan,
        "as long as a task that has moods wants": workload.end_whims is not None,
        "flags that follow from messages" + " after a while" * bool(workload.lingers_s): workload.relays is not None,
        "requests that follow from requests": workload.asks_on is not None,
        "nodes that end by themselves": workload.torn_down,
        "shared state": workload.sharing is not None and workload.sharing.tasks,
        workload.mistake.text if workload.mistake is not None else "": workload.mistake,
        "nodes that rest between their looks": outcome.rests,
        "values that count as large": outcome.large,
        **pace.kinds,
        "absent nodes that soon count as gone": absent,
        f"a checkpoint every {workload.checkpoint_every} epochs": has_checkpoints,
    }
    outcome.described += "".join(f", {what}" for what, so in has.items() if so)
    ruthless = rng.random() < 0.05
    chance = random.Random(rng.getrandbits(64))
    faults = FaultInjector(world, planned, chance, ruthless=ruthless)
    if has_checkpoints:
        faults.add_around_checkpoints(draw_checkpoint_faults(checkpoint_rng))
    if workload.in_flight_tasks:
        faults.add(draw_for_epochs_in_flight(in_flight_rng, erratic=bool(workload.erratic)))
    if workload.end_whims is not None:
        faults.add(draw_report_crashes(turn_rng))
    if race:
        faults.add(draw_race_faults(races, race))
    if absent:
        world.compute_s = absences.choice((0.1, 0.3))  # else most are over before that
        faults.add(draw_absences(absences))
    if pace.step_times.active:
        faults.add(draw_between_steps(random.Random(f"failures between steps of {outcome.seed}")))
    if (ending := random.Random(f"the last epoch of {outcome.seed}")).random() < LAST_EPOCH_SHARE:
        faults.add(draw_last_epoch_faults(ending))
    if (deletes := random.Random(f"deleted keys of {outcome.seed}")).random() < KEY_DELETION_SHARE:
        faults.add(draw_deletions(deletes))
    if (calls := random.Random(f"called gone of {outcome.seed}")).random() < CALLED_GONE_SHARE:
        faults.add(draw_called_gone(calls))
        outcome.described += ", a launcher that is wrong"
    if (powers := random.Random(f"power of {outcome.seed}")).random() < POWER_LOSS_SHARE:
        faults.add(draw_power_losses(powers))
        outcome.described += ", hosts that die"
    if workload.backups and (members := random.Random(f"members of {outcome.seed}")).random() < MEMBER_CHANGE_SHARE:
        world.compute_s = members.choice((0.1, 0.3))  # else most jobs end before the failures meet
        faults.add(draw_member_changes(members))
        outcome.described += ", members that change meanwhile"
    if has_checkpoints and (lists := random.Random(f"listings of {outcome.seed}")).random() < LATE_LISTING_SHARE:
        world.disk.set_lag(lists, lists.choice((0.05, 0.5, 3.0)))
        outcome.described += ", a place that lists late"
    again: Resubmission | None = None
    if not mistakes and (names := random.Random(f"names of {outcome.seed}")).random() < (
        AGAIN_WITH_CHECKPOINTS_SHARE if has_checkpoints else AGAIN_SHARE
    ):
        again = draw_resubmission(names, has_checkpoints=has_checkpoints)
        faults.add(again.shut)
        outcome.described += ", submitted again"
    with errors_as_violations(world.loop, world.fail):
        try:
            await world.start(nodes)
            outcome.ended = await _wait_for_outcome(world, faults)
            if again is not None:
                await _submit_again(world, again, nodes)
                faults.resume(again.faults)
                outcome.ended = await _wait_for_outcome(world, faults)
            if workload.torn_down:
                await _wait_until_ended(world, faults, collects=leaving_rng.random() < 0.8)
        except Violation as error:
            outcome.problem = str(error)
        except Exception as error:
            outcome.problem = "".join(traceback.format_exception(error))
        finally:
            faults.end()
            await world.stop()


async def _submit_again(world: World, again: Resubmission, nodes: int) -> None:
    """Submits the job's name again after its run ended. Nodes of that run may not have learned of its end."""
    if again.collected:
        world.collect()
    await asyncio.sleep(again.after_s)
    workload, has_checkpoints = world.workload, world.spec.checkpoint is not None
    # A finished job may have a checkpoint of its last boundary, which cannot be resumed.
    resume = again.resume and has_checkpoints and not world.invariants.view.finished
    if not resume:
        sharing = workload.sharing and dataclasses.replace(workload.sharing, seed=workload.seed ^ 1)
        workload = dataclasses.replace(workload, seed=workload.seed ^ 1, rerun={}, sharing=sharing)  # other states
    world.launcher.lose_next = again.lost
    submitted = asyncio.ensure_future(world.submit_again("again", workload, nodes, resume=resume))
    await asyncio.wait((submitted, world.failed), timeout=HEAL_S, return_when=asyncio.FIRST_COMPLETED)
    if world.failed.done():
        submitted.cancel()
        world.failed.result()
    if not submitted.done():
        submitted.cancel()
        raise Violation("it is not submitted again")
    with contextlib.suppress(JobRunning):  # the job had finished, and rolled back to a checkpoint
        submitted.result()


async def _wait_until_ended(world: World, faults: FaultInjector, *, collects: bool) -> None:
    """Waits until all nodes have ended by themselves, with faults until `LEAVES_S`.

    Args:
        collects: a launcher collects the results.

    Raises:
        Violation: a node did not end within `LEFT_S`, or left a key.
    """
    view, now = world.invariants.view, world.loop.time
    began, healed = now(), False
    while not world.all_ended():
        if world.failed.done():
            world.failed.result()
        if now() > began + LEFT_S:
            late = ", ".join(f"{known.id} of {known.run_name}" for known in world.nodes.values() if known.exists)
            raise Violation(f"nodes do not end: {late}: {describe_hang(world)}")
        if not healed and now() > began + LEAVES_S:
            healed = True
            if view.running:  # it rolled back to a checkpoint
                _heal(world, faults)
            else:
                faults.end()
        if collects and view.finished and not view.collected:
            world.collect()
        await asyncio.sleep(0.05)
    faults.end()
    await asyncio.sleep(2.0 * world.settings.lease_ttl_s)
    world.check_no_node_keys_left()


async def _wait_for_outcome(world: World, faults: FaultInjector) -> str:
    """Waits for the job's end, and checks its result. Returns how it ended, as `Outcome.ended`. Raises Violation."""
    status = asyncio.ensure_future(world.final_status())
    waiting: list[asyncio.Future[Any]] = [status]
    try:
        record = await _wait_for(status, world, faults, "it hangs")
        if record.state == JobStatus.CANCELLED and world.shut_down:
            return "shut down"
        if record.state != JobStatus.FINISHED:
            return _judge_failure(world, record.reason, faults.ruthless or faults.bold)
        result = asyncio.ensure_future(world.result())
        waiting.append(result)
        found = await _wait_for(result, world, faults, "the results do not come")
        if found is None:
            assert world.invariants.view.status is not None
            record = world.invariants.view.status.record
            if record.state == JobStatus.CANCELLED and world.shut_down:  # it rolled back to a checkpoint before
                return "shut down"
            return _judge_failure(world, record.reason, faults.ruthless or faults.bold)
        world.invariants.check_commit_calls()
        world.invariants.check_result(found)
        return "finished"
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _wait_for(work: asyncio.Future[T], world: World, faults: FaultInjector, otherwise: str) -> T:
    """Waits for `work`, first with faults, after `HEAL_S` without.

    Raises:
        Violation: with the text `otherwise`: `work` is not done after `DEADLINE_S`.
    """
    waits: list[asyncio.Future[Any]] = [work, world.failed]
    await asyncio.wait(waits, timeout=HEAL_S, return_when=asyncio.FIRST_COMPLETED)
    if not work.done() and not world.failed.done():
        _heal(world, faults)
        await asyncio.wait(waits, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    if world.failed.done():
        world.failed.result()
    if not work.done():
        raise Violation(f"{otherwise}: {describe_hang(world)}")
    return work.result()


def _heal(world: World, faults: FaultInjector) -> None:
    """Ends all faults, and starts nodes if there are too few: nodes without etcd may have ended."""
    faults.end()
    world.transcript.add("world", "heal", "no failure from now on")
    while len(world.existing()) < world.settings.min_in_sync + 1:
        world.add()


def _judge_failure(world: World, reason: str, ruthless: bool) -> str:
    """Returns how a failed job ended; raises Violation if it had no reason to fail.

    A job may fail if its own code raised, or if all nodes in sync for a task are gone and no checkpoint is usable.
    Such a node died, as the seed wanted, or was absent for `lost_after_s` (`World._check_absent_long_enough`)."""
    view = world.invariants.view
    mistake = world.workload.mistake
    if mistake is not None and mistake.raised and f"ArithmeticError: {mistake.text}" in reason:
        return "mistaken"
    if world.workload.sharing is not None and world.workload.sharing.is_failure_by_stray(reason):
        return "mistaken"
    if any(f"/{name}/" in reason for name in world.disk.lost_in_use):
        return "lost"
    if view.checkpoint is not None and not ("no checkpoint can be used" in reason and world.disk.damaged):
        raise Violation(f"the job failed, and has a checkpoint: {reason}")
    for task in range(world.workload.tasks):
        holders = view.in_sync(task)
        gone = {n: view.gone[n].record for n in holders if n in view.gone}
        absent = [n for n, record in gone.items() if record.reason.startswith("its key was absent")]
        missed = any(not world.nodes[n].dead for n in absent)
        lost = len(gone) == len(holders) and (ruthless or missed)
        if lost and f"task {task}: every replica in sync is gone" in reason:
            return "lost"
    raise Violation(f"the job failed: {reason}")


def describe_hang(world: World) -> str:
    """Describes what each node waits for, for a report of a hang."""
    view = world.invariants.view
    lines = [f"at {view.stamp}, {len(world.existing())} nodes"]
    for known in world.existing():
        node = known.node
        what = "paused" if node.paused else ""
        for held in node.status().replicas:
            if held.role == "primary":
                what += f" task {held.task} (term {held.term}): {', '.join(held.waits) or 'nothing'};"
        lines.append(f"{known.id}: {what.strip()} {'; '.join(node.status().waits)}".strip())
    return " | ".join(lines)
