"""What has become of the pieces that workers deal among themselves: a pure function of what they contribute."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraph.elastic_jobs.piece_queue import FinishedPiece, PieceQueue, wanted_length
from taskgraph.elastic_jobs.tally import Tally, WorkerNews, holder_of, share_of_round, worker_of
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.dealing import QueueLedger, Ticket

VIEW = (3, ("n1.0", "n2.0", "n3.2"))


def rounds_of(tally: Tally, *news: WorkerNews) -> Any:
    """Applies contributions as they travel."""
    return tally.apply([WorkerNews.of(decode(encode(each.value()))) for each in news])


def begun(pieces: int, **options: Any) -> Tally:
    tally = Tally(QueueLedger(pieces, **options))
    rounds_of(tally, WorkerNews("n1.0", view=VIEW))
    return tally


def test_holders_are_entries_of_workers() -> None:
    assert worker_of(holder_of("n2", 7)) == "n2"


def test_the_last_pieces_are_shared_in_proportion() -> None:
    tally = begun(10)
    settled = rounds_of(tally, WorkerNews("n1.0", wants=30), WorkerNews("n2.0", wants=10), WorkerNews("n3.2"))
    assert {holder: len(tickets) for holder, tickets in settled.dealt.items()} == {"n1.0": 7, "n2.0": 2}
    assert tally.ledger.open == 1 and tally.slots == 3


def test_a_lost_workers_last_results_count() -> None:
    tally = begun(3)
    mine = rounds_of(tally, WorkerNews("n2.0", wants=2)).dealt["n2.0"]
    view = (4, ("n1.0", "n3.2"))
    settled = rounds_of(
        tally, WorkerNews("n2.0", done=[(mine[0], 5)], effects={0: "g"}), WorkerNews("n1.0", view=view, wants=9)
    )
    assert settled.counted == [("n2.0", mine[0], "g")]
    assert [ticket.piece for ticket in settled.dealt["n1.0"]] == [1, 2]
    assert tally.ledger.rows == 5 and tally.slots == 2


def test_a_worker_that_enters_again_holds_nothing_of_before() -> None:
    tally = begun(1)
    (ticket,) = rounds_of(tally, WorkerNews("n3.2", wants=1)).dealt["n3.2"]
    settled = rounds_of(tally, WorkerNews("n3.6", view=(6, ("n1.0", "n3.6")), done=[(ticket, 1)], wants=1))
    assert settled.counted == [] and settled.dealt["n3.6"] == [ticket]


def test_errors_count_as_attempts_and_name_the_worker() -> None:
    tally = begun(1, attempts=2)
    for attempt in range(2):
        (ticket,) = rounds_of(tally, WorkerNews("n1.0", wants=1)).dealt["n1.0"]
        assert ticket == Ticket(0, 0, attempt)
        settled = rounds_of(tally, WorkerNews("n1.0", failed=[(ticket, "ValueError: no")]))
    assert settled.failed is not None
    assert (settled.failed.piece, settled.failed.worker, settled.failed.text) == (0, "n1", "ValueError: no")


def test_workers_hear_that_one_of_them_has_nothing() -> None:
    tally = begun(1)
    assert not rounds_of(tally, WorkerNews("n1.0", wants=1)).starving
    assert rounds_of(tally, WorkerNews("n2.0", wants=1)).starving


def test_what_comes_too_late_in_a_queue_is_given_back() -> None:
    now = [0.0]
    queue = PieceQueue(lambda: now[0], lambda waiting: None, lambda: None)
    tickets = [Ticket(0, piece, 0) for piece in range(6)]
    queue.add(tickets)
    for _ in range(2):
        ticket = queue.next()
        assert ticket is not None
        now[0] += 0.1
        queue.finish(FinishedPiece(ticket))
    assert queue.next() == tickets[2] and not queue.is_idle_within(0.3) and queue.is_idle_within(0.5)
    assert queue.give_back(0.15) == tickets[4:] and queue.give_back(0.05) == [tickets[3]]
    assert [each.ticket for each in queue.take_finished()] == tickets[:2]


def test_pieces_given_back_go_to_others() -> None:
    tally = begun(2)
    dealt = rounds_of(tally, WorkerNews("n1.0", wants=2)).dealt["n1.0"]
    settled = rounds_of(tally, WorkerNews("n1.0", back=dealt[1:]), WorkerNews("n2.0", wants=1))
    assert settled.dealt == {"n2.0": dealt[1:]}


@pytest.mark.parametrize("seed", range(20))
def test_each_piece_counts_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    tally, passes = begun(40, passes=2, shuffle=True, overlap=True), 2
    workers, number, counted, held = {"a.0", "b.0", "c.0"}, 10, list[tuple[int, int]](), dict[str, list[Ticket]]()
    view: tuple[int, tuple[str, ...]] | None = (number, tuple(sorted(workers)))
    for _ in range(2000):
        if rng.random() < 0.1:
            workers.discard(rng.choice(sorted(workers)))
            number += 1
            workers.add(f"{rng.choice('abcde')}.{number}")
            view = number, tuple(sorted(workers))
            held = {holder: tickets for holder, tickets in held.items() if holder in workers}
        news = []
        for holder in sorted(workers):
            mine = held.setdefault(holder, [])
            done, back = [], []
            for ticket in list(mine):
                if (chance := rng.random()) < 0.4:
                    (done if chance < 0.35 else back).append(ticket)
                    mine.remove(ticket)
            news.append(
                WorkerNews(holder, view, [(t, 1) for t in done], back=back, wants=rng.randrange(5), elapsed_s=0.01)
            )
        if rng.random() < 0.2:
            news.pop(rng.randrange(len(news)))  # its slot had no contribution of its own
            held = {each.holder: held[each.holder] for each in news} | {h: held[h] for h in workers if h in held}
        settled = rounds_of(tally, *news)
        for holder, tickets in settled.dealt.items():
            held.setdefault(holder, []).extend(tickets)
        counted += [ticket[:2] for _, ticket, _ in settled.counted]
        if rng.random() < 0.1:
            tally = Tally.of(decode(encode(tally.state())))
        if tally.ledger.over:
            break
    assert tally.ledger.over and len(counted) == len(set(counted)) == 40 * passes


def test_an_earlier_runs_holders_are_lost() -> None:
    tally = begun(2)
    rounds_of(tally, WorkerNews("n1.0", wants=2))
    again = Tally.of(tally.state(), same_run=False)
    assert again.ledger.open == 2 and again.view == (-1, ())


@pytest.mark.parametrize(
    ("typical_s", "running_s", "count", "expected"),
    [
        (None, None, 0, 1),
        (None, 0.1, 0, 0),
        (0.001, 0.0, 100, 40),
        (0.0, None, 3, 24),
        (1.0, None, 5, 1),
        (1.0, 0.5, 5, 0),
        (1.0, 0.97, 5, 1),
        (0.001, 0.5, 100, -1),
    ],
)
def test_a_queue_has_work_for_two_rounds(
    typical_s: float | None, running_s: float | None, count: int, expected: int
) -> None:
    assert wanted_length(typical_s, running_s, count, 0.02) == expected


@pytest.mark.parametrize(("piece_ms", "pieces"), [(20, 400), (1, 8000), (60, 150), (400, 60)])
def test_one_slow_worker_of_four_costs_little(piece_ms: int, pieces: int) -> None:
    """Plays rounds of 17 ms, millisecond by millisecond."""
    now = [0.0]
    tally, view = Tally(QueueLedger(pieces)), (1, tuple(f"n{number}.1" for number in range(4)))
    queues = {holder: PieceQueue(lambda: now[0], lambda waiting: None, lambda: None) for holder in view[1]}
    takes_ms = {holder: piece_ms * (4 if holder == "n2.1" else 1) for holder in queues}
    ends = dict.fromkeys(queues, 0)
    starving, at_work = False, dict[str, Ticket | None]()
    for millisecond in range(100_000):
        now[0] = millisecond / 1000
        for holder, queue in queues.items():
            ticket = at_work.get(holder)
            if ticket is not None and millisecond >= ends[holder]:
                queue.finish(FinishedPiece(ticket))
                at_work[holder] = ticket = None
            if ticket is None and queue.has_pieces:
                at_work[holder] = queue.next()
                ends[holder] = millisecond + takes_ms[holder]
        if millisecond % 17:
            continue
        news = [WorkerNews(holder, view, elapsed_s=0.017) for holder in queues]
        for each in news:
            queue = queues[each.holder]
            each.done = [(finished.ticket, 1) for finished in queue.take_finished()]
            each.back = queue.give_back(0.017) if starving else []
            each.wants, back = (
                queue.wanted_or_surplus(0.017) if tally.ledger.open else (int(queue.is_idle_within(0.017)), [])
            )
            each.back += back
        settled = rounds_of(tally, *news)
        starving = settled.starving
        for holder, tickets in settled.dealt.items():
            queues[holder].add(tickets)
        if tally.ledger.over:
            break
    ideal_ms = pieces * piece_ms / 3.25
    assert tally.ledger.over and millisecond <= 1.1 * ideal_ms + piece_ms


@given(bound=st.integers(1, 20), workers=st.integers(1, 12), position=st.integers(0, 1000))
def test_share_of_a_round_is_bounded_and_reaches_all(bound: int, workers: int, position: int) -> None:
    everyone, later = range(workers), range(position, position + workers)
    shares = [[share_of_round(bound, index, workers, at) for index in everyone] for at in later]
    assert all(1 <= sum(of_round) <= bound for of_round in shares)
    assert all(sum(of_worker) for of_worker in zip(*shares, strict=True))
