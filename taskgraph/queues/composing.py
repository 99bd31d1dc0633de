"""What `epoch.map` declares in `compose`, and the computes of these processors.

map <tag>       asks the dealer for pieces, computes them, puts its results     parallel, on each task
<tag> results   puts the results of all tasks in the order of the pieces        to itself
<name of then>  the user's sync point
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from taskgraph.epoch import Epoch, QueueState, ask_service, service_ids
from taskgraph.errors import GraphError, JobError
from taskgraph.graph.compose import name_of
from taskgraph.queues.computing import DeclaredMap, MapComputation
from taskgraph.queues.queue import service_title
from taskgraph.results import Failed
from taskgraph.sources.reading import as_source

if TYPE_CHECKING:
    from taskgraph.channels import Inputs, Outputs
    from taskgraph.epoch import MapCall
    from taskgraph.jobs import Job

__all__ = ["map_pieces", "queue_state"]


def map_pieces(epoch: Epoch, call: MapCall, job: Job) -> None:
    """Declares the processors of `epoch.map`."""
    work, place = epoch._work, f"{epoch._place()}: map({call.tag!r})"
    it = _check_map(epoch, call, job, place)
    everyone, sent, then = tuple(range(work.tasks())), f"{it.tag} pieces", call.then
    compute = partial(_compute, it)
    if then is None:  # task 0 waits, since it may be the dealer
        epoch.processor(compute, outbound={sent: 0}, name=f"map {it.tag}", parallel=True)
        if work.task == 0:
            epoch.processor(_do_nothing, inbound={sent: everyone}, name=f"{it.tag} results")
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


def _check_map(epoch: Epoch, call: MapCall, job: Job, place: str) -> DeclaredMap:
    """Checks the arguments of a map, and returns them with its source and dealer. Raises GraphError if one is wrong."""
    tag, pieces, value, then, upto = call
    if not callable(value) or not (then is None or callable(then)):
        raise GraphError(f"{place}: value and then are functions: value(epoch, piece), then(epoch, ins)")
    if upto is not None and (not isinstance(upto, int) or upto < 1):
        raise GraphError(f"{place}: upto={upto!r}: a number of pieces, 1 at least; None for all that the pass has left")
    if not isinstance(pieces, str):
        return DeclaredMap(tag, "", as_source(pieces).pieces(), None, 0, upto, value, _is_async(value))
    source = job.queues.get(pieces)
    if source is None:
        raise GraphError(
            f"{place}: the job has no queue {pieces!r}: name it, tg.Job(queues={{{pieces!r}: tg.WorkQueue(...)}})"
        )
    (dealer,) = service_ids(epoch, service_title(pieces))
    return DeclaredMap(tag, pieces, (), source, dealer, upto, value, _is_async(value))


def queue_state(epoch: Epoch, name: str) -> QueueState:
    """Returns how far a queue is: before this epoch, as its service says; in the `then` of its map, after it."""
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
    """True if a call of the function returns a coroutine."""
    while isinstance(function, partial):
        function = function.func
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


async def _compute(it: DeclaredMap, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    """The processor of a map: asks for pieces, computes them, and puts its results."""
    await MapComputation(it, epoch).run(outs)


# -- the results --------------------------------------------------------------------------------------


def _collect(tag: str, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    """Puts the results of all tasks in the order of the pieces."""
    parts = list(ins.all(f"{tag} pieces").values())
    count = parts[0]["count"]
    found: dict[int, Any] = {}
    for part in parts:
        for place, pass_number, piece, text, node in part["aside"]:
            found[place] = Failed(piece, node, text, pass_number)
        found.update(zip(part["places"].tolist(), part["results"], strict=True))
    if len(found) != count:
        raise JobError(f"{epoch._place()}: {count - len(found)} of {count} results are missing: an error of taskgraph")
    outs.put(tag, [found[place] for place in range(count)])
    outs.put(f"{tag} left", parts[0]["left"])


_collect.__taskgraph_internal__ = True  # type: ignore[attr-defined]  # it shares nothing with code of the user


def _do_nothing(epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    """Does nothing: the sync point of task 0 if no task wants the results."""


def _then(it: DeclaredMap, then: Callable[[Epoch, Inputs], Any], epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
    """The sync point after a map: calls the user's `then`."""
    then(_then_epoch(it, epoch, ins), ins)


async def _then_async(
    it: DeclaredMap, then: Callable[[Epoch, Inputs], Any], epoch: Epoch, ins: Inputs, outs: Outputs
) -> None:
    """As `_then`, if the user's `then` is an `async def`."""
    await then(_then_epoch(it, epoch, ins), ins)


def _then_epoch(it: DeclaredMap, epoch: Epoch, ins: Inputs) -> Epoch:
    """Returns the epoch for the user's `then`, which knows how far the queue of the map is."""
    if not it.queue:
        return epoch
    over, left = ins[f"{it.tag} left"]
    return _ThenEpoch(epoch, {it.queue: QueueState(over, left)})
