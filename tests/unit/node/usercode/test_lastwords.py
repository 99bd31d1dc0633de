"""Last words tell what a node's process ran when it died."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from taskgraph.node.membership.failing import fatal_record
from taskgraph.node.usercode.lastwords import LastCalls, LastWords, crash_place, encoded_name, mark_intended, read
from taskgraph.protocol.fatal import DeadlyCode
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import GoneRecord, RunningCode

SEND, LONGER = RunningCode("send", 1, 3), RunningCode("a longer name", 2, 4)


def begin(words: LastWords, call: tuple[int, int], ran: RunningCode) -> None:
    """In a thread."""
    words.note_call(call, ran.task, ran.epoch, encoded_name(ran.where))


def wait(words: LastWords, call: tuple[int, int], ran: RunningCode) -> None:
    """A coroutine comes to its first await."""
    words.note_on_loop(ran.task, Stamp(1, ran.epoch), ran.where)
    begin(words, call, ran)
    words.clear_on_loop()


def ran(folder: Path) -> list[RunningCode]:
    left = read(folder)
    assert left is not None and not left.intended
    return list(left.ran)


def test_calls_are_read_in_order(tmp_path: Path) -> None:
    words = LastWords(tmp_path)
    assert read(tmp_path) == LastCalls((), False)
    begin(words, (1, 1), SEND)
    begin(words, (2, 1), LONGER)
    assert read(tmp_path) == LastCalls((SEND, LONGER), False)
    words.clear_call((2, 1))
    assert read(tmp_path) == LastCalls((SEND,), False)
    words.clear_call((1, 1))
    words.clear_call((1, 1))
    assert read(tmp_path) == LastCalls((), False)


def test_last_words_are_bounded(tmp_path: Path) -> None:
    words = LastWords(tmp_path)
    for task in range(1000):
        begin(words, (task, 1), RunningCode("ä" * 5000, task, 0))
    assert [one.task for one in ran(tmp_path)] == list(range(1000 - 64, 1000))
    assert all(set(one.where) == {"ä"} for one in ran(tmp_path))
    for task in range(1000):
        wait(words, (task, 2), RunningCode("b", task, 0))
    assert [one.task for one in ran(tmp_path) if one.where == "b"] == list(range(1000 - 16, 1000))
    for task in range(1000):
        for n in (1, 2):
            words.clear_call((task, n))
    assert ran(tmp_path) == []


def test_threads_keep_their_slots(tmp_path: Path) -> None:
    words = LastWords(tmp_path)
    threads = [RunningCode("early", task, 3) for task in range(64)]
    for one in threads[:32]:
        begin(words, (one.task, 1), one)
    for task in range(1000):
        wait(words, (task, 2), RunningCode("waits", task, 4))
    for one in threads[32:]:
        begin(words, (one.task, 1), one)
    assert [one for one in ran(tmp_path) if one.where == "early"] == threads
    words.clear_call((40, 1))
    begin(words, (1000, 1), LONGER)
    assert [one for one in ran(tmp_path) if one.where != "waits"] == [*threads[:40], *threads[41:], LONGER]


def test_node_without_last_words(tmp_path: Path) -> None:
    assert read(tmp_path / "none") is None
    (tmp_path / "running").touch()  # it ended between the two steps of making it
    assert read(tmp_path) is None


def test_intended_end(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
    one, other = LastWords(tmp_path / "one"), LastWords(tmp_path / "other")
    begin(one, (1, 1), SEND)
    begin(other, (1, 1), SEND)
    one.intend_end()
    mark_intended(tmp_path / "other")
    assert read(tmp_path / "one") == read(tmp_path / "other") == LastCalls((SEND,), True)
    mark_intended(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("end", ["os._exit(11)", "os.kill(os.getpid(), 9)", "ctypes.string_at(0)"])
def test_last_words_outlive_the_process(tmp_path: Path, end: str) -> None:
    code = (
        "import ctypes, os, pathlib, sys\n"
        "from taskgraph.node.usercode import lastwords\n"
        "lastwords.start(pathlib.Path(sys.argv[1]))\n"
        "lastwords.here.note_call((1, 1), 0, 0, lastwords.encoded_name('setup')); lastwords.here.clear_call((1, 1))\n"
        "lastwords.here.note_call((1, 2), 7, -1, lastwords.encoded_name('send'))\n"
        f"{end}\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode != 0
    assert read(tmp_path) == LastCalls((RunningCode("send", 7, -1),), False)


def test_job_failed_by_deaths_names_the_code() -> None:
    send = RunningCode("send", 1, 3)
    death = GoneRecord(reason="killed by SIGSEGV", running_code=(RunningCode("add", 2, 3), send))
    other = GoneRecord(reason="exited with code 11", running_code=(send, RunningCode("add", 2, 4)))
    found = DeadlyCode(1, 3, {"n2-1": death, "n3-1": other})
    status = fatal_record(found, {"n2": death, "n3": other}, 2, "a:1")
    assert (status.state, status.task, status.epoch, status.where) == ("failed", 1, 3, "send")
    assert status.reason == (
        "task 1, epoch 3, 'send': 2 nodes died while it ran (fatal_deaths=2), and the next would, too: n2 was killed "
        "by SIGSEGV while it ran 'add' of task 2 and 'send' of task 1; n3 exited with code 11 while it ran 'send' of "
        "task 1 and 'add' of task 2. 'add' of task 2 and 'send' of task 1 ran each time: it may have ended the process "
        "itself, by os._exit or a crash in an extension. Look at that code; where it is not to blame, a larger "
        "Settings(fatal_deaths=...) lets more nodes try"
    )


def test_only_a_crash_has_a_line() -> None:
    """A child of the node, which inherited faulthandler, may have written the stack."""
    log = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File "/home/me/job.py", line 7 in crash\n'
    assert crash_place(log, signal.SIGSEGV) == "/home/me/job.py, line 7"
    assert crash_place(log, signal.SIGKILL) == ""
