"""Types that users declare: messages, codecs, protobuf."""

from __future__ import annotations

import collections
import dataclasses
import enum
import subprocess
import sys
import types
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, timestamp_pb2

from taskgraph.errors import DecodeError, JobError, ValueNotEncodable
from taskgraph.graph import codecs
from taskgraph.graph.values import codec, decode, encode, message


@message
class Plain:
    """No dataclass of its own: the decorator makes it one."""

    w: Any
    n: int = 3


@message
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    key: str
    extra: tuple[int, ...] = ()


@message
class Child(Plain):
    more: float = 0.5


class NotDeclared(Plain):
    pass


@message(name="tests.Renamed")
@dataclasses.dataclass
class Derived:
    x: int
    double: int = dataclasses.field(init=False)
    seen: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.x
        self.lock = "made where it arrives"


@message
class Strict:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("negative")


def test_a_message_arrives_as_it_was() -> None:
    value = Plain(w=[np.arange(3.0), Frozen(key="a", extra=(1, 2))], n=-1)
    back = decode(encode(value))
    assert type(back) is Plain
    assert back.n == -1
    assert np.array_equal(back.w[0], np.arange(3.0))
    assert back.w[1] == value.w[1]
    assert type(back.w[1]) is Frozen


def test_a_message_as_a_key() -> None:
    assert decode(encode({Frozen(key="k"): 1})) == {Frozen(key="k"): 1}


def test_subclasses_are_declared_on_their_own() -> None:
    assert decode(encode(Child(w=1, more=2.5))) == Child(w=1, more=2.5)
    with pytest.raises(ValueNotEncodable, match=r"decorate it with @tg\.message"):
        encode(NotDeclared(w=1))


def test_an_ordered_dict_arrives_as_one() -> None:
    value = collections.OrderedDict(b=[1], a=collections.OrderedDict())
    back = decode(encode(value))
    assert (type(back), type(back["a"]), list(back)) == (collections.OrderedDict, collections.OrderedDict, ["b", "a"])
    assert back == value


def test_post_init_does_not_change_fields() -> None:
    value = Derived(2)
    value.double, value.seen = 5, 9
    back = decode(encode(value))
    assert (back.x, back.double, back.seen, back.lock) == (2, 5, 9, "made where it arrives")


@message
@dataclasses.dataclass
class Growing:
    """Its constructor changes what it is given."""

    items: list[Any]
    w: Any
    inner: Any = None

    def __post_init__(self) -> None:
        self.items.append(0)
        if self.w.flags.writeable:
            self.w += 1


@message
class ByHand:
    items: list[int]

    def __init__(self, items: list[int]) -> None:
        items.sort()
        self.items = items


@pytest.mark.parametrize("writable", [False, True])
def test_post_init_that_changes_in_place(writable: bool) -> None:
    value = [Growing([1], np.zeros(3), Growing([np.ones(20_000)], np.arange(9000.0))), np.full(1000, 7.0)]
    back, after = decode(encode(value), writable=writable)
    assert back.items == [1, 0]
    assert back.w.tolist() == [1, 1, 1]
    assert len(back.inner.items) == 2
    assert np.array_equal(back.inner.items[0], np.ones(20_000))
    assert np.array_equal(back.inner.w, np.arange(9000.0) + 1)
    assert np.array_equal(after, np.full(1000, 7.0))


def test_own_init_that_changes_in_place() -> None:
    value = ByHand([2, 1])
    value.items.reverse()
    assert decode(encode(value)).items == [2, 1]


def test_a_message_that_refuses_what_came() -> None:
    value = Strict(1)
    value.x = -1
    with pytest.raises(DecodeError, match=r"message 'Strict' cannot be made.*negative"):
        decode(encode(value))


def test_two_classes_of_one_name() -> None:
    namespace = {"__module__": "another.module", "__qualname__": "Plain", "__annotations__": {"w": int}}
    with pytest.raises(JobError, match=r"two messages are called 'Plain'.*name='\.\.\.'"):
        message(type("Plain", (), namespace))
    assert codecs.message_named("Plain").type is Plain


