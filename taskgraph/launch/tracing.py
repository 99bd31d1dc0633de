"""Tracing a running job: collects the spans of its nodes while it runs.

The tool may share its cores with the job, so spans stay as they came until the trace is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator

import msgspec

from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import DecodeError, JobError, PeerLost, TaskGraphError, Unavailable
from taskgraph.launch.follow import client_of
from taskgraph.network.tls import Tls
from taskgraph.observe.control_client import ClockReading
from taskgraph.observe.trace import Span
from taskgraph.protocol.records import NodeRecord
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import cancel_and_wait
from taskgraph.transport.endpoints import host_key

__all__ = ["NodeTrace", "Tracer", "every_text", "trace_interval"]

_READINGS = 16
"""Round trips to a node's clock: the shortest counts."""
_LEFT_S = 2.0
"""How long the trace waits for a node that does not answer, once it has all of another one."""
_MOST_BYTES = 1 << 30
"""Spans to keep in memory: 14 million. Perfetto opens no file as long as these make."""
_LOOK_S = 0.2
_SAY_S = 5.0
_FIRST_S = 10.0
"""How long the trace waits for nodes that do not begin to trace, before it chooses epochs without them."""
_FIRST_LOOK_S = 0.02
_RATE_S = 0.3
"""How long to measure the job's rate."""
_AT_ONCE_S = 1.0
"""A trace this short takes every epoch: it costs the job milliseconds."""
_TRACED = 1_000
"""Epochs of replicas to trace in a second on one host, where the user does not choose: each takes 15 to 20 us."""


class NodeTrace:
    """One node's part of a trace.

    Attributes:
        clock: the shortest reading of the node's clock; None: the node never answered.
        shared: the node has our clock, since it is on this host.
        heard: the node has confirmed that it traces.
        epoch: the last epoch that the node reported; -1: none.
        chunks: the spans, as the node sent them.
        lost: how many spans did not fit into the node's buffer.
        missing: what the trace lacks of this node, and why; "": nothing.
        whole: the trace has all that it wants of this node.
    """

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.clock: ClockReading | None = None
        self.shared = False
        self.heard = False
        self.epoch = -1
        self.lost = 0
        self.missing = ""
        self.whole = False
        self.chunks: list[bytes] = []

    def spans(self) -> Iterator[Span]:
        """Yields all spans, in the order in which they ended. Raises DecodeError if the node sent others."""
        decoder = msgspec.json.Decoder(list[Span])
        try:
            for chunk in self.chunks:
                yield from decoder.decode(chunk)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"node {self.record.name} sent spans that cannot be read: {error}") from None


