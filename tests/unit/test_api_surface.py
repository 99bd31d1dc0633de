"""`import taskgraph as tg`: light, complete, and as docs/api.md has it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")


def test_every_name_is_there_and_on_the_page() -> None:
    for name in tg.__all__:
        assert getattr(tg, name) is getattr(tg, name) and name in dir(tg)
        assert re.search(rf"\btg\.{name}\b", PAGE), f"docs/api.md lacks tg.{name}"
    assert set(re.findall(r"\btg\.(\w+)", PAGE)) <= set(tg.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'taskgraph' has no attribute 'tasks'"):
        _ = tg.tasks
    assert not hasattr(tg, "numpy")


def test_errors_are_one_tree() -> None:
    for name in errors.__all__:
        assert getattr(tg, name) is getattr(errors, name)
        assert issubclass(getattr(errors, name), errors.TaskGraphError)
    assert re.findall(r"tg\.(\w+)", PAGE.partition("## Errors")[2].split("```")[1]) == re.findall(
        r"^    (?:│   )?(?:├── |└── )?(\w+)", errors.__doc__ or "", re.M
    ), "the page and the docstring draw the same tree"


def test_type_checkers_see_the_names() -> None:
    tree = ast.parse(Path(tg.__file__).read_text("utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imports = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    for node in imports:
        for alias in node.names:
            name = alias.asname or alias.name
            if name != "testing":
                assert getattr(importlib.import_module(str(node.module)), alias.name) is getattr(tg, name)
    seen = {alias.asname or alias.name for node in imports for alias in node.names}
    assert seen | {"__version__"} == set(tg.__all__)
    assert sorted(tg.__all__) == sorted(set(tg.__all__))


def test_submodules_hide_no_name() -> None:
    submodules = {module.name for module in pkgutil.iter_modules(tg.__path__)}
    assert submodules & set(tg.__all__) == {"testing"}
    assert isinstance(tg.testing, types.ModuleType)


def modules_after(code: str) -> set[str]:
    """Top-level modules a fresh Python process has imported after `code`."""
    tail = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{tail}"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stdout))


def test_import_loads_nothing_slow() -> None:
    slow = {"numpy", "grpc", "google", "uvloop", "asyncio", "xxhash"}
    assert not modules_after("import taskgraph as tg; dir(tg)") & slow
    found = modules_after(
        "import taskgraph as tg\nclass A(tg.Task): pass\ntg.Job(tasks=1, builder=A, topology=tg.tree())"
    )
    assert "taskgraph" in found
    assert not found & {"grpc", "google", "uvloop"}


def test_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("api_page")
    monkeypatch.setitem(sys.modules, "api_page", module)
    module.__dict__["tg"] = tg
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) > 10
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), module.__dict__)


@pytest.mark.parametrize(("owner", "members"), [
    (tg.Task, ["setup", "compose", "snapshot", "restore", "result", "on_flag", "on_commit", "on_event", "teardown"]),
    (tg.Epoch, ["number", "last", "attempt", "cancelled", "scratch", "rng", "seed", "neighbors", "processor", "flag"]),
    (tg.Epoch, ["request", "hold", "report", "finish"]),
    (tg.JobResult, ["name", "status", "values", "value", "reports", "epochs", "failovers", "restarts", "wall_s"]),
    (tg.JobResult, ["to_json", "from_json"]),
    (tg.Reply, ["wait", "done"]),
    (tg.Hold, ["release"]),
    (tg.Inputs, ["all"]),
    (tg.Outputs, ["put", "empty"]),
    (tg.Run, ["state", "steps", "once", "map", "worker", "workers"]),
    (tg.Steps, ["per_pass"]),
    (tg.Step, ["all", "loss", "pass_number", "ends_pass", "rows", "size", "report"]),
    (tg.Part, ["data", "backward", "add", "collect"]),
])  # fmt: skip
def test_page_has_the_members(owner: type, members: list[str]) -> None:
    for member in members:
        assert hasattr(owner, member)
        if member not in getattr(owner, "__dataclass_fields__", ()):
            assert getattr(owner, member).__doc__, f"{owner.__name__}.{member} has no docstring"
        assert re.search(rf"\b{member}\b", PAGE)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("tg.run", tg.run),
        ("tg.testing.run", tg.testing.run),
        ("tg.testing.compute", tg.testing.compute),
        ("tg.codec", tg.codec),
        ("tg.result", tg.result),
    ],
)
def test_page_has_the_arguments(name: str, function: Callable[..., object]) -> None:
    told = re.search(rf"`{re.escape(name)}\((.*?)\)`", PAGE, re.S)
    assert told is not None, f"docs/api.md does not show {name}(...)"
    arguments = re.findall(r"(\w+)(?:=[^,(]+)?(?:, |$)", " ".join(told[1].split()))
    assert sorted(arguments) == sorted(inspect.signature(function).parameters)


def test_page_has_the_arguments_of_arun() -> None:
    (row,) = re.findall(r"^\| `await tg\.arun.*$", PAGE, re.M)
    more = inspect.signature(tg.arun).parameters.keys() - inspect.signature(tg.run).parameters.keys()
    assert more and not [name for name in more if f"`{name}`" not in row]


def test_page_has_the_parameters_of_a_job() -> None:
    fields = {f.name: f for f in tg.Job.__dataclass_fields__.values() if not f.name.startswith("_")}
    told = re.search(r"`tg\.Job\((.*?)\)` \|", PAGE)
    assert told is not None
    arguments = ast.parse(f"f({told[1].replace('tasks, builder', 'tasks=..., builder=...')})", mode="eval").body
    assert isinstance(arguments, ast.Call)
    assert {keyword.arg for keyword in arguments.keywords} == set(fields)
    for keyword in arguments.keywords:
        if isinstance(keyword.value, ast.Constant) and keyword.value.value is not ...:
            assert fields[str(keyword.arg)].default == keyword.value.value
