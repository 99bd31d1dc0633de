"""Output of nodes, passed on line by line."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from taskgraph.launch.logs import LogTails, has_user_lines, showing_task_logs

OURS = "2026-11-21 10:08:12,222 taskgraph.events INFO the job began\n"
WARNING = "2026-11-21 10:08:12,222 taskgraph.node WARNING something odd\n"
LOGGED = "2026-11-21 10:08:12,222 taskgraph.task.3 INFO loss 3\n"
THEIRS = "2026-11-21 10:08:12,222 fit INFO loss 3\n"


def test_whole_lines_are_passed_on(tmp_path: Path) -> None:
    one, ten = tmp_path / "n1.log", tmp_path / "n10.log"
    one.write_text(OURS + "loss 1\nlo")
    ten.write_text("")
    shown: list[str] = []
    tails = LogTails(lambda: {"n1": one, "n10": ten, "n2": tmp_path / "absent"}, tuple, shown.append)
    tails.poll()
    assert shown == ["n1  | loss 1"]
    with one.open("a") as file:
        file.write("ss 2\n" + THEIRS + LOGGED + "\n" + WARNING)
    with ten.open("a") as file:
        file.write("no end" + OURS + "rest")
    one.rename(tmp_path / "kept")  # where the job ended meanwhile
    tails.close()
    assert shown[1:] == [
        "n1  | loss 2",
        f"n1  | {THEIRS.strip()}",
        f"n1  | {LOGGED.strip()}",
        "n1  | ",
        f"n1  | {WARNING.strip()}",
        "n10 | no end",
        "n10 | rest",
    ]


def test_logs_of_new_and_ended_nodes_are_followed(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("n1", "n10")}
    logs["n1"].write_text("loss 1\nlo")
    logs["n10"].write_text("x" * 200_000 + "\nlast")
    begun, over, shown = {"n1": logs["n1"]}, list[str](), list[str]()
    tails = LogTails(lambda: begun, lambda: over, shown.append)
    tails.poll()
    begun, over = logs, ["n1"]
    tails.poll()
    assert shown == ["n1 | loss 1", "n1  | lo"] and list(tails._files) == ["n10"]
    over = ["n1", "n10"]
    while tails.poll():
        pass
    tails.poll()
    assert shown[-1] == "n10 | last" and not tails._files
    tails.close()


def test_endless_line_is_passed_on_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "n1.log").write_text("x" * 300_000)
    shown: list[str] = []
    LogTails(lambda: {"n1": tmp_path / "n1.log"}, tuple, shown.append).close()
    assert len(shown) > 1 and sum(line.count("x") for line in shown) == 300_000


def test_frameworks_lines_are_not_printed_output(tmp_path: Path) -> None:
    assert not has_user_lines(tmp_path / "absent")
    (tmp_path / "n1.log").write_text(OURS * 5000 + WARNING)
    (tmp_path / "etcd.log").write_text("{}\n")
    assert not has_user_lines(tmp_path)
    (tmp_path / "n2.log").write_text(OURS + "hello\n")
    assert has_user_lines(tmp_path)


def test_tasks_logger_counts_as_output(tmp_path: Path) -> None:
    (tmp_path / "n1.log").write_text(OURS + LOGGED)
    assert has_user_lines(tmp_path)


async def test_tasks_loggers_are_shown_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []
    logger, root = logging.getLogger("taskgraph.task.3"), logging.getLogger()
    for handlers, expected in (([], ["taskgraph.task.3 INFO loss 3"]), ([logging.NullHandler()], [])):
        monkeypatch.setattr(root, "handlers", handlers)
        shown.clear()
        with showing_task_logs(shown.append):
            logger.debug("detail")
            await asyncio.to_thread(logger.info, "loss %d", 3)
            await asyncio.sleep(0)
            assert logger.isEnabledFor(logging.INFO)
        assert shown == expected and not logger.isEnabledFor(logging.INFO)


async def test_wrong_logger_call_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with showing_task_logs(shown.append):
        logging.getLogger("taskgraph.task.3").info("loss %d", "small")
    assert shown == [] and "Message: 'loss %d'" in capsys.readouterr().err
