"""`run.shards`: pieces for free workers, each counted once in each pass, whatever dies."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.protocol.dealing import Ticket


class Counts:
    """What counts so far, as a table would keep it."""

    bound = 0

    def __init__(self) -> None:
        self.found: Counter[tuple[int, int]] = Counter()

    def end_piece(self, ticket: Ticket, *, counts: bool) -> Any:
        return f"of {ticket.piece}" if counts else None

    def apply_effects(self, ticket: Ticket, effects: Any) -> None:
        assert effects == f"of {ticket.piece}"
        self.found[ticket.pass_number, ticket.piece] += 1

    def captured(self) -> Any:
        return [[*key, count] for key, count in self.found.items()]

    def load(self, captured: Any) -> None:
        self.found = Counter({(key[0], key[1]): count for *key, count in captured})

    def digests(self) -> dict[str, bytes]:
        return {}


@tg.elastic
def counted(run: tg.Run, pieces: int = 40, passes: int = 1) -> list[list[int]]:
    counts = Counts()
    run.effects = run.progress.carried["counts"] = counts
    for piece in run.shards(range(pieces), passes=passes, shuffle=True):
        assert 0 <= piece < pieces
    return sorted([*key, count] for key, count in counts.found.items())


def expected(pieces: int = 40, passes: int = 1) -> list[list[int]]:
    return [[number, piece, 1] for number in range(passes) for piece in range(pieces)]


def test_in_this_process() -> None:
    assert tg.run(counted(passes=2), nodes=0).value == expected(passes=2)


@pytest.mark.parametrize("order", range(4))
def test_newcomers_join_and_workers_leave(order: int) -> None:
    assert tg.testing.run(counted(), order=order).value == expected()


@pytest.mark.parametrize(("stage", "order"), [("begin", 1), ("part", 2), ("sums", 1)])
def test_kills_lose_and_double_nothing(stage: str, order: int) -> None:
    kills = {(0, 3): stage, (1, 10): stage, (2, 20): stage}
    assert tg.testing.run(counted(passes=2), kills=kills, order=order).value == expected(passes=2)


@tg.elastic
def failing(run: tg.Run, on_error: str = "fail", attempts: int = 2) -> int:
    tried = 0
    shards = run.shards(range(6), on_error=on_error, attempts=attempts)
    for piece in shards:
        if piece == 4:
            tried += 1
            shards.fail(ValueError(f"no {piece}"))
    return tried + sum("no 4" in failed.traceback for failed in shards.set_aside if failed.piece == 4)


def test_a_piece_that_fails_too_often_fails_the_job_by_number() -> None:
    with pytest.raises(
        tg.JobFailed, match=r"(?s)piece 4 raised on n1, as often as its attempts allow.*ValueError: no 4"
    ):
        tg.run(failing(), nodes=0)


def test_a_piece_is_set_aside() -> None:
    result = tg.run(failing(on_error="set aside", attempts=3), nodes=0)
    assert result.value == 3 + 1
    assert [failed.piece for failed in result.set_aside["shards"]] == [4]


class Unreadable:
    def pieces(self) -> list[str]:
        return ["a", "b"]

    def read(self, piece: str) -> list[str]:
        raise OSError(f"{piece} cannot be read")


@tg.elastic
def reading(run: tg.Run) -> None:
    for _ in run.shards(Unreadable()):
        pass


def test_errors_of_the_source_count_as_the_pieces() -> None:
    with pytest.raises(tg.JobFailed, match=r"(?s)piece . raised.*OSError: . cannot be read"):
        tg.run(reading(), nodes=0)


@tg.elastic
def leaving(run: tg.Run, how: str) -> None:
    for piece in run.shards(range(4)):
        if how == "break":
            break
        if how == "once":
            run.once(lambda: 1)
        if how == "twice":
            run.shards(range(3))
        if how == "raise":
            raise KeyError(f"at {piece}")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("break", "left before its last piece"),
        ("once", "run.once in the loop over run.shards"),
        ("twice", "a job has one loop"),
        ("raise", "KeyError"),
    ],
)
def test_mistakes_have_names(how: str, message: str) -> None:
    with pytest.raises(tg.JobFailed, match=message):
        tg.run(leaving(how), nodes=0)


@tg.elastic
def with_state(run: tg.Run) -> list[int]:
    first = run.once(lambda: 7)
    s = run.state(first=first)
    for _ in run.shards(range(20)):
        assert s.first == 7
    return run.map(lambda x: x + s.first, [1, 2])


def test_code_before_and_after_the_loop() -> None:
    assert tg.testing.run(with_state()).value == [8, 9]
    assert tg.run(with_state(), nodes=0).value == [8, 9]


class Drawn:
    """Finds other pieces each time, as nodes with other files do."""

    def pieces(self) -> list[float]:
        return [random.SystemRandom().random() for _ in range(20)]

    def read(self, piece: float) -> list[float]:
        return [piece]


FOUND: set[float] = set()


@tg.elastic
def of_drawn(run: tg.Run, values: bool = False) -> None:
    for piece in run.shards(Drawn().pieces() if values else Drawn()):
        FOUND.update([piece] if values else piece)


def test_one_worker_finds_the_pieces_of_a_source() -> None:
    FOUND.clear()
    tg.testing.run(of_drawn(), strict=False)
    assert len(FOUND) == 20


def test_values_that_differ_between_workers_are_an_error() -> None:
    with pytest.raises(tg.JobFailed, match=r"of 20 pieces \(digest .*give the same on all workers"):
        tg.testing.run(of_drawn(values=True), strict=False)


@tg.elastic
def endless(run: tg.Run) -> None:
    for _ in run.shards(range(3), passes=None):  # type: ignore[arg-type]
        pass


def test_endless_passes_are_refused() -> None:
    with pytest.raises(tg.JobFailed, match="would have no end"):
        tg.run(endless(), nodes=0)
