"""A lease that its own thread renews over one stream.

A thread, since a large value or a garbage collection may keep the main loop busy for seconds, and a healthy node must
not lose its lease for that. Only while the main loop ticks, since a node with a stuck loop must lose its lease. gRPC's
synchronous API, since its asynchronous API shares one poller between all event loops of a process.

    renewer thread   every ttl/5: notes the time, and sends a request; opens the stream, and reopens it on the next
                     endpoint if it broke or an answer is overdue
    reader thread    one per open stream: matches answers, which come in order, with the noted times
    login thread     if etcd has users and refused the token: see `login`, which calls share

The rule: the lease is valid for its TTL from the *sending* of the last renewal that etcd answered. etcd counts from
the renewal's arrival, which is later; a slow answer must not extend the lease beyond etcd's time.

The main loop reads single attributes (`valid_until`, `lost`), which are replaced whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Final

import grpc

from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.failures import FailureKind, classify_failure, code_and_details
from taskgraph.coordination.etcd.login import LoggedIn, Login, LoginFailed, credentials
from taskgraph.coordination.etcd.methods import LEASE_KEEP_ALIVE
from taskgraph.coordination.etcd.options import Endpoint, EtcdOptions
from taskgraph.errors import CoordinationError, no_thread_text

__all__ = ["EtcdLease", "RenewalSchedule"]

log = logging.getLogger(__name__)

#: Renewals per TTL: with TTL 5 s one a second; four in a row may fail before the lease is in danger.
_RENEWALS_PER_TTL = 5
#: Parts of a TTL that a stream waits for its first answer, with connecting, and for each later answer. After a silent
#: member another one can answer in time: an interval (1/5), 1/3, a pause (1/20) and 1/5 are below 1.
_FIRST_ANSWER_PART, _LATER_ANSWER_PART = 1 / 5, 1 / 3
#: The wait for the first answer doubles with each stream that broke, up to this limit: on a slow link, connecting takes
#: seconds. The next lease starts with the last wait.
_MAX_FIRST_ANSWER_S = 8.0
#: How often the log names a failing endpoint: etcd may be unreachable for days, with four tries a second.
_LOG_INTERVAL_S = 60.0
#: How long `close` waits for the threads, which wait only for each other and for gRPC to cancel a call.
_JOIN_S = 2.0

#: Channels for whose call gRPC could not start a thread: to close or delete one would wait for that thread for ever.
_UNCLOSABLE: list[grpc.Channel] = []


class RenewalSchedule:
    """Decides when a lease is renewed next, and at which endpoint; has no clock of its own.

    Args:
        ttl_s: the lease's TTL.
        endpoints: the number of endpoints.
        endpoint: the index of the first endpoint to use.
        now: when the lease was granted.
    """

    def __init__(self, ttl_s: float, endpoints: int, endpoint: int, now: float) -> None:
        self.endpoint = endpoint
        self.next_at = now + ttl_s / _RENEWALS_PER_TTL
        self._interval_s = ttl_s / _RENEWALS_PER_TTL
        self._endpoints = endpoints

    def take_due(self, now: float) -> bool:
        """Returns True if a renewal is due now; the caller then makes it, and the next is due an interval later."""
        if now < self.next_at:
            return False
        self.next_at = now + self._interval_s
        return True

    def renew_at_next_endpoint(self, now: float) -> None:
        """Schedules a renewal soon at the next endpoint, after a stream broke."""
        self._use_next_endpoint()
        self.next_at = min(self.next_at, now + self._interval_s / 4)

    def on_login_end(self, now: float, *, failed: bool) -> None:
        """Schedules a renewal now, after a login ended; if the login `failed`, soon at the next endpoint."""
        self.next_at = now
        if failed:
            self._use_next_endpoint()
            self.next_at += self._interval_s / 4

    def _use_next_endpoint(self) -> None:
        self.endpoint = (self.endpoint + 1) % self._endpoints


class EtcdLease:
    """A lease on etcd: implements `coordination.api.Lease`. Created by `EtcdCoordinator.lease`.

    Args:
        options: etcd's endpoints; the lease has its own connections.
        lease_id: the id that etcd granted.
        ttl_s: the TTL granted.
        stall_limit_s: renewal stops this long after the last `tick`.
        sent_at: monotonic time at which the grant was sent.
        revoke: revokes a lease within a bounded time.
        forget: called when the lease is closed.
        endpoint: the endpoint that granted the lease, and the first for renewals.
        login: the token for renewals.
        cluster: returns the id of the lease's cluster; 0: not known.
    """

    def __init__(
        self,
        options: EtcdOptions,
        lease_id: int,
        *,
        ttl_s: float,
        stall_limit_s: float,
        sent_at: float,
        revoke: Callable[[int], Awaitable[None]],
        forget: Callable[[EtcdLease], None],
        endpoint: Endpoint,
        login: Login,
        cluster: Callable[[], int] = lambda: 0,
    ) -> None:
        self._options = options
        self.id: Final = lease_id
        self.ttl_s: Final = ttl_s
        self._stall_limit_s = stall_limit_s
        self._revoke = revoke
        self._forget = forget
        self._endpoint = options.endpoints.index(endpoint)
        self._cluster = cluster
        self._login = login
        self._login_under_way: Future[LoggedIn] | None = None  # the login that the next stream waits for
        self._refused: str | None = None  # the token that etcd refused for a stream
        self._valid_until = sent_at + ttl_s
        self._lost = False
        self._trouble = ""
        self._open_failure = ""  # why the last stream could not be opened
        self._logged_at: dict[Endpoint, float] = {}  # when the log last named it, since the last successful renewal
        self._ticked_at = time.monotonic()
        self._closing = False
        self._wake = threading.Event()  # wakes the renewer before the next interval
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._renew, name=f"taskgraph-lease-{lease_id:x}", daemon=True)

    def valid_until(self) -> float:
        """Returns the monotonic time until which the lease is certainly alive."""
        return self._valid_until

    def lost(self) -> bool:
        """True if etcd answered that the lease does not exist."""
        return self._lost

    def trouble(self) -> str:
        """Returns why the last renewal failed; "" if it succeeded."""
        return (self._login.waits() if self._login_under_way is not None else "") or self._trouble

    def tick(self) -> None:
        """Notes that the main loop is alive."""
        self._ticked_at = time.monotonic()

    def start(self) -> None:
        """Starts renewing.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._thread.start()

    async def close(self, *, revoke: bool) -> None:
        """Stops renewing, within 2 s; with `revoke`, deletes the lease and its keys (best effort, within 2 s)."""
        self._closing = True
        self._wake.set()
        try:
            async with asyncio.timeout(_JOIN_S):
                await self._ended.wait()
            self._thread.join(_JOIN_S)  # setting `_ended` is its last act
        except TimeoutError:
            log.warning("the thread that renews lease %x did not end within %g s", self.id, _JOIN_S)
        self._forget(self)
        if revoke and not self._lost:
            try:
                await self._revoke(self.id)
            except CoordinationError as error:
                log.warning("lease %x was not revoked and expires by itself: %s", self.id, error)

    # The renewer thread.

    def _renew(self) -> None:
        """Renews the lease whenever that is due, in the renewer thread, until the lease is closed or lost."""
        stream: _RenewalStream | None = None
        rounds = RenewalSchedule(self.ttl_s, len(self._options.endpoints), self._endpoint, time.monotonic())
        try:
            while not self._closing and not self._lost:
                look_at = rounds.next_at if stream is None else min(rounds.next_at, stream.times_out_at())
                self._wake.wait(max(0.0, look_at - time.monotonic()))
                self._wake.clear()
                now = time.monotonic()
                if stream is not None and (why := stream.ended or stream.timeout_reason(now)):
                    self._login.broken_streams += 1
                    self._log_failure(stream.endpoint, why)
                    stream.close()
                    stream = None
                    rounds.renew_at_next_endpoint(now)
                if self._login_under_way is not None and self._login_under_way.done():
                    failed, self._login_under_way = self._login_under_way.exception(), None
                    if stream is None:
                        if isinstance(failed, LoginFailed):
                            self._log_failure(failed.endpoint, str(failed))
                        rounds.on_login_end(now, failed=isinstance(failed, LoginFailed))
                if self._closing or self._lost or not rounds.take_due(now):
                    continue
                if now - self._ticked_at > self._stall_limit_s:
                    continue  # the main loop is stuck
                if stream is None:
                    stream = self._open_stream(self._options.endpoints[rounds.endpoint])
                if stream is not None:
                    stream.send(self.id, now)
        except Exception:
            log.exception("the renewal of lease %x failed; the lease will expire", self.id)
        finally:
            if stream is not None:
                stream.close()
            with contextlib.suppress(RuntimeError):  # the loop was closed before the lease
                self._loop.call_soon_threadsafe(self._ended.set)

    def _log_failure(self, endpoint: Endpoint, why: str) -> None:
        """Keeps the reason of a failed renewal for `trouble`, and logs it at most once in a while."""
        self._trouble = f"etcd {endpoint.target}: {why}"
        now = time.monotonic()
        if now >= self._logged_at.get(endpoint, -math.inf) + _LOG_INTERVAL_S:
            self._logged_at[endpoint] = now
            log.warning("renewal of lease %x at %s; trying the next endpoint", self.id, self._trouble)

    def _open_stream(self, endpoint: Endpoint) -> _RenewalStream | None:
        """Opens a stream to `endpoint`. Returns None if a login is needed first, or opening failed for now."""
        token = self._login.token
        if token is None and self._login.last != self._refused:
            token = self._login.last  # many versions of etcd do not check the token of a renewal
        if token is None and self._login.needed:
            if self._login_under_way is None:
                self._login_under_way = self._login.join_or_begin(endpoint)
                self._login_under_way.add_done_callback(lambda _: self._wake.set())
            return None
        try:
            longer = 2 ** min(self._login.broken_streams, 10)
            first_s = min(_MAX_FIRST_ANSWER_S, self.ttl_s * _FIRST_ANSWER_PART * longer)
            stream = _RenewalStream(self._options, endpoint, self, token, (first_s, self.ttl_s * _LATER_ANSWER_PART))
        except (CoordinationError, OSError, RuntimeError) as error:
            # A TLS file is being replaced, or the process lacks threads or files: the next interval tries again.
            self._trouble = no_thread_text(error) or str(error)
            if self._trouble != self._open_failure:
                log.warning("renewal of lease %x: %s; trying again", self.id, self._trouble)
            self._open_failure = self._trouble
            self._logged_at.clear()
            return None
        self._open_failure = ""
        return stream

    # Called by the reader thread.

    def is_own_cluster(self, header: v3.ResponseHeader) -> bool:
        """True if an answer is of the lease's cluster."""
        return self._cluster() in (0, header.cluster_id)

    def on_answer(self, sent_at: float, ttl_s: int) -> None:
        """Handles etcd's answer to the renewal that was sent at `sent_at`."""
        if ttl_s <= 0:
            self._lost = True
            self._wake.set()
        else:
            self._valid_until = max(self._valid_until, sent_at + ttl_s)
            self._trouble = ""
            self._login.broken_streams = 0
            self._logged_at.clear()

    def on_refusal(self, token: str) -> None:
        """Drops a token that etcd refused, so that the lease logs in before its next stream."""
        self._refused = token
        self._login.drop_token(token)

    def on_stream_end(self) -> None:
        """Wakes the renewer after a stream ended."""
        self._wake.set()


