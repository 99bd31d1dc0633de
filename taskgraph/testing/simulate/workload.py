"""The job of a seed: tasks whose graphs, flags and requests are drawn at random, and what comes out without failures.

Values are 64-bit numbers that depend on everything a processor read, so that any item that is lost, doubled, late or
stale changes the result. `Workload.expected` computes that result without the framework.
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

__all__ = ["HOOKS", "Mistake", "Recorder", "Step", "Workload", "mix"]

_MASK = (1 << 64) - 1
_RELAYED = 11
_ASKED_ON = 13
_OPENED = 17


def mix(*parts: int) -> int:
    """A number that depends on every one of these and on their order."""
    h = 0x9E3779B97F4A7C15
    for part in parts:
        h = ((h ^ (part & _MASK)) * 0xFF51AFD7ED558CCD) & _MASK
        h ^= h >> 32
    return h


def reported(state: int) -> float:
    """The number that a task reports after an epoch."""
    return float(state % 1_000_003)


@dataclass(frozen=True)
class Step:
    """One processor of one task in one epoch."""

    index: int
    name: str
    inbound: tuple[tuple[str, tuple[int, ...]], ...] = ()
    outbound: tuple[tuple[str, tuple[int, ...]], ...] = ()
    flags: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    looks: tuple[int, ...] = ()  # pure requests
    parallel: bool = False
    waits: bool = False  # an `async def`
    bulk: bool = False  # values travel in arrays
    early: bool = False  # it is `@tg.stateless`
    lasts_s: float = 0.0  # what it awaits, where it is an `async def`


HOOKS = ("setup", "restore", "on_commit", "on_event", "compose", "sync", "result")
"""Where a mistake may be."""


@dataclass
class Mistake:
    """User code of one task that raises.

    Attributes:
        where: one of `HOOKS`.
        first, times: the call that raises first, of all calls in all replicas, and how many do.
        raised: how often it did.
    """

    where: str
    task: int
    first: int
    times: int
    calls: int = 0
    raised: int = 0

    @classmethod
    def draw(cls, rng: random.Random, tasks: int) -> Mistake:
        where = rng.choice((*HOOKS, "restore", "restore", "on_commit", "on_event"))
        first = rng.choice((1, 2, 3, 4, 6)) if where in ("setup", "restore", "result") else rng.randint(1, 12)
        return cls(where, rng.randrange(tasks), first, rng.choice((1, 1, 2, 1_000_000)))

    @property
    def text(self) -> str:
        return f"a mistake in {self.where} of task {self.task}"

    def made(self, where: str, task: int) -> None:
        """Counts the call of a place in user code, and raises if the mistake is due there."""
        if (where, task) == (self.where, self.task):
            self.calls += 1
            if self.first <= self.calls < self.first + self.times:
                self.raised += 1
                raise ArithmeticError(self.text)


STEADY = 0.4
"""How many of the jobs with tasks in several epochs have the same plan in all of them."""
FICKLE = 0.5
"""How many of the jobs whose length is decided by a task have one whose replicas disagree about it."""
RELAYED = 0.3
"""How many of the jobs with flags or requests have tasks that send a flag on when they get one."""
ASKED_ON = 0.3
"""How many of the jobs with flags or requests have handlers that ask others before they answer."""
OPENED = 0.3
"""How many of them have tasks that send a flag where they compose an epoch."""
_STEPS = 4
"""Of a task in an epoch, at most."""


class Recorder(Protocol):
    """Records what user code saw; see `invariants.py`."""

    def composed(self, epoch: Any, steps: tuple[Step, ...], last_commit: int | None) -> None: ...
    def began(self, epoch: Any, steps: tuple[Step, ...]) -> None: ...
    def saw(self, epoch: Any, state: int) -> None: ...
    def ran(self, epoch: Any, step: Step, consumed: dict[tuple[str, int], int]) -> None: ...
    def put(self, epoch: Any, tag: str, to: int, value: int) -> None: ...
    def flagged(self, epoch: Any, to: int, value: int) -> None: ...
    def heard_flag(self, epoch: Any, sender: int, value: int) -> None: ...
    def asked(self, epoch: Any, to: int, value: int, answer: int) -> None: ...
    def handled(self, epoch: Any, sender: int, value: int, answer: int) -> None: ...
    def ended(self, epoch: Any, state: int) -> None: ...
    def finished(self, epoch: Any) -> None: ...
    def on_committed(self, task: int, number: int, state: int | None) -> None: ...
    def torn_down(self, task: int) -> None: ...


@dataclass
class Workload:
    """A job; all of it follows from the random numbers it is drawn with."""

    seed: int
    tasks: int
    epochs: int
    backups: int
    plan: tuple[tuple[tuple[Step, ...], ...], ...]  # epoch, task
    talks: bool  # flags or requests
    erratic: frozenset[int]  # tasks that compute something else each time
    without_state: frozenset[int]  # tasks that keep nothing
    finishes: bool  # the job's length is decided by a task
    chaos: random.Random = field(repr=False)
    checkpoint_every: int = 0  # 0: no checkpoints
    epochs_ahead: int = 0
    gather_s: float = 0.0
    listening: frozenset[int] = frozenset()  # tasks with an `on_commit`: they are never ahead
    epochs_in_flight: int = 1
    flying: frozenset[int] = frozenset()  # tasks whose `compose` is `@tg.stateless`
    whims: random.Random | None = field(default=None, repr=False)  # each replica of the task that ends it decides anew
    relays: int | None = None  # a task that gets a flag or a request flags the task this many after it
    lingers_s: float = 0.0  # for so long it holds the epoch before
    asks_on: int | None = None  # a task that gets a request asks the task this many after it, which answers at once
    opens: frozenset[int] = frozenset()  # tasks that flag the next one in `compose`
    moody: int | None = None  # a task that sends its flags in one run of an epoch, and not in another
    rerun: dict[int, Any] = field(default_factory=dict)  # epoch -> its first run of that task
    hears_s: float = 0.0  # so long an `on_flag` awaits something; 0: it is a plain function
    steady: bool = False  # all epochs have the same plan, and those tasks do not ask which one it is
    mistake: Mistake | None = None
    torn_down: bool = False  # tasks have a `teardown`, after which none of their code may run

    @classmethod
    def draw(
        cls,
        rng: random.Random,
        keeps: random.Random | None = None,
        hurries: random.Random | None = None,
        flies: random.Random | None = None,
        stands: random.Random | None = None,
        turns: random.Random | None = None,
        asks: random.Random | None = None,
    ) -> Workload:
        """Args:
        keeps: of a job that keeps checkpoints, what that adds; with the same `rng` all else is the same.
        hurries: likewise, of a job whose tasks may be ahead of the last commit.
        flies: likewise, of one whose tasks may be in several epochs at a time; one with handlers is in none.
        stands: likewise, of one of these whose epochs may all be alike.
        turns: likewise, of one where something else may happen with messages, and at the end.
        asks: likewise, of one where handlers ask others, and `compose` sends flags.
        """
        tasks = rng.choice((1, 2, 2, 3, 3, 4))
        epochs = rng.choice((2, 3, 3, 4, 5, 6))
        talks = rng.random() < 0.4
        plan = tuple(tuple(_draw_epoch(rng, tasks, talks)) for _ in range(epochs))
        every = 0
        if keeps is not None:
            every = keeps.choice((1, 2, 2, 3))
            plan += tuple(tuple(_draw_epoch(keeps, tasks, talks)) for _ in range(keeps.randrange(1, 8)))
            epochs = len(plan)
        ahead, gather_s, listening = 0, 0.0, frozenset(range(tasks))
        if hurries is not None:
            ahead, gather_s = hurries.choice((1, 2, 3, 8, 8)), hurries.choice((0.0, 0.05, 1.0))
            listening = frozenset(task for task in range(tasks) if hurries.random() < 0.15)
            plan += tuple(tuple(_draw_epoch(hurries, tasks, talks)) for _ in range(hurries.randrange(0, 8)))
            epochs = len(plan)
        in_flight, flying = 1, frozenset[int]()
        if flies is not None and not talks:
            in_flight = flies.choice((1, 2, 2, 4, 4, 8))
            flying = frozenset(task for task in range(tasks) if task not in listening and flies.random() < 0.8)
            plan += tuple(tuple(_draw_epoch(flies, tasks, talks)) for _ in range(flies.randrange(2, 10)))
            epochs = len(plan)
        erratic = frozenset({rng.randrange(tasks)}) if rng.random() < 0.3 else frozenset[int]()
        if flying and flies is not None and flies.random() < 0.5:
            erratic |= {flies.choice(sorted(flying))}  # so that more of them are restarted
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
            flying=flying,
        )
        if flies is not None:
            drawn.plan = tuple(
                tuple(
                    _draw_early(flies, steps, keeps_nothing=task in drawn.without_state) if task in flying else steps
                    for task, steps in enumerate(epoch)
                )
                for epoch in plan
            )
        if flying and stands is not None and stands.random() < STEADY:
            drawn.plan, drawn.steady = (stands.choice(drawn.plan),) * epochs, True
        if turns is not None and drawn.finishes and turns.random() < FICKLE:
            drawn.whims = random.Random(turns.getrandbits(32))
        if turns is not None and talks and turns.random() < RELAYED:
            drawn.relays, drawn.lingers_s = turns.choice((0, 1)), turns.choice((0.0, 0.0, 0.01, 0.1, 0.7))
        if asks is not None and talks and asks.random() < ASKED_ON:
            drawn.asks_on = asks.choice((0, 1, 1))
        if asks is not None and talks and asks.random() < OPENED:
            drawn.opens = frozenset(task for task in range(tasks) if asks.random() < 0.6)
        return drawn

    def draw_moods(self, rng: random.Random) -> None:
        """Draws moods for a job that talks: only one task sends, in one run of an epoch, and not in another.

        So a replaced primary took no message that its successor must know, and the epoch goes on.
        """
        self.moody = rng.randrange(1, self.tasks)  # what the leader's task sends and gets is at hand, and never late
        self.relays, self.lingers_s, self.hears_s = None, 0.0, rng.choice((0.0, 0.3, 0.7, 0.7))
        self.asks_on, self.opens = None, frozenset()
        others = [task for task in range(1, self.tasks) if task != self.moody]

        def only_flags(task: int, step: Step) -> Step:
            says = task == self.moody and step.outbound and rng.random() < 0.7
            return replace(step, requests=(), flags=(rng.choice(others),) if says else ())

        self.plan = tuple(
            tuple(tuple(only_flags(task, step) for step in steps) for task, steps in enumerate(epoch))
            for epoch in self.plan
        )

    def is_silent(self, epoch: Any) -> bool:
        """True if the moody task sends no flags in this run: mostly in the first one, mostly not when it runs again."""
        first = self.rerun.setdefault(epoch.number, epoch._work) is epoch._work
        return self.chaos.random() < (0.8 if first else 0.2)

    def steps(self, epoch: int, task: int) -> tuple[Step, ...]:
        # Of a job that ends when a task says so the others may be ahead of its last epoch, in vain.
        return self.plan[min(epoch, self.epochs - 1)][task]

    def first(self, task: int) -> int:
        """A task's state before epoch 0."""
        return mix(self.seed, 1, task)

    def job(self, recorder: Recorder, settings: tg.Settings, min_nodes: int) -> tg.Job:
        def build(task: int) -> tg.Task:
            kind = self._kind(task)
            if self.hears_s:
                kind = _hearing_slowly(kind)
            if self.asks_on is not None:
                kind = _asking_on(kind)
            if self.mistake is not None and task == self.mistake.task:
                kind = _mistaken(kind, self.mistake, stateful=task not in self.without_state)
            if self.torn_down:
                kind = _torn_down(kind)
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

    def _kind(self, task: int) -> type[_NoState]:
        if task in self.flying and self.steady:
            return _SteadyNoState if task in self.without_state else _Steady
        if task in self.flying:
            return _FlyingNoState if task in self.without_state else _Flying
        return _KINDS[self.talks, task not in self.without_state, task in self.listening]

    def relay(self, task: int) -> int:
        """Returns the task that a task flags after a flag or a request arrived; it may be itself."""
        assert self.relays is not None
        return (task + self.relays) % self.tasks

    def asked_on(self, task: int) -> int:
        """Returns the task that a task asks while it answers a request; it may be itself."""
        assert self.asks_on is not None
        return (task + self.asks_on) % self.tasks

    def opening(self, epoch: int, task: int, state: int) -> tuple[int, int]:
        """Returns the task that a task flags where it composes an epoch, and the flag's value."""
        return (task + 1) % self.tasks, mix(self.seed, state, epoch, task, _OPENED)

    def expected(self) -> list[list[int]]:
        """boundary -> task -> state, without failures. Tasks that are neither erratic nor moody."""
        states = [[self.first(task) for task in range(self.tasks)]]
        for epoch in range(self.epochs):
            states.append(self._expected_epoch(epoch, states[-1]))
        return states

    def _expected_epoch(self, epoch: int, before: list[int]) -> list[int]:
        items: dict[tuple[str, int, int], int] = {}
        heard = [0] * self.tasks
        inputs: dict[int, list[int]] = {}
        last: dict[int, Step] = {}
        trail = [0] * self.tasks
        for task in self.opens:
            self._hear(heard, task, *self.opening(epoch, task, before[task]))
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
                self._hear(heard, task, to, ask)
                answer = mix(before[to], ask, task)
                if self.asks_on is not None:
                    other, asked = self.asked_on(to), mix(ask, _ASKED_ON)
                    self._hear(heard, to, other, asked)
                    answer = mix(answer, mix(before[other], asked, to))
                value = mix(value, answer)
            for to in step.flags:
                self._hear(heard, task, to, mix(value, 7, to))
            for tag, consumers in step.outbound:
                for to in consumers:
                    items[(tag, task, to)] = mix(value, to)
        return [self.next_state(before[t], epoch, t, mix(heard[t], trail[t]), inputs[t]) for t in range(self.tasks)]

    def _hear(self, heard: list[int], task: int, to: int, value: int) -> None:
        """A flag or a request, and what comes of it."""
        heard[to] = (heard[to] + mix(task, value)) & _MASK
        if self.relays is not None:
            heard[self.relay(to)] = (heard[self.relay(to)] + mix(to, mix(value, _RELAYED))) & _MASK

    def next_state(self, state: int, epoch: int, task: int, seen: int, read: list[int]) -> int:
        """A task's state after an epoch."""
        if task in self.without_state:
            return state
        return (state + mix(self.seed, state, epoch, task, seen, *read)) & _MASK


