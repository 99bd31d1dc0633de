"""The examples' numbers, in one process: undisturbed, with kills at every stage, in shuffled orders, in strict mode."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.driver.loading import load_driver
from taskgraph.launch.inprocess import arun_inprocess
from taskgraph.observe.events import Event
from taskgraph.results import JobResult

EXAMPLES = Path(__file__).parents[2] / "examples"
BOTH_STYLES = ["framework_regression", "framework_regression_events"]
ALL = [
    *BOTH_STYLES,
    "linear_regression",
    "readme",
    "heat",
    "tempering",
    "alignment",
    "network",
    "search",
    "matrix_factorization",
    "gpu_kmeans",
    "gpu_regression",
]
ELASTIC = ["elastic_readme", "elastic_numpy", "elastic_torch"]
STAGES = ["compose", "processor", "sync", "snapshot", "done", "commit", "committed"]


def job(example: str, **options: object) -> tg.Job:
    return load_driver(str(EXAMPLES / f"{example}.py"))(**options)


def without_tasks(example: str, function: str) -> Any:
    """What an example compares itself with."""
    return load_driver(str(EXAMPLES / f"{example}.py")).__wrapped__.__globals__[function]


def test_missing_flights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed
    with pytest.raises(tg.JobFailed, match=r"pip install 'taskgraph-aio\[examples\]'"):
        tg.testing.run(job("linear_regression", tasks=1, epochs=1))


@pytest.mark.parametrize(
    ("example", "options", "says"),
    [
        ("network", {"points": 3}, "3 points for 4 tasks: each task needs a point: take more points, or fewer tasks"),
        ("network", {"hidden": 0}, "hidden and size must be 1 at least"),
        ("network", {"size": 0}, "hidden and size must be 1 at least"),
        ("gpu_kmeans", {"points": 6}, "6 points for 7 tasks: each task needs a point"),
        ("gpu_kmeans", {"centers": 0}, "centers and dimensions must be 1 at least"),
        ("gpu_regression", {"rows": 3, "columns": 5}, "3 rows of 5 columns: take "),
        ("gpu_regression", {"columns": 0}, "100000 rows of 0 columns: take 1 column at least"),
        ("heat", {"rows": 5, "size": 3}, "5 x 2 blocks of 3 x 3 cells: each needs a cell"),
        ("heat", {"tolerance": -1.0}, "tolerance must be 0 at least: else the job never ends"),
        ("alignment", {"length": 0}, "length must be 1 at least"),
        *((example, {"length": 0}, "length must be 1 at least") for example in BOTH_STYLES),
    ],
)
def test_senseless_size_is_refused(example: str, options: dict[str, Any], says: str) -> None:
    """Some task divided by zero in epoch 0, with a traceback of numpy's."""
    with pytest.raises(ValueError, match=says):
        job(example, **options)


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("network", {"tasks": 4, "points": 4, "size": 9, "hidden": 1}),
        ("gpu_kmeans", {"tasks": 5, "points": 5, "centers": 2}),
        ("gpu_regression", {"tasks": 9, "rows": 60, "columns": 2}),
        ("heat", {"rows": 3, "cols": 1, "size": 3}),
        ("alignment", {"tasks": 9, "length": 4}),
        ("search", {"trainers": 5, "trials": 2}),
    ],
)
def test_more_tasks_than_work(example: str, options: dict[str, Any]) -> None:
    more = {} if example in ("heat", "search") else {"epochs": 3}
    assert tg.testing.run(job(example, **options, **more)).epochs >= 1


def values_reported(result: JobResult) -> list[float]:
    return [report.numbers["value"] for report in result.reports]


@pytest.mark.parametrize("example", BOTH_STYLES)
def test_regression_has_the_original_numbers(example: str) -> None:
    result = tg.testing.run(job(example))
    assert result.value == [0, 105, 210, 315, 420, 525, 630, 735, 840, 945, 1050]
    assert values_reported(result) == result.value
    assert [report.epoch for report in result.reports] == list(range(11))
    assert (result.epochs, result.failovers, result.restarts) == (11, 0, 0)


