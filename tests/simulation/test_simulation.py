"""Seeds of the simulation: as many as fit, and each of them again exactly as before."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

from taskgraph.errors import Unavailable
from taskgraph.node import reconciler
from taskgraph.node.epochs.attempt import Attempt
from taskgraph.testing.simulate import Outcome, pace, run_seed, world
from taskgraph.testing.simulate import seed as seeds
from taskgraph.testing.simulate.__main__ import main
from taskgraph.testing.simulate.drawing import Fault, draw_chain
from taskgraph.testing.simulate.loop import SimLoop
from taskgraph.testing.simulate.workload import HOOKS

#: Seeds of `make test`.
QUICK = 60

#: Seeds of `make test-slow` after these: a fixed number, so that chance never fails a run of the tests.
LATER = 100

RARE = (
    *(71, 74, 83, 90, 92, 98, 100, 102, 108, 121, 131, 140, 208, 242, 243),
    *(290, 404, 418, 432, 493, 530, 629, 669, 679, 694),
)
"""Seeds that reach all of `LEAST` together with the first ones, chosen out of 700. Where they no longer do, later seeds
are tried."""
WITHIN = 700

LEAST = {
    # Code of an epoch runs before an earlier one is through.
    "in flight": 20,
    "many in flight": 1,
    "in flight, takeover": 10,
    "drawn in flight, restart": 4,
    "restart in flight": 1,
    # A task that is asked asks another one, and either is replaced meanwhile.
    "asked on, takeover": 6,
    "asked on, restart": 2,
    # Boundaries that travel together are lost with their node, refused by an attempt that is over, or handed over.
    "boundaries together": 60,
    "boundaries together, takeover": 8,
    "boundaries together, evicted": 8,
    "boundaries together, restart": 1,
    "boundaries together, hand-over": 3,
    # A graph that was composed once stands.
    "epochs of a standing graph": 50,
    "standing graph, takeover": 3,
    "standing graph, restart": 3,
}
"""States that few seeds reach: in how many seeds of the test each is found, or how often."""

SEEDS = 10

REPLAY = f"""
from taskgraph.testing.simulate import run_seed
digests = {{seed: run_seed(seed).transcript.digest() for seed in reversed(range({SEEDS}))}}
print(*[digests[seed] for seed in range({SEEDS})])
"""


def test_seed_replays_exactly() -> None:
    """Whatever the process did before, and however it hashes strings."""
    first = [run_seed(seed).transcript.digest() for seed in range(SEEDS)]
    fresh = subprocess.run(
        [sys.executable, "-c", REPLAY],
        env={**os.environ, "PYTHONHASHSEED": "4"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert fresh.stdout.split() == first


@pytest.mark.timeout(590)
def test_seeds_find_no_violation_and_reach_rare_states(monkeypatch: pytest.MonkeyPatch) -> None:
    standing, reached = _Standing(monkeypatch), Counter[str]()
    outcomes = []
    for seed in (*range(QUICK), *RARE, *range(QUICK, WITHIN)):
        outcomes.append(run_seed(seed))
        reached += _reached(outcomes[-1]) + standing.reached(outcomes[-1])
        if len(outcomes) >= QUICK + len(RARE) and reached >= Counter(LEAST):
            break
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    faults = sum((outcome.transcript.faults for outcome in outcomes[:QUICK]), Counter[str]())
    assert len(faults) >= 20, faults
    assert reached >= Counter(LEAST), {state: reached[state] for state in LEAST}


def test_machine_speed_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In strict mode, a machine that was busy called user code once more."""
    strict = 16
    at_ease, passed = run_seed(strict).transcript.digest(), itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(passed)))
    assert run_seed(strict).transcript.digest() == at_ease


