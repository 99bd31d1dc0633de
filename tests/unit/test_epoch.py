"""What user code holds in its hands: how often it asks for what, and that it says what is wrong."""

from __future__ import annotations

import copy
import enum
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.channels import Inputs, Outputs
from taskgraph.device.api import Device
from taskgraph.epoch import Epoch, Scratch
from taskgraph.graph.compose import Composition
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded
from taskgraph.testing import compute


class Work:
    """`taskgraph.epoch.Work` of task 6 of 7 in a tree."""

    task = 6
    number = 3
    attempt = 1
    last = False
    seed = 0
    cancelled = False
    device: Device | None = None

    def __init__(self, links: dict[str, Any] | None = None) -> None:
        self.scratch = Scratch()
        self.topology = tg.tree() if links is None else tg.Topology(links)
        self.composing: Composition | None = Composition(self.task, self.number)
        self.asked: list[str] = []
        self.allocated: list[int] = []
        self.put_values: dict[tuple[str, int], Encoded] = {}

    def neighbors(self, link: str, task: int | None = None) -> tuple[int, ...]:
        self.asked.append(link)
        return self.topology.neighbors(link, self.task if task is None else task, 7, self.number)

    def links(self) -> tuple[str, ...]:
        return tuple(self.topology)

    def tasks(self) -> int:
        return 7

    def allocate(self, nbytes: int) -> None:
        self.allocated.append(nbytes)

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        self.put_values |= {(tag, consumer): value for consumer in consumers}

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        raise NotImplementedError

    request = wait_in_thread = hold = report = finish = flag  # type: ignore[assignment]


