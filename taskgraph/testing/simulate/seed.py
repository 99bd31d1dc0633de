"""Draws a seed, runs it to its end, and judges it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import logging
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
from taskgraph.protocol.records import State
from taskgraph.testing.simulate.drawing import (
    Again,
    draw,
    draw_absences,
    draw_again,
    draw_around_checkpoints,
    draw_around_members,
    draw_around_race,
    draw_at_the_end,
    draw_between_steps,
    draw_called_gone,
    draw_deletions,
    draw_in_flight,
    draw_power_losses,
    draw_race,
    draw_with_moods,
)
from taskgraph.testing.simulate.faults import Faults
from taskgraph.testing.simulate.loop import Nothing, SimLoop, own_time
from taskgraph.testing.simulate.pace import Pace
from taskgraph.testing.simulate.runs import Violation
from taskgraph.testing.simulate.transcript import Transcript
from taskgraph.testing.simulate.workload import Mistake, Workload
from taskgraph.testing.simulate.world import Errors, World

__all__ = ["Outcome", "run_seed"]

T = TypeVar("T")

HEAL_S = 15.0
"""Virtual time at which failures end."""
DEADLINE_S = 120.0
"""Virtual time after that in which the job must end."""
CHECKPOINTS = 0.25
"""Share of the seeds whose job keeps checkpoints."""
AHEAD = 0.5
"""Share of the seeds whose tasks may be ahead of the last commit."""
IN_FLIGHT = 0.7
"""Share of those whose tasks may be in several epochs at a time, where they have no handlers."""

LARGE = 0.15
"""Share of the seeds in which all values count as large, and so are made and read in threads."""

AT_THE_END = 0.2
"""Share of the seeds with failures in the last epoch of the job."""

DELETING = 0.1
"""Share of the seeds in which somebody deletes keys of nodes that live."""

AGAIN = 0.15
"""Share of the seeds whose job's name is submitted again: after the end of the run, or while its nodes still end."""

AGAIN_KEEPING = 0.4
"""The same, of those whose job keeps checkpoints."""

CALLED_GONE = 0.1
"""Share of the seeds whose launchers say of nodes that live that they are gone."""

POWER_LOSSES = 0.1
"""Share of the seeds in which all nodes of a host die at once."""

MEMBERS = 0.1
"""Share of the seeds in which members change while a write that rests on them is on its way."""

LEAVING = 0.15
"""Share of the seeds in which nodes are left to end by themselves, and tasks have a `teardown`."""
LEAVES_S = 3.0
"""For how long there are failures then, at most."""
LEFT_S = 90.0
"""Virtual time after which these nodes must have ended, also if no launcher collected results."""

LAGGING = 0.3
"""Share of the seeds with checkpoints whose place lists late what was written, and what was removed."""

RESTING = 0.2
"""Share of the seeds whose nodes rest between looks at all their tasks, as they do where there are hundreds."""

RESTS_S = (0.0, 0.0, 0.01, 0.05, 0.2)
"""For how long they do."""

SHORT_S = 0.02
"""Instead of a second."""

ABSENT = 0.1
"""Share of the seeds in which an absent node soon counts as gone."""

_LOST_AFTER_S = 7.0
"""No failure of other seeds lasts longer; two of one node in a row may."""

LIMIT_CPU_S = 10.0
"""Processor seconds that no seed needs: one that takes longer is in an endless loop."""


@dataclass
class Outcome:
    """The outcome of a seed.

    Attributes:
        problem: "" or what was violated, or what hangs.
        rests: whether nodes rested between their looks.
        large: whether all values counted as large.
        ended: "finished"; "lost" where every holder of a task was gone; "mistaken" where its own code failed it; "shut
            down" by a command.
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
    """Runs one seed. The same seed does the same things, in every process.

    Args:
        mistakes: code of one task raises at some time, in what is the same job otherwise, for as long as it does not.
    """
    began = time.perf_counter()
    loop = SimLoop()
    outcome = Outcome(seed, "", "", "", Transcript(lambda: loop.at), 0.0, 0.0, 0)
    with _watched(loop), _garbage_kept(), _resting(outcome), _large(outcome), _soon():
        runner = asyncio.Runner(loop_factory=lambda: loop)
        try:
            with runner:
                runner.run(_run(outcome, mistakes))
        except (Nothing, Stuck) as error:
            outcome.problem = outcome.problem or str(error)
    outcome.virtual_s = loop.at - 1.0
    outcome.wall_s = time.perf_counter() - began
    outcome.steps = loop.steps
    return outcome


_seeds = itertools.count(1)
_COLLECT_EVERY = 32


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collects garbage only at the end: otherwise chance decides when finalizers run. It is faster, too."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)  # all that this seed made is in the youngest generation
        if collects:
            gc.enable()
        if next(_seeds) % _COLLECT_EVERY == 0:
            gc.collect()  # what was still held when its seed ended, and is too old for the collection above


@contextlib.contextmanager
def _resting(outcome: Outcome) -> Iterator[None]:
    """Draws pauses between a node's looks at its tasks; in most seeds there are none, as with few tasks."""
    rests = random.Random(f"rests of {outcome.seed}")
    if rests.random() >= RESTING:
        yield
        return
    outcome.rests = True
    with mock.patch.object(reconciler, "rest_s", _rests(rests)), mock.patch.object(viewkeeper, "rest_s", _rests(rests)):
        yield


