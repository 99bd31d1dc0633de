"""Arrays of the state that share memory with what has another name: they are errors, and all else is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.elastic_jobs.sharing import refuse_shared_memory
from taskgraph.elastic_jobs.state import leaves
from taskgraph.errors import JobFailed, StateError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from torch import nn  # noqa: E402

W = np.zeros((4, 3))
FLAT = torch.zeros(8)
MODEL = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
MODEL[2].weight = MODEL[0].weight
CLONES = r"keep a copy, for example {k: v.clone() for k, v in model.state_dict().items()}"


def test_optimizer_shares_memory_with_its_state_only() -> None:
    opt = torch.optim.SGD(MODEL.parameters(), 0.1, momentum=0.9)  # not at import, which would cost every run 2 s
    MODEL(torch.ones(2, 3)).sum().backward()
    opt.step()
    refuse_shared_memory(leaves({"m": MODEL, "o": opt, "first": MODEL[0], "weight": MODEL[0].weight}))
    with pytest.raises(StateError) as failed:
        refuse_shared_memory(leaves({"o": opt, "kept": opt.state_dict()}))
    assert str(failed.value) == (
        f"kept.state.0.momentum_buffer shares its memory with o.state.0.momentum_buffer: {CLONES}"
    )


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"m": MODEL, "kept": MODEL.state_dict()}, f"kept.0.bias shares its memory with m.0.bias: {CLONES}"),
        ({"m": MODEL, "kept": [MODEL[1].running_var]}, f"kept[0] shares its memory with m.1.running_var: {CLONES}"),
        (
            {"kept": {"b": MODEL[0].bias.detach().numpy()}, "m": MODEL},
            f"kept.b shares its memory with m.0.bias: {CLONES}",
        ),
        ({"w": W, "best": W}, "best shares its memory with w: keep a copy, for example w.copy()"),
        ({"w": W, "row": W[1]}, "row shares its memory with w: keep a copy, for example w.copy()"),
        ({"all": FLAT, "half": FLAT[4:]}, "half shares its memory with all: keep a copy, for example all.clone()"),
    ],
)
def test_what_shares_memory(state: Any, text: str) -> None:
    with pytest.raises(StateError) as failed:
        refuse_shared_memory(leaves(state))
    assert str(failed.value) == text


@pytest.mark.parametrize(
    "state",
    [
        {"m": MODEL, "first": MODEL[0], "weight": MODEL[0].weight},
        {"m": MODEL, "kept": {name: value.clone() for name, value in MODEL.state_dict().items()}},
        {"left": W[:, :2], "right": W[:, 2:], "pair": (W[:0], W[:0])},
        {"left": FLAT[:4], "right": FLAT[4:]},
        {"views": {"all": FLAT, "half": FLAT[4:]}, "number": 3, "text": "x"},
    ],
)
def test_what_does_not(state: Any) -> None:
    refuse_shared_memory(leaves(state))


@tg.elastic
def keeps_no_copy(run: tg.Run) -> None:
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    s = run.state(model=model, opt=opt, best=None, kept=None)
    for step in run.steps(rows=40, batch=20, parts=4, passes=8):
        for part in step:
            part.backward(model(torch.ones(1, 3)).sum())
        opt.step()
        if step.number == 12:
            s.best, s.kept = step.loss, model.state_dict()


def test_strict_run_says_so_at_the_next_step() -> None:
    with pytest.raises(JobFailed, match=r"kept\.bias shares its memory with model\.bias: keep a copy, for exam"):
        tg.testing.run(keeps_no_copy())
