"""New Python processes run this taskgraph, and no module from the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import taskgraph
from taskgraph.commands import joining
from taskgraph.driver.spec import JobSpec
from taskgraph.jobs import Job
from taskgraph.launch.begin import command, options
from taskgraph.settings import Settings
from taskgraph.system import environment
from taskgraph.task import Task

TELLS = "import sys, queue, taskgraph\nprint(taskgraph.__file__, *sys.argv[1:], __name__)"


@pytest.mark.parametrize("elsewhere", ["", "another"])
def test_new_process_runs_this_taskgraph(tmp_path: Path, elsewhere: str) -> None:
    """`-m` would import a `queue.py`, or another clone, from the working directory."""
    for folder in ("cwd", "another", "path"):
        (tmp_path / folder / "taskgraph").mkdir(parents=True)
    for folder in ("cwd", "another"):
        (tmp_path / folder / "taskgraph" / "__init__.py").write_text("raise SystemExit('another taskgraph')")
    (tmp_path / "cwd" / "queue.py").write_text("raise SystemExit('no queue')")
    (tmp_path / "path" / "tells.py").write_text(TELLS)
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("path", elsewhere) if folder)
    done = subprocess.run(
        command("tells", "7"),
        cwd=tmp_path / "cwd",
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (f"{taskgraph.__file__} 7 __main__\n", "")


_STARTS = """
import multiprocessing, tells
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        print(pool.apply(eval, ("'tells' in __import__('sys').modules",)))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pool_workers_do_not_load_a_node(tmp_path: Path, method: str) -> None:
    """Loading a node would cost a worker most of a second, and 60 MB."""
    (tmp_path / "tells.py").write_text("")
    (tmp_path / "starts.py").write_text(_STARTS.format(method=method))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    done = subprocess.run(command("starts"), env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


_OPTIONS = """
import subprocess, sys
sys.path.insert(0, {root!r})
from taskgraph.launch.begin import command
words = command("module")
sys.stdout.flush()
for told in ({told!r}, "import sys; print(sys.flags.inspect)"):
    subprocess.run([*words[: words.index("module") - 1], "-c", told])
"""
_TOLD = """
import sys
flags = "optimize bytes_warning dont_write_bytecode no_site no_user_site ignore_environment isolated dev_mode utf8_mode"
given = [getattr(sys.flags, name) for name in flags.split()]
print(*given, sys.get_int_max_str_digits(), sys.warnoptions, sys._xoptions)
"""


@pytest.mark.parametrize(
    "given",
    [
        "-O",
        "-OO -B -s -u",
        "-i -q",
        "-W error -bb -W default::UserWarning",
        "-X utf8 -X int_max_str_digits=700 -X faulthandler -X dev",
        "-E -S -b",
        "-I",
    ],
)
def test_new_process_has_our_interpreters_options(given: str) -> None:
    begins = _TOLD + _OPTIONS.format(root=str(Path(taskgraph.__file__).parent.parent), told=_TOLD)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    asked = [sys.executable, *given.split(), "-c", begins]
    done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=60)
    here, there, inspect = done.stdout.splitlines()
    assert here == there and inspect == "0", done.stderr


def spec(blas_threads: int) -> JobSpec:
    settings = Settings(blas_threads=blas_threads)
    return JobSpec.local(Job(tasks=1, epochs=1, builder=lambda task_id: Task(), name="fit", settings=settings))


@pytest.mark.parametrize("name", ["taskgraph.__main__", None])
def test_node_command_starts_again_with_its_environment(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(environment, "_set_by_us", set(environment.THREADS))
    for variable, value in environment.node_env(1).items():
        monkeypatch.setenv(variable, value)
    main: Any = SimpleNamespace(__spec__=ModuleSpec(name, None) if name else None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["taskgraph", "node", "--job", "fit"])
    monkeypatch.setattr(os, "execv", lambda program, words: called.append(words))
    joining._restart_in_node_env(spec(1))
    assert called == []
    joining._restart_in_node_env(spec(2))
    begun = [sys.executable, *options(), "-m", "taskgraph"] if name else command("taskgraph")
    assert called == [[*begun, "node", "--job", "fit"]]
