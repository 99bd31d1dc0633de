"""The job of a seed: tasks with random graphs, flags and requests, and their expected result without failures.

Values are 64-bit numbers that depend on all inputs of a processor, so that any lost, duplicated, late or stale item
changes the result. `Workload.expected` computes the result without the framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

import taskgraph as tg
from taskgraph.shape import is_stateless
from taskgraph.testing.simulate.shared import Sharing, with_shared

__all__ = ["HOOKS", "PlannedProcessor", "RaisingMethod", "Recorder", "Workload", "mix"]

_MASK = (1 << 64) - 1
_RELAY_SALT = 11
_CHAIN_SALT = 13
_COMPOSE_FLAG_SALT = 17


def mix(*parts: int) -> int:
    """Hashes these numbers in order to a 64-bit number."""
    h = 0x9E3779B97F4A7C15
    for part in parts:
        h = ((h ^ (part & _MASK)) * 0xFF51AFD7ED558CCD) & _MASK
        h ^= h >> 32
    return h


def reported_number(state: int) -> float:
    """Returns the number that a task with this state reports after an epoch."""
    return float(state % 1_000_003)


@dataclass(frozen=True)
class PlannedProcessor:
    """One processor of one task in one epoch."""

    index: int
    name: str
    inbound: tuple[tuple[str, tuple[int, ...]], ...] = ()
    outbound: tuple[tuple[str, tuple[int, ...]], ...] = ()
    flags: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    looks: tuple[int, ...] = ()  # the tasks that it sends pure requests
    parallel: bool = False
    waits: bool = False  # it is an `async def`
    bulk: bool = False  # its items are arrays
    early: bool = False  # it is `@tg.stateless`
    lasts_s: float = 0.0  # how long an `async def` sleeps


HOOKS = ("setup", "restore", "on_commit", "on_event", "compose", "sync", "result")
"""Methods that a `RaisingMethod` may make raise."""


@dataclass
class RaisingMethod:
    """A method of one task that raises in some of its calls.

    Attributes:
        where: the method, one of `HOOKS`.
        first, times: which call is the first to raise, of those of all replicas from 1 on; how many calls in a row do.
        calls, raised: how many calls there were, and how many of them raised.
    """

    where: str
    task: int
    first: int
    times: int
    calls: int = 0
    raised: int = 0

    @classmethod
    def draw(cls, rng: random.Random, tasks: int) -> RaisingMethod:
        where = rng.choice((*HOOKS, "restore", "restore", "on_commit", "on_event"))
        first = rng.choice((1, 2, 3, 4, 6)) if where in ("setup", "restore", "result") else rng.randint(1, 12)
        return cls(where, rng.randrange(tasks), first, rng.choice((1, 1, 2, 1_000_000)))

    @property
    def text(self) -> str:
        """Says which method of which task raises: in the seed's description, and as the error's text."""
        return f"a mistake in {self.where} of task {self.task}"

    def raise_if_due(self, where: str, task: int) -> None:
        """Counts a call of a task's method, and raises if this call is to raise."""
        if (where, task) == (self.where, self.task):
            self.calls += 1
            if self.first <= self.calls < self.first + self.times:
                self.raised += 1
                raise ArithmeticError(self.text)


SAME_PLAN_SHARE = 0.4
"""Share of the jobs with several epochs in flight that have the same plan in every epoch."""
DISAGREEING_END_SHARE = 0.5
"""Share of the jobs ended by a task in which the task's replicas disagree about the end."""
RELAY_SHARE = 0.3
"""Share of the jobs with flags or requests whose tasks send another flag for each that they get."""
CHAINED_REQUEST_SHARE = 0.3
"""Share of the jobs with flags or requests whose handlers send requests before they reply."""
COMPOSE_FLAG_SHARE = 0.3
"""Share of the jobs with flags or requests whose tasks send flags in `compose`."""
_MAX_STEPS = 4
"""The most steps of a task in an epoch."""


class Recorder(Protocol):
    """Called by user code with what it does in each run of an epoch; `executions.TaskExecutions` implements it.

    `steps` are the run's processors, `last_commit` is the epoch of the last `on_commit`, `consumed` are a step's items,
    and `state` is the task's state: after the epoch in `on_epoch_end`, which each sync point calls.
    """

    def on_compose(self, epoch: Any, steps: tuple[PlannedProcessor, ...], last_commit: int | None) -> None: ...
    def on_epoch_begin(self, epoch: Any, steps: tuple[PlannedProcessor, ...]) -> None: ...
    def on_state_read(self, epoch: Any, state: int) -> None: ...
    def on_compute(self, epoch: Any, step: PlannedProcessor, consumed: dict[tuple[str, int], int]) -> None: ...
    def on_put(self, epoch: Any, tag: str, to: int, value: int) -> None: ...
    def on_flag_sent(self, epoch: Any, to: int, value: int) -> None: ...
    def on_flag_received(self, epoch: Any, sender: int, value: int) -> None: ...
    def on_request_answered(self, epoch: Any, to: int, value: int, answer: int) -> None: ...
    def on_request_handled(self, epoch: Any, sender: int, value: int, answer: int) -> None: ...
    def on_epoch_end(self, epoch: Any, state: int) -> None: ...
    def on_finish_call(self, epoch: Any) -> None: ...
    def on_commit_call(self, task: int, number: int, state: int | None) -> None: ...
    def on_teardown(self, task: int) -> None: ...


