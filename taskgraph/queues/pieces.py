"""One piece: what user code gets, the result it gives, and what is kept of results over attempts."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from taskgraph.epoch import Epoch
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded

if TYPE_CHECKING:
    from types import SimpleNamespace

    from taskgraph.epoch import Hold, Reply, To, Work

__all__ = ["KeptResults", "PieceEpoch", "PieceResult", "error_lines", "result_of"]

_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
"""Types of values that cannot change: they need no copy."""


class PieceResult(NamedTuple):
    """The result of a piece.

    Attributes:
        value: encoded, unless it cannot change: user code may use its arrays again for the next piece.
        rows: how many rows the piece had.
        pushes: to tables; they are sent if the result counts.
    """

    value: Any
    rows: int
    pushes: tuple[Any, ...]

    def decoded(self) -> Any:
        """Returns the value; its arrays are read-only."""
        return decode(self.value) if type(self.value) is Encoded else self.value


def result_of(value: Any, rows: int, epoch: PieceEpoch, what: str) -> PieceResult:
    """Returns what `value` returned for a piece as its result. Raises ValueNotEncodable if it cannot travel."""
    kept = value if type(value) in _PLAIN else encode(value, what=what)
    return PieceResult(kept, rows, tuple(epoch._held_pushes or ()))


class PieceEpoch(Epoch):
    """The epoch that user code gets for one piece.

    `seed` and `rng` depend on the piece alone, and not on the task that computes it. Tasks of a process share the
    generators of `random`, `numpy.random` and PyTorch, so these are not seeded.

    Args:
        key: identifies the piece.

    Attributes:
        acted: user code did something in this attempt, such as sending a request: the result is not kept for the next.
    """

    __slots__ = ("_key", "acted")

    def __init__(self, work: Work, where: str, key: str) -> None:
        super().__init__(work, where)
        self._key = key
        self.acted = False
        self._held_pushes = []

    @property
    def seed(self) -> int:
        """64 bits of (job seed, map or queue, piece): the same on every task, and on every replay."""
        return xxhash.xxh3_64_intdigest(f"{self._work.seed}/{self._key}".encode())

    @property
    def scratch(self) -> SimpleNamespace:
        self.acted = True
        return super().scratch

    def flag(self, to: To, meta: Any = None) -> None:
        self.acted = True
        super().flag(to, meta)

    def _send_request(self, to: int, method: str, payload: Any) -> Reply:
        self.acted = True
        return super()._send_request(to, method, payload)

    def hold(self, why: str) -> Hold:
        self.acted = True
        return super().hold(why)

    def report(self, /, **numbers: float) -> None:
        self.acted = True
        super().report(**numbers)

    def finish(self) -> None:
        self.acted = True
        super().finish()


class KeptResults:
    """Results of a task's pieces in epochs that are not committed. An attempt that begins again uses them."""

    def __init__(self) -> None:
        self._by: dict[tuple[str, int], dict[int, PieceResult]] = {}

    def of(self, tag: str, epoch: int, committed: int) -> dict[int, PieceResult]:
        """Returns place -> result of a map in an epoch, to be read and added to. Forgets what is of no use.

        Args:
            committed: the committed epoch. If `epoch` begins again, the state of later ones may differ.
        """
        self._by = {key: kept for key, kept in self._by.items() if committed <= key[1] <= epoch}
        return self._by.setdefault((tag, epoch), {})


def error_lines(error: BaseException) -> str:
    """Returns the traceback of an exception that user code raised, without the frame that called it."""
    if (at := error.__traceback__) is not None and at.tb_next is not None:
        error = error.with_traceback(at.tb_next)
    return "".join(traceback.format_exception(error))
