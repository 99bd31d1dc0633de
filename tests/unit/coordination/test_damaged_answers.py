"""Damaged answers of etcd: reads and watches are retried, and the outcome of a write is unknown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.errors import OutcomeUnknown
from taskgraph.protocol.kv import Put, Txn

DAMAGED = b"\xff\xff\xff"


class Damaging(grpc.GenericRpcHandler):
    """An etcd of one key, whose answers to some calls cannot be read: "1" is damaged, "0" is not."""

    def __init__(self) -> None:
        self.plans: dict[str, Iterator[str]] = {}
        self.calls: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method).rpartition("/")[2]
        if method == "Watch":
            return grpc.stream_stream_rpc_method_handler(self._watch)

        async def answer(request: bytes, context: Any) -> bytes:
            return self._answer(method)

        return grpc.unary_unary_rpc_method_handler(answer)

    def _damaged(self, method: str) -> bool:
        self.calls.append(method)
        return next(self.plans.get(method, iter(())), "0") == "1"

    def _answer(self, method: str) -> bytes:
        header = v3.ResponseHeader(cluster_id=1, revision=5)
        known = {
            "Range": v3.RangeResponse(header=header, kvs=[v3.KeyValue(key=b"/a", value=b"v", mod_revision=5)]),
            "Txn": v3.TxnResponse(header=header, succeeded=True),
            "Status": v3.StatusResponse(header=header, version="3.5.9"),
        }
        return DAMAGED if self._damaged(method) else known[method].SerializeToString()

    async def _watch(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(aiter(requests))
        header = v3.ResponseHeader(cluster_id=1, revision=5)
        yield v3.WatchResponse(header=header, created=True).SerializeToString()
        put = v3.Event(kv=v3.KeyValue(key=b"/a", value=b"v", mod_revision=5, create_revision=5))
        whole = v3.WatchResponse(header=header, events=[put]).SerializeToString()
        yield DAMAGED if self._damaged("Watch") else whole
        async for _ in requests:
            pass


@pytest.fixture
async def etcd() -> AsyncIterator[tuple[Damaging, EtcdCoordinator]]:
    handler, server = Damaging(), grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with await EtcdCoordinator.connect(f"127.0.0.1:{port}") as coordinator:
            handler.calls.clear()
            yield handler, coordinator
    finally:
        await server.stop(None)


async def test_damaged_read_is_retried(etcd: tuple[Damaging, EtcdCoordinator]) -> None:
    handler, coordinator = etcd
    handler.plans["Range"] = iter("110")
    found = await coordinator.get("/a")
    assert found is not None and found.value == b"v"
    assert handler.calls.count("Range") == 3


async def test_damaged_answer_of_a_write_is_unknown(etcd: tuple[Damaging, EtcdCoordinator]) -> None:
    handler, coordinator = etcd
    handler.plans["Txn"] = iter("1")
    with pytest.raises(OutcomeUnknown, match="its answer cannot be read"):
        await coordinator.txn(Txn(success=(Put("/a", b"w"),)))


async def test_damaged_watch_goes_on(etcd: tuple[Damaging, EtcdCoordinator]) -> None:
    """It ended with an AttributeError, and its node with it."""
    handler, coordinator = etcd
    handler.plans["Watch"] = iter("10")
    watch = aiter(coordinator.watch("/a", 5))
    again = await anext(watch)
    assert again.reopened and (again.revision, again.events) == (4, ()), "nothing was delivered yet"
    batch = await anext(watch)
    assert [event.kv.key for event in batch.events] == ["/a"] and not batch.reopened
    assert handler.calls.count("Watch") == 2