def _draw_epoch(rng: random.Random, tasks: int, talks: bool) -> list[tuple[Step, ...]]:
    """Layers of processors; an item of one layer is taken in a later one, so no order can deadlock."""
    layers = rng.choice((1, 1, 2, 3))  # and as many steps of a task, and its sync point
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
                steps.append(Step(layer, "sync", takes))
                continue
            others = [t for t in range(tasks) if t != task]
            flags = tuple(rng.sample(others, 1)) if talks and others and rng.random() < 0.4 else ()
            requests = tuple(rng.sample(others, 1)) if talks and others and rng.random() < 0.4 else ()
            looks = tuple(rng.sample(others, 1)) if talks and others and rng.random() < 0.15 else ()
            steps.append(
                Step(
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


def _draw_early(rng: random.Random, steps: tuple[Step, ...], *, keeps_nothing: bool) -> tuple[Step, ...]:
    """Computes that are `@tg.stateless`, and how long computes await: long enough for others to begin."""
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
    """Channels only; what it begins with is what it has."""

    value: Any
    last_commit: int | None = None
    """The last epoch that `on_commit` was called with; -1: none yet; None: there is no `on_commit`."""

    def __init__(self, workload: Workload, recorder: Recorder) -> None:
        self._workload = workload
        self._recorder = recorder
        self._whim = workload.whims.getrandbits(32) if workload.whims is not None else None

    def setup(self) -> None:
        self.value = np.array([self._workload.first(self.task_id)], dtype=np.uint64)

    def compose(self, epoch: Any) -> None:
        self._compose(epoch)
        self._recorder.saw(epoch, int(self.value[0]))

    def _compose(self, epoch: Any) -> None:
        steps = self._workload.steps(epoch.number, self.task_id)
        self._recorder.composed(epoch, steps, self.last_commit)
        for step in steps:
            epoch.processor(
                functools.partial(self._compute(step), step),
                inbound={tag: list(producers) for tag, producers in step.inbound},
                outbound={tag: list(consumers) for tag, consumers in step.outbound},
                name=step.name,
                parallel=step.parallel,
            )

    def _compute(self, step: Step) -> Callable[..., Any]:
        if step.outbound:
            return self.wait if step.waits else self.run
        return self.slow_sync if step.waits else self.sync

    def _read(self, step: Step, ins: Any) -> dict[tuple[str, int], int]:
        return {
            (tag, producer): int(np.asarray(value).reshape(-1)[0])
            for tag, _ in step.inbound
            for producer, value in ins.all(tag).items()
        }

    def _value(self, step: Step, epoch: Any, consumed: dict[tuple[str, int], int]) -> int:
        work = self._workload
        if step.early:
            self._check_counts(epoch)
        self._recorder.ran(epoch, step, consumed)
        if not step.parallel:  # those share nothing
            epoch.scratch.trail = mix(getattr(epoch.scratch, "trail", 0), step.index)
        state = 0 if step.early else self._state(epoch)
        value = mix(work.seed, state, epoch.number, self.task_id, step.index, *consumed.values())
        return value ^ work.chaos.getrandbits(60) if self.task_id in work.erratic else value

    def _check_counts(self, epoch: Any) -> None:
        """A task in flight fails in epochs that come after the last one, and count for nothing."""
        if self.task_id in self._workload.flying and epoch.number >= self._workload.epochs:
            raise ArithmeticError(f"task {self.task_id} in epoch {epoch.number}, after the end")

    def _state(self, epoch: Any) -> int:
        state = int(self.value[0])
        self._recorder.saw(epoch, state)
        return state

    def _put(self, step: Step, epoch: Any, outs: Any, value: int) -> None:
        work = self._workload
        silent = self.task_id == work.moody and work.is_silent(epoch)
        for to in step.flags if not silent else ():
            self._recorder.flagged(epoch, to, mix(value, 7, to))
            epoch.flag(to, mix(value, 7, to))
        for tag, consumers in step.outbound:
            for to in consumers:
                item = mix(value, to)
                self._recorder.put(epoch, tag, to, item)
                outs.put(tag, np.full(4, item, dtype=np.uint64) if step.bulk else item, to=to)

    def run(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        self._put(step, epoch, outs, self._value(step, epoch, self._read(step, ins)))

    async def wait(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        value = self._value(step, epoch, self._read(step, ins))
        for to in step.looks:
            value = mix(value, await epoch.request(to, "look", value))
        for to in step.requests:
            ask = mix(value, to)
            answer = await epoch.request(to, "ask", ask)
            self._recorder.asked(epoch, to, ask, answer)
            value = mix(value, answer)
        if step.lasts_s:
            await asyncio.sleep(step.lasts_s)
            if not step.early:
                self._state(epoch)  # it is what it was
        self._put(step, epoch, outs, value)

    def sync(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        self._end(epoch, self._after(step, epoch, ins))

    async def slow_sync(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        after = self._after(step, epoch, ins)
        await asyncio.sleep(step.lasts_s)
        self._end(epoch, after)

    def _after(self, step: Step, epoch: Any, ins: Any) -> int:
        work, consumed = self._workload, self._read(step, ins)
        self._check_counts(epoch)
        self._recorder.ran(epoch, step, consumed)
        seen = mix(getattr(epoch.scratch, "heard", 0), getattr(epoch.scratch, "trail", 0))
        return work.next_state(self._state(epoch), epoch.number, self.task_id, seen, list(consumed.values()))

    def _end(self, epoch: Any, after: int) -> None:
        work = self._workload
        self.value[0] = after  # in place: a restored state must be the task's own
        self._recorder.ended(epoch, after)
        epoch.report(**{f"t{self.task_id}": reported(after)})
        if work.finishes and self.task_id == work.seed % work.tasks and self._is_last(epoch.number):
            self._recorder.finished(epoch)
            epoch.finish()

    def _is_last(self, epoch: int) -> bool:
        whim = self._whim is not None and mix(self._whim, epoch) % 3 == 0
        return whim or epoch + 1 == self._workload.epochs

    def result(self) -> Any:
        return int(self.value[0])


class _NoStateTalking(_NoState):
    """Flags and requests, too."""

    def compose(self, epoch: Any) -> None:
        super().compose(epoch)
        if self.task_id in (work := self._workload).opens:
            to, value = work.opening(epoch.number, self.task_id, int(self.value[0]))
            self._recorder.flagged(epoch, to, value)
            epoch.flag(to, value)

    def on_flag(self, epoch: Any, sender: int, meta: Any) -> None:
        relayed = isinstance(meta, list)
        self._heard(epoch, sender, meta[0] if relayed else meta, relays=not relayed)
        self._recorder.heard_flag(epoch, sender, meta[0] if relayed else meta)

    def _heard(self, epoch: Any, sender: int, value: int, *, relays: bool) -> None:
        epoch.scratch.heard = (getattr(epoch.scratch, "heard", 0) + mix(sender, value)) & _MASK
        if relays and self._workload.relays is not None:
            hold = epoch.hold("what follows from a message")
            if lasts_s := self._workload.lingers_s:
                asyncio.get_running_loop().call_later(lasts_s, self._relay, epoch, value, hold)
            else:
                self._relay(epoch, value, hold)

    def _relay(self, epoch: Any, value: int, hold: tg.Hold) -> None:
        to, relayed = self._workload.relay(self.task_id), mix(value, _RELAYED)
        if not epoch.cancelled:
            self._recorder.flagged(epoch, to, relayed)
            with contextlib.suppress(tg.GraphError):  # it fails the job by itself
                epoch.flag(to, [relayed])
        hold.release()

    @tg.handles("ask", pure=False)
    def ask(self, epoch: Any, sender: int, payload: Any) -> int:
        self._heard(epoch, sender, payload, relays=True)
        answer = mix(int(self.value[0]), payload, sender)
        self._recorder.handled(epoch, sender, payload, answer)
        return answer

    @tg.handles("look", pure=True)
    def look(self, epoch: Any, sender: int, payload: Any) -> int:
        return mix(int(self.value[0]), payload, 5)


class _Plain(_NoState, state=["value"]):
    """With a state."""


class _Talking(_NoStateTalking, state=["value"]):
    """With a state, flags and requests."""


class _Listening(_NoState):
    """A task with an `on_commit`."""

    last_commit = -1

    def on_commit(self, number: int, state: Any) -> None:
        self.last_commit = number
        self._recorder.on_committed(self.task_id, number, None if state is None else int(state["value"][0]))


class _ListeningPlain(_Listening, _Plain):
    """With a state."""


class _ListeningNoStateTalking(_Listening, _NoStateTalking):
    """Flags and requests, too."""


class _ListeningTalking(_Listening, _Talking):
    """With a state, flags and requests."""


class _FlyingNoState(_NoState):
    """Channels only, several epochs at a time."""

    @tg.stateless
    def compose(self, epoch: Any) -> None:
        self._compose(epoch)

    def _compute(self, step: Step) -> Callable[..., Any]:
        if not step.early:
            return super()._compute(step)
        if step.outbound:
            return self.early_wait if step.waits else self.early_run
        return self.early_slow_sync if step.waits else self.early_sync

    @tg.stateless
    def early_run(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        self.run(step, epoch, ins, outs)

    @tg.stateless
    async def early_wait(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        await self.wait(step, epoch, ins, outs)

    @tg.stateless
    def early_sync(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        self.sync(step, epoch, ins, outs)  # of a task that keeps nothing: its state is what `setup` made

    @tg.stateless
    async def early_slow_sync(self, step: Step, epoch: Any, ins: Any, outs: Any) -> None:
        await self.slow_sync(step, epoch, ins, outs)


class _Flying(_FlyingNoState, state=["value"]):
    """With a state."""


class _SteadyNoState(_FlyingNoState):
    """The same channels in every epoch: what `compose` declares stands for all of an attempt."""

    @tg.stateless
    def compose(self, epoch: Any) -> None:
        for at, step in enumerate(self._workload.steps(0, self.task_id)):
            epoch.processor(
                getattr(self, f"{self._compute(step).__name__}_{at}"),
                inbound={tag: list(producers) for tag, producers in step.inbound},
                outbound={tag: list(consumers) for tag, consumers in step.outbound},
                name=step.name,
                parallel=step.parallel,
            )

    def nth(self, at: int, epoch: Any) -> Step:
        """The step that is the task's `at`-th. Its computes are methods: what is made for one epoch never stands."""
        steps = self._workload.steps(0, self.task_id)
        self._recorder.began(epoch, steps)
        return steps[at]


def _mistaken(kind: type[_NoState], mistake: Mistake, *, stateful: bool) -> type[_NoState]:
    """A class of tasks one of whose methods may raise before it does anything."""
    name = mistake.where
    if name == "restore" and not stateful:
        return kind  # there is nothing to restore
    method = getattr(kind, name)

    @functools.wraps(method)
    def raises(self: _NoState, *given: Any) -> Any:
        mistake.made(name, self.task_id)
        return method(self, *given)

    return type(kind.__name__, (kind,), {name: tg.stateless(raises) if is_stateless(method) else raises})


def _hearing_slowly(kind: type[_NoState]) -> type[_NoState]:
    """A class of tasks whose `on_flag` awaits something before it does anything."""

    async def on_flag(self: Any, epoch: Any, sender: int, meta: Any) -> None:
        await asyncio.sleep(self._workload.hears_s)
        kind.on_flag(self, epoch, sender, meta)

    return type(kind.__name__, (kind,), {"on_flag": on_flag})


def _torn_down(kind: type[_NoState]) -> type[_NoState]:
    """A class of tasks with a `teardown`: whatever they tell of afterwards is a violation, and so is another one."""

    def teardown(self: Any) -> None:
        self._recorder.torn_down(self.task_id)
        self._recorder = _AfterTheEnd(self.task_id)

    return type(kind.__name__, (kind,), {"teardown": teardown})


class _AfterTheEnd:
    """A `Recorder` of an object that was torn down."""

    def __init__(self, task: int) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"code of task {self._task} ran after its teardown: {name}")


def _asking_on(kind: Any) -> type[_NoState]:
    """A class of tasks that ask another one before they answer; who is asked by them answers at once."""

    async def ask(self: Any, epoch: Any, sender: int, payload: Any) -> int:
        if isinstance(payload, list):
            return int(kind.ask(self, epoch, sender, payload[0]))
        work, state = self._workload, int(self.value[0])
        self._heard(epoch, sender, payload, relays=True)
        to, asked = work.asked_on(self.task_id), mix(payload, _ASKED_ON)
        answer = await epoch.request(to, "ask", [asked])
        self._recorder.asked(epoch, to, asked, answer)
        answer = mix(mix(state, payload, sender), answer)
        self._recorder.handled(epoch, sender, payload, answer)
        return answer

    return type(kind.__name__, (kind,), {"ask": ask})


def _compute_at(method: Callable[..., Any], at: int) -> Callable[..., Any]:
    """`method` for the `at`-th step of a task."""

    def compute(self: _SteadyNoState, epoch: Any, ins: Any, outs: Any) -> None:
        method(self, self.nth(at, epoch), epoch, ins, outs)

    async def wait(self: _SteadyNoState, epoch: Any, ins: Any, outs: Any) -> None:
        await method(self, self.nth(at, epoch), epoch, ins, outs)

    found = wait if inspect.iscoroutinefunction(method) else compute
    return tg.stateless(found) if is_stateless(method) else found


for _name in ("run", "wait", "sync", "slow_sync", "early_run", "early_wait", "early_sync", "early_slow_sync"):
    for _at in range(_STEPS):
        setattr(_SteadyNoState, f"{_name}_{_at}", _compute_at(getattr(_SteadyNoState, _name), _at))


class _Steady(_SteadyNoState, state=["value"]):
    """With a state."""


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
