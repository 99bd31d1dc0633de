"""`tg.testing.run` of elastic jobs: newcomers unasked, kills, shuffled schedules; what it finds on its first run."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.observe.events import Event
from taskgraph.testing.scene import Scene

X = np.random.default_rng(0).normal(size=(40, 3))


def steps_of(run: tg.Run, **options: Any) -> tg.Steps:
    return run.steps(**{"rows": 40, "batch": 20, "parts": 4, "passes": 4, **options})


@tg.elastic
def fit(run: tg.Run) -> Any:
    s = run.state(w=np.zeros(3))
    for step in steps_of(run):
        for part in step:
            part.add(g=X[part.rows].sum(0) - s.w)
        s.w += 0.1 * step["g"]
        step.report(w=s.w[0])
    return s.w


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    return tg.run(fit(), nodes=0).value


def test_workers_join_leave_and_die_unasked(undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    noted = Scene.on_event

    def note(scene: Scene, event: Event) -> None:
        events.append((event.kind, event.text))
        noted(scene, event)

    monkeypatch.setattr(Scene, "on_event", note)
    result = tg.testing.run(fit())
    assert np.array_equal(result.value, undisturbed) and len(result.reports) == 8
    kinds = [kind for kind, _ in events]
    assert kinds.count("joined") >= 3 and "drain" in kinds and any("killed" in text for _, text in events)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("stage", tg.testing.WORKER_STAGES)
def test_kills_do_not_change_the_bits(undisturbed: Any, stage: str, order: int) -> None:
    kills = {(0, 1): stage, (1, 1): stage, (0, 3): stage}
    for strict in (False, True):
        result = tg.testing.run(fit(), kills=kills, order=order, strict=strict)
        assert np.array_equal(result.value, undisturbed)


def test_same_order_is_the_same_run() -> None:
    """In a schedule the result names the worker that put it."""
    runs = [tg.testing.run(fit(), kills={(0, 2): "sums"}, order=7).reports for _ in range(2)]
    assert runs[0] == runs[1]


@tg.elastic
def reports_twice(run: tg.Run) -> None:
    s = run.state(done=0)
    for step in run.steps(rows=4, batch=2, parts=2, passes=1):
        for part in step:
            part.add()
        step.report(loss=0.5)
        s.done += sum(run.map(len, ["a"]))
        step.report(accuracy=s.done)


def test_a_step_that_reports_twice_keeps_the_numbers_of_both() -> None:
    reports = tg.testing.run(reports_twice()).reports
    assert [report.numbers for report in reports] == [{"loss": 0.5, "accuracy": 1}, {"loss": 0.5, "accuracy": 2}]


@pytest.mark.parametrize(
    ("kills", "text"),
    [
        ({(0, 1): "commit"}, "'commit' is no stage of an elastic job; the stages are: begin, part, sums, total"),
        ({(-1, 1): "part"}, r"\(-1, 1\) must be the place of a worker in the view, from 0, and a step"),
        ({(0, 99): "part"}, r"kills that never came to pass: worker 0 in step 99 \(part\); the job ended before"),
        ({(9, 0): "sums"}, r"kills that never came to pass: worker 9 in step 0 \(sums\)"),
    ],
)
def test_kills_that_do_not_fit(kills: dict[tuple[int, int], str], text: str) -> None:
    with pytest.raises(tg.JobError, match=text):
        tg.testing.run(fit(), kills=kills)


@tg.elastic
def rate_in_a_variable(run: tg.Run) -> None:
    s, rate, seen = run.state(w=np.zeros(3)), 0.1, 0
    for step in steps_of(run):
        for part in step:
            part.add(g=X[part.rows].sum(0) - s.w)
            seen += part.size
        s.w += rate * step["g"]
        rate *= 0.9


@tg.elastic
def weights_in_a_variable(run: tg.Run) -> None:
    run.state(other=0)
    weights = np.zeros(3)
    for step in steps_of(run):
        for part in step:
            part.add(g=X[part.rows].sum(0) - weights)
        weights = weights + 0.1 * step["g"]


@tg.elastic
def patience_in_variables(run: tg.Run) -> None:
    s, best, bad = run.state(w=np.zeros(3)), np.inf, 0
    for step in steps_of(run, passes=None):
        for part in step:
            part.add(g=X[part.rows].sum(0) - s.w)
        s.w += 0.01 * step["g"]
        loss = float(abs(step["g"]).sum())
        best, bad = (loss, 0) if loss < best - 5 else (best, bad + 1)
        if bad > 3:
            break


@tg.elastic
def count_in_a_map(run: tg.Run) -> None:
    run.state(other=0)
    seen = 0
    for step in steps_of(run):
        for part in step:
            part.add()
        seen += step.size
        run.map(lambda piece, seen=seen: piece * seen, range(5))


@tg.elastic
def own_generator(run: tg.Run) -> None:
    rng, s = np.random.default_rng(0), run.state(w=np.zeros(3))
    for step in steps_of(run):
        for part in step:
            part.add(g=rng.normal(size=3))
        s.w += step["g"]


@tg.elastic
def clock_in_the_update(run: tg.Run) -> None:
    s = run.state(w=0.0)
    for step in steps_of(run):
        for part in step:
            part.add(g=1)
        s.w += time.perf_counter()


WEIGHTS = np.zeros(3)


@tg.elastic
def weights_of_the_module(run: tg.Run) -> None:
    s = run.state(w=WEIGHTS)
    for step in steps_of(run):
        for part in step:
            part.add(g=X[part.rows].sum(0))
        s.w += 0.1 * step["g"]


@tg.elastic
def break_by_own_parts(run: tg.Run) -> None:
    for step in steps_of(run):
        seen = 0
        for part in step:
            part.add()
            seen += part.size
        if step.number == 3 and seen < 20:
            break


@tg.elastic
def rounds_by_own_parts(run: tg.Run) -> None:
    for step in steps_of(run):
        for _ in range(2):
            seen = 0
            for part in step:
                part.add()
                seen += part.size
            if seen == 20:
                break


@tg.elastic
def worker_in_the_value(run: tg.Run) -> Any:
    fit.__wrapped__(run)
    return {"rows": 40, "by": run.worker}


@tg.elastic
def mean_in_a_sum(run: tg.Run) -> None:
    s = run.state(w=np.zeros(3))
    for step in steps_of(run, parts=6):
        for part in step:
            part.add(g=X[part.rows].mean(0) - s.w)
        s.w += 0.01 * step["g"] / 6


@tg.elastic
def state_in_once(run: tg.Run) -> None:
    s = run.state(w=np.zeros(3), kept=np.zeros(3))
    for step in steps_of(run):
        for part in step:
            part.add(g=X[part.rows].sum(0) - s.w)
        s.w += 0.1 * step["g"]
        run.once(lambda: np.copyto(s.kept, s.w))


@tg.elastic
def sum_of_own_parts(run: tg.Run) -> None:
    s = run.state(w=np.zeros(3))
    for step in steps_of(run):
        total = 0.0
        for part in step:
            part.add(g=X[part.rows].sum(0) - s.w)
            total += X[part.rows].sum()
        s.w += 0.1 * step["g"]
        step.report(none=np.nan)
        step.report(shift=abs(step["g"]).max(), total=total)


@tg.elastic
def state_in_the_part_loop(run: tg.Run) -> None:
    s = run.state(total=0.0)
    for step in steps_of(run):
        for part in step:
            part.add()
            s.total += X[part.rows].sum()


@tg.elastic
def value_that_stays(run: tg.Run) -> Any:
    fit.__wrapped__(run)
    return {1}


@tg.elastic
def mean_since_it_joined(run: tg.Run) -> None:
    s, seen = run.state(w=np.zeros(3)), []
    for step in steps_of(run):
        for part in step:
            part.add(g=X[part.rows].sum(0) - s.w)
        s.w += 0.1 * step["g"]
        seen.append(float(step["g"][0]))
        step.report(shift=sum(seen) / len(seen))


NAME_IT = r"\nname all that later steps read{} in run\.state, or derive it from step\.number"


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            rate_in_a_variable(),
            r"the state before step \d is not the same on n\d \(joined at step \d\) as in a run of one worker: w"
            + NAME_IT.format(r" \(here rate\?\)"),
        ),
        (
            weights_in_a_variable(),
            r"part \d of step \d is not the same on n\d \(joined at step \d\) as in a run of one worker, from an equal "
            r"state" + NAME_IT.format(r" \(here weights\?\)"),
        ),
        (patience_in_variables(), r"n\d \(joined at step \d\) takes step \d, and a run of one worker ends after \d"),
        (
            count_in_a_map(),
            r"piece \d of run\.map after \d+ sums is not the same on n\d \(joined at step \d\) as in a run of one "
            r"worker" + NAME_IT.format(r" \(here seen\?\)"),
        ),
        (
            own_generator(),
            r"part \d of step 0 is not the same on n\d as in .*\nthe code is not deterministic, or a part",
        ),
        (
            clock_in_the_update(),
            r"the state before step 1 is not the same on n\d as in .*: w\nthe code is not determin",
        ),
        (
            weights_of_the_module(),
            r"the state before step 0 is not the same on n1 as in .*: w\nmake what run\.state gets in the function",
        ),
        (
            break_by_own_parts(),
            r"ends after step 3, and a run of one worker goes on\ndecide `break`, rounds and calls by",
        ),
        (
            rounds_by_own_parts(),
            r"n\d takes round 2 of step \d, and a run of one worker does not\ndecide `break`, rounds",
        ),
        (
            worker_in_the_value(),
            r"the value that n\d.* returns is not that of a run of one worker: value\.by\nreturn what rests on totals",
        ),
        (
            mean_in_a_sum(),
            r"part\.add\(g=\.\.\.\) got a mean over the part's rows, and parts differ in size: .*\nadd g \* part\.size",
        ),
        (
            sum_of_own_parts(),
            r"step\.report: total is -?\d\S+ on n\d and -?\d\S+ in a run of one worker, at step 0\na local of the part "
            r"loop has this worker's parts alone: report step\.loss, or part\.add",
        ),
        (
            state_in_the_part_loop(),
            r"total\nthe code is not deterministic, or a part changes what later parts or steps read: give it to part",
        ),
        (value_that_stays(), r"^the value of value_that_stays: a value of type set cannot travel"),
        (
            mean_since_it_joined(),
            r"step\.report: shift is \S+ on n\d \(joined at step \d\) and \S+ in a run of one worker, at step \d"
            + NAME_IT.format(r" \(here seen\?\)"),
        ),
        (
            state_in_once(),
            r"run\.once changed kept in run\.state, and its function runs on one worker only: change the",
        ),
    ],
    ids=lambda given: given.name if isinstance(given, tg.Job) else "",
)
def test_found_on_the_first_run(job: tg.Job, text: str) -> None:
    with pytest.raises(tg.JobFailed, match=text):
        tg.testing.run(job)


def test_value_that_differs_is_allowed_if_asked() -> None:
    assert tg.testing.run(worker_in_the_value(), strict=False).value["by"] == "n1"


@tg.elastic
def clock_by_once(run: tg.Run) -> None:
    s = run.state(at=run.once(time.perf_counter))
    for step in steps_of(run):
        for part in step:
            part.add()
        s.at = run.once(time.perf_counter)


def test_what_once_gives_may_be_different_in_each_run() -> None:
    tg.testing.run(clock_by_once())


@tg.elastic
def constants_and_counts(run: tg.Run) -> None:
    for step in steps_of(run, parts=6):
        for part in step:
            part.add(parts=1, one=1.0, rows=part.size, squares=float((X[part.rows] ** 2).sum()))
        assert step["one"] == 6


def test_sums_that_are_no_means() -> None:
    tg.testing.run(constants_and_counts())


@tg.elastic
def without_an_end(run: tg.Run) -> None:
    for step in steps_of(run, passes=None):
        for part in step:
            part.add()


def test_run_without_an_end() -> None:
    with pytest.raises(tg.JobTimeout, match=r"took 200 steps without an end: no `break`, and run\.steps has no passes"):
        tg.testing.run(without_an_end(), timeout_s=1)


_over = threading.Event()


@tg.elastic
def hangs(run: tg.Run) -> None:
    for step in steps_of(run):
        for part in step:
            part.add()
        while step.number == 1 and not _over.is_set():
            time.sleep(0.001)


def test_code_that_does_not_return() -> None:
    try:
        with pytest.raises(tg.JobTimeout, match=r"its code runs for more than 0\.5 s without a wait") as failed:
            tg.testing.run(hangs(), stuck_s=0.5)
    finally:
        _over.set()
    assert "in hangs" in failed.value.traceback_text


@tg.elastic(checkpoint="file:///nowhere/at/all", checkpoint_every_s=0.05)
def kept(run: tg.Run) -> Any:
    return fit.__wrapped__(run)


def test_checkpoints_go_elsewhere(undisturbed: Any) -> None:
    assert np.array_equal(tg.testing.run(kept()).value, undisturbed)


@tg.elastic
def without_parts_now_and_then(run: tg.Run, when: int = 1) -> Any:
    s = run.state(w=0)
    for step in steps_of(run):
        if step.number % 2 == when:
            s.w += 1
            continue
        for part in step:
            part.add(n=1)
        s.w += step["n"]
    return s.w


@pytest.mark.parametrize("when", [0, 1])
def test_steps_without_a_part_loop(when: int) -> None:
    assert tg.testing.run(without_parts_now_and_then(when=when)).value == 4 * 4 + 4


@tg.elastic
def over_pairs(run: tg.Run) -> Any:
    s = run.state(w=np.ones(3))
    for step in steps_of(run):
        for part in step:
            part.collect(z=X[part.rows] * s.w)
        outputs = step.all("z")
        pull = np.concatenate(outputs).mean(0)
        for part in step:  # what the first round collected, by the number of the part
            part.add(g=(X[part.rows] * (outputs[part.number] - pull)).sum(0))
        s.w -= 0.1 * step["g"] / step.size
    return s.w


def test_a_further_round_may_use_what_parts_collected() -> None:
    assert np.array_equal(tg.testing.run(over_pairs()).value, tg.run(over_pairs(), nodes=0).value)


@tg.elastic
def in_a_group(run: tg.Run) -> int:
    return len(run.group())


def test_strict_mode_does_not_fit_groups() -> None:
    with pytest.raises(tg.JobFailed, match="how many workers it has: give nodes=3, strict=False"):
        tg.testing.run(in_a_group())
    assert tg.testing.run(in_a_group(), nodes=3, strict=False).value == 3


@tg.elastic
def once_by_the_first_worker(run: tg.Run, per_pass: int) -> None:
    s = run.state(w=0)
    for step in steps_of(run, rows=20 * per_pass, passes=3):
        for part in step:
            part.add(n=1)
        s.w += step["n"]
        if step.ends_pass and run.worker == run.workers[0]:
            run.once(lambda: 1)


@pytest.mark.parametrize("per_pass", [1, 4, 8, 30])
def test_calls_of_one_worker_alone(per_pass: int) -> None:
    with pytest.raises(tg.JobFailed, match=r"decide (`break`, rounds|by totals)"):
        tg.testing.run(once_by_the_first_worker(per_pass=per_pass))
