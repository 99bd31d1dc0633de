"""Arrays of a device between nodes, while calls are cancelled, sessions end, memory is short and nothing is certain.

Every value that arrives is looked at to the last byte, and at the end nothing may be left: no ticket, nothing open,
nothing locked, no memory. A seed decides what is done; threads and sockets when it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_kit import JOB, TOKEN, Node, forget, pull, stream_of, turns_until

from taskgraph.device import buffers, pinning, shared, staging
from taskgraph.errors import PeerLost, Refused
from taskgraph.graph.values import decode, digesting, encode, verify
from taskgraph.protocol import messages as m
from taskgraph.settings import Settings
from taskgraph.testing.softdevice import SoftArray, SoftDevice
from taskgraph.transport import devicelending, segments
from taskgraph.transport.api import PendingReply
from taskgraph.transport.mappings import CannotBorrow
from taskgraph.transport.sides import AcceptedSession
from taskgraph.transport.stream import StreamTransport

MIB = 1 << 20
SIZES = (1000, 100_000, MIB, MIB + 8, 2 * MIB + 8, 5 * MIB)
STEPS = 150


class Fuzz:
    """Three nodes that reach each other by unix sockets, and one that is reached by TCP only."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.soft = SoftDevice(seed if seed % 2 else None, races=seed % 3 > 0)
        self.memory = shared.offer(self.soft)
        self.streams = [self.soft.stream() for _ in range(3)]
        self.nodes = [self._node(name, folder) for name in ("a", "b", "c", "far")]
        self.stores: dict[str, dict[str, m.Encoded]] = {node.name: {} for node in self.nodes}
        self.put_as: dict[float, tuple[str, dict[str, np.ndarray]]] = {}  # what was put, by what is in it
        self.kept: list[object] = []
        self.calls: set[asyncio.Task[None]] = set()
        self.made = self.came = self.stayed = 0
        self._patch(monkeypatch)

    def _node(self, name: str, folder: Path) -> Node:
        unix = None if name == "far" else folder
        transport = StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, digesting=digesting, unix_dir=unix)
        node = Node(name, transport)

        def serve(caller: str, call: m.Call) -> m.Reply | PendingReply:
            assert isinstance(call, m.Pull)
            found = self.stores[name].get(call.tag)
            if found is None:
                return m.Refusal(m.Reason.NOT_OFFERED)
            reply = m.Item(call.stamp, 1, call.tag, found)
            if self.rng.random() < 0.5:
                return reply
            coming = PendingReply()
            asyncio.get_running_loop().call_later(self.rng.random() / 300, coming.settle, reply)
            return coming

        node.at_once = serve
        return node

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (devicelending, shared, segments):
            monkeypatch.setattr(module, "_IDLE_S", -1.0)
        monkeypatch.setattr(devicelending, "_MAX_OPEN", 3)
        monkeypatch.setattr(devicelending, "_MAX_LENT", 6)
        monkeypatch.setattr(pinning, "_locked", pinning._Locked(20 * MIB))
        monkeypatch.setattr(staging, "_queued", set())
        monkeypatch.setattr(buffers, "_kept", set())
        errors: list[tuple[Any, str, Callable[[str], Exception], float]] = [
            (self.soft, "allocate", MemoryError, 0.1),
            (self.soft, "open", OSError, 0.02),
            (self.soft, "register", OSError, 0.02),
            (self.soft, "fill", ArithmeticError, 0.02),
            *((stream_of(node).mappings, "borrow", partial(CannotBorrow, for_good=False), 0.02) for node in self.nodes),
        ]
        for owner, name, error, often in errors:
            monkeypatch.setattr(owner, name, self._sometimes(getattr(owner, name), error, often))
        keeps, rng = self.soft.keeps, random.Random(self.rng.random())
        monkeypatch.setattr(self.soft, "keeps", lambda array: rng.random() > 0.01 and keeps(array))

    def _sometimes(self, real: Callable[..., Any], error: Callable[[str], Exception], often: float) -> Any:
        rng = random.Random(self.rng.random())

        def call(*args: Any) -> Any:
            if rng.random() < often:
                raise error("not now")
            return real(*args)

        return call

    # What is done.

    async def put(self, node: Node) -> None:
        self.made += 1
        number, sizes = self.made, self.rng.choices(SIZES, k=self.rng.randint(1, 3))
        hosts = {f"x{at}": np.full(size // 8, number * 10.0 + at) for at, size in enumerate(sizes)}
        for host in hosts.values():
            host[:: self.rng.randint(5, 50)] += self.rng.random()
        there, stream = self.rng.random() < 0.3, self.rng.choice(self.streams)

        def work() -> m.Encoded:
            with self.soft.on(stream):
                value: dict[str, Any] = {key: self.soft.xp.asarray(host) for key, host in hosts.items()}
                if there:
                    value["there"] = hosts["there"] = np.arange(20_000.0) + number
                encoded = encode(value, stays=True, lendable=True, allocate=node.transport.allocate)
                for array in value.values():  # the task's own later writes
                    if isinstance(array, SoftArray):
                        array += 1e6
                return encoded

        tag = f"t{self.rng.randrange(4)}"
        self.put_as[hosts["x0"][1]] = tag, hosts
        with contextlib.suppress(ArithmeticError):
            self.stores[node.name][tag] = await asyncio.to_thread(work)

    async def pulled(self, consumer: Node, producer: Node, tag: str) -> None:
        try:
            reply = await consumer.call(producer, pull(tag), timeout_s=20.0)
        except (PeerLost, Refused) as error:
            said = str(error)
            assert "corrupted" not in said and "no answer" not in said and "keeps lending" not in said, said
            assert isinstance(error, PeerLost) or error.reason == m.Reason.NOT_OFFERED, said
            return
        assert isinstance(reply, m.Item)
        self.came += 1
        self.stayed += type(reply.value) is m.EncodedOnDevice
        await asyncio.to_thread(self._look, reply.value, self.rng.choice(self.streams), tag)
        if self.rng.random() < 0.3:
            self.stores[consumer.name][tag] = reply.value

    def _look(self, value: m.Encoded, stream: Any, tag: str) -> None:
        with self.soft.on(stream):
            found = decode(value, device=self.soft)
            arrays = {key: array.get() if isinstance(array, SoftArray) else array for key, array in found.items()}
            first = arrays["x0"][1]
            put_as, hosts = self.put_as[first]
            assert tag == put_as and hosts.keys() == arrays.keys()
            for key, array in arrays.items():
                assert np.array_equal(array, hosts[key]), key
            if np.random.default_rng(int(first)).random() < 0.3:
                self.kept.append(found["x0"] if isinstance(found["x0"], np.ndarray) else (found["x0"], found["x0"] + 1))

    async def step(self) -> None:
        node, other = self.rng.sample(self.nodes, 2)
        what = self.rng.random()
        if what < 0.3:
            await self.put(node)
        elif what < 0.8:
            call = asyncio.ensure_future(self.pulled(node, other, f"t{self.rng.randrange(4)}"))
            self.calls.add(call)
            if self.rng.random() < 0.3:
                asyncio.get_running_loop().call_later(self.rng.random() / 200, call.cancel)
        elif what < 0.84:
            forget(node, other.name)
        elif what < 0.9:
            trim(node)
        elif what < 0.94:
            await asyncio.to_thread(shared._give_back, self.rng.randrange(10 * MIB))
        elif what < 0.97:
            self.stores[node.name].pop(f"t{self.rng.randrange(4)}", None)
            self.kept.clear()
        else:
            await asyncio.sleep(self.rng.random() / 100)
        if self.rng.random() < 0.5:
            await asyncio.sleep(0)
        for call in [call for call in self.calls if call.done()]:
            self.calls.discard(call)
            with contextlib.suppress(asyncio.CancelledError):
                call.result()

    # And what is left of it.

    def lendings(self) -> Iterator[devicelending.DeviceLending]:
        for node in self.nodes:
            for session in stream_of(node)._connections:
                if isinstance(session, AcceptedSession):
                    yield session._devices

    async def nothing_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for outcome in await asyncio.gather(*self.calls, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        self.calls.clear()
        self.stores = {node.name: {} for node in self.nodes}
        self.kept.clear()
        await turns_until(lambda: gc.collect() >= 0 and not any(map(len, self.lendings())), "the tickets to go back")

        def trimmed() -> bool:
            gc.collect()
            for node in self.nodes:
                trim(node)
            return not self.soft.opened

        await turns_until(trimmed, "what was opened to be closed")
        await turns_until(lambda: trimmed() and not len(self.memory), "the memory to go")
        for node in self.nodes:
            await node.transport.close()

        def unlocked() -> bool:
            gc.collect()
            for node in self.nodes:
                stream_of(node)._pool.trim()  # what became garbage after it was closed
            return not pinning._locked.nbytes

        await turns_until(unlocked, "the locked memory to go")
        self.soft.synchronize()
        everything = gc.get_objects()
        memories = [one for one in everything if isinstance(one, buffers._Memory) and one.device is self.soft]
        copies = [one for one in everything if isinstance(one, staging.HostCopy) and one._device is self.soft]
        assert not memories and not copies and not self.soft.registered
        assert not staging._queued and not buffers._kept
        assert not self.soft.misuses and not self.soft.waits_on_loops and not self.soft.calls_on_loops


def trim(node: Node) -> None:
    transport = stream_of(node)
    assert transport._trimming is not None
    transport._trimming.cancel()  # it makes the next one itself
    transport._trim()


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Records keep errors, and these memory."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)  # loggers remember what is disabled: this makes them look again


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("seed", range(3))
async def test_every_value_is_right_and_nothing_is_left(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
    fuzz = Fuzz(seed, folder, monkeypatch)
    try:
        for node in fuzz.nodes:
            await node.start()
        for _ in range(STEPS):
            await fuzz.step()
        await fuzz.nothing_is_left(monkeypatch)
    finally:
        shared._offered.clear()
        for node in fuzz.nodes:
            await node.transport.close()
    assert not troubles
    assert fuzz.stayed > 0 and fuzz.came > fuzz.stayed
