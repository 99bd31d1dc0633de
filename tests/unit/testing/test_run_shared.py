"""Shared state: equal on all tasks, kept by one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs_kit import Kills, fails, job, run, same, says

import taskgraph as tg
from taskgraph.results import JobResult
from taskgraph.testing import STAGES

EPOCHS = 5


def slow(value: int) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


class Descent(tg.Task, shared=["theta"]):
    """Each task adds the gradients of all tasks to the same parameters."""

    def setup(self) -> None:
        self.x = np.random.default_rng(self.task_id).normal(size=(20, 3))
        self.theta = np.zeros(3)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.gradient, outbound={"grad": "all"})
        epoch.processor(self.update, inbound={"grad": "all"})

    def gradient(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("grad", (self.x - self.theta).mean(axis=0))

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        grads = ins.all("grad")
        self.theta += sum(grads[task] for task in sorted(grads)) / (2 * self.tasks)

    def result(self) -> Any:
        return self.theta


class Counted(Descent, state=["seen"]):
    """Has state of its own, too."""

    def setup(self) -> None:
        super().setup()
        self.seen = np.zeros(2) + self.task_id

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().update(epoch, ins, outs)
        self.seen += self.theta[:2]

    def result(self) -> Any:
        return np.concatenate([self.theta, self.seen])


def descent(kind: type[tg.Task] = Counted, **options: Any) -> tg.Job:
    return job(kind, **{"tasks": 3, "epochs": EPOCHS, **options})


@pytest.fixture(scope="module")
def undisturbed() -> JobResult:
    return run(descent())


def test_value_of_equal_results() -> None:
    result = run(descent(Descent))
    assert len(result.values) == 3 and result.value.shape == (3,)
    assert run(descent(Descent, tasks=1)).value.shape == (3,)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("epoch", [slow(0), 2, slow(EPOCHS - 1)])
def test_a_kill_at_every_stage(undisturbed: JobResult, stage: str, epoch: int) -> None:
    for task in range(3) if stage not in ("commit", "committed") else [0]:
        killed = run(descent(), kills={(task, epoch): stage}, order=epoch + 1)
        same(killed, undisturbed)
        assert killed.failovers >= 1


@pytest.mark.parametrize("stage", ["sync", "snapshot", "done"])
@pytest.mark.parametrize("other", [1, 2])
@pytest.mark.parametrize("backups", [1, slow(2)])
def test_keeper_killed_together_with_another_task(undisturbed: JobResult, stage: str, other: int, backups: int) -> None:
    for epoch in (1, EPOCHS - 1):
        kills: Kills = {(0, epoch): stage, (other, epoch): stage}
        killed = run(descent(backups=backups), kills=kills, order=7 * epoch + other, nodes=5)
        same(killed, undisturbed)
        assert killed.failovers >= 2


@pytest.mark.parametrize("order", [1, 2, *map(slow, range(3, 9))])
def test_many_kills(undisturbed: JobResult, order: int) -> None:
    kills: Kills = {(0, 1): "snapshot", (1, 1): "done", (2, 2): "processor", (0, 3): "commit", (1, 4): "sync"}
    killed = run(descent(backups=2), kills=kills, order=order, nodes=6)
    same(killed, undisturbed)


def test_checkpoints_and_kills(undisturbed: JobResult) -> None:
    kept = descent(checkpoint="file:///not/used", checkpoint_every=2)
    same(run(kept, kills={(1, 3): "snapshot", (0, 3): "done"}, order=3, nodes=4), undisturbed)


def test_an_epoch_restarts_from_the_own_copy(undisturbed: JobResult) -> None:
    class Asking(Counted):
        """Sends a flag, so that a kill restarts the epoch."""

        def gradient(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            epoch.flag((self.task_id + 1) % self.tasks, None)
            super().gradient(epoch, ins, outs)

        def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            epoch.scratch.flagged = sender

    killed = run(descent(Asking), kills={(2, 2): "snapshot"}, nodes=3)
    assert killed.restarts >= 1
    same(killed, undisturbed)


@pytest.mark.parametrize("task", [0, 1, 2])
def test_epochs_in_flight(task: int) -> None:
    class Flying(Descent):
        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:
            super().compose(epoch)

    flying = descent(Flying, epochs=12, settings=tg.Settings(epochs_in_flight=3))
    plain = run(flying, strict=False)
    same(run(flying, kills={(task, 6): "done"}, strict=False, order=task + 1), plain)


def test_on_commit_has_all_state() -> None:
    seen: dict[tuple[int, int], tuple[list[str], float]] = {}

    class Watching(Counted):
        def on_commit(self, number: int, state: Any) -> None:
            seen[self.task_id, number] = (sorted(state), float(state["theta"][0]))

    run(descent(Watching), strict=False)
    assert seen.keys() == {(task, number) for task in range(3) for number in range(EPOCHS)}
    assert all(names == ["seen", "theta"] for names, _ in seen.values())
    assert all(seen[1, number][1] == seen[0, number][1] for number in range(EPOCHS))


# -- what differs -----------------------------------------------------------------------------------


class Wrong(Counted):
    """Differs in one number of one task, from one epoch on."""

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().update(epoch, ins, outs)
        if epoch.number == 3 and self.task_id == 2:
            self.theta[1] = np.nextafter(self.theta[1], 9.0)


@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_a_difference_in_one_bit_is_named(nodes: int) -> None:
    if nodes:
        error = fails(descent(Wrong), nodes=nodes)
    else:
        with pytest.raises(tg.JobFailed) as caught:
            tg.run(descent(Wrong), nodes=0)
        error = caught.value
    says(error, "epoch 3: self.theta is declared as shared, and differs between task 0 and task 2, after this epoch")


def test_a_difference_in_setup_is_named() -> None:
    class Unseeded(Descent, shared=["bias"]):
        def setup(self) -> None:
            super().setup()
            self.bias = float(self.task_id == 1)

    says(
        fails(descent(Unseeded)),
        "epoch 0: self.bias is declared as shared, and differs between task 0 and task 1, as setup() made it",
        "default_rng(0)",
    )


def test_a_difference_after_a_takeover_restarts_the_epoch_first() -> None:
    wrong = fails(descent(Wrong), kills={(1, 3): "processor"}, strict=False)
    says(wrong, "epoch 3: self.theta", "task 0 and task 2")


def test_types_and_memory_order_count() -> None:
    class Turned(Descent):
        def setup(self) -> None:
            super().setup()
            self.theta = np.zeros((3, 4), order="F" if self.task_id else "C")

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.nothing)

        def nothing(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            pass

    says(fails(descent(Turned)), "differs between task 0 and task 1")


# -- several classes --------------------------------------------------------------------------------


class Clock(tg.Task):
    """Neither has shared state, nor is it compared."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.gradient, outbound={"grad": "all"})
        epoch.processor(self.nothing, inbound={"grad": "all"})

    def gradient(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("grad", np.ones(3))

    def nothing(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass


class Other(Descent, shared=["bias"]):
    """Another group."""

    def setup(self) -> None:
        super().setup()
        self.bias = 2.0
        self.theta = np.ones(3)


def mixed(task_id: int) -> tg.Task:
    return (Clock, Other, Counted, Counted, Other)[task_id]()


@pytest.mark.parametrize("task", [slow(0), 1, 2, slow(3), slow(4)])
def test_groups_have_keepers_of_their_own(task: int) -> None:
    several = job(mixed, tasks=5, epochs=4)
    plain = run(several)
    killed = run(several, kills={(task, 2): "snapshot"}, nodes=4, order=task + 1)
    same(killed, plain)
    assert not np.array_equal(plain.values[1], plain.values[2][:3])


# -- declarations -----------------------------------------------------------------------------------


def test_a_name_is_state_or_shared() -> None:
    with pytest.raises(tg.JobError, match="'theta' is declared as state and as shared"):
        type(tg.Task)("Both", (tg.Task,), {}, state=["theta"], shared=["theta"])
    with pytest.raises(tg.JobError, match="'theta' is declared as state and as shared"):
        type(tg.Task)("Both", (Descent,), {}, state=["theta"])
    with pytest.raises(tg.JobError, match="'seen' is declared as state and as shared"):
        type(tg.Task)("Both", (Counted,), {}, shared=["seen"])
    with pytest.raises(tg.JobError, match=r"shared takes a list of names: shared=\['theta'\]"):
        type(tg.Task)("Text", (tg.Task,), {}, shared="theta")


def test_own_snapshot_must_have_what_is_shared() -> None:
    class Forgetful(Descent):
        def snapshot(self) -> Any:
            return {"x": self.x}

        def restore(self, state: Any) -> None:
            pass

    says(fails(descent(Forgetful)), "snapshot() must return a dict with all shared state; it lacks 'theta'")


def test_missing_attribute_is_named() -> None:
    class Missing(Descent, shared=["bias"]):
        pass

    says(fails(descent(Missing)), "declares state 'bias', but has no such attribute")


def test_forgotten_state_beside_shared_state_is_found() -> None:
    class Momentum(Descent):
        velocity: Any = 0.0

        def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            grads = ins.all("grad")
            self.velocity = 0.9 * self.velocity + sum(grads[task] for task in sorted(grads))
            self.theta += self.velocity / 10

    says(fails(descent(Momentum)), "velocity")
