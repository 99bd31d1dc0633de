"""A job, the function that makes it, and its result."""

from __future__ import annotations

import base64
import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args, get_type_hints

import numpy as np

from taskgraph.errors import JobError
from taskgraph.settings import Settings
from taskgraph.task import Task
from taskgraph.topology import Link, Topology, as_topology

__all__ = ["EpochReport", "Job", "JobFunction", "JobResult", "OptionInfo", "TaskBuilder", "job"]

TaskBuilder = Callable[[int], Task]
"""(task_id) -> Task. A Task subclass that takes no arguments is one, too."""

_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run. Make it in a function decorated with `@tg.job`.

    Attributes:
        tasks: how many tasks; ids are 0 to tasks - 1.
        builder: makes a task: `(task_id) -> Task`, or a Task subclass.
        topology: named links, see `tg.tree` and the others.
        epochs: how many epochs; None: until some processor calls `epoch.finish()`.
        seed: of `epoch.rng`.
        name: 1 to 100 of letters, digits, `.`, `_` and `-`; default: the job function's name.
        backups: replicas of each task beside its primary.
        min_nodes: the job does not begin with fewer.
        requires_gpu: whether tasks need a CUDA device; a bool, or a function of the task id.
        checkpoint, checkpoint_every: durable checkpoints; not part of this release.
        settings: timeouts and limits.

    Raises:
        JobError: a value does not fit; the message says which.
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
    _origin: tuple[JobFunction, dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("tasks", 1), ("backups", 0), ("min_nodes", 1), ("checkpoint_every", 1)):
            _check_int(name, getattr(self, name), least)
        if self.epochs is not None:
            _check_int("epochs", self.epochs, 1)
        _check_int("seed", self.seed, None)
        if not callable(self.builder):
            raise JobError(f"Job(builder=...) must be a function (task_id) -> tg.Task, not {self.builder!r}")
        if self.name and not _NAME.fullmatch(self.name):
            raise JobError(
                f"Job(name={self.name!r}): a name has 1 to 100 letters, digits, '.', '_' or '-', no '.' first"
            )
        if not isinstance(self.settings, Settings):
            raise JobError(f"Job(settings=...) takes tg.Settings(...), not {type(self.settings).__name__}")
        if self.settings.min_in_sync > self.backups + 1:
            raise JobError(
                f"settings.min_in_sync={self.settings.min_in_sync} needs more replicas than backups={self.backups} "
                f"gives: set backups to at least {self.settings.min_in_sync - 1}"
            )
        if self.checkpoint is not None:
            raise JobError("Job(checkpoint=...): durable checkpoints are not part of this release; leave it out")
        object.__setattr__(self, "topology", as_topology(self.topology))

    def build(self, task_id: int) -> Task:
        """Calls the task builder."""
        builder = self.builder
        if isinstance(builder, type):
            return cast(Callable[[], Task], builder)()
        return builder(task_id)

    def origin(self) -> tuple[JobFunction, dict[str, Any]]:
        """The job function and its arguments, by which other processes make the same job.

        Raises:
            JobError: the job was not made by a function decorated with `@tg.job`.
        """
        if self._origin is None:
            raise JobError(
                "this Job was not made by a function decorated with @tg.job, so other processes cannot make it: "
                "decorate the function that returns it, or run it in this process with nodes=0"
            )
        return self._origin


