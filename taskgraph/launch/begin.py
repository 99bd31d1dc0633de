"""Begins a module in a new Python process that runs this taskgraph, and nothing that lies in the working directory.

    python -P begin.py MODULE ARGUMENT...

`python -m MODULE` would look for every module in the working directory first: a `queue.py` there takes the place of
Python's own, and a clone there that of the taskgraph whose launcher this is. Without it (`-P`) a taskgraph is not found
that was found there, or by a change of `sys.path`; one that is run by its file knows where it is.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

__all__ = ["command"]


def command(module: str, *arguments: str) -> list[str]:
    """The words of a command that begins a module in another process."""
    return [sys.executable, "-P", __file__, module, *arguments]


def _main() -> None:
    ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    found = importlib.util.find_spec("taskgraph")
    # Only where it has to be: in front of all others a directory of installed packages would hide modules of Python.
    if found is None or os.path.dirname(os.path.realpath(found.origin or "")) != ours:
        sys.path.insert(0, os.path.dirname(ours))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
