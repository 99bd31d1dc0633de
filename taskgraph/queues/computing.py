"""The compute of a map's own processor: asks for pieces, computes them, and puts their results.

A call of user code does all that: a thread, or a coroutine if `value` is one. Beside it, on the event loop,
`MapComputation` watches for a piece that takes long:

    the same piece for `_LOOK_S`          the task gives its other pieces back, and asks for the end only
    the piece ends after all              the call asks for pieces again
    all pieces are finished elsewhere     the epoch goes on without the call, which counts for nothing from then on

A task with such a late call computes no pieces until the call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from taskgraph.epoch import AttemptEnded, Epoch, ask_service, reply_future
from taskgraph.errors import GraphError, PieceFailed
from taskgraph.graph.values import decode
from taskgraph.queues.late import PieceWork
from taskgraph.queues.pieces import PieceEpoch, PieceResult, error_lines, result_of
from taskgraph.queues.plan import DEAL, call_name
from taskgraph.queues.worker import PieceToCompute, TaskPieces
from taskgraph.sources.reading import content_of
from taskgraph.tables.client import send_held

if TYPE_CHECKING:
    from taskgraph.channels import Outputs
    from taskgraph.epoch import Reply, Work
    from taskgraph.queues.queue import WorkQueue

__all__ = ["DeclaredMap", "MapComputation"]

_LOOK_S: Final = 0.1
"""A piece that takes longer is watched: a task has 40 ms of work at a time, or one long piece."""


class DeclaredMap(NamedTuple):
    """One call of `epoch.map`, whose arguments were checked.

    Attributes:
        queue: the name of the queue; "": the pieces are `values`.
        source: the queue; None: there is none.
        dealer: the task that deals.
        upto: how many pieces an epoch computes; None: all values, or all that the queue's pass has left.
        value_is_async: `value` is an `async def`.
    """

    tag: str
    queue: str
    values: Sequence[Any]
    source: WorkQueue | None
    dealer: int
    upto: int | None
    value: Callable[[Epoch, Any], Any]
    value_is_async: bool

    def find_pieces(self) -> None:
        """Finds the pieces of the queue's source ahead, as the dealer does meanwhile; nothing without a queue."""
        if self.source is not None:
            _ = self.source.pieces


class MapComputation:
    """Computes pieces of a map on one task in one attempt: by a call of user code, which it watches on the event loop.

    The call has the lock, but not while it is in `value`. With the lock, the loop may use `share`, `asked` and `at`.

    Attributes:
        asked: the ask that the call waits for.
        at: the piece that was begun last; None: the call computes none, or no further one.
        left: the epoch has gone on without the call.
    """

    def __init__(self, it: DeclaredMap, epoch: Epoch) -> None:
        work = epoch._work
        self.it, self.epoch, self._work = it, epoch, work
        self.share = TaskPieces(work.kept_results(it.tag), work.node_name)
        self.pieces_work = PieceWork(work)
        self.clock = asyncio.get_running_loop().time if it.value_is_async else time.perf_counter
        self.lock = threading.Lock()
        self.asked: Reply | None = None
        self.at: PieceToCompute | None = None
        self.left = False

    async def run(self, outs: Outputs) -> None:
        """Computes pieces until all are finished, and puts the results that count."""
        it = self.it
        if it.source is not None:
            await self._work.run_in_thread(it.find_pieces)
        while self._work.late_calls and self.share.last is None:
            await self._wait_idle()
        if self.share.last is None:
            await self._run_or_leave(partial(_compute_async if it.value_is_async else _compute, self, outs))
            if not self.left:
                return
        await self._run_or_leave(partial(_send_and_put_async if it.value_is_async else _send_and_put, self, outs))
        self.share.results.clear()  # the late call refers to this

    async def _wait_idle(self) -> None:
        """Waits, without computing, for the end of all pieces, or of a late call of this task."""
        asked = reply_future(self.send_ask(idle=True))
        waits: list[asyncio.Future[Any]] = [asked, *self._work.late_calls]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            self.take_answer(decode(asked.result()))

    async def _run_or_leave(self, function: Callable[[], Any]) -> None:
        """Runs `function`, which calls user code, until it returns; leaves it running (`left`) if all pieces end."""
        call = self._work.run_beside(call_name(self.epoch._where, self.epoch.number), function)
        try:
            seen: PieceToCompute | None = None
            while not call.done():
                await asyncio.wait([call], timeout=_LOOK_S)
                if seen is None or seen is not self.at:
                    seen = self.at
                elif await self._wait_out(call, seen):
                    return
        except (asyncio.CancelledError, AttemptEnded):  # the epoch begins again, and may use the results
            call.cancel()
            try:
                while not call.done():
                    with contextlib.suppress(asyncio.CancelledError):  # a second cancellation changes nothing
                        await asyncio.wait([call])
            except GeneratorExit:  # both took too long to end, and this coroutine is abandoned first
                self._leave_call(call)
                raise
            call.result()
            raise
        except BaseException:
            self._leave_call(call)
            raise
        call.result()

    async def _wait_out(self, call: asyncio.Task[None], piece: PieceToCompute) -> bool:
        """Waits for the end of all pieces while the call is at this one. True: they ended, and the call was left."""
        while self.lock.acquire(blocking=False):
            try:
                if self.at is not piece:
                    return False
                self.asked = None
                asked = reply_future(self.send_ask(late=piece))
            finally:
                self.lock.release()
            waits: list[asyncio.Future[Any]] = [asked, call]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if call.done() or not self.lock.acquire(blocking=False):
                return False
            try:
                if self.at is not piece:
                    return False
                self.take_answer(decode(asked.result()))
                if self.share.last is not None:
                    self.at = None  # the next call, which is the end, is at no piece
                    self._leave_call(call)
                    return True
            finally:
                self.lock.release()
        return False

    def _leave_call(self, call: asyncio.Task[None]) -> None:
        """Closes what the call may still use, so that it counts for nothing, and lets the epoch go on without it."""
        self.left = True
        self.pieces_work.close()
        if self.it.value_is_async:
            call.cancel()
        self._work.go_on_without(call)

    def send_ask(self, *, late: PieceToCompute | None = None, idle: bool = False) -> Reply:
        """Sends the ask that `TaskPieces.ask` makes to the dealer, and returns the reply to wait for."""
        it = self.it
        asked = self.share.ask(self.clock(), late=late, idle=idle)
        count, digest = (len(it.values), "") if it.source is None else (-1, it.source.pieces_digest)
        of_map = {"map": it.tag, "count": count, "digest": digest, "upto": it.upto}
        return ask_service(self.epoch, it.dealer, DEAL, {**asked, **of_map})

    def take_answer(self, answer: Mapping[str, Any]) -> None:
        """Takes the dealer's answer. Raises GraphError if maps differ, PieceFailed if a piece fails the job."""
        it = self.it
        if (wrong := answer.get("refused")) is not None:
            raise GraphError(f"{self.epoch._place()}: {wrong}")
        if (failed := answer.get("failed")) is not None:
            _, piece, text, node = failed
            what = f"piece {piece} of {it.queue or it.tag!r} failed too often, on {node} the last time"
            raise PieceFailed(what, piece=piece, node=node, traceback=text)
        self.share.take(answer)

    def note_result(self, todo: PieceToCompute, result: PieceResult | str, took_s: float, epoch: PieceEpoch) -> None:
        """Notes a piece as finished with a result, or as failed with a traceback (text)."""
        if isinstance(result, str):
            self.share.fail(todo, result, took_s)
        else:
            self.share.finish(todo.place, result, took_s, kept=not epoch.acted)


