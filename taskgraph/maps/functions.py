"""What a map is given: its pieces, and its function, by a name from which nodes import it (module or file)."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, Final, TypeVar

from taskgraph.driver.loading import add_to_path, load_file, load_module
from taskgraph.driver.sources import is_installed
from taskgraph.errors import JobError
from taskgraph.sources.reading import is_source

__all__ = ["as_list", "check_function", "find_function", "make_reference", "register_here"]

V = TypeVar("V")

_here: Final[dict[str, Callable[[Any], Any]]] = {}
"""Functions of maps that run in this process."""
_tokens = itertools.count()


def check_function(function: Any) -> None:
    """Raises JobError if it cannot be called, is async, or is a generator function. Does not look at its arguments."""
    if not callable(function):
        raise JobError(f"tg.map takes a function and its pieces, not {function!r:.100}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise JobError(f"tg.map: {_function_text(function)} is async: a piece is computed by a plain `def`")
    if inspect.isgeneratorfunction(function):
        raise JobError(f"tg.map: {_function_text(function)} yields: let it return a list")


def as_list(pieces: Iterable[V]) -> list[V]:
    """Returns the pieces of a map as a list.

    Raises:
        JobError: they are no iterable of values in a fixed order.
    """
    kind = type(pieces).__name__
    if is_source(pieces):
        raise JobError(
            f"tg.map takes values, and {kind} is a source: give its pieces(), and read each one in the function, as in "
            f"source.read(piece)"
        )
    if isinstance(pieces, str | bytes):
        raise JobError(f"tg.map takes several pieces, not {pieces!r:.100}: put it into a list")
    if isinstance(pieces, Set):
        raise JobError(f"tg.map: a {kind} has no fixed order: give sorted(pieces)")
    if not isinstance(pieces, Iterable):
        raise JobError(f"tg.map takes a function and a list of pieces, not {pieces!r:.100}")
    return list(pieces)


def make_reference(function: Callable[[Any], Any]) -> str:
    """Returns a text by which other processes find a function.

    Raises:
        JobError: it is no function of a module or a file; the message says what to do.
    """
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    if not name or not module:
        raise _not_importable(function, f"a {type(function).__name__} has no name in a module")
    if inspect.ismethod(function) and not isinstance(function.__self__, type):
        raise _not_importable(function, f"it is a method of one {type(function.__self__).__name__} object")
    if "<lambda>" in name:
        raise _not_importable(function, "it is a lambda")
    if "<locals>" in name:
        raise _not_importable(function, f"{name.rpartition('.')[2]} is defined within another function")
    found = sys.modules.get(module)
    names: Mapping[str, Any] = {} if found is None else vars(found)
    if found is not None and _attribute(found, name) != function:
        raise _not_importable(function, f"{module}.{name} is another object by now")
    file, spec = names.get("__file__"), names.get("__spec__")
    if module == "__main__" and (not file or not Path(file).is_file()):
        raise _not_importable(function, "it was defined interactively (at a prompt, in a notebook)")
    if not file:
        return json.dumps({"module": module, "name": name})  # it is in C
    path, full = Path(file).resolve(), spec.name if spec is not None else ""
    if "." in (full or module) or is_installed(path) or module in sys.stdlib_module_names:
        full = full or module
        parts = len(full.split(".")) + (path.name == "__init__.py")
        return json.dumps({"module": full, "name": name, "root": str(path.parents[parts - 1])})
    return json.dumps({"file": str(path), "name": name})


def register_here(function: Callable[[Any], Any]) -> str:
    """Keeps a function, until `find_function(text, forget=True)`. Returns the text by which this process finds it."""
    token = str(next(_tokens))
    _here[token] = function
    return json.dumps({"here": token})


def find_function(text: str, *, forget: bool = False) -> Callable[[Any], Any]:
    """Returns the function that `make_reference` or `register_here` returned a text for.

    Raises:
        JobError: it cannot be imported here.
    """
    known = json.loads(text)
    if "here" in known:
        return _here.pop(known["here"]) if forget else _here[known["here"]]
    if "file" in known:
        found = _attribute(load_file(Path(known["file"])), known["name"])
    else:
        if root := known.get("root"):
            add_to_path(root)
        found = _attribute(load_module(known["module"]), known["name"])
    if found is None:
        raise JobError(f"{known.get('file') or known['module']} has no {known['name']}")
    return found  # type: ignore[no-any-return]


def _attribute(module: Any, name: str) -> Any:
    """Returns the attribute of a module at a dotted name; None: it has none."""
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _function_text(function: Any) -> str:
    """Names a function, for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def _not_importable(function: Any, why: str) -> JobError:
    """Returns the error for a function that other processes cannot import."""
    return JobError(
        f"tg.map: nodes cannot import {_function_text(function)}: {why}. Give a function at the top level of a module "
        f"or a file (what it needs beside goes into the pieces), or compute in this process with nodes=0"
    )
