"""How long a node may rely on its lease."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lease_kit import lease_of

from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.connection import Connection
from taskgraph.coordination.etcd.login import Login
from taskgraph.coordination.etcd.options import EtcdOptions

TTL_S = 60
LATE_S = 0.05


class LateAnswers:
    """A channel whose etcd renews the lease once, and answers when `answers` is set."""

    def __init__(self) -> None:
        self.renewed_at = 0.0
        self.answers, self.closed = threading.Event(), threading.Event()

    def stream_stream(self, *_: object) -> Callable[..., Iterator[v3.LeaseKeepAliveResponse]]:
        def call(requests: Iterator[v3.LeaseKeepAliveRequest], **_: object) -> Iterator[v3.LeaseKeepAliveResponse]:
            request = next(requests)
            self.renewed_at = time.monotonic()
            self.answers.wait()
            yield v3.LeaseKeepAliveResponse(id=request.id, ttl=TTL_S)
            self.closed.wait()

        return call

    def close(self) -> None:
        self.answers.set()
        self.closed.set()


async def test_late_keep_alive_answer_extends_from_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd counts the TTL from when it renews, so a node that counted from the answer would outlive its lease."""
    channel = LateAnswers()
    monkeypatch.setattr(EtcdOptions, "sync_channel", lambda *_: channel)
    options = EtcdOptions.make("127.0.0.1:1")
    lease = lease_of(options, Login(options), ttl_s=1.0)
    granted_until = lease.valid_until()
    lease.start()
    try:
        async with asyncio.timeout(30):
            while not channel.renewed_at:  # noqa: ASYNC110 - the lease's own thread renews
                await asyncio.sleep(0.001)
            await asyncio.sleep(LATE_S)
            channel.answers.set()
            while lease.valid_until() == granted_until:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert lease.valid_until() <= channel.renewed_at + TTL_S
    finally:
        await lease.close(revoke=False)


class LateGrant(Connection):
    """A connection to an etcd that grants a lease, and answers later."""

    granted_at = 0.0

    async def call(self, *_: object, **__: object) -> Any:
        self.granted_at = time.monotonic()
        await asyncio.sleep(LATE_S)
        return v3.LeaseGrantResponse(id=7, ttl=TTL_S)


async def test_late_grant_counts_from_sending() -> None:
    connection = LateGrant(EtcdOptions.make("127.0.0.1:1"))
    lease = await EtcdCoordinator(connection, "3.5.1").lease(TTL_S, stall_limit_s=60.0)
    try:
        assert lease.valid_until() <= connection.granted_at + TTL_S
    finally:
        await lease.close(revoke=False)
