"""What the command in a launcher's pod says about options that do not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taskgraph.cli import main

DRIVER = str(Path(__file__).parents[2] / "integration" / "drivers" / "sums.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--within", "kubernetes"], "--within goes with --wait"),
        (["--within", "local", "--wait"], "launcher local starts no command within its cluster"),
        (["--within", "nowhere", "--wait"], "there is no such launcher"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", DRIVER, "--etcd", "127.0.0.1:1", *words]) == 2
    assert message in capfd.readouterr().err


def test_a_dry_run_prints_and_asks_no_cluster(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    words = ("--on", "kubernetes", "--image", "fit:1", "--etcd", "etcd:2379", "--nodes", "2", "--dry-run")
    assert main(["submit", DRIVER, "-o", "epochs=3", *words]) == 0
    out = capfd.readouterr().out
    assert "kind: Deployment" in out
    assert "replicas: 2" in out
    assert "epochs=3" in out


def test_a_dry_run_loads_no_client_of_a_cluster() -> None:
    """So it takes less than 0.5 s of processor time."""
    words = ["submit", DRIVER, "--on", "kubernetes", "--image", "fit:1", "--etcd", "etcd:2379", "--dry-run"]
    script = f"import sys; from taskgraph.cli import main; main({words!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"lightkube", "httpx2", "yaml", "trustme", "taskgraph.launch.collector"} & set(done.stderr.split())
