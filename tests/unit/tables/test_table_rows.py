"""First rows, sums of gradients, optimizers and the store of a table."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import taskgraph as tg
from taskgraph.tables.merging import as_gradients, as_ids, server_of, sum_by_id
from taskgraph.tables.optimizers import OPTIMIZERS
from taskgraph.tables.rows import first_rows, table_seed
from taskgraph.tables.store import RowStore, rows_of_server
from taskgraph.tables.table import Table

Array = NDArray[Any]
SEED = table_seed(3, "users")


def made(ids: Any, width: int = 8, init: str = "normal", scale: float = 1.0, seed: int = SEED) -> Array:
    return first_rows(np.asarray(ids, np.int64), width, seed=seed, init=init, scale=scale, dtype=np.dtype(np.float64))


def test_row_depends_on_seed_and_id_alone() -> None:
    rows = made(range(5000))
    rng = np.random.default_rng(0)
    some = rng.integers(0, 5000, 700)
    assert np.array_equal(made(some), rows[some])
    assert np.array_equal(made([4321])[0], rows[4321])
    assert not (made([7], seed=SEED + 1) == rows[7]).any()
    assert np.array_equal(made([-5, 2**63 - 1])[0], made([-5])[0])
    assert len(np.unique(rows)) == rows.size


def test_normal_rows_follow_the_normal_distribution() -> None:
    drawn = np.sort(made(range(20_000), width=10).ravel())
    assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
    exact = statistics.NormalDist()
    for share in (1e-4, 0.01, 0.2, 0.5, 0.7, 0.999, 0.9999):
        expected = exact.inv_cdf(share)
        assert abs(drawn[int(share * len(drawn))] - expected) < 0.02 + 0.05 * abs(expected)


def test_uniform_and_zero_rows() -> None:
    drawn = made(range(5000), init="uniform", scale=2.0)
    assert -2 < drawn.min() < -1.99 and 1.99 < drawn.max() < 2
    assert abs(drawn.mean()) < 0.05
    assert not made(range(10), init="zeros").any()


def test_first_bits_are_recorded() -> None:
    """A checkpoint holds only rows that somebody pushed to: the others must be made alike for ever."""
    assert made([0, 1, -1], width=2, seed=1).tolist() == [
        [0.05656476853729828, -0.5638766132170696],
        [-1.119653589030201, 1.1819368709838534],
        [1.4120278766407492, 0.09916209300172649],
    ]


def test_thousand_rows_are_made_at_once() -> None:
    began = time.thread_time()
    made(range(1000), width=64)
    assert time.thread_time() - began < 0.5


def test_sums_are_made_in_the_order_given() -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(-4, 5, 200)
    gradients = rng.normal(size=(200, 3)).astype(np.float32)
    unique, sums = sum_by_id(ids, gradients)
    assert unique.tolist() == sorted(set(ids.tolist()))
    for one, total in zip(unique, sums, strict=True):
        expected = np.zeros(3, np.float32)
        for gradient in gradients[ids == one]:
            expected = expected + gradient
        assert np.array_equal(total, expected)


def test_servers_share_rows_evenly() -> None:
    ids = np.arange(30_000) * 64
    assert np.bincount(server_of(ids, 3), minlength=3).min() > 9_700
    assert np.array_equal(server_of(ids[5:9], 3), server_of(ids, 3)[5:9])
    assert not server_of(ids, 1).any()


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0.5], "int64"),
        (np.zeros(3), "float64"),
        ("abc", "int64"),
        (np.zeros((2, 2), np.int64), "one dimension"),
        ([2**63], "larger"),
        (np.array([2**63], np.uint64), "too large"),
        ([12], "rows 0 to 9"),
        ([-1], "rows 0 to 9"),
    ],
)
def test_wrong_ids_are_refused(ids: Any, text: str) -> None:
    with pytest.raises(tg.TableError, match=text):
        as_ids(ids, "pull", rows=10)


def test_ids_of_all_integer_types() -> None:
    for ids in ([], [1, 2], range(1, 3), np.array([1, 2], np.uint8), (np.int32(1), 2)):
        assert as_ids(ids, "pull").dtype == np.int64


def test_wrong_gradients_are_refused() -> None:
    ids = np.arange(3)
    with pytest.raises(tg.TableError, match=r"\(3, 2\)"):
        as_gradients(np.zeros((2, 2), np.float32), ids, 2, np.dtype(np.float32), "push")
    for wrong in (np.zeros((3, 2), int), np.zeros((3, 2), bool), np.zeros((3, 2), complex)):
        with pytest.raises(tg.TableError, match="gradients are floats"):
            as_gradients(wrong, ids, 2, np.dtype(np.float32), "push")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("given", ["float16", "float32", "float64"])
def test_floats_become_those_of_the_table(given: str, dtype: str) -> None:
    gradients = np.array([[0.1, 2.0], [np.finfo(given).max, np.nan]], given)
    with np.errstate(over="ignore"):
        expected = gradients.astype(dtype)
    found = as_gradients(gradients, np.arange(2), 2, np.dtype(dtype), "push")
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_rows_are_those_of_a_dense_optimizer(name: str) -> None:
    """A dense loop that gets zero gradients for all other rows makes the same bits."""
    rng = np.random.default_rng(2)
    rule, dtype = OPTIMIZERS[name], np.dtype(np.float32)
    store = RowStore(Table(4, optimizer=name, lr=0.3), SEED)  # type: ignore[arg-type]
    rows = store.pull(np.arange(30))
    slots = rule.first_slots(30, 4, dtype)
    for _ in range(40):
        ids = rng.integers(0, 30, 12)
        gradients = rng.normal(size=(12, 4)).astype(np.float32)
        store.push(ids, gradients, 0.3)
        dense = np.zeros((30, 4), np.float32)
        np.add.at(dense, ids, gradients)
        rows, slots = rule.change(rows, slots, dense, 0.3)
    assert np.array_equal(store.pull(np.arange(30)), rows)


@pytest.mark.slow  # it imports PyTorch
@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam"])
def test_optimizers_are_those_of_pytorch(name: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    store = RowStore(Table(3, optimizer=name, lr=0.05, dtype="float64"), SEED)  # type: ignore[arg-type]
    ids = np.arange(6)
    weight = torch.tensor(store.pull(ids), requires_grad=True)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    optimizer = (
        torch.optim.SGD([weight], lr=0.05, momentum=0.9) if name == "momentum" else kinds[name]([weight], lr=0.05)
    )
    for _ in range(7):
        gradients = rng.normal(size=(6, 3))
        weight.grad = torch.tensor(gradients)
        optimizer.step()
        store.push(ids, gradients, 0.05)
    np.testing.assert_allclose(store.pull(ids), weight.detach().numpy(), rtol=1e-12)


def test_adam_counts_steps_for_each_row() -> None:
    store = RowStore(Table(2, optimizer="adam", init="zeros", lr=0.1, dtype="float64"), SEED)
    one = np.ones((1, 2))
    for _ in range(5):
        store.push(np.array([1]), one, 0.1)
    store.push(np.array([2]), one, 0.1)
    np.testing.assert_allclose(store.pull(np.array([2])), -0.1, rtol=1e-6)  # the length of a first step


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_store_is_that_of_a_dict(name: str) -> None:
    """A log of segments, with merges, has what a plain dict of rows has."""
    rng = np.random.default_rng(5)
    table = Table(2, optimizer=name, lr=0.1)  # type: ignore[arg-type]
    rule, store = table.rule, RowStore(table, SEED)
    plain: dict[int, tuple[Array, dict[str, Array]]] = {}
    for number in range(120):
        ids = rng.integers(-500, 500, int(rng.integers(0, 60)))
        gradients = rng.normal(size=(len(ids), 2)).astype(np.float32)
        store.push(ids, gradients, 0.1)
        for one in sorted(set(ids.tolist())):
            total = np.zeros((1, 2), np.float32)
            for gradient in gradients[ids == one]:
                total = total + gradient
            new = (RowStore(table, SEED).pull(np.array([one])), rule.first_slots(1, 2, np.dtype(np.float32)))
            rows, slots = plain.get(one, new)
            plain[one] = rule.change(rows, slots, total, 0.1)
        if number % 50 == 25:
            store = RowStore(table, SEED, store.segments)
    wanted = rng.integers(-500, 500, 1000)
    pulled = store.pull(wanted)
    for one, row in zip(wanted.tolist(), pulled, strict=True):
        expected = plain[one][0][0] if one in plain else RowStore(table, SEED).pull(np.array([one]))[0]
        assert np.array_equal(row, expected)
    assert len(store) == len(plain)
    live = store.live_rows()
    assert live["ids"].tolist() == sorted(plain)
    if name == "adam":
        assert live["steps"].tolist() == [int(plain[one][1]["steps"][0]) for one in sorted(plain)]


def test_log_stays_small_and_changes_are_few() -> None:
    """Most pushes add one segment; the log is at most twice the rows; a row is written some three times."""
    rng = np.random.default_rng(6)
    store = RowStore(Table(1, init="zeros"), SEED)
    written, changed, before = 0, 0, set[int]()
    for _ in range(300):
        ids = rng.choice(5000, 100, replace=False)
        store.push(ids, np.ones((100, 1), np.float32), 0.1)
        sizes = {id(segment): len(segment["ids"]) for segment in store.segments}
        written += sum(size for key, size in sizes.items() if key not in before)
        changed += 100
        before = set(sizes)
        assert sum(sizes.values()) <= 2 * len(store)
        assert len(sizes) <= 64
    assert written < 4 * changed


def test_segments_never_change() -> None:
    store = RowStore(Table(2, init="zeros"), SEED)
    store.push(np.array([1, 2]), np.ones((2, 2), np.float32), 1.0)
    kept = store.segments
    copies = [{name: array.copy() for name, array in segment.items()} for segment in kept]
    for _ in range(50):
        store.push(np.array([1]), np.ones((1, 2), np.float32), 1.0)
    for segment, copy in zip(kept, copies, strict=True):
        for name, array in segment.items():
            assert np.array_equal(array, copy[name]) and not array.flags.writeable
    store.pull(np.array([1]))[:] = 5  # what is pulled is the caller's own
    assert store.pull(np.array([1]))[0, 0] == -51


def test_rows_move_to_another_number_of_servers() -> None:
    rng = np.random.default_rng(7)
    table = Table(2, optimizer="momentum")
    whole = RowStore(table, SEED)
    for _ in range(20):
        whole.push(rng.integers(0, 300, 40), rng.normal(size=(40, 2)).astype(np.float32), 0.1)
    parts = [RowStore(table, SEED, [rows_of_server(whole.live_rows(), server, 3)]) for server in range(3)]
    assert sum(map(len, parts)) == len(whole) and min(map(len, parts)) > 50
    ids = np.arange(300)
    for server, part in enumerate(parts):
        mine = ids[server_of(ids, 3) == server]
        assert np.array_equal(part.pull(mine), whole.pull(mine))


def test_rows_of_another_table_are_refused() -> None:
    with pytest.raises(tg.CheckpointError, match="optimizer"):
        Table(2).check_stored(Table(2, optimizer="adam").stored, "users")
    Table(2, lr=0.5).check_stored(Table(2).stored, "users")


@pytest.mark.parametrize(
    "given",
    [
        {"width": 0},
        {"init": "ones"},
        {"optimizer": "rmsprop"},
        {"dtype": "int64"},
        {"lr": float("nan")},
        {"lr": "0.1"},
        {"staleness": -1},
        {"servers": 0},
        {"backups": True},
        {"scale": None},
        {"rows": 0},
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(tg.TableError, match=next(iter(given))):
        Table(**{"width": 4, **given})


def test_unknown_option_names_a_known_one() -> None:
    with pytest.raises(tg.JobError, match="optimizer"):
        Table(4, optimiser="sgd")  # type: ignore[call-arg]


def test_numbers_that_are_not_finite_are_kept() -> None:
    store = RowStore(Table(2, init="zeros"), SEED)
    store.push(np.array([1, 2]), np.array([[np.nan, 1], [1, 1]], np.float32), 1.0)
    assert np.isnan(store.pull(np.array([1]))[0, 0]) and store.pull(np.array([2])).tolist() == [[-1, -1]]


def test_pushes_to_a_fork_do_not_reach_the_store() -> None:
    store, ids = RowStore(Table(2, init="zeros"), SEED), np.arange(10_000)  # so large that segments are not merged
    store.push(ids, np.ones((len(ids), 2), np.float32), 0.5)
    fork = store.fork()
    fork.push(ids[:1], np.ones((1, 2), np.float32), 0.5)
    assert store.pull(ids[:2]).tolist() == [[-0.5, -0.5], [-0.5, -0.5]]
    assert fork.pull(ids[:2]).tolist() == [[-1.0, -1.0], [-0.5, -0.5]]
