"""The compute of a map's own processor: asks for pieces, lets user code compute them, and puts their results.

It runs on the event loop. A call beside it computes some pieces, one after the other: in a thread, or as a coroutine.

    no news of that call for `_LOOK_S`    the task gives its other pieces back, and asks for the end only
    the call returns meanwhile            the task asks for pieces again
    all pieces are finished elsewhere     the epoch goes on without the call, which counts for nothing from then on

A task with such a late call computes no pieces until the call has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from taskgraph.epoch import Epoch, ask_service, reply_future
from taskgraph.errors import GraphError, PieceFailed
from taskgraph.graph.values import decode
from taskgraph.queues.late import PieceWork
from taskgraph.queues.pieces import PieceEpoch, Result, error_lines, result_of
from taskgraph.queues.plan import DEAL, call_name
from taskgraph.queues.worker import Share, Todo
from taskgraph.sources.reading import content_of
from taskgraph.tables.client import send_held

if TYPE_CHECKING:
    from taskgraph.channels import Outputs
    from taskgraph.epoch import Reply, Work
    from taskgraph.protocol.messages import Encoded
    from taskgraph.queues.queue import WorkQueue

__all__ = ["Computing", "MapOf"]

_LOOK_S: Final = 0.1
"""A piece that takes longer is watched: a task has 40 ms of work at a time, or one long piece."""


class MapOf(NamedTuple):
    """One call of `epoch.map`.

    Attributes:
        queue: the name of the queue; "": the pieces are `values`.
        dealer: the task that deals.
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
        """Finds the pieces of a queue, while the dealer does the same: later calls have them."""
        if self.source is not None:
            _ = self.source.pieces


class _Ended(NamedTuple):
    """A piece that user code has returned from: its result, or the traceback of what it raised."""

    todo: Todo
    result: Result | str
    took_s: float
    acted: bool


class _Call:
    """A call of user code for some pieces.

    Attributes:
        ended: pieces that ended, until the event loop takes them.
        stop: no further piece begins.
    """

    def __init__(self, pieces: list[Todo]) -> None:
        self.pieces = pieces
        self.ended: deque[_Ended] = deque()
        self.stop = False
        self.future: asyncio.Task[None]


