"""Errors of Python and numpy from a wrong use of our API get a hint."""

from __future__ import annotations

import bdb
import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jobs_kit import fails, job, run, task

import taskgraph as tg
from taskgraph.hints import hint


def sends(compute: Callable[..., Any], sync: Callable[..., Any] | None = None) -> tg.Job:
    """Makes a job: each task runs `compute`, which puts or fails, and `sync` with the other task's item."""

    def compose(self: Any, epoch: tg.Epoch) -> None:
        epoch.processor(self.work, outbound={"x": "peers"})
        epoch.processor(self.take, inbound={"x": "peers"})

    def take(self: Any, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if sync is not None:
            sync(epoch, ins, outs)

    def work(self: Any, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        compute(epoch, ins, outs)

    @tg.handles("ask")
    def ask(self: Any, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        return 5

    return job(task(compose, work=work, take=take, ask=ask), epochs=1)


def composes(*args: Any, **kwargs: Any) -> tg.Job:
    def compose(self: Any, epoch: Any) -> None:
        epoch.processor(lambda epoch, ins, outs: None, *args, **kwargs)

    return job(task(compose))


def writes(epoch: Any, ins: Any, outs: Any) -> None:
    ins["x"][0] = 1


def adds(epoch: Any, ins: Any, outs: Any) -> None:
    x = ins["x"]
    x += 1


@pytest.mark.parametrize("sync", [writes, adds])
def test_write_to_an_item(sync: Callable[..., Any]) -> None:
    error = str(fails(sends(lambda epoch, ins, outs: outs.put("x", np.ones(3)), sync)))
    assert "read-only; received values are read-only: copy the value, as in x = ins['tag'].copy()" in error
    assert "x = x + 1 instead of x += 1" in error


def test_write_to_an_item_in_compute() -> None:
    with pytest.raises(ValueError, match="read-only") as caught:
        tg.testing.compute(writes, ins={"x": np.ones(3)})
    assert "copy the value" in caught.value.__notes__[0]


@pytest.mark.parametrize("given", [["x"], "x", ("x", "y"), {"x"}], ids=str)
def test_channels_are_a_mapping(given: Any) -> None:
    error = str(fails(composes(outbound=given)))
    assert "compose: outbound says to whom each tag travels, as in outbound={'x': 'peers'}; it got" in error
    assert "inbound says from whom each tag travels, as in inbound={'x': 'peers'}" in str(
        fails(composes(inbound=given))
    )


def test_channels_that_are_nothing_of_the_kind() -> None:
    assert "outbound={'tag': 'peers'}; it got 5" in str(fails(composes(outbound=5)))


def test_channels_given_by_position() -> None:
    error = str(fails(composes({"x": "peers"})))
    assert "takes 2 positional arguments but 3 were given; call it as epoch.processor(self.add, inbound={" in error


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda epoch, ins, outs: epoch.processor(writes, inbounds={}), "call it as epoch.processor("),
        (lambda epoch, ins, outs: epoch.report(5), "call it as epoch.report(loss=0.5)"),
        (lambda epoch, ins, outs: outs.put("x"), "call it as outs.put('tag', value"),
        (lambda epoch, ins, outs: ins.items(), "ins has: all; also ins[tag]"),
        (lambda epoch, ins, outs: outs.send("x", 1), "outs has: empty, put\n"),
        (lambda epoch, ins, outs: epoch.nodes, "epoch has: allgather, allreduce, attempt"),
        (lambda epoch, ins, outs: outs.__setitem__("x", 1), "outs has: "),
        (lambda epoch, ins, outs: ins("x"), "read with ins['tag']"),
    ],
)
def test_wrong_call_gets_a_hint(compute: Callable[..., Any], words: str) -> None:
    said, traceback, _ = str(fails(sends(compute))).partition("\nTraceback ")  # which has the words as source
    assert traceback and words in said


def test_item_assignment() -> None:
    def assigns(epoch: Any, ins: Any, outs: Any) -> None:
        outs["x"] = 1

    assert "does not support item assignment; put with outs.put('tag', value)" in str(fails(sends(assigns)))


@pytest.mark.parametrize(
    "use",
    [
        lambda reply, outs: outs.put("x", reply),
        lambda reply, outs: outs.put("x", [reply]),
        lambda reply, outs: outs.put("x", reply + 1),
        lambda reply, outs: outs.put("x", reply["theta"]),
        lambda reply, outs: outs.put("x", reply.result()),
    ],
)
def test_a_reply_that_was_not_waited_for(use: Callable[[Any, Any], Any]) -> None:
    error = str(fails(sends(lambda epoch, ins, outs: use(epoch.request(0, "ask"), outs))))
    assert "not the answer yet" in error and "reply.wait()" in error and "await reply" in error


def test_awaited_reply_travels() -> None:
    got: list[int] = []
    run(
        sends(
            lambda epoch, ins, outs: outs.put("x", epoch.request(0, "ask").wait()),
            lambda epoch, ins, outs: got.append(ins["x"]),
        )
    )
    assert set(got) == {5}


def test_something_missing_in_scratch() -> None:
    def sync(epoch: Any, ins: Any, outs: Any) -> None:
        epoch.scratch.total = 0
        epoch.scratch.count += 1

    error = str(fails(sends(lambda epoch, ins, outs: outs.put("x", 1), sync)))
    assert "no attribute 'count'; epoch.scratch is empty at the beginning of every epoch, and of every attempt" in error
    assert "now it has: total" in error


def test_other_exceptions_get_no_hint() -> None:
    with pytest.raises(AttributeError) as missing:
        SimpleNamespace().count  # noqa: B018
    for error in (missing.value, ValueError("no"), TypeError("f() takes 0 positional arguments"), KeyError("x")):
        assert hint(error) == ""


def debugs(epoch: Any, ins: Any, outs: Any) -> None:
    raise bdb.BdbQuit  # as the line after a breakpoint() at which nothing was read


def asks(epoch: Any, ins: Any, outs: Any) -> None:
    input("? ")


@pytest.mark.parametrize("compute", [debugs, asks])
def test_debugger_and_input_in_a_node(compute: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert "; this process has no terminal, which breakpoint() and input() need" in str(fails(sends(compute)))


def test_quit_debugger_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert hint(bdb.BdbQuit()) == hint(EOFError("EOF when reading a line")) == ""
    monkeypatch.setattr(sys, "stdin", None)
    assert hint(bdb.BdbQuit()) and not hint(EOFError("Ran out of input")), "pickle says that, too"
