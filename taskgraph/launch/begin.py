"""Starts a module of this taskgraph in a new Python process, whatever lies in the working directory.

    python -P begin.py MODULE ARGUMENT...

`python -m MODULE` would look for every module in the working directory first: a `queue.py` there takes the place of
Python's own, and a clone there that of the launcher's taskgraph. With `-P` a taskgraph in the working directory, or one
found by a changed `sys.path`, is not found; so this file adds its own directory.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

__all__ = ["command", "options"]

_FLAGS = {
    "optimize": "O",
    "bytes_warning": "b",
    "dont_write_bytecode": "B",
    "no_site": "S",
    "debug": "d",
    "verbose": "v",
}
"""Without those for interactive use (`-i`), and those that say what to run."""


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that starts a module in another process."""
    return [sys.executable, "-P", *options(), __file__, module, *arguments]


def options() -> list[str]:
    """Returns the options of this interpreter, so that user code does the same in another one.

    `-O` and `-W error` decide about an `assert` and a warning, `-X` about reading text. The environment is inherited.
    """
    flags = sys.flags
    found = [f"-{letter * getattr(flags, name)}" for name, letter in _FLAGS.items() if getattr(flags, name)]
    if flags.isolated:
        found.append("-I")
    else:
        found += [option for option, given in (("-E", flags.ignore_environment), ("-s", flags.no_user_site)) if given]
    found += [f"-W{option}" for option in sys.warnoptions]
    return [*found, *(f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items())]


def _main() -> None:
    """Runs the module that the first argument names, with this taskgraph."""
    ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    found = importlib.util.find_spec("taskgraph")
    # Only if needed: a directory of installed packages in front of all others would hide modules of Python.
    if found is None or os.path.dirname(os.path.realpath(found.origin or "")) != ours:
        sys.path.insert(0, os.path.dirname(ours))
    # The main module of the process is still this one: who is started by `multiprocessing` loads that of its parent, in
    # the workers of a pool of users a whole node. From Python 3.14 on they are not forked unless they are asked to be.
    runpy.run_module(sys.argv.pop(1), run_name="__main__")


if __name__ == "__main__":
    _main()
