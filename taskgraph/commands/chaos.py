"""chaos: causes random faults on this host's nodes of a running job, and shows what follows."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import secrets
import signal
import time
from collections import Counter

import uvloop

from taskgraph.commands import acting
from taskgraph.commands.common import FoundJob, on_ending_signals, reach, wait_until_launcher_gone
from taskgraph.commands.looking import print_event
from taskgraph.commands.mischief import Fault, draw, kinds_of, pause_s
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import CoordinationError, JobError
from taskgraph.launch.follow import follow_events
from taskgraph.observe.events import Event
from taskgraph.observe.format import counted, ids_text
from taskgraph.observe.screen import printable
from taskgraph.protocol.records import JobStatus, name_of
from taskgraph.protocol.view import JobView
from taskgraph.system import host
from taskgraph.system.alongside import alongside

__all__ = ["chaos"]

_AGAIN_S = 0.2
"""The pause before the next search for a node that can be hit."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_LAST_EVENT_S = 0.3
_GONE_S = 1.0
"""SIGKILL ends a process within this time, unless the process waits for its disk."""


def chaos(options: argparse.Namespace) -> int:
    """Hits nodes until the job ends, the time is over, or Ctrl-C."""
    if not all(0 < seconds < math.inf for seconds in (options.mtbf, options.for_s) if seconds is not None):
        raise JobError("--mtbf and --for-s are seconds above 0")
    kinds = kinds_of(options.kinds)
    seed = options.seed if options.seed is not None else secrets.randbelow(1_000_000)
    return uvloop.run(_chaos(options, kinds, seed))


async def _chaos(options: argparse.Namespace, kinds: tuple[str, ...], seed: int) -> int:
    """Causes faults until the job ends, or the time given is over; returns the exit code.

    Raises:
        JobError: the job has ended, or has no node here.
    """
    async with reach(options) as reached:
        reached.spec.check_protocol()
        run = _Chaos(reached, random.Random(seed), kinds, mtbf_s=options.mtbf, lossy=options.lossy)
        await run.keeper.load()
        if not run.keeper.view.running:
            raise JobError(f"job {reached.name} has ended")
        if not run.nodes_here():
            raise JobError(
                f"job {reached.name} has no node on this host that chaos can hit: it must run as your user, and not as "
                f"the first process (pid 1) of a container"
            )
        print(f"chaos on job {reached.name}: a fault every {options.mtbf:g} s, seed {seed}; Ctrl-C ends it", flush=True)
        return await run.until_over(options.for_s)


def _workers(view: JobView) -> list[str]:
    """Returns the workers of the view of an elastic job."""
    return [] if view.workers is None else [worker for worker, _ in view.workers.record.workers]


