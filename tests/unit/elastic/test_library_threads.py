"""Workers in this process compute with the threads that workers of their own process have, and so with their bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.elastic_jobs.libraries import library_threads
from taskgraph.system.blas import OpenBlas, openblas_here


@pytest.fixture
def openblas() -> Iterator[OpenBlas]:
    """numpy's OpenBLAS, with two threads."""
    found = openblas_here()
    if not found:
        pytest.skip("numpy has another BLAS here")
    before = found[0].threads()
    found[0].set_threads(2)
    yield found[0]
    found[0].set_threads(before)


@tg.elastic
def product(run: tg.Run) -> float:
    x = np.random.default_rng(0).normal(size=(2000, 400)).astype(np.float32)
    s = run.state(w=np.ones(400, np.float32))
    for step in run.steps(rows=2000, batch=2000, parts=1, passes=2):
        for part in step:
            part.add(g=x.T @ (x @ s.w), threads=openblas_here()[0].threads())
        assert step["threads"] == 1
        s.w -= np.float32(1e-6) * step["g"]
    return float(s.w.sum())


def test_products_have_the_bits_of_one_thread(openblas: OpenBlas) -> None:
    found = tg.run(product(), nodes=0).value
    assert openblas.threads() == 2
    openblas.set_threads(1)
    assert tg.run(product(), nodes=0).value == found


def test_several_callers(openblas: OpenBlas) -> None:
    with library_threads(1):
        with library_threads(1):
            assert openblas.threads() == 1
        assert openblas.threads() == 1
    assert openblas.threads() == 2


def test_pytorch_too() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with library_threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_scipys_library_too(openblas: OpenBlas) -> None:
    """Its wheel names the functions in another way than numpy's."""
    pytest.importorskip("scipy.linalg")
    both = openblas_here()
    if len(both) < 2:
        pytest.skip("scipy has another BLAS here")
    before = [each.threads() for each in both]
    with library_threads(1):
        assert [each.threads() for each in both] == [1, 1]
    assert [each.threads() for each in both] == before