class Tracer:
    """Traces some epochs of one running job.

    Of an elastic job, steps take the place of epochs.

    Args:
        run: the job's run, as its spec says.
        epochs: how many epochs.
        every: traces the epochs that this number divides; 0: every epoch, or so few that the job loses less than 3 %.
        total: how many epochs the job has; None: it is not known.
        say: gets the epochs that are traced, and every few seconds what the trace waits for.

    Attributes:
        nodes: by id, in the order they were found.
        first: epochs from here on and before `until` are traced; -1: not chosen yet.
    """

    def __init__(
        self,
        keeper: ViewKeeper,
        run: str,
        token: bytes,
        tls: Tls | None,
        *,
        epochs: int,
        every: int,
        total: int | None = None,
        say: Callable[[str], None],
    ) -> None:
        self.nodes: dict[str, NodeTrace] = {}
        self.first = self.until = -1
        self.every = every
        self.ended_early = False
        self._keeper = keeper
        self._run = run
        self._token = token
        self._tls = tls
        self._epochs = epochs
        self._total = total
        self._say = say
        self._bytes = 0
        self._follows: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Traces the job's nodes; returns once every node has sent its part, or was given up.

        Raises:
            JobError: the job does not run, or none of its nodes can be traced.
        """
        view = self._keeper.view
        if not view.running:
            raise JobError(f"the job does not run ({_state_text(view)}): only a running job can be traced")
        if not self.every:
            self.every = await self._choose_interval()
        stop = self._keeper.on_change(self._trace_new_nodes, structure=True)
        try:
            self._trace_new_nodes()
            await self._choose_epochs()
            await self._wait_for_all()
        finally:
            stop()
            await cancel_and_wait(*self._follows.values())

    def end_early(self) -> None:
        """Ends the trace early: nodes send the spans that they have."""
        self.ended_early = True

    @property
    def epoch(self) -> int:
        """The epoch the job is at, by its nodes and by etcd, or the step that its workers are at."""
        stamp = None if self.elastic else self._keeper.view.stamp
        return max(-1, stamp.epoch if stamp is not None else -1, *(trace.epoch for trace in self.nodes.values()))

    @property
    def elastic(self) -> bool:
        """True if the job has steps in place of epochs."""
        return self._keeper.view.workers is not None

    @property
    def unit(self) -> str:
        return "step" if self.elastic else "epoch"

    @property
    def range_text(self) -> str:
        """The traced epochs as text: `epochs 30 to 50, one of 5`."""
        return f"{self.unit}s {self.first} to {self.until - 1}{every_text(self.every)}"

    def _trace_new_nodes(self) -> None:
        """Begins to trace the nodes that have joined since the last call."""
        if self.ended_early:
            return
        for node, record in self._keeper.view.live_nodes(self._run).items():
            if node not in self.nodes:
                trace = self.nodes[node] = NodeTrace(record)
                if self.first >= 0:
                    trace.missing = f"it joined at {self.unit} {self.epoch}: what it did before"
                self._follows[node] = asyncio.ensure_future(self._take_spans(trace))

    async def _choose_interval(self) -> int:
        """Measures the job's epochs per second, and returns n: one epoch in n is traced."""
        seen = []
        for wait_s in (_RATE_S, 0.0):
            await self._keeper.load()
            stamp = self._keeper.view.stamp
            seen.append((time.monotonic(), stamp.epoch if stamp is not None else 0))
            await asyncio.sleep(wait_s)
        (began, first), (now, last) = seen
        view = self._keeper.view
        hosts = len({record.host for record in view.live_nodes(self._run).values()})
        replicas = sum(len(members) for members in view.members.values())
        return trace_interval(self._epochs, max(last - first, 0) / (now - began), replicas, hosts)

    async def _choose_epochs(self) -> None:
        """Chooses the epochs: from the first that no node had begun before it was traced. JobError: none is left."""
        give_up_at = time.monotonic() + _FIRST_S
        while time.monotonic() < give_up_at and not all(  # noqa: ASYNC110 (a join may add a node at any time)
            self.nodes[node].heard or follow.done() for node, follow in self._follows.items()
        ):
            await asyncio.sleep(_FIRST_LOOK_S)
        heard = [trace for trace in self.nodes.values() if trace.heard and not trace.missing]
        if not heard:
            why = "; ".join(trace.missing for trace in self.nodes.values()) or "it has none at the moment"
            raise JobError(f"none of the job's nodes can be traced: {why}")
        after, every = max(trace.epoch for trace in heard) + 1, self.every
        first = -(-after // every) * every
        until = first + (self._epochs - 1) * every + 1
        if self._total is not None:
            if first >= self._total:
                which = f" that {every} divides" if after < self._total else ""
                what = f"every one of the job's {self._total}{which} has begun already on some node"
                raise JobError(f"no epoch is left to be traced: {what}")
            until = min(until, self._total)
        self.first, self.until = first, until
        self._say(f"tracing {self.range_text} on {len(heard)} nodes")

    async def _wait_for_all(self) -> None:
        """Waits until every node has sent its part. Gives up the rest `_LEFT_S` after the first node is done.

        Also `_LEFT_S` after the end of the job, or after `end_early`.
        """
        said, say_at, give_up_at = "", time.monotonic() + _SAY_S, math.inf
        while waiting := {n: follow for n, follow in self._follows.items() if not follow.done()}:
            await asyncio.wait(waiting.values(), timeout=_LOOK_S)
            now = time.monotonic()
            if self.ended_early or not self._keeper.view.running or any(t.whole for t in self.nodes.values()):
                give_up_at = min(give_up_at, now + _LEFT_S)
            if now >= give_up_at:
                await cancel_and_wait(*waiting.values())
                for node in waiting:
                    self._note_missing(self.nodes[node], "it does not answer")
            elif now >= say_at:
                names = ", ".join(sorted(self.nodes[node].record.name for node in waiting))
                if names != said:
                    self._say(f"tracing {self.range_text}: the job is at {self.unit} {self.epoch}; waiting for {names}")
                said, say_at = names, now + _SAY_S
        for follow in self._follows.values():
            if not follow.cancelled():
                follow.result()

    async def _take_spans(self, trace: NodeTrace) -> None:
        """Takes one node's spans until it has all that the trace wants, or the node ends."""
        try:
            async with client_of(trace.record, self._token, self._tls) as client:
                trace.clock = min([await client.clock() for _ in range(_READINGS)], key=lambda r: r.within_ns)
                trace.shared = trace.clock.host_key == host_key()
                async with client.trace(self.every) as call:
                    while (chunk := await call.next()) is not None:
                        trace.epoch = chunk.epoch
                        trace.lost += chunk.lost
                        self._keep_spans(trace, chunk.spans)
                        trace.heard = True
                        trace.whole = trace.epoch >= self.until > 0
                        if chunk.over:
                            break
                        if trace.whole or self.ended_early:
                            await call.finish()
                    else:
                        raise PeerLost(f"node {trace.record.name} ended without a last word")
            if not trace.whole and not self.ended_early and await self._is_job_running():
                trace.missing = f"it left at {self.unit} {trace.epoch}: what others did for it since"
        except TaskGraphError as error:
            if not trace.whole:
                self._note_missing(trace, str(error))

    def _keep_spans(self, trace: NodeTrace, spans: bytes) -> None:
        """Keeps spans of a node; ends the trace early if there are too many."""
        if spans:
            trace.chunks.append(spans)
        self._bytes += len(spans)
        if self._bytes > _MOST_BYTES and not self.ended_early:
            self._say(f"the trace has {self._bytes >> 20} MiB of spans, and ends here")
            self.end_early()

    def _note_missing(self, trace: NodeTrace, why: str) -> None:
        """Notes which part of a node's spans the trace lacks, and why."""
        what = f"what it did from {self.unit} {trace.epoch} on" if trace.epoch >= 0 else "all it did"
        trace.missing = f"{trace.missing}; and {what}: {why}" if trace.missing else f"{what}: {why}"

    async def _is_job_running(self) -> bool:
        """Returns True if the job runs. Reads etcd: a node may know of the end before our view does."""
        if self._keeper.view.running:
            with contextlib.suppress(Unavailable):
                await self._keeper.load()
        return self._keeper.view.running


def trace_interval(epochs: int, rate: float, replicas: int, hosts: int) -> int:
    """Returns n, to trace one epoch in n, so that the job loses less than 3 %.

    Args:
        epochs: how many to trace.
        rate: the job's epochs per second.
        replicas: of all its tasks.
        hosts: that the replicas are on.
    """
    if epochs <= rate * _AT_ONCE_S:
        return 1
    return max(1, math.ceil(rate * replicas / (_TRACED * max(hosts, 1))))


def every_text(every: int) -> str:
    """Says, behind a range, which of its epochs are traced; "": all."""
    return f", one of {every}" if every > 1 else ""


def _state_text(view: JobView) -> str:
    """Says why a job does not run: its state and the reason, or "deleted"."""
    status = view.status
    return status.record.state + (f": {status.record.reason}" if status.record.reason else "") if status else "deleted"
