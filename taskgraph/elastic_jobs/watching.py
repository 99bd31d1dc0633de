"""What a test sees of user code on one worker (`tg.testing.run`). All of it is called in the thread of user code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.feeds import Feed
    from taskgraph.elastic_jobs.parts import Part, RoundId
    from taskgraph.graph.sums import Sums
    from taskgraph.protocol.messages import Encoded

__all__ = ["Watch"]


class Watch(Protocol):
    """Watches one call of the user's function: each method is called when its event happens, and may raise there."""

    def copied(self, step: int) -> None:
        """User code begins with a copied state, before this step."""

    def boundary(self, step: int, state: Any) -> None:
        """User code is between two steps, or before the first one; it may have to wait here."""

    def last_boundary(self, step: int, state: Any) -> None:
        """Notes that user code has taken all its steps, `step` of them, without `break`."""

    def trials(self, round_id: RoundId, part: Part, feed: Feed) -> Iterator[Part]:
        """Yields parts for user code to compute before this part, which count nowhere."""

    def tried(self, part: Part, sums: Sums) -> None:
        """Takes the sums of a part that `trials` yielded."""

    def part(self, round_id: RoundId, part: Part) -> None:
        """User code is about to compute a part; it may have to wait here."""

    def computed(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        """User code has computed a part."""

    def total(self, round_id: RoundId, parts: int) -> None:
        """The total of a round of this many parts is there; user code may have to wait for it here."""

    def piece(self) -> None:
        """User code is about to compute a piece of `run.once` or `run.map`."""

    def shard(self, stage: str, done: int) -> None:
        """User code is about to compute a piece of `run.shards` ("part"), or has computed it ("sums").

        Args:
            done: how many pieces count, as far as this worker knows.
        """

    def result(self, call: str, position: int, piece: int, found: Encoded) -> Encoded:
        """User code has computed a piece of `run.once` or `run.map`. Returns what counts as its result."""

    def report(self, position: int, step: int, numbers: dict[str, float]) -> None:
        """User code reports numbers of a step, after this many totals."""
