"""Makes workers join, leave and die in a test's run of an elastic job. All of it happens on the loop.

Newcomers start at steps 0, 1, 2, 4, 7, 11 ..., or as soon as the one before has joined. Each time the oldest worker
leaves or dies, unless the test kills workers itself. After three of them every worker began with a copied state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any, cast

from taskgraph.elastic_jobs.node import ElasticNode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.observe.events import Event
from taskgraph.protocol.records import name_of

__all__ = ["Scene"]

_STEP_S = 0.1
"""Steps take so long while a newcomer is on its way, by the job's clock: it enters within a few of them."""
_LOOK_S = 0.01
_MOST_TURNS = 12
"""Turns of the event loop after which a worker dies that has begun to send its sums."""

log = logging.getLogger(__name__)


class Scene:
    """Starts, drains and kills the workers of one run.

    Args:
        churn: newcomers join unasked.
        rng: draws when exactly a worker dies that is killed at "sums".
        check_endless: called with the number of each step of a run without an end.

    Attributes:
        kills: (place in the view, step) -> stage: the kills that are left. A kill is put off to a later step while
            there is no such worker, or no other worker that could go on.
        differing: the texts of the events `differs`.
    """

    def __init__(
        self, kills: dict[tuple[int, int], str], churn: bool, rng: random.Random, check_endless: Callable[[int], None]
    ) -> None:
        self.kills = kills
        self.differing: list[str] = []
        self._check_endless = check_endless
        self._churn = churn
        self._replaces = not kills
        self._rng = rng
        self._next_join = 0
        self._newcomer = ""
        self._joined = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._cluster: InProcessCluster | None = None

    def attach(self, cluster: InProcessCluster) -> None:
        """Sets the cluster whose workers the scene moves. To be called before the cluster starts."""
        self._cluster = cluster

    @property
    def nodes(self) -> list[ElasticNode]:
        """The nodes that live, in the order of their starts."""
        living = [] if self._cluster is None else self._cluster.living
        return [node for node in cast("list[ElasticNode]", living) if node.running]

    def on_event(self, event: Event) -> None:
        """Called with each event of a node. Once the newcomer has joined, makes the oldest worker leave or die."""
        if event.kind == "unchanged":
            log.warning("%s", event.text)
        elif event.kind == "differs":
            self.differing.append(event.text.partition(": it enters anew")[0])
        if event.kind == "joined" and event.node == self._newcomer:
            self._start_task(self._remove_oldest(event.node))

    async def stop(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin_step(self, worker: str, step: int, endless: bool) -> None:
        """Called before a worker's step: starts a newcomer if one is due, delays the step, kills the worker if the test
        has a kill at the stage "begin".

        Args:
            endless: the run has no last step: a test fails after too many.
        """
        assert self._cluster is not None
        if endless:
            self._check_endless(step)
        if self._churn and not self._newcomer and step >= self._next_join:
            self._newcomer = name_of(self._cluster.add())
            self._next_join = step + 1 + step // 2
        node = self._node_named(worker)
        if node is not None and self._place(node) >= 0 and (self._newcomer or self._newcomer_on_way()):
            await asyncio.sleep(_STEP_S)
        await self.kill_if_due(worker, "begin", step)

    async def kill_if_due(self, worker: str, stage: str, step: int) -> None:
        """Kills and replaces a worker if one of `kills` is due at this stage and another worker could go on.

        Then it does not return, except at "sums": there the worker dies a little later.
        """
        node = self._node_named(worker)
        if node is None or not self._is_dispensable(node):
            return
        place = self._place(node)
        due = [key for key in self.kills if key[0] == place and key[1] <= step and self.kills[key] == stage]
        if not due:
            return
        del self.kills[min(due)]
        if stage == "sums":
            self._start_task(self._replace_soon(node))
            return
        self._replace(node)
        await asyncio.Event().wait()  # the crash cancels whatever runs here

    async def _remove_oldest(self, newcomer: str) -> None:
        """Makes the oldest worker leave, or kills it, once the newcomer has all that the job needs to go on."""
        await _wait_until(lambda: (node := self._node_named(newcomer)) is not None and node.engine.core.whole)
        oldest = min(self.nodes, key=self._seniority)
        if oldest.name != newcomer and self._replaces:
            self._joined += 1
            if self._joined % 2:
                oldest.drain("a newcomer takes its place")
            else:
                await _wait_until(lambda: self._is_dispensable(oldest))
                self._crash(oldest)
        self._newcomer = ""

    async def _replace_soon(self, node: ElasticNode) -> None:
        """Kills and replaces a node within a few turns of the loop."""
        for _ in range(self._rng.randrange(_MOST_TURNS)):
            await asyncio.sleep(0)
        self._replace(node)

    def _replace(self, node: ElasticNode) -> None:
        """Kills a node, and starts another one."""
        assert self._cluster is not None
        self._crash(node)
        self._cluster.add()

    def _crash(self, node: ElasticNode) -> None:
        """Kills a node, without a replacement."""
        assert self._cluster is not None
        self._cluster.crash(node.id)

    def _newcomer_on_way(self) -> bool:
        """True if a node has started, does not drain, and is in no view yet."""
        assert self._cluster is not None
        living = cast("list[ElasticNode]", self._cluster.living)
        return any(not node.draining and self._place(node) < 0 for node in living)

    def _is_dispensable(self, node: ElasticNode) -> bool:
        """True if another worker has all that the job needs to go on without this node."""
        return any(
            other is not node and other.engine.core.whole and not other.draining and self._place(other) >= 0
            for other in self.nodes
        )

    def _node_named(self, worker: str) -> ElasticNode | None:
        """Returns the living node of this name; None if there is none."""
        return next((node for node in self.nodes if node.name == worker), None)

    def _place(self, node: ElasticNode) -> int:
        """Returns the node's place in the view that it has read, 0 for the most senior worker; -1: it is in none."""
        view = node.engine.core.view
        return view.workers.index(node.id) if view is not None and node.id in view.workers else -1

    def _seniority(self, node: ElasticNode) -> tuple[bool, int]:
        """Returns the sort key of a node: the oldest worker is first; nodes that drain or are in no view are last."""
        place = self._place(node)
        return place < 0 or node.draining, place

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _wait_until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 (what it looks at has no event)
        await asyncio.sleep(_LOOK_S)
