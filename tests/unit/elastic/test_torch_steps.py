"""part.backward, buffers, modes and state of PyTorch: what user code gets, and the errors by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from elastic_cluster import SCENARIOS, run_body

import taskgraph as tg
from taskgraph.errors import JobFailed
from taskgraph.observe.events import Event

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)


def data() -> tuple[Any, Any]:
    torch.manual_seed(7)
    return torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)


def steps(run: Any, **options: Any) -> Any:
    """10 rows, of which each step has 7 or 3, in parts of uneven size."""
    return run.steps(**{"rows": 10, "batch": 7, "parts": 3, "passes": 1, **options})


@pytest.mark.parametrize("scenario", [(1, ""), (2, "")])
async def test_gradients_are_those_of_the_mean_over_the_batch(scenario: Any) -> None:
    def body(run: Any) -> Any:
        x, y = data()
        model = nn.Linear(3, 1).double()
        run.state(model=model)
        for step in steps(run):
            sizes = set()
            for part in step:
                sizes.add(part.size)
                assert model.weight.grad is None
                part.backward(F.mse_loss(model(x[part.rows]), y[part.rows]))
                assert model.weight.grad is None
            got = [p.grad.clone() for p in model.parameters()]
            whole = F.mse_loss(model(x[step.rows]), y[step.rows])
            torch.testing.assert_close(got, list(torch.autograd.grad(whole, list(model.parameters()))))
            assert step.loss == pytest.approx(whole.item())
            for part in step:
                part.backward(F.mse_loss(model(x[part.rows]), y[part.rows], reduction="sum"), reduce="sum")
            torch.testing.assert_close([p.grad for p in model.parameters()], [g * step.size for g in got])
            assert step.loss == pytest.approx(whole.item() * step.size)
        return True

    assert await run_body(body, scenario)


async def test_weights_count_what_the_mean_counts() -> None:
    def body(run: Any) -> Any:
        w = torch.zeros(1, requires_grad=True)
        run.state(w=w)
        for step in steps(run, batch=10, parts=4):
            for part in step:
                part.backward((w * part.number).sum(), weight=torch.tensor([1, 0, 0, 3])[part.number])
            assert w.grad.item() == (0 * 1 + 3 * 3) / 4
        return True

    assert await run_body(body)


@pytest.mark.parametrize(("weight", "expected"), [(None, 6.0), (2.0, 12.0)])
async def test_sums_are_not_weighed_unless_asked(weight: Any, expected: float) -> None:
    def body(run: Any) -> Any:
        w = torch.ones(1, requires_grad=True)
        run.state(w=w)
        for step in steps(run, batch=10, parts=4):
            for part in step:
                part.backward((w * part.number).sum(), weight=weight, reduce="sum")
            assert (w.grad.item(), step.loss) == (expected, expected)
        return True

    assert await run_body(body)


async def test_losses_of_one_part_add_up() -> None:
    def body(run: Any) -> Any:
        w = [torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)]
        run.state(w=w)
        for step in steps(run):
            for part in step:
                part.backward((2 * w[0]).sum())
                part.backward((3 * w[0] + 5 * w[1]).sum())
            assert [p.grad.item() for p in w] == pytest.approx([5, 5])
            assert step.loss == pytest.approx(10)
        return True

    assert await run_body(body)


async def test_unused_parameters() -> None:
    def body(run: Any) -> Any:
        model = nn.ModuleList([nn.Linear(1, 1) for _ in range(4)])
        model[3].requires_grad_(False)
        run.state(model=model, opt=torch.optim.SGD(model.parameters(), 0.1))
        for step in steps(run, unused="zero"):
            for part in step:  # layer 0 in all parts, 1 in part 0, 2 in none, 3 is frozen
                used = model[:2] if part.number == 0 else model[:1]
                part.backward(sum((layer(torch.ones(1, 1)).sum() for layer in used), model[3](torch.ones(1, 1)).sum()))
            assert model[0].bias.grad.item() == pytest.approx(1)
            assert 0 < model[1].bias.grad.item() < 1
            assert model[2].bias.grad is None and model[3].bias.grad is None
        return True

    assert await run_body(body)


async def test_gradients_of_half_precision() -> None:
    def body(run: Any) -> Any:
        model = nn.Linear(3, 1).bfloat16()
        run.state(model=model)
        for step in steps(run):
            for part in step:
                part.backward(model(torch.ones(2, 3).bfloat16()).float().mean())
            assert model.weight.grad.dtype == torch.bfloat16
            assert model.weight.grad.float().numpy() == pytest.approx(1.0)
        return True

    assert await run_body(body)


async def test_optimizer_step_in_the_part_loop_does_nothing() -> None:
    def body(run: Any) -> Any:
        model = nn.Linear(3, 1)
        opt = torch.optim.AdamW(model.parameters(), 0.1)
        run.state(model=model, opt=opt)
        before = model.weight.detach().clone()
        for step in steps(run):
            for part in step:
                part.backward(model(torch.ones(1, 3)).mean())
                opt.step()
        assert torch.equal(model.weight, before)
        return True

    assert await run_body(body)


async def test_buffers_get_the_mean_change_of_the_parts() -> None:
    def body(run: Any) -> Any:
        x = data()[0]
        norm = nn.BatchNorm1d(3, momentum=0.5).double()
        run.state(norm=norm)
        for step in steps(run, batch=10, parts=2):
            means = []
            for part in step:
                assert torch.equal(norm.running_mean, torch.zeros(3).double())
                part.add(out=norm(x[part.rows]).sum())
                means.append(x[part.rows].mean(0) * 0.5)
        torch.testing.assert_close(norm.running_mean, (means[0] + means[1]) / 2)
        assert norm.num_batches_tracked == 1
        return True

    assert await run_body(body)


async def test_a_module_that_is_named_twice_gets_its_changes_once() -> None:
    def body(run: Any) -> Any:
        model = nn.Sequential(nn.BatchNorm1d(3).double())
        run.state(model=model, norm=model[0])
        for step in steps(run, batch=10, parts=2):
            for part in step:
                part.add(out=model(data()[0][part.rows]).sum())
        assert model[0].num_batches_tracked == 1
        return True

    assert await run_body(body)


async def test_gradients_end_with_their_step() -> None:
    def body(run: Any) -> Any:
        w = torch.ones(1, requires_grad=True)
        run.state(w=w)
        for step in steps(run):
            assert w.grad is None, "a newcomer that begins here has none"
            for part in step:
                part.backward((2 * w).sum())
            assert w.grad.item() == pytest.approx(2)
        return step.number

    assert await run_body(body) == 1


@tg.elastic
def updated_in_the_part_loop(run: tg.Run) -> None:
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run.state(model=model, opt=opt)
    for step in steps(run, passes=4):
        for part in step:
            part.backward(model(torch.ones(1, 3)).sum())
            opt.step()


@tg.elastic
def predicted(run: tg.Run) -> int:
    model = nn.Linear(3, 1)
    run.state(model=model)
    for step in steps(run, passes=4):
        for part in step:
            part.add(positive=int((model(torch.ones(1, 3)) > 0).sum()))
    return int(step["positive"])


@tg.elastic
def reported(run: tg.Run) -> None:
    model = nn.Linear(3, 1)
    run.state(model=model)
    for step in steps(run):
        for part in step:
            part.add()
        step.report(loss=model(torch.ones(1, 3)).sum())


def test_a_number_that_needs_a_gradient_can_be_reported() -> None:
    """PyTorch would warn, and a warning is an error here."""
    assert all("loss" in report.numbers for report in tg.run(reported(), nodes=0).reports)


def test_strict_run_fails_if_training_changes_nothing() -> None:
    with pytest.raises(
        JobFailed, match=r"the first 3 steps changed nothing in run\.state: call optimizer\.step\(\) in each"
    ):
        tg.testing.run(updated_in_the_part_loop())
    tg.testing.run(updated_in_the_part_loop(), strict=False)
    tg.testing.run(predicted())  # it trains nothing


def test_run_in_one_process_warns_if_training_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tg.run(updated_in_the_part_loop(), nodes=0)
    assert [r.message[:51] for r in caplog.records] == ["the first 3 steps changed nothing in run.state: cal"]


@pytest.mark.parametrize(("where", "unchanged"), [("in the part loop", 1), ("after zero_grad", 1), ("after it", 0)])
async def test_optimizer_without_gradients_is_an_event(where: str, unchanged: int) -> None:
    def body(run: Any) -> Any:
        model = nn.Linear(3, 1)
        opt = torch.optim.Adam(model.parameters())
        run.state(model=model, opt=opt)
        for step in steps(run, passes=4):
            for part in step:
                part.backward(model(torch.ones(1, 3)).sum())
                if where == "in the part loop":
                    opt.step()
            if where == "after zero_grad":
                opt.zero_grad()
            if where != "in the part loop":
                opt.step()

    events: list[Event] = []
    await run_body(body, (2, ""), events.append)
    texts = [event.text for event in events if event.kind == "unchanged"]
    assert len(texts) == unchanged
    assert all(
        text.startswith("the first 3 steps changed nothing in run.state: call optimizer.step()") for text in texts
    )


@tg.elastic
def updated_in_some_steps(run: Any, every: int) -> None:
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run.state(model=model, opt=opt)
    for step in steps(run, passes=6):
        for part in step:
            part.backward(model(torch.ones(1, 3)).sum())
        if (step.number + 1) % every == 0:
            opt.step()


@pytest.mark.parametrize(("every", "begins"), [(1, []), (2, ["some of the first"]), (3, ["some of the first"])])
@pytest.mark.parametrize("tested", [True, False])
def test_gradients_of_several_steps(
    every: int, begins: list[str], tested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a step are gone when the next one begins: every second batch does not count."""
    if tested:
        tg.testing.run(updated_in_some_steps(every))
    else:
        tg.run(updated_in_some_steps(every), nodes=0)
    assert [r.message[:17] for r in caplog.records if "run.state" in r.message] == begins


