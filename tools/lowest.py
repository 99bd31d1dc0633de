#!/usr/bin/env python3
"""Prints the lowest release of each package that pyproject.toml allows, as constraints for pip.

    python tools/lowest.py > lowest.txt
    python -m pip install --constraint lowest.txt --editable '.[embedded,dev]'

A lower bound is a promise, and `make test-lowest` keeps it. pip itself says where one is no release, or where two of
them exclude each other.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

# A name, extras, bounds and a marker: numpy, or cupy-cuda12x[ctk]>=13,<15; sys_platform != 'win32'. pip takes no extras
# in a constraint.
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<bounds>[^;]*)(?P<marker>;.*)?")
_LOWEST = re.compile(r">=\s*([\w.]+)")


def lowest(requirement: str) -> str:
    """A requirement as pip's argument: `numpy==1.26` for `numpy>=1.26,<3`."""
    parts = _REQUIREMENT.fullmatch(requirement)
    bound = parts and _LOWEST.search(parts["bounds"])
    if not parts or not bound:
        raise ValueError(f"{requirement!r} has no lower bound: write one, as in 'numpy>=1.26'")
    return f"{parts['name']}=={bound[1]}{parts['marker'] or ''}"


def main() -> int:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    print(*map(lowest, [*project["dependencies"], *(each for extra in extras for each in extra)]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
