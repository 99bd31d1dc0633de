"""Logging in to etcd: one token for all calls, and one login at a time."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from lease_kit import lease_of

from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.lease import EtcdLease
from taskgraph.coordination.etcd.login import Login, LoginFailed
from taskgraph.coordination.etcd.options import EtcdOptions
from taskgraph.errors import CoordinationError, Unavailable

Code = grpc.StatusCode
TOLD = re.compile(r"logging in to etcd takes \d+ s")
OPTIONS = EtcdOptions.make("127.0.0.1:1", username="worker", password="word")


class Failed(grpc.RpcError, grpc.Call):
    """An error of gRPC, with the parts that we use."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


Failed.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class FakeEtcd:
    """Channels to an etcd whose logins have given outcomes, and which renews leases for its newest token only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes: Iterator[Exception | None] = iter(())  # of logins, in turn; then all get a token
        self.limits: list[float] = []
        self.tokens: list[str] = []
        self.looks = True  # at the tokens of renewals
        self.slow: threading.Event | None = None  # logins wait for it
        self.asked = threading.Event()
        self.probes: Iterator[Exception | None] = iter(())  # what becomes of calls that need no token
        monkeypatch.setattr(EtcdOptions, "sync_channel", lambda *_: self)

    def unary_unary(self, path: str, *_: object) -> Callable[..., v3.AuthenticateResponse]:
        def status(_: v3.StatusRequest, *, timeout: float) -> None:
            if (failed := next(self.probes)) is not None:
                raise failed

        def authenticate(request: v3.AuthenticateRequest, *, timeout: float) -> v3.AuthenticateResponse:
            self.limits.append(timeout)
            slow = self.slow
            self.asked.set()
            if slow is not None:
                slow.wait(60)
            if (failed := next(self.outcomes, None)) is not None:
                raise failed
            self.tokens.append(f"{request.name}.{len(self.tokens)}")
            return v3.AuthenticateResponse(token=self.tokens[-1])

        return status if path.endswith("Status") else authenticate  # type: ignore[return-value]

    def stream_stream(self, *_: object) -> Callable[..., Iterator[v3.LeaseKeepAliveResponse]]:
        def renew(requests: Iterator[Any], *, metadata: Any) -> Iterator[v3.LeaseKeepAliveResponse]:
            for request in requests:
                if self.looks and dict(metadata).get("token") != self.tokens[-1]:
                    raise Failed(Code.UNAUTHENTICATED, "etcdserver: invalid auth token")
                yield v3.LeaseKeepAliveResponse(id=request.id, ttl=60)

        return renew

    def close(self) -> None:
        if self.slow is not None:
            self.slow.set()  # as gRPC ends its calls


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    return FakeEtcd(monkeypatch)


async def logged_in(login: Login) -> str | None:
    """Logs in once."""
    await asyncio.wrap_future(login.join_or_begin(OPTIONS.endpoints[0]))
    return login.token


async def test_callers_share_one_login_that_outlasts_them(etcd: FakeEtcd) -> None:
    login, etcd.slow = Login(OPTIONS), threading.Event()
    assert login.waits() == ""
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await logged_in(login)
        assert login.token is None and TOLD.fullmatch(login.waits())
    etcd.slow.set()
    assert await logged_in(login) == "worker.0" and len(etcd.limits) == 1
    assert await logged_in(login) == "worker.0" and len(etcd.limits) == 1, "it had ended since they looked"
    assert login.waits() == ""
    await login.close()


async def test_login_that_times_out_says_how_long_it_takes(etcd: FakeEtcd, caplog: pytest.LogCaptureFixture) -> None:
    login, etcd.outcomes = Login(OPTIONS), iter([Failed(Code.DEADLINE_EXCEEDED)] * 2)
    for _ in range(2):
        with pytest.raises(LoginFailed, match=TOLD) as caught:
            await logged_in(login)
        assert caught.value.code is Code.DEADLINE_EXCEEDED and login.waits()
    assert "did not answer a login within 120 s" in caplog.text and "--bcrypt-cost" in caplog.text
    assert await logged_in(login) == "worker.0" and login.waits() == ""


async def test_refused_token_is_replaced_once(etcd: FakeEtcd) -> None:
    login = Login(OPTIONS)
    first = await logged_in(login)
    login.drop_token(first)
    assert login.token is None
    second = await logged_in(login)
    login.drop_token(first)
    assert login.token == second != first


async def test_wrong_password_fails_at_once(etcd: FakeEtcd) -> None:
    login, etcd.outcomes = Login(OPTIONS), iter([Failed(Code.INVALID_ARGUMENT, "etcdserver: authentication failed")])
    with pytest.raises(LoginFailed, match="authentication failed"):
        await logged_in(login)
    assert login.waits() == ""


@pytest.mark.parametrize(
    ("found", "gone_on"),
    [
        (None, True),
        (Failed(Code.PERMISSION_DENIED, "etcdserver: permission denied"), True),
        (Failed(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"), False),
        (Failed(Code.UNAVAILABLE, "failed to connect to all addresses"), False),
    ],
)
async def test_silent_member_is_left_before_the_login(etcd: FakeEtcd, found: Exception | None, gone_on: bool) -> None:
    login = Login(EtcdOptions.make("127.0.0.1:1,127.0.0.1:2", username="worker", password="word"))
    etcd.probes = iter([found])
    if gone_on:
        assert await logged_in(login) == "worker.0"
        return
    with pytest.raises(LoginFailed) as caught:
        await logged_in(login)
    assert caught.value.code is Code.UNAVAILABLE and not etcd.limits


async def test_closing_ends_the_login(etcd: FakeEtcd) -> None:
    login, etcd.slow = Login(OPTIONS), threading.Event()
    waiting = asyncio.wrap_future(login.join_or_begin(OPTIONS.endpoints[0]))
    await asyncio.to_thread(etcd.asked.wait)
    etcd.outcomes = iter([Failed(Code.CANCELLED, "Channel closed!")])
    async with asyncio.timeout(30):
        await login.close()
    with pytest.raises(LoginFailed, match="Channel closed"):
        await waiting


async def test_login_without_a_thread_is_tried_again(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    login = Login(OPTIONS)
    with monkeypatch.context() as patch:

        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(LoginFailed, match=r"can't start new thread: a limit .*`ulimit -u`"):
            await logged_in(login)
    assert await logged_in(login) == "worker.0"


async def test_lease_logs_in_while_the_loop_is_blocked(
    etcd: FakeEtcd,
) -> None:
    login = Login(OPTIONS)
    await logged_in(login)
    lease = lease_of(OPTIONS, login)
    lease.start()
    try:
        began = time.monotonic()
        while lease.valid_until() < began + 30:  # noqa: ASYNC110 - a thread of its own changes it
            await asyncio.sleep(0.001)
        assert len(etcd.tokens) == 1
        etcd.tokens.append("another")  # etcd was restarted, and has forgotten the first
        now = time.monotonic()
        while lease.valid_until() < now + 60:  # and the main loop does not run
            time.sleep(0.001)  # noqa: ASYNC251
            assert time.monotonic() < now + 30
        assert login.token == "worker.2" == etcd.tokens[-1]
    finally:
        await lease.close(revoke=False)


async def test_lease_needs_no_login_if_etcd_checks_no_token(etcd: FakeEtcd) -> None:
    login, etcd.looks = Login(OPTIONS), False
    login.drop_token(await logged_in(login))
    etcd.asked.clear()
    answers = etcd.slow = threading.Event()
    login.join_or_begin(OPTIONS.endpoints[0])
    await asyncio.to_thread(etcd.asked.wait)
    etcd.slow = None  # a stream that is closed ends no login
    lease = lease_of(OPTIONS, login)
    lease.start()
    try:
        began = time.monotonic()
        async with asyncio.timeout(30):
            while lease.valid_until() < began + 60:  # noqa: ASYNC110 - a thread of its own changes it
                await asyncio.sleep(0.001)
        assert login.token is None and login.waits()
    finally:
        answers.set()
        await lease.close(revoke=False)
        await login.close()


async def test_lease_waits_for_the_one_login(etcd: FakeEtcd) -> None:
    login, etcd.slow = Login(OPTIONS), threading.Event()
    lease = lease_of(OPTIONS, login)
    began = lease.valid_until()
    lease.start()
    try:
        await asyncio.to_thread(etcd.asked.wait)
        await asyncio.sleep(0.3)  # three times its TTL
        assert TOLD.fullmatch(lease.trouble()) and lease.valid_until() == began
        assert len(etcd.limits) == 1
        etcd.slow.set()
        async with asyncio.timeout(30):
            while lease.valid_until() == began:  # noqa: ASYNC110 - a thread of its own changes it
                await asyncio.sleep(0.001)
        assert lease.trouble() == "" and len(etcd.limits) == 1
    finally:
        await lease.close(revoke=False)


class Users(grpc.GenericRpcHandler):
    """An etcd with users, which accepts its newest token only."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tokens: list[str] = []
        self.hashed = asyncio.Event()  # logins are answered when it is set
        self.hashed.set()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method).rpartition("/")[2]
        self.calls.append(method)
        token = dict(details.invocation_metadata).get("token")
        header = v3.ResponseHeader(cluster_id=1, revision=5)

        async def answer(request: bytes, context: Any) -> bytes:
            if method == "Authenticate":
                await self.hashed.wait()
                if v3.AuthenticateRequest.FromString(request).password != "word":
                    await context.abort(Code.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID")
                self.tokens.append(f"token {len(self.tokens)}")
                return v3.AuthenticateResponse(header=header, token=self.tokens[-1]).SerializeToString()
            if method == "Status":
                return v3.StatusResponse(header=header, version="3.5.9").SerializeToString()
            if token != self.tokens[-1]:
                await context.abort(Code.UNAUTHENTICATED, "etcdserver: invalid auth token")
            if method == "LeaseGrant":
                return v3.LeaseGrantResponse(header=header, id=7, ttl=1).SerializeToString()
            return v3.RangeResponse(header=header).SerializeToString()

        async def renew(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for _ in requests:
                if token != self.tokens[-1]:
                    await context.abort(Code.UNAUTHENTICATED, "etcdserver: invalid auth token")
                yield v3.LeaseKeepAliveResponse(header=header, id=7, ttl=60).SerializeToString()

        if method == "LeaseKeepAlive":
            return grpc.stream_stream_rpc_method_handler(renew)
        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
async def users() -> AsyncIterator[tuple[Users, str]]:
    handler, server = Users(), grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def renewed(lease: EtcdLease) -> None:
    now = time.monotonic()
    async with asyncio.timeout(30):
        while lease.valid_until() < now + 60:  # noqa: ASYNC110 - a thread of its own changes it
            await asyncio.sleep(0.005)


async def test_calls_and_leases_share_one_token(users: tuple[Users, str]) -> None:
    etcd, address = users
    async with await EtcdCoordinator.connect(address, username="worker", password="word") as node:
        await asyncio.gather(*(node.get("/a") for _ in range(5)))
        lease = await node.lease(1.0, stall_limit_s=60.0)
        await renewed(lease)
        assert etcd.calls.count("Authenticate") == 1
        etcd.tokens.append("etcd was restarted")
        await asyncio.gather(renewed(lease), *(node.get("/a") for _ in range(5)))
        assert etcd.calls.count("Authenticate") == 2


async def test_connecting_waits_long_for_a_login(users: tuple[Users, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.coordination.etcd.coordinator._FIRST_CONTACT_S", 1.0)
    etcd, address = users
    etcd.hashed.clear()
    connecting = asyncio.ensure_future(EtcdCoordinator.connect(address, username="worker", password="word"))
    assert not (await asyncio.wait([connecting], timeout=1.25))[0]
    etcd.hashed.set()
    node = await connecting
    assert etcd.calls.count("Authenticate") == 1
    etcd.tokens.append("etcd was restarted")
    etcd.hashed.clear()
    with pytest.raises(Unavailable, match=r"within 1 s \(127.0.0.1:\d+: logging in to etcd takes \d+ s\)"):
        await node.revoke(7, timeout_s=1)
    etcd.hashed.set()
    await node.get("/a")
    assert etcd.calls.count("Authenticate") == 2, "the call that gave up had begun it"
    await node.close()


async def test_wrong_password_ends_connecting(users: tuple[Users, str]) -> None:
    _, address = users
    with pytest.raises(CoordinationError, match=r"^etcd refused first contact: etcdserver: authentication failed"):
        await EtcdCoordinator.connect(address, username="worker", password="wrong")


async def test_closing_does_not_wait_for_a_login(users: tuple[Users, str]) -> None:
    etcd, address = users
    node = await EtcdCoordinator.connect(address, username="worker", password="word")
    etcd.tokens.append("etcd was restarted")
    etcd.hashed.clear()
    reading = asyncio.ensure_future(node.get("/a"))
    while etcd.calls.count("Authenticate") < 2:  # noqa: ASYNC110 - a thread of its own asks
        await asyncio.sleep(0.001)
    async with asyncio.timeout(30):
        await node.close()
        with pytest.raises(Unavailable, match="the connection to etcd was closed"):
            await reading
    etcd.hashed.set()
