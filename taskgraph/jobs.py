"""`Job`, and the job function, which every process calls to make the job."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, cast

from taskgraph.errors import JobError, error_text
from taskgraph.options import OptionInfo, check_fields, options_of, options_text, parse, plain_json
from taskgraph.protocol.keys import NAME_RULE, is_name
from taskgraph.services import Service, check_servables, ids_of
from taskgraph.settings import Settings
from taskgraph.signatures import signature
from taskgraph.task import Task
from taskgraph.topology import Link, Topology, as_topology

__all__ = ["ElasticCall", "Job", "JobFunction", "check_job", "check_job_function", "job"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # `tg.Job` alone is a job with a value of any type

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")
P = ParamSpec("P")

_MOST_TASKS = 1_000_000
"""Every process has a few entries for each task: a mistyped number would use up its memory."""
_MOST_BACKUPS = 1_000
"""Every node plans each missing backup: with a mistyped number the planning would not end."""


@dataclass(frozen=True, kw_only=True)
class Job(Generic[T]):
    """A job to run. Make it in a function decorated with `@tg.job` or `@tg.elastic`.

    `T` is the type of its value: what the function of an elastic job returns.

    Attributes:
        tasks: how many tasks, a million at most; ids are 0 to tasks - 1. Services have the ids that follow.
        builder: makes a task: `(task_id) -> Task`, or a Task subclass.
        topology: named links, see `tg.tree` and the others.
        epochs: how many epochs; None: until some processor calls `epoch.finish()`.
        seed: the seed of `epoch.rng`.
        name: 1 to 100 of letters (of any language), digits, `.`, `_` and `-`; default: the job function's name.
        backups: replicas of each task beside its primary, a thousand at most; fewer where there are fewer nodes.
        min_nodes: the job does not begin with fewer.
        requires_gpu: whether tasks need a CUDA device; a bool, or a function of the task id.
        checkpoint: where durable checkpoints are kept: `file:///...`, or any URL that fsspec opens.
        checkpoint_every: epochs between two checkpoints.
        settings: timeouts and limits.
        tables: name -> `tg.Table`.
        queues: name -> `tg.WorkQueue`.

    Raises:
        JobError: there is no such attribute, or a value does not fit; the message says which.
    """

    tasks: int
    builder: Callable[..., Task]
    topology: Mapping[str, Link] = field(default_factory=Topology)
    epochs: int | None = None
    seed: int = 0
    name: str = ""
    backups: int = 1
    min_nodes: int = 1
    requires_gpu: bool | Callable[[int], bool] = False
    checkpoint: str | None = None
    checkpoint_every: int = 10
    settings: Settings = field(default_factory=Settings)
    tables: Mapping[str, Any] = field(default_factory=dict)
    queues: Mapping[str, Any] = field(default_factory=dict)
    _elastic: ElasticCall | None = field(default=None, repr=False, compare=False)
    _origin: _JobCall | None = field(default=None, repr=False, compare=False)
    _gpu_needs: tuple[bool, ...] = field(default=(), init=False, repr=False, compare=False)
    _services: tuple[Service, ...] = field(default=(), init=False, repr=False, compare=False)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        check_fields(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_int("tasks", 1, most=_MOST_TASKS)
        self._check_int("backups", 0, most=_MOST_BACKUPS)
        self._check_int("min_nodes", 1)
        self._check_int("checkpoint_every", 1)
        self._check_int("seed", None)
        if self.epochs is not None:
            self._check_int("epochs", 1, "None (until some processor calls epoch.finish()) or ")
        _check_builder(self.builder)
        if not isinstance(self.name, str) or (self.name and not is_name(self.name)):
            raise JobError(f"Job(name={self.name!r}): {NAME_RULE}")
        if not isinstance(self.requires_gpu, bool) and not callable(self.requires_gpu):
            raise JobError(f"Job(requires_gpu={self.requires_gpu!r}): must be a bool, or a function task_id -> bool")
        if not isinstance(self.settings, Settings):
            raise JobError(f"Job(settings=...) takes tg.Settings(...), not {type(self.settings).__name__}")
        if self.settings.min_in_sync > self.backups + 1:
            raise JobError(
                f"settings.min_in_sync={self.settings.min_in_sync} needs more replicas than backups={self.backups} "
                f"gives: set backups to at least {self.settings.min_in_sync - 1}"
            )
        if self.checkpoint is not None:
            from taskgraph.checkpoint.places import check_url

            check_url(self.checkpoint)
        object.__setattr__(self, "topology", as_topology(self.topology))
        object.__setattr__(self, "_gpu_needs", tuple(self._ask_gpu_needs()))
        object.__setattr__(self, "_services", tuple(self._make_services()))
        wanted = (getattr(table, "backups", None) or 0 for table in self.tables.values())
        object.__setattr__(self, "backups", max(self.backups, *wanted, 0))

    def _check_int(self, name: str, least: int | None, also: str = "", most: int | None = None) -> None:
        """Raises JobError unless an attribute is an int within these limits. numpy's ints become Python's.

        Args:
            also: what else the attribute may be, for the message.
        """
        value = getattr(self, name)
        limit = f" of at least {least}" if least is not None else ""
        try:
            number = operator.index(value)  # numpy's ints, too; they become Python's, which JSON knows
        except TypeError:
            raise JobError(f"Job({name}={value!r}): must be {also}an int{limit}") from None
        if isinstance(value, bool) or (least is not None and number < least):
            raise JobError(f"Job({name}={value!r}): must be {also}an int{limit}")
        if most is not None and number > most:
            raise JobError(f"Job({name}={value!r}): must be {most} at most")
        object.__setattr__(self, name, number)

    @property
    def elastic(self) -> ElasticCall | None:
        """What the workers of an elastic job call; None: the job is a task graph."""
        return self._elastic

    @property
    def all_tasks(self) -> int:
        """How many tasks there are, with those of services."""
        return self.tasks + sum(service.count for service in self._services)

    @property
    def services(self) -> dict[str, int]:
        """How many tasks each service has, by its title, in the order of their ids."""
        return {service.title: service.count for service in self._services}

    def service(self, title: str) -> tuple[int, ...]:
        """Returns the task ids of a service by its title, such as "table users"; (): there is no such service."""
        return ids_of(self._services, self.tasks).get(title, ())

    def _make_services(self) -> Iterator[Service]:
        """Checks the job's tables and queues, keeps them as dicts, and yields their services."""
        for field_, kind in (("tables", "tg.Table"), ("queues", "tg.WorkQueue")):
            given = check_servables(field_, getattr(self, field_), kind)
            object.__setattr__(self, field_, given)
            for name, one in given.items():
                yield one.service(name, self.tasks)

    def needs_device(self, task_id: int) -> bool:
        """True if this task needs a CUDA device."""
        return task_id < self.tasks and self._gpu_needs[task_id]

    def _ask_gpu_needs(self) -> Iterator[bool]:
        """Yields for each task if it needs a CUDA device. Placement needs the answers whenever a node comes or goes."""
        asked = self.requires_gpu
        for task_id in range(self.tasks):
            try:
                yield bool(asked(task_id)) if callable(asked) else bool(asked)
            except Exception as error:
                raise JobError(f"Job(requires_gpu=...): for task {task_id} it raises {error_text(error)}") from error

    def build(self, task_id: int) -> Task:
        """Makes a task: calls `builder` with the task id; a class without required parameters is called without it.

        Tasks of services are made by their service.
        """
        at = task_id - self.tasks
        for service in self._services if at >= 0 else ():
            if at < service.count:
                return service.build(at)
            at -= service.count
        if isinstance(self.builder, type) and not _required_parameters(self.builder):
            return cast(Callable[[], Task], self.builder)()
        return self.builder(task_id)

    def origin(self) -> tuple[JobFunction[...], dict[str, Any]]:
        """Returns the job function and its arguments, by which other processes make the same job.

        Raises:
            JobError: the job was not made by a function decorated with `@tg.job`, or was changed since in a way that
                other processes cannot know of.
        """
        if self._origin is None:
            raise JobError(
                "this Job was not made by a function decorated with @tg.job, so other processes cannot make it: "
                "decorate the function that returns it, or run it in this process with nodes=0"
            )
        changed = [name for name in _NOT_IN_SPEC if getattr(self, name) != self._origin.fixed[name]]
        if changed:
            function = self._origin.function.__name__
            raise JobError(
                f"this Job was made by {function}() and then got another {' and '.join(changed)}; nodes call "
                f"{function} again and would not get that: make it a parameter of {function}, or run with nodes=0"
            )
        return self._origin.function, self._origin.kwargs


