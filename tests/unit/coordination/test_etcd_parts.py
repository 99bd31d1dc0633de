"""The pure parts of the etcd client: endpoints, prefixes, and what a failure means."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from lease_kit import lease_of

from taskgraph.commands.certifying import make_certs
from taskgraph.coordination import embedded
from taskgraph.coordination.api import AccessRefused, TooLarge
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.connection import Connection, OtherCluster, pause_s
from taskgraph.coordination.etcd.convert import event, has_writes, key_value, range_of, txn_request
from taskgraph.coordination.etcd.failures import FailureKind, classify_failure, refusal
from taskgraph.coordination.etcd.lease import EtcdLease, RenewalSchedule
from taskgraph.coordination.etcd.login import Login
from taskgraph.coordination.etcd.methods import STATUS
from taskgraph.coordination.etcd.options import Endpoint, EtcdOptions
from taskgraph.errors import CoordinationError, LeaseGone, Unavailable
from taskgraph.protocol.kv import Delete, Get, Put, Txn

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("text", "target", "tls"),
    [
        ("localhost:2379", "localhost:2379", False),
        ("localhost", "localhost:2379", False),
        (" http://10.0.0.1:2379/ ", "10.0.0.1:2379", False),
        ("https://etcd.example:443", "etcd.example:443", True),
        ("[::1]:2379", "[::1]:2379", False),
        ("http://[::1]", "[::1]:2379", False),
        ("unix:/run/etcd.sock", "unix:/run/etcd.sock", False),
    ],
)
def test_endpoints_of_users(text: str, target: str, tls: bool) -> None:
    assert Endpoint.parse(text, tls_default=False) == Endpoint(target, tls)


@pytest.mark.parametrize(
    "text", ["ftp://host:1", "http://host:1/path", "http://", "127.0.0.1:99999", "https://[::1]:65536"]
)
def test_bad_endpoint_is_refused(text: str) -> None:
    with pytest.raises(CoordinationError, match="is not an etcd endpoint"):
        Endpoint.parse(text, tls_default=False)


def test_authority_means_tls() -> None:
    options = EtcdOptions.make("a:1, b:2,http://c:3", ca="/ca.pem")
    assert options.endpoints == (Endpoint("a:1", True), Endpoint("b:2", True), Endpoint("c:3", False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"endpoints": " , "}, "no etcd endpoint"),
        ({"endpoints": "a:1", "cert": "/cert.pem"}, "belong together"),
        ({"endpoints": "a:1", "username": "root"}, "belong together"),
    ],
)
def test_half_given_options_are_refused(arguments, message: str) -> None:
    with pytest.raises(CoordinationError, match=message):
        EtcdOptions.make(**arguments)


def test_unreadable_tls_file_is_named() -> None:
    options = EtcdOptions.make("a:1", ca="/no/such/ca.pem")
    with pytest.raises(CoordinationError, match=r"/no/such/ca\.pem"):
        options.channel_credentials()


def test_a_lease_is_renewed_five_times_in_its_ttl() -> None:
    rounds = RenewalSchedule(5.0, endpoints=1, endpoint=0, now=10.0)
    assert rounds.next_at == 11.0 and not rounds.take_due(10.9)
    assert rounds.take_due(11.0) and rounds.next_at == 12.0
    assert rounds.take_due(14.5) and rounds.next_at == 15.5, "from when it was sent: what was missed is not made up for"


def test_broken_stream_moves_to_the_next_endpoint() -> None:
    rounds = RenewalSchedule(5.0, endpoints=3, endpoint=1, now=10.0)
    rounds.renew_at_next_endpoint(10.1)
    assert rounds.endpoint == 2 and rounds.next_at == 10.35
    rounds.renew_at_next_endpoint(10.2)
    assert rounds.endpoint == 0 and rounds.next_at == 10.35, "no later than it was due"
    assert rounds.take_due(10.35) and rounds.next_at == 11.35


def test_renewal_after_a_login() -> None:
    rounds = RenewalSchedule(5.0, endpoints=2, endpoint=0, now=10.0)
    rounds.on_login_end(10.5, failed=False)
    assert rounds.endpoint == 0 and rounds.take_due(10.5)
    rounds.on_login_end(10.6, failed=True)
    assert rounds.endpoint == 1 and not rounds.take_due(10.8) and rounds.take_due(10.85)


def test_single_endpoint_is_kept() -> None:
    rounds = RenewalSchedule(5.0, endpoints=1, endpoint=0, now=10.0)
    rounds.renew_at_next_endpoint(10.0)
    rounds.on_login_end(10.0, failed=True)
    assert rounds.endpoint == 0


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's lines about leases."""
    return [record.getMessage() for record in caplog.records if record.name == EtcdLease.__module__]


