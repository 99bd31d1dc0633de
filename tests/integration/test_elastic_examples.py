"""The elastic examples on real processes: the result has the same bits when workers die and join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Command

import taskgraph as tg
from taskgraph.driver.loading import load_driver

EXAMPLES = Path(__file__).parents[2] / "examples"
PACED = str(Path(__file__).parent / "drivers" / "elastic_examples.py")
LIMIT_S = 240.0

pytestmark = pytest.mark.timeout(600)


async def undisturbed(example: str, resume: Any = False, **options: Any) -> Any:
    """What the example returns on one worker, in this process."""
    job: Any = load_driver(str(EXAMPLES / f"{example}.py"))
    result = await tg.arun(job(**options), nodes=0, timeout_s=LIMIT_S, resume=resume)
    return json.loads(result.to_json())["values"]


def as_options(options: dict[str, Any]) -> list[str]:
    return [part for option, value in options.items() for part in ("-o", f"{option}={value}")]


async def until_both_are_dead(cli: Cli, name: str, example: str, nodes: int = 3, **options: Any) -> Command:
    """Runs it with some workers; two of them are killed, and another one joins. Its steps take a while until
    `cli.open` is called."""
    cli.env |= {"PACED_EXAMPLE": f"{example}:{name}", "PACED_UNTIL": str(cli.gate)}
    run = await cli.start("run", PACED, "--nodes", str(nodes), "--json", *as_options(options))
    await run.until("step ")
    launch = await cli.start("launch", name, "--nodes", "1")
    assert (await cli("kill", name, "--node", "n2")).code == 0
    await run.until("n2 died (SIGKILL): ")
    await launch.until(f"n{nodes + 1} joined after")
    assert (await cli("kill", name, "--node", "n1")).code == 0
    await run.until("n1 died (SIGKILL): ")
    return run


async def disturbed(cli: Cli, name: str, example: str, **options: Any) -> Any:
    """What it returns although workers die and join."""
    run = await until_both_are_dead(cli, name, example, **options)
    cli.open()
    done = await run.done(LIMIT_S)
    assert done.code == 0, done.err
    await cli.nothing_left()
    return json.loads(done.out.splitlines()[-1])["values"]


async def test_mixture(cli: Cli) -> None:
    options = {"points": 20_000, "tolerance": -1.0, "steps": 60}
    calm = await undisturbed("elastic_numpy", **options)
    assert calm["0"]["largest error of a mean"] < 0.05
    assert await disturbed(cli, "mixture", "elastic_numpy", **options) == calm


async def test_readmes_program(cli: Cli) -> None:
    calm = await undisturbed("elastic_readme", passes=20)
    assert calm["0"] == pytest.approx([1, 2, 3])
    assert await disturbed(cli, "train", "elastic_readme", passes=20) == calm


async def test_network(cli: Cli, tmp_path: Path) -> None:
    """It goes on from a checkpoint that was written after workers had died and joined."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    cli.env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")  # PyTorch makes it, and leaves it
    calm = await undisturbed("elastic_torch", passes=2)
    assert calm["0"]["best accuracy"] > 0.8
    options = {"passes": 2, "checkpoint": f"file://{tmp_path / 'kept'}"}
    run = await until_both_are_dead(cli, "read_digits", "elastic_torch", nodes=2, **options)
    await run.until("checkpoint after step")
    assert (await cli("shutdown", "read_digits")).code == 0
    await run.done()
    await cli.nothing_left()
    assert await undisturbed("elastic_torch", resume="changed", **options) == calm
