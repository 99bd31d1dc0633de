"""Users' texts on a terminal: invisible characters become escapes, and widths are those of the terminal.

Names, exceptions and output of tasks may contain anything: codes that clear the screen, or a line end in a table.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import unicodedata
from typing import TextIO

__all__ = ["cut", "one_line", "pad", "printable", "say", "takes_codes", "width", "wrap"]

_UNIT = re.compile(r"(\d) (s|ms|tasks?|epochs?|nodes?|MiB)\b")


def takes_codes(out: TextIO) -> bool:
    """True if control codes can replace text shown there: not in a file, nor in an editor's simple terminal."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str, keep: str = "\n\t") -> str:
    """Replaces each invisible character that is not in `keep` by an escape, such as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or _is_visible(c) else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Replaces line ends and invisible characters by escapes, so that a user's text takes one line."""
    return printable(text, "")


def say(text: str, *, anew: bool = False) -> None:
    """Prints a message on standard error, after the program's name.

    Args:
        anew: begins a new line, since a terminal may have shown `^C`.
    """
    print("\n" * anew + f"taskgraph: {printable(text)}", file=sys.stderr, flush=True)


def width(text: str) -> int:
    """Returns how many columns a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def pad(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def cut(text: str, columns: int) -> str:
    """Cuts a line so that it fits the columns."""
    if width(text) <= columns:
        return text
    left = columns
    for number, character in enumerate(text):
        left -= _columns_of(character)
        if left < 0:
            return text[:number]
    return text


def wrap(text: str, columns: int) -> list[str]:
    """Breaks a text into lines of that width; a number and its unit stay together."""
    joined = _UNIT.sub("\\1\u00a0\\2", text)
    lines = textwrap.wrap(joined, columns, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines] or [""]


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # spaces of other widths


def _columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):  # it is written over the one before
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