class _Chaos:
    """Causes faults on this host's nodes of one job, and prints its events."""

    def __init__(
        self, reached: FoundJob, rng: random.Random, kinds: tuple[str, ...], *, mtbf_s: float, lossy: bool
    ) -> None:
        self.keeper = ViewKeeper(reached.coordinator, reached.name, refresh_s=_AGAIN_S)
        self._reached = reached
        self._rng = rng
        self._kinds = kinds
        self._mtbf_s = mtbf_s
        self._lossy = lossy
        self._unwell: set[str] = set()
        self._stopped: dict[str, int] = {}  # node -> pid
        self._killed: dict[str, int] = {}  # likewise
        self._done: Counter[str] = Counter()

    @property
    def _view(self) -> JobView:
        return self.keeper.view

    def nodes_here(self) -> list[str]:
        """Returns the nodes of the job on this host that this process may signal."""
        live = self._view.live_nodes(self._reached.spec.run)
        return [node for node, record in live.items() if acting.can_signal(record)]

    async def until_over(self, for_s: float | None) -> int:
        """Causes faults until the job or its launcher ends, `for_s` has passed, or a signal such as Ctrl-C comes.

        Wakes stopped nodes, prints a summary, and returns the exit code: 1 if the job failed, else 0.
        """
        interrupted = asyncio.Event()
        on_ending_signals(lambda _: interrupted.set())  # so that stopped nodes wake up first
        async with alongside(
            self.keeper.run(),
            self._print_events(after=self._view.revision),
            self._cause_faults(),
            self._wait_until_ended(),
            wait_until_launcher_gone(self._reached.entry),
            interrupted.wait(),
        ) as work:
            try:
                done, _ = await asyncio.wait(work, timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    await each
            finally:
                self._thaw(*self._stopped)
        return self._sum_up(await self._survivors())

    async def _survivors(self) -> dict[str, int]:
        """Returns node -> pid of the nodes that got SIGKILL and are alive a moment later."""
        until = time.monotonic() + _GONE_S
        while True:
            left = {node: pid for node, pid in self._killed.items() if node in self._view.nodes and host.is_alive(pid)}
            if not left or time.monotonic() > until:
                return left
            await asyncio.sleep(_AGAIN_S / 10)

    def _sum_up(self, unkilled: dict[str, int]) -> int:
        """Prints how many faults there were and how the job is. Returns the exit code."""
        if gone := len(self._killed) - len(unkilled):
            self._done["kill"] = gone
        status = self._view.status
        state = status.record.state if status is not None else "unknown"
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self._done.items())) or "none"
        print(f"faults: {counts}; job {self._reached.name}: {state}", flush=True)
        for node, pid in unkilled.items():
            print(f"  {name_of(node)} (process {pid}) is alive after SIGKILL", flush=True)
        if status is not None and status.record.reason:
            print(f"  {printable(status.record.reason)}", flush=True)
        return 1 if state == JobStatus.FAILED else 0

    async def _wait_until_ended(self) -> None:
        """Waits until the job has ended, and a moment more, in which its last events are shown."""
        await self.keeper.wait_until(lambda view: not view.running)
        await asyncio.sleep(_LAST_EVENT_S)  # so that the last events are shown

    async def _print_events(self, *, after: int) -> None:
        """Prints the events after a revision."""
        async for event in follow_events(self._reached.coordinator, self._reached.name, after=after):
            print_event(event, as_json=False)

    async def _cause_faults(self) -> None:
        """Causes one fault after another until cancelled. The next may come while a node is still stopped."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(pause_s(self._rng, self._mtbf_s))
                fault = await self._draw_fault()
                record = self._view.nodes[fault.node].record
                epoch = self._view.epoch.record.epoch if self._view.epoch is not None else 0
                self._say(f"{_SIGNALS[fault.kind].name} to {record.name} (process {record.pid}), {self._roles(fault)}")
                self._unwell.add(fault.node)
                with contextlib.suppress(JobError):  # the node has just ended by itself
                    acting.signal_here(record, _SIGNALS[fault.kind])
                    if fault.kind == "kill":
                        self._killed[fault.node] = record.pid
                    else:
                        self._done[fault.kind] += 1
                if fault.kind == "stop":
                    self._stopped[fault.node] = record.pid
                    group.create_task(self._wake_later(fault))
                group.create_task(self._report_commit(epoch, fault.node))

    async def _draw_fault(self) -> Fault:
        """Draws a fault; while no node of this host may be hit, says why, once, and tries again."""
        said = False
        while True:
            with contextlib.suppress(CoordinationError):
                await self.keeper.load()
                ttl_s = self._reached.spec.setting("lease_ttl_s")
                fault = draw(
                    self._rng,
                    self._view,
                    here=self.nodes_here(),
                    unwell=self._unwell,
                    kinds=self._kinds,
                    ttl_s=ttl_s,
                    lossy=self._lossy,
                )
                if fault is not None:
                    return fault
            if not said:
                more = f"more nodes: `taskgraph launch {self._reached.name}`"
                self._say(
                    f"waiting: every node of this host was hit already, or leaves ({more})"
                    if self._lossy
                    else f"waiting: {self._why_spared} ({more}; --lossy hits it all the same)"
                )
                said = True
            await asyncio.sleep(_AGAIN_S)

    @property
    def _why_spared(self) -> str:
        """Why no node can be hit at the moment."""
        if self._view.workers is not None:
            return "only one worker is well"
        return "every node has the only replica of some task"

    def _roles(self, fault: Fault) -> str:
        """Describes what the node of a fault does for the job, and how long it is stopped."""
        replicas = [task for task in sorted(self._view.primaries) if fault.node in self._view.in_sync(task)]
        first = [task for task in replicas if self._view.primary_node(task) == fault.node]
        words = [
            f"{role} of {ids_text(tasks)}"
            for role, tasks in (("primary", first), ("backup", [t for t in replicas if t not in first]))
            if tasks
        ]
        if self._view.workers is not None:
            words = [f"one of {counted(len(_workers(self._view)), 'worker')}"]
        return (" and ".join(words) or "which has no task") + (f", for {fault.lasts_s:.1f} s" * bool(fault.lasts_s))

    async def _wake_later(self, fault: Fault) -> None:
        """Wakes a stopped node after its time. Once it is registered, it may be hit again."""
        await asyncio.sleep(fault.lasts_s)
        self._thaw(fault.node)
        self._say(f"SIGCONT to {name_of(fault.node)}")
        # A registered node counts again, whether it had lost its lease or not.
        await self.keeper.wait_until(lambda view: fault.node in view.nodes)
        self._unwell.discard(fault.node)

    def _thaw(self, *nodes: str) -> None:
        """Sends SIGCONT to stopped nodes."""
        for node in nodes:
            acting.signal_process(self._stopped.pop(node), signal.SIGCONT)

    async def _report_commit(self, epoch: int, node: str) -> None:
        """Says when the epoch after the fault's epoch committed, or when the other workers went on without the node."""
        began = time.monotonic()
        if self._view.workers is not None:
            await self.keeper.wait_until(lambda view: node not in _workers(view))
            self._say(f"{name_of(node)} is out of the view {time.monotonic() - began:.2f} s after the fault")
            return
        await self.keeper.wait_until(lambda view: view.epoch is not None and view.epoch.record.epoch >= epoch + 2)
        self._say(f"epoch {epoch + 1} committed {time.monotonic() - began:.2f} s after the fault")

    def _say(self, text: str) -> None:
        """Prints a text as an event of `chaos`."""
        print_event(Event(time.time(), "chaos", "fault", text), as_json=False)
