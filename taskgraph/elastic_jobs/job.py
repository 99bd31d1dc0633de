"""`@tg.elastic`: a function of a run and its arguments, as a job."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from taskgraph.elastic_jobs.libraries import import_pytorch_of, library_threads, pytorch
from taskgraph.elastic_jobs.seeding import GeneratorTurn, seed_generators
from taskgraph.errors import JobError
from taskgraph.jobs import ElasticCall, Job, JobFunction
from taskgraph.options import OptionInfo, check_fields
from taskgraph.settings import Settings
from taskgraph.task import Task

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.run import Run
    from taskgraph.node.life import NodeLife

__all__ = ["elastic"]

_COMMUNICATORS = ("gloo", "nccl")

P = ParamSpec("P")
T = TypeVar("T")


class _NoTask(Task):
    """The builder of elastic jobs: they have no tasks."""


def _node() -> type[NodeLife]:
    """Returns the class of the job's nodes."""
    from taskgraph.elastic_jobs.node import ElasticNode  # not earlier: a driver imports this module

    return ElasticNode


_PER_RUN = ("seed", "checkpoint", "checkpoint_every_s", "min_workers")
"""Options that a parameter of the function with this name sets."""


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """The options of `@tg.elastic(...)`. Those of `_PER_RUN` may be parameters of the function, too.

    Attributes:
        seed: of the run: order of rows, generators.
        checkpoint: where checkpoints are kept: `file:///...`, or any URL that fsspec opens; None: none are kept.
        checkpoint_every_s: time between two checkpoints.
        min_workers: the run does not begin with fewer.
        name: of the job; "": that of the function.
        settings: timeouts and limits.
        communicator: "gloo" or "nccl": PyTorch's process groups make the totals, whose bits depend on the number of
            workers then; "": this package does.
    """

    seed: int = 0
    checkpoint: str | None = None
    checkpoint_every_s: float = 60.0
    min_workers: int = 1
    name: str = ""
    settings: Settings = field(default_factory=Settings)
    communicator: str = ""

    def __post_init__(self) -> None:
        every = self.checkpoint_every_s
        if isinstance(every, bool) or not isinstance(every, int | float) or not 0 < every < math.inf:
            raise JobError(f"@tg.elastic(checkpoint_every_s={every!r}): must be a number of seconds above 0")
        if type(self.min_workers) is not int or self.min_workers < 1:
            raise JobError(f"@tg.elastic(min_workers={self.min_workers!r}): must be a whole number, 1 or more")
        if self.communicator not in ("", *_COMMUNICATORS):
            raise JobError(f'@tg.elastic(communicator={self.communicator!r}): must be "gloo" or "nccl", or left out')
        if self.communicator and importlib.util.find_spec("torch") is None:
            raise JobError(f"@tg.elastic(communicator={self.communicator!r}) needs PyTorch: pip install torch")


class ElasticFunction(JobFunction[P], Generic[P, T]):
    """A function decorated with `@tg.elastic`: called with its arguments, but the run, it returns a Job."""

    _decorator = "@tg.elastic"

    def __init__(self, function: Callable[Concatenate[Run, P], T], options: ElasticOptions) -> None:
        super().__init__(cast(Callable[P, Job], function))
        parameters = list(self._signature.parameters.values())
        if not parameters:
            raise JobError(f"@tg.elastic: {function.__name__} takes no run: def {function.__name__}(run, ...)")
        self._signature = self._signature.replace(parameters=parameters[1:])
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Makes the job.

        Raises:
            JobError: the function does not have such arguments, or they are no plain JSON values.
        """
        return super().__call__(*args, **kwargs)

    def _call_function(self, arguments: dict[str, Any]) -> Job:
        import_pytorch_of(self.__wrapped__)
        pytorch()  # the launcher, too, decodes tensors of the job's value
        given = self._options_for(arguments)
        call = ElasticCall(_in_turn(self.__wrapped__), arguments, _node, given.checkpoint_every_s, given.communicator)
        return Job(
            tasks=1,
            builder=_NoTask,
            backups=0,
            seed=given.seed,
            name=given.name,
            min_nodes=given.min_workers,
            checkpoint=given.checkpoint,
            settings=given.settings,
            _elastic=call,
        )

    def _options_for(self, arguments: Mapping[str, Any]) -> ElasticOptions:
        """Returns the options: those that are parameters of the function, too, from its arguments, if not None."""
        defaults = {name: p.default for name, p in self._signature.parameters.items() if p.default is not p.empty}
        own = {**defaults, **arguments}
        return replace(self._options, **{name: own[name] for name in _PER_RUN if own.get(name) is not None})

    def options(self) -> dict[str, OptionInfo]:
        """Returns the parameters of the function, without the run, as options of the command line."""
        return {name: info for name, info in super().options().items() if name in self._signature.parameters}


def _in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function: workers of one process take turns (`GeneratorTurn`); each waits at the end for all others."""
    turn = GeneratorTurn()

    @functools.wraps(function)
    def call(run: Run, **arguments: Any) -> Any:
        spec = run.progress.node.spec
        with turn.taken(), library_threads(spec.setting("blas_threads")):
            run.progress.turn = turn
            seed_generators(spec.seed)
            value = function(run, **arguments)
            run.check_part_loop_ended()
            run.progress.end()
            return value

    return call


class _Decorator(Protocol):
    def __call__(self, function: Callable[Concatenate[Run, P], T], /) -> ElasticFunction[P, T]: ...


@overload
def elastic(function: Callable[Concatenate[Run, P], T], /) -> ElasticFunction[P, T]: ...
@overload
def elastic(
    *,
    seed: int = 0,
    checkpoint: str | None = None,
    checkpoint_every_s: float = 60.0,
    min_workers: int = 1,
    name: str = "",
    settings: Settings = ...,
    communicator: str = "",
) -> _Decorator: ...
def elastic(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Decorates a module-level function of a run. Its other parameters are the job's options.

    One of them that is called `seed`, `checkpoint`, `checkpoint_every_s` or `min_workers` also sets that option here.

    Args:
        options: the fields of `ElasticOptions`.

    Raises:
        JobError: there is no such option, or a value does not fit.
    """
    check_fields(ElasticOptions, options)
    made = ElasticOptions(**options)
    return ElasticFunction(function, made) if function is not None else lambda given: ElasticFunction(given, made)
