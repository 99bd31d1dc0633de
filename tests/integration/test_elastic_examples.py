"""The elastic examples on real processes: the result has the same bits when workers die and join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import taskgraph as tg
from taskgraph.driver.loading import load_driver

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 240.0

pytestmark = pytest.mark.timeout(600)


async def undisturbed(example: str, **options: Any) -> Any:
    """What the example returns on one worker."""
    job: Any = load_driver(str(EXAMPLES / f"{example}.py"))
    return json.loads((await tg.arun(job(**options), nodes=1, timeout_s=LIMIT_S)).to_json())["values"]


async def disturbed(cli: Cli, name: str, example: str, **options: Any) -> Any:
    """What it returns if it begins with three workers, one of them is killed, and another one joins."""
    given = [part for option, value in options.items() for part in ("-o", f"{option}={value}")]
    run = await cli.start("run", str(EXAMPLES / f"{example}.py"), "--nodes", "3", "--json", *given)
    await run.until("step ")
    launch = await cli.start("launch", name, "--nodes", "1")
    assert (await cli("kill", name, "--node", "n2")).code == 0
    await run.until("n2 died (SIGKILL): ")
    await launch.until("n4 joined after")
    assert (await cli("kill", name, "--node", "n1")).code == 0
    await run.until("n1 died (SIGKILL): ")
    done = await run.done(LIMIT_S)
    assert done.code == 0, done.err
    assert (await launch.done()).code == 0
    await cli.nothing_left()
    return json.loads(done.out.splitlines()[-1])["values"]


async def test_mixture(cli: Cli) -> None:
    options = {"points": 20_000, "tolerance": -1.0, "steps": 1600}
    calm = await undisturbed("elastic_numpy", **options)
    assert calm["0"]["largest error of a mean"] < 0.05
    assert await disturbed(cli, "mixture", "elastic_numpy", **options) == calm


async def test_readmes_program(cli: Cli) -> None:
    calm = await undisturbed("elastic_readme", passes=400)
    assert calm["0"] == pytest.approx([1, 2, 3])
    assert await disturbed(cli, "train", "elastic_readme", passes=400) == calm


@pytest.fixture(scope="module")
def network() -> Any:
    """What the network's example returns on one worker."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    job: Any = load_driver(str(EXAMPLES / "elastic_torch.py"))
    return json.loads(tg.run(job(passes=30), nodes=1, timeout_s=LIMIT_S).to_json())["values"]


@pytest.fixture
def torch_cli(cli: Cli, tmp_path: Path) -> Cli:
    cli.env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")  # PyTorch makes it, and leaves it
    return cli


async def test_network(torch_cli: Cli, network: Any) -> None:
    assert network["0"]["best accuracy"] > 0.93
    assert await disturbed(torch_cli, "read_digits", "elastic_torch", passes=30) == network


async def test_network_goes_on_from_its_checkpoint(torch_cli: Cli, network: Any, tmp_path: Path) -> None:
    options = ("--json", "-o", "passes=30", "-o", f"checkpoint=file://{tmp_path / 'kept'}")
    example = str(EXAMPLES / "elastic_torch.py")
    run = await torch_cli.start("run", example, "--nodes", "2", *options)
    await run.until("checkpoint after step")
    assert (await torch_cli("shutdown", "read_digits")).code == 0
    await run.done()
    done = await torch_cli("run", example, "--nodes", "1", "--resume", *options)
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["values"] == network
