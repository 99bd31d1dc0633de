"""What a job leaves, as Python holds it and as JSON says it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

import taskgraph as tg
from taskgraph.observe.values_text import values_text
from taskgraph.results import plain_value

FULL = tg.JobResult(
    name="fit",
    values={0: [1, 2.5], 3: None},
    reports=(tg.EpochReport(4, {"loss": 0.5, "gap": math.inf}, {0: {"loss": 0.5}, 2: {"gap": math.inf}}),),
    epochs=5,
    failovers=1,
    restarts=2,
    wall_s=1.25,
)


def test_only_value() -> None:
    assert tg.JobResult(name="x", values={7: "found"}).value == "found"


def test_equal_values_are_one_value() -> None:
    values: dict[int, Any] = {task: {"theta": np.arange(3.0), "best": math.nan} for task in range(3)}
    assert tg.JobResult(name="x", values=values).value["theta"].tolist() == [0.0, 1.0, 2.0]
    values[2]["theta"][1] += 1e-15
    with pytest.raises(tg.JobError, match="tasks 0, 1, 2 returned different ones"):
        _ = tg.JobResult(name="x", values=values).value


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, r"no task returned one from result\(\): use \.values"),
        ({0: 1, 5: 2}, "tasks 0, 5 returned different ones: use"),
        ({task: task for task in range(31)}, "tasks 0, 1, 2, 3, 4 and 26 more returned different ones"),
    ],
)
def test_only_value_of_none_or_several(values: dict[int, Any], complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint):
        _ = tg.JobResult(name="x", values=values).value


def test_result_survives_json() -> None:
    text = FULL.to_json()
    assert "\n" not in text
    assert tg.JobResult.from_json(text) == FULL
    assert tg.JobResult.from_json(tg.JobResult(name="x").to_json()) == tg.JobResult(name="x")


def test_reports_are_one_list() -> None:
    reports = tuple(tg.EpochReport(epoch, {"loss": 0.5}, {0: {"loss": 0.5}}) for epoch in range(2500))
    full = dataclasses.replace(FULL, reports=reports)
    assert tg.JobResult.from_json(full.to_json()) == full
    assert full.to_json() == json.dumps(json.loads(full.to_json())), "as one call writes it"


def test_result_without_reports() -> None:
    text = json.dumps({**json.loads(FULL.to_json()), "reports": [], "left_out": "reports left out: ..."})
    assert tg.JobResult.from_json(text) == dataclasses.replace(FULL, reports=())


def test_json_is_standard() -> None:
    read = json.loads(FULL.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(read) == [
        "name",
        "status",
        "values",
        "reports",
        "epochs",
        "failovers",
        "restarts",
        "wall_s",
        "set_aside",
    ]
    assert read["values"] == {"0": [1, 2.5], "3": None}
    assert read["reports"] == [
        {"epoch": 4, "numbers": {"loss": 0.5, "gap": "inf"}, "by_task": {"0": {"loss": 0.5}, "2": {"gap": "inf"}}}
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", b"\xff", FULL.to_json().replace('"epochs"', '"eras"')])
def test_bad_result_is_refused(text: str | bytes) -> None:
    with pytest.raises(tg.DecodeError, match="not a job's result"):
        tg.JobResult.from_json(text)


class Bag:
    """As a type that users declare a codec for: its `str` says nothing."""

    def __init__(self, has: Any) -> None:
        self.has = has


tg.codec(Bag, lambda bag: bag.has, Bag, name="a bag of results")


@dataclasses.dataclass
class Handle:
    """As a dataclass that holds what cannot be said."""

    number: int
    handle: object


class Row(list[int]):
    """As a list that is more."""


tg.codec(Handle, lambda handle: {"number": handle.number}, lambda raw: Handle(raw["number"], None))
tg.codec(Row, lambda row: [len(row), list(row)], lambda raw: Row(raw[1]))


@tg.message
class Found:
    at: Any
    cost: float


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, True),
        (10**30, 10**30),
        (math.nan, "nan"),
        (np.float64("-inf"), "-inf"),
        (np.float32(0.5), 0.5),
        (np.int8(-3), -3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.longdouble("nan"), "nan"),
        (np.array([1.5, 2], np.longdouble), [1.5, 2.0]),
        (1 + 2j, [1.0, 2.0]),
        (np.clongdouble(1 + 2j), [1.0, 2.0]),
        (np.complex64(complex(0, math.inf)), [0.0, "inf"]),
        (b"\x00\xff", "AP8="),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(5.0), 5.0),
        (np.array([b"a"]), ["YQ=="]),
        (np.datetime64("2024-02-29"), "2024-02-29"),
        (np.array([(1, 2.5)], dtype=[("a", int), ("b", float)]), [[1, 2.5]]),
        ({"a": (1, None), 2: [math.inf]}, {"a": [1, None], "2": ["inf"]}),
        (Found(np.arange(2), math.nan), {"at": [0, 1], "cost": "nan"}),
        (Struct(fields={}), {}),
        (Path("/x"), "/x"),
        (Bag([1, Bag(np.arange(2))]), [1, [0, 1]]),
        ({"a": (Bag({"b": b"x"}),)}, {"a": [{"b": "eA=="}]}),
        (Handle(3, object()), {"number": 3}),
        ([Row([5, 6])], [[2, [5, 6]]]),
    ],
)
def test_values_in_json(value: Any, plain: Any) -> None:
    assert plain_value(value) == plain
    json.dumps(plain_value(value), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "pairs"),
    [
        ({1: "int", "1": "str"}, [[1, "int"], ["1", "str"]]),
        ({"None": 1, None: (2,), "x": 3}, [["None", 1], [None, [2]], ["x", 3]]),
        ({(1, 2): b"\x00", "(1, 2)": {True: 0}}, [[[1, 2], "AA=="], ["(1, 2)", {"True": 0}]]),
        ({math.nan: 1, float("nan"): 2}, [["nan", 1], ["nan", 2]]),
    ],
)
def test_keys_with_equal_text_survive(value: Any, pairs: list[Any]) -> None:
    text = tg.JobResult(name="x", values={0: value, 1: {"in": [value]}}).to_json()
    assert json.loads(text)["values"] == {"0": pairs, "1": {"in": [pairs]}}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (AnyMessage(type_url="type.googleapis.com/nobody.Knows"), "<Any: TypeError: "),
        (Timestamp(seconds=10**15), "<Timestamp: "),
    ],
    ids=["unknown type", "after the year 9999"],
)
def test_message_beyond_json(message: Any, said: str) -> None:
    """None of a job's values was kept, and `taskgraph run --json` ended with a traceback."""
    values = json.loads(tg.JobResult(name="x", values={0: message, 1: [message], 2: 1.5}).to_json())["values"]
    assert values["0"].startswith(said) and values["1"] == [values["0"]] and values["2"] == 1.5


