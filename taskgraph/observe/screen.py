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

__all__ = ["cut", "one_line", "padded", "printable", "say", "takes_codes", "width", "wrapped"]

_UNIT = re.compile(r"(\d) (s|ms|tasks?|epochs?|nodes?|MiB)\b")


def takes_codes(out: TextIO) -> bool:
    """True if what is shown there can be replaced: it is a terminal, and not one that knows lines only, and shows the
    codes for more, as an editor's does."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with an escape, such as `\\x1b`, in place of each invisible character that is not in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or _seen(c) else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Makes text fit for one line: ends of lines would be taken for ours."""
    return printable(text, "")


def say(text: str, *, anew: bool = False) -> None:
    """Tells people on standard error, in the program's name.

    Args:
        anew: on another line than the `^C` that a terminal shows.
    """
    print("\n" * anew + f"taskgraph: {printable(text)}", file=sys.stderr, flush=True)


def width(text: str) -> int:
    """Returns how many columns a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def padded(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def cut(text: str, columns: int) -> str:
    """The beginning of a line that fits the columns."""
    if width(text) <= columns:
        return text
    left = columns
    for number, character in enumerate(text):
        left -= _columns(character)
        if left < 0:
            return text[:number]
    return text


def wrapped(text: str, columns: int) -> list[str]:
    """The lines of a text at a width; a number and its unit stay together."""
    joined = _UNIT.sub("\\1\u00a0\\2", text)
    lines = textwrap.wrap(joined, columns, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines] or [""]


def _seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # spaces of other widths


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):  # it is written over the one before
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