def no_op(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    pass


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(tg.GraphError) as caught:
        call()
    return str(caught.value)


def test_link_is_computed_once_in_compose() -> None:
    work = Work()
    epoch = Epoch(work, "compose")
    epoch.processor(no_op, inbound={"x": "parents"}, outbound={"x": "children"}, name="relay")
    epoch.processor(no_op, inbound={"x": "parents", "sum": "children"}, outbound={"sum": "parents"}, name="add")
    epoch.processor(no_op, inbound={"y": ["parents", 0]}, name="sync")
    assert work.asked == ["parents", "children", "parents"]
    assert work.composing is not None
    graph = work.composing.graph()
    relay, add, sync = graph.processors
    assert (relay.inbound, relay.outbound) == ({"x": (2,)}, {"x": ()})
    assert (add.inbound, add.outbound) == ({"x": (2,), "sum": ()}, {"sum": (2,)})
    assert (sync.inbound, sync.sync) == ({"y": (2, 0)}, True)
    assert graph.channels_in == (("x", 2), ("y", 2), ("y", 0))
    assert graph.channels_out == (("sum", 2),)


def test_processors_by_when_they_run() -> None:
    work = Work()
    epoch = Epoch(work, "compose")
    epoch.processor(no_op, name="sync")
    epoch.processor(no_op, outbound={"a": 6}, name="first")
    epoch.processor(no_op, outbound={"b": 6}, name="beside", parallel=True)
    epoch.processor(no_op, outbound={"c": 6}, name="second")
    assert work.composing is not None
    made = work.composing.graph()
    assert [p.name for p in made.processors] == ["sync", "first", "beside", "second"]
    assert [p.name for p in made.ordered] == ["first", "second"]
    assert [p.name for p in made.parallel] == ["beside"]
    assert [p.name for p in made.sync_points] == ["sync"]


def test_refused_processor_leaves_nothing() -> None:
    work = Work()
    epoch = Epoch(work, "compose")
    epoch.processor(no_op, outbound={"a": 6})
    assert "two processors are called 'no_op'" in refused(lambda: epoch.processor(no_op, inbound={"b": 1}))
    assert work.composing is not None
    graph = work.composing.graph()
    assert (len(graph.processors), graph.channels_in) == (1, ())


class Callee:
    def method(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass

    def __call__(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (no_op, "no_op"),
        (lambda epoch, ins, outs: None, "processor"),
        (Callee().method, "method"),
        (Callee(), "Callee"),
        (functools.partial(no_op), "no_op"),
        (functools.partial(functools.partial(Callee().method)), "method"),
    ],
)
def test_name_of_a_processor(function: Any, name: str) -> None:
    work = Work()
    Epoch(work, "compose").processor(function)
    assert work.composing is not None
    assert [p.name for p in work.composing.graph().processors] == [name]


def test_wrong_link_is_named() -> None:
    epoch = Epoch(Work(), "compose")
    assert refused(lambda: epoch.processor(no_op, inbound={"x": "friends"})) == (
        "task 6, epoch 3, compose: inbound 'x' names link 'friends', but the topology's links are: "
        "'parents', 'children'"
    )
    broken = Epoch(Work({"out": lambda i, n, e: [9]}), "compose")
    assert refused(lambda: broken.processor(no_op, inbound={"x": "out"})) == (
        "task 6: link 'out' names task 9, but the job has tasks 0 to 6"
    )


def test_link_named_by_a_processor() -> None:
    def work(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", 1, to="children")

    assert refused(lambda: compute(work)) == (
        "task 0, epoch 0: a processor alone has no topology: name tasks, and no links, or test it with tg.testing.run"
    )


def test_values_come_in_declared_order() -> None:
    work = Work()
    Epoch(work, "compose").processor(no_op, inbound={"x": [3, 1], "y": 5, "z": "children"})
    assert work.composing is not None
    (processor,) = work.composing.graph().processors
    items = {("x", 1): encode("one"), ("x", 3): encode("three"), ("y", 5): encode(np.zeros(2))}
    ins = Inputs(work, processor, items)
    assert list(ins.all(tg.Tag[str]("x")).items()) == [(3, "three"), (1, "one")]
    assert ins.all("z") == {}
    assert not ins["y"].flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        ins["y"].flags.writeable = True
    assert ("x" in ins, "z" in ins, "w" in ins, list(ins)) == (True, False, False, ["x", "y", "z"])
    start = "task 6, epoch 3, no_op: "
    assert refused(lambda: ins["x"]) == start + "'x' comes from 2 tasks (3, 1); use ins.all('x')"
    nobody = "'z' comes from no task: its link has no neighbor here; ask `if 'z' in ins` first, or use ins.all('z')"
    assert refused(lambda: ins["z"]) == start + nobody
    for ask in (lambda: ins["w"], lambda: ins.all("w")):
        assert refused(ask) == start + "no inbound channel 'w' is declared; inbound are: 'x', 'y', 'z'"


class Kind(str, enum.Enum):  # noqa: UP042 - a StrEnum is its value as text, this one is not
    GRAD = "grad"


@pytest.mark.parametrize(
    "tag", [Kind.GRAD, tg.Tag[int]("grad"), np.str_("grad"), 0, None, b"grad", ("grad", 1)], ids=repr
)
def test_tag_objects_and_texts_are_equal(tag: Any) -> None:
    """Also one that is no plain text: its text is its name."""
    work = Work()
    Epoch(work, "compose").processor(no_op, inbound={tag: 5}, outbound={tag: 5})
    assert work.composing is not None
    (processor,) = work.composing.graph().processors
    outs = Outputs(work, processor)
    outs.put(tag, 1)
    ins = Inputs(work, processor, work.put_values)
    assert tag in ins
    assert ins[tag] == 1
    assert ins.all(tag) == {5: 1}
    assert "other" not in ins


def test_every_channel_is_put_once() -> None:
    work = Work()
    Epoch(work, "compose").processor(no_op, outbound={"x": [3, 1], "y": 5})
    assert work.composing is not None
    (processor,) = work.composing.graph().processors
    outs = Outputs(work, processor)
    value = np.zeros(2)
    outs.put("x", value, to=1)
    value += 1
    start = "task 6, epoch 3, no_op: "
    assert "returned without putting 'x' to task 3, 'y' to task 5; every" in refused(outs.close)
    assert start + "channel 'x' to task 1 was put twice" in refused(lambda: outs.put("x", 0))
    assert refused(lambda: outs.put("y", 0, to=[3])) == start + "channel 'y' does not lead to task 3; it leads to: 5"
    outs.put("x", value, to=3)
    outs.empty("y", 3).fill(7)
    filled = start + "channel 'y' to task 5 has an array of outs.empty already, which is sent as it is when the"
    assert filled in refused(lambda: outs.put("y", 0))
    assert filled in refused(lambda: outs.empty("y", 3, to=5))
    outs.close()
    assert {channel: list(decode(item)) for channel, item in work.put_values.items()} == {
        ("x", 1): [0, 0],
        ("x", 3): [1, 1],
        ("y", 5): [7, 7, 7],
    }


@pytest.mark.parametrize("shape", [3, (2, 3), (), 0, (2, 0), np.int64(3), (np.int64(2), 1), [2, 3]])
def test_empty_array_has_its_shape(shape: Any) -> None:
    work = Work()
    Epoch(work, "compose").processor(no_op, outbound={"x": 5})
    assert work.composing is not None
    array = Outputs(work, work.composing.graph().processors[0]).empty("x", shape, "<i2")
    assert (array.shape, array.dtype) == (np.empty(shape).shape, np.dtype("<i2"))


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((3,), object, "<class 'object'>): arrays of object cannot travel: only what numpy holds as bytes can"),
        ((3,), [("a", object)], "cannot travel"),
        ((-1,), float, "negative"),
        ("a", float, "outs.empty('x', 'a', <class 'float'>): "),
        (3, "zz", "zz"),
    ],
)
def test_bad_empty_array_is_refused(shape: Any, dtype: Any, text: str) -> None:
    work = Work()
    Epoch(work, "compose").processor(no_op, outbound={"x": 5})
    assert work.composing is not None
    outs = Outputs(work, work.composing.graph().processors[0])
    with pytest.raises(tg.ValueNotEncodable, match=r"^task 6, epoch 3, no_op: outs.empty\('x', ") as caught:
        outs.empty("x", shape, dtype)
    assert text in str(caught.value)
    outs.put("x", 0)  # it counts as not put


