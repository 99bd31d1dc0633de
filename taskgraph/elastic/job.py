"""`@tg.elastic`: a function of a run and its arguments, as a job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taskgraph.elastic.seeding import Turn, seed_generators
from taskgraph.jobs import ElasticCall, Job, JobFunction
from taskgraph.task import Task

if TYPE_CHECKING:
    from taskgraph.elastic.run import Run
    from taskgraph.node.life import NodeLife

__all__ = ["elastic"]


class _NoTask(Task):
    """The builder of elastic jobs: they have no tasks."""


def _node() -> type[NodeLife]:
    from taskgraph.elastic.node import ElasticNode  # not earlier: a driver imports this module

    return ElasticNode


class ElasticFunction(JobFunction[...]):
    """A function decorated with `@tg.elastic`: called with its arguments, but the run, it returns a Job."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        parameters = list(self._signature.parameters.values())
        self._signature = self._signature.replace(parameters=parameters[1:])

    def _made(self, arguments: dict[str, Any]) -> Job:
        return Job(
            tasks=1, builder=_NoTask, backups=0, _elastic=ElasticCall(_in_turn(self.__wrapped__), arguments, _node)
        )


def _in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function so that the workers of one process take turns to run it; see `Turn`."""
    turn = Turn()

    @functools.wraps(function)
    def call(run: Run, **arguments: Any) -> Any:
        with turn.taken():
            run.progress.turn = turn
            seed_generators(run.progress.node.spec.seed)
            value = function(run, **arguments)
            run.check_over()
            return value

    return call


def elastic(function: Callable[..., Any]) -> ElasticFunction:
    """Decorates a module-level function of a run. Its other parameters are the job's options."""
    return ElasticFunction(function)
