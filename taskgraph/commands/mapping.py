"""map: the command that calls a function with each line of a file, or each file, on nodes of this host."""

from __future__ import annotations

import argparse
import contextlib
import glob
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from taskgraph.driver.loading import load_file, load_module
from taskgraph.errors import JobError
from taskgraph.maps.mapping import imap
from taskgraph.observe.screen import say, takes_codes
from taskgraph.results import Failed, plain_value
from taskgraph.system.files import chosen_file, why_unwritable

__all__ = ["map_command"]


def map_command(options: argparse.Namespace) -> int:
    """Calls a function with each piece on nodes; prints the results as lines of JSON, in the order of the pieces."""
    function, pieces = _import_function(options.function), _read_pieces(options)
    results = imap(
        function,
        pieces,
        nodes=options.nodes,
        attempts=options.attempts,
        on_error="set aside" if options.set_aside else "fail",
        resume=options.resume,
        name=options.name or "",
        progress=takes_codes(sys.stderr),
    )
    try:
        with _open_output(options.output) as out:
            failed = _print_results(_in_order(results), pieces, out)
    except KeyboardInterrupt:
        say("interrupted; --resume computes the pieces that are missing", anew=True)
        return 130
    if failed:
        say(f"{failed} of {len(pieces)} pieces failed, and have `failed` in place of `result`")
    return 1 if failed else 0


def _print_results(results: Iterator[tuple[int, Any]], pieces: Sequence[str], out: TextIO) -> int:
    """Prints a line of JSON for each result. Returns how many pieces failed, and so were set aside."""
    failed = 0
    for number, result in results:
        line: dict[str, Any] = {"piece": pieces[number]}
        if isinstance(result, Failed):
            failed += 1
            line |= {"failed": result.traceback, "node": result.node}
        else:
            line["result"] = plain_value(result)
        print(json.dumps(line, allow_nan=False), file=out)
    return failed


@contextlib.contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    """Opens the file at `path`, which appears when the block ends, or standard output if `path` is None."""
    if path is None:
        yield sys.stdout
        return
    if why := why_unwritable(Path(path)):
        raise JobError(f"--output {path}: {why}")
    with chosen_file(Path(path)) as file:
        text = io.TextIOWrapper(file, "utf-8", write_through=True)
        yield text
        text.detach()


def _in_order(results: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yields results in the order of the pieces, each as soon as those before it are there."""
    waiting, due = dict[int, Any](), 0
    for number, result in results:
        waiting[number] = result
        while due in waiting:
            yield due, waiting.pop(due)
            due += 1


def _import_function(text: str) -> Callable[[Any], Any]:
    """Imports the named function. Raises JobError if there is none."""
    location, colon, name = text.rpartition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        raise JobError(f"{text}: name a function, as MODULE:FUNCTION or FILE.py:FUNCTION")
    is_file = location.endswith(".py") or "/" in location or Path(location).is_file()
    found: Any = load_file(Path(location)) if is_file else load_module(location)
    for part in name.split("."):
        if not hasattr(found, part):
            raise JobError(f"{location} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise JobError(f"{text} is no function, but {found!r:.100}")
    return found  # type: ignore[no-any-return]


def _lines(text: str) -> list[str]:
    """Returns the lines of a text, as `tg.lines` does: other signs that end lines somewhere are part of a line."""
    return text.removesuffix("\n").split("\n") if text else []


def _read_pieces(options: argparse.Namespace) -> list[str]:
    """Returns the lines of a file, or the files that match. Raises JobError: none matches, or it cannot be read."""
    if options.files is not None:
        found = sorted({path for pattern in options.files for path in glob.glob(pattern, recursive=True)})
        files = [path for path in found if Path(path).is_file()]
        if not files:
            raise JobError(f"no file matches {', '.join(options.files)}")
        return files
    if options.lines == "-":
        return _lines(sys.stdin.read())
    try:
        return _lines(Path(options.lines).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"--lines {options.lines}: {getattr(error, 'strerror', None) or error}") from None
