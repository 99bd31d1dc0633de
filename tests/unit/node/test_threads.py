"""The threads that plain functions run in."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskgraph.node.threads import PooledThreads


async def test_what_a_function_returns_and_raises() -> None:
    threads = PooledThreads("t", limit=2)

    def fails() -> None:
        raise KeyError("zz")

    assert await threads.run(lambda: 1) == 1
    with pytest.raises(KeyError, match="zz"):
        await threads.run(fails)
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        threads.run(lambda: 1)


async def test_an_idle_thread_is_used_again() -> None:
    threads = PooledThreads("t", limit=5)
    used = set()
    for _ in range(20):
        used.add(await threads.run(threading.current_thread))
        await asyncio.sleep(0.001)  # until it is idle
    assert len(used) == 1
    assert all(thread.daemon for thread in used)
    threads.close()
    for thread in used:
        thread.join(5)
        assert not thread.is_alive()


async def test_never_more_threads_than_the_limit_and_all_at_work() -> None:
    threads = PooledThreads("t", limit=3)
    together = threading.Barrier(3)

    def meets() -> threading.Thread:
        together.wait(5)
        return threading.current_thread()

    assert len(set(await asyncio.gather(*(threads.run(meets) for _ in range(9))))) == 3
    threads.close()


async def test_what_is_abandoned_runs_on_and_nobody_waits_for_it() -> None:
    threads = PooledThreads("t", limit=1)
    begun, may_end, did = threading.Event(), threading.Event(), []

    def takes() -> None:
        begun.set()
        may_end.wait(5)
        did.append("first")

    first, second = threads.run(takes), threads.run(lambda: did.append("second"))
    await asyncio.to_thread(begun.wait, 5)
    threads.abandon()
    for given_up in (first, second):
        with pytest.raises(asyncio.CancelledError):
            await given_up
    await asyncio.sleep(0)  # the thread's side hears of it
    may_end.set()
    assert await threads.run(lambda: 3) == 3
    assert did == ["first"]
    threads.close()