class _RenewalStream:
    """One LeaseKeepAlive stream to one endpoint, with the thread that reads it.

    Args:
        limits_s: the timeouts of the first answer, with connecting, and of each later answer.
    """

    def __init__(
        self,
        options: EtcdOptions,
        endpoint: Endpoint,
        lease: EtcdLease,
        token: str | None,
        limits_s: tuple[float, float],
    ) -> None:
        self.endpoint = endpoint
        self.ended = ""  # why the stream ended; "" while it is open
        self._answered = False
        self._limits_s = limits_s
        self._lease = lease
        self._token = token
        self._requests: queue.SimpleQueue[v3.LeaseKeepAliveRequest | None] = queue.SimpleQueue()
        self._unanswered: deque[float] = deque()  # appended by the renewer, popped by the reader
        self._closed = False
        self._channel = options.sync_channel(endpoint)
        self._reader = threading.Thread(
            target=self._read, name=f"taskgraph-lease-reader-{endpoint.target}", daemon=True
        )
        try:
            self._reader.start()
        except RuntimeError:
            self._channel.close()
            raise

    def send(self, lease_id: int, now: float) -> None:
        """Sends a renewal. Notes `now` first: the lease must not be valid from later than the sending."""
        self._unanswered.append(now)
        self._requests.put(v3.LeaseKeepAliveRequest(id=lease_id))

    def times_out_at(self) -> float:
        """Returns when the stream times out if no answer comes."""
        return self._oldest_sent_at() + self._limits_s[self._answered]

    def timeout_reason(self, now: float) -> str:
        """Returns the reason if the stream has timed out by `now`; "" otherwise."""
        return f"no answer for {now - self._oldest_sent_at():.1f} s" if now >= self.times_out_at() else ""

    def _oldest_sent_at(self) -> float:
        """Returns when the oldest unanswered renewal was sent; infinity if there is none."""
        try:
            return self._unanswered[0]
        except IndexError:
            return math.inf

    def close(self) -> None:
        """Ends the stream and its reader thread."""
        self._closed = True
        self._requests.put(None)
        if self._channel not in _UNCLOSABLE:
            self._channel.close()  # cancels the call, which ends the reader
        self._reader.join(_JOIN_S)

    def _read(self) -> None:
        """Passes etcd's answers to the lease, in the reader thread, until the stream ends; sets `ended` to the
        reason.
        """
        try:
            call = self._channel.stream_stream(
                LEASE_KEEP_ALIVE.path,
                LEASE_KEEP_ALIVE.request.SerializeToString,
                LEASE_KEEP_ALIVE.response.FromString,
            )
            metadata = (("hasleader", "true"), *credentials(self._token))
            for answer in call(self._outgoing(), metadata=metadata):
                if not self._lease.is_own_cluster(answer.header):
                    self.ended = "it belongs to another cluster"
                    return
                self._answered = True
                self._lease.on_answer(self._unanswered.popleft(), answer.ttl)
            self.ended = "etcd ended the stream"
        except grpc.RpcError as error:
            _, self.ended = code_and_details(error)
            if self._token is not None and isinstance(error, grpc.Call) and _may_need_login(error.code(), self.ended):
                self._lease.on_refusal(self._token)
        except ValueError as error:  # gRPC raises it for a call on a closed channel
            self.ended = str(error)
        except RuntimeError as error:  # gRPC has threads of its own for a call, and could not start one
            _UNCLOSABLE.append(self._channel)
            self.ended = str(error)
        finally:
            self.ended = self.ended or "the reader failed"
            self._requests.put(None)
            if not self._closed:
                self._lease.on_stream_end()

    def _outgoing(self) -> Iterator[v3.LeaseKeepAliveRequest]:
        """Yields the renewals to send, until the stream is closed."""
        while (request := self._requests.get()) is not None:
            yield request


def _may_need_login(code: grpc.StatusCode, details: str) -> bool:
    """True if a new token may help. If etcd lost the token, it may say only that the call is not permitted."""
    return classify_failure(code, details) is FailureKind.LOGIN or code is grpc.StatusCode.PERMISSION_DENIED
