"""Arrays of other libraries in an elastic job: in the state, in sums, and back."""

from __future__ import annotations

from typing import Any

import array_api_strict as xp
import numpy as np
import pytest
from elastic_cluster import SCENARIOS, pause, run_body

import taskgraph as tg
from taskgraph.errors import JobFailed
from taskgraph.graph import libraries


def fit(run: Any) -> Any:
    s = run.state(w=xp.zeros(3, dtype=xp.float32))
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    for step in run.steps(rows=12, batch=6, parts=3, passes=8):
        for part in step:
            rows = xp.asarray(x[part.rows])
            part.add(g=xp.sum(rows - s.w, axis=0), pair=(xp.asarray([1, 2]), 0.5))
            pause()
        assert type(step["g"]) is type(s.w) and step["pair"][1] == 1.5
        s.w = s.w + step["g"] / 100
    return np.asarray(s.w)


async def test_declared_library() -> None:
    tg.arrays(xp)
    alone, *others = [await run_body(fit, scenario) for scenario in SCENARIOS]
    assert all(np.array_equal(alone, other) for other in others) and alone.any()


async def test_shapes_of_a_declared_library_that_differ() -> None:
    tg.arrays(xp)

    def body(run: Any) -> None:
        for step in run.steps(rows=4, batch=4, parts=2, passes=1):
            for part in step:
                part.add(g=xp.zeros(3 + part.rows[0]))

    why = (
        r"a array_api_strict array of float64 with shape \(5,\) as part\.add\(g=\.\.\.\), and part 0 has a array_api_s"
    )
    with pytest.raises(JobFailed, match=why):
        await run_body(body)


async def test_library_that_was_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_codecs_by_library", {})

    def body(run: Any) -> None:
        for step in run.steps(rows=4, batch=4, parts=2, passes=1):
            for part in step:
                part.add(g=xp.zeros(3))

    with pytest.raises(
        JobFailed, match=r"part\.add\(g=\.\.\.\) is an array of array_api_strict: tg\.arrays\(array_api_strict\)"
    ):
        await run_body(body)
