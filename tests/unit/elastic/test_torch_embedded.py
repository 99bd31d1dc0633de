"""Rows of a table as PyTorch's tensors: equal to `torch.nn.Embedding`, with gradients that count once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from elastic_cluster import Scenario, job_of, pause, run_job

import taskgraph as tg

torch = pytest.importorskip("torch")
F = torch.nn.functional

WORDS, WIDTH, ROWS = 12, 5, 60


def text() -> tuple[Any, Any]:
    draws = torch.Generator().manual_seed(0)
    return torch.randint(WORDS, (ROWS, 3), generator=draws), torch.randint(2, (ROWS,), generator=draws)


def first_rows() -> Any:
    def body(run: tg.Run) -> Any:
        return run.table("words", WIDTH, scale=1.0).pull(np.arange(WORDS))

    return torch.from_numpy(tg.run(job_of(body), nodes=0).value.copy())


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, dense: bool) -> None:
        super().__init__()
        if dense:
            self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.out = torch.nn.Linear(WIDTH, 2)


def fit(run: tg.Run, dense: bool, optimizer: str, reduce: str = "mean", lr: float = 0.1) -> Any:
    x, y = text()
    model = Model(dense)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.out.weight)
    torch.nn.init.zeros_(model.out.bias)
    if dense:
        model.words.weight.data.copy_(FIRST[0])
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]
    opt = kind(model.parameters(), lr)
    run.state(model=model, opt=opt)
    table = None if dense else run.table("words", WIDTH, scale=1.0, optimizer=optimizer, lr=lr)
    for step in run.steps(rows=ROWS, batch=25, parts=4, passes=3):
        for part in step:
            pause()
            rows = model.words(x[part.rows]) if table is None else table.embed(x[part.rows])
            loss = F.cross_entropy(model.out(rows.mean(1)), y[part.rows], reduction=reduce)
            part.backward(loss, reduce=reduce)
        opt.step()
    found = model.words.weight if table is None else torch.from_numpy(table.pull(np.arange(WORDS)))
    return {"words": found.detach(), "out": model.out.weight.detach(), "loss": step.loss}


FIRST: list[Any] = []


def sgd_table(run: tg.Run) -> Any:
    return fit(run, dense=False, optimizer="sgd")


def sgd_dense(run: tg.Run) -> Any:
    return fit(run, dense=True, optimizer="sgd")


def adagrad_table(run: tg.Run) -> Any:
    return fit(run, dense=False, optimizer="adagrad")


def adagrad_dense(run: tg.Run) -> Any:
    return fit(run, dense=True, optimizer="adagrad")


def sum_table(run: tg.Run) -> Any:
    return fit(run, dense=False, optimizer="sgd", reduce="sum", lr=0.002)


def sum_dense(run: tg.Run) -> Any:
    return fit(run, dense=True, optimizer="sgd", reduce="sum", lr=0.002)


@pytest.mark.parametrize(
    ("table", "dense"), [(sgd_table, sgd_dense), (adagrad_table, adagrad_dense), (sum_table, sum_dense)]
)
def test_equal_to_an_embedding_of_pytorch(table: Any, dense: Any) -> None:
    FIRST[:] = [first_rows()]
    found, wanted = (tg.run(job_of(body), nodes=0).value for body in (table, dense))
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(wanted["words"], FIRST[0])


@pytest.mark.parametrize("scenario", [(3, ".K.+"), (1, "+")])
async def test_same_bits_on_many_workers(scenario: Scenario) -> None:
    calm: Any = (await run_job(job_of(sgd_table))).values[0]
    found: Any = (await run_job(job_of(sgd_table), scenario)).values[0]
    assert all(torch.equal(found[name], calm[name]) for name in ("words", "out"))


def test_strict_run() -> None:
    tg.testing.run(job_of(adagrad_table), kills={(0, 1): "part", (1, 3): "sums"})


def test_a_table_alone_is_a_model() -> None:
    def body(run: tg.Run) -> Any:
        table = run.table("t", 3, init="zeros", lr=1.0)
        for step in run.steps(rows=8, batch=8, parts=3, passes=1):
            for part in step:
                ids = torch.from_numpy(part.rows)
                part.backward(table.embed(ids).sum(1).mean() + 2 * table.embed(ids[:1]).sum())
                assert not table.embed(ids).detach().requires_grad
            with_grad = table.embed(ids)
            assert not with_grad.requires_grad, "outside a part rows need no gradient"
        assert step.rows.shape == (8,)
        return table.pull(np.arange(8))

    found = tg.run(job_of(body), nodes=0).value
    # parts of 3, 3 and 2 rows: each row has 1 / 8, and the first one of a part 2 * (rows of the part) / 8 more
    assert sorted(found[:, 0].tolist()) == sorted([-0.125] * 5 + [-0.875] * 2 + [-0.625])
    assert (found == found[:, :1]).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda table, part: part.backward(table.embed(torch.tensor([0.5])).sum()), r"not a tensor of torch\.float32"),
        (lambda table, part: table.embed([1]), "not list"),
        (lambda table, part: table.embed(torch.tensor([1])).sum().backward(), r"call part\.backward\(loss\)"),
    ],
)
def test_what_does_not_fit_is_said(call: Any, text: str) -> None:
    def body(run: tg.Run) -> None:
        table = run.table("t", 3)
        for step in run.steps(rows=8, batch=8, parts=2, passes=1):
            for part in step:
                part.add()
                call(table, part)

    with pytest.raises(tg.JobFailed, match=text):
        tg.run(job_of(body), nodes=0)
