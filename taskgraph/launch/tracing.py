"""Tracing a running job: the spans of all its nodes, and what their clocks say, gathered while it runs.

Nothing but moving bytes is done meanwhile, since the tool may share the cores with what it looks at: what a node tells
is spooled to a file as it came, and read when tracing is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import JobError, PeerLost, TaskGraphError, Unavailable
from taskgraph.launch.follow import client_of
from taskgraph.network.tls import Tls
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.clocks import ClockReading
from taskgraph.observe.control_client import ControlClient, TraceCall
from taskgraph.observe.trace import Span
from taskgraph.observe.trace_chunks import Unpacker
from taskgraph.protocol.records import NodeRecord
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import alongside, any_done

__all__ = ["NodeTrace", "Tracer", "every_of", "words_of"]

_READINGS = 16
"""Round trips for one look at a node's clock: the shortest counts."""
_LEFT_S = 2.0
"""A node whose key is gone has this long for its last spans."""
_SAY_S = 5.0
_FIRST_S = 10.0
"""Nodes that do not begin to tell within this time do not keep the others from being traced."""
_RATE_S = 0.3
"""So long we look how fast the job is."""
_AT_ONCE_S = 1.0
"""A trace that is over within such a while takes every epoch: what the job loses meanwhile is milliseconds."""
_TRACED = 1_000
"""Epochs of replicas that are traced in a second on one host, where nobody says how many: each takes 15 to 20 us."""
_LENGTH = struct.Struct("<I")


@dataclass
class NodeTrace:
    """One node's part of a trace.

    Attributes:
        spools: what it told, chunk after chunk: one for each time it was followed.
        readings: of its clock: the best of several at the beginning, and of several at the end.
        epoch: the one it was at when it was heard last; -1: none.
        untraced: the latest that its tasks had begun before it told anything; -1: none.
        lost: spans it left out, since it made more than it may keep.
        missing: what else is not here, and why; "": nothing.
        away: it was given up since its key was gone; it is followed again when that is back.
    """

    node: str
    record: NodeRecord
    spools: list[Path] = field(default_factory=list)
    readings: list[ClockReading] = field(default_factory=list)
    epoch: int = -1
    untraced: int = -1
    lost: int = 0
    missing: str = ""
    away: bool = False

    def spans(self) -> Iterator[Span]:
        """In the order they ended. Raises DecodeError."""
        for spool in self.spools:
            unpacker = Unpacker()
            with spool.open("rb") as file:
                while head := file.read(_LENGTH.size):
                    (size,) = _LENGTH.unpack(head)
                    yield from unpacker.unpack(pb.TraceChunk.FromString(file.read(size)))


