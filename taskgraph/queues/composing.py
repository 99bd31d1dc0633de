"""What `epoch.map` declares in `compose`, and the computes of these processors.

map <tag>       asks the dealer for pieces, computes them, puts its results     parallel, on each task
<tag> results   puts the results of all tasks in the order of the pieces        to itself
<name of then>  the user's sync point
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from taskgraph.epoch import Epoch, QueueState, ask_service, service_ids
from taskgraph.errors import GraphError, JobError, PieceFailed
from taskgraph.graph.compose import name_of
from taskgraph.queues.pieces import PieceEpoch, Result, error_lines, result_of
from taskgraph.queues.plan import DEAL
from taskgraph.queues.queue import service_title
from taskgraph.queues.worker import Share, Todo
from taskgraph.results import Failed
from taskgraph.sources.reading import as_source, content_of
from taskgraph.tables.client import send_held

if TYPE_CHECKING:
    from taskgraph.channels import Inputs, Outputs
    from taskgraph.epoch import MapCall, Reply
    from taskgraph.jobs import Job
    from taskgraph.queues.queue import WorkQueue

__all__ = ["map_pieces", "queue_state"]


class _Map(NamedTuple):
    """One call of `epoch.map`.

    Attributes:
        queue: the name of the queue; "": the pieces are `values`.
        dealer: the task that deals.
    """

    tag: str
    queue: str
    values: Sequence[Any]
    source: WorkQueue | None
    dealer: int
    upto: int | None
    value: Callable[[Epoch, Any], Any]


def map_pieces(epoch: Epoch, call: MapCall, job: Job) -> None:
    """Declares the processors of `epoch.map`."""
    work, place = epoch._work, f"{epoch._place()}: map({call.tag!r})"
    it = _checked(epoch, call, job, place)
    everyone, sent, then = tuple(range(work.tasks())), f"{it.tag} pieces", call.then
    compute = partial(_compute_async if _is_async(it.value) else _compute, it)
    if then is None:  # task 0 waits, since it may be the dealer
        epoch.processor(compute, outbound={sent: 0}, name=f"map {it.tag}", parallel=True)
        if work.task == 0:
            epoch.processor(_nothing, inbound={sent: everyone}, name=f"{it.tag} results")
        return
    if (composition := work.composing) is not None:
        if it.tag in composition.results:
            raise GraphError(f"{place}: a collective or another map has this tag: give each one of its own")
        composition.results[it.tag] = (work.task,)
    epoch.processor(compute, outbound={sent: everyone}, name=f"map {it.tag}", parallel=True)
    results = {it.tag: work.task, f"{it.tag} left": work.task}
    collect, last = partial(_collect, it.tag), partial(_then_async if _is_async(then) else _then, it, then)
    epoch.processor(collect, inbound={sent: everyone}, outbound=results, name=f"{it.tag} results", parallel=True)
    epoch.processor(last, inbound=results, name=name_of(then))


def _checked(epoch: Epoch, call: MapCall, job: Job, place: str) -> _Map:
    """Checks the arguments of a map. Raises GraphError if one is wrong."""
    tag, pieces, value, then, upto = call
    if not callable(value) or not (then is None or callable(then)):
        raise GraphError(f"{place}: value and then are functions: value(epoch, piece), then(epoch, ins)")
    if upto is not None and (not isinstance(upto, int) or upto < 1):
        raise GraphError(f"{place}: upto={upto!r}: a number of pieces, 1 at least; None for all that the pass has left")
    if not isinstance(pieces, str):
        return _Map(tag, "", as_source(pieces).pieces(), None, 0, upto, value)
    source = job.queues.get(pieces)
    if source is None:
        raise GraphError(
            f"{place}: the job has no queue {pieces!r}: name it, tg.Job(queues={{{pieces!r}: tg.WorkQueue(...)}})"
        )
    (dealer,) = service_ids(epoch, service_title(pieces))
    return _Map(tag, pieces, (), source, dealer, upto, value)


def queue_state(epoch: Epoch, name: str) -> QueueState:
    """Returns how far a queue is: before this epoch; in the `then` of its map, after it."""
    known = epoch.queues if isinstance(epoch, _ThenEpoch) else {}
    if name in known:
        return known[name]
    ids = service_ids(epoch, service_title(name))
    if not ids:
        raise GraphError(f"{epoch._place()}: the job has no queue {name!r}: name it in tg.Job(queues=...)")
    if epoch._sync or epoch._work.composing is not None:
        raise GraphError(
            f"{epoch._place()}: queue({name!r}) has to ask for it, which is not possible here: use it in the `then` of "
            f"its epoch.map, or in a processor"
        )
    left, over = ask_service(epoch, ids[0], "left").wait()
    return QueueState(over, left)


class _ThenEpoch(Epoch):
    """The epoch of the sync point after a map: it knows the queue as it is after this epoch."""

    __slots__ = ("queues",)

    def __init__(self, epoch: Epoch, queues: Mapping[str, QueueState]) -> None:
        super().__init__(epoch._work, epoch._where, sync=True)
        self.queues = queues


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


# -- the map's own processor --------------------------------------------------------------------------


def _compute(it: _Map, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    _find_pieces(it)
    share = Share(epoch._work.kept_results(it.tag), epoch._work.node_name)
    asked: Reply | None = None
    while share.last is None:
        if asked is not None and (asked.done or not share.todo):
            _take(it, epoch, share, asked.wait())
            asked = None
        elif asked is None and share.wants_to_ask(time.perf_counter()):
            asked = _ask(it, epoch, share)
        if share.todo:
            _one(it, epoch, share, share.todo.popleft())
    for todo in _lacking(share):
        _one(it, epoch, share, todo, final=True)
    for reply in _send_on(it, epoch, share):
        reply.wait()
    _put(it, share, outs)


async def _compute_async(it: _Map, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    await asyncio.to_thread(_find_pieces, it)
    share = Share(epoch._work.kept_results(it.tag), epoch._work.node_name)
    asked: Reply | None = None
    while share.last is None:
        if asked is not None and (asked.done or not share.todo):
            _take(it, epoch, share, await asked)
            asked = None
        elif asked is None and share.wants_to_ask(time.perf_counter()):
            asked = _ask(it, epoch, share)
        if share.todo:
            await _one_async(it, epoch, share, share.todo.popleft())
    for todo in _lacking(share):
        await _one_async(it, epoch, share, todo, final=True)
    for reply in _send_on(it, epoch, share):
        await reply
    _put(it, share, outs)


def _find_pieces(it: _Map) -> None:
    """Finds the pieces of a queue, while the dealer does the same: later calls have them."""
    if it.source is not None:
        _ = it.source.pieces


def _ask(it: _Map, epoch: Epoch, share: Share) -> Reply:
    asked = share.ask(time.perf_counter())
    count, digest = (len(it.values), "") if it.source is None else (-1, it.source.digest)
    of_map = {"map": it.tag, "count": count, "digest": digest, "upto": it.upto}
    return ask_service(epoch, it.dealer, DEAL, {**asked, **of_map})


def _take(it: _Map, epoch: Epoch, share: Share, answer: Mapping[str, Any]) -> None:
    if (wrong := answer.get("refused")) is not None:
        raise GraphError(f"{epoch._place()}: {wrong}")
    if (failed := answer.get("failed")) is not None:
        _, piece, text, node = failed
        raise PieceFailed(_failed_text(it, piece, node), piece=piece, node=node, traceback=text)
    share.take(answer)


def _failed_text(it: _Map, piece: int, node: str) -> str:
    return f"piece {piece} of {it.queue or it.tag!r} failed too often, on {node} the last time"


def _one(it: _Map, epoch: Epoch, share: Share, todo: Todo, *, final: bool = False) -> None:
    began, of_piece = time.perf_counter(), _piece_epoch(it, epoch, todo)
    try:
        given, rows = _content(it, of_piece, todo)
        result = result_of(it.value(of_piece, given), rows, of_piece, _what(it, todo))
    except (Exception, SystemExit) as error:
        if final:
            raise
        share.fail(todo, error_lines(error), time.perf_counter() - began)
    else:
        share.finish(todo.place, result, time.perf_counter() - began, kept=not of_piece.acted)


async def _one_async(it: _Map, epoch: Epoch, share: Share, todo: Todo, *, final: bool = False) -> None:
    began, of_piece = time.perf_counter(), _piece_epoch(it, epoch, todo)
    try:
        given, rows = await asyncio.to_thread(_content, it, of_piece, todo)
        result = result_of(await it.value(of_piece, given), rows, of_piece, _what(it, todo))
    except (Exception, SystemExit) as error:
        if final:
            raise
        share.fail(todo, error_lines(error), time.perf_counter() - began)
    else:
        share.finish(todo.place, result, time.perf_counter() - began, kept=not of_piece.acted)


def _what(it: _Map, todo: Todo) -> str:
    return f"the result of piece {todo.piece} of {it.queue or it.tag!r}"


def _piece_epoch(it: _Map, epoch: Epoch, todo: Todo) -> PieceEpoch:
    of = f"{it.tag}/{epoch.number}" if it.source is None else f"{it.queue}/{todo.pass_number}"
    return PieceEpoch(epoch._work, epoch._where, f"piece/{of}/{todo.piece}")


def _content(it: _Map, epoch: PieceEpoch, todo: Todo) -> tuple[Any, int]:
    """Returns what user code gets for a piece, and how many rows it has."""
    if it.source is None:
        return it.values[todo.piece], 1
    source, piece = it.source.source, it.source.pieces[todo.piece]
    given = content_of(source, piece, buffer=it.source.buffer, seed=epoch.seed)
    return given, 1 if getattr(source, "whole", False) else len(given)


def _lacking(share: Share) -> list[Todo]:
    """Returns the pieces whose results this task sends on, and has lost: of an earlier attempt, in a replay."""
    assert share.last is not None
    rows = share.last["results"].tolist()
    return [Todo(row[0], row[1], row[2], 0) for row in rows if row[0] not in share.results]


def _send_on(it: _Map, epoch: Epoch, share: Share) -> list[Reply]:
    """Sends what is due with the results that count. Returns the replies to wait for."""
    last = share.last
    assert last is not None
    rows: list[tuple[int, int, int]] = last["results"].tolist()
    found: list[Result] = [share.results[place] for place, *_ in rows]
    replies: list[Reply] = []
    for (_, pass_number, piece), result in zip(rows, found, strict=True):
        if result.pushes:
            replies += send_held(result.pushes, (it.tag, pass_number, piece))
    if it.source is not None:
        counted = [(e, piece, result.rows) for (_, e, piece), result in zip(rows, found, strict=True)]
        payload = {
            "done": np.array(counted, np.int64).reshape(len(counted), 3),
            "aside": [row[1:] for row in last["aside"]],
        }
        replies.append(ask_service(epoch, it.dealer, "count", payload))
    return replies


def _put(it: _Map, share: Share, outs: Outputs) -> None:
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


# -- the results --------------------------------------------------------------------------------------


def _collect(tag: str, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    """Puts the results of all tasks in the order of the pieces."""
    parts = list(ins.all(f"{tag} pieces").values())
    count = parts[0]["count"]
    found: dict[int, Any] = {}
    for part in parts:
        for place, _, piece, text, node in part["aside"]:
            found[place] = Failed(piece, node, text)
        found.update(zip(part["places"].tolist(), part["results"], strict=True))
    if len(found) != count:
        raise JobError(f"{epoch._place()}: {count - len(found)} of {count} results are missing: an error of taskgraph")
    outs.put(tag, [found[place] for place in range(count)])
    outs.put(f"{tag} left", parts[0]["left"])


_collect.__taskgraph_internal__ = True  # type: ignore[attr-defined]  # it shares nothing with code of the user


def _nothing(epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    """The sync point of task 0 if no task wants the results."""


def _then(it: _Map, then: Callable[[Epoch, Inputs], Any], epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    then(_then_epoch(it, epoch, ins), ins)


async def _then_async(it: _Map, then: Callable[[Epoch, Inputs], Any], epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    await then(_then_epoch(it, epoch, ins), ins)


def _then_epoch(it: _Map, epoch: Epoch, ins: Inputs) -> Epoch:
    if not it.queue:
        return epoch
    over, left = ins[f"{it.tag} left"]
    return _ThenEpoch(epoch, {it.queue: QueueState(over, left)})