def _rests(rng: random.Random) -> Callable[[float], float]:
    return lambda took_s: rng.choice(RESTS_S)


@contextlib.contextmanager
def _large(outcome: Outcome) -> Iterator[None]:
    """Treats all values as large in some seeds; states are single numbers, so they are small otherwise."""
    sizes = random.Random(f"sizes of {outcome.seed}")
    outcome.large = sizes.random() < LARGE
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
def _soon() -> Iterator[None]:
    """Shortens the retries of a node without memory, so that the pauses between them fit into a seed."""
    with mock.patch.object(primary, "_SHORT_S", SHORT_S):
        yield


class Stuck(BaseException):
    """A callback does not return: on a real node the event loop would be stuck."""


@contextlib.contextmanager
def _watched(loop: SimLoop) -> Iterator[None]:
    """Interrupts a seed that uses too much processor time. Threads other than the main one get no signals."""
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


def _settings(rng: random.Random, workload: Workload) -> tg.Settings:
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
        strict=rng.random() < 0.04 and not workload.erratic and workload.whims is None and workload.moody is None,
    )


async def _run(outcome: Outcome, mistakes: bool) -> None:
    rng, keeps = random.Random(outcome.seed), random.Random(f"checkpoints of {outcome.seed}")
    keeping = keeps.random() < CHECKPOINTS
    hurries = random.Random(f"epochs ahead of {outcome.seed}")
    hurrying = hurries.random() < AHEAD
    flies = random.Random(f"epochs in flight of {outcome.seed}")
    flying = hurrying and flies.random() < IN_FLIGHT
    stands = random.Random(f"composed once of {outcome.seed}")
    turns = random.Random(f"turns of {outcome.seed}")
    workload = Workload.draw(
        rng,
        keeps if keeping else None,
        hurries if hurrying else None,
        flies if flying else None,
        stands if flying else None,
        turns,
        random.Random(f"asked on of {outcome.seed}"),
    )
    leaves = random.Random(f"leaves of {outcome.seed}")
    workload.torn_down = leaves.random() < LEAVING
    if mistakes:
        workload.mistake = Mistake.draw(random.Random(f"mistakes of {outcome.seed}"), workload.tasks)
    races = random.Random(f"races of {outcome.seed}")
    race = draw_race(races, talks=workload.talks and workload.tasks > 2, keeps=keeping)
    if race == "late seal":
        workload.draw_moods(races)
    nodes = rng.randint(1, 4) if rng.random() < 0.2 else workload.backups + rng.randint(1, 3)
    planned = draw(rng, talks=workload.talks, erratic=bool(workload.erratic))
    settings = _settings(rng, workload)
    if keeping:
        settings = dataclasses.replace(settings, checkpoints_kept=keeps.choice((1, 2, 3)))
    absences = random.Random(f"absences of {outcome.seed}")
    absent = absences.random() < ABSENT
    if absent:
        settings = dataclasses.replace(settings, lost_after_s=absences.choice((0.5, 0.5, 0.5, 2.0, 7.0)))
    pace = Pace.draw(outcome.seed, own_time)
    world = World(workload, settings, 1, rng, keeps, pace)
    outcome.transcript = world.transcript
    outcome.described = f"{workload.tasks} tasks, {workload.epochs} epochs, {workload.backups} backups, {nodes} nodes"
    has = {
        f"up to {workload.epochs_ahead} epochs ahead": workload.epochs_ahead,
        f"up to {workload.epochs_in_flight} in flight": workload.flying,
        "composed once": workload.steady,
        "as long as a task that has moods wants": workload.whims is not None,
        "flags that follow from messages" + " after a while" * bool(workload.lingers_s): workload.relays is not None,
        "requests that follow from requests": workload.asks_on is not None,
        "nodes that end by themselves": workload.torn_down,
        workload.mistake.text if workload.mistake is not None else "": workload.mistake,
        "nodes that rest between their looks": outcome.rests,
        "values that count as large": outcome.large,
        **pace.has,
        "absent nodes that soon count as gone": absent,
        f"a checkpoint every {workload.checkpoint_every} epochs": keeping,
    }
    outcome.described += "".join(f", {what}" for what, so in has.items() if so)
    world.loop.set_exception_handler(lambda _, context: world.violated(_unhandled(context)))
    errors = Errors(world)
    logger = logging.getLogger("taskgraph")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(errors)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    ruthless = rng.random() < 0.05
    chance = random.Random(rng.getrandbits(64))
    faults = Faults(world, planned, chance, ruthless=ruthless)
    if keeping:
        faults.add_around_checkpoints(draw_around_checkpoints(keeps))
    if workload.flying:
        faults.add(draw_in_flight(flies, erratic=bool(workload.erratic)))
    if workload.whims is not None:
        faults.add(draw_with_moods(turns))
    if race:
        faults.add(draw_around_race(races, race))
    if absent:
        world.compute_s = absences.choice((0.1, 0.3))  # else most are over before that
        faults.add(draw_absences(absences))
    if pace.steps.drawn:
        faults.add(draw_between_steps(random.Random(f"failures between steps of {outcome.seed}")))
    if (ending := random.Random(f"the last epoch of {outcome.seed}")).random() < AT_THE_END:
        faults.add(draw_at_the_end(ending))
    if (deletes := random.Random(f"deleted keys of {outcome.seed}")).random() < DELETING:
        faults.add(draw_deletions(deletes))
    if (calls := random.Random(f"called gone of {outcome.seed}")).random() < CALLED_GONE:
        faults.add(draw_called_gone(calls))
        outcome.described += ", a launcher that is wrong"
    if (powers := random.Random(f"power of {outcome.seed}")).random() < POWER_LOSSES:
        faults.add(draw_power_losses(powers))
        outcome.described += ", hosts that die"
    if workload.backups and (members := random.Random(f"members of {outcome.seed}")).random() < MEMBERS:
        world.compute_s = members.choice((0.1, 0.3))  # else most jobs end before the failures meet
        faults.add(draw_around_members(members))
        outcome.described += ", members that change meanwhile"
    if keeping and (lists := random.Random(f"listings of {outcome.seed}")).random() < LAGGING:
        world.place.lags(lists, lists.choice((0.05, 0.5, 3.0)))
        outcome.described += ", a place that lists late"
    again: Again | None = None
    if not mistakes and (names := random.Random(f"names of {outcome.seed}")).random() < (
        AGAIN_KEEPING if keeping else AGAIN
    ):
        again = draw_again(names, keeps=keeping)
        faults.add(again.shut)
        outcome.described += ", submitted again"
    try:
        await world.start(nodes)
        outcome.ended = await _until_over(world, faults)
        if again is not None:
            await _submit_again(world, again, nodes)
            faults.go_on(again.faults)
            outcome.ended = await _until_over(world, faults)
        if workload.torn_down:
            await _until_left(world, faults, collects=leaves.random() < 0.8)
    except Violation as error:
        outcome.problem = str(error)
    except Exception as error:
        outcome.problem = "".join(traceback.format_exception(error))
    finally:
        faults.end(heal=True)
        await world.stop()
        logger.removeHandler(errors)
        logger.setLevel(level)
        logger.propagate = propagate


