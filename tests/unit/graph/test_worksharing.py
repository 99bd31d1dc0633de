"""Passes that are shared with idle cores: every block once, errors reach the caller, and nobody waits for nobody."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from taskgraph.graph import arrays, worksharing
from taskgraph.graph.digests import BLOCK_BYTES
from taskgraph.graph.values import encode
from taskgraph.graph.worksharing import for_each

WAIT_S = 20.0
idle_here = worksharing.idle_cores


@pytest.fixture(autouse=True)
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Helpers of the test's own, which end soon; and two cores, whatever the machine has, one of them idle."""
    monkeypatch.setattr(worksharing, "_team", worksharing._HelperThreads())
    monkeypatch.setattr(worksharing, "_IDLE_S", 0.2)
    monkeypatch.setattr(worksharing, "cores", lambda: 2)
    monkeypatch.setattr(worksharing, "idle_cores", lambda: 99)
    yield
    assert not worksharing._team._open_passes
    assert until(lambda: worksharing._team._helpers == 0 and not helpers())


def until(true: Callable[[], bool]) -> bool:
    """Helpers begin and end when they have a core."""
    deadline = time.monotonic() + WAIT_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("taskgraph-helper")]


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize(("blocks", "cores"), [(0, 2), (1, 16), (2, 1), (2, 2), (3, 2), (64, 3), (64, 16)])
def test_every_block_once(blocks: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worksharing, "cores", lambda: cores)
    for _ in range(20):
        done: list[int] = []
        for_each(done.append, blocks)
        assert sorted(done) == list(range(blocks))
    assert len(helpers()) <= max(0, min(blocks, cores, 4) - 1)


def test_a_helper_takes_part() -> None:
    """Each of the two blocks is ended by the other: one thread alone would wait for ever."""
    together = threading.Barrier(2)
    for _ in range(5):
        for_each(lambda _: together.wait(WAIT_S), 2)
    assert len(helpers()) == 1


def test_helpers_end_despite_late_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worksharing, "cores", lambda: 4)
    monkeypatch.setattr(worksharing, "_IDLE_S", 0.002)
    for pause in range(100):
        for blocks in (4, 3, 2):
            for_each(lambda _: time.sleep(1e-4), blocks)
            time.sleep(pause % 30 * 1e-4)
        assert until(lambda: worksharing._team._helpers == 0)


def test_caller_does_not_wait_for_late_helper() -> None:
    """The only helper is busy elsewhere; it comes when this pass is over, and finds nothing to do."""
    busy, free = threading.Barrier(3), threading.Event()

    def work(_: int) -> None:
        busy.wait(WAIT_S)
        free.wait(WAIT_S)

    other = in_thread(lambda: for_each(work, 2))
    busy.wait(WAIT_S)
    for _ in range(3):
        by: list[int] = []
        for_each(lambda _: by.append(threading.get_ident()), 10)  # noqa: B023
        assert by == [threading.get_ident()] * 10
    assert other.is_alive()
    free.set()
    other.join()
    for _ in range(3):  # and it is of use again
        together = threading.Barrier(2)
        for_each(lambda _: together.wait(WAIT_S), 2)  # noqa: B023


