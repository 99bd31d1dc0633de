"""How many epochs of a job are traced, where nobody says."""

from __future__ import annotations

import pytest

from taskgraph.launch.tracing import every_of, words_of


@pytest.mark.parametrize(
    ("epochs", "rate", "replicas", "hosts", "every"),
    [
        (20, 1_000.0, 7, 1, 1),  # over within a second
        (1_000, 1_000.0, 7, 1, 1),
        (1_001, 1_000.0, 7, 1, 7),
        (10_000, 1_000.0, 14, 1, 14),
        (10_000, 1_000.0, 14, 7, 2),  # each host has its own cores
        (10_000, 95.0, 127, 1, 13),  # what counts is what a host does, not how fast an epoch is
        (10_000, 100.0, 7, 1, 1),
        (20, 0.5, 1_000, 1, 1),
        (20, 0.0, 7, 1, 1),  # it stands, or has just begun
        (20, 0.0, 0, 0, 1),
    ],
)
def test_a_job_is_left_in_peace(epochs: int, rate: float, replicas: int, hosts: int, every: int) -> None:
    assert every_of(epochs, rate, replicas, hosts) == every


def test_which_epochs_in_words() -> None:
    assert words_of(1) == "" and words_of(6) == ", one of 6"
