"""User code of elastic jobs computes with the threads that nodes have, also where PyTorch was loaded with others."""

from __future__ import annotations

from typing import Any

import pytest

import taskgraph as tg

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")


@tg.elastic
def threads(run: Any) -> int:
    for step in run.steps(rows=1, batch=1, parts=1, passes=1):
        for part in step:
            part.add(x=1)
    return int(torch.get_num_threads())


@tg.elastic(settings=tg.Settings(blas_threads=3))
def more_threads(run: Any) -> int:
    return threads.__wrapped__(run)


@pytest.mark.parametrize(("job", "wanted"), [(threads, 1), (more_threads, 3)], ids=["default", "setting"])
def test_threads_are_those_of_nodes(job: Any, wanted: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert tg.run(job(), nodes=0, timeout_s=30).value == wanted
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
