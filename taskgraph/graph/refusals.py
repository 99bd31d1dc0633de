"""Explains why a value cannot travel: its type, its place in the value, and what to send instead."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import inspect
import io
import random
import sys
import types
import warnings
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, Set, ValuesView
from typing import Any, Final

import numpy as np

from taskgraph.errors import ValueNotEncodable
from taskgraph.graph import codecs

__all__ = ["GENERAL_ADVICE", "CannotTravel", "key_step", "library_of", "suggest_instead", "trial"]

_KEY_CHARS = 40
"""Characters of a dict's key that a message shows."""
GENERAL_ADVICE = (
    "send its parts, declare a dataclass with @tg.message, or teach its type with tg.codec(type, encode, decode)"
)


class CannotTravel(Exception):
    """Raised inside the encoder for a part that cannot travel. Each level of nesting adds its step with `with_step`.

    Attributes:
        steps: the path to the part, the innermost step first.
    """

    def __init__(self, value: Any, way_out: str) -> None:
        super().__init__(way_out)
        self.value = value
        self.way_out = way_out
        self.steps: list[str] = []

    def with_step(self, step: str) -> CannotTravel:
        """Adds a step to the path, and returns this exception."""
        self.steps.append(step)
        return self

    def error(self, what: str) -> ValueNotEncodable:
        """Makes the user's error. `what` names the whole value."""
        kind = type(self.value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        steps = self.steps[::-1]
        if len(steps) > 12:
            steps = [*steps[:6], " ... ", *steps[-3:]]
        where = f" at {''.join(steps).lstrip()}" if steps else ""
        return ValueNotEncodable(
            f"{what + ': ' if what else ''}a value of type {name}{where} cannot travel; {self.way_out}"
        )


def key_step(key: Any) -> str:
    """Returns the path step of a dict's key, e.g. `['theta']`; only the key's type if its repr would run user code."""
    if type(key) in (str, float, bool, bytes, type(None)) or (type(key) is int and key.bit_length() < 128):
        return f"[{key!r:.{_KEY_CHARS}}]"
    return f"[<{type(key).__name__}>]"


def library_of(value: Any) -> str:
    """Returns the name of an array's array API namespace; "" for other values."""
    ask = getattr(value, "__array_namespace__", None)
    return str(getattr(ask(), "__name__", "")) if ask is not None else ""


def suggest_instead(value: Any) -> str:
    """Returns advice on what to send instead of a value; general advice if inspecting the value raises."""
    try:
        return _specific_advice(value)
    except Exception:
        return GENERAL_ADVICE


class _TrialEncoder:
    """Holds the function that tries to encode a value: `encoding` sets it, since `encoding` imports this module."""

    write: Callable[[Any], object] = staticmethod(lambda value: None)


trial: Final = _TrialEncoder()

Candidates = Sequence[tuple[str, Callable[[Any], Any]]]


def _advise_encodable(value: Any, candidates: Candidates) -> str | None:
    """Encodes each candidate in turn, and advises to send one of the first two that travel; None if none does."""
    found = []
    for text, make in candidates:
        try:
            with warnings.catch_warnings(action="error"):
                trial.write(make(value))
        except Exception:
            continue
        found.append(text)
    return f"send {' or '.join(found[:2])}" if found else None


_AS_TEXTS: Final = ("list(map(str, x))", lambda x: list(map(str, x)))


def _specific_advice(value: Any) -> str:
    """Returns the first advice that fits a value, or general advice."""
    if isinstance(value, type):
        return f"it is the class {value.__name__} itself: send one of it, or its name"
    if own := getattr(type(value), "__taskgraph_way_out__", None):
        return str(own)
    for fits in (_numpy_advice, _builtin_advice, _library_advice, _declaration_advice, _array_advice):
        if text := fits(value):
            return text
    return GENERAL_ADVICE


def _numpy_advice(value: Any) -> str | None:
    """Returns advice for one of numpy's objects that does not travel; None: it is none."""
    if isinstance(value, np.ma.MaskedArray | np.ma.core.MaskedConstant):
        return _advise_encodable(
            value,
            (
                ("its data and its mask: (a.filled(0), np.ma.getmaskarray(a))", lambda a: a.filled(0)),
                ("(a.data, np.ma.getmaskarray(a))", lambda a: np.asarray(a.data)),
            ),
        )
    if isinstance(value, np.ndarray):
        return "only plain arrays travel: send np.asarray(a)"
    if isinstance(value, np.generic):
        return "only numpy's own scalars travel: send x.item()"
    if isinstance(value, np.random.Generator | np.random.RandomState | np.random.BitGenerator):
        state = "x.bit_generator.state" if isinstance(value, np.random.Generator) else "x.state"
        if isinstance(value, np.random.RandomState):
            state = "x.get_state()"
        return f"draw from epoch.rng, or in an elastic job from one with the seed part.seed; or send {state}"
    return None


def _builtin_advice(value: Any) -> str | None:
    """Returns advice for an object of Python's own types; None: it is none, or there is no advice."""
    if isinstance(value, enum.Enum):
        return "send x.value, and call its class with it where it arrives; or use tg.codec"
    if isinstance(value, bytearray | memoryview):
        return "send bytes(x)"
    if isinstance(value, set | frozenset):
        way = _advise_encodable(value, (("sorted(x)", sorted), ("sorted(x, key=repr)", lambda x: sorted(x, key=repr))))
        return way and f"{way}: a set has no order, so equal sets could have different bytes"
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return "send list(x)"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "send tuple(x), or make it a dataclass with @tg.message"
    for base in (int, float, complex, str, bytes, list, tuple, dict):
        if isinstance(value, base):
            return f"send {base.__name__}(x): what arrives has exactly the type of what was sent"
    if inspect.isawaitable(value):
        return "await it, and send what it gives"
    if isinstance(value, io.IOBase):
        return (
            "open it in setup(), or in the function of an elastic job, and leave it out of the state; send its name, "
            "or what it holds"
        )
    if isinstance(value, range | Iterator | collections.deque):
        return "send list(x)"
    if isinstance(value, types.MappingProxyType):
        return "send dict(x)"
    if isinstance(value, types.SimpleNamespace):
        return "send vars(x)"
    if isinstance(value, array.array):
        return "send np.array(x)"
    if isinstance(value, BaseException):
        return "send str(x)"
    if isinstance(value, random.Random):
        return "draw from epoch.rng, or in an elastic job from one with the seed part.seed; or send x.getstate()"
    if inspect.isroutine(value) or isinstance(value, functools.partial | np.ufunc):
        return "code does not travel: send its arguments, and call it where they arrive"
    return None


def _declaration_advice(value: Any) -> str | None:
    """Returns advice for a type that a declaration would make travel; None: no codec and no `message` is missing."""
    kind = type(value)
    for base in kind.__mro__[1:]:
        if codecs.codec_of(base) is not None:
            return f"{base.__name__} has a codec, but a codec is for exactly one type: tg.codec({kind.__name__}, ...)"
    if dataclasses.is_dataclass(kind):
        return f"decorate it with @tg.message: the dataclass {kind.__name__} is not declared"
    return None


def _array_advice(value: Any) -> str | None:
    """Returns advice for an array of a library that was not declared; None: it is none."""
    if not hasattr(type(value), "__dlpack__"):
        return None
    library = library_of(value)
    if library in ("numpy", "cupy"):
        return None
    return f"tg.arrays({library}) makes arrays of {library} travel" if library else "send np.from_dlpack(x)"


def _package_name(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _torch_advice(name: str, names: Set[str]) -> str | None:
    """Returns advice for a PyTorch object, by its class and that class's bases in torch; None: there is none."""
    makes = "import taskgraph.torch, which makes tensors travel"
    if name == "Tensor":
        return makes
    if names & {"device", "dtype", "layout", "memory_format"}:
        return "send its name, str(x)"
    if names & {"Module", "Optimizer", "LRScheduler"}:
        text = "send x.state_dict(), as snapshot() can, and x.load_state_dict() takes it back"
    elif "Generator" in names:
        text = "draw from epoch.rng, or in an elastic job from one with the seed part.seed; or send x.get_state()"
    elif "Parameter" in names:
        text = "send p.detach() of a parameter"
    elif "NestedTensor" in names:
        text = "send t.unbind(), its tensors"
    elif "Tensor" in names:
        text = "send t.as_subclass(torch.Tensor)"
    else:
        return None
    return text if "taskgraph.torch" in sys.modules else f"{makes}; {text}"


def _pandas_advice(value: Any) -> str | None:
    if type(value).__name__ == "NAType":
        return "send None, or float('nan')"
    if type(value).__name__ == "DataFrame":
        return _advise_encodable(
            value,
            (
                ("df.to_numpy()", lambda df: df.to_numpy()),
                ("df.to_dict('list')", lambda df: df.to_dict("list")),
                ("df.astype(str).to_dict('list')", lambda df: df.astype(str).to_dict("list")),
            ),
        )
    methods = ("to_datetime64", "to_timedelta64", "to_numpy", "tolist")
    return _advise_encodable(value, (*map(_method_candidate, methods), _AS_TEXTS)) or "send str(x)"


def _method_candidate(name: str) -> tuple[str, Callable[[Any], Any]]:
    return f"x.{name}()", lambda x: getattr(x, name)()


def _table_advice(value: Any) -> str | None:
    """Returns advice for a table or column of polars, pyarrow or xarray; None: there is none."""
    if hasattr(value, "collect"):
        return "send what x.collect() gives, as its columns"
    as_lists = ("df.to_dict(as_series=False)", lambda df: df.to_dict(as_series=False))
    methods = ("to_pydict", "to_pylist", "to_list", "to_numpy", "to_dict", "write_json")
    return _advise_encodable(value, (as_lists, *map(_method_candidate, methods), _AS_TEXTS))


def _library_advice(value: Any) -> str | None:
    """Returns advice for an object of a known package; None: it is none."""
    # Also for subclasses that users wrote: most are modules of PyTorch.
    if names := {base.__name__ for base in type(value).__mro__ if _package_name(base) == "torch"}:
        return _torch_advice(type(value).__name__, names)
    package = _package_name(type(value))
    if package == "pandas":
        return _pandas_advice(value)
    if package in ("polars", "pyarrow", "xarray"):
        return _table_advice(value)
    if package == "jax" and type(value).__name__ == "PRNGKeyArray":
        return "send jax.random.key_data(x), and jax.random.wrap_key_data() makes it one again where it arrives"
    if package in ("scipy", "cupyx"):
        return "send the arrays it is made of, e.g. (a.data, a.indices, a.indptr, a.shape)"
    if package == "datetime":
        return _advise_encodable(
            value,
            (
                ("np.datetime64(x)", np.datetime64),
                ("np.timedelta64(x)", np.timedelta64),
                _method_candidate("isoformat"),
                ("str(x)", str),
            ),
        )
    if package in ("decimal", "fractions", "uuid", "pathlib"):
        return f"send str(x), or declare tg.codec({type(value).__name__}, str, {type(value).__name__})"
    return None
