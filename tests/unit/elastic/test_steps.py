"""Steps, parts and state in numpy: what user code gets, and the errors by name."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from elastic_cluster import SCENARIOS, Body, job_of, run_body

import taskgraph as tg
from taskgraph.errors import JobError, JobFailed, StateError, StepError, ValueNotEncodable
from taskgraph.graph.sum_layouts import difference
from taskgraph.graph.sums import Sums, decode_sums, encode_sums
from taskgraph.graph.values import decode, encode


def small(run: Any, **options: Any) -> Any:
    return run.steps(**{"rows": 12, "batch": 6, "parts": 3, "passes": 2, **options})


async def test_steps_say_what_they_are() -> None:
    def body(run: Any) -> Any:
        seen = []
        steps = small(run, rows=10)
        assert (len(steps), steps.per_pass) == (4, 2)
        for step in steps:
            rows = []
            for part in step:
                assert part.size == len(part.rows) > 0
                rows += part.rows.tolist()
                part.add()
            assert rows == step.rows.tolist() and step.size == len(rows)
            seen.append((step.number, step.pass_number, step.ends_pass, step.size, step.round))
        return seen

    assert await run_body(body) == [
        (0, 0, False, 6, 1),
        (1, 0, True, 4, 1),
        (2, 1, False, 6, 1),
        (3, 1, True, 4, 1),
    ]


async def test_collected_trees_are_in_the_order_of_the_parts() -> None:
    def body(run: Any) -> Any:
        s = run.state(found=[])
        for step in small(run, parts=6, passes=6):
            for part in step:
                part.collect(row=int(part.rows[0]), more={"name": str(part.number), "at": part.rows * 2})
            assert step.all("row") == step.rows.tolist()
            assert [tree["name"] for tree in step.all("more")] == list("012345")
            s.found = [*s.found, *[tree["at"] for tree in step.all("more")]]
        return np.concatenate(s.found)

    alone, *others = [await run_body(body, scenario) for scenario in SCENARIOS]
    assert len(alone) == 72
    assert all(np.array_equal(alone, other) for other in others)


async def test_rounds_have_totals_of_their_own() -> None:
    def body(run: Any) -> Any:
        for step in small(run, passes=1):
            for part in step:
                part.add(n=part.size)
            assert step["n"] == 6
            for part in step:
                part.add(m=1)
            assert step["m"] == 3 and step.round == 2
            with pytest.raises(StepError, match=r"'n' in round 2 of step .: there is 'm'; each round has its own"):
                step["n"]
            with pytest.raises(StepError, match="no part collected 'n'"):
                step.all("n")
            with pytest.raises(StepError, match=r"no part called part\.backward"):
                _ = step.loss
        return True

    assert await run_body(body)


@dataclasses.dataclass
class Progress:
    w: Any
    best: float = np.inf
    history: list[float] = dataclasses.field(default_factory=list)
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


async def test_a_dataclass_as_state() -> None:
    def body(run: Any) -> Any:
        s = run.state(Progress(np.zeros(2), more={"pair": (np.zeros(1), [np.zeros(1)])}))
        w, (first, [second]) = s.w, s.more["pair"]
        for step in small(run, passes=8):
            for part in step:
                part.add(x=part.rows.sum() * np.ones(2))
            w += step["x"]  # an alias: arrays are loaded in place
            first += step["x"][0]
            second -= step["x"][0]
            s.best = min(s.best, float(w[0]))
            s.history = [*s.history, s.best]
        assert s.w is w and s.more["pair"][0] is first and s.more["pair"][1][0] is second
        return [w, first, second, np.array(s.history)]

    alone, *others = [await run_body(body, scenario) for scenario in SCENARIOS]
    assert all(np.array_equal(a, b) for other in others for a, b in zip(alone, other, strict=True))


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.5


def counted(run: Any) -> Any:
    counts, history = collections.Counter[str](), list[int]()
    s = run.state(counts=counts, history=history, config=Config())
    for step in small(run):
        for part in step:
            part.add(n=part.size)
        counts[f"step {step.number}"] += step["n"]  # aliases: dicts and lists are loaded in place
        history.append(step["n"])
        assert s.counts is counts and s.history is history and s.config == Config()
    return history


def test_lists_dicts_and_frozen_dataclasses_travel_to_newcomers() -> None:
    assert tg.testing.run(job_of(counted)).value == [6, 6, 6, 6]


def nested(run: Any) -> None:
    run.state(kept=Config() if run.worker == "n1" else Progress(1))
    for step in small(run, passes=5):
        for part in step:
            part.add()


def test_dataclasses_with_other_fields_are_named() -> None:
    with pytest.raises(JobFailed, match=r"kept of run\.state names best, history, more, w here, and rate where it is"):
        tg.testing.run(job_of(nested), nodes=2, strict=False)


async def test_data_by_row() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> Any:
            return {"x": np.full(2, float(row)) + random.random() + np.random.random(2), "row": row}

    def body(run: Any) -> Any:
        seen = {}
        for step in run.steps(Noisy(), batch=6, parts=3, passes=1):
            for part in step:
                data = part.data
                assert data["row"].tolist() == part.rows.tolist() and data["x"].shape == (part.size, 2)
                part.add(first=data["x"].sum())
            first = step["first"]
            for part in step:
                part.add(again=part.data["x"].sum())
            assert step["again"] == first, "the rows of a step are the same in each round"
            seen[step.number] = float(first)
        return seen

    alone, *others = [await run_body(body, scenario) for scenario in ((1, ""), (3, ""))]
    assert all(other == alone for other in others)


async def test_an_array_as_data() -> None:
    def body(run: Any) -> Any:
        x = np.arange(24.0).reshape(12, 2)
        for step in run.steps(x, batch=6, parts=2, passes=1):
            for part in step:
                assert np.array_equal(part.data, x[part.rows])
                part.add()
        return True

    assert await run_body(body)


async def test_data_by_column() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, 2.0]})
    with pytest.raises(JobFailed, match=r"a DataFrame is read by column: give run\.steps\(rows=len\(data\), \.\.\.\)"):
        await run_body(lambda run: run.steps(frame, batch=1))


@pytest.mark.parametrize("how", ["event", "ignore"])
async def test_nonfinite_totals(how: str) -> None:
    def body(run: Any) -> Any:
        for step in small(run, nonfinite=how):
            for part in step:
                part.add(x=np.array([1.0, np.inf if step.number in (1, 2) else 0.0]))
        return float(step["x"][0])

    events: list[Any] = []
    assert await run_body(body, (3, ""), events.append) == 3
    assert [e.text for e in events if e.kind == "nonfinite"] == [
        "part.add(x=...) has nan or inf in the total of step 1"
    ] * (how == "event")


ERRORS: list[tuple[str, str, Body]] = []


def fails(error: type[JobError], text: str) -> Callable[[Body], Body]:
    """Declares a body that fails with this error."""

    def declared(body: Body) -> Body:
        ERRORS.append((error.__name__, text, body))
        return body

    return declared


@fails(StepError, r"part 0 of step 0 ended without part\.add\(\.\.\.\), part\.backward")
def silent_part(run: Any) -> None:
    for step in small(run):
        for _ in step:
            pass


@fails(StepError, "the first 10 steps had no `for part in step:`, nor any run.map or run.once")
def no_part_loop(run: Any) -> None:
    s = run.state(at=0)
    for step in run.steps(rows=80, batch=8, parts=4, passes=2):
        s.at = step.number


@fails(StepError, "the only step had no `for part in step:`")
def no_part_loop_in_one_step(run: Any) -> None:
    for _ in run.steps(rows=8, batch=8, parts=4, passes=1):
        pass


@fails(StepError, "step 0 was left before its total was there")
def left_by_break(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add()
            break


@fails(StepError, "step 0 was left before its total was there")
def left_by_return(run: Any) -> Any:
    for step in small(run):
        for part in step:
            part.add()
            return 3
    return 4


@fails(StepError, "step 0 was left before its total was there")
def left_by_exception(run: Any) -> None:
    for step in small(run):
        try:
            for _ in step:
                raise KeyError("x")
        except KeyError:
            step.report(lost=1)


@fails(StepError, r"run\.steps\(\.\.\.\) is called once")
def steps_twice(run: Any) -> None:
    small(run)
    small(run)


@fails(StepError, "the steps of a run are taken once")
def steps_taken_twice(run: Any) -> None:
    steps = small(run)
    for _ in range(2):
        for step in steps:
            for part in step:
                part.add()


@fails(
    StepError, r"part 1 of step 0 has nothing as part\.add\(g=\.\.\.\), and part 0 has an array of float64 with shape"
)
def other_names(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add(**({} if part.number == 1 else {"g": np.zeros(3)}))


@fails(
    StepError, r"part 2 of step 0 has an array of float32 with shape \(3,\) as part\.add\(g\.w=\.\.\.\), and part 0 has"
)
def other_dtype(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add(g={"w": np.zeros(3, np.float32 if part.number == 2 else np.float64)})


@fails(
    StepError, r"part 2 of step 0 has a float as part\.add\(loss=\.\.\.\), and part 0 has an int: add a float in all p"
)
def int_and_float(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add(loss=sum(0.5 for _ in range(part.number // 2)))


@fails(StepError, r"part 1 of step 0 collected 'y', and part 0 'x'")
def other_collected(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.collect(**{"xy"[part.number % 2]: 1})


@fails(StepError, "part 0 added 'g' twice")
def added_twice(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add(g=1)
            part.add(g=2)


@fails(StepError, r"part\.add of part 0, which has ended")
def added_late(run: Any) -> None:
    for step in small(run):
        parts = []
        for part in step:
            part.add(g=1)
            parts.append(part)
        parts[0].add(h=2)


@fails(JobError, r"step 0: report\(name=\.\.\.\) takes numbers, not str")
def reported_text(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add()
        step.report(name="first")


@fails(StepError, r"step\.loss is there after `for part in step`")
def loss_before_the_round(run: Any) -> None:
    for step in small(run):
        _ = step.loss


@fails(StepError, r"step\['n'\] is there after `for part in step`, which runs to its end, without `break`")
def total_in_the_part_loop(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add(n=1)
            step["n"]


@fails(TypeError, r"the run has no last step: give run\.steps\(passes=\.\.\.\)")  # type: ignore[arg-type]
def length_of_endless_steps(run: Any) -> None:
    len(small(run, passes=None))


@fails(StepError, r"part\.backward takes a PyTorch tensor, not float")
def no_tensor(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.backward(1.0)


@fails(StepError, r"part\.add\(loss=\.\.\.\) has nan or inf in the total of step 0")
def nonfinite(run: Any) -> None:
    for step in small(run, nonfinite="error"):
        for part in step:
            part.add(loss=float("nan"))


@fails(StepError, r"run\.steps\(unused='no'\): must be one of 'error', 'zero'")
def wrong_option(run: Any) -> None:
    small(run, unused="no")


@fails(StepError, r"run\.steps\(rows=12, batch=20\): a batch has more rows than there are")
def batch_too_large(run: Any) -> None:
    small(run, batch=20)


@fails(StepError, r"run\.steps\(batch=6, parts=7\): a part would have no row")
def parts_too_many(run: Any) -> None:
    small(run, parts=7)


@fails(StepError, r"run\.steps\(batch='6'\): must be a whole number")
def batch_of_text(run: Any) -> None:
    small(run, batch="6")


@fails(StepError, r"run\.steps\(passes=1\.5\): must be a whole number")
def half_a_pass(run: Any) -> None:
    small(run, passes=1.5)


@fails(StepError, r"needs rows=\.\.\. and batch=\.\.\.")
def no_rows(run: Any) -> None:
    run.steps(batch=6)


@fails(StepError, r"a generator has no len\(data\) and data\[row\]")
def rows_without_numbers(run: Any) -> None:
    run.steps((i for i in range(3)), batch=1)


@fails(StepError, r"part\.data is there if run\.steps\(data")
def no_data(run: Any) -> None:
    for step in small(run):
        for part in step:
            _ = part.data


@fails(StateError, r"run\.state\(\.\.\.\) after the first step")
def late_state(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add()
        run.state(w=1)


@fails(StateError, r"run\.state\(\.\.\.\) is called once")
def state_twice(run: Any) -> None:
    run.state(w=1)
    run.state(v=1)


@fails(
    StateError, r"run\.state takes an instance of a dataclass, or objects by name \(run\.state\(w=w\)\), not ndarray"
)
def state_without_a_name(run: Any) -> None:
    run.state(np.zeros(3))


class Meter:
    pass


@fails(
    ValueNotEncodable,
    r"m: a value of type .*Meter cannot travel; make its class a dataclass, or give it state_dict\(\) and load",
)
def state_of_a_class(run: Any) -> None:
    run.state(m=Meter())
    for _step in small(run):
        pass


@fails(StateError, r"run\.state: w holds itself, or is nested too deep")
def state_that_holds_itself(run: Any) -> None:
    w: list[Any] = []
    w.append(w)
    run.state(w=w)
    for _step in small(run):
        pass


@fails(StepError, r"^part\.add\(x=\.\.\.\)\['y'\] is a str: a sum is made of numbers")
def text_in_a_sum(run: Any) -> None:
    for step in small(run):
        for part in step:
            part.add(x={"y": "text"})


@fails(StateError, r"Progress of run\.state\(\.\.\.\): the state has no 'bst', only best, history, more, w")
def mistyped_field(run: Any) -> None:
    s = run.state(Progress(np.zeros(1)))
    for step in small(run):
        for part in step:
            part.add()
        s.bst = 1


@fails(AttributeError, "the state has no 'bst', only best: name it in")  # type: ignore[arg-type]
def mistyped_name(run: Any) -> None:
    run.state(best=1).bst = 1


@pytest.mark.parametrize(("error", "text", "body"), ERRORS, ids=[body.__name__ for *_, body in ERRORS])
async def test_errors_by_name(error: str, text: str, body: Body) -> None:
    raised: list[str] = []

    def noting_errors(run: Any) -> Any:
        try:
            body(run)
            run.check_part_loop_ended()  # as the call of the job's function does
        except Exception as failed:
            raised.append(type(failed).__name__)
            raise

    with pytest.raises(JobFailed, match=text):
        await run_body(noting_errors)
    assert raised == [error]


def test_sums_travel_with_what_was_collected() -> None:
    tree = {"a": 1, "b": [np.arange(3, dtype=np.float32), 2.5], "c": Sums.of({"d": np.ones(2)})}
    first = Sums.of(tree, {0: encode({"x": np.arange(5000)})})
    second = Sums.of(tree, {1: encode({"x": "y"})})
    [total] = decode_sums(encode_sums([first.add_consuming(second)]))
    made = total.tree()
    assert (made["a"], made["b"][1]) == (2, 5.0)
    assert np.array_equal(made["b"][0], [0, 2, 4]) and np.array_equal(made["c"]["d"], [2, 2])
    collected = [decode(found)["x"] for found in total.collected.values()]
    assert list(total.collected) == [0, 1] and np.array_equal(collected[0], np.arange(5000)) and collected[1] == "y"


def test_numpy_scalars_are_summed_to_scalars() -> None:
    sums = Sums.of({"a": np.float32(1.5), "b": np.ones(()), "c": np.ones(1)})
    made = sums.add_consuming(sums).tree()
    assert [type(made[name]) for name in "abc"] == [np.float32, np.float64, np.ndarray]
    assert round(made["a"]) == 3 and made["b"] == 2.0


def test_sums_do_not_change_with_the_arrays_that_were_added() -> None:
    w = np.zeros(3)
    sums = Sums.of({"w": w})
    w += 1
    assert np.array_equal(sums.tree()["w"], np.zeros(3))


@pytest.mark.parametrize(
    ("one", "two", "found"),
    [
        ({"a": 1}, {"a": 2}, None),
        ({"a": 1}, {"a": 1.0}, (("a",), "an int", "a float")),
        ({"a": {}}, {"a": {"b": 1}}, (("a", "b"), "nothing", "an int")),
        ({"a": [1, 2]}, {"a": [1]}, (("a", "1"), "an int", "nothing")),
        ({"a": {}}, {"a": []}, (("a",), "an empty dict", "an empty list")),
    ],
)
def test_difference_of_layouts(one: Any, two: Any, found: Any) -> None:
    assert difference(Sums.of(one).layout, Sums.of(two).layout) == found


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (KeyError("x"), r"^'call_body': KeyError: 'x'; in step 1\n"),
        (SystemExit(3), r"user code raised SystemExit\(3\): return from the function to end the job, or raise an exc"),
        (SystemExit(2), r"user code raised SystemExit\(2\): in place of argparse make its arguments parameters"),
        (KeyError("LOCAL_RANK"), r"in step 1; nodes have no rank .*A DDP script"),
        (StopIteration(), r"^'call_body': RuntimeError: StopIteration left the function; in step 1\n"),
        (asyncio.CancelledError(), r"RuntimeError: CancelledError left the function; in step 1\n"),
        (KeyboardInterrupt(), r"user code raised KeyboardInterrupt\(\): return from the function"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_exception_of_user_code_fails_the_job(raised: BaseException, text: str) -> None:
    def body(run: Any) -> None:
        for step in small(run):
            for part in step:
                if step.number == 1:
                    raise raised
                part.add()

    with pytest.raises(JobFailed, match=text) as failed:
        await run_body(body, (2, ""))
    assert "raise raised" in failed.value.traceback_text or not isinstance(raised, KeyError)
