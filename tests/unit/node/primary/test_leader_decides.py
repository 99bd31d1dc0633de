"""How often the leader decides: its decisions look at every task, so they must not be as many as reports or events.

And how much it tells of what it found.
"""

from __future__ import annotations

import pytest
from cluster_kit import IN_STEP, Counting

import taskgraph as tg
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.protocol.commit import Action, Commit, Leader
from taskgraph.protocol.cycles import first_of
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


def test_it_decides_once_for_a_commit_of_several_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ready when one is written is committed with more, later, and not looked at before that."""
    decided, written = list[Action](), list[Commit]()
    decide, commit = Leader.decide, LeaderRole._commit

    def counted(self: Leader, view: JobView, *, settled: bool = False) -> Action:
        decided.append(decide(self, view, settled=settled))
        return decided[-1]

    async def counted_commit(self: LeaderRole, action: Commit) -> None:
        written.append(action)
        await commit(self, action)

    monkeypatch.setattr(Leader, "decide", counted)
    monkeypatch.setattr(LeaderRole, "_commit", counted_commit)
    job = tg.Job(tasks=5, epochs=1200, builder=lambda _: Counting())
    assert tg.run(job, nodes=0, timeout_s=30).values == dict.fromkeys(range(5), 1200)
    assert len(written) > 10
    assert sum(isinstance(decision, Commit) for decision in decided) - len(written) < len(written) / 3


@pytest.mark.parametrize(
    ("lines", "shown"),
    [(["a"], "a"), (["a", "b", "c"], "a; b; c"), (["a", "b", "c", "d", "e"], "a; b; c; and 2 more")],
)
def test_of_many_lines_it_tells_the_first(lines: list[str], shown: str) -> None:
    assert first_of(lines, 3) == shown
