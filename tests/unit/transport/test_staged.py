"""A reply that leaves the process is copied to the host first, and nothing else waits for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice
from transport_kit import Node, nodes_of_a_host, pull

from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import Refused
from taskgraph.graph.blocks import block_behind
from taskgraph.graph.values import decode, device_buffers, encode
from taskgraph.protocol import messages as m
from taskgraph.transport.api import PendingReply

HOST = np.arange(300_000.0)


@pytest.fixture
def soft() -> SoftDevice:
    return SoftDevice()


@pytest.fixture
async def nodes(folder: Path) -> AsyncIterator[list[Node]]:
    async with nodes_of_a_host(folder, "producer", "consumer", "other") as made:
        yield made


async def on_device(soft: SoftDevice) -> m.Encoded:
    """Makes an item of the producer."""
    return await asyncio.to_thread(lambda: encode({"x": soft.xp.asarray(HOST), "n": 3}, stays=True))


def item(value: m.Encoded, call: m.Pull | None = None) -> m.Item:
    call = call or pull()
    return m.Item(call.stamp, 1, call.tag, value)


def at_once(node: Node, value: m.Encoded) -> None:
    node.at_once = lambda caller, call: item(value, call)


def coming(node: Node, value: m.Encoded) -> None:
    def later(caller: str, call: m.Call) -> PendingReply:
        promise = PendingReply()
        asyncio.get_running_loop().call_later(0.01, promise.settle, item(value, call))
        return promise

    node.at_once = later


def served(node: Node, value: m.Encoded) -> None:
    async def handler(caller: str, call: m.Call) -> m.Reply:
        await asyncio.sleep(0)
        return item(value, call)

    node.handler = handler


@pytest.mark.parametrize("answers", [at_once, coming, served])
async def test_device_item_arrives_on_the_host(
    nodes: list[Node], soft: SoftDevice, answers: Callable[[Node, m.Encoded], None]
) -> None:
    producer, consumer, other = nodes
    value = await on_device(soft)
    answers(producer, value)
    calls = [node.call(producer, pull(tag)) for node in (consumer, other) for tag in ("a", "b")]
    for reply in await asyncio.gather(*calls):
        assert isinstance(reply, m.Item) and type(reply.value) is m.Encoded
        assert reply.value.digest == value.digest and reply.value.meta == value.meta
        assert np.array_equal(decode(reply.value)["x"], HOST)
        there = decode(reply.value, device=soft)["x"]
        assert type(there) is SoftArray, "and on the device of a node that has one"
    assert device_buffers(value)[0].host_copies == 1
    assert soft.waits and not soft.waits_on_loops
    lent = block_behind(device_buffers(value)[0].copy_to_host()) is not None
    assert lent == (producer.transport.allocate(HOST.nbytes) is not None), "memory that travels without a copy"


async def test_call_to_oneself_keeps_device_values(nodes: list[Node], soft: SoftDevice) -> None:
    producer = nodes[0]
    value = await on_device(soft)
    at_once(producer, value)
    reply = await producer.call(producer, pull())
    assert isinstance(reply, m.Item) and reply.value is value
    assert device_buffers(value)[0].host_copies == 0


class Gate:
    """Stops copies to the host until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        copy = DeviceBuffer.copy_to_host

        def held(buffer: DeviceBuffer, *args: Any) -> memoryview:
            self.reached.set()
            assert self.open.wait(60)
            return copy(buffer, *args)

        monkeypatch.setattr(DeviceBuffer, "copy_to_host", held)


async def test_other_calls_do_not_wait_for_a_copy(
    nodes: list[Node], soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    value, small = await on_device(soft), encode("small")
    producer.at_once = lambda caller, call: item(small if call.tag == "small" else value, call)  # type: ignore[union-attr]
    gate = Gate(monkeypatch)
    large = asyncio.ensure_future(consumer.call(producer, pull("large")))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    reply = await consumer.call(producer, pull("small"))
    assert isinstance(reply, m.Item) and decode(reply.value) == "small"
    assert not large.done()
    gate.open.set()
    assert np.array_equal(decode((await large).value)["x"], HOST)  # type: ignore[union-attr]


class CUDARuntimeError(RuntimeError):
    __module__ = "cupy_backends.cuda.api.runtime"


@pytest.mark.parametrize(
    ("error", "reason"), [(MemoryError(), m.Reason.NOT_COPIED), (CUDARuntimeError(), m.Reason.DEVICE_ERROR)]
)
async def test_failed_copy_is_a_refusal(
    nodes: list[Node],
    soft: SoftDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: str,
) -> None:
    """A failed copy without a device error must not be retried: the epoch restarted for ever."""
    producer, consumer, _ = nodes
    at_once(producer, await on_device(soft))
    monkeypatch.setattr(soft, "fetch", MagicMock(side_effect=error))
    with pytest.raises(Refused, match=f"cannot be copied to the host: {type(error).__name__}") as refused:
        await consumer.call(producer, pull())
    assert refused.value.reason == reason
    assert "cannot be copied to the host" in caplog.text
