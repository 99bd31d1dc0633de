"""What the README shows is what is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from taskgraph.driver.loading import load_driver

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True) for line in README.splitlines() if re.match(r"    taskgraph (run|submit) ", line)
]


def test_the_program_is_the_one_in_examples() -> None:
    shown = re.search(r"```python\n(import numpy.*?)\n```", README, re.DOTALL)
    assert shown is not None
    assert shown.group(1) in (ROOT / "examples" / "readme.py").read_text()


def test_every_block_imports_what_it_names() -> None:
    for block in re.findall(r"```python\n(.*?)\n```", README, re.DOTALL):
        assert "tg." not in block or "import taskgraph as tg\n" in block, block


def test_every_extra_of_a_user_is_named() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = README.partition("## A program")[0]
    assert not [extra for extra in extras if extra != "dev" and f"`{extra}`" not in named]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_driver_and_option_of_a_command_exists(command: list[str]) -> None:
    driver = load_driver(str(ROOT / command[2]))
    options = [value for flag, value in pairwise(command) if flag == "-o"]
    assert driver(**driver.parse_options(options)).tasks > 0


def test_the_changelog_tells_of_this_version() -> None:
    from taskgraph import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
