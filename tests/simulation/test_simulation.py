"""Seeds of the simulation: as many as fit, and each of them again exactly as before."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from taskgraph.testing.simulate import run_seed
from taskgraph.testing.simulate.__main__ import main

#: What `make test` has time for.
LIMIT_S = float(os.environ.get("TASKGRAPH_SIMULATE_S", "120"))

REPLAY = """
from taskgraph.testing.simulate import run_seed
print(*[run_seed(seed).transcript.digest() for seed in range(12)])
"""


def test_a_seed_replays_exactly() -> None:
    first = [run_seed(seed).transcript.digest() for seed in range(12)]
    assert first == [run_seed(seed).transcript.digest() for seed in range(12)]
    for hash_seed in ("1", "2"):
        fresh = subprocess.run(
            [sys.executable, "-c", REPLAY],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert fresh.stdout.split() == first


def test_the_command_line_tells_rate_and_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:30"]) == 0
    out = capsys.readouterr().out
    assert "30 seeds in" in out and "per second" in out
    assert "faults: crash " in out and "reached: admitted " in out


def test_one_seed_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "13", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "epoch 2 committed" in out and "seed 13: finished" in out and "Pull" in out


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 120)
def test_no_seed_finds_anything(capsys: pytest.CaptureFixture[str]) -> None:
    """From a fixed start, until the time is over."""
    began = time.monotonic()
    found = main(["--seeds", "0:1000000000", "--for-s", str(LIMIT_S)])
    out = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{out}")
    assert not found, out
    assert time.monotonic() - began < LIMIT_S + 60
