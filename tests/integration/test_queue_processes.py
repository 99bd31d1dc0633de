"""Work queues on real processes: some die while they compute pieces, and `taskgraph shards` looks on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from cli_kit import Cli, Done

import taskgraph as tg
from taskgraph.driver.loading import load_driver

DRIVER = Path(__file__).parent / "drivers" / "queued.py"
PIECES = 120


@pytest.mark.slow
async def test_each_piece_counts_once_whatever_is_killed(cli: Cli) -> None:
    queued = load_driver(str(DRIVER))
    expected = tg.testing.run(queued(folder=str(cli.root), passes=2), strict=False).values
    kills = ("-o", f"folder={cli.root}", "-o", "kills=[5,70,100]", "-o", "passes=2")
    done = await cli("run", str(DRIVER), "--nodes", "4", "--replace", "--json", *kills)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["failovers"] >= 3
    seen = [(piece, drawn) for piece, drawn in found["values"]["0"]]
    assert seen == expected[0]
    assert Counter(piece for piece, _ in seen) == dict.fromkeys(range(PIECES), 2)
    assert found["values"]["1"] == found["values"]["2"] == found["values"]["0"]


@pytest.mark.slow
async def test_shards_shows_how_far_a_queue_is(cli: Cli) -> None:
    run = await cli.start("run", str(DRIVER), "--nodes", "2", "-o", f"folder={cli.root}", "-o", "waits=7")

    def almost_done(found: Done) -> bool:
        queues = json.loads(found.out)["queues"] if found.code == 0 else []
        return any(at["dealt"] == 1 and at["done"] % 40 == 39 for queue in queues for at in queue["counts"][:1])

    done = await cli.once(almost_done, "shards", "queued", "--json")
    (queue,) = json.loads(done.out)["queues"]
    counts = queue["counts"]
    assert (queue["name"], queue["kind"], queue["pieces"], queue["passes"]) == ("rows", "queue", PIECES, 1)
    assert queue["left"] == PIECES - counts[0]["done"]
    text = (await cli("shards")).out
    assert text.startswith(f"queue rows: 120 pieces, 1 pass; {queue['left']} left;")
    (cli.root / "gate").touch()
    ended = await run.done()
    assert ended.code == 0, ended.err


@pytest.mark.slow
async def test_shards_of_an_elastic_job(cli: Cli) -> None:
    driver, gate = str(DRIVER.parent / "sharded.py"), cli.root / "open"
    run = await cli.start("run", driver, "--nodes", "2", "-o", "pieces=20", "-o", f"gate={gate}")

    def dealt(found: Done) -> bool:
        queues = json.loads(found.out)["queues"] if found.code == 0 else []
        return bool(queues) and queues[0]["counts"][0]["dealt"] >= 2

    done = await cli.once(dealt, "shards", "sharded", "--json")
    (queue,) = json.loads(done.out)["queues"]
    assert (queue["kind"], queue["pieces"], queue["passes"], queue["left"]) == ("shards", 20, 2, 40)
    gate.touch()
    ended = await run.done()
    assert ended.code == 0, ended.err


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True])
async def test_epochs_go_on_without_a_straggler(cli: Cli, kills: bool) -> None:
    """A thread computes its piece until epoch 3 has ended: then its node is killed, or it returns."""
    done = await cli(
        "run", str(DRIVER.parent / "straggling.py"), "--nodes", "4", "--replace", "--json", "-o", f"folder={cli.root}",
        "-o", f"kills={str(kills).lower()}",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["failovers"] >= kills
    assert found["values"] == {str(task): [sum(range(60))] * 8 for task in range(3)}
    assert [report["numbers"]["pushed"] for report in found["reports"]] == [60 * number for number in range(8)]