class Tracer:
    """Traces a number of epochs of one running job.

    Args:
        run: the job's run, as its spec says.
        folder: for what nodes tell, until it is written where it belongs.
        epochs: how many.
        every: trace one epoch of so many; 0: all, where the job takes less than 3 % longer for it or the trace is
            over within a second, else as many as come to that.
        total: how many the job has; None: it is not known.
        say: told which epochs are traced, and every few seconds what is waited for.

    Attributes:
        nodes: by id, in the order they were found.
        first: epochs from here on and before `until` are traced; -1: not known yet.
        every: those of them that this divides; 0: not known yet.
    """

    def __init__(
        self,
        keeper: ViewKeeper,
        run: str,
        token: bytes,
        tls: Tls | None,
        folder: Path,
        *,
        epochs: int,
        every: int,
        total: int | None = None,
        say: Callable[[str], None],
    ) -> None:
        self.nodes: dict[str, NodeTrace] = {}
        self.first = self.until = -1
        self._keeper = keeper
        self._run = run
        self._token = token
        self._tls = tls
        self._folder = folder
        self._epochs = epochs
        self.every = every
        self._total = total
        self._say = say
        self._spooled = 0
        self._follows: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[str, asyncio.Event] = {}
        self._window = asyncio.Event()
        self._enough = asyncio.Event()

    async def run(self) -> None:
        """Returns when every node has told its part, or cannot any more.

        Raises:
            JobError: the job does not run, or none of its nodes can be traced.
        """
        view = self._keeper.view
        if not view.running:
            raise JobError(f"the job does not run ({_state(view)}): only a running job can be traced")
        if not self.every:
            self.every = await self._find_every()
        async with asyncio.TaskGroup() as group:

            def look() -> None:
                if self._enough.is_set():
                    return
                for node, record in view.live_nodes(self._run).items():
                    trace = self.nodes.get(node)
                    if trace is None:
                        trace = self._found(node, record)
                    elif not trace.away or not self._follows[node].done():
                        continue
                    self._follows[node] = group.create_task(self._follow(trace))

            stop = self._keeper.on_change(look, structure=True)
            saying = group.create_task(self._tell())
            try:
                look()
                await self._choose()
                while still := [follow for follow in self._follows.values() if not follow.done()]:
                    await asyncio.wait(still)
            finally:
                stop()
                saying.cancel()

    def enough(self) -> None:
        """Ends early: nodes tell what they have, and that is all."""
        self._enough.set()
        self._keeper.notify_later()  # who waits for nodes to come back

    @property
    def ended_early(self) -> bool:
        """Whether `enough` was said."""
        return self._enough.is_set()

    @property
    def epoch(self) -> int:
        """The epoch the job is at, as its nodes tell it, and etcd."""
        told = [trace.epoch for trace in self.nodes.values()]
        return max(*told, self._keeper.view.stamp.epoch if self._keeper.view.stamp is not None else -1, -1)

    def _found(self, node: str, record: NodeRecord) -> NodeTrace:
        self.nodes[node] = trace = NodeTrace(node, record)
        self._heard[node] = asyncio.Event()
        if self.first >= 0:
            trace.missing = f"it joined at epoch {self.epoch}: what it did before"
        return trace

    @property
    def window(self) -> str:
        """Which epochs are traced, in words."""
        return f"epochs {self.first} to {self.until - 1}{words_of(self.every)}"

    async def _find_every(self) -> int:
        """Looks how fast the job is, and how many of its epochs that leaves to be traced."""
        rate, view = await self._rate(), self._keeper.view
        hosts = len({record.host for record in view.live_nodes(self._run).values()})
        replicas = sum(len(members) for members in view.members.values())
        return every_of(self._epochs, rate, replicas, hosts)

    async def _rate(self) -> float:
        """Epochs per second."""
        seen = []
        for wait_s in (_RATE_S, 0.0):
            await self._keeper.load()
            stamp = self._keeper.view.stamp
            seen.append((time.monotonic(), stamp.epoch if stamp is not None else 0))
            await asyncio.sleep(wait_s)
        (began, first), (ended, last) = seen
        return max(last - first, 0) / (ended - began)

    async def _choose(self) -> None:
        """Chooses the epochs: from the first that begins while all nodes that can be traced are."""
        async with alongside(*(heard.wait() for heard in self._heard.values())) as waits:
            if waits:
                await asyncio.wait(waits, timeout=_FIRST_S)
        told = [trace for trace in self.nodes.values() if trace.readings and not self._follows[trace.node].done()]
        if not told:
            why = "; ".join(trace.missing for trace in self.nodes.values()) or "it has none at the moment"
            raise JobError(f"none of the job's nodes can be traced: {why}")
        after, every = max(trace.untraced for trace in told) + 1, self.every
        first = -(-after // every) * every
        until = first + (self._epochs - 1) * every + 1
        if self._total is not None:
            if first >= self._total:
                which = f" that {every} divides" if after < self._total else ""
                what = f"every one of the job's {self._total}{which} has begun already on some node"
                raise JobError(f"no epoch is left to be traced: {what}")
            until = min(until, self._total)
        self.first, self.until = first, until
        self._say(f"tracing {self.window} on {len(told)} nodes")
        self._window.set()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_SAY_S)
            open_nodes = [self.nodes[n].record.name for n, follow in self._follows.items() if not follow.done()]
            what = self.window if self._window.is_set() else "nothing yet"
            self._say(f"tracing {what}: the job is at epoch {self.epoch}; waiting for {', '.join(sorted(open_nodes))}")

    # -- one node ---------------------------------------------------------------------------------

    async def _follow(self, trace: NodeTrace) -> None:
        """Everything about one node; what goes wrong is named in its part."""
        was_away = trace.away
        try:
            async with client_of(trace.record, self._token, self._tls) as client:
                await _read_clock(client, trace)
                async with client.trace(self.every) as call:
                    await self._gather(call, trace)
                with contextlib.suppress(TaskGraphError):  # it told all: at the end of a job it is gone at once
                    await _read_clock(client, trace)
        except TaskGraphError as error:
            if trace.epoch >= self.until > 0:
                return  # it told all that was asked for
            if was_away and trace.away:
                return  # it is named as that already
            after = f"what it did from epoch {trace.epoch} on" if trace.epoch >= 0 else "all it did"
            trace.missing = f"{trace.missing}; and {after}: {error}" if trace.missing else f"{after}: {error}"
        finally:
            self._heard[trace.node].set()

    async def _gather(self, call: TraceCall, trace: NodeTrace) -> None:
        async with alongside(self._take(call, trace), self._gone(trace), self._steer(call)) as (taking, gone, _):
            await any_done(taking, gone)
            (taking if taking.done() else gone).result()

    async def _take(self, call: TraceCall, trace: NodeTrace) -> None:
        """Spools what the node tells, until it says that this was all."""
        trace.spools.append(self._folder / f"{self._spooled}.spool")
        self._spooled += 1
        with trace.spools[-1].open("wb") as file:
            begun = False
            while (chunk := await call.next()) is not None:
                if not begun:
                    begun, trace.untraced = True, chunk.epoch
                    if trace.away:
                        trace.away = False
                        trace.missing += f"; it came back at epoch {chunk.epoch}"
                trace.epoch = chunk.epoch
                trace.lost += chunk.lost
                _spool(file, chunk)
                self._heard[trace.node].set()
                if chunk.over:
                    if trace.epoch < self.until and not self._enough.is_set() and await self._runs():
                        trace.missing = f"it left at epoch {trace.epoch}: what others did for it since"
                    return
        raise PeerLost(f"node {trace.record.name} ended without a last word")

    async def _runs(self) -> bool:
        """Whether the job still runs: a node that ended with it may have heard of that before we did."""
        if self._keeper.view.running:
            with contextlib.suppress(Unavailable):
                await self._keeper.load()
        return self._keeper.view.running

    async def _steer(self, call: TraceCall) -> None:
        await self._window.wait()
        await call.until(self.until)
        await self._enough.wait()
        await call.enough()

    async def _gone(self, trace: NodeTrace) -> None:
        """Raises where the node is gone by the view, which a frozen process does not tell.

        Where all of them are, it was etcd that stood still: they come back, or the job ends.
        """

        def gone(view: JobView) -> bool:
            live = view.live_nodes(self._run)
            return trace.node not in live and (bool(live) or not view.running or self._enough.is_set())

        while True:
            await self._keeper.wait_until(gone, structure=True)
            await asyncio.sleep(_LEFT_S)
            if gone(self._keeper.view):
                break
        trace.away = True
        raise PeerLost(f"the lease of node {trace.record.name} ended")


def every_of(epochs: int, rate: float, replicas: int, hosts: int) -> int:
    """One epoch of how many is traced, so that the job hardly notices.

    Args:
        epochs: to be traced.
        rate: the job's, per second.
        replicas: of all its tasks.
        hosts: that they are on.
    """
    if epochs <= rate * _AT_ONCE_S:
        return 1
    return max(1, math.ceil(rate * replicas / (_TRACED * max(hosts, 1))))


def words_of(every: int) -> str:
    """Which of a range of epochs."""
    return f", one of {every}" if every > 1 else ""


def _spool(file: BinaryIO, chunk: pb.TraceChunk) -> None:
    data = chunk.SerializeToString()
    file.write(_LENGTH.pack(len(data)) + data)


async def _read_clock(client: ControlClient, trace: NodeTrace) -> None:
    """The shortest of several round trips: it was disturbed least."""
    trace.readings.append(min([await client.clock() for _ in range(_READINGS)], key=lambda r: r.within_ns))


def _state(view: JobView) -> str:
    status = view.status
    return status.record.state + (f": {status.record.reason}" if status.record.reason else "") if status else "deleted"
