"""The threads that run plain functions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from taskgraph.errors import JobError
from taskgraph.node.usercode import threads as threads_module
from taskgraph.node.usercode.threads import PooledThreads


async def test_result_and_error_of_a_function() -> None:
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
        _until(lambda: len(threads._idle) == 1)
    assert len(used) == 1
    assert all(thread.daemon for thread in used)
    threads.close()
    for thread in used:
        thread.join(30)
        assert not thread.is_alive()


async def test_waiting_threads_free_their_place() -> None:
    threads, answer = PooledThreads("t", limit=2), concurrent.futures.Future[int]()
    waiting = [threads.run(lambda: threads.block(answer, 60)) for _ in range(3)]
    before = threads.run(lambda: answer.set_result(5))
    assert await asyncio.gather(*waiting, before) == [5, 5, 5, None]
    together = threading.Barrier(3)
    met = await asyncio.gather(*(threads.run(lambda: _met(together)) for _ in range(3)))
    assert met.count(False) == 3, "more than two run at a time, once none of them waits"
    threads.close()


def _met(others: threading.Barrier) -> bool:
    try:
        others.wait(0.2)
    except threading.BrokenBarrierError:
        return False
    return True


async def test_thread_limit_is_reached_and_kept() -> None:
    threads = PooledThreads("t", limit=3)
    together = threading.Barrier(3)

    def meets() -> threading.Thread:
        together.wait(30)
        return threading.current_thread()

    assert len(set(await asyncio.gather(*(threads.run(meets) for _ in range(9))))) == 3
    threads.close()


async def test_abandoned_functions_run_on() -> None:
    threads = PooledThreads("t", limit=1)
    begun, may_end, did = threading.Event(), threading.Event(), []

    def takes() -> None:
        begun.set()
        may_end.wait(30)
        did.append("first")

    first, second = threads.run(takes), threads.run(lambda: did.append("second"))
    await asyncio.to_thread(begun.wait, 30)
    threads.cancel_futures()
    for given_up in (first, second):
        with pytest.raises(asyncio.CancelledError):
            await given_up
    await asyncio.sleep(0)  # the thread's side hears of it
    may_end.set()
    assert await threads.run(lambda: 3) == 3
    assert did == ["first"]
    threads.close()


@pytest.fixture
async def pool() -> AsyncIterator[PooledThreads]:
    """One whose thread is idle."""
    made = PooledThreads("t", limit=1)
    await made.run(lambda: None)
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the event loop wait longer for a brief function, for busy machines."""
    monkeypatch.setattr(threads_module, "_BRIEF_WAIT_S", 60.0)


@pytest.mark.usefixtures("patient")
async def test_brief_function_is_over_at_once(pool: PooledThreads) -> None:
    told: list[object] = []

    def brief() -> int:
        pool.post(told.append, 1)
        pool.post(told.append, threading.get_ident())
        pool.post(lambda: told.append(threading.get_ident()))
        return threading.get_ident()

    for _ in range(3):
        work = pool.start(brief, brief=True)
        assert work.over
        thread, here = work.result(), threading.get_ident()
        assert told == [1, thread, here]
        assert thread != here
        told.clear()


async def test_cancelled_function_does_not_begin(pool: PooledThreads) -> None:
    go, did = threading.Event(), []
    first, second = pool.run(lambda: go.wait(30)), pool.run(lambda: did.append("second"))
    second.cancel()
    await asyncio.sleep(0)  # it hears of it
    go.set()
    assert await first
    await pool.run(lambda: did.append("third"))
    assert did == ["third"]


async def test_failing_callback_stops_no_other(pool: PooledThreads) -> None:
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    told: list[int] = []

    def function() -> None:
        pool.post(lambda: 1 / 0)
        pool.post(told.append, 1)

    await pool.run(function)
    assert told == [1]
    assert [type(context["exception"]) for context in failed] == [ZeroDivisionError]


def _until(so: Callable[[], bool]) -> None:
    while not so():
        time.sleep(0.001)


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_existing_threads_do_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, go = PooledThreads("t", limit=4), threading.Event()
    first = pool.run(lambda: go.wait(30))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        second = pool.run(lambda: 2)
        with pytest.raises(JobError, match="none of its code can run: can't start new thread: a limit of this process"):
            PooledThreads("none", limit=4).run(lambda: 3)
    assert not second.done()
    go.set()
    assert await first
    assert await second == 2
    pool.close()


@pytest.mark.parametrize("first", ["they wait", "it comes"])
async def test_work_fails_if_all_threads_wait(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, answer = PooledThreads("t", limit=4), concurrent.futures.Future[int]()
    begun, may_block = threading.Semaphore(0), threading.Event()

    def waits() -> int:
        begun.release()
        may_block.wait(30)
        return pool.block(answer, 60)

    waiting = [pool.run(waits) for _ in range(3)]
    for _ in waiting:
        await asyncio.to_thread(begun.acquire)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        if first == "they wait":
            may_block.set()
            _until(lambda: pool._blocked == 3)  # `to_thread` may want a thread, too
        starved = pool.run(lambda: answer.set_result(5))
        may_block.set()
        with pytest.raises(JobError, match=r"3 functions \(`def`\) wait .* \(can't start new thread\).* `async def`"):
            await asyncio.wait_for(starved, 30)
    answer.set_result(7)
    assert await asyncio.gather(*waiting) == [7, 7, 7]
    pool.close()


_FORKS = """
import asyncio, os
from taskgraph.node.usercode.threads import PooledThreads

def forks():
    child = os.fork()
    if not child:
        raise RuntimeError("it did not come to its os._exit")
    return child

async def main():
    pool = PooledThreads("t", limit=1)
    await pool.run(int)
    child = await pool.run(forks)
    for number in range(20):
        async with asyncio.timeout(30):
            assert await pool.run(lambda: number) == number
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

asyncio.run(main())
"""


def test_forked_child_takes_no_work() -> None:
    script = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKS]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr
    assert "it did not come to its os._exit" in done.stderr
    assert "t_0: a function forked this process" in done.stderr
