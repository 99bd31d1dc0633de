"""gRPC channels: closed ones are not referenced, and a forked child does not wait for its parent's."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.etcd.connection import Connection
from taskgraph.coordination.etcd.options import EtcdOptions
from taskgraph.errors import Unavailable
from taskgraph.network import rpc


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is in a cycle stays, as it may until somebody forks."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collection")
async def test_closed_connection_leaves_no_channel() -> None:
    before = len(rpc.living_channels())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = Connection(EtcdOptions.make(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05))
        etcd = EtcdCoordinator(connection, "3.5.1")

        async def watch() -> None:
            async for _ in etcd.watch("/", 1):
                raise AssertionError("there is nobody")

        # In a list, which is emptied: up to Python 3.12 a grpcio before 1.83 has the frames of tasks keep what their
        # variables are when it closes a channel, until they return.
        watching = [asyncio.ensure_future(watch())]
        with pytest.raises(Unavailable) as failed:
            await etcd.get("/")
        assert len(rpc.living_channels()) == before + 1
        watching[0].cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await etcd.close()
        assert watching.pop().cancelled() and failed.value
        with pytest.raises(Unavailable, match="was closed"):
            await etcd.get("/")
        with pytest.raises(Unavailable, match="was closed"):
            await watch()
    if grpcs := asyncio.all_tasks() - {asyncio.current_task()}:  # it ends a cancelled call in a task of its own
        await asyncio.wait(grpcs, timeout=30)
    del grpcs
    assert len(rpc.living_channels()) == before


def test_forgotten_frames_keep_lines() -> None:
    class Held:
        there = 0

        def __init__(self) -> None:
            Held.there += 1

        def __del__(self) -> None:
            Held.there -= 1

    def fails(depth: int) -> None:
        held = Held()
        if not depth:
            raise ValueError(held.there)
        try:
            fails(depth - 1)
        except ValueError as error:
            if depth == 1:
                raise KeyError(depth) from error
            raise

    try:
        fails(0)
    except ValueError as callers:
        with pytest.raises(KeyError) as failed:
            fails(2)
        assert Held.there == 4
        rpc.forget_frames(failed.value, callers)
        assert Held.there == 1, "what its caller handles is not ours"
        callers.__context__ = failed.value
        rpc.forget_frames(failed.value, None)
        assert Held.there == 0
    assert failed.traceback[-1].name == "fails"


_FORKS = """
import asyncio, gc, os, signal, sys
from taskgraph.network import rpc
from taskgraph.errors import CoordinationError

gc.disable()
how = sys.argv[1]

def used():
    async def use():
        channel = rpc.aio_channel("127.0.0.1:1", None, ())
        try:
            await channel.unary_unary("/a/b")(b"", timeout=0.1)
        except Exception as error:
            print(type(error).__name__, flush=True)
        await rpc.close(channel)
    try:
        asyncio.run(use())
    except CoordinationError as error:
        print(error, flush=True)

async def parent():
    channel = rpc.aio_channel("127.0.0.1:1", None, ())
    if how != "open":
        await rpc.close(channel)
    cycle = [channel]
    cycle.append(cycle)
    return cycle if how == "kept" else None

kept = asyncio.run(parent())
for _ in range(2):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        signal.alarm(50)
        del kept
        gc.collect()
        used()
        sys.exit(0)
"""


@pytest.mark.parametrize("how", ["collected", "kept", "open"])
def test_forked_child_does_not_hang(how: str) -> None:
    """It hung in its first garbage collection, at full speed."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if how == "collected":
            assert line == "AioRpcError", "it connects like any other process"
        else:
            assert line.startswith("this process was forked while its parent was connected"), "it would wait for ever"
    assert len(done.stdout.splitlines()) == 2


_FORKS_OF_THREADS = """
import asyncio, os, threading
from taskgraph.network import rpc

async def parent():
    return rpc.aio_channel("127.0.0.1:1", None, ())

kept, told = asyncio.run(parent()), []
much = [bytearray(b"x") * (1 << 20) for _ in range(100)]  # a fork takes longer

def forks():
    for _ in range(20):
        if child := os.fork():
            told.append(os.waitpid(child, 0)[1])
        else:
            os._exit(0 if rpc._inherited else 7)

threads = [threading.Thread(target=forks) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(told.count(0), len(told), flush=True)
os._exit(0)
"""


def test_forks_of_several_threads() -> None:
    """What one thread was about to leave to its child another one had forgotten: the child crashed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS_OF_THREADS], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["80", "80"], done


def test_search_runs_no_user_code() -> None:
    class Nameless(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise RuntimeError("no name")

    class Hostile(metaclass=Nameless):
        pass

    there = Hostile()
    there.itself = there  # type: ignore[attr-defined]
    assert rpc.living_channels() is not None and gc.is_tracked(there)
    del there.itself  # type: ignore[attr-defined]


class Answering(grpc.GenericRpcHandler):
    """Answers each call once it may, and knows which were given up."""

    def __init__(self) -> None:
        self.begun, self.may, self.given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: object) -> bytes:
        self.begun.set()
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return request


async def test_answer_during_a_standstill_counts() -> None:
    """As with gRPC's own timeout: a call that was given up for it had etcd left, and the job listed again."""
    ours, theirs = socket.socketpair()

    async def call() -> bytes:
        return await asyncio.get_running_loop().sock_recv(ours, 1)

    with ours, theirs:
        ours.setblocking(False)
        answering = asyncio.ensure_future(rpc.await_answer(call(), 0.05))
        await asyncio.sleep(0)
        theirs.send(b"x")
        time.sleep(0.1)  # noqa: ASYNC251
        assert await answering == b"x"


async def test_timeout_cancels_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code of users may have stopped `time.time`: every call failed at once, and the job hung."""
    there, server = Answering(), grpc.aio.server()
    server.add_generic_rpc_handlers((there,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = rpc.aio_channel(f"127.0.0.1:{port}", None, ())
    try:
        with monkeypatch.context() as stopped:
            stopped.setattr(time, "time", lambda: 1.7e9)
            send = channel.unary_unary("/a/b")
            one = send(b"one")
            async with asyncio.timeout(30):
                await there.begun.wait()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rpc.await_answer(one, 0.05)
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            async with asyncio.timeout(30):
                await there.given_up.wait()
            there.may.set()
            assert await rpc.await_answer(send(b"two"), 30.0) == b"two"
    finally:
        await rpc.close(channel)
        await server.stop(None)
