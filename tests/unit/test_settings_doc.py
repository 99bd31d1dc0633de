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
def test_the_page_tells_default_range_unit_meaning_and_reason(name: str) -> None:
    default, numbers, unit, what, why = ROWS[name]
    assert default == repr(FIELDS[name].default)
    bounds = FIELDS[name].metadata
    begin = "above 0," if bounds and bounds["least"] is None else bounds.get("least")
    assert numbers == (f"{begin} to {bounds['most']}" if bounds else "")
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
@pytest.mark.parametrize("value", [-1, None, "5", math.nan, math.inf, 1e30, 10**400])
def test_a_value_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(tg.JobError, match=rf"Settings\({name}={re.escape(repr(value))}\): must be "):
        tg.Settings(**{name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata])
def test_every_number_has_a_range_and_what_is_beyond_is_answered_with_it(name: str) -> None:
    most, least = FIELDS[name].metadata["most"], FIELDS[name].metadata["least"]
    assert getattr(tg.Settings(**{name: most}), name) == most
    with pytest.raises(tg.JobError, match=rf"Settings\({name}={most + 1}\): must be .* {most}( at most)?$"):
        tg.Settings(**{name: most + 1})
    if least is not None:
        assert getattr(tg.Settings(**{name: least}), name) == least
    else:
        with pytest.raises(
            tg.JobError, match=rf"Settings\({name}=0\): must be a number.* above 0, and {most} at most$"
        ):
            tg.Settings(**{name: 0})


def test_every_setting_that_is_no_bool_has_a_range() -> None:
    assert [name for name, field in FIELDS.items() if not field.metadata] == ["deal_devices", "strict"]


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
