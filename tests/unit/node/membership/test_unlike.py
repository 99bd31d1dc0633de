"""Nodes whose results may differ from those of the others: an event, and no refusal."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import types

import numpy as np
import pytest
from cluster_kit import Gated, gated, job, play

from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node import life
from taskgraph.node.membership.arithmetic import describe_arithmetic, why_unlike
from taskgraph.protocol.records import NodeRecord

__all__ = ["gated"]


def record(name: str, *computes: str) -> NodeRecord:
    return NodeRecord(
        name=name, run="r", host=f"h-{name}", pid=1, endpoints=(), control="", fingerprint="", lease=1,
        arithmetic=computes,
    )  # fmt: skip


def test_arithmetic_names_what_decides_results() -> None:
    python, numpy, processor, threads, seed, zone, encoding, pytorch = describe_arithmetic()
    assert python == f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert numpy == f"numpy {np.__version__}"
    assert processor.startswith(platform.machine())
    assert "threads" in threads.lower() and seed.startswith("hash seed")
    assert zone.startswith("time zone") and encoding.startswith("encoding")
    assert pytorch.startswith("PyTorch")


def test_other_pytorch_is_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    records = []
    for version in ("2.8.0", "2.9.0"):
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version))
        records.append(record(f"n{len(records)}", *describe_arithmetic()))
    assert why_unlike(records[1], {"n0": records[0]}).startswith(
        "n1 on h-n1 computes with PyTorch 2.9.0, n0 on h-n0 with PyTorch 2.8.0: the last bits of their results"
    )


@pytest.mark.parametrize(
    ("variables", "effect"),
    [
        ({"PYTHONHASHSEED": "7"}, "a key is dealt to by its hash"),
        ({"TZ": "Asia/Tokyo"}, "local times"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "text files"),
        ({"OMP_NUM_THREADS": "3"}, "the last bits"),
        ({"PYTHONOPTIMIZE": "1"}, "the last bits"),
    ],
)
def test_other_environment_is_unlike(variables: dict[str, str], effect: str) -> None:
    imports = "import json; from taskgraph.node.membership.arithmetic import describe_arithmetic"
    code = f"{imports}; print(json.dumps(describe_arithmetic()))"
    plain = os.environ | {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TZ": "UTC", "OMP_NUM_THREADS": "1"}
    one, other = (
        json.loads(subprocess.check_output([sys.executable, "-c", code], env=env)) for env in (plain, plain | variables)
    )
    why = why_unlike(record("n2", *other), {"n1": record("n1", *one)})
    assert effect in why
    assert why.partition(":")[0].count(",") == 1, "nothing else differs"


def test_unused_processor_feature_counts() -> None:
    """numpy's loops, and their last bits, depend on it."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    if not found:
        pytest.skip("this processor has nothing beyond what numpy was built for")
    code = "from taskgraph.node.membership.arithmetic import describe_arithmetic; print(describe_arithmetic()[2])"
    without = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}
    told = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True, check=True)
    assert told.stdout.strip() != describe_arithmetic()[2]


def test_event_names_only_differences() -> None:
    ours = record("n2", "Python 3.12", "numpy 2.4.6", "x86_64 (X86_V3)")
    same, other = record("n1", *ours.arithmetic), record("n0", "Python 3.11", "numpy 2.4.6", "x86_64 (X86_V4)")
    assert why_unlike(ours, {}) == why_unlike(ours, {"n1": same}) == ""
    why = why_unlike(ours, {"n1": same, "n0": other})
    assert "n2 on h-n2 computes with Python 3.12, x86_64 (X86_V3), n0 on h-n0 with Python 3.11, x86_64 (X86_V4)" in why
    assert "numpy" not in why


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_numpys_feature_names_are_not_compared(machine: str) -> None:
    """Versions of numpy name the features of one processor differently."""
    ours = record("n2", "Python 3.12", "numpy 1.26.0", f"{machine} (SSE SSE2 AVX2)")
    theirs = record("n1", "Python 3.12", "numpy 2.4.6", "x86_64 (X86_V2 X86_V3)")
    why, (a, b) = why_unlike(ours, {"n1": theirs}), ("", "") if machine == "x86_64" else (", aarch64", ", x86_64")
    assert f"n2 on h-n2 computes with numpy 1.26.0{a}, n1 on h-n1 with numpy 2.4.6{b}: the last" in why


def test_unknown_arithmetic_is_no_difference() -> None:
    assert why_unlike(record("n2", "Python 3.12"), {"n1": record("n1")}) == ""


def test_other_numpy_joins_with_one_event(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        alike = cluster.node(cluster.add())
        while not alike.node_revision:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.1)
        monkeypatch.setattr(
            life, "describe_arithmetic", lambda: (describe_arithmetic()[0], "numpy 0.1", *describe_arithmetic()[2:])
        )
        other = cluster.node(cluster.add())
        await cluster.nodes[0].keeper.wait_until(lambda view: other.id in view.nodes)
        while not any(event.kind == "unlike" for event in cluster.events):  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.1)
        gated.gate.set()
        await cluster.nodes[0].keeper.wait_until(lambda view: view.finished)
        (told,) = [event for event in cluster.events if event.kind == "unlike"]
        assert told.node == "n3" and "n3 on n3 computes with numpy 0.1, n1 on n1 with numpy 2" in told.text

    play(job(gated), scenario, nodes=1)
