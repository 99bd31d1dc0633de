"""The result of a job: values, reports and counts; in Python and as JSON."""

from __future__ import annotations

import base64
import json
import math
import reprlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Generic, cast

import numpy as np

from taskgraph.errors import DecodeError, JobError, error_text, first_names
from taskgraph.graph.codecs import Codec, codec_of, message
from taskgraph.graph.values import encode

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["EpochReport", "Failed", "JobResult", "all_equal", "json_pieces", "plain_value"]

SET_ASIDE: Final = "taskgraph.set_aside"
"""In the value of a queue's task: the name of the queue whose pieces were set aside. An elastic job has "shards"."""
VALUE: Final = "taskgraph.value"
"""Beside it, the value that user code returned."""
_NAMED = 5
"""Tasks that a message names."""
_REPORTS_A_PIECE = 1000
_BITS_OF_A_DIGIT = 3
"""At least: some ints just below the limit are printed as hexadecimal, too."""
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 200


@dataclass(frozen=True, slots=True)
class EpochReport:
    """The reports of one committed epoch.

    Attributes:
        numbers: name -> number; if several tasks reported a name, the number of the lowest task.
        by_task: task -> name -> number.
    """

    epoch: int
    numbers: dict[str, float]
    by_task: dict[int, dict[str, float]]


