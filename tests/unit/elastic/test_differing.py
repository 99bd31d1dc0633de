"""Workers whose state differs from that of the others: found within some steps, named, and mended or refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from elastic_cluster import pause, run_body

import taskgraph as tg
from taskgraph.observe.events import Event


def fit(run: Any, spoil: bool = False, forget: bool = False) -> Any:
    x = np.random.default_rng(0).normal(size=(40, 3))
    s = run.state(w=np.zeros(3), scale=1.0)
    rate = 0.1
    for step in run.steps(rows=40, batch=20, parts=6, passes=30):
        for part in step:
            part.add(g=x[part.rows].sum(0) - s.w)
            pause()
        if forget:
            rate *= 0.97  # a newcomer begins with 0.1
        s.w = s.w + rate * s.scale * step["g"] / step.size
        if spoil and step.number == 5 and run.worker == "n2":
            s.w[1] += 1e-3
    return s.w.tolist()


def spoilt_once(run: Any) -> Any:
    return fit(run, spoil=True)


def with_unnamed_state(run: Any) -> Any:
    return fit(run, forget=True)


def test_worker_with_a_wrong_state_enters_anew() -> None:
    events: list[Event] = []
    value = asyncio.run(run_body(spoilt_once, (3, ""), events.append))
    assert value == asyncio.run(run_body(fit))
    assert [event.text for event in events if event.kind == "differs"][:1] == [
        "the state of n2 differs before step 6: w: it enters anew, with a copied state"
    ]


def test_state_that_was_not_named() -> None:
    with pytest.raises(tg.JobFailed) as failed:
        asyncio.run(run_body(with_unnamed_state, (2, "+")))
    assert "the state of n3 differs before step " in str(failed.value)
    why = ": w; it did just before, too: something that later steps read is not named in run.state"
    assert why in str(failed.value)
