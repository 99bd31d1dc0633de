"""Seeds of elastic jobs: as many as fit, and each of them again exactly as before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from taskgraph.testing.simulate.__main__ import main
from taskgraph.testing.simulate.drawing import Fault
from taskgraph.testing.simulate.elastic import run_elastic_seed
from taskgraph.testing.simulate.elastic import seed as elastic_seed
from taskgraph.testing.simulate.elastic.workload import Workload

QUICK = 40
"""Seeds of every test run."""
LATER = 60
"""Seeds of `make test-slow` after these: a fixed number, so that chance never fails a run of the tests."""

SEEDS = 8

REPLAY = f"""
from taskgraph.testing.simulate.elastic import run_elastic_seed
digests = {{seed: run_elastic_seed(seed).transcript.digest() for seed in reversed(range({SEEDS}))}}
print(*[digests[seed] for seed in range({SEEDS})])
"""


def problems(seeds: range) -> list[str]:
    return [f"seed {seed}: {outcome.problem}" for seed in seeds if (outcome := run_elastic_seed(seed)).problem]


def test_seeds() -> None:
    assert not problems(range(QUICK))


@pytest.mark.slow
def test_more_seeds() -> None:
    assert not problems(range(QUICK, QUICK + LATER))


FOUND = {
    115: "a newcomer that copied the state before another one returned",
    494: "a node that begins when all workers are gone, and nothing changes any more",
    514: "nodes that are declared gone, and newcomers without a worker",
    822: "a node that dies before it registers, and that nobody reports",
    962: "a newcomer whose entry is answered late",
    2740: "totals that are too large to be kept for a newcomer, which enters at that moment",
    5247: "a worker that was asked to keep totals, and begins later than these",
    22488: "a newcomer whose user code has returned, and must begin anew since others returned",
    8342: "a draining newcomer that is left alone",
    6693: "a draining worker that is in no view, and still writes a checkpoint",
    5501: "all workers die three times, and the job fails by name",
}
"""Seeds that found a mistake, and which one."""


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_found_a_mistake(seed: int) -> None:
    assert not problems(range(seed, seed + 1))


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--elastic", "--seeds", "0:3"]) == 0
    assert "3 seeds in" in capsys.readouterr().out
    assert main(["--elastic", "--seed", "1"]) == 0
    assert "seed 1: finished" in capsys.readouterr().out


def test_seed_replays_exactly() -> None:
    """Whatever the process did before, and however it hashes strings."""
    first = [run_elastic_seed(seed).transcript.digest() for seed in range(SEEDS)]
    fresh = subprocess.run(
        [sys.executable, "-c", REPLAY],
        env={**os.environ, "PYTHONHASHSEED": "4"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert fresh.stdout.split() == first


@pytest.mark.parametrize("kind", ["cut both ways", "isolation", "freeze"])
def test_cut_off_worker_is_excluded_after_a_ttl(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it reaches etcd: a TTL without an answer counts as a lost lease does."""
    fault = Fault(kind, "", 1, 1.0, 25.0, "primary", again=False, gone_s=None)
    workload = Workload(0, rows=24, batch=6, parts=4, passes=5, rounds=1, erratic=True, compute_s=0.1)
    monkeypatch.setattr(elastic_seed, "draw", lambda rng: [fault])
    monkeypatch.setattr(elastic_seed, "HEAL_S", 40.0)
    monkeypatch.setattr(elastic_seed, "RUTHLESS_SHARE", 0.0)
    monkeypatch.setattr(Workload, "draw", lambda rng: workload)
    outcome = run_elastic_seed(0)
    assert outcome.ended == "finished" and not outcome.problem
    assert outcome.transcript.states["lost"] == 1
    assert outcome.virtual_s < 16.0
