"""Errors of threads and asyncio tasks of user code, which no code handles, are reported."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest
import uvloop

from taskgraph.epoch import AttemptEnded
from taskgraph.node.loop import NodeLoop
from taskgraph.node.usercode.uncaught import set_reporter, silence_expected_ends


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(threading, "__excepthook__", lambda args: None)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    texts: list[str] = []
    silence_expected_ends()
    set_reporter(texts.append)
    yield texts
    set_reporter(None)


def raises(error: BaseException) -> None:
    raise error


def in_thread(error: BaseException) -> None:
    thread = threading.Thread(target=raises, args=(error,))
    thread.start()
    thread.join()


def test_error_of_a_thread_is_reported_once(told: list[str]) -> None:
    for _ in range(3):
        in_thread(KeyError("no"))
    (text,) = told
    line = raises.__code__.co_firstlineno + 1
    assert text.startswith(f"a thread of the job's own code ended with KeyError: 'no' (at {__file__}, line {line}): ")


def test_error_of_an_asyncio_task_is_reported(told: list[str], capfd: pytest.CaptureFixture[str]) -> None:
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


def test_ended_attempts_are_not_reported(told: list[str]) -> None:
    in_thread(AttemptEnded(held=True))
    in_thread(AttemptEnded(held=False))
    assert told == []


def test_sys_exit_in_a_thread_is_not_reported(told: list[str]) -> None:
    in_thread(SystemExit(0))
    assert told == []


def test_reported_places_are_bounded(told: list[str]) -> None:
    namespace: dict[str, object] = {}
    lines = "".join(f"def f{i}():\n    raise KeyError({i})\n" for i in range(100))
    exec(compile(lines, __file__, "exec"), namespace)
    for i in range(100):
        thread = threading.Thread(target=namespace[f"f{i}"])  # type: ignore[arg-type]
        thread.start()
        thread.join()
    assert len(told) == 20
