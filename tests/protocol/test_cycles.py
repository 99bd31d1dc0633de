"""A standing epoch: who waits for whom, and whether it can ever go on."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from taskgraph.protocol.cycles import WaitEdge, describe_cycle, describe_waits, find_cycle
from taskgraph.protocol.messages import Wait

Provides = tuple[tuple[str, int], ...]


def item(processor: str, tag: str, producer: int, provides: Provides = (), since_s: float = 1.0) -> Wait:
    return Wait(processor, "item", producer, tag, since_s, provides)


def order(processor: str, earlier: str, task: int, provides: Provides = ()) -> Wait:
    return Wait(processor, "order", task, earlier, 1.0, provides)


def reply(processor: str, method: str, task: int, provides: Provides = ()) -> Wait:
    return Wait(processor, "reply", task, method, 1.0, provides)


def running(processor: str, task: int, provides: Provides = ()) -> Wait:
    return Wait(processor, "running", task, processor, 1.0, provides)


def check(cycle: list[WaitEdge] | None) -> list[WaitEdge]:
    assert cycle
    for edge, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        assert (edge.next_task, edge.next_processor) == (after.task, after.processor)
    return cycle


def test_tells_the_cycle_of_a_wrong_order() -> None:
    # Task 0 publishes theta after it took the gradients, which task 1 makes from theta.
    waits = {
        0: [item("update", "grad", 1), order("publish", "update", 0, provides=(("theta", 1),))],
        1: [
            item("relay", "theta", 0, provides=(("theta", 2),)),
            item("add", "grad", 2, provides=(("grad", 0),)),
            order("add", "relay", 1, provides=(("grad", 0),)),
        ],
    }
    assert describe_cycle(check(find_cycle(waits))) == (
        "task 0 'update' waits for 'grad' from task 1; "
        "task 1 'add' (which will put 'grad') runs after 'relay' of the same task; "
        "task 1 'relay' waits for 'theta' from task 0; "
        "task 0 'publish' (which will put 'theta') runs after 'update' of the same task. "
        "Two ways out: declare the processors in another order, or parallel=True for one that shares no state with "
        "the others."
    )


def test_cycle_that_no_order_resolves_has_another_way_out() -> None:
    waits = {
        0: [item("swap", "x", 1, provides=(("x", 1),))],
        1: [item("swap", "x", 0, provides=(("x", 0),))],
    }
    assert describe_cycle(check(find_cycle(waits))) == (
        "task 0 'swap' (which will put 'x') waits for 'x' from task 1; "
        "task 1 'swap' (which will put 'x') waits for 'x' from task 0. "
        "No order of the processors helps: split one of them in two, so that what it puts does not need what it "
        "waits for."
    )


def test_processor_may_wait_for_itself() -> None:
    waits = {3: [item("loop", "x", 3, provides=(("x", 3),))]}
    assert check(find_cycle(waits)) == [WaitEdge(3, "loop", "item", "x", 3, "loop")]


def test_running_processor_ends_no_cycle() -> None:
    waits = {
        0: [item("a", "x", 1, provides=(("y", 1),))],
        1: [running("b", 1, provides=(("x", 0),)), item("c", "y", 0), order("c", "b", 1)],
    }
    assert find_cycle(waits) is None


def test_finished_processors_end_no_cycle() -> None:
    assert find_cycle({}) is None
    assert find_cycle({0: []}) is None
    # The producer's processor is finished: the item is on its way.
    assert find_cycle({0: [item("a", "x", 1)], 1: [item("b", "y", 0)]}) is None
    # Task 1 was not asked.
    assert find_cycle({0: [item("a", "x", 1, provides=(("y", 1),))]}) is None
    # The earlier processor is finished.
    assert find_cycle({0: [order("a", "gone", 0)]}) is None


def test_tag_for_another_consumer_is_another_item() -> None:
    waits = {
        0: [item("a", "x", 1, provides=(("x", 1),))],
        1: [item("b", "x", 0, provides=(("x", 2),)), running("c", 1, provides=(("x", 0),))],
    }
    assert find_cycle(waits) is None


def test_any_of_several_waits_may_close_the_cycle() -> None:
    waits = {
        0: [
            item("a", "p", 2, provides=(("x", 1),)),
            item("a", "q", 3, provides=(("x", 1),)),
            item("a", "y", 1, provides=(("x", 1),)),
        ],
        1: [item("b", "x", 0, provides=(("y", 0),))],
        2: [running("c", 2, provides=(("p", 0),))],
    }
    assert [(e.task, e.name) for e in check(find_cycle(waits))] == [(0, "y"), (1, "x")]


def test_reply_leads_to_the_handler_where_that_waits() -> None:
    waits = {
        0: [reply("ask", "push", 1, provides=(("x", 1),))],
        1: [item("handler push", "x", 0), item("other", "z", 5)],
    }
    assert describe_cycle(check(find_cycle(waits))).startswith(
        "task 0 'ask' (which will put 'x') awaits the reply of task 1 to 'push'; "
        "task 1 handler 'push' waits for 'x' from task 0. "
    )
    assert find_cycle({0: waits[0], 1: [running("handler push", 1)]}) is None
    assert find_cycle({0: waits[0], 1: []}) is None


def test_handlers_that_call_each_other_in_turn_are_no_deadlock() -> None:
    # a calls b calls a calls b, which runs: known by name only, that looks like a circle.
    waits = {
        0: [reply("start", "b", 1), reply("handler a", "b", 1)],
        1: [reply("handler b", "a", 0)],
    }
    assert find_cycle(waits) is None


def test_finds_the_shortest_way_round() -> None:
    n = 50
    waits = {t: [item("p", "x", (t + 1) % n, provides=(("x", (t - 1) % n),))] for t in range(n)}
    waits[2] = [*waits[2], Wait("p", "item", 0, "short", 1.0, (("x", 1),))]
    waits[0] = [Wait("p", "item", 1, "x", 1.0, (("x", n - 1), ("short", 2)))]
    assert len(check(find_cycle(waits))) == 3


def test_long_cycle_of_ten_thousand_processors() -> None:
    n = 10_000
    waits = {t: [item("p", "x", (t + 1) % n, provides=(("x", (t - 1) % n),))] for t in range(n)}
    began = time.thread_time()
    cycle = check(find_cycle(waits))
    assert time.thread_time() - began < 5  # quadratic would be minutes
    assert len(cycle) == n
    text = describe_cycle(cycle)
    assert len(text) < 2000
    assert "(9988 more)" in text
    assert text.startswith("task 0 'p'")
    assert "task 9999 'p' (which will put 'x') waits for 'x' from task 0. " in text


def test_long_chain_of_ten_thousand_processors() -> None:
    n = 10_000
    waits = {t: [item("p", "x", t + 1, provides=(("x", t - 1),))] for t in range(n)}
    waits[n] = [running("p", n, provides=(("x", n - 1),))]
    assert find_cycle(waits) is None
    one_task = {0: [order(f"p{i}", f"p{i - 1}", 0) for i in range(1, n)]}
    assert find_cycle(one_task) is None


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=20))
    )
)
def test_agrees_with_peeling(graph: tuple[int, set[tuple[int, int]]]) -> None:
    n, arrows = graph  # (a, b): the processor of task a waits for an item of the processor of task b
    waits = {
        t: [running("p", t)]
        + [item("p", "x", b, tuple(("x", a2) for a2, b2 in arrows if b2 == t)) for a, b in arrows if a == t]
        for t in range(n)
    }
    for t in range(n):
        waits[t][0] = running("p", t, tuple(("x", a) for a, b in arrows if b == t))
    left = set(range(n))
    while free := {t for t in left if not any(a == t and b in left for a, b in arrows)}:
        left -= free
    cycle = find_cycle(waits)
    assert (cycle is not None) == bool(left)
    if cycle:
        assert {e.task for e in check(cycle)} <= left
        assert len({(e.task, e.processor) for e in cycle}) == len(cycle)


def test_says_what_each_waits_for() -> None:
    waits = {
        5: [running("slow", 5), Wait("hold", "running", 5, "a file", 7.0)],
        3: [
            item("add", "gradient", 5, since_s=2.345),
            order("publish", "add", 3),
            reply("ask", "push", 4),
            reply("handler push", "pull", 2),
        ],
    }
    assert describe_waits(waits) == [
        "task 5 'slow' is running, 1.0 s",
        "task 5 'hold' is not released (a file), 7.0 s",
        "task 3 'add' waits for 'gradient' from task 5, 2.3 s",
        "task 3 'ask' awaits the reply of task 4 to 'push', 1.0 s",
        "task 3 handler 'push' awaits the reply of task 2 to 'pull', 1.0 s",
        "task 3 'publish' runs after 'add' of the same task, 1.0 s",
    ]


def test_likely_cause_comes_first() -> None:
    chain = {task: [item("add", "sum", task + 1)] for task in range(5)} | {5: [running("add", 5)]}
    around = {7: [item("p", "x", 8)], 8: [item("p", "x", 7)]}  # nobody knows what these wait for in the end
    told = [line.split()[1] for line in describe_waits(chain | around | {6: [item("p", "x", 9)]})]
    assert told == ["5", "4", "6", "3", "2", "1", "0", "7", "8"], "nothing is known of 9, which may be it, too"


def test_wait_of_the_primary_has_no_edge() -> None:
    waits = {0: [Wait("", "outside", 0, "1 more in-sync replicas (min_in_sync=2)", 4.0)], 1: [item("p", "x", 0)]}
    assert find_cycle(waits) is None
    assert describe_waits(waits) == [
        "task 0 waits for 1 more in-sync replicas (min_in_sync=2), 4.0 s",
        "task 1 'p' waits for 'x' from task 0, 1.0 s",
    ]


def test_wait_for_a_turn_has_no_edge() -> None:
    """The code with the turn may return at any time."""
    waits = {
        0: [reply("ask", "pull", 0), Wait("handler pull", "turn of asking", 0, "ask", 2.0)],
        1: [running("fit", 1), Wait("handler pull", "turn", 1, "fit", 3.0)],
    }
    assert find_cycle(waits) is None
    assert describe_waits(waits) == [
        "task 0 handler 'pull' waits for its turn: 'ask' runs, which has asked for replies; where threads of its own "
        "wait for them, have it send all requests first, and then call wait() itself, 2.0 s",
        "task 1 'fit' is running, 1.0 s",
        "task 1 handler 'pull' waits for its turn: 'fit' runs, 3.0 s",
        "task 0 'ask' awaits the reply of task 0 to 'pull', 1.0 s",
    ]


def test_equal_waits_share_a_line() -> None:
    """1,400 equal waits once were 200 equal lines of `status`."""
    alike = [Wait("handler q", "reply", 1, "q", since_s) for since_s in (2.0, 3.0, 1.0)]
    waits = {0: [*alike, reply("handler q", "p", 1)]}
    assert describe_waits(waits) == [
        "task 0 handler 'q' awaits the reply of task 1 to 'q' (3 times), 3.0 s",
        "task 0 handler 'q' awaits the reply of task 1 to 'p', 1.0 s",
    ]


def test_description_of_waits_is_bounded() -> None:
    lines = describe_waits({0: [item("p", f"x{i}", 1) for i in range(50)]}, limit=10)
    assert len(lines) == 11
    assert lines[-1] == "and 40 more"
