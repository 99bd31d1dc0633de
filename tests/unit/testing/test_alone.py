"""`tg.testing.compute` runs one processor as a job would."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.errors import GraphError


def passes_on(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    outs.put("out", ins["cfg"])


def passes_all(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    outs.put("out", [list(pair) for pair in ins.all("cfg").items()])


def splits(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    outs.put("x", 10, to=1)
    outs.empty("x", 2, to=[2, 0])[:] = 7
    outs.put("y", 5)


@pytest.mark.parametrize("value", [{"lr": 0.1}, {"lr": 0.1, "b": 2}, {1: "a", "b": 2}, {True: 1}, [1], None])
def test_dict_with_int_keys_is_by_producer(value: Any) -> None:
    assert tg.testing.compute(passes_on, ins={"cfg": value}) == {"out": value}
    assert tg.testing.compute(passes_on, ins={"cfg": {3: value}}) == {"out": value}


def test_of_several_producers_each_has_its_value() -> None:
    assert tg.testing.compute(passes_all, ins={"cfg": {4: "a", 1: {5: 6}}}) == {"out": [[4, "a"], [1, {5: 6}]]}
    assert tg.testing.compute(passes_on, ins={"cfg": {0: {5: 6}}}) == {"out": {5: 6}}


def test_empty_dict_is_a_link_without_neighbors() -> None:
    def asks(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("out", ("cfg" in ins, ins.all("cfg")))

    assert tg.testing.compute(asks, ins={"cfg": {}}) == {"out": (False, {})}
    assert tg.testing.compute(passes_on, ins={"cfg": {0: {}}}) == {"out": {}}
    with pytest.raises(GraphError, match="'cfg' comes from no task") as caught:
        tg.testing.compute(passes_on, ins={"cfg": {}})
    assert caught.value.__notes__ == [
        "no task puts 'cfg': ins has {} there; if the value is an empty dict, write {0: {}}"
    ]


@pytest.mark.parametrize("outs", [None, ("x", "y")])
def test_puts_to_single_consumers(outs: tuple[str, ...] | None) -> None:
    found = tg.testing.compute(splits, outs=outs)
    assert found["y"] == 5
    assert list(found["x"]) == [1, 2, 0] and found["x"][1] == 10
    assert all(np.array_equal(found["x"][task], [7, 7]) for task in (2, 0))


@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("second", [None, 1])
def test_a_channel_is_put_once(first: int | None, second: int | None) -> None:
    def twice(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", 1, to=first)
        outs.put("x", 2, to=second)

    with pytest.raises(GraphError, match=rf"channel 'x'{' to task 1' * bool(first and second)} was put twice"):
        tg.testing.compute(twice)


def test_declared_channels_must_be_put() -> None:
    with pytest.raises(GraphError, match="processor: returned without putting 'z', 'w'; every declared channel"):
        tg.testing.compute(splits, outs=("x", "y", "z", "w"))
    with pytest.raises(GraphError, match="no outbound channel 'y' is declared; outbound are: 'x'"):
        tg.testing.compute(splits, outs=("x",))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ins": [1]}, r"compute\(ins=\[1\]\): must be a dict"),
        ({"scratch": 3}, r"compute\(scratch=3\): must be a dict"),
        ({"replies": "x"}, r"compute\(replies='x'\): must be a dict"),
        ({"outs": "x"}, r"outs=\('x',\)"),
        ({"function": 3}, "runs a task's method, .* not 3"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(tg.JobError, match=words):
        tg.testing.compute(**{"function": passes_on, **given})


class Server(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.update)

    @tg.handles("push")
    def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> None:
        epoch.scratch.total = payload + 1

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        epoch.scratch.total = meta + 1

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("out", 1)


class Other(Server):
    def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> None:
        """A handler still."""


@pytest.mark.parametrize(
    ("function", "called"),
    [
        (Server().push, "push(epoch, sender, payload)"),
        (Other().push, "push(epoch, sender, payload)"),
        (Server().on_flag, "on_flag(epoch, sender, meta)"),
        (Server().compose, "compose(epoch)"),
        (Server().setup, "setup()"),
    ],
)
def test_compute_takes_processors_only(function: Callable[..., Any], called: str) -> None:
    with pytest.raises(tg.JobError, match=rf"processor.*, not {re.escape(called)}: .*tg\.testing\.run"):
        tg.testing.compute(function)
    assert tg.testing.compute(Other().update) == {"out": 1}


def waits(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    outs.put("out", epoch.request(1, "pull").wait())


async def awaits(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    await asyncio.sleep(0)
    outs.put("out", await epoch.request(1, "pull"))


async def waits_in_a_thread(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    outs.put("out", await asyncio.to_thread(epoch.request(1, "pull").wait))


async def waits_on_the_loop(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    outs.put("out", epoch.request(1, "pull").wait())


@pytest.mark.parametrize("function", [waits, awaits, waits_in_a_thread])
def test_replies_in_compute(function: Callable[..., Any]) -> None:
    async def in_a_loop() -> dict[str, Any]:
        return tg.testing.compute(function, replies={"pull": 3})

    assert tg.testing.compute(function, replies={"pull": 3}) == {"out": 3}
    assert asyncio.run(in_a_loop()) == {"out": 3}, "as in a notebook, or in an `async def` test"
    with pytest.raises(tg.JobError, match=r"request 'pull': say what it answers with replies=\{'pull': \.\.\.\}"):
        tg.testing.compute(function)


def test_blocking_wait_fails() -> None:
    with pytest.raises(tg.JobError, match="would block the event loop: in an `async def`, write `await reply`"):
        tg.testing.compute(waits_on_the_loop, replies={"pull": 3})


async def test_compute_inside_a_running_loop() -> None:
    async def fails(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert np.geterr()["over"] == "raise"
        np.float64(1e308) * 10

    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow"):
        tg.testing.compute(fails)


@pytest.mark.parametrize(
    "names",
    [
        lambda epoch, ins, outs: outs.put("x", 1, to="children"),
        lambda epoch, ins, outs: epoch.flag("children"),
        lambda epoch, ins, outs: epoch.flag([1, "children"]),
        lambda epoch, ins, outs: epoch.request("parent", "pull"),
        lambda epoch, ins, outs: epoch.neighbors("children"),
    ],
)
def test_that_there_are_no_links_is_said(names: Callable[..., Any]) -> None:
    with pytest.raises(
        GraphError, match=r"^task 0, epoch 0: a processor alone has no topology.*test it with tg\.testing\.run"
    ):
        tg.testing.compute(names)
