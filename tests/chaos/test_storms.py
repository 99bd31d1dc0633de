"""SIGTERM to many nodes at once, and all nodes replaced by others: what is handed over is not computed again."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from chaos_kit import DRIVER, NAME, chaos, judge, kill
from cli_kit import kill_at_once, shell
from etcds_kit import etcds

from taskgraph.node.inject import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_a_storm_of_sigterms_hands_over_to_whoever_comes() -> None:
    async with chaos("--nodes", "3") as job:
        await job.began()
        first = job.nodes()
        relief = await job.reinforce(3)
        await job.settled(nodes=6)
        kill(*first, number=signal.SIGTERM)
        await job.until("the first ones gone", lambda view: len(view.nodes) == 3)
        await job.settled(nodes=3)
        assert not {node.pid for node in first} & {node.pid for node in job.nodes()}
        # Told twice at once, as by a signal to a whole group, it leaves in good order all the same.
        leader = job.primary(0)
        kill(leader, number=signal.SIGTERM)
        kill(leader, number=signal.SIGTERM)
        await job.settled(nodes=2)
        await job.finishes()
        await relief.done()


async def test_every_node_dies_and_others_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """The job is still submitted: nobody has to begin it again."""
    async with etcds(tmp_path) as etcd, shell() as cli:
        where = ("--etcd", etcd.endpoints, "--token-file", str(tmp_path / "token"))
        options = {"pace_s": 0.02, "finish": cli.root / "finish", "checkpoint": tmp_path.as_uri(), "every": 20}
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        submitted = await cli("submit", str(DRIVER), *words, *where)
        assert submitted.code == 0, submitted.err
        # The second checkpoint is not completed: at a checkpoint there would be nothing to go back to.
        (held := cli.root / "faults" / "hold,checkpointed,epoch=40").parent.mkdir()
        held.touch()
        first = await cli.start("launch", NAME, "--nodes", "3", *where, **{VARIABLE: str(held.parent)})
        # The job begins with the first of them.
        now = await cli.status(NAME, lambda now: len(now["nodes"]) == 3 and (now["epoch"] or 0) > 40, *where)
        kill_at_once(node["pid"] for node in now["nodes"])
        ended = await first.done()
        assert ended.code == 1 and "the job may go on elsewhere" in ended.err
        assert "taskgraph: every node started here has ended" in ended.err and "job failed" not in ended.err
        second = await cli.start("launch", NAME, "--nodes", "2", *where)
        await second.until("goes back from epoch")
        (cli.root / "finish").touch()
        assert (await second.done()).code == 0
        result = json.loads((await cli("result", NAME, "--json", *where)).out)
        await asyncio.to_thread(judge, result)
        await cli.nothing_left()