@pytest.mark.parametrize("where", ["_thread.start_new_thread", "threading.Thread.start"])
def test_caller_works_without_threads(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(where, start)
    for _ in range(3):
        done: list[int] = []
        for_each(done.append, 10)
        assert done == list(range(10))


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_error_stops_the_pass(where: str) -> None:
    caller = threading.get_ident()
    both, raised = threading.Barrier(2), threading.Event()
    begun: list[int] = []

    def work(block: int) -> None:
        begun.append(block)
        both.wait(WAIT_S)
        if (threading.get_ident() == caller) == (where == "caller"):
            raised.set()
            raise ValueError(f"block {block}")
        raised.wait(WAIT_S)
        time.sleep(0.05)  # so that the error is known

    for _ in range(3):
        raised.clear()
        begun.clear()
        with pytest.raises(ValueError, match=r"block [01]") as found:
            for_each(work, 10)
        assert sorted(begun) == [0, 1]
        assert found.traceback[-1].name == "work"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_when_it_raises_nobody_works_any_more(error: type[BaseException]) -> None:
    """What a helper has begun is waited for: it may write to memory that the caller is to use for something else."""
    caller = threading.get_ident()
    both = threading.Barrier(2)
    ended: list[int] = []

    def work(block: int) -> None:
        both.wait(WAIT_S)
        if threading.get_ident() == caller:
            raise error
        time.sleep(0.2)
        ended.append(block)

    with pytest.raises(error):
        for_each(work, 10)
    assert len(ended) == 1


def test_interrupted_caller_leaves_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while the last block of a helper is waited for: that block ends, and no other is begun."""
    shared = worksharing._Pass(lambda block: done.append(block), 3)
    done: list[int] = []

    class Thrown:
        def get(self) -> None:
            raise KeyboardInterrupt

        def put(self, _: None) -> None:
            pass

    shared._blocks.popleft()  # as a helper would
    monkeypatch.setattr(shared, "_finished_by_helpers", Thrown())
    with pytest.raises(KeyboardInterrupt):
        shared.run(lambda: False)
    assert done == [1, 2]
    shared._blocks.append(0)
    shared.help()
    assert done == [1, 2]


def test_passes_of_several_threads_at_once() -> None:
    results: dict[int, list[int]] = {}

    def many(number: int) -> None:
        for _ in range(30):
            done: list[int] = []
            for_each(done.append, 50)
            results.setdefault(number, []).append(sum(done))
        with pytest.raises(KeyError, match=str(number)):
            for_each(lambda _: {}[number], 5)

    callers = [in_thread(lambda number=number: many(number)) for number in range(4)]  # type: ignore[misc]
    for caller in callers:
        caller.join()
    assert results == {number: [sum(range(50))] * 30 for number in range(4)}


def test_helper_keeps_no_references() -> None:
    together = threading.Barrier(2)
    array = np.zeros(10)

    def work(block: int, array: np.ndarray[tuple[int], np.dtype[np.float64]] = array) -> None:
        together.wait(WAIT_S)

    seen, work_seen = weakref.ref(array), weakref.ref(work)
    for_each(work, 2)
    del array, work
    assert seen() is None and work_seen() is None
    assert helpers()


def test_the_error_is_kept_by_nobody() -> None:
    class Noticed(Exception):
        pass

    def fail() -> weakref.ref[Noticed]:
        def work(_: int) -> None:
            raise Noticed

        try:
            for_each(work, 5)
        except Noticed as error:
            return weakref.ref(error)
        raise AssertionError("nothing was raised")

    assert fail()() is None


def test_idle_helpers_end() -> None:
    together = threading.Barrier(2)
    for _ in range(2):
        for_each(lambda _: together.wait(WAIT_S), 2)
        (helper,) = helpers()
        assert helper.daemon
        helper.join(WAIT_S)
        assert not helpers()


def test_little_is_not_shared() -> None:
    least = worksharing.LEAST_BYTES
    assert encode([np.zeros(least // 2 - 8, "u1"), np.zeros(least // 2 - 8, "u1")])
    assert worksharing._team._helpers == 0
    assert encode([np.zeros(least // 2, "u1"), np.zeros(least // 2, "u1")])
    assert worksharing._team._helpers == 1


@pytest.mark.parametrize(("idle", "helping"), [(-5, 0), (0, 0), (1, 1), (2, 2), (9, 3)])
def test_only_idle_cores_help(idle: int, helping: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worksharing, "cores", lambda: 8)
    monkeypatch.setattr(worksharing, "idle_cores", lambda: idle)
    together = threading.Barrier(1 + helping)
    for_each(lambda _: together.wait(WAIT_S), 12)
    assert len(helpers()) == worksharing._team._helpers == helping


def test_cores_that_become_idle_help(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([0, -1, 1])
    monkeypatch.setattr(worksharing, "idle_cores", lambda: next(looks))
    rest = threading.Barrier(2)
    began: list[tuple[int, int]] = []

    def work(block: int) -> None:
        began.append((block, threading.get_ident()))
        if block >= 2 * worksharing._RECHECK_BLOCKS:
            rest.wait(WAIT_S)

    for_each(work, 2 * worksharing._RECHECK_BLOCKS + 20)
    mine = [block for block, thread in began if thread == threading.get_ident()]
    assert mine[: 2 * worksharing._RECHECK_BLOCKS] == list(range(2 * worksharing._RECHECK_BLOCKS))
    assert len(mine) == len(began) - 10


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("0.20 0.18 0.12 1/80 11206\n", 7),
        ("9.20 0.18 0.12 8/80 1", 0),
        ("20 18 12 30/80 1", -22),
        *((unknown, 7) for unknown in (None, "", "1 2 3", "1 2 3 x/y 5", "\0\0\0")),
    ],
)
def test_idle_cores_by_load(text: str | None, idle: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "loadavg"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(worksharing, "_LOADAVG_PATH", str(file))
    monkeypatch.setattr(worksharing, "_MACHINE_CORES", 8)
    before = len(os.listdir("/dev/fd"))
    assert [idle_here() for _ in range(5)] == [idle] * 5
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_affinity_limits_cores() -> None:
    text = run("import os; os.sched_setaffinity(0, {0}); from taskgraph.system.host import cores; print(cores())")
    assert text == "1"


SCRIPT = """
    import os, sys, threading
    import numpy as np
    from taskgraph.graph import worksharing
    from taskgraph.graph.values import encode, verify

    worksharing.cores = lambda: 2
    worksharing.idle_cores = lambda: 1
    worksharing._IDLE_S = 1000.0
    array = np.arange(3 << 20)
    assert verify(encode(array))
    together = threading.Barrier(2)
    worksharing.for_each(lambda _: together.wait(20), 2)
    assert any(thread.name.startswith("taskgraph-helper") for thread in threading.enumerate())
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_process_ends_at_once() -> None:
    assert run(SCRIPT + "    print('end')") == "end"


def test_forked_process_has_own_helpers() -> None:
    text = run(
        SCRIPT
        + """
    worksharing._team._helpers_lock.acquire()  # as a thread may hold it while another one forks
    child = os.fork()
    if child == 0:
        barrier = threading.Barrier(2)
        worksharing.for_each(lambda _: barrier.wait(20), 2)
        assert verify(encode(array))
        os.write(1, b"child ")
        os._exit(0)
    print("parent", os.waitpid(child, 0)[1])
    """
    )
    assert text == "child parent 0"


@pytest.mark.parametrize(
    ("what", "size"), [("copy", BLOCK_BYTES), ("update", arrays._CHUNK_BYTES), ("digest", arrays._CHUNK_BYTES)]
)
def test_blocks_release_the_gil(what: str, size: int) -> None:
    """With this interval a thread gets the interpreter's lock only where it is released."""
    source, target, hasher = np.ones(size, "u1"), np.ones(size, "u1"), xxhash.xxh3_128()
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, source),
        "update": lambda: hasher.update(source.data),
        "digest": lambda: xxhash.xxh3_128_digest(source.data),
    }
    work = works[what]
    ran: list[bool] = []
    before = sys.getswitchinterval()
    deadline = time.monotonic() + WAIT_S
    try:
        sys.setswitchinterval(1000.0)
        _thread.start_new_thread(ran.append, (True,))
        while not ran and time.monotonic() < deadline:
            work()
    finally:
        sys.setswitchinterval(before)
    assert ran
