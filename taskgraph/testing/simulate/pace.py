"""Delays that are no failures: slow steps of event loops, actors that come last for a while, a slow link; also the
clocks of hosts.

Each kind is drawn from its own generator and in some of the seeds only, so the other seeds do not depend on it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from taskgraph.protocol.messages import Answer, Item
from taskgraph.testing.simulate.drawing import Slips
from taskgraph.testing.simulate.loop import Clock
from taskgraph.testing.simulate.threads import Ends

__all__ = ["Clocks", "Memory", "Pace", "SlowLink", "Starving", "Steps"]

SLIPPING = 0.3
"""Share of the seeds with reads of etcd that are lost or late, or probes that take long."""

LOSING = 0.1
"""Share of the seeds with transactions that are lost, or reports."""

STEPPING = 0.15
"""Share of the seeds in which the loop of a node takes time for what it runs."""

ENDING = 0.2
"""Share of the seeds whose functions in threads run at any time before their end is heard of."""

SHORT = 0.1
"""Share of the seeds in which nodes have no memory for what they receive, for a while."""

STARVING = 0.2
"""Share of the seeds in which somebody comes last for a while."""

DRIFTING = 0.3
"""Share of the seeds whose hosts have clocks of their own."""

DRIFT = 0.02
"""How much faster or slower than time such a clock runs, at most."""

LINKING = 0.15
"""Share of the seeds in which the link between two nodes is slow, all the time."""

_AHEAD_S = 100_000.0
_SLOWER = (10.0, 100.0, 100.0)

_STEPS_S = (0.00001, 0.0001, 0.001, 0.004)
_LONG_STEPS = (0.0, 0.002, 0.02)
_LONG_STEP_S = 0.1

_CHANGES = (1, 1, 2, 3, 4, 6)
_EVENTS = (10.0, 10_000.0)
_LATE_S = (0.002, 1.0)
_FOR_S = (0.1, 6.0)


class Steps:
    """How long a step of a node's event loop takes.

    Code takes no virtual time of its own. So without this no message would arrive, and no node would be killed, between
    two steps that follow each other without a wait.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.drawn = rng.random() < share
        self._usual_s = rng.choice(_STEPS_S)
        self._long = rng.choice(_LONG_STEPS)

    def end(self) -> None:
        """Makes later steps take no time."""
        self.drawn = False

    def step_s(self) -> float:
        if not self.drawn:
            return 0.0
        rng = self._rng
        if rng.random() < self._long:
            return _LONG_STEP_S * rng.random()
        return self._usual_s * rng.random() ** 2


class Starving:
    """Actors that come last for a while: a node, a link, a kind of message, or etcd's answers to one node.

    After S. Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs" (ASPLOS 2010):
    delays that are drawn for each event alone hardly ever make one actor late for long, and many races need just that.
    So at a few events of a run, one actor of the event becomes the last one. It is late, but does not stand still: if
    all others waited for it, virtual time would pass and they would give up.

    Args:
        share: of the seeds that have this.
        now: the time.

    Attributes:
        on_last: called with the actor that comes last, how late it is, and for how long.
    """

    def __init__(self, rng: random.Random, *, share: float, now: Callable[[], float]) -> None:
        self._rng = rng
        self._now = now
        self.on_last: Callable[[str, float, float], None] = lambda name, late_s, for_s: None
        self._changes: list[int] = []
        if rng.random() < share:
            self._changes = sorted(int(_drawn(rng, _EVENTS)) for _ in range(rng.choice(_CHANGES)))
        self.drawn = bool(self._changes)
        self._events = 0
        self._last: dict[str, tuple[float, float]] = {}  # actor -> how late it is, and until when

    def end(self) -> None:
        """Makes no actor late from now on."""
        self._changes.clear()
        self._last.clear()

    def late_s(self, *of: str) -> float:
        """Returns the delay of an event, which belongs to several actors: a node, a link, a kind of message."""
        if not self._changes and not self._last:
            return 0.0
        self._events += 1
        if self._changes and self._events >= self._changes[0]:
            del self._changes[0]
            name, late_s, for_s = self._rng.choice(of), _drawn(self._rng, _LATE_S), _drawn(self._rng, _FOR_S)
            self._last[name] = (late_s, self._now() + for_s)
            self.on_last(name, late_s, for_s)
        return max(self._late_s(name) for name in of)

    def _late_s(self, name: str) -> float:
        late_s, until = self._last.get(name, (0.0, 0.0))
        if not late_s:
            return 0.0
        if until <= self._now():
            del self._last[name]
            return 0.0
        return late_s * self._rng.uniform(0.5, 1.0)