@pytest.mark.parametrize("named", ["nothing", "model", "tensors", "trainer"])
async def test_parameters_of_optimizers_are_named(named: str) -> None:
    class Trainer:
        def __init__(self, model: Any) -> None:
            self.model = model

        def state_dict(self) -> Any:
            return self.model.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.model.load_state_dict(state)

    def body(run: Any) -> Any:
        model = nn.Linear(3, 1)
        opt = torch.optim.SGD(model.parameters(), 0.1)
        more = {"nothing": {}, "model": {"model": model}, "tensors": {"w": [model.weight, {"bias": model.bias}]}}
        run.state(opt=opt, **more.get(named, {"trainer": Trainer(model)}))
        for step in steps(run):
            for part in step:
                part.backward(model(torch.ones(1, 3)).sum())
            opt.step()
        return step.number

    if named != "nothing":
        assert await run_body(body) == 1
        return
    with pytest.raises(JobFailed, match=r"the optimizer 'opt' has parameters that run\.state does not name"):
        await run_body(body)


async def test_lazy_modules_are_called_before_the_first_step() -> None:
    def body(run: Any) -> Any:
        model = nn.LazyLinear(1)
        run.state(model=model)
        for step in steps(run):
            for part in step:
                part.backward(model(torch.ones(1, 3)).sum())

    with pytest.raises(JobFailed, match=r"the parameter model\.weight has no shape yet: call its lazy module once"):
        await run_body(body)


