"""Delays that are not failures: slow steps of event loops, slow actors, a slow link. Also the clocks of hosts, and
nodes without memory.

Each kind has its own random generator and occurs in some seeds only, so the other seeds do not depend on it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from taskgraph.protocol.messages import Answer, Item
from taskgraph.testing.simulate.drawing import CallFaults
from taskgraph.testing.simulate.loop import HostClock
from taskgraph.testing.simulate.threads import FunctionTiming

__all__ = ["HostClocks", "MemoryShortage", "Pace", "SlowActors", "SlowLink", "StepTimes"]

LOST_READS_SHARE = 0.3
"""Share of the seeds with lost or late reads of etcd, or slow probes."""

LOST_WRITES_SHARE = 0.1
"""Share of the seeds with lost transactions or reports."""

STEP_TIMES_SHARE = 0.15
"""Share of the seeds in which the steps of a node's event loop take time."""

FUNCTION_TIMING_SHARE = 0.2
"""Share of the seeds whose functions in threads run at any moment of their duration."""

MEMORY_SHORTAGE_SHARE = 0.1
"""Share of the seeds in which nodes have no memory for received messages, for a while."""

SLOW_ACTORS_SHARE = 0.2
"""Share of the seeds with slow actors."""

CLOCK_DRIFT_SHARE = 0.3
"""Share of the seeds in which each host has another clock."""

MAX_CLOCK_DRIFT = 0.02
"""The largest relative error of such a clock's rate."""

SLOW_LINK_SHARE = 0.15
"""Share of the seeds in which the link between two nodes is always slow."""

_MAX_CLOCK_OFFSET_S = 100_000.0
_LINK_SLOWDOWNS = (10.0, 100.0, 100.0)

_STEP_TIMES_S = (0.00001, 0.0001, 0.001, 0.004)
_LONG_STEP_SHARES = (0.0, 0.002, 0.02)
_LONG_STEP_S = 0.1

_SLOW_ACTOR_COUNTS = (1, 1, 2, 3, 4, 6)
_EVENT_NUMBERS = (10.0, 10_000.0)
_ACTOR_DELAYS_S = (0.002, 1.0)
_ACTOR_DURATIONS_S = (0.1, 6.0)


class StepTimes:
    """Draws how long each step of a node's event loop takes.

    Code takes no virtual time. So without these durations no message would arrive, and no node would be killed, between
    two steps that follow each other without a wait.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.active = rng.random() < share
        self._usual_step_s = rng.choice(_STEP_TIMES_S)
        self._long_share = rng.choice(_LONG_STEP_SHARES)

    def end(self) -> None:
        """Makes steps take no time from now on."""
        self.active = False

    def step_s(self) -> float:
        if not self.active:
            return 0.0
        rng = self._rng
        if rng.random() < self._long_share:
            return _LONG_STEP_S * rng.random()
        return self._usual_step_s * rng.random() ** 2


class SlowActors:
    """Makes a few actors slow for a while: a node, a link, a kind of message, or etcd's answers to one node.

    After S. Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs" (ASPLOS 2010):
    delays that are drawn for each event alone hardly ever make one actor late for long, as many races need. So at a few
    events of a run, one actor of the event becomes slow. It does not stop: if all others waited for a stopped actor,
    virtual time would pass until their timeouts.

    Args:
        share: share of the seeds with slow actors.
        now: returns the time.

    Attributes:
        on_slow: called with the name of an actor that becomes slow, its largest delay, and for how long.
    """

    def __init__(self, rng: random.Random, *, share: float, now: Callable[[], float]) -> None:
        self._rng = rng
        self._now = now
        self.on_slow: Callable[[str, float, float], None] = lambda name, late_s, for_s: None
        self._next_changes: list[int] = []
        if rng.random() < share:
            self._next_changes = sorted(
                int(_draw_log_uniform(rng, _EVENT_NUMBERS)) for _ in range(rng.choice(_SLOW_ACTOR_COUNTS))
            )
        self.active = bool(self._next_changes)
        self._events = 0
        self._slow: dict[str, tuple[float, float]] = {}  # actor -> its largest delay, and until when

    def end(self) -> None:
        """Ends all delays, and makes no more actors slow."""
        self._next_changes.clear()
        self._slow.clear()

    def late_s(self, *actors: str) -> float:
        """Draws the delay of an event of these actors (nodes, links, ...), mostly 0.0. May make one of them slow."""
        if not self._next_changes and not self._slow:
            return 0.0
        self._events += 1
        if self._next_changes and self._events >= self._next_changes[0]:
            del self._next_changes[0]
            name, late_s = self._rng.choice(actors), _draw_log_uniform(self._rng, _ACTOR_DELAYS_S)
            for_s = _draw_log_uniform(self._rng, _ACTOR_DURATIONS_S)
            self._slow[name] = (late_s, self._now() + for_s)
            self.on_slow(name, late_s, for_s)
        return max(self._actor_late_s(name) for name in actors)

    def _actor_late_s(self, name: str) -> float:
        """Draws the delay of an event by one slow actor; 0 if that actor is not slow, or no longer."""
        late_s, until = self._slow.get(name, (0.0, 0.0))
        if not late_s:
            return 0.0
        if until <= self._now():
            del self._slow[name]
            return 0.0
        return late_s * self._rng.uniform(0.5, 1.0)


class MemoryShortage:
    """Draws which nodes have no memory for items or answers that they receive.

    Args:
        share: share of the seeds with such nodes.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.active = rng.random() < share
        self._share = rng.choice((0.1, 0.5, 1.0))  # of the messages that arrive
        self._names = {f"n{rng.randint(1, 3)}" for _ in range(3)}
        self._first_epoch = rng.choice((0, 0, 1, 3))  # no shortage before this epoch

    def end(self) -> None:
        """Gives all nodes memory from now on."""
        self.active = False

    def draw_shortage(self, node: str, message: object) -> bool:
        """Draws whether `node` has no memory for a message that it receives."""
        if not self.active or not isinstance(message, Item | Answer):
            return False
        if message.stamp.epoch < self._first_epoch:
            return False
        return node.rpartition("-")[0] in self._names and self._rng.random() < self._share