def _unhandled(context: dict[str, object]) -> Violation:
    return Violation(f"not handled: {context.get('message')} {context.get('exception')!r}")


async def _submit_again(world: World, again: Again, nodes: int) -> None:
    """Submits the job again once its run is over; nodes of that run may not know its end."""
    if again.collected:
        world.collect()
    await asyncio.sleep(again.after_s)
    workload, keeps = world.workload, world.spec.checkpoint is not None
    # A job that finished may have a checkpoint of its last boundary, from which there is nothing to go on with.
    resume = again.resume and keeps and not world.invariants.view.finished
    if not resume:
        workload = dataclasses.replace(workload, seed=workload.seed ^ 1, rerun={})  # other states
    world.launcher.lose_next = again.lost
    submitted = asyncio.ensure_future(world.submit_again("again", workload, nodes, resume=resume))
    await asyncio.wait((submitted, world.failed), timeout=HEAL_S, return_when=asyncio.FIRST_COMPLETED)
    if world.failed.done():
        submitted.cancel()
        world.failed.result()
    if not submitted.done():
        submitted.cancel()
        raise Violation("it is not submitted again")
    with contextlib.suppress(JobRunning):  # it had finished, and went back to a checkpoint
        submitted.result()


async def _until_left(world: World, faults: Faults, *, collects: bool) -> None:
    """Waits until all nodes have ended by themselves, with faults for a while.

    Args:
        collects: a launcher collects the results.
    """
    view, now = world.invariants.view, world.loop.time
    began, healed = now(), False
    while not world.left():
        if world.failed.done():
            world.failed.result()
        if now() > began + LEFT_S:
            late = ", ".join(f"{known.id} of {known.of}" for known in world.nodes.values() if known.exists)
            raise Violation(f"nodes do not end: {late}: {hanging(world)}")
        if not healed and now() > began + LEAVES_S:
            healed = True
            if view.running:  # it went back to a checkpoint
                _heal(world, faults)
            else:
                faults.end(heal=True)
        if collects and view.finished and not view.collected:
            world.collect()
        await asyncio.sleep(0.05)
    faults.end(heal=True)
    await asyncio.sleep(2.0 * world.settings.lease_ttl_s)
    world.check_left()


