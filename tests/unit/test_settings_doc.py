"""Settings: refused where they make no sense, and documented to the last field."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest

import taskgraph as tg

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text("utf-8")
FIELDS = {field.name: field for field in dataclasses.fields(tg.Settings)}
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_the_page_has_every_setting_and_no_other() -> None:
    assert sorted(ROWS) == sorted(FIELDS), "a field of Settings is documented in docs/settings.md, in one row"
    assert len(re.findall(r"^\| `", PAGE, re.M)) == len(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_the_page_tells_default_unit_meaning_and_reason(name: str) -> None:
    default, unit, what, why = ROWS[name]
    assert default == repr(FIELDS[name].default)
    assert what and why
    if name.endswith("_s"):
        assert unit == "s"
    elif name.endswith("_bytes"):
        assert unit == "bytes"
    else:
        assert unit or isinstance(FIELDS[name].default, bool)


@pytest.mark.parametrize("name", FIELDS)
def test_the_docstring_tells_every_setting(name: str) -> None:
    assert re.search(rf"^    {name}: \S", inspect.getdoc(tg.Settings) or "", re.M)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_used(name: str) -> None:
    sources = [path for path in (ROOT / "taskgraph").rglob("*.py") if path.name != "settings.py"]
    assert any(re.search(rf"\b{name}\b", path.read_text("utf-8")) for path in sources), f"nothing reads {name}"


def test_the_pages_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    namespace: dict[str, Any] = {"__name__": "settings_page"}
    exec(compile(block, "docs/settings.md", "exec"), namespace)
    assert namespace["fit"](tasks=3).settings.lease_ttl_s == 10


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [-1, None, "5", math.nan, math.inf])
def test_a_value_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(tg.JobError, match=rf"Settings\({name}={re.escape(repr(value))}\): must be "):
        tg.Settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("call_s", 0), ("call_s", True), ("min_in_sync", 0), ("min_in_sync", 1.0), ("strict", 1)),
        *(("device_memory", 0), ("device_memory", 1.01), ("device_memory", True), ("device_memory", "90%")),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(tg.JobError, match=name):
        tg.Settings(**{name: value})


def test_a_part_of_a_whole_is_told_so() -> None:
    assert tg.Settings(device_memory=1).device_memory == 1
    with pytest.raises(tg.JobError, match=r"Settings\(device_memory=90\): must be a number above 0, and 1 at most"):
        tg.Settings(device_memory=90)


def test_waits_that_one_may_do_without_may_be_zero() -> None:
    assert tg.Settings(admit_wait_s=0, start_wait_s=0.0, drain_s=0).drain_s == 0