def test_large_empty_array_takes_shared_memory() -> None:
    work = Work()
    Epoch(work, "compose").processor(no_op, outbound={"x": 5, "y": 5})
    assert work.composing is not None
    outs = Outputs(work, work.composing.graph().processors[0])
    outs.empty("x", 8191)
    assert work.allocated == []
    outs.empty("y", 8192)
    assert work.allocated == [8 * 8192]
    outs.close()
    assert [len(work.put_values[(tag, 5)].buffers) for tag in ("x", "y")] == [0, 1]


def test_input_is_passed_on_unchanged() -> None:
    work = Work()
    Epoch(work, "compose").processor(
        no_op, inbound={"x": 1, "small": 1}, outbound=dict.fromkeys(("same", "part", "shaped", "small", "other"), 5)
    )
    assert work.composing is not None
    (processor,) = work.composing.graph().processors
    came = encode(np.arange(100_000.0))
    ins = Inputs(work, processor, {("x", 1): came, ("small", 1): encode(np.zeros(2))})
    outs = Outputs(work, processor, ins)
    x = ins["x"]
    outs.put("same", x)
    outs.put("part", x[1:])
    outs.put("small", ins["small"])
    outs.put("other", x.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy 2.5: that it can be done at all
        x.shape = (100, 1000)
    outs.put("shaped", x)
    outs.close()
    assert work.put_values[("same", 5)] is came
    values = {tag: decode(item) for (tag, _), item in work.put_values.items()}
    assert values["part"].shape == (99_999,) and values["shaped"].shape == (100, 1000)
    assert np.array_equal(values["other"], np.arange(100_000.0)) and values["small"].shape == (2,)
    assert work.put_values[("shaped", 5)].digest != came.digest == work.put_values[("other", 5)].digest


def test_reshaped_input_is_encoded_anew() -> None:
    """It has the shape and the dtype that it had: only how it lies in memory differs."""
    work = Work()
    Epoch(work, "compose").processor(no_op, inbound={"x": 1}, outbound={"turned": 5})
    assert work.composing is not None
    (processor,) = work.composing.graph().processors
    square = np.arange(90_000.0).reshape(300, 300)
    ins = Inputs(work, processor, {("x", 1): encode(square)})
    outs = Outputs(work, processor, ins)
    x = ins["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy 2.4: that it can be done at all
        x.strides = x.strides[::-1]
    outs.put("turned", x)
    outs.close()
    assert np.array_equal(decode(work.put_values[("turned", 5)]), square.T)


def test_outs_kept_too_long() -> None:
    work = Work()
    Epoch(work, "compose").processor(no_op, outbound={"x": [1, 2]})
    assert work.composing is not None
    (processor,) = work.composing.graph().processors
    outs = Outputs(work, processor)
    outs.put("x", 0)
    outs.close()
    said = refused(lambda: outs.put("x", 0))
    assert "epoch 3, no_op: a put into channel 'x' after the processor returned" in said and "twice" not in said


@pytest.mark.parametrize("name", [3, None, b"x"])
def test_tag_must_be_text(name: Any) -> None:
    with pytest.raises(tg.JobError, match="a tag is a text"):
        tg.Tag(name)
    grad = tg.Tag[np.ndarray]("grad")
    assert type(pickle.loads(pickle.dumps(grad))) is tg.Tag and copy.copy(grad) == "grad"