async def _until_over(world: World, faults: Faults) -> str:
    status = asyncio.ensure_future(world.status())
    waiting: list[asyncio.Future[Any]] = [status]
    try:
        record = await _until(status, world, faults, "it hangs")
        if record.state == State.CANCELLED and world.shut_down:
            return "shut down"
        if record.state != State.FINISHED:
            return _judge_failure(world, record.reason, faults.ruthless or faults.bold)
        result = asyncio.ensure_future(world.result())
        waiting.append(result)
        found = await _until(result, world, faults, "the results do not come")
        if found is None:
            assert world.invariants.view.status is not None
            record = world.invariants.view.status.record
            if record.state == State.CANCELLED and world.shut_down:  # it went back to a checkpoint before
                return "shut down"
            return _judge_failure(world, record.reason, faults.ruthless or faults.bold)
        world.invariants.check_commit_calls()
        world.invariants.check_result(found)
        return "finished"
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _until(work: asyncio.Future[T], world: World, faults: Faults, otherwise: str) -> T:
    """Waits for `work`: for a while, and then without faults.

    Raises:
        Violation: `work` is still not done; `otherwise` says what that means.
    """
    waits: list[asyncio.Future[Any]] = [work, world.failed]
    await asyncio.wait(waits, timeout=HEAL_S, return_when=asyncio.FIRST_COMPLETED)
    if not work.done() and not world.failed.done():
        _heal(world, faults)
        await asyncio.wait(waits, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    if world.failed.done():
        world.failed.result()
    if not work.done():
        raise Violation(f"{otherwise}: {hanging(world)}")
    return work.result()


def _heal(world: World, faults: Faults) -> None:
    """Ends all faults, and starts nodes if there are too few: the last ones may have found no etcd and ended."""
    faults.end(heal=True)
    world.transcript.add("world", "heal", "no failure from now on")
    while len(world.existing()) < world.settings.min_in_sync + 1:
        world.add()


def _judge_failure(world: World, reason: str, ruthless: bool) -> str:
    """A job may fail for its own mistake, or for one other reason: every holder of some task is gone; and there is no
    checkpoint, or none that the disk kept, or a file of one was lost while the job went back to that. They died, as the
    seed wanted it; or one that did not was absent for so long that it counts as gone (`World._check_absence`): several
    failures in a row may do that."""
    view = world.invariants.view
    mistake = world.workload.mistake
    if mistake is not None and mistake.raised and f"ArithmeticError: {mistake.text}" in reason:
        return "mistaken"
    if any(f"/{name}/" in reason for name in world.place.lost_in_use):
        return "lost"
    if view.checkpoint is not None and not ("no checkpoint can be used" in reason and world.place.spoilt):
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


def hanging(world: World) -> str:
    """Lists what each node waits for."""
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
