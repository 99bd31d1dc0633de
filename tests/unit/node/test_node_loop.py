"""A node's event loop is protected from user code."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from taskgraph.errors import JobError
from taskgraph.node.loop import NodeLoop
from taskgraph.transport.endpoints import handed_over


class Mine(asyncio.Task[Any]):
    pass


def eager(loop: Any, coroutine: Any, **_: Any) -> Any:
    """As `asyncio.eager_task_factory`, in any Python."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    done = loop.create_future()
    done.set_result(ended.value.value)
    return done


def forgetful(loop: Any, coroutine: Any, **more: Any) -> None:
    asyncio.Task(coroutine, loop=loop, **more).add_done_callback(lambda _: None)


def in_a_node(scenario: Callable[[Any], None]) -> None:
    async def user() -> None:
        loop = asyncio.get_running_loop()
        scenario(loop)
        assert await loop.create_task(asyncio.sleep(0, 5)) == 5, "it goes on"

    uvloop.run(user(), loop_factory=NodeLoop)


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (lambda loop, coroutine: asyncio.Task(coroutine, loop=loop), "cannot make them, TypeError: .*'context'"),
        (lambda *_, **__: 1 / 0, "cannot make them, ZeroDivisionError: division by zero"),
        (eager, "begins them at once"),
        (forgetful, r"returns no task, but NoneType \(it has to return the one that it makes\)"),
        (lambda *_, **__: None, "returns no task, but NoneType"),
        (lambda loop, *_, **__: loop.create_future(), "returns no task, but Future"),
        pytest.param(
            getattr(asyncio, "eager_task_factory", None),
            "begins them at once|'eager_start'",
            marks=pytest.mark.skipif(
                not (3, 12) <= sys.version_info < (3, 14),
                reason="of Python 3.12; from 3.14 on uvloop has it make tasks that begin later, as others do",
            ),
        ),
        ("none", "cannot make them|must be a callable"),
    ],
)
def test_harmful_task_factory_is_refused(factory: Any, why: str) -> None:
    def sets(loop: Any) -> None:
        with pytest.raises((JobError, TypeError), match=why):
            loop.set_task_factory(factory)
        assert loop.get_task_factory() is None

    in_a_node(sets)


def test_harmless_task_factory_is_accepted() -> None:
    def sets(loop: Any) -> None:
        loop.set_task_factory(lambda loop, coroutine, **more: Mine(coroutine, loop=loop, **more))
        assert isinstance(loop.create_task(asyncio.sleep(0)), Mine)
        loop.set_task_factory(None)
        assert loop.get_task_factory() is None

    in_a_node(sets)


@pytest.mark.parametrize("loop", [NodeLoop, uvloop.Loop, asyncio.SelectorEventLoop])
def test_uvloop_closes_own_descriptors_only(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Otherwise the number is closed once more when the socket is collected, and belongs to another file by then."""

    async def hands_over() -> int:
        with socket.socket() as sock:
            with handed_over(sock):
                number = sock.fileno()
            if (mine := sock.fileno()) < 0:
                socket.close(number)
            return mine

    with asyncio.Runner(loop_factory=loop) as runner:
        assert (runner.run(hands_over()) < 0) is (loop is not asyncio.SelectorEventLoop)


def test_user_code_cannot_stop_loop() -> None:
    def scenario(loop: Any) -> None:
        with pytest.raises(JobError, match=r"loop\.stop\(\): this event loop is the node's"):
            loop.stop()

    in_a_node(scenario)