async def test_lease_waits_for_a_missing_tls_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = EtcdOptions.make("127.0.0.1:1", ca=tmp_path / "made" / "ca.pem")
    lease = lease_of(options, Login(options))
    lease.start()
    try:
        while not said(caplog):  # noqa: ASYNC110 - a thread of its own tells it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        (once,) = said(caplog)  # however often it is tried
        assert "cannot be used: No such file" in once
        make_certs(tmp_path / "new", force=False)
        (tmp_path / "new").rename(tmp_path / "made")  # whole
        async with asyncio.timeout(30):
            while len(said(caplog)) < 2:  # noqa: ASYNC110 - a thread of its own tells it
                await asyncio.sleep(0.01)
        assert "trying the next endpoint" in said(caplog)[1], "it was read, and no etcd listens there"
    finally:
        await lease.close(revoke=False)


async def test_log_names_a_dead_etcd_rarely(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A line for each try would be 300 MB in each node's log over a weekend."""
    options, tries, opened = EtcdOptions.make("127.0.0.1:1"), 0, EtcdOptions.sync_channel

    def counted(self: EtcdOptions, endpoint: Endpoint) -> grpc.Channel:
        nonlocal tries
        tries += 1
        return opened(self, endpoint)

    monkeypatch.setattr(EtcdOptions, "sync_channel", counted)
    lease = lease_of(options, Login(options))
    lease.start()
    try:
        for said_times, after in ((1, 5), (2, 10)):
            async with asyncio.timeout(30):
                while tries < after or not said(caplog)[said_times - 1 :]:  # noqa: ASYNC110 - a thread tells it
                    await asyncio.sleep(0.01)
            assert len(said(caplog)) == said_times and "127.0.0.1:1" in lease.trouble()
            lease._logged_at.update(dict.fromkeys(options.endpoints, time.monotonic() - 61))
    finally:
        await lease.close(revoke=False)


class Answering:
    """A channel whose etcd answers each renewal, or for which gRPC cannot start a thread."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.closed = failing, False

    def stream_stream(self, *_: object) -> Callable[..., Iterator[v3.LeaseKeepAliveResponse]]:
        def call(requests: Iterator[v3.LeaseKeepAliveRequest], **_: object) -> Iterator[v3.LeaseKeepAliveResponse]:
            if self.failing:
                raise RuntimeError(self.failing)
            return (v3.LeaseKeepAliveResponse(id=request.id, ttl=60) for request in requests)

        return call

    def close(self) -> None:
        self.closed = True


async def test_lease_survives_lack_of_threads_and_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The renewing thread must survive both."""
    no_thread_text, no_file = "can't start new thread", "Too many open files"
    real_start = threading.Thread.start
    left = ["lease-reader"]

    def start(self: threading.Thread) -> None:
        if left and left[0] in self.name:
            del left[0]
            raise RuntimeError(no_thread_text)
        real_start(self)

    ours, grpcs, good = Answering(), Answering(no_thread_text), Answering()
    channels: list[Answering | None] = [ours, None, grpcs, good]

    def sync_channel(*_: object) -> Answering:
        if (channel := channels.pop(0)) is None:
            raise OSError(no_file)
        return channel

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(EtcdOptions, "sync_channel", sync_channel)
    monkeypatch.setattr("taskgraph.coordination.etcd.lease._UNCLOSABLE", [])
    options, now = EtcdOptions.make("127.0.0.1:1"), time.monotonic()
    lease = lease_of(options, Login(options))
    lease.start()
    try:
        async with asyncio.timeout(30):
            while lease.valid_until() < now + 60:  # noqa: ASYNC110 - a thread of its own renews it
                await asyncio.sleep(0.001)
        first, *others = said(caplog)
        assert first.startswith(f"renewal of lease 7: {no_thread_text}") and "`ulimit -u`" in first
        of_grpc = f"renewal of lease 7 at etcd 127.0.0.1:1: {no_thread_text}; trying the next endpoint"
        assert others == [f"renewal of lease 7: {no_file}; trying again", of_grpc]
        assert not lease.trouble() and not lease.lost()
        assert ours.closed
        assert not grpcs.closed, "to close it waits for a thread that there is not"
    finally:
        await lease.close(revoke=False)
    assert good.closed


class FarAway(Answering):
    """A channel that takes a while to connect, unless it is closed before."""

    def __init__(self, connecting_s: float) -> None:
        super().__init__()
        self._gone, self._connecting_s = threading.Event(), connecting_s

    def stream_stream(self, *_: object) -> Callable[..., Iterator[v3.LeaseKeepAliveResponse]]:
        answers = super().stream_stream()

        def call(requests: Iterator[v3.LeaseKeepAliveRequest], **_: object) -> Iterator[v3.LeaseKeepAliveResponse]:
            if self._gone.wait(self._connecting_s):
                raise ValueError("Channel closed!")
            return answers(requests)

        return call

    def close(self) -> None:
        super().close()
        self._gone.set()


async def test_lease_behind_a_slow_link_waits_longer_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FarAway] = []

    def sync_channel(*_: object) -> FarAway:
        made.append(FarAway(0.5))
        return made[-1]

    monkeypatch.setattr(EtcdOptions, "sync_channel", sync_channel)
    options, now = EtcdOptions.make("127.0.0.1:1,127.0.0.1:2"), time.monotonic()
    lease = lease_of(options, Login(options), ttl_s=0.75)
    lease.start()
    try:
        async with asyncio.timeout(30):
            while lease.valid_until() < now + 60:  # noqa: ASYNC110 - a thread of its own renews it
                await asyncio.sleep(0.001)
    finally:
        await lease.close(revoke=False)
    assert 1 < len(made) <= 6  # the sixth may take 4.8 s: none is slower than 0.5 s by so much