@dataclass
class Workload:
    """A drawn job: its tasks, their plans, and their special behavior."""

    seed: int
    tasks: int
    epochs: int
    backups: int
    plan: tuple[tuple[tuple[PlannedProcessor, ...], ...], ...]  # epoch, task
    talks: bool  # tasks send flags or requests
    erratic: frozenset[int]  # tasks that compute other values each time
    without_state: frozenset[int]  # tasks without state
    finishes: bool  # a task ends the job by `epoch.finish`
    chaos: random.Random = field(repr=False)
    checkpoint_every: int = 0  # 0: no checkpoints
    epochs_ahead: int = 0
    gather_s: float = 0.0
    listening: frozenset[int] = frozenset()  # tasks with an `on_commit`, which are never ahead
    epochs_in_flight: int = 1
    in_flight_tasks: frozenset[int] = frozenset()  # tasks whose `compose` is `@tg.stateless`
    end_whims: random.Random | None = field(
        default=None, repr=False
    )  # draws the end anew for each replica of the task that ends the job
    relays: int | None = None  # after a flag or request, task t flags task t + relays
    lingers_s: float = 0.0  # how long a task holds the epoch before it relays a flag
    asks_on: int | None = None  # before its reply, task t asks task t + asks_on, which replies at once
    opens: frozenset[int] = frozenset()  # tasks that flag the next task in `compose`
    moody: int | None = None  # a task that sends its flags in some runs of an epoch only
    rerun: dict[int, Any] = field(default_factory=dict)  # epoch -> first run of the moody task
    hears_s: float = 0.0  # how long `on_flag` sleeps; 0: it is a plain function
    same_plan: bool = False  # all epochs have the same plan
    mistake: RaisingMethod | None = None
    torn_down: bool = False  # tasks have a `teardown`; no code may run after it
    sharing: Sharing | None = None  # which tasks have shared state

    @classmethod
    def draw(
        cls,
        rng: random.Random,
        checkpoint_rng: random.Random | None = None,
        ahead_rng: random.Random | None = None,
        in_flight_rng: random.Random | None = None,
        same_plan_rng: random.Random | None = None,
        turn_rng: random.Random | None = None,
        request_rng: random.Random | None = None,
    ) -> Workload:
        """Draws a job from `rng`. Each other generator, if given, may add a feature, and changes nothing else.

        Args:
            checkpoint_rng: the job has checkpoints.
            ahead_rng: tasks may be ahead of the last commit.
            in_flight_rng: tasks without handlers may be in several epochs at a time.
            same_plan_rng: such a job may have the same plan in all epochs.
            turn_rng: tasks may relay flags, and disagree about the job's end.
            request_rng: handlers may send requests, and `compose` may send flags.
        """
        tasks = rng.choice((1, 2, 2, 3, 3, 4))
        epochs = rng.choice((2, 3, 3, 4, 5, 6))
        talks = rng.random() < 0.4
        plan = tuple(tuple(_draw_epoch(rng, tasks, talks)) for _ in range(epochs))
        every = 0
        if checkpoint_rng is not None:
            every = checkpoint_rng.choice((1, 2, 2, 3))
            plan += tuple(
                tuple(_draw_epoch(checkpoint_rng, tasks, talks)) for _ in range(checkpoint_rng.randrange(1, 8))
            )
            epochs = len(plan)
        ahead, gather_s, listening = 0, 0.0, frozenset(range(tasks))
        if ahead_rng is not None:
            ahead, gather_s = ahead_rng.choice((1, 2, 3, 8, 8)), ahead_rng.choice((0.0, 0.05, 1.0))
            listening = frozenset(task for task in range(tasks) if ahead_rng.random() < 0.15)
            plan += tuple(tuple(_draw_epoch(ahead_rng, tasks, talks)) for _ in range(ahead_rng.randrange(0, 8)))
            epochs = len(plan)
        in_flight, in_flight_tasks = 1, frozenset[int]()
        if in_flight_rng is not None and not talks:
            in_flight = in_flight_rng.choice((1, 2, 2, 4, 4, 8))
            in_flight_tasks = frozenset(
                task for task in range(tasks) if task not in listening and in_flight_rng.random() < 0.8
            )
            plan += tuple(
                tuple(_draw_epoch(in_flight_rng, tasks, talks)) for _ in range(in_flight_rng.randrange(2, 10))
            )
            epochs = len(plan)
        erratic = frozenset({rng.randrange(tasks)}) if rng.random() < 0.3 else frozenset[int]()
        if in_flight_tasks and in_flight_rng is not None and in_flight_rng.random() < 0.5:
            erratic |= {in_flight_rng.choice(sorted(in_flight_tasks))}  # so that more epochs restart
        drawn = cls(
            seed=rng.getrandbits(32),
            tasks=tasks,
            epochs=epochs,
            backups=rng.choice((1, 1, 1, 2, 2)),
            plan=plan,
            talks=talks,
            erratic=erratic,
            without_state=frozenset({rng.randrange(tasks)}) if rng.random() < 0.15 else frozenset(),
            finishes=rng.random() < 0.2,
            chaos=random.Random(rng.getrandbits(32)),
            checkpoint_every=every,
            epochs_ahead=ahead,
            gather_s=gather_s,
            listening=listening,
            epochs_in_flight=in_flight,
            in_flight_tasks=in_flight_tasks,
        )
        if in_flight_rng is not None:
            drawn.plan = tuple(
                tuple(
                    _draw_stateless_steps(in_flight_rng, steps, keeps_nothing=task in drawn.without_state)
                    if task in in_flight_tasks
                    else steps
                    for task, steps in enumerate(epoch)
                )
                for epoch in plan
            )
        if in_flight_tasks and same_plan_rng is not None and same_plan_rng.random() < SAME_PLAN_SHARE:
            drawn.plan, drawn.same_plan = (same_plan_rng.choice(drawn.plan),) * epochs, True
        if turn_rng is not None and drawn.finishes and turn_rng.random() < DISAGREEING_END_SHARE:
            drawn.end_whims = random.Random(turn_rng.getrandbits(32))
        if turn_rng is not None and talks and turn_rng.random() < RELAY_SHARE:
            drawn.relays, drawn.lingers_s = turn_rng.choice((0, 1)), turn_rng.choice((0.0, 0.0, 0.01, 0.1, 0.7))
        if request_rng is not None and talks and request_rng.random() < CHAINED_REQUEST_SHARE:
            drawn.asks_on = request_rng.choice((0, 1, 1))
        if request_rng is not None and talks and request_rng.random() < COMPOSE_FLAG_SHARE:
            drawn.opens = frozenset(task for task in range(tasks) if request_rng.random() < 0.6)
        return drawn

    def draw_sharing(self, rng: random.Random) -> None:
        """Draws which tasks have shared state. Their sync points change it, so these must not be `@tg.stateless`."""
        own_state = set(range(self.tasks)) - self.without_state
        able = set(range(self.tasks)) - (self.without_state & self.in_flight_tasks)
        self.sharing = Sharing.draw(rng, self.seed, sorted(able), own_state, self.epochs)

    def draw_moody_task(self, rng: random.Random) -> None:
        """Makes one task moody: it alone sends flags, in some runs of an epoch only, and no task sends requests.

        So a crashed primary has handled no message that its successor needs, and the epoch goes on without a restart.
        """
        self.moody = rng.randrange(1, self.tasks)  # not task 0: the leader's own messages are never late
        self.relays, self.lingers_s, self.hears_s = None, 0.0, rng.choice((0.0, 0.3, 0.7, 0.7))
        self.asks_on, self.opens = None, frozenset()
        others = [task for task in range(1, self.tasks) if task != self.moody]

        def only_flags(task: int, step: PlannedProcessor) -> PlannedProcessor:
            says = task == self.moody and step.outbound and rng.random() < 0.7
            return replace(step, requests=(), flags=(rng.choice(others),) if says else ())

        self.plan = tuple(
            tuple(tuple(only_flags(task, step) for step in steps) for task, steps in enumerate(epoch))
            for epoch in self.plan
        )

    def draw_silence(self, epoch: Any) -> bool:
        """Draws whether the moody task sends no flags in this run: mostly so in an epoch's first run."""
        first = self.rerun.setdefault(epoch.number, epoch._work) is epoch._work
        return self.chaos.random() < (0.8 if first else 0.2)

    def steps(self, epoch: int, task: int) -> tuple[PlannedProcessor, ...]:
        """Returns the processors of a task in an epoch."""
        # If a task ends the job, other tasks may run ahead of the last epoch, in vain.
        return self.plan[min(epoch, self.epochs - 1)][task]

    def initial_state(self, task: int) -> int:
        """Returns a task's state before epoch 0."""
        return mix(self.seed, 1, task)

    def job(self, recorder: Recorder, settings: tg.Settings, min_nodes: int) -> tg.Job:
        """Returns the job, whose user code reports what it does to the recorder."""

        def build(task: int) -> tg.Task:
            kind = self._class_of(task)
            if self.hears_s:
                kind = _with_slow_on_flag(kind)
            if self.asks_on is not None:
                kind = _with_chained_requests(kind)
            if self.sharing is not None and task in self.sharing.tasks:
                kind = with_shared(kind, self.sharing)
            if self.mistake is not None and task == self.mistake.task:
                kind = _with_mistake(kind, self.mistake, stateful=task not in self.without_state)
            if self.torn_down:
                kind = _with_teardown(kind)
            return kind(self, recorder)

        return tg.Job(
            tasks=self.tasks,
            epochs=None if self.finishes else self.epochs,
            builder=build,
            topology=tg.full(),
            backups=self.backups,
            min_nodes=min_nodes,
            settings=settings,
            name="simulated",
            checkpoint="file:///simulated" if self.checkpoint_every else None,
            checkpoint_every=self.checkpoint_every or 1,
        )

    def _class_of(self, task: int) -> type[_NoState]:
        if task in self.in_flight_tasks and self.same_plan:
            return _SamePlanNoState if task in self.without_state else _SamePlan
        if task in self.in_flight_tasks:
            return _InFlightNoState if task in self.without_state else _InFlight
        return _KINDS[self.talks, task not in self.without_state, task in self.listening]

    def relay_target(self, task: int) -> int:
        """Returns the task that `task` flags after it got a flag or request; maybe itself."""
        assert self.relays is not None
        return (task + self.relays) % self.tasks

    def chained_target(self, task: int) -> int:
        """Returns the task that `task` asks before its reply to a request; maybe itself."""
        assert self.asks_on is not None
        return (task + self.asks_on) % self.tasks

    def compose_flag(self, epoch: int, task: int, state: int) -> tuple[int, int]:
        """Returns the task that `task` flags in `compose`, and the flag's value."""
        return (task + 1) % self.tasks, mix(self.seed, state, epoch, task, _COMPOSE_FLAG_SALT)

    def expected(self) -> list[list[int]]:
        """Computes boundary -> task -> state without failures, for a job without erratic or moody tasks."""
        states = [[self.initial_state(task) for task in range(self.tasks)]]
        for epoch in range(self.epochs):
            states.append(self._expected_epoch(epoch, states[-1]))
        return states

    def _expected_epoch(self, epoch: int, before: list[int]) -> list[int]:
        """Computes the states of all tasks after an epoch from those before it."""
        items: dict[tuple[str, int, int], int] = {}
        heard = [0] * self.tasks
        inputs: dict[int, list[int]] = {}
        last: dict[int, PlannedProcessor] = {}
        trail = [0] * self.tasks
        for task in self.opens:
            self._add_message(heard, task, *self.compose_flag(epoch, task, before[task]))
        order = sorted((s.index, task, s) for task in range(self.tasks) for s in self.steps(epoch, task))
        for _, task, step in order:
            read = [items[(tag, p, task)] for tag, producers in step.inbound for p in producers]
            if not step.outbound:
                inputs[task], last[task] = read, step
                continue
            value = mix(self.seed, 0 if step.early else before[task], epoch, task, step.index, *read)
            if not step.parallel:
                trail[task] = mix(trail[task], step.index)
            for to in step.looks:
                value = mix(value, mix(before[to], value, 5))
            for to in step.requests:
                ask = mix(value, to)
                self._add_message(heard, task, to, ask)
                answer = mix(before[to], ask, task)
                if self.asks_on is not None:
                    other, asked = self.chained_target(to), mix(ask, _CHAIN_SALT)
                    self._add_message(heard, to, other, asked)
                    answer = mix(answer, mix(before[other], asked, to))
                value = mix(value, answer)
            for to in step.flags:
                self._add_message(heard, task, to, mix(value, 7, to))
            for tag, consumers in step.outbound:
                for to in consumers:
                    items[(tag, task, to)] = mix(value, to)
        return [self.next_state(before[t], epoch, t, mix(heard[t], trail[t]), inputs[t]) for t in range(self.tasks)]

    def _add_message(self, heard: list[int], task: int, to: int, value: int) -> None:
        """Adds a flag or request from `task`, and the flag that relays it, to the receivers' sums in `heard`."""
        heard[to] = (heard[to] + mix(task, value)) & _MASK
        if self.relays is not None:
            heard[self.relay_target(to)] = (heard[self.relay_target(to)] + mix(to, mix(value, _RELAY_SALT))) & _MASK

    def next_state(self, state: int, epoch: int, task: int, seen: int, read: list[int]) -> int:
        """Returns a task's state after an epoch, from a hash of its messages and the items of its sync point."""
        if task in self.without_state:
            return state
        return (state + mix(self.seed, state, epoch, task, seen, *read)) & _MASK


