"""A driver's fingerprint: of its code and of what it imports, the same in every process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from taskgraph.driver.loading import load_driver
from taskgraph.driver.sources import fingerprint

DRIVER = """
'''Nothing like the other_driver.'''
import taskgraph as tg
{imports}

@tg.job
def {name}():
    return tg.Job(tasks=1, builder=tg.Task)
"""


@pytest.fixture(autouse=True)
def fresh_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def write(folder: Path, name: str, *, imports: str = "") -> str:
    path = folder / f"{name}.py"
    path.write_text(DRIVER.format(imports=imports, name=name))
    return str(path)


def print_of(path: str) -> str:
    """The fingerprint as a process finds it that has not imported the driver yet."""
    for name in [n for n, m in sys.modules.items() if str(Path(path).parent) in (getattr(m, "__file__", "") or "")]:
        del sys.modules[name]
    return fingerprint(load_driver(path))


def test_it_does_not_depend_on_what_else_was_imported(tmp_path: Path) -> None:
    alone = print_of(write(tmp_path, "a_driver"))
    load_driver(write(tmp_path, "other_driver"))
    assert fingerprint(load_driver(str(tmp_path / "a_driver.py"))) == alone


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_a_driver_whose_name_is_no_text_has_one(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xfcll.py")
    path.write_text(DRIVER.format(imports="", name="fit"))
    assert len(print_of(str(path))) == 16


@pytest.mark.parametrize(
    ("imports", "file"),
    [
        ("import helper_of_mine", "helper_of_mine.py"),
        ("from helper_of_mine import *", "helper_of_mine.py"),
        ("import kit_of_mine.part", "kit_of_mine/__init__.py"),
        ("import kit_of_mine.part", "kit_of_mine/part.py"),
        ("from kit_of_mine import part", "kit_of_mine/part.py"),
        ("from kit_of_mine import part", "kit_of_mine/deep.py"),
    ],
)
def test_it_changes_with_the_code_that_the_driver_imports(tmp_path: Path, imports: str, file: str) -> None:
    kit = tmp_path / "kit_of_mine"
    kit.mkdir()
    (tmp_path / "helper_of_mine.py").write_text("ONE = 1\n")
    (kit / "__init__.py").write_text("")
    (kit / "part.py").write_text("from . import deep\nfrom .deep import ONE\n")
    (kit / "deep.py").write_text("ONE = 1\n")
    driver = write(tmp_path, "a_driver", imports=imports)
    before = print_of(driver)
    assert print_of(driver) == before
    (tmp_path / "bystander.py").write_text("never imported\n")
    assert print_of(driver) == before
    with (tmp_path / file).open("a") as changed:
        changed.write("TWO = 2\n")
    assert print_of(driver) != before


def test_it_changes_with_the_code_of_the_driver(tmp_path: Path) -> None:
    driver = write(tmp_path, "a_driver")
    before = print_of(driver)
    write(tmp_path, "a_driver", imports="# another version")
    assert print_of(driver) != before