class Computing:
    """The compute of one task in one attempt."""

    def __init__(self, it: MapOf, epoch: Epoch) -> None:
        work = epoch._work
        self._it, self._epoch, self._work = it, epoch, work
        self._share = Share(work.kept_results(it.tag), work.node_name)
        self._pieces_work = PieceWork(work)
        self._clock = asyncio.get_running_loop().time
        self._asked: asyncio.Future[Encoded] | None = None
        self._asks_late = self._idle = False  # the ask under way is one that waits for the end
        self._call: _Call | None = None

    async def run(self, outs: Outputs) -> None:
        try:
            if self._it.source is not None:
                await self._work.run_in_thread(self._it.find_pieces)
            while self._share.last is None:
                await self._step()
            if self._call is not None:
                self._leave()
            await self._end(outs)
        except asyncio.CancelledError:
            if self._call is not None:  # the epoch begins again, and may use its results
                self._call.future.cancel()
                await asyncio.wait([self._call.future])
                self._take_ended(self._call)
                self._call.future.result()
            raise
        except BaseException:
            if self._call is not None:
                self._leave()
            raise

    async def _step(self) -> None:
        """Asks and computes, as far as both can begin; then waits until something ends."""
        share = self._share
        if self._asked is None and share.wants_to_ask(self._clock()):
            self._ask()
        if self._call is None and share.todo:
            self._call = _Call(share.begin())
            compute = _compute_async if self._it.value_is_async else _compute
            self._begin(self._call, partial(compute, self._it, self._pieces_work, self._epoch._where, self._call))
        in_time = await self._wait()
        call, asked = self._call, self._asked
        if call is not None:
            in_time = self._take_ended(call) or in_time
            if call.future.done():
                self._call = None
                share.end()
                call.future.result()
        if asked is not None and asked.done():
            self._asked = None
            self._take(decode(asked.result()))
        elif (self._asks_late and self._call is None) or (self._idle and not self._work.late):
            self._asked = None  # it would wait for the end
        elif not in_time and call is not None and share.working:
            call.stop = True
            self._ask(late=True)

    async def _wait(self) -> bool:
        """Waits until something ends. False: `_LOOK_S` has passed, and there is no other reason to ask."""
        waits: list[asyncio.Future[Any]] = [] if self._asked is None else [self._asked]
        if self._call is not None:
            waits.append(self._call.future)
        if self._idle:
            waits += self._work.late
        look_s = _LOOK_S if self._asked is None else None
        done, _ = await asyncio.wait(waits, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _begin(self, call: _Call, function: Callable[[], Any]) -> None:
        call.future = self._work.run_beside(call_name(self._epoch._where, self._epoch.number), function)

    def _leave(self) -> None:
        """Lets the epoch go on without the call."""
        call, self._call = self._call, None
        assert call is not None
        call.stop = True
        if self._it.value_is_async:
            call.future.cancel()
        self._pieces_work.close()
        self._work.leave(call.future)

    def _take_ended(self, call: _Call) -> bool:
        """Takes the pieces that ended. False: there is none."""
        share, ended = self._share, call.ended
        if not ended:
            return False
        while ended:
            todo, result, took_s, acted = ended.popleft()
            if isinstance(result, str):
                share.fail(todo, result, took_s)
            else:
                share.finish(todo.place, result, took_s, kept=not acted)
        return True

    def _ask(self, *, late: bool = False) -> None:
        it = self._it
        self._asks_late, self._idle = late, not late and bool(self._work.late)
        asked = self._share.ask(self._clock(), late=late, idle=self._idle)
        count, digest = (len(it.values), "") if it.source is None else (-1, it.source.digest)
        of_map = {"map": it.tag, "count": count, "digest": digest, "upto": it.upto}
        self._asked = reply_future(ask_service(self._epoch, it.dealer, DEAL, {**asked, **of_map}))

    def _take(self, answer: Mapping[str, Any]) -> None:
        it = self._it
        if (wrong := answer.get("refused")) is not None:
            raise GraphError(f"{self._epoch._place()}: {wrong}")
        if (failed := answer.get("failed")) is not None:
            _, piece, text, node = failed
            what = f"piece {piece} of {it.queue or it.tag!r} failed too often, on {node} the last time"
            raise PieceFailed(what, piece=piece, node=node, traceback=text)
        self._share.take(answer)

    async def _end(self, outs: Outputs) -> None:
        """Sends on what counts. As `value`, it runs in a thread or not."""
        it, epoch, share = self._it, self._epoch, self._share
        if it.value_is_async:
            await _end_async(it, epoch, share, outs)
            return
        self._call = _Call([])
        self._begin(self._call, partial(_end, it, epoch, share, outs))
        await asyncio.wait([self._call.future])
        call, self._call = self._call, None
        call.future.result()


# -- user code ----------------------------------------------------------------------------------------


def _compute(it: MapOf, work: PieceWork, where: str, call: _Call) -> None:
    for todo in call.pieces:
        if call.stop:
            return
        began, epoch = time.perf_counter(), _piece_epoch(it, work, where, todo)
        result: Result | str
        try:
            result = _value(it, epoch, todo)
        except (Exception, SystemExit) as error:
            result = error_lines(error)
        call.ended.append(_Ended(todo, result, time.perf_counter() - began, epoch.acted))


async def _compute_async(it: MapOf, work: PieceWork, where: str, call: _Call) -> None:
    clock = asyncio.get_running_loop().time
    for todo in call.pieces:
        if call.stop:
            return
        began, epoch = clock(), _piece_epoch(it, work, where, todo)
        result: Result | str
        try:
            result = await _value_async(it, epoch, todo)
        except (Exception, SystemExit) as error:
            result = error_lines(error)
        call.ended.append(_Ended(todo, result, clock() - began, epoch.acted))


def _value(it: MapOf, epoch: PieceEpoch, todo: Todo) -> Result:
    given, rows = _content(it, epoch, todo)
    return result_of(it.value(epoch, given), rows, epoch, _what(it, todo))


async def _value_async(it: MapOf, epoch: PieceEpoch, todo: Todo) -> Result:
    if it.source is None:
        given, rows = _content(it, epoch, todo)
    else:
        given, rows = await asyncio.to_thread(_content, it, epoch, todo)
    return result_of(await it.value(epoch, given), rows, epoch, _what(it, todo))


def _what(it: MapOf, todo: Todo) -> str:
    return f"the result of piece {todo.piece} of {it.queue or it.tag!r}"


def _piece_epoch(it: MapOf, work: PieceWork, where: str, todo: Todo) -> PieceEpoch:
    of = f"{it.tag}/{work.number}" if it.source is None else f"{it.queue}/{todo.pass_number}"
    return PieceEpoch(cast("Work", work), where, f"piece/{of}/{todo.piece}")


def _content(it: MapOf, epoch: PieceEpoch, todo: Todo) -> tuple[Any, int]:
    """Returns what user code gets for a piece, and how many rows it has."""
    if it.source is None:
        return it.values[todo.piece], 1
    source, piece = it.source.source, it.source.pieces[todo.piece]
    given = content_of(source, piece, buffer=it.source.buffer, seed=epoch.seed)
    return given, 1 if getattr(source, "whole", False) else len(given)


# -- the end ------------------------------------------------------------------------------------------


def _end(it: MapOf, epoch: Epoch, share: Share, outs: Outputs) -> None:
    for todo in _lacking(share):
        share.results[todo.place] = _value(it, _lacking_epoch(it, epoch, todo), todo)
    for reply in _send_on(it, epoch, share):
        reply.wait()
    _put(it, share, outs)


async def _end_async(it: MapOf, epoch: Epoch, share: Share, outs: Outputs) -> None:
    for todo in _lacking(share):
        share.results[todo.place] = await _value_async(it, _lacking_epoch(it, epoch, todo), todo)
    for reply in _send_on(it, epoch, share):
        await reply
    _put(it, share, outs)


def _lacking(share: Share) -> list[Todo]:
    """Returns the pieces whose results this task sends on, and has lost: of an earlier attempt, in a replay."""
    assert share.last is not None
    rows = share.last["results"].tolist()
    return [Todo(row[0], row[1], row[2], 0) for row in rows if row[0] not in share.results]


def _lacking_epoch(it: MapOf, epoch: Epoch, todo: Todo) -> PieceEpoch:
    return _piece_epoch(it, PieceWork(epoch._work), epoch._where, todo)


def _send_on(it: MapOf, epoch: Epoch, share: Share) -> list[Reply]:
    """Sends what is due with the results that count. Returns the replies to wait for."""
    last = share.last
    assert last is not None
    rows: list[tuple[int, int, int]] = last["results"].tolist()
    found: list[Result] = [share.results[place] for place, *_ in rows]
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


def _put(it: MapOf, share: Share, outs: Outputs) -> None:
    """Puts the results that count, and what all tasks are to know of the queue."""
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
