"""A broken watch, and the member on which it is reopened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.etcd import v3_pb2 as v3


class Member(grpc.GenericRpcHandler):
    """An etcd in which `/a` is put at each of `revisions`; its watches end once `breaks` is set."""

    def __init__(self, cluster: int, *revisions: int) -> None:
        self.cluster = cluster
        self.revisions = revisions
        self.watches = 0
        self.breaks = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method).rpartition("/")[2]
        if method == "Watch":
            return grpc.stream_stream_rpc_method_handler(self._watch)

        async def answer(request: bytes, context: Any) -> bytes:
            kind = v3.StatusResponse if method == "Status" else v3.RangeResponse
            return kind(header=self._header()).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)

    def _header(self) -> v3.ResponseHeader:
        return v3.ResponseHeader(cluster_id=self.cluster, revision=self.revisions[-1])

    async def _watch(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.watches += 1
        begin = v3.WatchRequest.FromString(await anext(aiter(requests))).create_request.start_revision
        yield v3.WatchResponse(header=self._header(), created=True).SerializeToString()
        for revision in self.revisions:
            if revision >= begin:
                put = v3.Event(kv=v3.KeyValue(key=b"/a", mod_revision=revision, create_revision=revision))
                yield v3.WatchResponse(header=self._header(), events=[put]).SerializeToString()
        await self.breaks.wait()


@asynccontextmanager
async def served(member: Member) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((member,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_reopened_watch_ignores_another_cluster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("taskgraph.coordination.etcd.connection._CONNECT_S", 30.0)  # neither is left for being slow
    ours, other = Member(1, 5), Member(2, 3, 8, 9)
    async with (
        served(ours) as here,
        served(other) as there,
        await EtcdCoordinator.connect([here, there]) as node,
        asyncio.timeout(30),
        aclosing(cast(Any, node.watch("/", 5))) as watch,
    ):
        assert (await anext(watch)).revision == 5
        ours.revisions = (5, 6)
        ours.breaks.set()
        again = await anext(watch)
        assert again.reopened and again.revision == 5
        assert other.watches == 1 and ours.watches == 2, "it was asked, and passed over"
        ours.breaks.clear()
        batch = await anext(watch)
        assert [event.kv.mod_revision for event in batch.events] == [6]
    assert f"etcd at {there} is passed over: it belongs to another cluster than {here}" in caplog.text
