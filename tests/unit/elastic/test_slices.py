"""Large sums are added up in slices: with the same bits, and what workers get of them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from elastic_cluster import pause, run_job

import taskgraph as tg
from taskgraph.elastic_jobs.job import elastic
from taskgraph.elastic_jobs.slices import Slices, encode_slices
from taskgraph.graph.blocks import Block, block_behind
from taskgraph.graph.sums import Sums, decode_sums, join_slices


@elastic
def fit(run: Any, size: int, steps: int = 12) -> Any:
    """Sums arrays of several dtypes, of one element and of many, and what parts collect."""
    s = run.state(w=np.ones(size, np.float32), numbers=0)
    for step in run.steps(rows=24, batch=24, parts=7, passes=steps):
        for part in step:
            values = np.random.default_rng(part.seed).normal(size=(2, size)) * np.exp(part.number)
            part.add(w=(values[0] * s.w).astype(np.float32), z=values[:, :5] * 1j, one=values[0, 0], rows=part.size)
            part.collect(number=part.number)
            pause()
        s.w = s.w * np.float32(0.5) + step["w"] * np.float32(0.01) + np.float32(abs(step["z"]).sum())
        s.numbers += step["rows"] + sum(step.all("number"))
    return s.w.tobytes(), s.numbers


def run(size: int, least: int, scenario: tuple[int, str]) -> Any:
    job = fit(size=size)
    return asyncio.run(
        run_job(dataclasses.replace(job, settings=dataclasses.replace(job.settings, sliced_bytes=least)), scenario)
    ).values[0]


@pytest.fixture
def slice_sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of each sum of a slice."""
    found: list[int] = []
    put = Slices.put_sum

    def noted(self: Slices, view: int, position: int, owner: str, sums: Sums) -> None:
        found.append(sum(array.size for array in sums.arrays))
        put(self, view, position, owner, sums)

    monkeypatch.setattr(Slices, "put_sum", noted)
    return found


@pytest.mark.parametrize("size", [5, 100_000])
@pytest.mark.parametrize("scenario", [(3, ""), (4, ".K.+"), (3, "+.K.K")])
def test_same_bits(size: int, scenario: tuple[int, str], slice_sums: list[int]) -> None:
    whole = run(size, 1 << 40, (1, ""))
    assert not slice_sums
    assert run(size, 1, scenario) == whole
    assert len(slice_sums) >= 9 and max(slice_sums) < size + 20


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_workers_send_whole_sums(nodes: int, slice_sums: list[int]) -> None:
    run(5, 1, (nodes, ""))
    assert not slice_sums


def test_small_sums_are_sent_whole(slice_sums: list[int]) -> None:
    run(5, 1000, (3, ""))
    assert not slice_sums


@elastic
def unlike(run: Any) -> None:
    run.state(x=0)
    for step in run.steps(rows=3, batch=3, parts=3, passes=3):
        for part in step:
            part.add(g=np.zeros(4 if run.worker == "n2" else 30))


@pytest.mark.parametrize("least", [1, 100])
def test_shapes_that_differ_between_workers(least: int) -> None:
    """Also if only some of the sums are large."""
    job = unlike()
    job = dataclasses.replace(job, settings=dataclasses.replace(job.settings, sliced_bytes=least))
    with pytest.raises(
        tg.JobFailed,
        match=r"\(g=\.\.\.\) is an array of float64 with shape \(30?4?,\) in the parts of n\d, and an .* parts of n\d",
    ):
        asyncio.run(run_job(job, (3, "")))


@pytest.mark.parametrize("count", [3, 4, 7])
def test_slices_of_any_size_are_joined_again(count: int) -> None:
    sums = Sums.of({"a": np.arange(5.0), "b": np.arange(1000, dtype=np.float32), "c": 3, "d": np.zeros(0)})
    whole = sums.without_arrays()
    assert join_slices(whole, [sums.slice(i, count) for i in range(count)]).tree()["b"].tolist() == list(range(1000))
    workers = [f"n{i}" for i in range(count)]
    encoded = encode_slices([sums], workers, [*workers[1:], "n9"], lambda size: None)
    assert list(encoded) == [*workers[1:], "n9"]
    (bare,) = decode_sums(encoded["n9"])
    assert bare.arrays == () and bare.layout == sums.layout
    slices = [sums.slice(0, count), *(decode_sums(encoded[worker])[0] for worker in workers[1:])]
    again = join_slices(whole, slices).tree()
    assert again["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and again["c"] == 3


def test_slices_are_sent_without_a_copy() -> None:
    def allocate(size: int) -> Block:
        block = Block(size, np.uint8, bytearray(size))
        block.origin = Used()
        return block

    sums = Sums.of({"a": np.arange(400_000.0)}, allocate=allocate)
    block = block_behind(sums.arrays[0])
    values = encode_slices([sums], ["n1", "n2", "n3"], ["n2", "n3"], allocate)
    for number, worker in enumerate(("n2", "n3"), 1):
        (buffer,) = values[worker].buffers
        assert block_behind(buffer) is block and buffer.readonly
        assert np.shares_memory(np.frombuffer(buffer), sums.slice(number, 3).arrays[0])


class Used:
    locked = False

    def spoil(self) -> None:
        raise AssertionError

    def pin(self, device: Any) -> None:
        raise AssertionError