_NOT_IN_SPEC = ("tasks", "builder", "topology", "requires_gpu", "tables", "queues")
"""Attributes that every process takes from its own call of the job function; the job's spec has the others."""


@dataclass(frozen=True, slots=True)
class ElasticCall:
    """What an elastic job does in place of tasks: all its workers call this function with a run and these arguments.

    Attributes:
        node: imports and returns the class of its nodes.
        checkpoint_every_s: time between two checkpoints, if the job keeps some.
        communicator: PyTorch's backend that makes the totals on nodes that are processes: "gloo" or "nccl"; "": workers
            send each other their sums.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    node: Callable[[], type[Any]]
    checkpoint_every_s: float = 60.0
    communicator: str = ""


@dataclass(frozen=True, slots=True)
class _JobCall:
    """The call of the job function that made a job, and the attributes of the job that its spec does not have."""

    function: JobFunction[...]
    kwargs: dict[str, Any]
    fixed: dict[str, Any]


def _check_builder(builder: Any) -> None:
    """Raises JobError if a builder cannot make tasks."""
    if isinstance(builder, Task):
        name = type(builder).__name__
        raise JobError(f"Job(builder={name}()): every task needs an object of its own: builder={name}")
    if not callable(builder):
        raise JobError(f"Job(builder=...) must be a function (task_id) -> tg.Task, not {builder!r}")
    if not isinstance(builder, type):
        _check_builder_takes_an_id(builder)
        return
    if not issubclass(builder, Task):
        raise JobError(f"Job(builder={builder.__name__}): {builder.__name__} is no subclass of tg.Task")
    if _required_parameters(builder) not in ([], ["task_id"]):
        takes = ", ".join(_required_parameters(builder))
        raise JobError(
            f"Job(builder={builder.__name__}): its __init__ takes {takes}; give them with "
            f"builder=lambda task_id: {builder.__name__}(...)"
        )


def _check_builder_takes_an_id(builder: Callable[..., Any]) -> None:
    """Raises JobError unless a builder is a plain function of a task id."""
    name = getattr(builder, "__name__", type(builder).__name__)
    if inspect.iscoroutinefunction(builder):
        raise JobError(f"Job(builder={name}): a task builder is a plain `def`, not `async def`")
    try:
        takes = signature(builder)
    except ValueError:  # a function in C without a signature
        return
    try:
        takes.bind(0)
    except TypeError:
        raise JobError(
            f"Job(builder={name}): it is called with the task id and nothing else, but takes {takes}: "
            f"builder=lambda task_id: ..."
        ) from None


def _required_parameters(builder: type) -> list[str]:
    """Returns the names of a class's required parameters."""
    parameters = signature(builder).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