@pytest.mark.parametrize("example", BOTH_STYLES)
@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
def test_regression_of_any_number_of_tasks(example: str, tasks: int) -> None:
    result = tg.testing.run(job(example, tasks=tasks, epochs=3, length=1))
    assert result.value == [epoch * tasks * (tasks - 1) // 2 for epoch in range(3)]


@pytest.mark.parametrize("example", BOTH_STYLES)
@pytest.mark.parametrize("stage", STAGES)
def test_regression_survives_kills_of_the_root(example: str, stage: str) -> None:
    result = tg.testing.run(job(example, tasks=7, epochs=5), kills={(0, 2): stage}, order=STAGES.index(stage))
    assert result.value == [0, 21, 42, 63, 84]
    assert values_reported(result) == result.value
    assert result.failovers >= 1


@pytest.mark.parametrize("example", BOTH_STYLES)
@pytest.mark.parametrize("order", range(3))
def test_regression_survives_several_kills(example: str, order: int) -> None:
    kills = {(1, 1): "processor", (6, 2): "sync", (0, 3): "done", (2, 3): "compose"}
    result = tg.testing.run(job(example, tasks=7, epochs=5, backups=2), kills=kills, order=order)
    assert result.value == [0, 21, 42, 63, 84]
    assert values_reported(result) == result.value


def test_readmes_program_finds_the_line() -> None:
    result = tg.testing.run(job("readme", tasks=7, epochs=12))
    np.testing.assert_allclose(result.value, [1.0, 2.0, 3.0], rtol=1e-9)
    slopes = [report.numbers["slope"] for report in result.reports]
    assert slopes[-1] < 1e-3 < slopes[0]


def test_cold_chain_leaves_its_well() -> None:
    epochs = 400
    assert tg.run(job("tempering", tasks=1, epochs=epochs), nodes=0).value == 0, "alone it does not"
    found = tg.run(job("tempering", epochs=epochs), nodes=0)
    assert found.values[0] / epochs == pytest.approx(without_tasks("tempering", "left_share")(), abs=0.1)
    assert found.values[0] > found.values[5], "a hot one is in both wells alike"
    assert found.reports[-1].numbers["left"] == found.values[0] / epochs


@pytest.mark.parametrize("order", range(2))
def test_tempering_survives_kills(order: int) -> None:
    undisturbed = tg.testing.run(job("tempering", tasks=4, epochs=8))
    kills = {(0, 2): "processor", (3, 3): "sync", (1, 5): "done"}
    killed = tg.testing.run(job("tempering", tasks=4, epochs=8), kills=kills, order=order)
    assert killed.failovers >= 3
    assert killed.values == undisturbed.values
    assert killed.reports == undisturbed.reports


@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_alignment_survives_kills(tasks: int) -> None:
    score = without_tasks("alignment", "score")
    scores = [score(number, 30) for number in range(8)]
    assert scores[0] == 60 > scores[7], "two that are alike, and two that are not"
    assert tg.testing.run(job("alignment", tasks=tasks, epochs=8, length=30)).value == scores
    kills = {(0, 2): "processor", (tasks - 1, 5): "sync"}
    killed = tg.testing.run(job("alignment", tasks=tasks, epochs=8, length=30), kills=kills, strict=False)
    assert killed.value == scores
    assert killed.failovers >= 2


def test_network_survives_kills() -> None:
    alone, right = (without_tasks("network", each) for each in ("alone", "right"))
    told = right(alone(4, 400, 16, 2000, 50), 16, 2000)
    assert told > 0.99
    weights = alone(3, 10, 8, 100, 20)
    undisturbed = tg.testing.run(job("network", tasks=3, epochs=10, hidden=8, points=100, size=20))
    kills = {(0, 2): "processor", (2, 5): "sync", (1, 7): "done"}
    killed = tg.testing.run(job("network", tasks=3, epochs=10, hidden=8, points=100, size=20), kills=kills, order=1)
    assert killed.failovers >= 3
    for result in (undisturbed, killed):
        parts = [result.values[task] for task in range(3)]
        np.testing.assert_array_equal(np.concatenate(parts), weights)
    assert killed.reports == undisturbed.reports


@pytest.mark.parametrize("order", range(2))
def test_search_survives_kills(order: int) -> None:
    ((number, trial),) = without_tasks("search", "alone")(trials=9, seed=1).items()
    told = {"trial": number, **{name: value for name, value in trial.items() if name != "weights"}}
    undisturbed = tg.testing.run(job("search", trials=9, at_a_time=4, seed=1))
    kills = {(0, 1): "sync", (2, 2): "done", (1, 3): "done", (0, 5): "commit"}
    killed = tg.testing.run(job("search", trials=9, at_a_time=4, seed=1), kills=kills, order=order)
    assert killed.failovers >= 4
    assert undisturbed.value == killed.value == told
    assert undisturbed.reports == killed.reports and undisturbed.epochs == 3 + 2 + 1 + 1


def test_empty_search_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing would be trained"):
        job("search", trainers=0)


@pytest.mark.parametrize("tasks", [1, 7])
def test_network_of_any_number_of_tasks(tasks: int) -> None:
    result = tg.testing.run(job("network", tasks=tasks, epochs=3, hidden=2, points=50, size=9))
    parts = [result.values[task] for task in range(tasks)]
    np.testing.assert_array_equal(np.concatenate(parts), without_tasks("network", "alone")(tasks, 3, 2, 50, 9))


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_matrix_factorization_has_the_bits_of_a_loop(servers: int) -> None:
    kills = {(4, 1): "processor", (5, 2): "done", (0, 4): "commit"}
    killed = tg.testing.run(job("matrix_factorization", epochs=6, servers=servers), kills=kills, order=servers)
    assert killed.failovers >= 3
    assert killed.value == without_tasks("matrix_factorization", "alone")(epochs=6)


@pytest.mark.slow
def test_matrix_factorization_learns() -> None:
    """The loop, whose bits the tasks have."""
    assert without_tasks("matrix_factorization", "alone")() < 0.3, "the noise is 0.1, and ratings have a deviation of 1"


@pytest.mark.slow
def test_linear_regression_is_exact_after_kills() -> None:
    undisturbed = tg.testing.run(job("linear_regression", tasks=7))
    found = undisturbed.value
    assert found["rows"] == 327_346
    assert found["largest relative difference to numpy.linalg.lstsq"] < 1e-6
    assert len(found["coefficients"]) == 1 + 4 + 15  # intercept, four numbers, all carriers but one
    assert found["coefficients"]["dep_delay"] == pytest.approx(1.0228, abs=1e-4)
    losses = [report.numbers["loss"] for report in undisturbed.reports]
    assert losses[0] > losses[-1]
    assert undisturbed.epochs < 100, "it ends when the gradient vanishes, before its last epoch"

    kills = {(0, 3): "commit", (5, 4): "processor", (0, 8): "sync", (1, 9): "done"}
    killed = tg.testing.run(job("linear_regression", tasks=7), kills=kills, order=1, strict=False)
    assert killed.failovers >= 3
    assert killed.value == found
    assert killed.reports == undisturbed.reports


@pytest.mark.parametrize(
    "example", [pytest.param(each, marks=pytest.mark.slow if each == "linear_regression" else ()) for each in ALL]
)
def test_examples_keep_all_state_in_snapshots(example: str) -> None:
    events: list[Event] = []
    few = {"heat": {"tolerance": 20.0}, "search": {"trials": 2}}.get(example, {"epochs": 2})
    asyncio.run(arun_inprocess(job(example, **few), on_event=events.append))
    assert "finished" in {event.kind for event in events}
    assert not [event.text for event in events if event.kind == "unheld"]


@pytest.mark.parametrize(
    ("example", "options", "found"),
    [
        ("elastic_readme", {"passes": 2}, None),
        ("elastic_numpy", {"points": 4000, "steps": 12}, "steps"),
        pytest.param("elastic_torch", {"passes": 1}, "best accuracy", marks=pytest.mark.slow),
    ],
)
def test_elastic_examples_have_the_same_bits_with_kills(
    example: str, options: dict[str, Any], found: str | None
) -> None:
    if example == "elastic_torch":
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    alone = tg.testing.run(job(example, **options))  # strict: newcomers join unasked
    killed = tg.testing.run(job(example, **options), kills={(0, 1): "sums", (1, 3): "total", (0, 6): "part"}, order=2)
    assert killed.to_json().partition('"wall_s"')[0] == alone.to_json().partition('"wall_s"')[0]
    assert found is None or alone.value[found] > 0.5


@pytest.mark.parametrize("example", [*ALL, *ELASTIC])
def test_examples_name_their_command(example: str) -> None:
    text = (EXAMPLES / f"{example}.py").read_text()
    assert f"taskgraph run examples/{example}.py --nodes 4" in text.split('"""')[1]


def test_word_counts_are_those_of_one_process(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(90)]
    for number, path in enumerate(paths):
        path.write_text(f"Words and more words: {'spam ' * number}\n")
    files = [str(path) for path in paths]
    sys.path.insert(0, str(EXAMPLES))
    try:
        import wordcount
    finally:
        sys.path.remove(str(EXAMPLES))
    found = wordcount.counted(files, nodes=0)
    assert found == wordcount.count(files) and found["spam"] == sum(range(90)) and found["words"] == 180
    assert len(wordcount.texts()) > 10