class HostClocks:
    """Draws the monotonic clocks of hosts, each with its own start and rate.

    Args:
        share: share of the seeds with such clocks; otherwise all hosts have the same clock.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.drift = rng.choice((0.001, MAX_CLOCK_DRIFT, MAX_CLOCK_DRIFT)) if rng.random() < share else 0.0
        self._by_host: dict[str, HostClock] = {}

    def clock_of(self, host: str) -> HostClock:
        """Returns the clock of a host, always the same one."""
        if self.drift and host not in self._by_host:
            rate = 1.0 + self._rng.choice((-1.0, 1.0, self._rng.uniform(-1.0, 1.0))) * self.drift
            self._by_host[host] = HostClock(rate, _MAX_CLOCK_OFFSET_S * self._rng.random())
        return self._by_host.get(host, HostClock())


class SlowLink:
    """One link, between two node names, that is slower than the others in both directions.

    Args:
        share: share of the seeds with a slow link.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self.active = rng.random() < share
        self._ends = {f"n{number}" for number in rng.sample(range(1, 5), 2)}
        self._slowdown = rng.choice(_LINK_SLOWDOWNS)

    def delay_s(self, one: str, other: str, usual_s: float, connect_s: float) -> float:
        """Returns the delay of a message between two nodes: `usual_s`, or longer on the slow link.

        It is short enough that connections succeed within `connect_s`.
        """
        if not self.active or {one.rpartition("-")[0], other.rpartition("-")[0]} != self._ends:
            return usual_s
        return max(usual_s, min(self._slowdown * usual_s, connect_s / 5))


@dataclass
class Pace:
    """All delays of one seed that are not failures."""

    call_faults: CallFaults
    step_times: StepTimes
    timing: FunctionTiming
    slow_actors: SlowActors
    memory_shortage: MemoryShortage
    host_clocks: HostClocks
    slow_link: SlowLink

    @classmethod
    def draw(cls, seed: int, now: Callable[[], float]) -> Pace:
        def rng_for(what: str) -> random.Random:
            return random.Random(f"{what} of {seed}")

        call_faults = CallFaults(
            rng_for("reads and probes"),
            share=LOST_READS_SHARE,
            writes=rng_for("transactions and reports"),
            writes_share=LOST_WRITES_SHARE,
        )
        return cls(
            call_faults,
            StepTimes(rng_for("steps"), share=STEP_TIMES_SHARE),
            FunctionTiming(rng_for("ends"), share=FUNCTION_TIMING_SHARE),
            SlowActors(rng_for("who comes last"), share=SLOW_ACTORS_SHARE, now=now),
            MemoryShortage(rng_for("memory"), share=MEMORY_SHORTAGE_SHARE),
            HostClocks(rng_for("clocks"), share=CLOCK_DRIFT_SHARE),
            SlowLink(rng_for("links"), share=SLOW_LINK_SHARE),
        )

    @classmethod
    def none(cls) -> Pace:
        """Returns a pace that adds no delays to the usual ones."""
        rng = random.Random(0)
        call_faults, steps = CallFaults(rng, share=0.0, writes=rng, writes_share=0.0), StepTimes(rng, share=0.0)
        slow_actors, timing = SlowActors(rng, share=0.0, now=lambda: 0.0), FunctionTiming(rng, share=0.0)
        memory, clocks, link = MemoryShortage(rng, share=0.0), HostClocks(rng, share=0.0), SlowLink(rng, share=0.0)
        return cls(call_faults, steps, timing, slow_actors, memory, clocks, link)

    @property
    def kinds(self) -> dict[str, bool]:
        """Kind of delay, as a seed's description names it -> whether this seed has delays of the kind."""
        return {
            "slow probes or reads": self.call_faults.active,
            "lost transactions or reports": self.call_faults.loses_writes,
            "steps that take time": self.step_times.active,
            "functions that end at any time": self.timing.active,
            "somebody who comes last": self.slow_actors.active,
            "nodes without memory": self.memory_shortage.active,
            "clocks that drift": self.host_clocks.drift > 0,
            "a slow link": self.slow_link.active,
        }

    def end(self) -> None:
        """Ends all delays but those of the slow link. Clocks keep their rates."""
        self.call_faults.end()
        self.step_times.end()
        self.timing.end()
        self.slow_actors.end()
        self.memory_shortage.end()


def _draw_log_uniform(rng: random.Random, between: tuple[float, float]) -> float:
    """Draws a number between two others; its logarithm is uniformly distributed."""
    low, high = between
    return low * math.exp(rng.random() * math.log(high / low))
