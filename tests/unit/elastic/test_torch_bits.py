"""PyTorch loops have equal bits with one worker, and with three, one of which dies, and another one joins."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from elastic_cluster import SCENARIOS, pause, run_job

from taskgraph.elastic_jobs.job import elastic

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(value: Any) -> Any:
    """Makes a tree of bytes, which are equal only if all bits are."""
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


def weights(*modules: Any) -> list[Any]:
    return [tensor.detach().numpy().copy() for module in modules for tensor in module.state_dict().values()]


def net(inputs: int, outputs: int, *between: Any) -> Any:
    return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), *between, nn.Linear(12, outputs))


@elastic
def schedule(run: Any) -> Any:
    x = torch.randn(300, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = net(6, 2)
    opt = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    steps = run.steps(rows=300, batch=60, parts=6, passes=8)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(steps) - 3)
    rates = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cosine], [3])
    run.state(model=model, opt=opt, rates=rates)
    for step in steps:
        for part in step:
            part.backward(F.cross_entropy(model(x[part.rows]), y[part.rows]))
            pause()
        opt.step()
        rates.step()
        step.report(loss=step.loss, rate=rates.get_last_lr()[0])
    return weights(model)


@elastic
def clipping(run: Any) -> Any:
    x = torch.randn(205, 6)  # the last step of a pass has 25 rows
    y = (x[:, 0] > x[:, 1]).long()
    model = net(6, 2)
    opt = torch.optim.AdamW(model.parameters(), 0.05)
    run.state(model=model, opt=opt)
    for step in run.steps(rows=205, batch=60, parts=4, passes=8):
        for part in step:
            out = model(x[part.rows])
            part.backward(F.cross_entropy(out, y[part.rows]))
            part.add(right=(out.argmax(1) == y[part.rows]).sum())
            pause()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
        step.report(norm=norm, accuracy=step["right"] / step.size)
    return weights(model)


@elastic
def scaled(run: Any) -> Any:
    x, model = torch.randn(96, 16), nn.Linear(16, 4)
    y = x[:, :4].argmax(1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=5)
    run.state(model=model, opt=opt, scaler=scaler)
    scaler.scale(torch.zeros(()))
    for step in run.steps(rows=96, batch=48, parts=6, passes=12):
        for part in step:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x[part.rows]), y[part.rows])
            part.backward(scaler.scale(loss))
            pause()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        step.report(scale=scaler.get_scale())
    assert scaler.get_scale() < 2.0**126, "the first total overflows"
    return [*weights(model), np.array(scaler.get_scale())]


@elastic
def batchnorm(run: Any) -> Any:
    x = torch.randn(65, 1, 6, 6)
    y = (x.mean((1, 2, 3)) > 0).long()
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    opt = torch.optim.Adam(model.parameters(), 0.01)
    run.state(model=model, opt=opt)
    for step in run.steps(rows=65, batch=32, parts=4, passes=10):
        if step.number == 9:
            model[1].eval()  # its averages stay: a mode is state, too
        for part in step:
            part.backward(F.cross_entropy(model(x[part.rows]), y[part.rows]))
            pause()
        opt.step()
    assert model[1].num_batches_tracked == 9
    return weights(model)


@elastic
def noise(run: Any) -> Any:
    x = torch.linspace(-1, 1, 64)[:, None]
    model = net(1, 1, nn.Dropout(0.2))
    opt = torch.optim.SGD(model.parameters(), 0.05)
    run.state(model=model, opt=opt)
    for step in run.steps(rows=64, batch=16, parts=8, passes=8):
        for part in step:
            shaken = x[part.rows] + torch.from_numpy(np.random.normal(0, 0.01, (part.size, 1)).astype(np.float32))
            part.backward(F.mse_loss(model(shaken), x[part.rows] ** 2))
            pause()
        opt.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=random.random() * 1e-3)
    return weights(model)


@elastic
def gan(run: Any) -> Any:
    real = torch.randn(128, 2) * 0.5 + torch.tensor([1.0, -1.0])
    generator, critic = net(4, 2), net(2, 1)
    opts = [torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in (generator, critic)]
    run.state(generator=generator, critic=critic, opts=opts)
    for step in run.steps(rows=128, batch=32, parts=4, passes=8):
        for part in step:
            fake = generator(torch.randn(part.size, 4)).detach()
            scores = critic(torch.cat([real[part.rows], fake])).squeeze(1)
            wanted = torch.cat([torch.ones(part.size), torch.zeros(part.size)])
            part.backward(F.binary_cross_entropy_with_logits(scores, wanted))
            pause()
        opts[1].step()
        critics = step.loss
        for part in step:
            scores = critic(generator(torch.randn(part.size, 4))).squeeze(1)
            part.backward(F.softplus(-scores).mean(), inputs=generator.parameters())
            pause()
        assert all(parameter.grad is None for parameter in critic.parameters())
        opts[0].step()
        step.report(critic=critics, generator=step.loss)
    return weights(generator, critic)


@elastic
def lbfgs(run: Any) -> Any:
    x = torch.randn(200, 4, dtype=torch.float64)
    y = (x @ torch.randn(4, 1, dtype=torch.float64) + 0.3 * torch.randn(200, 1) > 0).double()
    model = nn.Linear(4, 1).double()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    run.state(model=model, opt=opt)
    for step in run.steps(rows=200, batch=200, parts=8, passes=6):

        def closure(step: Any = step) -> float:
            for part in step:
                part.backward(F.binary_cross_entropy_with_logits(model(x[part.rows]), y[part.rows]))
                pause()
            return float(step.loss)

        opt.step(closure)
        step.report(loss=step.loss, rounds=step.round)
    return weights(model)


def play(policy: Any, rng: Any) -> tuple[Any, Any, float]:
    at, states, actions = 3, [], []
    while 0 < at < 9 and len(states) < 30:
        state = F.one_hot(torch.tensor(at), 10).float()
        with torch.no_grad():
            action = int(rng.random() < torch.sigmoid(policy(state)).item())
        states.append(state)
        actions.append(action)
        at += 2 * action - 1
    return torch.stack(states), torch.tensor(actions).float(), float(at == 9) - 0.01 * len(states)


@elastic
def reinforce(run: Any) -> Any:
    policy = nn.Linear(10, 1)
    opt = torch.optim.Adam(policy.parameters(), 0.05)
    run.state(policy=policy, opt=opt)
    for step in run.steps(rows=12, batch=12, parts=12, passes=8):
        kept: dict[int, Any] = {}
        for part in step:
            kept[part.number] = play(policy, np.random.default_rng(part.seed))
            part.collect(gain=kept[part.number][2], length=torch.tensor(len(kept[part.number][1])))
            pause()
        gains = np.array(step.all("gain"))
        assert len(gains) == len(step.all("length")) == 12
        for part in step:  # a part of a dead worker is played again, from the same seed
            states, actions, gain = kept.get(part.number) or play(policy, np.random.default_rng(part.seed))
            log = -F.binary_cross_entropy_with_logits(policy(states)[:, 0], actions)
            part.backward(-log * (gain - gains.mean()) / (gains.std() + 1e-6), weight=len(actions))
        opt.step()
        step.report(gain=gains.mean())
    return weights(policy)


class Pictures(Dataset):
    def __len__(self) -> int:
        return 90

    def __getitem__(self, row: int) -> Any:
        picture = torch.full((1, 6, 6), float(row % 3))
        if random.random() < 0.5:
            picture = picture.flip(2)
        return picture + 0.1 * torch.randn(1, 6, 6) + np.random.normal(), row % 3


@elastic
def loader(run: Any) -> Any:
    rows = DataLoader(Pictures(), batch_size=40, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run.state(model=model, opt=opt)
    steps = run.steps(rows, parts=4, passes=8)
    assert steps.per_pass == 2
    for step in steps:
        for part in step:
            pictures, labels = part.data
            assert labels.tolist() == [row % 3 for row in part.rows]
            part.backward(F.cross_entropy(model(pictures), labels))
            pause()
        opt.step()
    return weights(model)


@pytest.mark.parametrize(
    "program",
    [
        *(clipping, batchnorm, noise, gan, lbfgs),
        *(pytest.param(program, marks=pytest.mark.slow) for program in (schedule, scaled, reinforce, loader)),
    ],
    ids=lambda p: p.__name__,
)
async def test_equal_bits(program: Any) -> None:
    found = []
    for scenario in SCENARIOS:
        events: list[str] = []
        result = await run_job(program(), scenario, lambda event, events=events: events.append(event.kind))
        assert ("joined" in events) == ("+" in scenario[1])
        found.append(bits(result.values[0]))
    assert found[1:] == found[:-1]
    assert not any(np.isnan(np.frombuffer(data, kind)).any() for kind, data in found[0])