async def test_next_lease_behind_a_slow_link_waits_as_long_as_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting may take longer than all tries of one lease: the lease after it must not begin anew."""
    made: list[FarAway] = []
    connecting_s = 60.0

    def sync_channel(*_: object) -> FarAway:
        made.append(FarAway(connecting_s))
        return made[-1]

    monkeypatch.setattr(EtcdOptions, "sync_channel", sync_channel)
    options = EtcdOptions.make("127.0.0.1:1")
    login = Login(options)
    lost = lease_of(options, login, ttl_s=0.75)
    lost.start()
    async with asyncio.timeout(30):
        while len(made) < 4:  # noqa: ASYNC110 - a thread of its own renews it
            await asyncio.sleep(0.001)
    await lost.close(revoke=False)

    made.clear()
    connecting_s = 0.2  # more than the first lease waited at first, and much less than it waited at last
    lease = lease_of(options, login, ttl_s=0.75)
    lease.start()
    now = time.monotonic()
    try:
        async with asyncio.timeout(30):
            while lease.valid_until() < now + 60:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.001)
    finally:
        await lease.close(revoke=False)
    assert len(made) == 1


async def test_lease_without_a_thread_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the client must not wait for the thread that never started."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class Granting(Connection):
        asked: ClassVar[list[str]] = []

        async def call(self, method: object, request: object, **_: object) -> Any:
            self.asked.append(type(request).__name__)
            return v3.LeaseGrantResponse(id=7, ttl=5)

    node = EtcdCoordinator(Granting(EtcdOptions.make("127.0.0.1:1")), "3.5.1")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(CoordinationError, match=r"cannot be renewed: can't start new thread: a limit .*`ulimit -u`"):
        await node.lease(5.0, stall_limit_s=60.0)
    assert Granting.asked == ["LeaseGrantRequest", "LeaseRevokeRequest"]
    async with asyncio.timeout(30):
        await node.close()


def test_unusable_tls_file_is_named(tmp_path: Path) -> None:
    """gRPC would only say that nothing answers at etcd's address."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        make_certs(folder, force=False)
    (junk := tmp_path / "junk.pem").write_text("no certificate")
    files = {"ca": ours / "ca.pem", "cert": ours / "cert.pem", "key": ours / "key.pem"}
    assert EtcdOptions.make("a:1", **files).channel_credentials() is not None
    for given, said in (
        ({"ca": junk}, f"the TLS file {junk} cannot be used: "),
        ({"cert": junk}, f"the TLS file {junk} cannot be used: there is no certificate in it, as PEM"),
        ({"key": other / "key.pem"}, f"{files['cert']} and {other / 'key.pem'} cannot be used: key values mismatch"),
    ):
        with pytest.raises(CoordinationError) as caught:
            EtcdOptions.make("a:1", **{**files, **given}).channel_credentials()
        assert said in str(caught.value)