def test_one_class_of_the_source_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is `__main__` here and a module there; a cell of a notebook is run again."""
    for name in ("__fake_main__", "fake_driver"):
        module = types.ModuleType(name)
        module.__file__ = "/somewhere/driver.py"
        monkeypatch.setitem(sys.modules, name, module)
    one, other = (
        message(type("Twice", (), {"__module__": m, "__annotations__": {"x": int}}))
        for m in ("__fake_main__", "fake_driver")
    )
    assert encode(one(1)).digest == encode(other(1)).digest
    assert type(decode(encode(one(1)))) is other


def test_main_and_imported_driver_agree(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        "from taskgraph.graph.values import encode, message\n"
        "@message\n"
        "class Point:\n    x: int\n    y: float = 1.5\n"
        "print(encode({'p': Point(3)}).digest.hex())\n"
    )
    root = str(Path(__file__).parents[3])
    commands = [str(driver)], ["-c", "import driver"]
    digests = {
        subprocess.run(
            [sys.executable, *command],
            env={"PYTHONPATH": f"{root}:{tmp_path}", "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command, seed in zip(commands, ("1", "2"), strict=True)
    }
    assert len(digests) == 1


def test_class_not_callable_with_fields() -> None:
    with pytest.raises(JobError, match="cannot be called with its fields"):

        @message
        class Odd:
            x: int
            factor: dataclasses.InitVar[int]

    with pytest.raises(JobError, match="cannot be called with its fields"):

        @message
        @dataclasses.dataclass
        class Own:
            x: int

            def __init__(self) -> None:
                self.x = 1


class Place(NamedTuple):
    x: int


class Kind(enum.Enum):
    A = 1


class Number(int):
    pass


class OwnInit:
    def __init__(self) -> None:
        self.a = 1


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (int, "int travels as it is: remove @tg.message"),
        (np.ndarray, "ndarray travels as it is"),
        (Place, r"Place is another kind of class: tg.codec\(Place, encode, decode\)"),
        (Kind, "Kind is another kind of class"),
        (Number, "Number is another kind of class"),
        (OwnInit, "OwnInit declares no fields, so nothing of it would travel: annotate them"),
        (lambda: 1, "goes on a class, not on <function"),
        (5, "goes on a class, not on 5"),
        (range, "range cannot be a dataclass"),
        ({}, "goes on a class, not on {}"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_class_that_cannot_be_dataclass(target: Any, complaint: str) -> None:
    with pytest.raises(JobError, match=complaint):
        message(target)


def test_a_message_without_fields() -> None:
    @message
    class Stop:
        pass

    assert decode(encode(Stop())) == Stop()


def test_a_message_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(Plain(w=1))
    known = codecs._messages[Plain]
    for fields in (("w",), ("w", "m")):
        monkeypatch.setitem(codecs._messages_by_name, "Plain", dataclasses.replace(known, fields=fields))
        with pytest.raises(DecodeError, match="message 'Plain' came with"):
            decode(encoded)


class Matrix:
    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Sub(Matrix):
    pass


codec(Matrix, lambda m: {"rows": m.rows}, lambda d: Matrix(d["rows"]))
codec(uuid.UUID, str, uuid.UUID)


def test_a_codec() -> None:
    back = decode(encode([Matrix(np.eye(100)), uuid.UUID(int=5)]))
    assert type(back[0]) is Matrix
    assert np.array_equal(back[0].rows, np.eye(100))
    assert back[1] == uuid.UUID(int=5)


def test_a_codec_is_for_one_type() -> None:
    with pytest.raises(ValueNotEncodable, match=r"tg\.codec\(Sub, \.\.\.\)"):
        encode(Sub(1))


def test_the_path_leads_through_a_codec() -> None:
    with pytest.raises(ValueNotEncodable, match=r" at \[0\]\.<codec Matrix>\['rows'\] cannot travel"):
        encode([Matrix({1})])


def test_a_codec_that_raises() -> None:
    with pytest.raises(DecodeError, match="codec 'Matrix' cannot decode what came: KeyError"):
        decode(encode_as(Matrix, {}))

    class Broken:
        pass

    codec(Broken, lambda x: 1 // 0, lambda x: x, name="tests.Broken")
    with pytest.raises(ZeroDivisionError):
        encode(Broken())


def encode_as(cls: type, inner: Any) -> Any:
    """What a codec of `cls` would give that encodes as `inner`."""
    known = codecs._codecs[cls]
    codecs._codecs[cls] = dataclasses.replace(known, encode=lambda _: inner)
    try:
        return encode(cls.__new__(cls))
    finally:
        codecs._codecs[cls] = known


@pytest.mark.parametrize(
    ("value", "name", "said"),
    [
        (Plain(w=1), b"Plain", r"no @tg\.message is called 'xxxxx' here"),
        (Matrix(1), b"Matrix", "no codec is called 'xxxxxx' here"),
        (
            timestamp_pb2.Timestamp(),
            b"Timestamp",
            r"no protobuf message is called 'google\.protobuf\.x{9}' here: import",
        ),
    ],
    ids=["message", "codec", "protobuf"],
)
def test_unknown_names(value: Any, name: bytes, said: str) -> None:
    encoded = encode(value)
    with pytest.raises(DecodeError, match=said):
        decode(type(encoded)(encoded.meta.replace(name, b"x" * len(name)), (), b""))


@pytest.mark.parametrize("given", [(3, str, str), (Matrix, str, None), (Matrix, "encode", str)])
def test_what_is_no_codec(given: Any) -> None:
    with pytest.raises(JobError, match="takes a class and two functions"):
        codec(*given)


def test_codecs_that_do_not_fit() -> None:
    with pytest.raises(JobError, match="travels without a codec"):
        codec(dict, list, dict)
    with pytest.raises(JobError, match="travels without a codec"):
        codec(Plain, lambda p: p.w, Plain)
    with pytest.raises(JobError, match="two types have a codec called 'Matrix'"):
        codec(Sub, lambda s: s.rows, Sub, name="Matrix")
    with pytest.raises(JobError, match="has a codec already"):
        message(Matrix)


def test_protobuf() -> None:
    value = struct_pb2.Struct()
    value.update({f"k{n}": n for n in range(50)})
    big = struct_pb2.Value(string_value="x" * 10_000)
    back = decode(encode([value, big, timestamp_pb2.Timestamp()]))
    assert back[0] == value
    assert type(back[0]) is struct_pb2.Struct
    assert back[1] == big
    assert back[2] == timestamp_pb2.Timestamp()


def test_protobuf_map_is_deterministic() -> None:
    one, other = struct_pb2.Struct(), struct_pb2.Struct()
    one.update({"a": 1, "b": 2})
    other.update({"b": 2, "a": 1})
    assert encode(one).digest == encode(other).digest


def test_protobuf_message_of_own_pool() -> None:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(descriptor_pb2.FileDescriptorProto(name="own.proto", message_type=[{"name": "TestsOwn"}]))
    own = message_factory.GetMessageClass(pool.FindMessageTypeByName("TestsOwn"))
    with pytest.raises(ValueNotEncodable, match="default pool"):
        encode(own())


def test_dict_changed_during_encoding() -> None:
    class Growing:
        """Its codec does what another thread may do meanwhile."""

    def encoded(_: Growing) -> int:
        growing[len(growing)] = 0
        return 7

    codec(Growing, encoded, lambda seven: seven, name="tests.Growing")
    growing: dict[int, Any] = {0: Growing(), 1: 1}
    assert decode(encode(growing)) == {0: 7, 1: 1}
    assert len(growing) == 3
