"""Annotations of users may name what is defined later, or for a type checker only: nobody asks for their values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph.driver.loading import load_driver

_DRIVER = """
from __future__ import annotations
import dataclasses
from typing import TYPE_CHECKING
import taskgraph as tg

if TYPE_CHECKING:
    from there_is_none import Array

@tg.message(name={name!r})
class Sent:
    number: int
    later: Later
    array: Array | None = None

@tg.message(name={name!r} + " later")
class Later:
    def __init__(self, x: Array):
        self.x = x
    x: Array

class Sends(tg.Task, state=["total"]):
    total: Array
    def __init__(self, task_id: Array) -> Array:
        pass
    def setup(self) -> Array:
        self.total = 0
    def compose(self, epoch: Array) -> Array:
        epoch.processor(self.send, outbound={{"x": "next"}})
        epoch.processor(self.add, inbound={{"x": "previous"}})
    def send(self, epoch: Array, ins: Array, outs: Array) -> Array:
        outs.put("x", Sent(epoch.number, Later(1.5)))
    def add(self, epoch: Array, ins: Array, outs: Array) -> Array:
        self.total += ins["x"].number + ins["x"].later.x
    def composed(self, epoch: Array, unlike: Array):
        pass
    @tg.handles("ask")
    def answer(self, epoch: Array, sender: Array, payload: Array) -> Array:
        pass
    def result(self) -> Array:
        return self.total

def next(task_id: Array, tasks: Array, epoch: Array) -> Array:
    return [1 - task_id]

@tg.job
def sends(epochs: int = 2, unknown: Array = 0) -> Array:
    topology = tg.Topology({{"next": next, "previous": next}})
    return tg.Job(tasks=2, epochs=epochs, builder=Sends if unknown else lambda task: Sends(task), topology=topology)
"""


@pytest.mark.parametrize(
    "evaluated",
    [
        "never",
        pytest.param(
            "when they are asked for",
            marks=pytest.mark.skipif(sys.version_info < (3, 14), reason="Python 3.14 is the first that waits so long"),
        ),
    ],
)
def test_what_is_not_defined_is_nothing_to_a_job(tmp_path: Path, evaluated: str) -> None:
    source = _DRIVER.format(name=f"sent by {evaluated}")
    if evaluated != "never":
        source = source.replace("from __future__ import annotations\n", "")
    driver = tmp_path / f"annotated_{evaluated[:4]}.py"
    driver.write_text(source)
    job = load_driver(str(driver))
    assert [option.default for option in job.options().values()] == [2, 0]
    for unknown in (0, 1):
        assert tg.run(job(unknown=unknown), nodes=0, timeout_s=60).values == {0: 4.0, 1: 4.0}
