"""The environment of nodes: the same hash seed everywhere, and as many threads as the job or the user says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from taskgraph.launch.begin import command
from taskgraph.system import environment
from taskgraph.system.environment import THREADS, node_env, set_thread_env


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_set_by_us", set())
    for name in THREADS:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


def test_users_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = node_env(2)
    assert "OMP_NUM_THREADS" not in found and found["OPENBLAS_NUM_THREADS"] == "2"


def test_threads_of_a_command_do_not_bind_its_nodes() -> None:
    set_thread_env(1)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert node_env(4).items() >= dict.fromkeys(THREADS, "4").items()


def test_nodes_of_all_launchers_hash_alike() -> None:
    """Keys that are dealt to tasks by `hash(key) % tasks` belonged to several tasks."""
    hashes = {
        subprocess.check_output(
            [*command("taskgraph.node.process")[:2], "-c", "print(hash('text'))"],
            env=os.environ | {"PYTHONHASHSEED": seed} | node_env(1),
        )
        for seed in ("1", "2", "random")
    }
    assert len(hashes) == 1


def test_environment_is_set_before_numpy_is_imported() -> None:
    code = (
        "import sys, taskgraph, taskgraph.launch, taskgraph.system.environment as t; t.set_thread_env(1); "
        "print([m for m in ('numpy', 'grpc', 'uvloop') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