def test_repr_hides_the_password() -> None:
    assert "secret" not in repr(EtcdOptions.make("a:1", username="root", password="secret"))


def test_password_file_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "word"
    options = EtcdOptions.make("a:1", username="worker", password="word", password_file=file)
    assert options.login_request().password == "word", "there is none at this moment"
    for text, read in (("other\nno password\n", "other"), ("", "word")):
        file.write_text(text)
        assert (options.login_request().name, options.login_request().password) == ("worker", read)


@pytest.mark.parametrize("prefix", ["", "/", "/a/", "/a/é", "\x7f", "/\U0010ffff"])
def test_range_of_a_prefix(prefix: str) -> None:
    start, end = range_of(prefix, prefix=True)
    for key in (prefix, prefix + "\0", prefix + "zz", prefix + "\U0010ffff"):
        raw = key.encode()
        if raw:
            assert start <= raw and (end == b"\0" or raw < end)
    if prefix:
        assert not start <= prefix.encode()[:-1] < end


def test_key_that_is_no_utf_8() -> None:
    """Another program may put any key under a job's prefix."""
    raw = b"/taskgraph/demo/events/\xff\xfe"
    found = key_value(v3.KeyValue(key=raw, value=b"x", create_revision=2, mod_revision=2))
    assert event(v3.Event(kv=v3.KeyValue(key=raw, value=b"x", create_revision=2, mod_revision=2))).kv == found
    deleted = txn_request(Txn(success=(Delete(found.key),)))
    assert deleted.success[0].request_delete_range.key == raw


@pytest.mark.parametrize(
    ("code", "details", "verdict"),
    [
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: refused", FailureKind.NOT_EXECUTED),
        (Code.UNAVAILABLE, "etcdserver: no leader", FailureKind.NOT_EXECUTED),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests", FailureKind.NOT_EXECUTED),
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", FailureKind.LOGIN),
        (Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request", FailureKind.REFUSED),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", FailureKind.REFUSED),
        (Code.RESOURCE_EXHAUSTED, "grpc: received message larger than max (3 vs. 2)", FailureKind.REFUSED),
        # The connection broke after the request may have left; the leader died after it may have proposed.
        (Code.UNAVAILABLE, "Socket closed", FailureKind.UNKNOWN),
        (Code.UNAVAILABLE, "recvmsg:Connection reset by peer", FailureKind.UNKNOWN),
        (
            Code.UNAVAILABLE,
            "etcdserver: request timed out, possibly due to previous leader failure",
            FailureKind.UNKNOWN,
        ),
        (Code.UNAVAILABLE, "etcdserver: server stopped", FailureKind.UNKNOWN),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", FailureKind.UNKNOWN),
        (Code.CANCELLED, "", FailureKind.UNKNOWN),
        # The transaction that crosses the quota is executed and answered with this.
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", FailureKind.UNKNOWN),
    ],
)
def test_verdict_on_a_failed_call(code, details: str, verdict) -> None:
    assert classify_failure(code, details) is verdict


def test_refusals_have_kinds() -> None:
    error = refusal("transaction on /a", Code.PERMISSION_DENIED, "etcdserver: permission denied")
    assert str(error) == "etcd refused transaction on /a: etcdserver: permission denied"
    gone = refusal("transaction on /a", Code.NOT_FOUND, "etcdserver: requested lease not found")
    assert isinstance(gone, LeaseGone)
    for code, said in (
        (Code.RESOURCE_EXHAUSTED, "grpc: received message larger than max (3 vs. 2)"),
        (Code.INVALID_ARGUMENT, "etcdserver: request is too large"),
    ):
        assert isinstance(refusal("transaction on /a", code, said), TooLarge)
    for code, said in (
        (Code.PERMISSION_DENIED, "etcdserver: permission denied"),
        (Code.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password"),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty"),
        (Code.FAILED_PRECONDITION, "etcdserver: authentication is not enabled"),
    ):
        assert isinstance(refusal("transaction on /a", code, said), AccessRefused)