# -- the call -----------------------------------------------------------------------------------------


def _compute(of: MapComputation, outs: Outputs) -> None:
    """Computes pieces until all are finished, then puts the results, unless the epoch went on without the call."""
    share = of.share
    with of.lock:
        while share.last is None:
            if of.asked is not None and (of.asked.done or not share.todo):
                of.take_answer(of.asked.wait())
                of.asked = None
            elif of.asked is None and share.wants_to_ask(of.clock()):
                of.asked = of.send_ask()
            if share.todo:
                _compute_piece(of, share.todo.popleft())
                if of.left:
                    return
        of.at = None
    _send_and_put(of, outs)


async def _compute_async(of: MapComputation, outs: Outputs) -> None:
    """As `_compute`, if `value` is an `async def`."""
    share = of.share
    with of.lock:
        while share.last is None:
            if of.asked is not None and (of.asked.done or not share.todo):
                of.take_answer(await of.asked)
                of.asked = None
            elif of.asked is None and share.wants_to_ask(of.clock()):
                of.asked = of.send_ask()
            if share.todo:
                await _compute_piece_async(of, share.todo.popleft())
                if of.left:
                    return
        of.at = None
    await _send_and_put_async(of, outs)


def _compute_piece(of: MapComputation, todo: PieceToCompute) -> None:
    """Computes one piece, without the lock, and notes its result, unless the epoch went on without the call."""
    began, epoch = of.clock(), _piece_epoch(of, of.pieces_work, todo)
    result: PieceResult | str
    of.at = todo
    of.lock.release()
    try:
        result = _value(of.it, epoch, todo)
    except (Exception, SystemExit) as error:
        result = error_lines(error)
    finally:
        of.lock.acquire()
    if not of.left:
        of.note_result(todo, result, of.clock() - began, epoch)


async def _compute_piece_async(of: MapComputation, todo: PieceToCompute) -> None:
    """As `_compute_piece`, if `value` is an `async def`."""
    began, epoch = of.clock(), _piece_epoch(of, of.pieces_work, todo)
    result: PieceResult | str
    of.at = todo
    of.lock.release()
    try:
        result = await _value_async(of.it, epoch, todo)
    except (Exception, SystemExit) as error:
        result = error_lines(error)
    finally:
        of.lock.acquire()
    if not of.left:
        of.note_result(todo, result, of.clock() - began, epoch)


