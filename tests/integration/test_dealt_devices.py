"""Devices of nodes, from the launcher to placement and status; there need be none: the nodes are told of some."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from cli_kit import Cli

from taskgraph.device.visible import PRETEND, VISIBLE

DRIVER = str(Path(__file__).parent / "drivers" / "dealt.py")


async def test_devices_are_dealt_advertised_and_what_needs_one_is_there(cli: Cli) -> None:
    pretended = {PRETEND: "1", VISIBLE: "3,GPU-8932f937-d72c"}
    options = ("-o", f"gate={cli.gate}", "-o", "min_nodes=4")
    patient = ("--set", "takeover_stagger_s=10")  # a busy node takes what is its own, too
    run = await cli.start("run", DRIVER, "--nodes", "3", "--json", *options, *patient, **pretended)
    await run.until("waits for nodes")
    bare = await cli.start("launch", "dealt", "--nodes", "1", **{**pretended, VISIBLE: ""})
    await run.until("the job began")
    found = json.loads((await cli("status", "dealt", "--json")).out)
    have = {node["name"]: node["device_ids"] for node in found["nodes"]}
    assert have == {"n1": ["3"], "n2": ["GPU-8932f937-d72c"], "n3": ["3"], "n4": []}
    for task in found["tasks"]:
        assert task["task"] % 2 == 0 or "n4" not in {task["primary"], *task["in_sync"]}
    needing = Counter(task["primary"] for task in found["tasks"] if task["task"] % 2)
    assert max(needing.values()) - min(needing[name] for name in ("n1", "n2", "n3")) <= 1
    text = (await cli("status", "dealt")).out
    assert "DEVICES" in text and "GPU-8932f937 " in text
    cli.open()
    done = await run.done()
    assert done.code == 0, done.err
    assert (await bare.done()).code == 0
    values = json.loads(done.out)["values"]
    of_process = {node["pid"]: node["device_ids"] for node in found["nodes"]}
    assert len(values) == 8
    for pid, seen, xp in values.values():
        assert xp == "numpy", "there is no real one"
        assert [seen] == (of_process[pid] or [""])


async def test_what_a_batch_system_assigned_may_be_left_to_all_nodes(cli: Cli) -> None:
    options = ("-o", "tasks=2", "-o", "deal=false")
    done = await cli("run", DRIVER, "--nodes", "2", "--json", *options, **{PRETEND: "1", VISIBLE: "2,5"})
    assert done.code == 0, done.err
    assert [seen for _, seen, _ in json.loads(done.out)["values"].values()] == ["2,5", "2,5"]
