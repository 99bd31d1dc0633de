"""Errors of a CUDA device, in real node processes: the process ends, the task fails over, and not for ever.

The exception is one of the tests' own, of the name that CuPy's has: what is done about it needs no device.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import PATIENT, Cli, Done

DRIVER = str(Path(__file__).parent / "drivers" / "poisoned.py")


TIDY = (*PATIENT, "--set", "takeover_stagger_s=10")
"""Each node begins with the tasks that are its own, however slow the machine is."""


async def run(cli: Cli, nodes: int, *options: str) -> Done:
    marks = cli.root / "marks"
    marks.mkdir()
    given = [part for option in (*options, f"marks={marks}") for part in ("-o", option)]
    return await cli("run", DRIVER, "--nodes", str(nodes), "--json", "--logs", *TIDY, *given)


async def test_the_process_ends_and_the_task_goes_on_elsewhere(cli: Cli) -> None:
    done = await run(cli, 3, "times=1")
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"] == {"0": 6, "1": 6, "2": 6}
    assert result["failovers"] >= 1
    told = "task 1 met an error of its device in 'fit', epoch 2: OutOfMemoryError: Out of memory allocating 1,073"
    gone = next(line for line in done.err.splitlines() if told in line and " ended its process" in line)
    name = gone.split(" ended its process")[0].split()[-1]
    assert f"{name} teardown" not in done.err and f"[{name}] teardown" not in done.err, "nothing of it runs any more"
    await cli.nothing_left()


@pytest.mark.parametrize("place", ["setup", "setup of a backup", "handler", "result"])
async def test_wherever_it_was_met(cli: Cli, place: str) -> None:
    done = await run(cli, 3, "times=1", f"place={place}")
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["values"] == {"0": 6, "1": 6, "2": 6}
    assert len(list((cli.root / "marks").iterdir())) == 1
    hook = {"setup of a backup": "'setup'", "handler": "'handler ask'"}.get(place, repr(place))
    assert f" ended its process, since task 1 met an error of its device in {hook}, epoch " in done.err
    await cli.nothing_left()


async def test_a_task_that_always_runs_out_of_memory_fails_the_job_with_the_reason(cli: Cli) -> None:
    done = await run(cli, 4, "times=100")
    assert done.code == 1
    assert (
        "task 1, epoch 2, 'fit': OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes; the same ended n"
        in (done.err)
    )
    assert "(device_failures=2)" in done.err
    assert 'raise OutOfMemoryError("Out of memory' in done.err, "with the traceback of the user's code"
    assert len(list((cli.root / "marks").iterdir())) == 3
    await cli.nothing_left()


@pytest.mark.parametrize(
    ("nodes", "options", "why"),
    [
        (1, (), "no other node is there to go on"),
        (2, ("backups=0",), "no other node holds the state of task 0: with backups the job would go on"),
    ],
)
async def test_where_nobody_could_go_on_the_job_fails_at_once(
    cli: Cli, nodes: int, options: tuple[str, ...], why: str
) -> None:
    done = await run(cli, nodes, "times=100", *options)
    assert done.code == 1
    assert f"OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes; {why}" in done.err
    assert len(list((cli.root / "marks").iterdir())) == 1
