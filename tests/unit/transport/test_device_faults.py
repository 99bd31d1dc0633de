"""What may go wrong with memory of a device, at the worst moment: nobody waits for ever, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice
from transport_kit import Node, nodes_of_a_host, pull, turns_until

from taskgraph.device import shared, virtual
from taskgraph.device.shared import SharedMemory
from taskgraph.graph.values import decode, device_buffers, encode
from taskgraph.protocol import messages as m
from taskgraph.transport.sides import AcceptedSession
from taskgraph.transport.stream import StreamTransport

HOST = np.arange(300_000.0)


@pytest.fixture
async def nodes(folder: Path) -> AsyncIterator[list[Node]]:
    async with nodes_of_a_host(folder, "producer", "consumer") as made:
        yield made


def put(soft: SoftDevice, host: np.ndarray = HOST, **more: Any) -> m.Encoded:
    return encode({"x": soft.xp.asarray(host), **more}, stays=True, lendable=True)


def serves(node: Node, value: m.Encoded) -> None:
    node.at_once = lambda caller, call: m.Item(call.stamp, 1, call.tag, value)  # type: ignore[arg-type, union-attr]


async def pulled(consumer: Node, producer: Node) -> m.Encoded:
    async with asyncio.timeout(30):
        reply = await consumer.transport.call(producer.peer, pull("x"), timeout_s=None)
    assert isinstance(reply, m.Item)
    return reply.value


def lent(node: Node) -> int:
    assert isinstance(node.transport, StreamTransport)
    return sum(len(s._devices) for s in node.transport._connections if isinstance(s, AcceptedSession))


async def x_of(value: m.Encoded, soft: SoftDevice) -> np.ndarray:
    array = decode(value, device=soft)["x"]
    return await asyncio.to_thread(array.get) if type(array) is SoftArray else array


@pytest.mark.parametrize("error", [virtual.DriverError("cuMemCreate", 801), OSError("this driver has no cuMemCreate")])
def test_values_work_without_shared_device_memory(
    soft: SoftDevice,
    memory: SharedMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Any,
) -> None:
    """As with an older driver: neither a put nor the process fails."""
    tries = []

    def cannot(nbytes: int) -> None:
        tries.append(nbytes)
        raise error

    monkeypatch.setattr(soft, "allocate", cannot)
    for number in range(3):
        value = put(soft, HOST + number)
        assert type(value) is m.EncodedOnDevice and device_buffers(value)[0].segment is None
        assert np.array_equal(decode(value)["x"], HOST + number)
    assert len(tries) == 1 and caplog.text.count("go by the host") == 1


@pytest.mark.parametrize("what", ["identity", "a view", "the second view", "opening"])
async def test_call_survives_errors_of_the_device(
    nodes: list[Node],
    soft: SoftDevice,
    memory: SharedMemory,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    producer, consumer = nodes
    value = await asyncio.to_thread(lambda: put(soft, y=soft.xp.asarray(HOST + 1)))
    serves(producer, value)
    view, views = soft.view, []

    def fails(*args: Any) -> Any:
        raise ArithmeticError("cudaErrorIllegalAddress")

    def fails_at(*args: Any) -> Any:
        views.append(args)
        return view(*args) if len(views) != (1 if what == "a view" else 2) else fails()

    with monkeypatch.context() as patch:
        if what == "identity":
            patch.setattr(shared, "memory_of_identity", fails)
        elif what == "opening":
            patch.setattr(soft, "open", fails)
        else:
            patch.setattr(soft, "view", fails_at)
        got = await pulled(consumer, producer)
    assert type(got) is m.Encoded and np.array_equal(await x_of(got, soft), HOST)
    await turns_until(lambda: gc.collect() >= 0 and not lent(producer))
