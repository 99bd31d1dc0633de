"""What cannot travel is refused at once: what it is, where it sits, and the way out."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import pathlib
import random
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from taskgraph.errors import JobError, ValueNotEncodable
from taskgraph.graph import encoding
from taskgraph.graph.values import decode, encode, message


class Pair(NamedTuple):
    x: int
    y: int


class Color(enum.IntEnum):
    RED = 1


class Count(int):
    pass


class Name(str):
    pass


class Other:
    pass


class Mine(np.float64):
    pass


@dataclasses.dataclass
class Undeclared:
    w: int


def refused(value: Any, what: str = "channel 'grad' of task 3") -> str:
    with pytest.raises(ValueNotEncodable) as caught:
        encode(value, what=what)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "named", "way_out"),
    [
        (bytearray(b"x"), "bytearray", "bytes(x)"),
        (memoryview(b"x"), "memoryview", "bytes(x)"),
        ({1, 2}, "type set", "sorted(x)"),
        (frozenset(), "frozenset", "sorted(x)"),
        (Pair(1, 2), "Pair", "tuple(x)"),
        (Color.RED, "Color", "x.value"),
        (Count(1), "Count", "int(x)"),
        (Name("x"), "Name", "str(x)"),
        (collections.Counter(), "Counter", "dict(x)"),
        (collections.defaultdict(int), "defaultdict", "dict(x)"),
        (range(3), "range", "list(x)"),
        (io.StringIO(), "_io.StringIO", "in the function of an elastic job, and leave it out of the state"),
        ((n for n in ()), "generator", "list(x)"),
        ({1: 2}.keys(), "dict_keys", "list(x)"),
        ({1: 2}.values(), "dict_values", "list(x)"),
        ({1: 2}.items(), "dict_items", "list(x)"),
        (types.MappingProxyType({}), "mappingproxy", "dict(x)"),
        (types.SimpleNamespace(a=1), "types.SimpleNamespace", "vars(x)"),
        (array.array("d"), "array.array", "np.array(x)"),
        (KeyError("x"), "KeyError", "str(x)"),
        (len, "builtin_function_or_method", "code does not travel"),
        (refused, "function", "code does not travel"),
        (Other().__eq__, "method-wrapper", "code does not travel"),
        (functools.partial(len), "functools.partial", "code does not travel"),
        (np.add, "numpy.ufunc", "code does not travel"),
        (np.polynomial.Polynomial([1, 2]), "Polynomial", "tg.codec(type, encode, decode)"),
        (Other, "type", "the class Other itself"),
        (Other(), "Other", "tg.codec(type, encode, decode)"),
        (Undeclared(1), "Undeclared", "decorate it with @tg.message"),
        (datetime.datetime(2020, 1, 1), "datetime.datetime", "isoformat()"),
        (decimal.Decimal(1), "decimal.Decimal", "str(x)"),
        (pathlib.PurePosixPath("/"), "PurePosixPath", "str(x)"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray", "np.ma.getmaskarray(a)"),
        (np.ma.masked, "MaskedConstant", "np.ma.getmaskarray(a)"),
        (np.rec.array([(1, 2)], dtype=[("a", int), ("b", int)]), "recarray", "np.asarray(a)"),
        (np.array([{}], object), "ndarray", "dtype object"),
        (np.array([(1, None)], [("a", int), ("b", object)]), "ndarray", "a.tolist()"),
        (np.array([(1, None)], [("a", int), ("b", object)])[0], "numpy.void", "a.tolist()"),
        (np.zeros(1, np.dtype([((3, "a"), "f8")])), "ndarray", "a title that is not a text"),
        (Mine(1), "Mine", "x.item()"),
        (np.random.default_rng(), "Generator", "epoch.rng, or in an elastic job from one with the seed part.seed"),
        (np.random.default_rng(), "Generator", "x.bit_generator.state"),
        (random.Random(1), "random.Random", "x.getstate()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_way_out_for_each_kind(value: Any, named: str, way_out: str) -> None:
    text = refused(value)
    assert text.startswith("channel 'grad' of task 3: a value of type ")
    assert named in text
    assert way_out in text


@pytest.mark.parametrize("offset", [0, 8], ids=["dense", "with a gap"])
def test_records_with_own_scalar_class(offset: int) -> None:
    fields = {"names": ["a", "b"], "formats": ["f8", "i4"], "offsets": [offset, 16], "itemsize": 24}
    records = np.zeros(3, np.dtype((of("mine", "Row", np.void), fields)))
    records["a"] = [1, 2, 3]
    for value in (records, records[1]):
        assert "its dtype makes scalars of Row: send a.view((np.void, a.dtype))" in refused(value)
        arrived = decode(encode(value.view((np.void, value.dtype))))
        assert np.array_equal(arrived["a"], value["a"])
        assert arrived.dtype.fields == value.dtype.fields


def of(module: str, name: str, *bases: type, **members: Any) -> type:
    """A class as another package has it."""
    return type(name, bases, {"__module__": module, **members})


MODULE = of("torch.nn", "Module")
TENSOR = of("torch", "Tensor")


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        (MODULE, "send x.state_dict()"),
        (of("__main__", "Net", MODULE), "send x.state_dict()"),
        (of("torch.optim", "SGD", of("torch.optim", "Optimizer")), "send x.state_dict()"),
        (of("torch", "Generator"), "x.get_state()"),
        (of("torch", "dtype"), "str(x)"),
        (of("torch.nn", "Parameter", TENSOR), "p.detach()"),
        (of("torch.nested", "NestedTensor", TENSOR), "t.unbind()"),
        (of("torch.masked", "MaskedTensor", TENSOR), "t.as_subclass(torch.Tensor)"),
        (of("torch", "Stream"), "tg.codec(type, encode, decode)"),
        (of("jax._src.random.prng", "PRNGKeyArray"), "jax.random.key_data(x)"),
        (of("pandas.api.typing", "NAType"), "None, or float('nan')"),
        (of("pandas", "Period"), "str(x)"),
        (of("polars.lazyframe.frame", "LazyFrame", collect=None), "x.collect()"),
        (of("pyarrow.lib", "Table", to_pydict=lambda x: {}), "x.to_pydict()"),
        (of("pyarrow.lib", "Int64Array", to_pylist=lambda x: [], __dlpack__=None), "x.to_pylist()"),
        (of("pyarrow", "Buffer"), "tg.codec(type, encode, decode)"),
        (of("xarray", "DataArray", to_numpy=lambda x: np.zeros(1)), "x.to_numpy()"),
        (of("collections", "deque", collections.deque), "list(x)"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.parametrize("imported", [False, True])
def test_way_out_for_other_packages(kind: type, way_out: str, imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that is PyTorch's one was told to import what makes tensors travel, imported or not."""
    monkeypatch.delitem(sys.modules, "taskgraph.torch", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "taskgraph.torch", sys)
    text = refused(kind())
    assert way_out in text
    tensors = kind.__name__ in ("Net", "Module", "SGD", "Generator", "Parameter", "NestedTensor", "MaskedTensor")
    assert ("import taskgraph.torch" in text) is (tensors and not imported)


