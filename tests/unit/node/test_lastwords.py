"""What a node's process ran when it died, as its launcher finds it, and what is said of several deaths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taskgraph.node.failing import deaths_text
from taskgraph.node.lastwords import LastWords, named, read
from taskgraph.protocol.records import GoneRecord


def test_what_runs_is_read_in_the_order_it_began(tmp_path: Path) -> None:
    words = LastWords(tmp_path)
    assert read(tmp_path) == ()
    words.began((1, 1), named("'send' of task 1"))
    words.began((2, 1), named("'a longer name' of task 2"))
    assert read(tmp_path) == ("'send' of task 1", "'a longer name' of task 2")
    words.ended((2, 1))
    assert read(tmp_path) == ("'send' of task 1",)
    words.ended((1, 1))
    words.ended((1, 1))
    assert read(tmp_path) == ()


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    words = LastWords(tmp_path)
    for task in range(1000):
        words.began((task, 1), named(f"'{'ä' * 5000}' of task {task}"))
    found = read(tmp_path)
    assert len(found) == 4 and all(set(text) <= {"'", "ä"} for text in found)


def test_a_node_that_told_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == ()


@pytest.mark.parametrize("end", ["os._exit(11)", "os.kill(os.getpid(), 9)", "ctypes.string_at(0)"])
def test_it_outlives_the_process_however_that_ends(tmp_path: Path, end: str) -> None:
    code = (
        "import ctypes, os, pathlib, sys\n"
        "from taskgraph.node import lastwords\n"
        "lastwords.listen(pathlib.Path(sys.argv[1]))\n"
        "lastwords.begin((1, 1), 0, 'setup'); lastwords.end((1, 1))\n"
        "lastwords.begin((1, 2), 7, 'send')\n"
        f"{end}\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode != 0
    assert read(tmp_path) == ("'send' of task 7",)


def test_of_several_deaths_the_code_that_ran_each_time_is_named() -> None:
    send, add, record = "'send' of task 1", "'add' of task 2", "'record' of task 0"
    one = GoneRecord(reason="exited with code 11", running=(send, add))
    other = GoneRecord(reason="killed by SIGSEGV", running=(record, send))
    killed = GoneRecord(reason="killed by SIGKILL", running=(add,))
    idle = GoneRecord(reason="killed by SIGKILL")
    assert deaths_text({}) == ""
    assert deaths_text({"n2": idle}) == "n2 was killed by SIGKILL"
    assert deaths_text({"n2": one}) == f"n2 exited with code 11 while it ran {send} and {add}"
    assert deaths_text({"n2": one, "n3": other}).endswith(
        f"n3 was killed by SIGSEGV while it ran {record} and {send}. {send} ran each time: it may have ended the "
        f"process itself, by os._exit or a crash in an extension"
    )
    assert "each time: unless somebody killed them, it may take more memory" in deaths_text({"a": killed, "b": killed})
    assert "each time" not in deaths_text({"a": killed, "b": other, "c": one})
    assert "each time" not in deaths_text({"a": killed, "b": idle})
