"""The ways out that errors and docs/values.md name: the advised value travels."""

from __future__ import annotations

import datetime
import re
from typing import Any

import numpy as np
import pytest

from taskgraph.errors import ValueNotEncodable
from taskgraph.graph.values import decode, encode

UTC = datetime.UTC
VALUES: dict[str, Any] = {
    "set": {3, 1},
    "mixed set": {1, "a"},
    "bytearray": bytearray(b"x"),
    "range": range(3),
    "keys": {1: 2}.keys(),
    "date": datetime.date(2024, 1, 1),
    "datetime": datetime.datetime(2024, 1, 1),
    "datetime with a zone": datetime.datetime(2024, 1, 1, tzinfo=UTC),
    "time": datetime.time(1),
    "timedelta": datetime.timedelta(3),
    "zone": UTC,
    "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
    "masked texts": np.ma.masked_array(["a", "b"], [True, False]),
    "masked days": np.ma.masked_array(np.array(["2024-01-01"], "M8[D]"), [True]),
    "matrix": np.ones((2, 2)).view(np.matrix),
    "objects": np.array([1, 2], object),
    "records with objects": np.array([(1, None)], [("a", int), ("b", object)]),
    "generator": np.random.default_rng(1),
    "random state": np.random.RandomState(1),
    "bits": np.random.PCG64(1),
}


_CALL = re.compile(r"(?:[\w.]*\([^()]*(?:\([^()]*\)[^()]*)*\)|\bx\.[\w.]+)(?:\.\w+\([^()]*\))*")
"""An expression in a message: calls, in parentheses or of methods, or an attribute of x."""


def advised(value: Any) -> list[Any]:
    """The values that the error says to send instead of `value`."""
    with pytest.raises(ValueNotEncodable) as caught:
        encode(value)
    text = str(caught.value)
    calls = [call for call in _CALL.findall(text) if re.search(r"\b(x|a|df)\b", call)]
    assert calls, text
    return [eval(call, {"x": value, "a": value, "df": value, "np": np}) for call in calls]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", VALUES)
def test_advised_value_travels(name: str) -> None:
    for value in advised(VALUES[name]):
        decode(encode(value))


def test_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4):
        for value in advised(np.ones(3, dtype)):
            decode(encode(value))


def test_pandas() -> None:
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"city": ["a", "b"], "day": pd.to_datetime(["2024-01-01", "2024-01-02"]), "n": [1, 2]})
    for value in (
        table,
        table[["city", "n"]],
        table[["n"]],
        *(table[name] for name in table),
        pd.Index(["a"]),
        pd.Categorical(["a"]),
        table["day"].dt.tz_localize("UTC"),
        table["day"][0],
        pd.Timedelta(1, "s"),
        pd.Period("2024"),
    ):
        for found in advised(value):
            decode(encode(found))


def test_polars() -> None:
    pl = pytest.importorskip("polars")
    table = pl.DataFrame({"city": ["a", "b"], "n": [1, 2]})
    days = table.with_columns(day=pl.lit(datetime.date(2024, 1, 1)))
    for value in (table, days, days["day"], days["city"]):
        for found in advised(value):
            decode(encode(found))
