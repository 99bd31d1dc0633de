"""numpy dtypes as bytes and back, without pickle and without trusting what arrives."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

import numpy as np

from taskgraph.errors import DecodeError

__all__ = ["describe", "parse"]

_MAX_TEXT = 1 << 20


@lru_cache(maxsize=1024)
def describe(dtype: np.dtype[Any]) -> bytes:
    """A dtype as the text of a literal: `'<f8'`, or a tuple for structured and sub-array ones."""
    return repr(_plain(dtype)).encode("utf-8", "surrogatepass")


def _plain(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ("sub", _plain(base), tuple(int(n) for n in shape))
    if dtype.fields is not None and dtype.names is not None:
        fields = []
        for name in dtype.names:
            kind, offset, *title = dtype.fields[name]
            fields.append((name, _plain(kind), int(offset), title[0] if title else None))
        return ("rec", tuple(fields), dtype.itemsize, dtype.isalignedstruct)
    return dtype.str


@lru_cache(maxsize=1024)
def parse(data: bytes) -> np.dtype[Any]:
    """The dtype; raises DecodeError."""
    if len(data) > _MAX_TEXT:
        raise DecodeError(f"a dtype of {len(data)} bytes is none")
    try:
        dtype = _made(ast.literal_eval(data.decode("utf-8", "surrogatepass")))
    except (ValueError, TypeError, SyntaxError, KeyError, IndexError, RecursionError, MemoryError) as error:
        raise DecodeError(f"not a dtype: {data[:80]!r} ({error})") from error
    if dtype.hasobject:
        raise DecodeError("a dtype that holds Python objects does not travel")
    return dtype


def _made(plain: Any) -> np.dtype[Any]:
    if isinstance(plain, str):
        return np.dtype(plain)
    if plain[0] == "sub":
        return np.dtype((_made(plain[1]), plain[2]))
    if plain[0] == "rec":
        _, fields, itemsize, aligned = plain
        spec: dict[str, Any] = {
            "names": [f[0] for f in fields],
            "formats": [_made(f[1]) for f in fields],
            "offsets": [f[2] for f in fields],
            "itemsize": itemsize,
        }
        if any(f[3] is not None for f in fields):
            spec["titles"] = [f[3] for f in fields]
        made: np.dtype[Any] = np.dtype(spec, align=bool(aligned))  # type: ignore[call-overload]
        return made
    raise ValueError("unknown kind")