def test_repr_is_short() -> None:
    reports = tuple(tg.EpochReport(epoch, {"loss": 0.5}, {0: {"loss": 0.5}}) for epoch in range(1000))
    found = tg.JobResult(name="fit", values={0: np.array([1.0, 2.0])}, reports=reports, epochs=1000, wall_s=1.23456)
    assert repr(found) == (
        "JobResult(name='fit', status='finished', values={0: array([1., 2.])}, reports=<of 1000 epochs>, epochs=1000, "
        "failovers=0, restarts=0, wall_s=1.235)"
    )
    large = tg.JobResult(name="fit", values={task: list(range(10_000)) for task in range(1000)})
    assert len(repr(large)) < 600 and "... and 995 more" in repr(large)


class Untold:
    def __str__(self) -> str:
        raise ZeroDivisionError("no words")

    __repr__ = __str__


def test_value_whose_repr_fails() -> None:
    huge = 10**5000
    assert plain_value([huge, -huge, 10**600]) == [hex(huge), hex(-huge), 10**600]
    assert plain_value({"x": Untold()}) == {"x": "<Untold: ZeroDivisionError: no words>"}
    assert plain_value({huge: 1, (huge,): 2, Untold(): 3}) == {
        hex(huge): 1,
        str([hex(huge)]): 2,
        "<Untold: ZeroDivisionError: no words>": 3,
    }
    assert json.loads(tg.JobResult(name="x", values={0: huge}).to_json())["values"] == {"0": hex(huge)}
    assert values_text({0: huge}) == hex(huge)
    assert values_text({0: [1, huge]}) == str([1, hex(huge)])
    assert values_text({0: 1, 1: Untold()}) == "task 0: 1\ntask 1: <Untold: ZeroDivisionError: no words>"
