"""Arrays of other libraries travel once they are declared: with a strict implementation of the array API."""

from __future__ import annotations

import types
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice

import taskgraph as tg
from taskgraph.device import lookup
from taskgraph.errors import DecodeError, JobError, ValueNotEncodable
from taskgraph.graph import codecs, libraries
from taskgraph.graph.values import decode, encode

Array = type(strict.asarray(0.0))


@pytest.fixture
def undeclared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where no driver has declared anything."""
    monkeypatch.setattr(libraries, "_codecs_by_library", {})
    monkeypatch.setattr(codecs, "_codecs", dict(codecs._codecs))
    codecs._codecs.pop(Array, None)
    monkeypatch.setattr(codecs, "bind", codecs._codecs.__setitem__)
    monkeypatch.setattr(codecs, "_codecs_by_name", {})
    monkeypatch.setattr(codecs, "codec_of", codecs._codecs.get)
    monkeypatch.setattr(codecs, "codec_named", codecs._codecs_by_name.get)


@pytest.fixture
def declared(undeclared: None) -> None:
    tg.arrays(strict)


NAMES = ["bool", "int8", "uint16", "int64", "uint64", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (60, 70)])
def test_every_dtype_arrives_as_what_it_was(declared: None, dtype: str, shape: tuple[int, ...]) -> None:
    host = (np.arange(int(np.prod(shape))).reshape(shape) % 2).astype(dtype)
    sent = strict.asarray(host.copy())
    arrived = decode(encode({"x": [sent]}))["x"][0]
    assert type(arrived) is Array
    assert arrived.dtype == sent.dtype and arrived.shape == shape
    assert np.array_equal(np.from_dlpack(arrived), host)


@pytest.mark.parametrize("shape", [(3,), (1000, 2)])
def test_sides_share_no_memory(declared: None, shape: tuple[int, ...]) -> None:
    sent = strict.zeros(shape)
    encoded = encode(sent)
    sent[0, ...] = 7.0
    one, other = decode(encoded), decode(encoded)
    one[0, ...] = 5.0
    assert not bool(strict.any(other != 0.0))
    restored = decode(encoded, writable=True)
    restored[0, ...] = 3.0
    assert not bool(strict.any(decode(encoded) != 0.0))


def test_a_view_that_is_not_in_order_travels(declared: None) -> None:
    sent = strict.reshape(strict.arange(12.0), (3, 4))
    arrived = decode(encode(strict.permute_dims(sent, (1, 0))[1:, :]))
    assert np.array_equal(np.from_dlpack(arrived), np.arange(12.0).reshape(3, 4).T[1:])


@pytest.mark.parametrize("writable", [False, True])
def test_a_state_comes_back_as_it_lay(declared: None, writable: bool) -> None:
    """Read-only, as where reports are put into a boundary, it came back in C's order, and without its gaps."""
    whole = strict.reshape(strict.arange(12_000.0), (100, 120))
    for sent in (strict.permute_dims(whole, (1, 0)), whole[:, ::2], whole[:, 7]):
        encoded = encode(sent, ordered=True)
        came = decode(encoded, writable=writable)
        assert np.array_equal(np.from_dlpack(came), np.from_dlpack(sent))
        assert encode(came, ordered=True).digest == encoded.digest


def test_equal_arrays_have_equal_digests(declared: None) -> None:
    first = encode(strict.arange(9)).digest
    assert encode(strict.arange(9)).digest == first
    assert encode(strict.arange(9, dtype=strict.int32)).digest != first


def test_undeclared_library(undeclared: None) -> None:
    with pytest.raises(ValueNotEncodable, match=r"\['w'\] cannot travel; tg.arrays\(array_api_strict\) makes arrays"):
        encode({"w": strict.zeros(3)})
    tg.arrays(strict)
    assert type(decode(encode({"w": strict.zeros(3)}))["w"]) is Array


