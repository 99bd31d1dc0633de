"""A launcher reports nodes whose event loop stands still in user code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from taskgraph.launch.standing import STANDS_S, StalledLoop, is_stopped, stall_text, with_stalls
from taskgraph.node.usercode.lastwords import IN_THREAD, LastWords, encoded_name, read, read_loop_call
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import JobStatus, RunningCode, StatusRecord

STAMP = Stamp(1, 3)


def test_launcher_reads_what_a_loop_runs(tmp_path: Path) -> None:
    assert read_loop_call(tmp_path) is None
    words = LastWords(tmp_path)
    assert read_loop_call(tmp_path) is None
    words.note_on_loop(2, STAMP, "send")
    first = read_loop_call(tmp_path)
    assert first is not None and first[1] == RunningCode("send", 2, 3)
    words.clear_on_loop()
    assert read_loop_call(tmp_path) is None
    words.note_call((1, 1), 4, 3, encoded_name("in a thread"))
    assert read_loop_call(tmp_path) is None, "a thread does not hold the loop up"
    words.note_on_loop(2, STAMP, "send")
    second = read_loop_call(tmp_path)
    assert second is not None and second[0] != first[0], "the same code once more is another call"


def test_standing_loop_is_reported_once(tmp_path: Path) -> None:
    words, standing = LastWords(tmp_path), StalledLoop(tmp_path, os.getpid())
    words.note_on_loop(2, STAMP, "send")
    assert standing.find_stalled_call(100.0) is None
    assert standing.find_stalled_call(100.0 + STANDS_S / 2) is None
    assert standing.find_stalled_call(101.0 + STANDS_S) == (RunningCode("send", 2, 3), STANDS_S + 1.0)
    assert standing.find_stalled_call(200.0) is None and standing.reported
    words.clear_on_loop()
    words.note_on_loop(2, STAMP, "send")  # the next call is looked at anew
    assert standing.find_stalled_call(201.0) is None and not standing.reported
    assert standing.find_stalled_call(202.0 + STANDS_S) == (RunningCode("send", 2, 3), STANDS_S + 1.0)


def test_busy_loop_is_not_reported(tmp_path: Path) -> None:
    words, standing = LastWords(tmp_path), StalledLoop(tmp_path, os.getpid())
    for second in range(20):
        words.note_on_loop(2, STAMP, "send")
        assert standing.find_stalled_call(float(second)) is None


def test_stopped_process_is_not_reported(tmp_path: Path) -> None:
    words = LastWords(tmp_path)
    words.note_on_loop(2, STAMP, "send")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        standing = StalledLoop(tmp_path, process.pid)
        assert standing.find_stalled_call(0.0) is None and not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        assert standing.find_stalled_call(10.0) is None
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert standing.find_stalled_call(11.0) is None, "how long it was halted does not count"
        assert standing.find_stalled_call(12.0 + STANDS_S) is not None
        process.kill()
    assert not is_stopped(process.pid)


def test_text_of_a_standing_loop_says_what_to_do() -> None:
    text = stall_text("n1", RunningCode("send", 2, 3), 3.4)
    assert "n1 has been in 'send' of task 2 for 3 s" in text and "plain `def`" in text


def test_text_of_a_held_interpreter_lock_differs(tmp_path: Path) -> None:
    words, standing = LastWords(tmp_path), StalledLoop(tmp_path, os.getpid())
    words.note_on_loop(2 | IN_THREAD, STAMP, "send")
    assert standing.find_stalled_call(0.0) is None
    assert standing.find_stalled_call(4.0) == (RunningCode("send", 2, 3), 4.0) and standing.in_thread
    left = read(tmp_path)
    assert left is not None and left.ran == (RunningCode("send", 2, 3),)
    text = stall_text("n1", RunningCode("send", 2, 3), 4.0, in_thread=True)
    assert "'send' of task 2 has held up all of n1 for 4 s" in text and "interpreter's lock" in text
    assert "plain `def`" not in text


def test_failed_job_names_the_standing_loop() -> None:
    failed = StatusRecord(state=JobStatus.FAILED, reason="every replica is gone", task=2, writer="n1")
    said = with_stalls(failed, ("the event loop of n2 has been in 'step'",))
    assert said.reason == "every replica is gone\nthe event loop of n2 has been in 'step'" and said.task == 2
    assert with_stalls(failed, ()) is failed
    cancelled = StatusRecord(state=JobStatus.CANCELLED, writer="n1")
    assert with_stalls(cancelled, ("the event loop of n2 has been in 'step'",)) is cancelled