async def test_modes_that_a_part_leaves_are_put_back() -> None:
    def body(run: Any) -> Any:
        model = nn.Sequential(nn.Dropout(), nn.Linear(3, 1))
        run.state(model=model)
        for step in steps(run):
            for part in step:
                assert model[0].training
                model.eval()
                part.add()
            assert model[0].training and model[1].training
        return True

    assert await run_body(body)


@pytest.mark.parametrize("scenario", [(1, ""), (3, "")])
async def test_pieces_leave_modes_and_buffers_as_they_were(scenario: Any) -> None:
    """Other workers do not compute them. What a piece returns is what it made."""

    def body(run: Any) -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        run.state(model=model)

        def averages(_: Any = None) -> Any:
            assert model.training
            model(torch.ones(4, 3) + model[1].num_batches_tracked)
            model.eval()
            return model[1].running_var

        for step in steps(run, passes=3):
            for part in step:
                part.add()
            before = [buffer.clone() for buffer in model.buffers()]
            found = [run.once(averages), *run.map(averages, range(4))]
            assert all(torch.equal(other, found[0]) for other in found) and not torch.equal(found[0], before[1])
            assert model[1].training and all(map(torch.equal, model.buffers(), before))
        return True

    assert await run_body(body, scenario)


async def test_state_of_every_kind_travels_to_a_newcomer() -> None:
    def body(run: Any) -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        opts = {
            "adam": torch.optim.Adam(model[0].parameters(), 0.01),
            "lbfgs": torch.optim.LBFGS([model[2].weight], max_iter=2),
        }
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opts["adam"], patience=0)
        cycle = torch.optim.lr_scheduler.OneCycleLR(opts["adam"], 0.1, total_steps=100)
        ema, free = torch.zeros(2, 3), torch.zeros(2, requires_grad=True)
        alias = ema
        s = run.state(model=model, opts=opts, rates=(plateau, cycle), ema=ema, free=free, best={}, count=0)
        for step in steps(run, passes=8):
            if step.number == 1:
                model[0].weight.requires_grad_(False)
                model[1].eval()

            def closure(step: Any = step) -> float:
                for part in step:
                    x = torch.randn(4, 3) + (free.sum())
                    part.backward((model(x) ** 2).mean() + ((free - 1) ** 2).mean())
                return float(step.loss)

            opts["lbfgs"].step(closure)
            opts["adam"].step()
            cycle.step()
            alias += model[0].weight.detach()
            with torch.no_grad():
                free.sub_(free.grad, alpha=0.1)
            s.count += 1
            s.best = {"weights": {name: t.clone() for name, t in model.state_dict().items()}, "at": s.count}
        assert alias is s.ema and free is s.free and s.count == 16
        tensors = [*model.state_dict().values(), alias, free, *s.best["weights"].values()]
        rates = [opts["adam"].param_groups[0]["lr"], float(s.best["at"])]
        return [t.detach().numpy() for t in tensors] + rates + [float(model[0].weight.requires_grad)]

    alone, *others = [await run_body(body, scenario) for scenario in SCENARIOS]
    assert alone[-1] == 0
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(alone, other, strict=True))