def test_resubmission_retries_while_etcd_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed failed where etcd paused for longer than a read may take."""
    plan, tries = world.plan, 0

    async def away(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise Unavailable("get '/taskgraph/simulated/spec': no answer within 3 s")
        return await plan(*args, **options)

    monkeypatch.setattr(world, "plan", away)
    outcome = run_seed(1)
    assert "submitted again" in outcome.described and tries == 2
    assert (outcome.problem, outcome.ended) == ("", "finished")


def _cancelled() -> list[int]:
    """The order in which a group that fails cancels its tasks."""
    order: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append(number)

    async def run() -> None:
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(30):
                    group.create_task(wait(number))
                await asyncio.sleep(1.0)
                raise ValueError

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(run())
    return order


def test_task_group_cancels_in_fixed_order() -> None:
    """It keeps them in a set; their hash must not be their address, which depends on all that was there before."""
    first = _cancelled()
    kept = []
    for _ in range(20):
        kept.append([object() for _ in range(1000)])
        assert _cancelled() == first


def test_command_shows_rate_and_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1:4"]) == 0
    out = capsys.readouterr().out
    assert "3 seeds in" in out and "per second" in out
    assert "faults: crash " in out and "reached: " in out and " admitted " in out


def test_command_shows_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "13", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "epoch 2 committed" in out and "seed 13: finished" in out and "Pull" in out


def _reached(outcome: Outcome) -> Counter[str]:
    states, described = outcome.transcript.states, outcome.described
    found, together = Counter[str](), states["several in Offers"]
    if states["epochs in flight"]:
        assert "in flight" in described, "nobody else is in two epochs"
        found["in flight"] = 1
        found["many in flight"] = states["epochs in flight"] >= 20
        found["in flight, takeover"] = states["takeover"] > 0
    if "in flight" in described:
        found["drawn in flight, restart"] = states["restart"] > 0
        found["restart in flight"] = states["restart"] > 0 and states["restart in flight"] > 0
    if "requests that follow from requests" in described:
        found["asked on, takeover"] = states["takeover"] > 0
        found["asked on, restart"] = states["restart"] > 0
    if together:
        found["boundaries together"] = together
        for state in ("takeover", "evicted", "restart", "hand-over"):
            found[f"boundaries together, {state}"] = states[state] > 0
    return found


class _Standing:
    """What was composed once stands through takeovers and restarts.

    Of jobs whose epochs are alike, marked tasks compose once in each attempt of each term.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        Key = tuple[int, int, int, int]
        composed = self._composed = Counter[Key]()
        begun = self._begun = Counter[Key]()
        last = self._last = dict[Key, int]()
        jobs: list[Any] = []  # so that none has the id of another one
        compose, has_composed = Attempt._compose, Attempt._set_graph

        def key_of(attempt: Attempt) -> Key:
            jobs.append(attempt.replica.job)  # of another run of the name all counts anew
            return id(attempt.replica.job), attempt.task, attempt.attempt, attempt.term

        async def counted(attempt: Attempt) -> Any:
            composed[key_of(attempt)] += attempt.replica.graph_may_be_constant
            return await compose(attempt)

        def began(attempt: Attempt, graph: Any) -> None:
            key = key_of(attempt)
            begun[key] += attempt.replica.constant_graph is not None
            if attempt.replica.constant_graph is not None:
                assert attempt.number > last.get(key, -1), "epochs begin in their order"
                last[key] = attempt.number
            has_composed(attempt, graph)

        patch.setattr(Attempt, "_compose", counted)
        patch.setattr(Attempt, "_set_graph", began)

    def reached(self, outcome: Outcome) -> Counter[str]:
        """Of a seed that was just run."""
        found = Counter[str]()
        if "composed once" in outcome.described:
            assert max(self._composed.values(), default=0) <= 1, outcome.seed
            stood = +self._begun
            found["epochs of a standing graph"] = sum(stood.values()) - len(stood)
            for state in ("takeover", "restart"):
                found[f"standing graph, {state}"] = outcome.transcript.states[state] > 0 and len(stood) > 1
        self._composed.clear()
        self._begun.clear()
        self._last.clear()
        return found


