"""What users name and print, on a terminal: it wipes no screen, breaks no table, and is cut where the screen ends."""

from __future__ import annotations

import io
import os

import pytest

from taskgraph.commands.looking import print_event
from taskgraph.observe.events import Event
from taskgraph.observe.format import fit_screen, table
from taskgraph.observe.progress import ProgressDisplay
from taskgraph.observe.screen import cut, one_line, printable, width, wrap

WIPES = "red\x1b[2J"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain  text", "plain  text"),
        (WIPES, "red\\x1b[2J"),
        ("10%\r20%\n\tend", "10%\\r20%\\n\\tend"),
        ("処理 é e\u0301 a\u00a0b", "処理 é e\u0301 a\u00a0b"),
        ("\u202edesrever \ud800 \x9b\u2028", "\\u202edesrever \\ud800 \\x9b\\u2028"),
    ],
)
def test_what_is_not_to_be_seen_is_an_escape(text: str, line: str) -> None:
    assert one_line(text) == line
    assert printable(text) == line.replace("\\n", "\n").replace("\\t", "\t")


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abc", 3, "abc"),
        ("abc", 2, "ab"),
        ("処理", 4, "処理"),
        ("処理", 3, "処"),
        ("e\u0301b", 1, "e\u0301"),
        ("a", 0, ""),
    ],
)
def test_a_line_is_cut_by_what_its_characters_take(text: str, columns: int, shown: str) -> None:
    assert cut(text, columns) == shown and width(shown) <= columns


def test_a_table_of_any_names_is_a_table() -> None:
    rows = table([["A", "B"], ["処理", "x"], ["a\n\nb", "y"], [WIPES, "z"]])
    assert rows == ["A           B", "処理        x", "a\\n\\nb      y", "red\\x1b[2J  z"]
    assert fit_screen("\n".join(rows), 3, 9).split("\n") == ["A  ", "処", "a\\n", "red"]


def test_number_and_unit_stay_on_one_line() -> None:
    assert wrap("a commit after 0.07 s; and more", 20) == ["a commit after", "0.07 s; and more"]
    assert wrap("", 20) == [""]


@pytest.fixture(autouse=True)
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests, whatever the one is that they are run at."""
    monkeypatch.setenv("TERM", "xterm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO) -> str:
    progress = ProgressDisplay("fit", 1, 200, out=out, clock=lambda: 0.0)
    progress.event(Event(0.0, "n1", "commit", "committed", epoch=1, transient=True, fields={WIPES + "\n": 1}))
    progress.event(Event(0.0, "n1", "slow", f"task 0: '{WIPES}\n' is running"))
    progress.line(f"n1 | {WIPES}")
    progress.end()
    return out.getvalue()


def test_the_live_line_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of such a name wiped the screen, and an end of line in a report's made each look another line."""
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    text = shown(Terminal())
    assert "\x1b[2J" not in text and "red\\x1b[2J\\n=1" in text and "n1 | red\\x1b[2J" in text
    assert text.count("\n") == 3, "the event, the line, and the end"
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((10, 24)))
    out = Terminal()
    ProgressDisplay("処" * 20, 1, 2, out=out).end()
    assert out.getvalue() == "\r\x1b[2K処処処処\n"


def test_a_terminal_that_knows_lines_only_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an editor: it showed the codes, and all that the live line ever said, one after the other."""
    monkeypatch.setenv("TERM", "dumb")
    text = shown(Terminal())
    assert "\x1b" not in text and "\r" not in text and len(text.splitlines()) == 3


def test_into_a_pipe_a_tasks_own_lines_are_as_they_are() -> None:
    text = shown(io.StringIO())
    assert f"n1 | {WIPES}\n" in text and "'red\\x1b[2J\\n' is running" in text and "red\\x1b[2J\\n=1" in text


def test_an_event_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_event(Event(0.0, "n1", "failed", f"ValueError: {WIPES}\r\nsecond line", epoch=3), as_json=False)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.endswith("ValueError: red\\x1b[2J\\r\\nsecond line\n")
