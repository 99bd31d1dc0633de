"""What `import taskgraph as tg` offers, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph import errors

#: The vocabulary of a driver. A name that leaves this list breaks somebody's program.
NAMES = {
    *("Task", "handles", "Event", "BecamePrimary", "BecameBackup", "NeighborFailed", "NeighborRestarted", "shard"),
    *("job", "Job", "JobResult", "Settings", "Topology", "tree", "star", "ring", "full", "grid", "bipartite"),
    *("edges", "inverse", "Epoch", "Tag", "Reply", "Hold", "Inputs", "Outputs", "message", "codec"),
    *("run", "arun", "result", "main", "testing", "__version__"),
}


def test_every_name_is_there_and_is_what_it_says() -> None:
    assert set(tg.__all__) >= NAMES
    for name in tg.__all__:
        found = getattr(tg, name)
        assert getattr(found, "__name__", name).rpartition(".")[2] in (name, "driver_main"), name
    assert sorted(tg.__all__) == dir(tg)


def test_every_error_is_exported() -> None:
    missing = set(errors.__all__) - set(tg.__all__)
    assert not missing


def test_everything_public_is_documented() -> None:
    for name in set(tg.__all__) - {"__version__", "job"}:
        assert (getattr(tg, name).__doc__ or "").strip(), f"tg.{name} has no docstring"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(tg.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {a.asname or a.name for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert seen | {"__version__"} == set(tg.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Taks'"):
        tg.Taks  # noqa: B018


@pytest.mark.parametrize("statement", ["import taskgraph", "import taskgraph.errors", "from taskgraph import JobError"])
def test_importing_costs_next_to_nothing(statement: str) -> None:
    check = f"{statement}\nimport sys\nprint(*sorted({{'numpy', 'grpc', 'uvloop', 'xxhash'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "taskgraph", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"taskgraph {tg.__version__}\n"
