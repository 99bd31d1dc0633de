"""Process groups of PyTorch: sums of every dtype, and groups that are closed from outside."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from taskgraph.elastic_jobs.together import GroupClosed, GroupSums, _ProcessGroup
from taskgraph.errors import JobError
from taskgraph.protocol.elastic.views import View, ViewEntry

DTYPES = ("f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


@pytest.fixture
def groups() -> Iterator[list[_ProcessGroup]]:
    with three_workers() as made:
        yield made


@contextlib.contextmanager
def three_workers() -> Iterator[list[_ProcessGroup]]:
    """The groups of three workers of a view."""
    made: list[_ProcessGroup] = []

    def send(sender: int, key: str, content: bytes) -> None:
        while len(made) < 3:
            time.sleep(0.001)
        for rank, group in enumerate(made):
            if rank != sender:
                group.keys.put(key, content)

    made += [_ProcessGroup("gloo", 7, rank, 3, "127.0.0.1", functools.partial(send, rank)) for rank in range(3)]
    yield made
    for group in made:
        group.close()


@pytest.mark.parametrize("name", DTYPES)
def test_sums_of_a_dtype(groups: list[_ProcessGroup], name: str) -> None:
    held = [[np.arange(5).astype(name) + rank, np.full(5, 250).astype(name)] for rank in range(2)]
    zeros = [np.zeros(5, name) for _ in range(3)]
    results = [
        groups[rank].sum([zeros[rank]], [[array] for array in (held[rank] if rank < 2 else [])]) for rank in range(3)
    ]
    wished = np.zeros(5, name)
    for array in itertools.chain(*held):
        wished += array  # integers wrap around
    for result in results:
        (total,) = result.result(30)
        assert total.dtype == wished.dtype and total.tobytes() == wished.tobytes()


def test_all_workers_and_another_run_get_the_same_bits(groups: list[_ProcessGroup]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=10_001).astype(np.float32) for _ in range(3)]
    results = [group.sum([np.zeros(10_001, np.float32)], [[each]]) for group, each in zip(groups, arrays, strict=True)]
    first, *others = [result.result(30)[0].tobytes() for result in results]
    assert others == [first, first]
    with three_workers() as again:  # as in another run on as many workers
        for result in [
            group.sum([np.zeros_like(arrays[0])], [[each]]) for group, each in zip(again, arrays, strict=True)
        ]:
            assert result.result(30)[0].tobytes() == first


def test_dtype_that_cannot_be_summed(groups: list[_ProcessGroup]) -> None:
    result = groups[0].sum([np.zeros(2, np.longdouble)], [])
    with pytest.raises(JobError, match="cannot sum"):
        result.result(30)


def test_group_is_closed_from_outside(groups: list[_ProcessGroup]) -> None:
    for result in [group.sum([np.zeros(3)], [[np.ones(3)]]) for group in groups]:
        assert result.result(30)[0].tolist() == [3.0, 3.0, 3.0]
    waiting = [group.sum([np.zeros(1000)], [[np.ones(1000)]]) for group in groups[:2]]  # the third one never comes
    time.sleep(0.05)
    assert not any(result.done() for result in waiting)
    began = time.monotonic()
    for group, result in zip(groups, waiting, strict=False):
        group.close()
        with pytest.raises(GroupClosed):
            result.result(0)
    assert time.monotonic() - began < 30, "Gloo itself waits for a minute"


def test_group_that_is_never_complete_is_closed() -> None:
    group = _ProcessGroup("gloo", 1, 0, 2, "127.0.0.1", lambda key, content: None)
    result = group.sum([np.zeros(3)], [])
    time.sleep(0.05)
    group.close()
    with pytest.raises(GroupClosed):
        result.result(0)


async def test_key_that_comes_before_the_group_is_kept() -> None:
    """The most senior worker may tell its address before this one enters the view that it has read."""

    async def fail(error: JobError) -> None:
        raise error

    node: Any = SimpleNamespace(id="n1", transport=SimpleNamespace(endpoints=()))
    together = GroupSums(node, "gloo", fail=fail, send=lambda *_: None, changed=lambda: None)
    assert not together.put_key(0, "0", b"address")
    together.begin_view(View(0, 0, (ViewEntry("n1", 0), ViewEntry("n2", 0))))
    assert together.put_key(0, "0", b"address")
    together.close()
    assert not together.put_key(0, "0", b"address")


def test_no_nccl_on_this_host() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    group = _ProcessGroup("nccl", 7, 0, 2, "127.0.0.1", lambda key, content: None)
    try:
        with pytest.raises(JobError, match=r'communicator="nccl": PyTorch finds no GPU, or was built without NCCL'):
            group.sum([np.zeros(1)], []).result(30)
    finally:
        group.close()
