"""The page of commands has every command and option that `--help` has, and no other."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import pytest

from taskgraph.cli import parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text("utf-8")
PAGES = {path.name: path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
LAUNCHERS = ("local", "slurm", "kubernetes")
HELP = {"-h", "--help", "--help-all"}
OPTION = re.compile(r"(?<![\w`-])(?:`)?(--?[a-z][\w-]*)")


def commands(*words: str) -> dict[str, argparse.ArgumentParser]:
    (found,) = (action for action in parser(words)._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def options(made: argparse.ArgumentParser) -> set[str]:
    return {name for action in made._actions for name in action.option_strings} - HELP


COMMANDS = commands()
SHARED = set.intersection(*(options(made) for name, made in COMMANDS.items() if name not in ("certs", "map")))


def table() -> dict[str, set[str]]:
    """Command -> its own options, by the rows of the page; a row without a command is of the one above it."""
    found: dict[str, set[str]] = defaultdict(set)
    now: list[str] = []
    for line in PAGE.partition("## Access")[0].splitlines():
        if not line.startswith("| ") or line.startswith("| Command"):
            continue
        command, option, what = line.replace("\\|", "").strip("|").split("|")
        if command.strip():
            now = [word.split()[0] for word in re.findall(r"`([^`]+)`", command)]
        own = set(OPTION.findall(option)) | (set(OPTION.findall(what)) if now == ["launch"] else set())
        for name in now:
            found[name] |= own
    return found


def test_page_has_commands_and_options() -> None:
    found = table()
    assert found.keys() == COMMANDS.keys()
    run = found["run"]
    for name, made in COMMANDS.items():
        shown = found[name] | (run if name == "launch" else set())  # which takes a driver, too
        assert shown == options(made) - SHARED, name


def test_page_has_shared_options() -> None:
    access = PAGE.partition("## Access")[2].partition("## How")[0]
    assert set(re.findall(r"`(--[\w-]+)", access)) == SHARED


@pytest.mark.parametrize("page", PAGES)
def test_options_that_pages_show_exist(page: str) -> None:
    for name, rest in re.findall(r"taskgraph ([a-z]+)((?: [^`\n#)]*)?)", PAGES[page]):
        if name in COMMANDS:
            on = re.search(r"--on ([a-z]+)", rest)
            known = options(commands(*(("--on", on[1]) if on is not None and on[1] in LAUNCHERS else ()))[name])
            assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)) <= known | HELP, f"{name}{rest}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_page_of_clusters_has_the_options_of_launchers(launcher: str) -> None:
    section = PAGES["clusters.md"].partition(f"## {launcher.capitalize()}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `--")]
    own = options(commands("--on", launcher)["submit"]) - options(COMMANDS["submit"])
    assert {option for row in rows for option in OPTION.findall(row)} == own


@pytest.mark.parametrize("page", PAGES)
def test_named_variables_are_read(page: str) -> None:
    code = "".join(path.read_text("utf-8") for room in ("taskgraph", "tests") for path in (ROOT / room).rglob("*.py"))
    for name in set(re.findall(r"\bTASKGRAPH_([A-Z_]+[A-Z])\b", PAGES[page])):
        assert f"TASKGRAPH_{name}" in code or f'"{name.lower()}"' in code, name