def test_decode_of_undeclared_library(declared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(strict.zeros(3))
    monkeypatch.setattr(codecs, "codec_named", {}.get)
    with pytest.raises(DecodeError, match="'arrays of array_api_strict' here"):
        decode(encoded)


class Foreign:
    """An array that says of itself what a test wants."""

    def __init__(self, kind: int, library: str = "", fails: Exception | None = None) -> None:
        self.kind, self.fails = kind, fails
        self.library = library

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **_: Any) -> Any:
        assert self.fails is not None
        raise self.fails

    def __array_namespace__(self) -> Any:
        return types.ModuleType(self.library)


def library(name: str, **attributes: Any) -> types.ModuleType:
    found = types.ModuleType(name)
    vars(found).update(attributes)
    return found


def test_unreadable_device(declared: None) -> None:
    tg.arrays(library("foreign", from_dlpack=np.from_dlpack))
    with pytest.raises(ValueNotEncodable, match=r"on a device \(DLPack's kind 14\).* copy it to the host"):
        encode([Foreign(14, "foreign")])


class OnSoft(Foreign):
    """A library's array on a device in software, which says that it is CUDA's."""

    def __init__(self, there: SoftArray) -> None:
        super().__init__(2, "foreign")
        self.there = there

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.there.dtype


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("size", [3, 10_000])
def test_library_array_on_device(declared: None, monkeypatch: pytest.MonkeyPatch, stays: bool, size: int) -> None:
    soft = SoftDevice()
    monkeypatch.setitem(lookup._readers, 2, lambda value: value.there)
    tg.arrays(library("foreign", from_dlpack=lambda a: OnSoft(a) if isinstance(a, SoftArray) else a))
    given = soft.xp.arange(float(size))
    encoded = encode({"x": OnSoft(given)}, stays=stays)
    given += 1
    back = [decode(encoded, device=soft)["x"] for _ in range(2)]
    assert [type(one) for one in back] == [OnSoft, OnSoft]
    back[0].there += 1
    assert np.array_equal(back[1].there.get(), np.arange(float(size)))
    assert encoded.digest == encode({"x": OnSoft(soft.xp.arange(float(size)))}).digest
    if not stays:
        assert np.array_equal(decode(encoded)["x"], np.arange(float(size))), "on a node without a device"


def test_what_cannot_be_read_is_refused(declared: None) -> None:
    tg.arrays(library("foreign", from_dlpack=np.from_dlpack))
    with pytest.raises(ValueNotEncodable, match=r"it cannot be read \(no bfloat16\)"):
        encode([Foreign(1, "foreign", BufferError("no bfloat16"))])


def test_array_without_namespace() -> None:
    class Nameless:
        def __dlpack__(self) -> Any:
            raise AssertionError

    with pytest.raises(ValueNotEncodable, match=r"send np\.from_dlpack"):
        encode(Nameless())


def test_library_changes_dtype(declared: None) -> None:
    narrow = library("foreign", from_dlpack=lambda array: array.astype("f4"))
    tg.arrays(narrow)
    inner = codecs.codec_named("arrays of foreign")
    assert inner is not None
    with pytest.raises(ValueError, match="foreign makes float32 of float64 here"):
        inner.decode(np.zeros(3))
    with pytest.raises(ValueError, match="came as str"):
        inner.decode("x")


def test_library_without_dlpack_export(declared: None) -> None:
    """As array_api_strict does over numpy before 2.1, where memory that came by DLPack is read-only."""
    stuck = Foreign(1, "foreign", BufferError("Cannot export readonly array"))
    tg.arrays(library("foreign", from_dlpack=lambda array: stuck, asarray=strict.asarray))
    inner = codecs.codec_named("arrays of foreign")
    assert inner is not None
    found = inner.decode(np.arange(3.0))
    assert type(found) is Array
    found[0] = 7.0
    assert np.array_equal(np.from_dlpack(found), [7.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("namespace", "said"),
    [(np, "numpy travel as they are"), (types, "no namespace of the array API"), (3, "tg.arrays\\(3\\)")],
)
def test_what_is_no_other_library_is_refused(namespace: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        tg.arrays(namespace)
