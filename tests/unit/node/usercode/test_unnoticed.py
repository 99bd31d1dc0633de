"""Threads and asyncio tasks that code of users starts, and whose errors nobody takes notice of."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest
import uvloop

from taskgraph.epoch import AttemptEnded
from taskgraph.node.loop import NodeLoop
from taskgraph.node.usercode.ended import pass_ended_threads_over, tell_unnoticed


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(threading, "__excepthook__", lambda args: None)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    texts: list[str] = []
    pass_ended_threads_over()
    tell_unnoticed(texts.append)
    yield texts
    tell_unnoticed(None)


def raises(error: BaseException) -> None:
    raise error


def in_thread(error: BaseException) -> None:
    thread = threading.Thread(target=raises, args=(error,))
    thread.start()
    thread.join()


def test_the_error_of_a_thread_is_told_once_with_its_line(told: list[str]) -> None:
    """It was only logged, and the epoch that the thread had held open waited, for no reason that anybody saw."""
    for _ in range(3):
        in_thread(KeyError("no"))
    (text,) = told
    line = raises.__code__.co_firstlineno + 1
    assert text.startswith(f"a thread of the job's own code ended with KeyError: 'no' (at {__file__}, line {line}): ")


def test_so_is_that_of_an_asyncio_task(told: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    async def user() -> None:
        async def late() -> None:
            raises(ValueError("late"))

        task = asyncio.create_task(late())
        await asyncio.wait([task])
        del task
        gc.collect()

    uvloop.run(user(), loop_factory=NodeLoop)
    (text,) = told
    assert text.startswith(
        f"an asyncio task or callback of the job's own code ended with ValueError: late (at {__file__}"
    )


def test_whose_attempt_ended_did_as_it_should(told: list[str]) -> None:
    in_thread(AttemptEnded(held=True))
    in_thread(AttemptEnded(held=False))
    assert told == []


def test_a_thread_that_ends_by_sys_exit_did_as_it_wished(told: list[str]) -> None:
    """It was told as an error whose traceback is in the log, where Python writes none."""
    in_thread(SystemExit(0))
    assert told == []


def test_of_many_lines_some_are_told(told: list[str]) -> None:
    namespace: dict[str, object] = {}
    lines = "".join(f"def f{i}():\n    raise KeyError({i})\n" for i in range(100))
    exec(compile(lines, __file__, "exec"), namespace)
    for i in range(100):
        thread = threading.Thread(target=namespace[f"f{i}"])  # type: ignore[arg-type]
        thread.start()
        thread.join()
    assert len(told) == 20
