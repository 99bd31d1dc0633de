"""How often the leader decides: its decisions look at every task, so they must not be as many as reports or events."""

from __future__ import annotations

import pytest
from cluster_kit import IN_STEP, Counting

import taskgraph as tg
from taskgraph.protocol.commit import Action, Commit, Leader
from taskgraph.protocol.view import JobView

EPOCHS = 40


def test_it_decides_once_for_an_epoch_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[Action] = []
    decide = Leader.decide

    def counted(self: Leader, view: JobView, *, settled: bool = False) -> Action:
        decisions.append(decide(self, view, settled=settled))
        return decisions[-1]

    monkeypatch.setattr(Leader, "decide", counted)
    job = tg.Job(tasks=5, epochs=EPOCHS, builder=lambda _: Counting(), settings=IN_STEP)
    result = tg.run(job, nodes=0, timeout_s=30)
    assert result.values == dict.fromkeys(range(5), EPOCHS)
    commits = sum(isinstance(decision, Commit) for decision in decisions)
    assert commits == EPOCHS
    # Beside them: when nodes and members came, and twice a second. Two for each epoch would be one too many.
    assert len(decisions) - commits < EPOCHS / 2
