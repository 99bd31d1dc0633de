"""The fixed tree: the same bits for any split of the parts, and the fewest spans."""

from __future__ import annotations

import random

import pytest

from taskgraph.protocol.elastic.tree import Span, cover, halves, parent


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 6, 7, 8, 24, 33])
def test_cover_has_each_part_once(parts: int) -> None:
    rng = random.Random(parts)
    for _ in range(50):
        chosen = {part for part in range(parts) if rng.random() < 0.6}
        spans = cover(chosen, parts)
        assert sorted(part for span in spans for part in span.parts) == sorted(chosen)


@pytest.mark.parametrize("parts", [2, 3, 6, 24, 33])
def test_parent_has_the_span_as_a_half(parts: int) -> None:
    waiting = [Span(0, parts)]
    assert parent(waiting[0], parts) is None
    while waiting:
        span = waiting.pop()
        if span.end - span.first > 1:
            for half in halves(span):
                assert parent(half, parts) == span
                waiting.append(half)


def test_first_half_is_the_largest_power_of_two() -> None:
    assert halves(Span(0, 24)) == (Span(0, 16), Span(16, 24))
    assert halves(Span(16, 23)) == (Span(16, 20), Span(20, 23))
    assert halves(Span(0, 2)) == (Span(0, 1), Span(1, 2))


def test_all_parts_are_one_span() -> None:
    assert cover(range(24), 24) == (Span(0, 24),)
    assert cover((), 24) == ()
    assert cover(range(6), 24) == (Span(0, 4), Span(4, 6))
