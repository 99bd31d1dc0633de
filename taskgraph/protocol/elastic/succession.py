"""Which view follows: decisions of one worker on the job in etcd, its own state, and the workers that it misses.

    no view ──enough nodes have registered──► the first view, proposed by the most senior node
    view ──a worker is lost, drains or differs──► the view without it, proposed by any worker
    view ──a newcomer has caught up──► the view with it, proposed by the newcomer (`View.joined_by`)
    view ──no worker left holds all totals──► a view of one worker, which begins a lineage

All workers may propose at once: the transaction of one of them wins.
"""

from __future__ import annotations

from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Phase, Worker
from taskgraph.protocol.view import JobView

__all__ = [
    "all_drain",
    "all_may_leave",
    "count_returns",
    "first_view",
    "leavers",
    "lone_view",
    "must_go_on_alone",
    "next_view",
]

Workers = frozenset[str]


def first_view(job: JobView, me: str, *, run: str, fewest: int) -> View | None:
    """Returns the first view, if this node has to propose it: it was registered first; else None.

    Args:
        run: the run whose nodes count.
        fewest: the least number of nodes with which the job begins.
    """
    live = {node: v for node, v in job.nodes.items() if v.record.run == run and node not in job.gone}
    order = sorted(live, key=lambda node: (live[node].create_revision, node))
    if len(order) < max(1, fewest) or order[0] != me:
        return None
    return View(0, 0, tuple(ViewEntry(node, 0) for node in order))


def next_view(
    job: JobView, me: str, core: Worker, *, gone: Workers, suspects: Workers, outvoted: Workers, again: int = -1
) -> View | None:
    """Returns the view that this worker proposes after that of the job, without some workers; None: it proposes none.

    Args:
        gone: nodes whose keys are gone.
        suspects: nodes that may be lost.
        outvoted: see `UnequalTags`.
        again: the number of a view whose workers, unless lost, are to try again in the next one; -1: none.
    """
    if job.workers is None:
        return None
    view = View.of(job.workers.record)
    if core.view != view or me in outvoted:
        return None
    if core.phase == Phase.OUTSIDE:  # if it is listed, then by an earlier entry
        lost = frozenset({me})
    elif core.whole:
        lost = suspects | gone | outvoted
        if core.all_whole:  # else those that stay may lack totals
            lost |= leavers(job, gone | suspects)
    else:
        lost = gone  # those that are only suspected may hold totals that it lacks
    return view.without(lost) if lost & set(view.workers) or again == view.number else None


def leavers(job: JobView, lost: Workers) -> Workers:
    """Returns all nodes that drain; none if, without them and the `lost` ones, the view would have no worker left."""
    draining, inside = _draining(job), _workers_in_view(job)
    return draining if inside - draining - lost else frozenset()


def all_drain(job: JobView) -> bool:
    """Returns True if all registered nodes drain, and all workers are registered: no node can take their state over."""
    inside = _workers_in_view(job)
    return bool(inside) and inside <= job.nodes.keys() == _draining(job)


def all_may_leave(job: JobView) -> bool:
    """Returns True if all nodes drain, and a checkpoint was completed since, with which later nodes can begin."""
    if job.checkpoint is None or not all_drain(job):
        return False
    return all(job.nodes[worker].mod_revision < job.checkpoint.mod_revision for worker in _workers_in_view(job))


def _draining(job: JobView) -> Workers:
    return frozenset(node for node, known in job.nodes.items() if known.record.draining)


def _workers_in_view(job: JobView) -> Workers:
    """Returns the set of the workers in the current view of an elastic job; empty before the first view."""
    return frozenset(() if job.workers is None else View.of(job.workers.record).workers)


def must_go_on_alone(
    job: JobView, me: str, core: Worker, *, gone: Workers, excluded_by: int, none_whole_in: int
) -> bool:
    """Returns True if no worker is left that holds all totals, and this one has to begin a lineage, alone.

    Args:
        gone: nodes whose keys are gone.
        excluded_by: the number of the newest view that excluded this worker; -1: none did.
        none_whole_in: the number of the newest view whose reports showed that no worker holds all totals; -1: none.
    """
    if job.workers is None or core.whole:
        return False
    view = View.of(job.workers.record)
    if core.phase == Phase.OUTSIDE:
        return view.number >= excluded_by and {*view.workers} - {me} <= gone
    return none_whole_in == view.number and view.workers[0] == me


def count_returns(job: JobView, sums: int) -> tuple[int, int]:
    """Returns `returns` and `returned_to` (`WorkersRecord`) of the lineage that begins now, after `sums` totals.

    They stay as they are in the view before, unless the process of one of its workers died without a command.
    """
    if job.workers is None:
        return 0, 0
    before = job.workers.record
    died = {worker for worker, known in job.gone.items() if known.record.died and not known.record.intended}
    if died.isdisjoint(worker for worker, _ in before.workers):
        return before.returns, before.returned_to
    if before.returns and sums <= before.returned_to:
        return before.returns + 1, before.returned_to
    return 1, sums


def lone_view(job: JobView, me: str) -> View:
    """Returns the view of this worker alone that begins a lineage.

    Raises:
        LookupError: there is no view.
    """
    if job.workers is None:
        raise LookupError("there is no view")
    number = job.workers.record.number + 1
    return View(number, number, (ViewEntry(me, number),))
