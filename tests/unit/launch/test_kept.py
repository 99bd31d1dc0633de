"""What this host keeps of jobs that have ended, read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph.cli import main
from taskgraph.launch.runtime import Runtime


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)


def test_record_of_a_later_version_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"at": 1.0, "node": "n1", "kind": "began", "text": "it began", "later": 1}
    record = {"run": "r", "status": {"state": "finished", "later": 1}, "events": [event], "later": 1}
    result = {**json.loads(tg.JobResult(name="fit", values={0: 1.5}, epochs=9).to_json()), "later": 1}
    Runtime().keep_finished("fit", record, json.dumps(result))
    assert tg.result("fit").value == 1.5
    for command, says in ((["status"], '"state": "finished"'), (["events"], '"it began"'), (["result"], '"epochs": 9')):
        assert main([*command, "fit", "--json"]) == 0
        assert says in capsys.readouterr().out


def test_broken_event_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"at": 1.0, "node": "n1", "kind": "began", "text": "it began"}
    Runtime().keep_finished("fit", {"run": "r", "status": {"state": "failed"}, "events": [{"at": 1.0}, 3, event]})
    assert main(["events", "fit"]) == 0
    assert "it began" in capsys.readouterr().out
