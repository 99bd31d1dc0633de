"""`tg.testing.run` of elastic jobs in PyTorch: losses that are no means, and what a newcomer lacks."""

from __future__ import annotations

import pytest

import taskgraph as tg

torch = pytest.importorskip("torch")
X = torch.linspace(-1, 1, 44).reshape(44, 1) * torch.tensor([1.0, -2.0, 3.0])
Y = X.sum(1) + 1


def train(run: tg.Run, reduction: str = "mean", reduce: str = "mean", named: bool = True) -> list[float]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.state(model=model, optimizer=optimizer, **({"schedule": schedule} if named else {}))
    for step in run.steps(rows=44, batch=20, parts=4, passes=4):
        for part in step:
            found = model(X[part.rows])[:, 0]
            loss = torch.nn.functional.mse_loss(found, Y[part.rows], reduction=reduction)
            part.backward(loss, reduce=reduce)
        optimizer.step()
        schedule.step()
    weights: list[float] = model[0].weight.detach().flatten().tolist()
    return weights


@tg.elastic
def means(run: tg.Run) -> list[float]:
    return train(run)


@tg.elastic
def sums(run: tg.Run) -> list[float]:
    return train(run, "sum", "sum")


@tg.elastic
def sums_as_means(run: tg.Run) -> list[float]:
    return train(run, "sum", "mean")


@tg.elastic
def means_as_sums(run: tg.Run) -> list[float]:
    return train(run, "mean", "sum")


@tg.elastic
def schedule_without_a_name(run: tg.Run) -> list[float]:
    return train(run, named=False)


@pytest.mark.parametrize("job", [means(), sums()], ids=lambda job: str(job.name))
def test_losses_that_fit(job: tg.Job[list[float]]) -> None:
    assert tg.testing.run(job, kills={(1, 2): "sums"}).value == tg.run(job, nodes=0).value


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            sums_as_means(),
            r"part\.backward got a loss that is summed over the rows.*\ngive it the mean \(reduction='mean'\)",
        ),
        (means_as_sums(), r"part\.backward\(loss, reduce='sum'\) got the mean over the part.*\ngive it the sum"),
        (
            schedule_without_a_name(),
            r"the state before step \d+ is not the same on n\d \(joined at step \d\) as in a run of one worker: "
            r"optimizer\.param_groups\.0\.lr.*\nname all that later steps read \(here schedule\?\)",
        ),
    ],
    ids=lambda given: given.name if isinstance(given, tg.Job) else "",
)
def test_found_on_the_first_run(job: tg.Job[list[float]], text: str) -> None:
    with pytest.raises(tg.JobFailed, match=text):
        tg.testing.run(job)