def _check_int(name: str, value: Any, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        limit = f" of at least {least}" if least is not None else ""
        raise JobError(f"Job({name}={value!r}): must be an int{limit}")


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """An option of a job function: a keyword parameter."""

    name: str
    type: Any
    default: Any
    required: bool


class JobFunction:
    """A function decorated with `@tg.job`: called with its arguments it returns a Job that nodes can make again."""

    def __init__(self, function: Callable[..., Job]) -> None:
        name = getattr(function, "__qualname__", repr(function))
        if not inspect.isfunction(function) or "<" in name or "." in name:
            raise JobError(
                f"@tg.job goes on a function at the top level of a module, not on {name}: nodes import the module and "
                f"call the function by its name"
            )
        self.__wrapped__ = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self._signature = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Job:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise JobError(f"{self.__name__}: {error}; its options are: {self._options_text()}") from None
        given = _flatten(bound)
        for name, value in given.items():
            _check_plain(f"{self.__name__}({name}=...)", value)
        made = self.__wrapped__(*args, **kwargs)
        if not isinstance(made, Job):
            raise JobError(f"{self.__name__} must return a tg.Job, not {type(made).__name__}")
        if not made.name:
            object.__setattr__(made, "name", self.__name__)
        object.__setattr__(made, "_origin", (self, given))
        return made

    def __repr__(self) -> str:
        return f"<job function {self.__module__}.{self.__name__}>"

    def options(self) -> dict[str, OptionInfo]:
        """The function's parameters."""
        try:
            hints = get_type_hints(self.__wrapped__)
        except Exception:  # a hint that names something unknown at run time: the defaults' types serve
            hints = {}
        found = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            hint = hints.get(name, str if default is None else type(default))
            found[name] = OptionInfo(name, hint, default, required)
        return found

    def parse_options(self, texts: Iterable[str]) -> dict[str, Any]:
        """Keyword arguments from `name=value` texts, as given with `-o`.

        Raises:
            JobError: no such option, or a value that is none of its type.
        """
        options, given = self.options(), {}
        for text in texts:
            name, equals, value = text.partition("=")
            name = name.strip().replace("-", "_")
            if not equals:
                raise JobError(f"option {text!r}: write -o name=value")
            if name not in options:
                close = difflib.get_close_matches(name, options, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise JobError(
                    f"{self.__name__} has no option {name!r}{hint} Its options are: {self._options_text()}"
                    if hint
                    else f"{self.__name__} has no option {name!r}; its options are: {self._options_text()}"
                )
            given[name] = _convert(name, value, options[name].type)
        return given

    def _options_text(self) -> str:
        return (
            ", ".join(f"{o.name}{'' if o.required else f'={o.default!r}'}" for o in self.options().values()) or "none"
        )


def job(function: Callable[..., Job]) -> JobFunction:
    """Decorates a module-level function that returns a Job. Its keyword parameters are the job's options."""
    return JobFunction(function)


def _flatten(bound: inspect.BoundArguments) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise JobError("a job function's arguments are passed by name to nodes: no *args, no positional-only ones")
        else:
            given[name] = value
    return given


def _check_plain(what: str, value: Any) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for item in value:
            _check_plain(what, item)
        return
    if type(value) is dict and all(type(key) is str for key in value):
        for item in value.values():
            _check_plain(what, item)
        return
    raise JobError(
        f"{what}: nodes get a job's arguments as JSON, so they are None, bool, int, float, str, lists and dicts of "
        f"these, not {type(value).__name__}; pass a file's name or a number instead"
    )


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _convert(name: str, text: str, hint: Any) -> Any:
    kinds = [a for a in get_args(hint) if a is not type(None)] if get_args(hint) else [hint]
    if type(None) in get_args(hint) and text.lower() in ("none", "null"):
        return None
    kind = kinds[0] if len(kinds) == 1 else str
    try:
        if kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise ValueError("true or false")
        if kind is int:
            return int(text.replace("_", ""), 0)
        if kind is float:
            return float(text)
        if kind is str:
            return text
        return json.loads(text)
    except ValueError:
        expected = getattr(kind, "__name__", str(hint))
        raise JobError(f"option {name}={text!r}: expected {'true or false' if kind is bool else expected}") from None


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What tasks reported in one committed epoch.

    Attributes:
        numbers: by name; where several tasks report one name, the lowest task's.
        by_task: everything, by task.
    """

    epoch: int
    numbers: dict[str, float]
    by_task: dict[int, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job leaves.

    Attributes:
        name: the job's.
        status: "finished".
        values: task -> what its `result()` returned; tasks that returned None are left out.
        reports: one per epoch in which something was reported, in order.
        epochs: how many were committed.
        failovers: how often a backup took over from a primary that failed.
        restarts: how often an epoch started again.
        wall_s: seconds from submission to the end.
    """

    name: str
    status: str = "finished"
    values: dict[int, Any] = field(default_factory=dict)
    reports: tuple[EpochReport, ...] = ()
    epochs: int = 0
    failovers: int = 0
    restarts: int = 0
    wall_s: float = 0.0

    @property
    def value(self) -> Any:
        """The only value. Raises JobError where there is none, or more than one."""
        if len(self.values) != 1:
            which = (
                f"tasks {', '.join(map(str, self.values))} returned one each" if self.values else "no task returned one"
            )
            raise JobError(f"JobResult.value is for jobs with one value; {which}: use .values")
        return next(iter(self.values.values()))

    def to_json(self) -> str:
        """One line of JSON, values too: arrays as nested lists, bytes as base64, nan and inf as strings."""
        plain = {
            "name": self.name,
            "status": self.status,
            "values": {str(task): plain_value(value) for task, value in self.values.items()},
            "reports": [
                {"epoch": r.epoch, "numbers": plain_value(r.numbers), "by_task": plain_value(r.by_task)}
                for r in self.reports
            ],
            "epochs": self.epochs,
            "failovers": self.failovers,
            "restarts": self.restarts,
            "wall_s": round(self.wall_s, 3),
        }
        return json.dumps(plain, allow_nan=False)


def plain_value(value: Any) -> Any:
    """A value as JSON can say it. Not exact: a view for people and scripts, not a way back."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, complex):
        return [plain_value(value.real), plain_value(value.imag)]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray | np.generic):
        return plain_value(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if hasattr(value, "get") and hasattr(value, "__cuda_array_interface__"):
        return plain_value(value.get())
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain_value(getattr(value, name)) for name in value.__dataclass_fields__}
    return str(value)
