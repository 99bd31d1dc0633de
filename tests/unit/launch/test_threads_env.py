"""BLAS gets the same number of threads everywhere: of the job's settings, unless the user said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from taskgraph.launch import threads_env


@pytest.fixture(autouse=True)
def nobody_said_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_env, "_set_by_us", set())
    for name in threads_env.NAMES:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = threads_env.thread_env(2)
    assert "OMP_NUM_THREADS" not in found and found["OPENBLAS_NUM_THREADS"] == "2"


def test_what_a_command_set_for_itself_does_not_bind_the_nodes_it_starts() -> None:
    threads_env.set_thread_env(1)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert threads_env.thread_env(4) == dict.fromkeys(threads_env.NAMES, "4")


def test_it_can_be_set_before_numpy_is_imported() -> None:
    code = (
        "import sys, taskgraph, taskgraph.launch, taskgraph.launch.threads_env as t; t.set_thread_env(1); "
        "print([m for m in ('numpy', 'grpc', 'uvloop') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
