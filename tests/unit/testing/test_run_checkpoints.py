"""`tg.testing.run` writes the checkpoints of a job to a temporary directory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from jobs_kit import fails, job, run, says, task

import taskgraph as tg


def count(self: tg.Task, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
    self.n += 1  # type: ignore[attr-defined]


def compose(self: tg.Task, epoch: tg.Epoch) -> None:
    epoch.processor(self.count)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", [False, True])
def test_checkpoint_place_is_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    named, temporary = tmp_path / "named", tmp_path / "temporary"
    named.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: list[list[Path]] = []

    def result(self: tg.Task) -> int:
        seen.append(sorted(temporary.glob("*/*/*/*")))
        if fault:
            raise ValueError("a fault of its own")
        return self.n  # type: ignore[attr-defined]

    counts = task(compose, count=count, result=result, state=["n"])
    keeps = job(counts, epochs=7, checkpoint=named.as_uri(), checkpoint_every=2)
    for _ in range(2):
        if fault:
            says(fails(keeps), "a fault of its own")
        else:
            assert run(keeps).values == {0: 7, 1: 7}
    assert all(seen), "no checkpoint was kept"
    assert not [*named.iterdir()] and not [*temporary.iterdir()]