SURE: dict[str, tuple[int, dict[Any, tuple[str, ...]], dict[str, int], tuple[str, ...]]] = {
    "names are submitted again": (
        30,
        {
            seeds: (
                "AGAIN_SHARE",
                "AGAIN_WITH_CHECKPOINTS_SHARE",
                "LEAVING_SHARE",
                "CALLED_GONE_SHARE",
                "POWER_LOSS_SHARE",
                "CHECKPOINTS_SHARE",
            )
        },
        {"submitted again": 8, "went on from a checkpoint": 3, "torn down": 10}
        | {"called gone": 5, "power loss": 5, "shut down": 5},
        (),
    ),
    # Whoever led anew after a rest between looks began without what tasks had reported.
    "nodes look rarely": (60, {seeds: ("PAUSES_SHARE",)}, {"takeover": 15}, ()),
    "clocks drift": (
        20,
        {pace: ("CLOCK_DRIFT_SHARE", "SLOW_LINK_SHARE")},
        {"takeover": 5},
        ("clocks that drift, a slow link",),
    ),
    "everything takes long": (
        30,
        {
            pace: (
                "LOST_WRITES_SHARE",
                "STEP_TIMES_SHARE",
                "FUNCTION_TIMING_SHARE",
                "MEMORY_SHORTAGE_SHARE",
                "SLOW_ACTORS_SHARE",
            ),
            seeds: ("LARGE_VALUES_SHARE",),
        },
        {"comes last": 15, "takeover": 10},
        ("lost transactions", "steps that", "functions that", "nodes without", "somebody who", "count as large"),
    ),
}
"""How many seeds; what is drawn in each of them; the least number that has each state or fault; their description."""


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("where", SURE)
def test_seeds_find_nothing_and_replay(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, shares, least, described = SURE[where]
    for owner, names in shares.items():
        for name in names:
            monkeypatch.setattr(owner, name, 1.0)
    monkeypatch.setattr(seeds, "PAUSES_S", (reconciler.pause_after_s(3600.0),))  # as with hundreds of tasks
    outcomes = [run_seed(seed) for seed in range(count)]
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    reached = Counter[str]()
    for outcome in outcomes:
        reached.update({what for what, n in (outcome.transcript.states | outcome.transcript.faults).items() if n})
        assert all(text in outcome.described for text in described)
    assert reached >= Counter(least), reached
    for outcome in outcomes[:3]:
        assert run_seed(outcome.seed).transcript.digest() == outcome.transcript.digest()


@pytest.mark.parametrize("seed", [532486, 533087, 540046, 3023, 447, 558913])
def test_seeds_without_fault_pass(seed: int) -> None:
    """A node wakes up once the job's name was submitted again, and reads that the run before said it is gone; a job
    that had finished went back to a checkpoint, and was shut down then; a launcher was wrong about a node that alone
    had the state of a task, in a seed where such nodes are killed, too; a file of a checkpoint was lost in the moment
    that the job went back to that, which had been looked at; and a launcher was wrong about a node that stood still
    before it first read anything, and that was forgotten when it registered."""
    assert not run_seed(seed).problem


def test_job_fails_when_holders_are_absent_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No failure is as long as `lost_after_s`; two in a row are (seed 550111)."""

    def draw(rng: random.Random, **_: bool) -> list[Fault]:
        first = [draw_chain(rng, follows=True) for _ in range(4)]
        for fault in first:
            fault.kind, fault.target, fault.moment, fault.count = "freeze", "member", "after commit", 1
            fault.lasts_s, fault.then = 4.0, draw_chain(rng, follows=True)
            fault.then.kind, fault.then.target = "etcd cut", "member"
            fault.then.at_s, fault.then.lasts_s, fault.then.then = 3.9, 4.4, None
        first[0].target = first[0].then.target = "leader"
        return first

    monkeypatch.setattr(seeds, "draw", draw)
    monkeypatch.setattr(seeds, "CHECKPOINTS_SHARE", 0.0)
    outcomes = [run_seed(seed) for seed in range(2, 24)]
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    assert any(outcome.ended == "lost" for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_later_seeds_find_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    found = main(["--seeds", f"{QUICK}:{QUICK + LATER}"])
    assert not found, capsys.readouterr().out


@pytest.mark.parametrize("seed", [20952, 41611, 74024, 74430, 84499, 87838, 114811, 160897])
def test_seeds_that_found_something_once(seed: int) -> None:
    """Each of these is one of some ten thousand; what they found is in `test_found.py`, each as small as it got."""
    assert not run_seed(seed).problem


@pytest.mark.slow
def test_user_errors_fail_the_job_or_change_nothing() -> None:
    """Where it raises while something else fails: an error that does not count is followed by the right results."""
    outcomes = [run_seed(seed, mistakes=True) for seed in (768, *range(80))]
    assert not [outcome.problem for outcome in outcomes if outcome.problem]
    ends = Counter(outcome.ended for outcome in outcomes)
    assert ends["mistaken"] >= 16 and ends["finished"] >= 24, ends
    hooks = {hook for hook in HOOKS for o in outcomes if o.ended == "mistaken" and f"mistake in {hook} " in o.described}
    assert hooks == set(HOOKS), "each of them raised somewhere"
