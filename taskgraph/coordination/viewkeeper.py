"""Keeps a `JobView` up to date: list once, watch from there, list again if the watch lost history, or broke.

Code that waits for a change of the view waits here. If a message announced the change, a linearizable re-read backs
the wait: a re-read finds all that a watch delivers.

Every commit changes `epoch`, at every node, and other keys hardly ever change. So waiters and listeners that do not
depend on `epoch` say so (`structure`), and are not called at commits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable

from taskgraph.coordination.api import WAITED_OUT, Coordinator, DataLost, WatchCompacted
from taskgraph.protocol.view import JobView, StaleListing

__all__ = ["ViewKeeper"]

log = logging.getLogger("taskgraph.view")

_LONG_S = 2.0
"""A listing that takes longer is named in `waits`."""

_RESTS = 3
"""A notification that took 1 ms is followed by a pause of 3 ms: each of thousands of tasks that begin changes the view,
and each notification examines all waits."""
_REST_S = 1.0
"""No pause is longer, even if the process was frozen during a notification."""
_READ_RESTS = 10
"""Likewise, a re-read that took 1 s is followed by 10 s without one. The watch delivers the changes in between."""
_READ_REST_S = 5.0
_READ_REST_PER_KEY_S = 0.0002
"""No such pause is longer for each key. To list some dozen keys costs little, and takes long only if the host is busy:
a takeover or a node that joins must not wait for that."""

_Waiters = dict["asyncio.Future[None]", Callable[[JobView], bool]]  # in the order they began to wait


class ViewKeeper:
    """One job's view, and the code that waits for its changes.

    Args:
        refresh_s: how long to wait for the watch before a re-read.
        one_run: see `JobView`.
    """

    def __init__(self, coordinator: Coordinator, job: str, *, refresh_s: float, one_run: bool = False) -> None:
        self.view = JobView(job, one_run=one_run)
        self._coordinator = coordinator
        self._refresh_s = refresh_s
        self._waiters: _Waiters = {}
        self._structure_waiters: _Waiters = {}
        self._revision_waiters: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: revision, number, waiter
        self._numbers = itertools.count()
        self._listeners: list[Callable[[], None]] = []
        self._structure_listeners: list[Callable[[], None]] = []
        self._notifying = False
        self._refreshing: asyncio.Lock = asyncio.Lock()
        self._reads = 0  # how many re-reads `refresh` began
        self._listings: list[float] = []  # when the listings under way began
        self._later: asyncio.TimerHandle | None = None  # calls `notify`, for changes of the structure
        self._rested_at = 0.0  # when the pause after the last `notify` ends
        self._read_rested_at = 0.0  # when the pause after the last re-read ends
        self._running: asyncio.Task[None] | None = None  # `run`
        self._broken: Exception | None = None  # raised by a `notify` out of a timer

    def on_change(self, listener: Callable[[], None], *, structure: bool = False) -> Callable[[], None]:
        """Calls `listener()` after every change of the view; returns a function that stops this.

        Args:
            listener: must not wait.
            structure: not if only `epoch` changed.
        """
        listeners = self._structure_listeners if structure else self._listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    async def load(self) -> None:
        """Lists the job's keys.

        Raises:
            Unavailable: etcd does not answer.
            DataLost: etcd holds less than it had acknowledged.
        """
        self._listings.append(since := self._coordinator.now())
        try:
            listing = await self._coordinator.list(self.view.keys.root)
        finally:
            self._listings.remove(since)
        if listing.revision >= self.view.revision:
            try:
                self.view.reset(listing.revision, listing.items)
            except StaleListing as why:
                raise DataLost(str(why)) from None
            self.notify()
        now = self._coordinator.now()
        longest_s = min(_READ_REST_PER_KEY_S * len(listing.items), _READ_REST_S)
        self._read_rested_at = now + min(_READ_RESTS * (now - since), longest_s)

    @property
    def waits(self) -> tuple[str, ...]:
        """Names a listing of the job that takes long, for `status`."""
        for_s = max((self._coordinator.now() - since for since in self._listings), default=0.0)
        if for_s < _LONG_S:
            return ()
        return (f"etcd: listing the job takes {for_s:.0f} s so far: it is busy, or the link to it is slow",)

    async def run(self) -> None:
        """Watches for ever. Start it after `load`. Raises the error of a listener or predicate."""
        running = self._running = asyncio.current_task()
        assert running is not None
        try:
            while True:
                start = self.view.revision + 1
                try:
                    await self._watch(start)
                except WatchCompacted:
                    log.info("the watch from revision %d was compacted away; listing again", start)
                    await self.load_persistently()
        except asyncio.CancelledError:
            if self._broken is not None and running.uncancel() == 0:
                raise self._broken from None
            raise
        finally:
            self._running = None
            self._notify_no_more()

    async def _watch(self, start: int) -> None:
        view = self.view
        async for batch in self._coordinator.watch(view.keys.root, start):
            structure, epoch = view.structure_revision, view.epoch
            view.apply(batch.revision, batch.events)
            self._notify_revision()
            if view.structure_revision != structure and view.epoch is epoch:
                self._notify_in_time()
            elif view.structure_revision != structure or (view.epoch is not epoch and self._later is not None):
                self.notify()
            elif view.epoch is not epoch:
                self._notify(self._waiters, self._listeners)
            elif batch.reopened and not batch.events:
                await self.load_persistently()

    def _notify_in_time(self) -> None:
        """Calls `notify` at once, or when the pause after the last one ends."""
        wait_s = self._rested_at - self._coordinator.now()
        if wait_s <= 0:
            self.notify()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._notify_by_itself)

    def _notify_no_more(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    async def run_by(self, *prefixes: str) -> None:
        """Runs like `run`, without commits: lists again when a key under one of these prefixes changed.

        `epoch` is then as it was at that time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for prefix in prefixes:
                    group.create_task(self._list_after(prefix))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _list_after(self, prefix: str) -> None:
        while True:
            try:
                async for batch in self._coordinator.watch(prefix, self.view.revision + 1):
                    if batch.reopened or (batch.events and batch.revision > self.view.revision):
                        await self.load_persistently()
            except WatchCompacted:
                await self.load_persistently()

    def when(self, predicate: Callable[[JobView], bool], *, structure: bool = False) -> asyncio.Future[None]:
        """A future that is done as soon as the view satisfies `predicate`; cancel it when it is not needed.

        Args:
            predicate: depends on the view, or on state whose owner calls `notify_later`.
            structure: it does not depend on `epoch`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if predicate(self.view):
            future.set_result(None)
        else:
            waiters = self._structure_waiters if structure else self._waiters
            waiters[future] = predicate
            future.add_done_callback(lambda done: waiters.pop(done, None))
        return future

    async def wait_until(self, predicate: Callable[[JobView], bool], *, structure: bool = False) -> None:
        """Returns as soon as the view satisfies `predicate`; see `when`."""
        if not predicate(self.view):
            await self.when(predicate, structure=structure)

    async def wait_until_read(self, predicate: Callable[[JobView], bool]) -> None:
        """Waits like `wait_until`, for a change that already happened in etcd: re-reads etcd every `refresh_s`."""
        while not predicate(self.view):
            await self._read_until(predicate, self.when(predicate))

    async def caught_up(self, revision: int) -> None:
        """Waits until the view contains all that etcd knew at `revision`, as `wait_until_read` does.

        These waits are kept apart: of a thousand tasks that begin, each waits for its own write, and no change of the
        view asks all of them.
        """
        while self.view.revision < revision:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._revision_waiters, (revision, next(self._numbers), future))
            await self._read_until(lambda view: view.revision >= revision, future)

    async def _read_until(self, predicate: Callable[[JobView], bool], waiting: asyncio.Future[None]) -> None:
        """Waits for the future of a predicate; re-reads etcd if that takes longer than `refresh_s`."""
        rests_s = self._read_rested_at - self._coordinator.now()
        timer = asyncio.get_running_loop().call_later(max(self._refresh_s, rests_s), _give_up, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            waiting.cancel()
        if not predicate(self.view):
            await self.refresh()

    async def refresh(self) -> None:
        """Reads again, linearizably; concurrent callers share one read. Returns without it if etcd does not answer."""
        reads = self._reads
        async with self._refreshing:
            if self._reads > reads:  # another caller began one after we asked
                return
            self._reads += 1
            try:
                await self.load()
            except WAITED_OUT as error:
                log.warning("cannot re-read the job: %s", error)
                await asyncio.sleep(self._refresh_s)
            except BaseException:
                self._reads -= 1  # other callers do not share a cancelled read
                raise

    def notify_later(self) -> None:
        """Calls `notify` once, from the event loop: soon, or when the pause after the last one ends."""
        if self._later is None and not self._notifying:
            self._notifying = True
            asyncio.get_running_loop().call_soon(self._notify_now)

    def _notify_now(self) -> None:
        self._notifying = False
        wait_s = self._rested_at - self._coordinator.now()
        if wait_s <= 0:
            self._notify_by_itself()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._notify_by_itself)

    def _notify_by_itself(self) -> None:
        """Notifies from a timer: an error ends `run`, as it does if the watch notifies.

        The event loop would only log the error, and waiters that were not notified would wait for ever.
        """
        try:
            self.notify()
        except Exception as error:
            if self._running is None:
                raise
            if self._broken is None:
                self._broken = error
                self._running.cancel()

    async def load_persistently(self) -> None:
        """Loads as soon as etcd answers and lets us in."""
        logged = False
        while True:
            try:
                return await self.load()
            except WAITED_OUT as error:
                if not logged:
                    log.warning("cannot list the job: %s; trying again", error)
                    logged = True
                await asyncio.sleep(self._refresh_s)

    def notify(self) -> None:
        """Examines every wait again: the view changed, or state that predicates depend on."""
        self._notify_no_more()
        since = self._coordinator.now()
        self._notify_revision()
        self._notify(self._structure_waiters, self._structure_listeners)
        self._notify(self._waiters, self._listeners)
        until = self._coordinator.now()
        self._rested_at = until + rest_s(until - since)

    def _notify_revision(self) -> None:
        waiters = self._revision_waiters
        while waiters and waiters[0][0] <= self.view.revision:
            future = heapq.heappop(waiters)[2]
            if not future.done():
                future.set_result(None)

    def _notify(self, waiters: _Waiters, listeners: list[Callable[[], None]]) -> None:
        view = self.view
        for future, predicate in tuple(waiters.items()):
            if future.done() or predicate(view):
                waiters.pop(future, None)
                if not future.done():
                    future.set_result(None)
        for listener in tuple(listeners):
            listener()


def rest_s(took_s: float) -> float:
    """The pause after a `notify` that took `took_s`."""
    return min(_RESTS * took_s, _REST_S)


def _give_up(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