def test_way_out_for_tensor() -> None:
    assert refused(TENSOR()).endswith("cannot travel; import taskgraph.torch, which makes tensors travel")


def test_np_matrix_is_refused() -> None:
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1]])
    assert "np.asarray(a)" in refused(matrix)


def test_text_kept_elsewhere_is_refused() -> None:
    assert "a.astype('U')" in refused(np.array(["x"], np.dtypes.StringDType()))


def test_a_dataframe_is_told_its_arrays() -> None:
    pandas = pytest.importorskip("pandas")
    assert "df.to_numpy()" in refused(pandas.DataFrame({"a": [1]}))


@message
class Stage:
    w: Any


def test_the_path_leads_to_the_culprit() -> None:
    assert " at ['theta'][2].w cannot travel" in refused({"n": 1, "theta": [0, 1, Stage(w={1})]})
    assert " at [3][0] cannot travel" in refused({3: ({1},)})
    assert " at (in the key [<frozenset>]) cannot travel" in refused({frozenset(): 2})
    assert " at [0] (in the key [<tuple>])[1] cannot travel" in refused([{(1, Color.RED): 2}])
    assert " at " not in refused({1})


def test_long_keys_in_messages() -> None:
    assert len(refused({"k" * 10_000: {1}})) < 300
    assert "[<int>]" in refused({10**5000: {1}})


def test_what_contains_itself_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    assert "does it contain itself?" in refused(cycle)
    assert len(refused(cycle)) < 400


def test_limit_of_nesting() -> None:
    from taskgraph.graph.values import decode

    deep: Any = 0
    for _ in range(encoding.MAX_DEPTH):
        deep = [deep]
    assert decode(encode(deep)) == deep
    assert "nested more than" in refused([deep])


def test_nearly_full_stack() -> None:
    deep: Any = 0
    for _ in range(encoding.MAX_DEPTH):
        deep = (deep,)

    def down(left: int) -> str:
        return down(left - 1) if left else refused(deep)

    depth = 0
    frame = sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    assert "stack" in down(sys.getrecursionlimit() - depth - 75)


def test_limit_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MAX_PARTS", 10_000)
    doubled: Any = 0
    for _ in range(50):
        doubled = [doubled, doubled]
    assert "what is shared only once" in refused(doubled)


def test_a_message_with_a_field_never_set() -> None:
    half = Stage.__new__(Stage)
    assert "field 'w' was never set" in refused([half])


def test_it_is_the_jobs_fault() -> None:
    assert issubclass(ValueNotEncodable, JobError)
    assert refused({1}, what="").startswith("a value of type set")