class JobFunction(Generic[P]):
    """A function decorated with `@tg.job`. Calling it makes a Job that nodes can make again by the same call."""

    _decorator = "@tg.job"

    def __init__(self, function: Callable[P, Job]) -> None:
        name = getattr(function, "__qualname__", repr(function))
        if not inspect.isfunction(function) or "<" in name or "." in name:
            raise JobError(
                f"{self._decorator} goes on a function at the top level of a module, not on {name}: nodes import the "
                f"module and call the function by its name"
            )
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise JobError(f"{name}: a job function is a plain `def`, without async and yield")
        self._signature = signature(function)
        for parameter in self._signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise JobError(f"{name}: nodes pass a job function's arguments by name, and {parameter.name} has none")
        self.__wrapped__ = function
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Makes the job.

        Raises:
            JobError: the function does not have such arguments, or they are no plain JSON values.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise JobError(f"{self.__name__}: {error}; its options are: {options_text(self.options())}") from None
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            several = self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            given.update(value if several else {name: value})
        given = {name: plain_json(f"{self.__name__}({name}=...)", value) for name, value in given.items()}
        # The function gets a copy, as nodes will pass it: its changes to a list must not reach the nodes.
        made = self._call_function(copy.deepcopy(given))
        if not isinstance(made, Job):
            raise JobError(f"{self.__name__} must return a tg.Job, not {type(made).__name__}")
        origin = _JobCall(self, given, {name: getattr(made, name) for name in _NOT_IN_SPEC})
        return dataclasses.replace(made, name=made.name or self.__name__, _origin=origin)

    def _call_function(self, arguments: dict[str, Any]) -> Job:
        """Calls the user's function, and returns what it returned: a job, which the caller checks."""
        return cast(Job, self.__wrapped__(**arguments))

    def __repr__(self) -> str:
        return f"<job function {self.__module__}.{self.__name__}>"

    def options(self) -> dict[str, OptionInfo]:
        """Returns the function's parameters as options."""
        return options_of(self.__wrapped__)

    def parse_options(self, texts: Iterable[str]) -> dict[str, Any]:
        """Parses `name=value` texts, as given with `-o`, to keyword arguments.

        Raises:
            JobError: there is no such option, or a value is not of its type.
        """
        return parse(self.__name__, self.options(), texts)


def check_job(job: Any) -> None:
    """Raises JobError, which says how to make a job, unless the argument is one."""
    if isinstance(job, JobFunction):
        raise JobError(f"{job.__name__} is a job function, which makes the job: call it, {job.__name__}(...)")
    if not isinstance(job, Job):
        raise JobError(
            f"what is run is a tg.Job, as a function decorated with @tg.job returns it, not {type(job).__name__}"
        )


def check_job_function(function: Any) -> None:
    """Raises JobError, which says what to give instead, unless the argument is a job function."""
    if not isinstance(function, JobFunction):
        what = "the job that it makes" if isinstance(function, Job) else getattr(function, "__name__", repr(function))
        raise JobError(f"tg.main takes a function decorated with @tg.job, as in tg.main(fit), not {what}")


def job(function: Callable[P, Job]) -> JobFunction[P]:
    """Decorates a module-level function that returns a Job. Its keyword parameters are the job's options."""
    return JobFunction(function)
