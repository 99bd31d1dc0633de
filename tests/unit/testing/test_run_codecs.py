"""Strict mode names a codec that gives other bytes for equal values."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from jobs_kit import fails, job, run, says

import taskgraph as tg

KIND = "of one kind"


class Model:
    """After unpickling, its two equal texts are two objects."""

    def __init__(self) -> None:
        self.first = self.second = ""
        self.steps = 0


class Fast(Model): ...


def without_references(model: Model) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True
    pickler.dump(model)
    return file.getvalue()


tg.codec(Model, pickle.dumps, pickle.loads)
tg.codec(Fast, without_references, pickle.loads)


class Trains(tg.Task, state=["model"]):
    kind: type[Model] = Model
    begins_in = 0

    def setup(self) -> None:
        self.model = self.kind()
        if self.begins_in < 0:
            self.model.first = KIND

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.train)

    def train(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.model.steps += 1
        if epoch.number == self.begins_in:
            self.model.first = KIND
        if epoch.number == self.begins_in + 1:
            self.model.second = KIND

    def result(self) -> Any:
        return self.model.steps


class InSetup(Trains):
    begins_in = -1


@pytest.mark.parametrize(("task", "epoch"), [(Trains, 1), (InSetup, 0)])
def test_inexact_codec_is_named(task: type[Trains], epoch: int) -> None:
    error = fails(job(task, tasks=1, epochs=3))
    assert error.epoch == epoch
    says(error, "(state 'model')", "it is equal, and a codec, of ", "Model", "Pickler.fast = True")
    assert "forgets" not in str(error) and "restore()" not in str(error)


@pytest.mark.parametrize("base", [Trains, InSetup])
def test_a_codec_that_leaves_that_out_passes(base: type[Trains]) -> None:
    assert run(job(type("Faster", (base,), {"kind": Fast}), tasks=1, epochs=3)).values == {0: 3}


def test_forgotten_state_beside_a_codec_is_named() -> None:
    class Forgets(Trains):
        kind = Fast
        seen = 0

        def train(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().train(epoch, ins, outs)
            self.seen += 1
            self.model.steps += self.seen

    says(fails(job(Forgets, tasks=1, epochs=3)), "(state 'model')", "snapshot() forgets state", "seen")
