"""Settings: refused if they make no sense, and documented to the last field."""

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


def test_page_has_every_setting() -> None:
    assert sorted(ROWS) == sorted(FIELDS) and len(re.findall(r"^\| `", PAGE, re.M)) == len(FIELDS)
    for name, field in FIELDS.items():
        default, numbers, unit, what, why = ROWS[name]
        assert default == repr(field.default)
        bounds = field.metadata
        begin = "above 0," if bounds and bounds["least"] is None else bounds.get("least")
        assert numbers == (f"{begin} to {bounds['most']}" if bounds else ""), name
        assert what and why
        expected = "s" if name.endswith("_s") else "bytes" if name.endswith("_bytes") else unit
        assert unit == expected and (unit or isinstance(field.default, bool)), name


def test_every_setting_is_read_and_in_the_docstring() -> None:
    code = "".join(p.read_text("utf-8") for p in (ROOT / "taskgraph").rglob("*.py") if p.name != "settings.py")
    for name in FIELDS:
        assert re.search(rf"^    {name}: \S", inspect.getdoc(tg.Settings) or "", re.M), name
        assert re.search(rf"\b{name}\b", code), f"nothing reads {name}"


def test_example_of_the_page_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    namespace: dict[str, Any] = {"__name__": "settings_page"}
    exec(compile(block, "docs/settings.md", "exec"), namespace)
    assert namespace["fit"](tasks=3).settings.lease_ttl_s == 10


@pytest.mark.parametrize("value", [-1, None, "5", math.nan, math.inf, 1e30, 10**400])
def test_senseless_value_is_refused(value: Any) -> None:
    for name in FIELDS:
        with pytest.raises(tg.JobError, match=rf"Settings\({name}={re.escape(repr(value))}\): must be "):
            tg.Settings(**{name: value})


def test_value_outside_its_range_is_refused() -> None:
    assert [name for name, field in FIELDS.items() if not field.metadata] == ["deal_devices", "strict"]
    for name, bounds in ((name, field.metadata) for name, field in FIELDS.items() if field.metadata):
        most, least = bounds["most"], bounds["least"]
        assert getattr(tg.Settings(**{name: most}), name) == most
        with pytest.raises(tg.JobError, match=rf"Settings\({name}={most + 1}\): must be .* {most}( at most)?$"):
            tg.Settings(**{name: most + 1})
        if least is not None:
            assert getattr(tg.Settings(**{name: least}), name) == least
        else:
            with pytest.raises(tg.JobError, match=rf"Settings\({name}=0\): must be a number.* above 0, and {most}"):
                tg.Settings(**{name: 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("call_s", 0), ("call_s", True), ("min_in_sync", 0), ("min_in_sync", 1.0), ("strict", 1)),
        *(("device_memory", 0), ("device_memory", 1.01), ("device_memory", True), ("device_memory", "90%")),
    ],
)
def test_value_of_another_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(tg.JobError, match=name):
        tg.Settings(**{name: value})


def test_share_may_be_one_and_optional_waits_zero() -> None:
    assert tg.Settings(device_memory=1).device_memory == 1
    assert tg.Settings(admit_wait_s=0, start_wait_s=0.0, drain_s=0).drain_s == 0