def _draw_epoch(rng: random.Random, tasks: int, talks: bool) -> list[tuple[PlannedProcessor, ...]]:
    """Draws the steps of each task in an epoch. Only steps of later layers consume a layer's items: no deadlocks."""
    layers = rng.choice((1, 1, 2, 3))  # steps of a task before its sync point
    there = [[layer < layers and rng.random() < 0.75 for layer in range(layers)] for _ in range(tasks)]
    inbound: dict[tuple[int, int], dict[str, list[int]]] = {}
    outbound: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for task in range(tasks):
        for layer in range(layers):
            if not there[task][layer]:
                continue
            consumers = rng.sample(range(tasks), rng.randint(1, min(3, tasks)))
            tag = f"x{layer}"
            outbound[(task, layer)] = {tag: tuple(consumers)}
            for consumer in consumers:
                takers = [at for at in range(layer + 1, layers) if there[consumer][at]]
                at = rng.choice([*takers, layers])
                inbound.setdefault((consumer, at), {}).setdefault(tag, []).append(task)
    plans = []
    for task in range(tasks):
        steps = []
        for layer in range(layers + 1):
            if layer < layers and not there[task][layer]:
                continue
            takes = tuple((tag, tuple(p)) for tag, p in inbound.get((task, layer), {}).items())
            if layer == layers:
                steps.append(PlannedProcessor(layer, "sync", takes))
                continue
            others = [t for t in range(tasks) if t != task]
            flags = tuple(rng.sample(others, 1)) if talks and others and rng.random() < 0.4 else ()
            requests = tuple(rng.sample(others, 1)) if talks and others and rng.random() < 0.4 else ()
            looks = tuple(rng.sample(others, 1)) if talks and others and rng.random() < 0.15 else ()
            steps.append(
                PlannedProcessor(
                    layer,
                    f"p{layer}",
                    takes,
                    tuple(outbound[(task, layer)].items()),
                    flags,
                    requests,
                    looks,
                    waits=bool(requests or looks) or rng.random() < 0.3,
                    parallel=rng.random() < 0.1,
                    bulk=rng.random() < 0.2,
                )
            )
        plans.append(tuple(steps))
    return plans