class Memory:
    """Nodes without memory for items or answers that they receive.

    Args:
        share: of the seeds that have this.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.drawn = rng.random() < share
        self._share = rng.choice((0.1, 0.5, 1.0))  # of what comes
        self._names = {f"n{rng.randint(1, 3)}" for _ in range(3)}
        self._from = rng.choice((0, 0, 1, 3))  # an epoch

    def end(self) -> None:
        """Gives all nodes memory from now on."""
        self.drawn = False

    def lacks(self, node: str, message: object) -> bool:
        """True if `node` has no memory for a message that arrives there."""
        if not self.drawn or not isinstance(message, Item | Answer):
            return False
        if message.stamp.epoch < self._from:
            return False
        return node.rpartition("-")[0] in self._names and self._rng.random() < self._share


class Clocks:
    """The monotonic clocks of hosts, each with its own start and rate.

    Args:
        share: of the seeds that have this; in the others all clocks are one.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.drift = rng.choice((0.001, DRIFT, DRIFT)) if rng.random() < share else 0.0
        self._of: dict[str, Clock] = {}

    def of(self, host: str) -> Clock:
        if self.drift and host not in self._of:
            rate = 1.0 + self._rng.choice((-1.0, 1.0, self._rng.uniform(-1.0, 1.0))) * self.drift
            self._of[host] = Clock(rate, _AHEAD_S * self._rng.random())
        return self._of.get(host, Clock())


class SlowLink:
    """One link, between two names of nodes, that is slower than the others in both directions.

    Args:
        share: of the seeds that have this.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self.drawn = rng.random() < share
        self._ends = {f"n{number}" for number in rng.sample(range(1, 5), 2)}
        self._slower = rng.choice(_SLOWER)

    def delay_s(self, one: str, other: str, usual_s: float, connect_s: float) -> float:
        """Returns how long a message takes on a link; never too long for a connection to be made."""
        if not self.drawn or {one.rpartition("-")[0], other.rpartition("-")[0]} != self._ends:
            return usual_s
        return max(usual_s, min(self._slower * usual_s, connect_s / 5))


@dataclass
class Pace:
    """All delays of one seed."""

    slips: Slips
    steps: Steps
    ends: Ends
    starving: Starving
    memory: Memory
    clocks: Clocks
    links: SlowLink

    @classmethod
    def draw(cls, seed: int, now: Callable[[], float]) -> Pace:
        def of(what: str) -> random.Random:
            return random.Random(f"{what} of {seed}")

        slips = Slips(
            of("reads and probes"), share=SLIPPING, writes=of("transactions and reports"), writes_share=LOSING
        )
        steps, ends = Steps(of("steps"), share=STEPPING), Ends(of("ends"), share=ENDING)
        memory = Memory(of("memory"), share=SHORT)
        starving = Starving(of("who comes last"), share=STARVING, now=now)
        clocks, links = Clocks(of("clocks"), share=DRIFTING), SlowLink(of("links"), share=LINKING)
        return cls(slips, steps, ends, starving, memory, clocks, links)

    @classmethod
    def none(cls) -> Pace:
        """Returns a pace without any delay."""
        rng = random.Random(0)
        slips, steps = Slips(rng, share=0.0, writes=rng, writes_share=0.0), Steps(rng, share=0.0)
        starving = Starving(rng, share=0.0, now=lambda: 0.0)
        clocks, links = Clocks(rng, share=0.0), SlowLink(rng, share=0.0)
        return cls(slips, steps, Ends(rng, share=0.0), starving, Memory(rng, share=0.0), clocks, links)

    @property
    def has(self) -> dict[str, bool]:
        """Names the kinds of delays that the seed has."""
        return {
            "slow probes or reads": self.slips.drawn,
            "lost transactions or reports": self.slips.loses,
            "steps that take time": self.steps.drawn,
            "functions that end at any time": self.ends.drawn,
            "somebody who comes last": self.starving.drawn,
            "nodes without memory": self.memory.drawn,
            "clocks that drift": self.clocks.drift > 0,
            "a slow link": self.links.drawn,
        }

    def end(self) -> None:
        self.slips.end()
        self.steps.end()
        self.ends.end()
        self.starving.end()
        self.memory.end()


def _drawn(rng: random.Random, between: tuple[float, float]) -> float:
    """Draws a number whose logarithm is uniform."""
    low, high = between
    return low * math.exp(rng.random() * math.log(high / low))