async def test_loaders_say_what_a_step_has() -> None:
    def body(run: Any) -> Any:
        x, y = data()
        loader = DataLoader(TensorDataset(x, y), batch_size=4, collate_fn=lambda rows: [row[0] for row in rows])
        taken = run.steps(loader, parts=2, passes=1)
        assert (len(taken), taken.per_pass) == (3, 3)
        for step in taken:
            for part in step:
                assert torch.equal(torch.stack(part.data), x[part.rows])
                part.add()
            assert step.rows.tolist() == list(range(10))[step.number * 4 : step.number * 4 + 4], "it does not shuffle"
        return True

    assert await run_body(body)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "not the loader's sampler: in .* shuffle=True"),
        ({"sampler": SubsetRandomSampler([1, 3])}, r"not the loader's sampler(.|\n)*give it Subset\(dataset, rows\)"),
        ({"sampler": RandomSampler(range(10), replacement=True)}, "not the loader's sampler"),
        ({"batch_sampler": [[0, 1], [2]]}, "not the loader's batch_sampler"),
        ({"batch_size": None}, "not the loader's batch_size=None"),
    ],
)
async def test_loaders_that_choose_rows_are_refused(options: Any, text: str) -> None:
    def body(run: Any) -> Any:
        run.steps(DataLoader(TensorDataset(*data()), **options))

    with pytest.raises(JobFailed, match=text):
        await run_body(body)


def changed_parameter(step: Any, model: Any) -> None:
    for part in step:
        part.backward(model(torch.ones(1, 2)).sum())
        with torch.no_grad():
            model[0].bias += 1


def missing_gradient(step: Any, model: Any) -> None:
    for part in step:
        used = model if part.number != 1 else model[0]
        part.backward(used(torch.ones(1, 2)).sum())


async def test_gradients_that_the_parts_of_another_worker_lack() -> None:
    def body(run: Any) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        run.state(model=model)
        for step in steps(run):
            missing_gradient(step, model)

    text = r'gradient of model\.1\.bias is .* in the parts of n1, and nothing .* n2: .*run\.steps\(unused="zero"\)'
    with pytest.raises(JobFailed, match=text):
        await run_body(body, (3, ""))


def plain_backward(step: Any, model: Any) -> None:
    for part in step:
        model(torch.ones(1, 2)).sum().backward()
        part.add()


def forgotten_backward(step: Any, model: Any) -> None:
    for _ in step:
        model(torch.ones(1, 2)).sum().backward()


def no_parameter(step: Any, model: Any) -> None:
    for part in step:
        part.backward((torch.ones(1, requires_grad=True) * 2).sum())


