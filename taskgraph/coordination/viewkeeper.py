"""Keeps a `JobView` up to date: lists the job's keys, watches them, and lists again if the watch broke or lost history.

Code that waits for a change of the view waits here. If a message announced the change, the wait also re-reads etcd,
since the watch may be late.

Every commit changes `epoch`, and other keys change rarely. So waiters and listeners that do not depend on `epoch` pass
`structure`, and are not called at commits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable

from taskgraph.coordination.api import WAITED_OUT, Coordinator, DataLost, WatchCompacted
from taskgraph.protocol.view import JobView, WritesLost

__all__ = ["ViewKeeper"]

log = logging.getLogger("taskgraph.view")

_SLOW_LISTING_S = 2.0
"""A slower listing is shown by `waits`."""

_PAUSE_FACTOR = 3
"""A pause lasts this many times as long as the notification before it. Each of thousands of starting tasks changes the
view, and each notification examines all waits."""
_MAX_PAUSE_S = 1.0
"""The longest pause, even if the process was frozen during a notification."""
_READ_PAUSE_FACTOR = 10
"""A pause between re-reads lasts this many times as long as the re-read before it; the watch goes on meanwhile."""
_MAX_READ_PAUSE_S = 5.0
_READ_PAUSE_PER_KEY_S = 0.0002
"""Limits such a pause for each listed key. A listing of some dozen keys is slow only if the host is busy, and takeovers
and joining nodes must not wait for long after it."""

_Waiters = dict["asyncio.Future[None]", Callable[[JobView], bool]]  # in the order they began to wait


class ViewKeeper:
    """Keeps one job's view up to date, and notifies code that waits for changes.

    Args:
        refresh_s: how long `wait_until_read` and `wait_for_revision` rely on the watch before they re-read etcd; also
            the pause after a read that failed. The other waits rely on the watch alone.
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
        self._notify_scheduled = False
        self._refreshing: asyncio.Lock = asyncio.Lock()
        self._reads = 0  # the number of re-reads that `refresh` began
        self._listings: list[float] = []  # start times of the listings under way
        self._notify_timer: asyncio.TimerHandle | None = None  # a timer that calls `notify` after the pause
        self._pause_ends_at = 0.0  # the end of the pause after the last `notify`
        self._read_pause_ends_at = 0.0  # the end of the pause after the last re-read
        self._run_task: asyncio.Task[None] | None = None  # `run`
        self._timer_error: Exception | None = None  # the error of a `notify` that a timer called

    def on_change(self, listener: Callable[[], None], *, structure: bool = False) -> Callable[[], None]:
        """Calls `listener()` after every change of the view; returns a function that stops this.

        Args:
            listener: must not wait.
            structure: do not call it if only `epoch` changed.
        """
        listeners = self._structure_listeners if structure else self._listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    async def load(self) -> None:
        """Lists the job's keys, resets the view to the listing unless the view is newer, and calls `notify`.

        Raises:
            Unavailable: etcd does not answer.
            DataLost: etcd has lost acknowledged writes.
        """
        self._listings.append(since := self._coordinator.now())
        try:
            listing = await self._coordinator.list(self.view.keys.root)
        finally:
            self._listings.remove(since)
        if listing.revision >= self.view.revision:
            try:
                self.view.reset(listing.revision, listing.items)
            except WritesLost as why:
                raise DataLost(str(why)) from None
            self.notify()
        now = self._coordinator.now()
        longest_s = min(_READ_PAUSE_PER_KEY_S * len(listing.items), _MAX_READ_PAUSE_S)
        self._read_pause_ends_at = now + min(_READ_PAUSE_FACTOR * (now - since), longest_s)

    @property
    def waits(self) -> tuple[str, ...]:
        """A slow listing of the job in words, for `status`; () if there is none."""
        for_s = max((self._coordinator.now() - since for since in self._listings), default=0.0)
        if for_s < _SLOW_LISTING_S:
            return ()
        return (f"etcd: listing the job takes {for_s:.0f} s so far: it is busy, or the link to it is slow",)

    async def run(self) -> None:
        """Keeps the view up to date by a watch. Start it after `load`. Raises errors of listeners and predicates."""
        running = self._run_task = asyncio.current_task()
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
            if self._timer_error is not None and running.uncancel() == 0:
                raise self._timer_error from None
            raise
        finally:
            self._run_task = None
            self._cancel_notify_timer()

    async def _watch(self, start: int) -> None:
        """Applies the events of the watch to the view, and notifies. Raises WatchCompacted if events are lost."""
        view = self.view
        async for batch in self._coordinator.watch(view.keys.root, start):
            structure, epoch = view.structure_revision, view.epoch
            view.apply(batch.revision, batch.events)
            self._notify_revision_waiters()
            if view.structure_revision != structure and view.epoch is epoch:
                self._notify_after_pause()
            elif view.structure_revision != structure or (view.epoch is not epoch and self._notify_timer is not None):
                self.notify()
            elif view.epoch is not epoch:
                self._notify(self._waiters, self._listeners)
            elif batch.reopened and not batch.events:
                await self.load_persistently()

    def _notify_after_pause(self) -> None:
        """Calls `notify` now, or at the end of the pause after the last one."""
        wait_s = self._pause_ends_at - self._coordinator.now()
        if wait_s <= 0:
            self.notify()
        elif self._notify_timer is None:
            self._notify_timer = asyncio.get_running_loop().call_later(wait_s, self._notify_from_timer)

    def _cancel_notify_timer(self) -> None:
        """Cancels the timer of a notification that waits for the end of a pause."""
        if self._notify_timer is not None:
            self._notify_timer.cancel()
            self._notify_timer = None

    async def run_with_listings(self, *prefixes: str) -> None:
        """Watches these prefixes only, in place of `run`. After a change under one of them, lists the whole job again.

        All other keys, `epoch` too, are as old as the last listing.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for prefix in prefixes:
                    group.create_task(self._reload_on_change(prefix))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _reload_on_change(self, prefix: str) -> None:
        """Watches one prefix for ever, and lists the job after each change."""
        while True:
            try:
                async for batch in self._coordinator.watch(prefix, self.view.revision + 1):
                    if batch.reopened or (batch.events and batch.revision > self.view.revision):
                        await self.load_persistently()
            except WatchCompacted:
                await self.load_persistently()

    def begin_wait(self, predicate: Callable[[JobView], bool], *, structure: bool = False) -> asyncio.Future[None]:
        """Returns a future that is done when the view satisfies `predicate`. Cancel the future if it is not needed.

        Args:
            predicate: depends on the view, or on state whose owner calls `notify_later`.
            structure: the predicate does not depend on `epoch`.
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
        """Waits until the view satisfies `predicate`; see `begin_wait`."""
        if not predicate(self.view):
            await self.begin_wait(predicate, structure=structure)

    async def wait_until_read(self, predicate: Callable[[JobView], bool]) -> None:
        """Waits like `wait_until` for a change that has already happened in etcd. Re-reads etcd every `refresh_s`."""
        while not predicate(self.view):
            await self._wait_or_reread(predicate, self.begin_wait(predicate))

    async def wait_for_revision(self, revision: int) -> None:
        """Waits until the view has reached `revision`. Re-reads etcd like `wait_until_read`.

        These waits are in a heap: each of a thousand starting tasks waits for its own write, and a change of the view
        must not examine all of them.
        """
        while self.view.revision < revision:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._revision_waiters, (revision, next(self._numbers), future))
            await self._wait_or_reread(lambda view: view.revision >= revision, future)

    async def _wait_or_reread(self, predicate: Callable[[JobView], bool], waiting: asyncio.Future[None]) -> None:
        """Waits for `waiting`, at most until a re-read is due; then re-reads etcd if the predicate does not hold."""
        rests_s = self._read_pause_ends_at - self._coordinator.now()
        timer = asyncio.get_running_loop().call_later(max(self._refresh_s, rests_s), _finish_wait, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            waiting.cancel()
        if not predicate(self.view):
            await self.refresh()

    async def refresh(self) -> None:
        """Re-reads the job from etcd. Concurrent callers share one read. Without an answer the view stays as it is."""
        reads = self._reads
        async with self._refreshing:
            if self._reads > reads:  # another caller began a read after this call
                return
            self._reads += 1
            try:
                await self.load()
            except WAITED_OUT as error:
                log.warning("cannot re-read the job: %s", error)
                await asyncio.sleep(self._refresh_s)
            except BaseException:
                self._reads -= 1  # a cancelled read does not count for other callers
                raise

    def notify_later(self) -> None:
        """Calls `notify` once, from the event loop: soon, or at the end of the pause after the last one."""
        if self._notify_timer is None and not self._notify_scheduled:
            self._notify_scheduled = True
            asyncio.get_running_loop().call_soon(self._notify_soon)

    def _notify_soon(self) -> None:
        """Calls `notify`, in a later turn of the event loop than `notify_later`, or at the end of the pause."""
        self._notify_scheduled = False
        wait_s = self._pause_ends_at - self._coordinator.now()
        if wait_s <= 0:
            self._notify_from_timer()
        elif self._notify_timer is None:
            self._notify_timer = asyncio.get_running_loop().call_later(wait_s, self._notify_from_timer)

    def _notify_from_timer(self) -> None:
        """Calls `notify` from the event loop. An error ends `run`, as an error after an event of the watch does.

        Otherwise the event loop would only log the error, and some waiters would wait for ever.
        """
        try:
            self.notify()
        except Exception as error:
            if self._run_task is None:
                raise
            if self._timer_error is None:
                self._timer_error = error
                self._run_task.cancel()

    async def load_persistently(self) -> None:
        """Calls `load` until it succeeds: retries while etcd does not answer, or refuses access."""
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
        """Examines all waits, and calls all listeners, after a change of the view or of other state of predicates."""
        self._cancel_notify_timer()
        since = self._coordinator.now()
        self._notify_revision_waiters()
        self._notify(self._structure_waiters, self._structure_listeners)
        self._notify(self._waiters, self._listeners)
        until = self._coordinator.now()
        self._pause_ends_at = until + pause_after(until - since)

    def _notify_revision_waiters(self) -> None:
        """Ends the waits for revisions that the view has reached."""
        waiters = self._revision_waiters
        while waiters and waiters[0][0] <= self.view.revision:
            future = heapq.heappop(waiters)[2]
            if not future.done():
                future.set_result(None)

    def _notify(self, waiters: _Waiters, listeners: list[Callable[[], None]]) -> None:
        """Ends those of these waits whose predicates hold, and calls these listeners."""
        view = self.view
        for future, predicate in tuple(waiters.items()):
            if future.done() or predicate(view):
                waiters.pop(future, None)
                if not future.done():
                    future.set_result(None)
        for listener in tuple(listeners):
            listener()


def pause_after(took_s: float) -> float:
    """Returns the length of the pause after a `notify` that took `took_s`."""
    return min(_PAUSE_FACTOR * took_s, _MAX_PAUSE_S)


def _finish_wait(waiting: asyncio.Future[None]) -> None:
    """Ends a wait, unless it has ended."""
    if not waiting.done():
        waiting.set_result(None)
