"""What is loaded when: `import taskgraph` is to cost next to nothing, and a launcher is no node."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "grpc",
    "google.protobuf",
    "uvloop",
    "fsspec",
    "safetensors",
    "cryptography",
    "ssl",
    "asyncio",
    "multiprocessing",
)


def loaded(code: str) -> set[str]:
    """The modules that are there after `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_taskgraph_loads_nothing_else() -> None:
    found = loaded("import taskgraph")
    assert {name for name in found if name.startswith("taskgraph")} == {"taskgraph", "taskgraph.version"}
    assert not found.intersection((*HEAVY, "numpy"))


def test_what_a_driver_is_made_of_needs_no_network() -> None:
    found = loaded(
        "import taskgraph as tg; tg.Task, tg.Job, tg.job, tg.tree, tg.Settings, tg.Tag, tg.message, tg.shard"
    )
    assert not found.intersection(HEAVY) - {"asyncio", "ssl"}, "asyncio loads ssl"
    rooms = {name.split(".")[1] for name in found if name.startswith("taskgraph.")}
    assert not rooms & {"node", "transport", "coordination", "launch", "commands", "observe"}


@pytest.mark.parametrize("code", ["import taskgraph.commands.running", "import taskgraph; taskgraph.run"])
def test_a_launcher_loads_no_node(code: str) -> None:
    found = loaded(code)
    assert "taskgraph.launch.local" in found
    assert not found & {"taskgraph.node.node", "taskgraph.node.process", "taskgraph.transport.stream", "fsspec"}


def test_a_command_loads_its_own_module_only() -> None:
    found = loaded("from taskgraph.cli import _load_command; _load_command('certs')")
    assert {name for name in found if name.startswith("taskgraph.commands.")} - {"taskgraph.commands.arguments"} == {
        "taskgraph.commands.certifying"
    }


@pytest.mark.parametrize("code", ["parser().parse_args(['status'])", "main(['--version'])", "main(['run', '--help'])"])
def test_parser_loads_neither_numpy_nor_grpc(code: str) -> None:
    found = loaded(f"from taskgraph.cli import main, parser\ntry: {code}\nexcept SystemExit: pass")
    assert "taskgraph.cli" in found
    assert not found.intersection((*HEAVY, "numpy"))


def test_status_does_not_load_numpy() -> None:
    found = loaded("from taskgraph.cli import _load_command; _load_command('status')")
    assert "grpc" in found and "numpy" not in found


def test_every_command_of_the_parser_is_there() -> None:
    from taskgraph.cli import _COMMANDS, _load_command, parser

    choices = next(action.choices for action in parser()._actions if action.dest == "command")
    assert choices is not None and set(choices) == _COMMANDS.keys()
    assert all(callable(_load_command(name)) for name in _COMMANDS)
