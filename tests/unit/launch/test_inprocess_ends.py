"""A job in one process ends at once when it fails, whatever its threads wait for, and says what was wrong."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

import taskgraph as tg


class Asking(tg.Task):
    """Every task asks its neighbor, from a thread, and waits for the answer."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"a": self.task_id})
        epoch.processor(self.sync, inbound={"a": self.task_id})

    @tg.handles("h")
    def answer(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        if self.wrong == "raises":
            raise KeyError("zz")
        return {1}

    @tg.handles("async")
    async def answer_async(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return {1}

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        method = "async" if self.wrong == "async" else "h"
        outs.put("a", epoch.request((self.task_id + 1) % self.tasks, method, 1).wait())

    def sync(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("wrong", ["set", "async", "raises"])
def test_a_handler_that_goes_wrong_fails_the_job_at_once(
    wrong: str, turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = tg.Job(tasks=3, epochs=2, builder=lambda task: Asking(wrong), name="asking")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(tg.JobFailed) as caught:
        tg.run(made, nodes=0, timeout_s=8)
    assert not isinstance(caught.value, tg.JobTimeout), str(caught.value)
    assert time.monotonic() - began < 4
    method = "async" if wrong == "async" else "h"
    assert caught.value.task in (0, 1, 2)
    assert (caught.value.epoch, caught.value.where) == (0, f"handler {method}")
    text = str(caught.value)
    assert f"task {caught.value.task}, epoch 0" in text
    assert __file__ in text
    if wrong == "raises":
        assert "KeyError: 'zz'" in text
    else:
        assert f"handler {method!r}: its answer: a value of type set cannot travel; send sorted(x)" in text
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert "serving" not in caplog.text
