"""The dealer of an epoch's pieces, and a task's share of them: messages lost, repeated and late, tasks that die."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraph.queues.dealer import Dealer
from taskgraph.queues.pieces import PieceResult
from taskgraph.queues.plan import EpochPlan, plan_of, plan_of_count
from taskgraph.queues.queue import WorkQueue
from taskgraph.queues.worker import TaskPieces


class World:
    """Some tasks that compute, and their dealer."""

    def __init__(self, plan: EpochPlan, tasks: int = 3) -> None:
        self.plan, self.tasks, self.now = plan, tasks, 0.0
        self.terms = dict.fromkeys(range(tasks), 1)
        self.dealer = Dealer(plan, 1, tasks)
        self.shares = {task: TaskPieces({}, f"n{task}") for task in range(tasks)}
        self.computed: Counter[int] = Counter()

    def ask(self, task: int, *, lost: bool = False, repeated: bool = False) -> None:
        share = self.shares[task]
        if share.last is not None:
            return
        asked = share.ask(self.now)
        answer = self.dealer.answer(task, self.terms[task], asked, self.now)
        if lost or repeated:  # the answer does not arrive, or the ask comes twice
            answer = self.dealer.answer(task, self.terms[task], asked, self.now)
        if answer is not None:
            share.take(answer)

    def ask_for_end(self, task: int) -> None:
        """The task has begun a piece, which takes long; it computes that one next, unless all pieces are finished."""
        share = self.shares[task]
        piece = share.todo[0]
        answer = self.dealer.answer(task, self.terms[task], share.ask(self.now, late=piece), self.now)
        if answer is not None:
            share.take(answer)
        if share.last is None:
            share.todo.appendleft(piece)

    def compute(self, task: int, *, fails: bool = False) -> None:
        share = self.shares[task]
        if share.todo:
            todo = share.todo.popleft()
            self.computed[todo.place] += 1
            if fails:
                share.fail(todo, "ValueError", 0.01)
            else:
                share.finish(todo.place, PieceResult(todo.piece, 1, ()), 0.01, kept=True)

    def die(self, task: int) -> None:
        self.terms[task] += 1
        self.shares[task] = TaskPieces({}, f"n{task}")

    def dealer_dies(self) -> None:
        self.die(0)
        self.dealer = Dealer(self.plan, self.terms[0], self.tasks)

    def finish(self) -> None:
        for _ in range(10_000):
            if all(share.last is not None for share in self.shares.values()):
                return
            self.now += 1
            for task in range(self.tasks):
                while self.shares[task].todo:
                    self.compute(task)
                self.ask(task)
        pytest.fail("the pieces are never finished")

    def results(self) -> list[int]:
        """The pieces that the tasks send on; each only if its sender has the result."""
        sent: list[int] = []
        for share in self.shares.values():
            assert share.last is not None
            places = share.last["results"][:, 0].tolist()
            assert all(place in share.results for place in places)
            sent += places
        return sorted(sent)


events = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "compute", "compute", "late", "fail", "repeat", "die", "dealer dies", "wait"]),
        st.integers(0, 2),
    ),
    max_size=60,
)


@given(st.integers(0, 12), events)
def test_each_piece_is_sent_on_once(count: int, happening: list[tuple[str, int]]) -> None:
    world = World(plan_of_count(count, None)._replace(attempts=100, straggler=1.0))
    for kind, task in happening:
        world.now += 0.5
        if kind == "ask":
            world.ask(task)
        elif kind == "repeat":
            world.ask(task, repeated=True)
        elif kind == "late" and world.shares[task].todo:
            world.ask_for_end(task)
        elif kind in ("compute", "fail"):
            world.compute(task, fails=kind == "fail")
        elif kind == "die" and world.shares[task].last is None:
            world.die(task)
        elif kind == "dealer dies" and all(share.last is None for share in world.shares.values()):
            world.dealer_dies()
    world.finish()
    assert world.results() == [*range(count)]


def test_results_outlive_the_dealer() -> None:
    world = World(plan_of_count(12, None))
    world.ask(1)
    world.compute(1)
    world.ask(1)
    done = {*world.shares[1].results}
    while world.shares[1].todo:
        world.compute(1)
    world.dealer_dies()
    world.ask(1)  # the new dealer asks for all that it has
    world.ask(1)
    world.finish()
    assert world.results() == [*range(12)]
    assert done and all(world.computed[place] == 1 for place in done)


def test_pieces_of_a_task_that_died_are_dealt_to_others() -> None:
    world = World(plan_of_count(3, None))
    for task in range(3):
        world.ask(task)
    lost = world.shares[1].todo[0].place
    world.die(1)
    world.ask(1)
    assert [todo.place for todo in world.shares[1].todo] == [lost]


def test_a_late_result_is_not_sent_on() -> None:
    world = World(plan_of_count(2, None)._replace(straggler=2.0), tasks=2)
    world.ask(0)
    world.ask(1)
    world.now = 1.0
    world.compute(1)
    world.ask(1)
    assert not world.shares[1].todo
    world.now = 9.0
    world.ask(1)
    assert [todo.place for todo in world.shares[1].todo] == [0], "task 0 takes too long"
    world.compute(1)
    world.ask(1)
    world.compute(0)
    world.ask(0)
    assert world.shares[0].last is not None
    assert world.shares[0].last["results"].tolist() == []
    assert world.results() == [0, 1]


def test_a_task_at_a_long_piece_gives_the_others_back() -> None:
    world = World(plan_of_count(20, None)._replace(straggler=2.0), tasks=2)
    world.ask(0)
    world.compute(0)
    world.ask(0)
    long, *others = [todo.place for todo in world.shares[0].todo]
    assert others
    world.ask_for_end(0)
    assert [ticket.piece for ticket in world.dealer.ledger.dealt()["0"]] == [long]
    for _ in range(20):
        world.now += 10
        world.ask(1)
        while world.shares[1].todo:
            world.compute(1)
    assert {long, *others} <= {*world.shares[1].results}
    world.ask_for_end(0)
    assert world.shares[0].last is not None
    assert world.shares[0].last["results"][:, 0].tolist() == [0]


def test_chunks_grow_with_short_pieces_and_shrink_towards_the_end() -> None:
    world, sizes = World(plan_of_count(1000, None), tasks=2), []
    while world.shares[0].last is None:
        world.ask(0)
        sizes.append(len(world.shares[0].todo))
        while world.shares[0].todo:
            todo = world.shares[0].todo.popleft()
            world.shares[0].finish(todo.place, PieceResult(None, 1, ()), 0.0001, kept=False)
    assert sizes[:3] == [1, 249, 187]
    assert sizes[-3:] == [1, 1, 0]


def test_long_pieces_are_dealt_one_by_one() -> None:
    world = World(plan_of_count(100, None), tasks=1)
    for _ in range(5):
        world.ask(0)
        assert len(world.shares[0].todo) == 1
        todo = world.shares[0].todo.popleft()
        world.shares[0].finish(todo.place, PieceResult(None, 1, ()), 1.0, kept=False)


def test_a_piece_set_aside_is_sent_on_by_one_task_also_if_that_dies() -> None:
    world = World(plan_of_count(1, None)._replace(attempts=1, on_error="set aside"), tasks=2)
    world.ask(0)
    world.compute(0, fails=True)
    world.ask(0)
    assert world.shares[0].last is not None
    assert [row[0] for row in world.shares[0].last["aside"]] == [0]
    world.ask(1)
    assert world.shares[1].last is not None and world.shares[1].last["aside"] == []
    world.die(0)
    world.ask(0)
    assert world.shares[0].last is not None and len(world.shares[0].last["aside"]) == 1


def test_counts_are_those_of_the_passes() -> None:
    queue = WorkQueue(range(3), passes=2, overlap=True)
    plan = plan_of(queue.ledger(len(queue.pieces), 0), 4)
    assert plan.pieces == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert (plan.left, plan.over) == (2, False)
    world = World(plan, tasks=1)
    world.ask(0)
    world.compute(0)
    world.ask(0)
    done, later = world.dealer.counts()
    assert done[:5] == (0, 1, 1, 1, 0)
    assert later[:5] == (1, 0, 0, 1, 0)


def test_plan_of_an_endless_queue_is_the_rest_of_a_pass() -> None:
    ledger = WorkQueue(range(3), passes=None).ledger(3, 0)
    plan = plan_of(ledger, None)
    assert len(plan.pieces) == 3 and not plan.over


def asked(**changes: Any) -> dict[str, Any]:
    nothing = {"known": 1, "whole": True, "finished": np.zeros((0, 2), np.int64), "failed": [], "most": 1}
    return {**nothing, "late": [], "waits": True, **changes}


def test_strange_pieces_in_an_ask_change_nothing() -> None:
    dealer = Dealer(plan_of_count(2, None), 1, 1)
    answer = dealer.answer(0, 1, asked(finished=np.array([[7, 1]], np.int64)), 0.0)
    assert answer is not None and len(answer["pieces"]) == 1
