"""What a test sees of user code on one worker (`tg.testing.run`). All of it is called in the thread of user code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.parts import Part, RoundId
    from taskgraph.elastic_jobs.run_rows import RunRows
    from taskgraph.graph.sums import Sums
    from taskgraph.protocol.messages import Encoded

__all__ = ["Watch"]


class Watch(Protocol):
    """Watches one call of the user's function: each method is called when its event happens, and may raise there."""

    def on_copied_state(self, step: int) -> None:
        """Called when user code begins with a copied state, before this step."""

    def at_boundary(self, step: int, state: Any) -> None:
        """Called before each step; user code may have to wait here."""

    def at_last_boundary(self, step: int, state: Any) -> None:
        """Called when user code has taken all its steps, `step` of them, without `break`."""

    def on_group(self) -> None:
        """Called before the first turn of a group (`run.group`)."""

    def trials(self, round_id: RoundId, part: Part, feed: RunRows) -> Iterator[Part]:
        """Yields parts that user code computes before this part, and whose sums are dropped."""

    def after_trial(self, part: Part, sums: Sums) -> None:
        """Called with the sums of a part that `trials` yielded."""

    def before_part(self, round_id: RoundId, part: Part) -> None:
        """Called before user code computes a part; it may have to wait here."""

    def after_part(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        """Called when user code has computed a part."""

    def at_total(self, round_id: RoundId, parts: int) -> None:
        """Called before user code gets the total of a round of this many parts; it may have to wait here."""

    def before_piece(self) -> None:
        """Called before user code computes a piece of `run.once` or `run.map`."""

    def at_shard_stage(self, stage: str, done: int) -> None:
        """Called before user code computes a piece of `run.shards` (stage "part"), and after it ("sums").

        Args:
            done: how many pieces count, as far as this worker knows.
        """

    def after_piece(self, call: str, position: int, piece: int, found: Encoded) -> Encoded:
        """Called when user code has computed a piece of `run.once` or `run.map`. Returns what counts as its result."""

    def on_report(self, position: int, step: int, numbers: dict[str, float]) -> None:
        """Called when user code reports numbers of a step; `position`: the number of totals that it has got."""