def clearing_hook(step: Any, model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for part in step:
        part.backward(model(torch.ones(1, 2)).sum())


def no_mean(step: Any, model: Any) -> None:
    for part in step:
        part.backward(model(torch.ones(4, 2)))


def no_weights(step: Any, model: Any) -> None:
    for part in step:
        part.backward(model(torch.ones(1, 2)).sum(), weight=0)


def other_weight(step: Any, model: Any) -> None:
    for part in step:
        part.backward(model(torch.ones(1, 2)).sum())
        part.backward(model(torch.ones(1, 2)).sum(), weight=77)


def nan_weight(step: Any, model: Any) -> None:
    for part in step:
        part.backward(model(torch.ones(1, 2)).sum(), weight=float("nan"))


def infinite(step: Any, model: Any) -> None:
    for part in step:
        part.backward(model[0](torch.ones(1, 2) * torch.inf).sum())


def sparse(step: Any, model: Any) -> None:
    for part in step:
        part.backward(model[2](torch.zeros(1, dtype=torch.long)).sum())


def other_buffer(step: Any, model: Any) -> None:
    for part in step:
        if part.number == 0:
            model[3].count += 1
        part.add()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (changed_parameter, r"part 0 of step 0 changed the parameter model\.0\.bias"),
        (missing_gradient, r"part 1 of step 0 has nothing as the gradient of model\.1\.bias, and part 0 has a tensor"),
        (plain_backward, r"part 0 of step 0 left a gradient in model\.0\.weight\.grad"),
        (forgotten_backward, r"left a gradient in model\.0\.weight\.grad, .*: call part\.backward\(loss\) in place of"),
        (no_parameter, "no parameter got a gradient: name the module"),
        (clearing_hook, r"gradient left: model\.0\.weight has a hook \(register_post_accumulate_grad_hook\) that may"),
        (no_mean, r"not a loss of shape \(4, 1\)"),
        (no_weights, r"the weights of part\.backward are 0 in all parts"),
        (other_weight, "weight=77 and reduce='mean' after weight="),
        (nan_weight, r"part\.backward\(weight=nan\): must be 0 or more"),
        (infinite, r"the gradient of model\.0\.weight has nan or inf in the total of step 0"),
        (sparse, r"the gradient of model\.2\.weight is sparse"),
        (other_buffer, r"part 1 of step 0 has nothing as the change of the buffer model\.3\.count, and part 0 has"),
    ],
)
async def test_errors_by_name(code: Any, text: str) -> None:
    def body(run: Any) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Embedding(3, 2, sparse=True), nn.Identity())
        model[3].register_buffer("count", torch.zeros(()))
        used = model[:2]
        run.state(model=model)
        for step in steps(run, nonfinite="error"):
            code(step, used if code not in (sparse, other_buffer) else model)

    with pytest.raises(JobFailed, match=text):
        await run_body(body)


def ddp(model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: Any) -> Any:
    return torch.distributed.fsdp.fully_shard(model)


@pytest.mark.parametrize(("wrap", "name"), [(ddp, "DistributedDataParallel"), (fsdp, "FSDPLinear")])
async def test_wrappers_that_wait_for_other_ranks_are_refused(wrap: Any, name: str) -> None:
    def body(run: Any) -> None:
        run.state(model=wrap(nn.Linear(2, 1)))
        for _ in steps(run):
            pass

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(JobFailed, match=f"run.state: model is wrapped as {name}.*: use the plain module"):
            await run_body(body)
    finally:
        torch.distributed.destroy_process_group()


def test_pytorch_is_not_imported_by_itself() -> None:
    code = """if True:
        import sys, taskgraph.elastic_jobs.node
        import taskgraph as tg

        def net():
            import torch

        @tg.elastic
        def add(run): return 1

        add()
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("place", ["at the top", "in a function"])
def test_the_launcher_knows_tensors_of_the_value(place: str) -> None:
    """An import in a function was too late for the generators, too: workers began with different models."""
    code = f"""if True:
        {"import torch" if place == "at the top" else ""}
        import taskgraph as tg
        from taskgraph.graph.codecs import codec_named

        class Net:
            def __init__(self):
                from torch import nn

        def net(): return Net()

        @tg.elastic
        def train(run): net()

        train()
        assert codec_named("torch.Tensor")
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@tg.elastic
def draws(run: Any, seed: int = 0) -> Any:
    return torch.rand(2).numpy()


@pytest.mark.parametrize("seed", [-5, 2**64 - 1, 10**30])
def test_any_seed(seed: int) -> None:
    drawn = tg.run(draws(seed=seed), nodes=0).value
    assert (drawn == torch.rand(2, generator=torch.Generator().manual_seed(seed % 2**64)).numpy()).all()