@message
@dataclass(frozen=True, slots=True)
class Failed:
    """Takes the place of a piece's result if the piece was set aside (`on_error="set aside"`).

    Attributes:
        piece: the number of the piece, from 0.
        node: the name of the node that tried the piece last.
        traceback: the traceback of the last error, as a text.
        pass_number: the number of the queue's pass, from 0.
    """

    piece: int
    node: str
    traceback: str
    pass_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JobResult(Generic[T]):
    """The result of a job. Its `repr` is short, for the prompt.

    Attributes:
        name: the job's name.
        status: "finished".
        values: task -> what its `result()` returned; tasks that returned None are left out. Of an elastic job: 0 ->
            what its function returned on the first worker.
        reports: one per epoch in which a task reported a number, in order.
        epochs: the number of committed epochs.
        failovers: how often a backup took over from a primary that failed.
        restarts: how often an epoch started again, or the job went back to a checkpoint.
        set_aside: queue -> its pieces that were set aside (`tg.WorkQueue(on_error="set aside")`); "shards" -> those of
            `run.shards`.
        wall_s: seconds from submission to the end. For a submitted job: from the start of the first node to the end
            of the last one that computed the result.
    """

    name: str
    status: str = "finished"
    values: dict[int, Any] = field(default_factory=dict)
    reports: tuple[EpochReport, ...] = ()
    epochs: int = 0
    failovers: int = 0
    restarts: int = 0
    wall_s: float = 0.0
    set_aside: dict[str, tuple[Failed, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = [f"{task}: {_SHORT.repr(value)}" for task, value in list(self.values.items())[:_NAMED]]
        more = [f"... and {len(self.values) - _NAMED} more"] if len(self.values) > _NAMED else []
        reports = f"<of {len(self.reports)} epochs>" if self.reports else "()"
        return (
            f"JobResult(name={self.name!r}, status={self.status!r}, values={{{', '.join([*shown, *more])}}}, "
            f"reports={reports}, epochs={self.epochs}, failovers={self.failovers}, restarts={self.restarts}, "
            f"wall_s={self.wall_s:.3f})"
        )

    @property
    def value(self) -> T:
        """The only value, or that of all tasks if their values are equal: same types, same bits.

        Raises:
            JobError: there is no value, or there are different ones.
        """
        values = list(self.values.values())
        if values and all_equal(values):
            return cast(T, values[0])
        tasks = first_names([*map(str, self.values)], _NAMED)
        which = f"tasks {tasks} returned different ones" if self.values else "no task returned one from result()"
        raise JobError(f"JobResult.value is for jobs with one value; {which}: use .values")

    def to_json(self) -> str:
        """Formats the result as a line of JSON: arrays as nested lists, bytes as base64, nan and infinities as strings.

        Ints of some thousand digits become hexadecimal strings. Keys of a dict become strings; if two keys would become
        the same string, the dict becomes a list of [key, value] pairs.
        """
        return "".join(json_pieces(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> JobResult:
        """Reads the result from `to_json`. All fields are as before, but `values` stay plain JSON.

        Ignores unknown fields: those of a later version, and `left_out` of a large result.

        Raises:
            DecodeError: the text is no result.
        """
        try:
            raw = json.loads(text)
            reports = tuple(
                EpochReport(
                    report["epoch"],
                    _as_floats(report["numbers"]),
                    {int(task): _as_floats(numbers) for task, numbers in report["by_task"].items()},
                )
                for report in raw["reports"]
            )
            values = {int(task): value for task, value in raw["values"].items()}
            aside = {name: tuple(Failed(**one) for one in some) for name, some in raw.get("set_aside", {}).items()}
            known = {each.name: raw[each.name] for each in fields(cls) if each.name != "set_aside"}
            return cls(**{**known, "values": values, "reports": reports, "set_aside": aside})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DecodeError(f"not a job's result: {text[:200]!r} ({type(error).__name__}: {error})") from error


def json_pieces(result: JobResult) -> Iterator[str]:
    """Yields the JSON of a result in pieces: a million reports at once would block all threads for a minute."""
    plain = {
        "name": result.name,
        "status": result.status,
        "values": {str(task): plain_value(value) for task, value in result.values.items()},
    }
    yield f'{json.dumps(plain, allow_nan=False)[:-1]}, "reports": ['
    for at in range(0, len(result.reports), _REPORTS_A_PIECE):
        some = [
            {"epoch": r.epoch, "numbers": plain_value(r.numbers), "by_task": plain_value(r.by_task)}
            for r in result.reports[at : at + _REPORTS_A_PIECE]
        ]
        yield ", " * (at > 0) + json.dumps(some, allow_nan=False)[1:-1]
    rest = {
        "epochs": result.epochs,
        "failovers": result.failovers,
        "restarts": result.restarts,
        "wall_s": round(result.wall_s, 3),
        "set_aside": {name: [plain_value(one) for one in some] for name, some in result.set_aside.items()},
    }
    yield f"], {json.dumps(rest, allow_nan=False)[1:]}"


def all_equal(values: Collection[Any]) -> bool:
    """True if all values have the same types and bits, or there is at most one value."""
    return len(values) < 2 or len({encode(value, what="result").digest for value in values}) == 1


def _as_floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(number) for name, number in numbers.items()}  # "nan" and "inf" are texts there


def plain_value(value: Any) -> Any:
    """Converts a value to plain JSON, for people and scripts. The value cannot be decoded exactly from it."""
    if (known := user_codec_of(value)) is not None:
        try:
            return plain_value(known.encode(value))
        except Exception as error:  # the other values are still worth showing
            return _encoding_failed(value, error)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if _is_printable(value) else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))
    if isinstance(value, complex):
        return [plain_value(value.real), plain_value(value.imag)]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.longdouble | np.clongdouble):  # their items have the same type again
        return plain_value(complex(value) if isinstance(value, np.clongdouble) else float(value))
    if isinstance(value, Mapping):
        by_text = {_key_text(key): plain_value(item) for key, item in value.items()}
        if len(by_text) == len(value):
            return by_text
        return [[plain_value(key), plain_value(item)] for key, item in value.items()]  # keys 1 and "1"
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain_value(getattr(value, name)) for name in value.__dataclass_fields__}
    if hasattr(value, "tolist"):  # numpy, CuPy and torch, arrays and scalars
        return plain_value(value.tolist())
    try:
        if hasattr(value, "ListFields"):  # a protobuf message
            from google.protobuf.json_format import MessageToDict

            return plain_value(MessageToDict(value, preserving_proto_field_name=True))
        return str(value)
    except Exception as error:  # a type of the user's; or a message without JSON: an Any of an unknown type, say
        return _encoding_failed(value, error)


def _key_text(key: Any) -> str:
    try:
        return str(key)
    except Exception:  # an int of some thousand digits, a type of the user's
        return str(plain_value(key))


def user_codec_of(value: Any) -> Codec | None:
    """Returns the user's codec for the type of a value; None for arrays, which `tolist` shows better."""
    kind = type(value)
    return None if hasattr(kind, "__dlpack__") else codec_of(kind)


def _encoding_failed(value: Any, error: Exception) -> str:
    """Returns the text to show in place of a value that cannot be converted."""
    return f"<{type(value).__name__}: {error_text(error)}>"


def _is_printable(value: int) -> bool:
    """True if Python can print this int in decimal digits (`set_int_max_str_digits`)."""
    limit = sys.get_int_max_str_digits()
    return not limit or value.bit_length() <= _BITS_OF_A_DIGIT * limit
