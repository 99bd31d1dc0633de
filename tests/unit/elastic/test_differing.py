"""Workers whose state differs from that of the others: found within some steps, named, and mended or refused."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import numpy as np
import pytest
from elastic_cluster import pause, run_body

import taskgraph as tg
from taskgraph.observe.events import Event


def fit(run: Any, spoil: int = -1, forget: bool = False, leave: bool = False) -> Any:
    x = np.random.default_rng(0).normal(size=(40, 3))
    s = run.state(w=np.zeros(3), scale=1.0)
    rate = 0.1
    for step in run.steps(rows=40, batch=20, parts=6, passes=400 if forget else 30 if leave else 23):
        for part in step:
            part.add(g=x[part.rows].sum(0) - s.w)
            pause()
        if forget:
            rate *= 0.97  # a newcomer begins with 0.1
        s.w = s.w + rate * s.scale * step["g"] / step.size
        if step.number == spoil and run.worker == "n2":
            s.w[1] += 1e-3
        if step.number == 45 and not forget:
            break
    return s.w.tolist()


def with_unnamed_state(run: Any) -> Any:
    return fit(run, forget=True)


@pytest.mark.parametrize(
    ("spoil", "where", "spoilt"),
    [
        (5, "before step 6", ""),
        (13, "before step 20", " (the totals of steps 11 to 19 may rest on the wrong one)"),
        (44, "after the last step", " (the totals of steps 41 to 45 may rest on the wrong one)"),
        (45, "after the last step", " (the totals of steps 41 to 45 may rest on the wrong one)"),
    ],
)
@pytest.mark.parametrize("leave", [True, False], ids=["break", ""])
def test_worker_with_a_wrong_state_enters_anew(spoil: int, where: str, spoilt: str, leave: bool) -> None:
    events: list[Event] = []
    value = asyncio.run(run_body(lambda run: fit(run, spoil, leave=leave), (3, ""), events.append))
    assert (value == asyncio.run(run_body(fit))) == (spoil in (5, 45))
    assert [event.text for event in events if event.kind == "differs"] == [
        f"the state of n2 differs {where}: w: it enters anew, with a copied state{spoilt}"
    ]
    assert [event.text for event in events if event.kind == "excluded"] == [
        "n2 was excluded, since it differs from the other workers: it copies the state, and enters again"
    ]


def test_state_that_was_not_named() -> None:
    with pytest.raises(tg.JobFailed) as failed:
        asyncio.run(run_body(with_unnamed_state, (2, "+")))
    assert "the state of n3 differs before step " in str(failed.value)
    why = ": w; it did just before, too: name in run.state all that later steps and a break depend on"
    assert why in str(failed.value)


def test_state_that_was_not_named_in_steps_of_many_sums() -> None:
    """The comparison ten steps later was more than 20 sums away: the worker entered anew each time."""

    def body(run: Any) -> Any:
        s, rate = run.state(w=0.0), 0.1
        for step in run.steps(rows=6, batch=6, parts=6, passes=100):
            for _ in range(3):
                for part in step:
                    part.add(g=1.0)
                    pause()
            rate *= 0.97  # a newcomer begins with 0.1
            s.w += rate * step["g"]
        return s.w

    with pytest.raises(tg.JobFailed, match=r"the state of n3 differs before step \d+: w; it did just before, too"):
        asyncio.run(run_body(body, (2, 16 * "." + "+")))


def test_numbers_are_named_first() -> None:
    def spoil(run: Any) -> Any:
        s = run.state(a=np.zeros(3), deep={"more": {"rate": 0.1}}, text="x")
        for step in run.steps(rows=4, batch=4, parts=3, passes=12):
            for part in step:
                part.add(n=1)
            if step.number == 5 and run.worker == "n2":
                s.a += 1.0
                s.deep["more"]["rate"] *= 0.5
                s.text = "y"
        return s.a

    events: list[Event] = []
    asyncio.run(run_body(spoil, (3, ""), events.append))
    (text,) = [event.text for event in events if event.kind == "differs"]
    assert "before step 6: text, deep.more.rate, a: it enters anew" in text


@pytest.mark.parametrize(
    ("how", "there"),
    [
        ("return", "the end of the function"),
        ("break", "the end of the function"),
        ("round", "round 2 of step 7"),
        ("once", "run.once"),
    ],
)
def test_worker_whose_calls_differ_enters_anew(how: str, there: str) -> None:
    """The others wait for parts that it does not compute, and it for theirs."""

    def body(run: Any) -> Any:
        s = run.state(n=0)
        for step in run.steps(rows=6, batch=6, parts=5, passes=30):
            for part in step:
                part.add(n=1)
                pause()
            s.n += step["n"]
            if step.number == 7 and run.worker == "n2":
                if how == "return":
                    return None
                if how == "break":
                    break
                if how == "once":
                    run.once(lambda: 1)
                for part in step if how == "round" else ():
                    part.add(n=1)
        return s.n

    events: list[Event] = []
    assert asyncio.run(run_body(body, (3, ""), events.append)) == 150
    (text,) = [event.text for event in events if event.kind == "differs"]
    assert text == f"n2 is at {there}, and other workers are at step 8: it enters anew, with a copied state"


def test_newcomer_that_returns_early_fails_the_job() -> None:
    """It took the total of a step, which it got with the others, for the end of all: the job finished."""

    def body(run: Any) -> Any:
        s = run.state(n=0)
        for step in run.steps(rows=6, batch=6, parts=5, passes=200):
            if run.worker == "n3":
                break
            for part in step:
                part.add(n=1)
                pause()
            s.n += step["n"]
        return s.n

    with pytest.raises(
        tg.JobFailed, match=r"n3 is at the end of the function, and other workers (are|were) at .*: dec"
    ):
        asyncio.run(run_body(body, (2, "+")))


@pytest.mark.parametrize("once", ["n2", "n1 n3"])
def test_worker_whose_calls_differ_again_fails_the_job(once: str) -> None:
    """What it copies is the total of another call."""

    def body(run: Any) -> Any:
        s = run.state(n=0)
        for step in run.steps(rows=6, batch=6, parts=5, passes=30):
            for part in step:
                part.add(n=1)
                pause()
            s.n += step["n"]
            if step.number >= 7 and run.worker in once:
                run.once(lambda: 1)
        return s.n

    with pytest.raises(tg.JobFailed) as failed:
        asyncio.run(run_body(body, (3, "")))
    assert re.search(
        r"n2 is at (run\.once|step \d+), and other workers (are|were) at [^;:]*(; they differed before, too)?: "
        r"decide by totals, run\.state, run\.once and run\.map alone",
        str(failed.value),
    )


@pytest.mark.parametrize(
    ("here", "there"), [({"seed": 2}, {"seed": 1}), ({"parts": 3}, {"parts": 6}), ({"batch": 12}, {"batch": 6})]
)
def test_steps_with_other_arguments_on_another_worker(here: dict[str, int], there: dict[str, int]) -> None:
    """Nothing else shows it: the workers have the same state, and other rows. With other parts they waited for ever."""

    def body(run: Any) -> None:
        s = run.state(n=np.zeros(1))
        found = {"rows": 24, "batch": 6, "parts": 6, "passes": 3, **(here if run.worker == "n2" else there)}
        for step in run.steps(**found):
            for part in step:
                part.add(n=float(part.rows.sum() ** 2))
            s.n += step["n"]

    events: list[Event] = []
    ((name, value),), (before,) = here.items(), there.values()
    with pytest.raises(tg.JobFailed) as failed:
        asyncio.run(run_body(body, (3, ""), events.append))
    assert str(failed.value).startswith(
        f"run.steps({name}={value}), and the state was made with {name}={before}: give "
    )
    (text,) = [event.text for event in events if event.kind == "differs"]
    assert text.startswith(f"n2 calls run.steps(...) with other arguments than other workers ({name}): it enters anew")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_parts_of_another_worker_with_another_shape_or_dtype(dtype: type) -> None:
    def body(run: Any) -> None:
        mine = np.zeros(4) if run.worker != "n2" else np.zeros(4 if dtype is np.float32 else 3, dtype)
        for step in run.steps(rows=6, batch=6, parts=3, passes=2):
            for part in step:
                part.add(g=mine)

    with pytest.raises(tg.JobFailed) as failed:
        asyncio.run(run_body(body, (3, "")))
    other = r"an array of float32 with shape (4,)" if dtype is np.float32 else "an array of float64 with shape (3,)"
    text = str(failed.value)
    assert text.startswith("part.add(g=...) is an array of float64 with shape (4,) in the parts of n")
    assert f", and {other} in the parts of n2: " in text


def test_pieces_before_the_first_step_that_differ() -> None:
    def body(run: Any) -> None:
        run.map(lambda piece: piece, range(3 if run.worker == "n2" else 4))
        for step in run.steps(rows=6, batch=6, parts=3, passes=9):
            for part in step:
                part.add(n=1)
                pause()

    with pytest.raises(tg.JobFailed, match=r"run\.map before the first step has 3 pieces, and 4 on the worker whose"):
        asyncio.run(run_body(body, (3, "")))


def counting(run: Any, named: bool) -> Any:
    """A loop whose parts read a counter, which is in the state or not."""
    counter = {"steps": 0}
    s = run.state(w=np.zeros(2), counter=counter) if named else run.state(w=np.zeros(2))
    for step in run.steps(rows=12, batch=12, parts=6, passes=30, shuffle=False):
        for part in step:
            part.add(g=np.full(2, part.number + counter["steps"]))
            pause()
        s.w = s.w + step["g"]
        counter["steps"] += 1
    return s.w


def remembering(run: Any, named: bool) -> Any:
    """A loop whose parts read what this worker has computed before, which `named` makes the same on all workers."""
    mine = np.zeros(2)
    s = run.state(w=np.zeros(2))
    for step in run.steps(rows=12, batch=12, parts=6, passes=30, shuffle=False):
        for part in step:
            part.add(g=part.number + (s.w if named else mine))
            mine += part.number
            pause()
        s.w = 0.5 * step["g"]
    return s.w


def collecting(run: Any, named: bool) -> Any:
    """As `remembering`, with numbers that are collected in place of added."""
    mine = 0
    s = run.state(w=0)
    for step in run.steps(rows=12, batch=12, parts=6, passes=30, shuffle=False):
        for part in step:
            part.collect(n=part.number + (s.w if named else mine))
            mine += 1
            pause()
        s.w = max(step.all("n"))
    return s.w


@pytest.mark.parametrize(("loop", "scenario"), [(counting, (1, "+")), (remembering, (2, "")), (collecting, (2, ""))])
@pytest.mark.parametrize("named", [True, False])
async def test_a_part_of_a_worker_is_computed_by_the_most_senior_one_too(loop: Any, scenario: Any, named: bool) -> None:
    events: list[Event] = []
    await run_body(lambda run: loop(run, named), scenario, events.append)
    told = [event.text for event in events if event.kind == "differs" and event.text.startswith("a part")]
    assert any(event.kind == "joined" for event in events) == (scenario[1] == "+")
    if named:
        assert not told
    else:
        assert [re.sub(r"^a part of n2, in step \d+, ", "", text) for text in told] == [
            "differs from what n1 computes of it: something that parts read is not named in run.state, or they are not "
            "deterministic"
        ]


def test_calls_that_differ_once_a_pass_fail_the_job() -> None:
    """The worker at `run.once` is excluded each time, so another one is the first from then on."""

    def body(run: Any) -> Any:
        s = run.state(n=0)
        for step in run.steps(rows=210, batch=3, parts=3, passes=10):
            for part in step:
                part.add(n=1)
            s.n += step["n"]
            if step.ends_pass and run.worker == run.workers[0]:
                run.once(lambda: 1)
        return s.n

    with pytest.raises(
        tg.JobFailed, match=r"n\d is at run\.once, and other workers are at step .*; they differed before"
    ):
        asyncio.run(run_body(body, (3, "")))


def test_first_part_of_another_call_is_not_computed() -> None:
    """A newcomer sends a digest of its part 3 or 4 of a step to a worker that is at `run.once`, which has one piece."""
    entered = threading.Event()

    def body(run: Any) -> Any:
        s = run.state(n=0)
        for step in run.steps(rows=6, batch=6, parts=5, passes=400):
            if run.worker == "n3":
                entered.set()
            for part in step:
                part.add(n=1)
                pause()
            s.n += step["n"]
            if entered.is_set() and run.worker != "n3":
                run.once(lambda: 1)
        return s.n

    with pytest.raises(tg.JobFailed, match=r"n3 is at step .*decide by totals, run\.state, run\.once"):
        asyncio.run(run_body(body, (2, "+")))


def test_newcomer_without_memory_for_the_state() -> None:
    """It ends with its reason. The job fails with it only because all nodes of this test are in one process."""

    def body(run: Any) -> None:
        run.state(n=0)
        if run.worker == "n2":
            raise MemoryError("no 8 GiB")
        for step in run.steps(rows=6, batch=6, parts=3, passes=400):
            for part in step:
                part.add(n=1)
                pause()

    why = (
        r"a node could not go on: n2 has no memory for the state that it copies \(MemoryError: no 8 GiB\): start fewer"
    )
    with pytest.raises(tg.JobFailed, match=why):
        asyncio.run(run_body(body, (1, "+")))