def _value(it: DeclaredMap, epoch: PieceEpoch, todo: PieceToCompute) -> PieceResult:
    """Calls the user's `value` with a piece, and returns the result."""
    given, rows = _content(it, epoch, todo)
    return result_of(it.value(epoch, given), rows, epoch, _name_result(it, todo))


async def _value_async(it: DeclaredMap, epoch: PieceEpoch, todo: PieceToCompute) -> PieceResult:
    """As `_value`, if the user's `value` is an `async def`; the piece is read in a thread."""
    found: list[tuple[Any, int]] = []
    if it.source is None:
        found.append(_content(it, epoch, todo))
    else:
        await epoch._work.run_in_thread(lambda: found.append(_content(it, epoch, todo)))
    ((given, rows),) = found
    return result_of(await it.value(epoch, given), rows, epoch, _name_result(it, todo))


def _name_result(it: DeclaredMap, todo: PieceToCompute) -> str:
    """Names the result of a piece, for messages."""
    return f"the result of piece {todo.piece} of {it.queue or it.tag!r}"


def _piece_epoch(of: MapComputation, work: PieceWork, todo: PieceToCompute) -> PieceEpoch:
    """Returns the epoch that user code gets for a piece."""
    it = of.it
    pieces = f"{it.tag}/{work.number}" if it.source is None else f"{it.queue}/{todo.pass_number}"
    return PieceEpoch(cast("Work", work), of.epoch._where, f"piece/{pieces}/{todo.piece}")


def _content(it: DeclaredMap, epoch: PieceEpoch, todo: PieceToCompute) -> tuple[Any, int]:
    """Returns what user code gets for a piece, and how many rows it has."""
    if it.source is None:
        return it.values[todo.piece], 1
    source, piece = it.source.source, it.source.pieces[todo.piece]
    given = content_of(source, piece, buffer=it.source.buffer, seed=epoch.seed)
    return given, 1 if getattr(source, "whole", False) else len(given)


# -- the end ------------------------------------------------------------------------------------------


def _send_and_put(of: MapComputation, outs: Outputs) -> None:
    """Ends the map: computes lost results again, sends pushes and counts, waits for replies, and puts the results."""
    it, epoch, share = of.it, of.epoch, of.share
    for todo in _lost_results(share):
        share.results[todo.place] = _value(it, _piece_epoch(of, PieceWork(epoch._work), todo), todo)
    for reply in _send_pushes_and_counts(it, epoch, share):
        reply.wait()
    _put_results(it, share, outs)


async def _send_and_put_async(of: MapComputation, outs: Outputs) -> None:
    """As `_send_and_put`, if `value` is an `async def`."""
    it, epoch, share = of.it, of.epoch, of.share
    for todo in _lost_results(share):
        share.results[todo.place] = await _value_async(it, _piece_epoch(of, PieceWork(epoch._work), todo), todo)
    for reply in _send_pushes_and_counts(it, epoch, share):
        await reply
    _put_results(it, share, outs)


def _lost_results(share: TaskPieces) -> list[PieceToCompute]:
    """Returns the pieces whose results this task is to put and lacks: an earlier attempt had computed them."""
    assert share.last is not None
    rows = share.last["results"].tolist()
    return [PieceToCompute(row[0], row[1], row[2], 0) for row in rows if row[0] not in share.results]


def _send_pushes_and_counts(it: DeclaredMap, epoch: Epoch, share: TaskPieces) -> list[Reply]:
    """Sends the pushes of the results that this task puts, and tells the dealer which pieces are done or set aside.

    Returns the replies to wait for.
    """
    last = share.last
    assert last is not None
    rows: list[tuple[int, int, int]] = last["results"].tolist()
    found: list[PieceResult] = [share.results[place] for place, *_ in rows]
    replies: list[Reply] = []
    for (_, pass_number, piece), result in zip(rows, found, strict=True):
        if result.pushes:
            replies += send_held(epoch, result.pushes, (it.tag, pass_number, piece))
    if it.source is not None:
        counted = [(e, piece, result.rows) for (_, e, piece), result in zip(rows, found, strict=True)]
        payload = {
            "done": np.array(counted, np.int64).reshape(len(counted), 3),
            "aside": [row[1:] for row in last["aside"]],
        }
        replies.append(ask_service(epoch, it.dealer, "count", payload))
    return replies


def _put_results(it: DeclaredMap, share: TaskPieces, outs: Outputs) -> None:
    """Puts the results that count, with the pieces set aside and how many the queue has left."""
    last = share.last
    assert last is not None
    places: list[int] = last["results"][:, 0].tolist()
    outs.put(
        f"{it.tag} pieces",
        {
            "places": np.array(places, np.int64),
            "results": [share.results[place].decoded() for place in places],
            "aside": last["aside"],
            "count": last["count"],
            "left": [last["queue_over"], last["left"]],
        },
    )
