"""What a worker (`worker`) wants its caller to do: send a message, add sums up, keep a total, drop a value.

The caller carries the actions out in order. It keeps the values: the sum of each held span, and each total, until an
action drops them.
"""

from __future__ import annotations

from taskgraph.protocol.elastic.flush import FlushReport
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.frozen import frozen

__all__ = [
    "Action",
    "Complete",
    "Contribute",
    "Contribution",
    "Drop",
    "Excluded",
    "GiveTotals",
    "Merge",
    "NoWholeWorker",
    "SendPosition",
    "SendReport",
    "SumTogether",
    "TotalsStable",
    "UnequalTags",
]


@frozen
class Contribution:
    """A message: the sender is the source of the sums of these spans of a position.

    Attributes:
        view: its number.
        tag: a digest of all totals so far and of what user code asks for.
        large: the sums are large enough to be added up in slices.
        apart: the message has no whole sums: all workers add up together (`SumTogether`).
    """

    view: int
    position: int
    spans: tuple[Span, ...]
    tag: bytes
    large: bool = False
    apart: bool = False


@frozen
class SendReport:
    """Send the report and the view to all other workers of the view.

    Keep the sums that the report names, also received ones, and drop all others of the position at work.
    """

    view: View
    report: FlushReport


@frozen
class Contribute:
    """Send the contribution to all other workers of the view, with the sums.

    Attributes:
        owners: if the sums are added up in slices, the workers that own a slice each: send each of them its slice.
    """

    contribution: Contribution
    owners: tuple[str, ...] = ()


@frozen
class Merge:
    """Replace the held sums of both halves of `span` by their sum."""

    span: Span


@frozen
class Drop:
    """Drop the held sums of these spans of the position at work."""

    spans: tuple[Span, ...]


@frozen
class Complete:
    """Add the held spans of this position, along the tree: that is the total. Keep it until it is stable."""

    position: int
    spans: tuple[Span, ...]


@frozen
class SumTogether:
    """Add up the contributions of all workers, in the same way on each of them; then call `note_summed`.

    Attributes:
        spans: of all workers; together they have all parts.
        owners: the workers that own a slice each; (): another communicator adds up.
    """

    view: int
    position: int
    spans: tuple[Span, ...]
    owners: tuple[str, ...]


@frozen
class GiveTotals:
    """Send the totals `first` to `end - 1` to a worker that lacks them."""

    view: int
    to: str
    first: int
    end: int


@frozen
class TotalsStable:
    """All workers of the view hold the totals below `position`; repeated once `Worker.all_whole` is true."""

    position: int


@frozen
class SendPosition:
    """Tell all other workers of the view that this one holds the totals below `position`."""

    view: int
    position: int


@frozen
class UnequalTags:
    """The tags of the workers differ at this position: their totals do, their state, or what their user code asks for.

    Attributes:
        outvoted: the workers to exclude: all but the largest group with equal tags; of several such groups, the one
            with the most senior worker stays.
    """

    position: int
    outvoted: tuple[str, ...]


@frozen
class Excluded:
    """The view excludes this worker: compute nothing more, and go back to the state whose last total was stable."""


@frozen
class NoWholeWorker:
    """No whole worker is left in this view: the job can only return to a checkpoint."""

    view: int


Action = (
    SendReport
    | Contribute
    | Merge
    | Drop
    | SumTogether
    | Complete
    | GiveTotals
    | SendPosition
    | TotalsStable
    | UnequalTags
    | Excluded
    | NoWholeWorker
)