async def test_first_answer_decides_the_cluster() -> None:
    connection = Connection(EtcdOptions.make("a:1,b:1"))
    a, b = connection.options.endpoints

    def accepted(endpoint: Endpoint, cluster: int) -> bool:
        try:
            connection.check_cluster(endpoint, v3.ResponseHeader(cluster_id=cluster))
        except OtherCluster as error:
            assert str(error) == "it belongs to another cluster than a:1"
            return False
        return True

    assert accepted(a, 7) and accepted(b, 7) and connection.cluster == 7
    assert not accepted(b, 8) and accepted(a, 7) and not accepted(b, 8), "b is another one"
    assert accepted(b, 7) and not accepted(a, 9) and connection.cluster == 7, "b is back, a is another one"
    assert accepted(b, 9) and accepted(a, 9) and connection.cluster == 9, "etcd was set up anew"
    await connection.close()


async def test_failed_endpoint_is_left_once() -> None:
    connection = Connection(EtcdOptions.make("a:1,b:1"))
    a, b = connection.options.endpoints
    for failed, then in ((a, b), (a, b), (b, a), (b, a)):
        connection.move_from(failed)
        assert connection.endpoint == then
    await connection.close()


async def test_channels_with_former_tls_files_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    former: list[grpc.aio.Channel] = []
    monkeypatch.setattr(EtcdOptions, "channel_credentials", lambda _: grpc.ssl_channel_credentials())
    monkeypatch.setattr(EtcdOptions, "file_states", lambda _, __: (len(former),))
    connection = Connection(EtcdOptions.make("https://127.0.0.1:1", timeout_s=0.05))
    for _ in range(3):
        former.append(connection._channels[connection.endpoint])
        connection.move_from(connection.endpoint)
    assert list(connection._former_channels) == former, "calls may still use them"
    await asyncio.sleep(0.11)
    with pytest.raises(Unavailable):
        await connection.call(STATUS, v3.StatusRequest(), what="a look", again=True)
    assert not connection._former_channels
    assert all(channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in former)
    await connection.close()


def test_pauses_draw_no_seeded_numbers() -> None:
    before = random.getstate()
    pause_s(1)
    assert random.getstate() == before


def test_pauses_grow_and_are_bounded() -> None:
    assert all(0.0 < pause_s(tries) <= 1.0 for tries in range(1, 2000))
    assert pause_s(1) <= 0.05 and pause_s(50) >= 0.5


def test_read_only_transactions() -> None:
    assert not has_writes(Txn(success=(Get("a"),), failure=(Get("b"),)))
    assert has_writes(Txn(success=(Get("a"),), failure=(Put("b", b""),)))
    assert has_writes(Txn(success=(Delete("a"),)))


@pytest.mark.parametrize(
    ("binary", "says"),
    [
        (b"\x7fELF of another processor", "cannot be run: Exec format error"),
        (b"#!/nowhere/sh\n", "cannot be run: the interpreter or loader that it names is not there"),
        (b"#!/bin/sh\nexec sleep 60\n", "did not tell its version within 0.3 s"),
        (b"#!/bin/sh\necho not for this kernel >&2\n", "is not a usable etcd: not for this kernel"),
    ],
    ids=["format", "interpreter", "silent", "another"],
)
async def test_unusable_etcd_binary(binary: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "0.3 s" in says:
        monkeypatch.setattr(embedded, "_START_S", 0.3)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "etcd"
    path.write_bytes(binary)
    path.chmod(0o700)
    with pytest.raises(CoordinationError) as refused:
        await embedded.EmbeddedEtcd().start()
    way = "put another etcd before it on PATH, or name a running one with --etcd HOST:PORT"
    assert str(refused.value) == f"{path} {says}; {way}"
