"""What `submit` says about options that do not fit together, before it does anything."""

from __future__ import annotations

from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph import cli

DRIVER = f"{__file__}:fit"


@tg.job
def fit(min_nodes: int = 1) -> tg.Job:
    return tg.Job(tasks=3, builder=lambda task_id: tg.Task(), epochs=1, min_nodes=min_nodes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--wait --nodes 0", "--nodes 0: at least 1"),
        ("--wait --nodes 2 -o min_nodes=3", "begins with 3 nodes (min_nodes), and is to have 2"),
        ("--nodes 2", "--nodes goes with --on"),
        ("--dry-run", "--dry-run goes with --on"),
        ("--result x", "--result goes with --wait"),
        ("--run a/b", "a name has 1 to 100 letters"),
        ("--on local --wait", "--wait goes without --on"),
        ("--on local --nodes 0", "--nodes 0: at least 1"),
        ("--on local --extra-nodes -1", "--extra-nodes -1: 0 or more"),
        ("--on local --extra-nodes 2", "--extra-nodes: nodes of this host have no priorities"),
        ("--on local --extra-priority low", "--extra-priority goes with --extra-nodes"),
        ("--on local --nodes 2 -o min_nodes=3", "begins with 3 nodes (min_nodes), and is to have 2"),
        ("--on nowhere", "--on nowhere: there is no such launcher; installed: kubernetes, local, slurm"),
    ],
)
def test_options_that_do_not_fit(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["submit", DRIVER, *words.split()]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is written"