def _draw_stateless_steps(
    rng: random.Random, steps: tuple[PlannedProcessor, ...], *, keeps_nothing: bool
) -> tuple[PlannedProcessor, ...]:
    """Returns a task's steps with new draws: which are `@tg.stateless`, and how long each sleeps (then epochs overlap).

    Args:
        keeps_nothing: the task has no state, so its sync point may be stateless, too.
    """
    found = []
    for step in steps:
        if step.outbound:
            lasts_s = rng.choice((0.0, 0.003, 0.03, 0.2)) * rng.random()
            found.append(replace(step, early=rng.random() < 0.7, waits=rng.random() < 0.6, lasts_s=lasts_s))
        else:
            early, lasts_s = keeps_nothing and rng.random() < 0.5, rng.choice((0.0, 0.0, 0.01, 0.2)) * rng.random()
            found.append(replace(step, early=early, waits=lasts_s > 0, lasts_s=lasts_s))
    return tuple(found)


class _NoState(tg.Task):
    """A task without state, flags and requests. Its processors are `run`, `wait`, `sync` and `slow_sync`."""

    value: Any
    last_commit: int | None = None
    """The epoch of the last `on_commit`; -1: no call yet; None: the task has no `on_commit`."""

    def __init__(self, workload: Workload, recorder: Recorder) -> None:
        self._workload = workload
        self._recorder = recorder
        self._whim = workload.end_whims.getrandbits(32) if workload.end_whims is not None else None

    def setup(self) -> None:
        self.value = np.array([self._workload.initial_state(self.task_id)], dtype=np.uint64)

    def compose(self, epoch: Any) -> None:
        self._compose(epoch)
        self._recorder.on_state_read(epoch, int(self.value[0]))

    def _compose(self, epoch: Any) -> None:
        steps = self._workload.steps(epoch.number, self.task_id)
        self._recorder.on_compose(epoch, steps, self.last_commit)
        for step in steps:
            epoch.processor(
                functools.partial(self._processor_of(step), step),
                inbound={tag: list(producers) for tag, producers in step.inbound},
                outbound={tag: list(consumers) for tag, consumers in step.outbound},
                name=step.name,
                parallel=step.parallel,
            )

    def _processor_of(self, step: PlannedProcessor) -> Callable[..., Any]:
        """Returns the method that executes a step."""
        if step.outbound:
            return self.wait if step.waits else self.run
        return self.slow_sync if step.waits else self.sync

    def _consume(self, step: PlannedProcessor, ins: Any) -> dict[tuple[str, int], int]:
        """Reads all items of a step: (tag, producer) -> number."""
        return {
            (tag, producer): int(np.asarray(value).reshape(-1)[0])
            for tag, _ in step.inbound
            for producer, value in ins.all(tag).items()
        }

    def _compute_value(self, step: PlannedProcessor, epoch: Any, consumed: dict[tuple[str, int], int]) -> int:
        """Returns the number from which a step's items and messages follow, and records the step."""
        work = self._workload
        if step.early:
            self._fail_after_last_epoch(epoch)
        self._recorder.on_compute(epoch, step, consumed)
        if not step.parallel:  # parallel steps share no scratch
            epoch.scratch.trail = mix(getattr(epoch.scratch, "trail", 0), step.index)
        state = 0 if step.early else self._read_state(epoch)
        value = mix(work.seed, state, epoch.number, self.task_id, step.index, *consumed.values())
        return value ^ work.chaos.getrandbits(60) if self.task_id in work.erratic else value

    def _fail_after_last_epoch(self, epoch: Any) -> None:
        """Raises in epochs after the last one, which tasks in flight may begin, and which do not count."""
        if self.task_id in self._workload.in_flight_tasks and epoch.number >= self._workload.epochs:
            raise ArithmeticError(f"task {self.task_id} in epoch {epoch.number}, after the end")

    def _read_state(self, epoch: Any) -> int:
        state = int(self.value[0])
        self._recorder.on_state_read(epoch, state)
        return state

    def _send_results(self, step: PlannedProcessor, epoch: Any, outs: Any, value: int) -> None:
        """Sends the step's flags, and puts its items."""
        work = self._workload
        silent = self.task_id == work.moody and work.draw_silence(epoch)
        for to in step.flags if not silent else ():
            self._recorder.on_flag_sent(epoch, to, mix(value, 7, to))
            epoch.flag(to, mix(value, 7, to))
        for tag, consumers in step.outbound:
            for to in consumers:
                item = mix(value, to)
                self._recorder.on_put(epoch, tag, to, item)
                outs.put(tag, np.full(4, item, dtype=np.uint64) if step.bulk else item, to=to)

    def run(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        self._send_results(step, epoch, outs, self._compute_value(step, epoch, self._consume(step, ins)))

    async def wait(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        value = self._compute_value(step, epoch, self._consume(step, ins))
        for to in step.looks:
            value = mix(value, await epoch.request(to, "look", value))
        for to in step.requests:
            ask = mix(value, to)
            answer = await epoch.request(to, "ask", ask)
            self._recorder.on_request_answered(epoch, to, ask, answer)
            value = mix(value, answer)
        if step.lasts_s:
            await asyncio.sleep(step.lasts_s)
            if not step.early:
                self._read_state(epoch)  # the state must be unchanged
        self._send_results(step, epoch, outs, value)

    def sync(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        self._finish_epoch(epoch, self._next_state(step, epoch, ins))

    async def slow_sync(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        after = self._next_state(step, epoch, ins)
        await asyncio.sleep(step.lasts_s)
        self._finish_epoch(epoch, after)

    def _next_state(self, step: PlannedProcessor, epoch: Any, ins: Any) -> int:
        """Records the sync point, and returns the state after it."""
        work, consumed = self._workload, self._consume(step, ins)
        self._fail_after_last_epoch(epoch)
        self._recorder.on_compute(epoch, step, consumed)
        seen = mix(getattr(epoch.scratch, "heard", 0), getattr(epoch.scratch, "trail", 0))
        return work.next_state(self._read_state(epoch), epoch.number, self.task_id, seen, list(consumed.values()))

    def _finish_epoch(self, epoch: Any, after: int) -> None:
        """Stores and reports the new state, and ends the job if this task does that."""
        work = self._workload
        self.value[0] = after  # in place: a restored state must be the task's own
        self._recorder.on_epoch_end(epoch, after)
        epoch.report(**{f"t{self.task_id}": reported_number(after)})
        if work.finishes and self.task_id == work.seed % work.tasks and self._is_last(epoch.number):
            self._recorder.on_finish_call(epoch)
            epoch.finish()

    def _is_last(self, epoch: int) -> bool:
        """True if this replica wants the job to end after this epoch."""
        whim = self._whim is not None and mix(self._whim, epoch) % 3 == 0
        return whim or epoch + 1 == self._workload.epochs

    def result(self) -> Any:
        return int(self.value[0])


class _NoStateTalking(_NoState):
    """A task without state, with flags and requests."""

    def compose(self, epoch: Any) -> None:
        super().compose(epoch)
        if self.task_id in (work := self._workload).opens:
            to, value = work.compose_flag(epoch.number, self.task_id, int(self.value[0]))
            self._recorder.on_flag_sent(epoch, to, value)
            epoch.flag(to, value)

    def on_flag(self, epoch: Any, sender: int, meta: Any) -> None:
        relayed = isinstance(meta, list)
        self._count_message(epoch, sender, meta[0] if relayed else meta, relays=not relayed)
        self._recorder.on_flag_received(epoch, sender, meta[0] if relayed else meta)

    def _count_message(self, epoch: Any, sender: int, value: int, *, relays: bool) -> None:
        """Adds a message to the sum of the epoch's messages. If `relays`, sends a flag that follows from it."""
        epoch.scratch.heard = (getattr(epoch.scratch, "heard", 0) + mix(sender, value)) & _MASK
        if relays and self._workload.relays is not None:
            hold = epoch.hold("what follows from a message")
            if lasts_s := self._workload.lingers_s:
                asyncio.get_running_loop().call_later(lasts_s, self._relay, epoch, value, hold)
            else:
                self._relay(epoch, value, hold)

    def _relay(self, epoch: Any, value: int, hold: tg.Hold) -> None:
        """Sends the flag that follows from a message, and lets the epoch go on."""
        to, relayed = self._workload.relay_target(self.task_id), mix(value, _RELAY_SALT)
        if not epoch.cancelled:
            self._recorder.on_flag_sent(epoch, to, relayed)
            with contextlib.suppress(tg.GraphError):  # the error fails the job anyway
                epoch.flag(to, [relayed])
        hold.release()

    @tg.handles("ask", pure=False)
    def ask(self, epoch: Any, sender: int, payload: Any) -> int:
        self._count_message(epoch, sender, payload, relays=True)
        answer = mix(int(self.value[0]), payload, sender)
        self._recorder.on_request_handled(epoch, sender, payload, answer)
        return answer

    @tg.handles("look", pure=True)
    def look(self, epoch: Any, sender: int, payload: Any) -> int:
        return mix(int(self.value[0]), payload, 5)


class _Plain(_NoState, state=["value"]):
    """A task with state, without flags and requests."""


class _Talking(_NoStateTalking, state=["value"]):
    """A task with state, flags and requests."""


class _Listening(_NoState):
    """Mixin: a task with an `on_commit`."""

    last_commit = -1

    def on_commit(self, number: int, state: Any) -> None:
        self.last_commit = number
        value = None if state is None else state.get("value")  # none if all its state is shared
        self._recorder.on_commit_call(self.task_id, number, None if value is None else int(value[0]))


class _ListeningPlain(_Listening, _Plain):
    """A task with state and `on_commit`."""


class _ListeningNoStateTalking(_Listening, _NoStateTalking):
    """A task without state, with flags, requests and `on_commit`."""


class _ListeningTalking(_Listening, _Talking):
    """A task with state, flags, requests and `on_commit`."""


class _InFlightNoState(_NoState):
    """A task without state that may be in several epochs at a time."""

    @tg.stateless
    def compose(self, epoch: Any) -> None:
        self._compose(epoch)

    def _processor_of(self, step: PlannedProcessor) -> Callable[..., Any]:
        if not step.early:
            return super()._processor_of(step)
        if step.outbound:
            return self.early_wait if step.waits else self.early_run
        return self.early_slow_sync if step.waits else self.early_sync

    @tg.stateless
    def early_run(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        self.run(step, epoch, ins, outs)

    @tg.stateless
    async def early_wait(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        await self.wait(step, epoch, ins, outs)

    @tg.stateless
    def early_sync(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        self.sync(step, epoch, ins, outs)  # only tasks without state: the value is that of `setup`

    @tg.stateless
    async def early_slow_sync(self, step: PlannedProcessor, epoch: Any, ins: Any, outs: Any) -> None:
        await self.slow_sync(step, epoch, ins, outs)


class _InFlight(_InFlightNoState, state=["value"]):
    """A task with state that may be in several epochs at a time."""


class _SamePlanNoState(_InFlightNoState):
    """A task without state and with the same graph in every epoch: `compose` runs again only after a restart."""

    @tg.stateless
    def compose(self, epoch: Any) -> None:
        for at, step in enumerate(self._workload.steps(0, self.task_id)):
            epoch.processor(
                getattr(self, f"{self._processor_of(step).__name__}_{at}"),
                inbound={tag: list(producers) for tag, producers in step.inbound},
                outbound={tag: list(consumers) for tag, consumers in step.outbound},
                name=step.name,
                parallel=step.parallel,
            )

    def step_at(self, at: int, epoch: Any) -> PlannedProcessor:
        """Returns the task's step number `at`, for a method: the graph is reusable only if its computes are methods."""
        steps = self._workload.steps(0, self.task_id)
        self._recorder.on_epoch_begin(epoch, steps)
        return steps[at]


def _with_mistake(kind: type[_NoState], mistake: RaisingMethod, *, stateful: bool) -> type[_NoState]:
    """Returns a subclass whose method `mistake.where` raises in the calls that the mistake counts.

    Returns the class itself if that method is `restore` of a task without state: it is never called.
    """
    name = mistake.where
    if name == "restore" and not stateful:
        return kind  # tasks without state are not restored
    method = getattr(kind, name)

    @functools.wraps(method)
    def raises(self: _NoState, *given: Any) -> Any:
        mistake.raise_if_due(name, self.task_id)
        return method(self, *given)

    return type(kind.__name__, (kind,), {name: tg.stateless(raises) if is_stateless(method) else raises})


def _with_slow_on_flag(kind: type[_NoState]) -> type[_NoState]:
    """Returns a subclass whose `on_flag` sleeps first."""

    async def on_flag(self: Any, epoch: Any, sender: int, meta: Any) -> None:
        await asyncio.sleep(self._workload.hears_s)
        kind.on_flag(self, epoch, sender, meta)

    return type(kind.__name__, (kind,), {"on_flag": on_flag})


def _with_teardown(kind: type[_NoState]) -> type[_NoState]:
    """Returns a subclass with a `teardown`, after which any recorded call is a violation, also a second `teardown`."""

    def teardown(self: Any) -> None:
        self._recorder.on_teardown(self.task_id)
        self._recorder = _TornDownRecorder(self.task_id)

    return type(kind.__name__, (kind,), {"teardown": teardown})


class _TornDownRecorder:
    """The `Recorder` of a task after its `teardown`: raises at every call."""

    def __init__(self, task: int) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"code of task {self._task} ran after its teardown: {name}")


def _with_chained_requests(kind: Any) -> type[_NoState]:
    """Returns a subclass whose handler sends a request to another task before it replies; that task replies at once."""

    async def ask(self: Any, epoch: Any, sender: int, payload: Any) -> int:
        if isinstance(payload, list):
            return int(kind.ask(self, epoch, sender, payload[0]))
        work, state = self._workload, int(self.value[0])
        self._count_message(epoch, sender, payload, relays=True)
        to, asked = work.chained_target(self.task_id), mix(payload, _CHAIN_SALT)
        answer = await epoch.request(to, "ask", [asked])
        self._recorder.on_request_answered(epoch, to, asked, answer)
        answer = mix(mix(state, payload, sender), answer)
        self._recorder.on_request_handled(epoch, sender, payload, answer)
        return answer

    return type(kind.__name__, (kind,), {"ask": ask})


def _compute_step(method: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Returns a compute for `_SamePlanNoState`: it calls `method` with the task's step number `at`."""

    def compute(self: _SamePlanNoState, epoch: Any, ins: Any, outs: Any) -> None:
        method(self, self.step_at(at, epoch), epoch, ins, outs)

    async def wait(self: _SamePlanNoState, epoch: Any, ins: Any, outs: Any) -> None:
        await method(self, self.step_at(at, epoch), epoch, ins, outs)

    found = wait if inspect.iscoroutinefunction(method) else compute
    return tg.stateless(found) if is_stateless(method) else found


for _name in ("run", "wait", "sync", "slow_sync", "early_run", "early_wait", "early_sync", "early_slow_sync"):
    for _at in range(_MAX_STEPS):
        setattr(_SamePlanNoState, f"{_name}_{_at}", _compute_step(getattr(_SamePlanNoState, _name), _at))


class _SamePlan(_SamePlanNoState, state=["value"]):
    """A task with state and the same graph in every epoch."""


_KINDS: dict[tuple[bool, bool, bool], type[_NoState]] = {  # talks, stateful, listens
    (False, False, False): _NoState,
    (False, False, True): _Listening,
    (False, True, False): _Plain,
    (False, True, True): _ListeningPlain,
    (True, False, False): _NoStateTalking,
    (True, False, True): _ListeningNoStateTalking,
    (True, True, False): _Talking,
    (True, True, True): _ListeningTalking,
}
