"""Fixtures and checks for every test: one etcd per session, and nothing may be left behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest

from taskgraph.coordination.embedded import EmbeddedEtcd

# The same examples every time: what a change did not break must not fail for it. To look for more of them:
# pytest --hypothesis-profile=explore tests/unit/graph
# How long an example or the making of it takes says how busy the machine is: the limit of each test is pytest's.
_ANY_PACE = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("same", _ANY_PACE, derandomize=True)
hypothesis.settings.register_profile("explore", _ANY_PACE, derandomize=False, max_examples=20_000)
hypothesis.settings.load_profile("same")

# A shell has what it starts in the background ignore Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # we go on ignoring it; a handler is not passed on

#: Processes that live as long as the session: its etcd's guard.
_SESSION_PROCESSES: set[int] = set()
#: Helpers of the standard library that live as long as the process.
_LASTING_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: A process that was told to end, or a thread whose work is done, may need a moment to be gone.
_GRACE_S = 3.0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may take long begins first: a long case that begins last keeps one processor busy, and the others idle."""
    items.sort(key=_limit_s, reverse=True)


def _limit_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else 0.0


def pytest_collection_finish() -> None:
    """Keeps what was collected out of each later collection of garbage: thousands of tests, which stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def lasting_objects_are_frozen() -> None:
    """Keeps also what modules of tests imported out of later collections: a collection took 0.3 s in the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def embedded_etcd() -> Iterator[EmbeddedEtcd]:
    """A real etcd for the whole session. Tests keep apart by using keys of their own.

    Ask for it by an argument, not by `getfixturevalue` in an async fixture: it runs an event loop of its own.
    """
    before = _children()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        etcd = EmbeddedEtcd()
        runner.run(etcd.start())
        _SESSION_PROCESSES.update(_children() - before)
        try:
            yield etcd
        finally:
            runner.run(etcd.stop())


@pytest.fixture(scope="session", autouse=True)
def own_runtime_directory() -> Iterator[None]:
    """Names of jobs are unique on a host: tests that run at the same time run some of one name."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="tg-") as folder:
        patch.setenv("TASKGRAPH_RUNTIME_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves an asyncio task, a thread of ours or a child process behind."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_left_behind")
    threads, children = _threads(), _children()
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _left(threads, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test left behind: {', '.join(left)}"


@pytest.fixture
async def no_task_left_behind() -> AsyncIterator[None]:
    """Fails a test that leaves a task running in its event loop."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)  # lets what was cancelled last end
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    # gRPC ends a cancelled call in a task of its own, which nobody can await, and a served one, too: measured, up to
    # 1 ms after the call. It must end, too: a call that nobody cancelled stays. Tasks of ours get no time at all.
    if grpcs := {task for task in left if _is_grpcs(task)}:
        left -= (await asyncio.wait(grpcs, timeout=_GRACE_S))[0]
    assert not left, f"the test left tasks running: {left}"


def _is_grpcs(task: asyncio.Task[object]) -> bool:
    names = task.get_name(), getattr(task.get_coro(), "__qualname__", "")
    return any(name.startswith(("_AioCall.", "_schedule_rpc_coro", "HandleExceptions[")) for name in names)


def _left(threads: set[threading.Thread], children: set[int]) -> list[str]:
    return [
        *(f"thread {thread.name}" for thread in _threads() - threads),
        *(f"process {pid} ({_command(pid)})" for pid in _children() - children - _SESSION_PROCESSES),
    ]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("taskgraph")}


def _children() -> set[int]:
    """Our child processes; on systems without /proc, none are known."""
    found: set[int] = set()
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in path.read_text().split())
        except OSError:  # that thread ended meanwhile
            continue
    return {pid for pid in found if not any(helper in _command(pid) for helper in _LASTING_HELPERS)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
