"""Logging in to an etcd that has users: one token for a connection and its leases, and one login at a time.

etcd computes a bcrypt hash for every login, and finishes it even if the client gave up. When many nodes log in at once
(a job begins, or a restarted etcd forgot its tokens), the hashes share etcd's processors. Hence

- callers share one login, which goes on while they come and go: a call that gives up is followed by one that joins it;
- a login has minutes, so a silent member is found by another call before it, and by gRPC's pings during it.

Each login has a thread of its own: a lease is renewed while the main loop is busy, and may need a token for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.failures import Verdict, judge, why
from taskgraph.coordination.etcd.methods import AUTHENTICATE, STATUS
from taskgraph.coordination.etcd.options import Endpoint, EtcdOptions
from taskgraph.errors import CoordinationError, no_thread

__all__ = ["LoggedIn", "Login", "LoginFailed", "credentials"]

log = logging.getLogger(__name__)

#: How long a login may take: a hundred nodes at 1 s a hash, on one processor. To give up earlier costs another hash.
_LIMIT_S = 120.0
#: A member that is silent for this long (frozen, packets dropped) is left, if there is another endpoint.
_SILENT_S = 2.0
#: How long `close` waits for the thread, whose call it has cancelled.
_CLOSE_S = 2.0


def credentials(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that is made with `token`."""
    return () if token is None else (("token", token),)


class LoginFailed(Exception):
    """A login that got no token.

    Attributes:
        endpoint: where.
        code: gRPC's word for it.
        details: in words.
    """

    def __init__(self, endpoint: Endpoint, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.endpoint = endpoint
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """A login that got a token."""

    endpoint: Endpoint
    answer: v3.AuthenticateResponse


class Login:
    """The token of a connection, and how to get another. May be used from any thread.

    Args:
        options: where the cluster is, and as whom to log in.

    Attributes:
        last: the newest token, even if etcd refused it.
        broken_streams: streams of the connection's leases that broke since etcd answered one.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self.last: str | None = None
        self.broken_streams = 0
        self._logged_in: LoggedIn | None = None
        self._under_way: Future[LoggedIn] | None = None
        self._since: float | None = None  # when the first of several logins that timed out began
        self._channel: grpc.Channel | None = None
        self._closed = False

    @property
    def needed(self) -> bool:
        """True if calls need a token: the user gave a name."""
        return self._options.username is not None

    @property
    def token(self) -> str | None:
        """The token, unless there is none or etcd refused it."""
        logged_in = self._logged_in
        return None if logged_in is None else logged_in.answer.token

    def refused(self, token: str | None) -> None:
        """Drops a token that etcd refused: the next call that needs one logs in."""
        with self._lock:
            if token == self.token:  # else another login replaced it
                self._logged_in = None

    def waits(self) -> str:
        """Returns why calls wait for a token, for people; "" if they do not."""
        since = self._since
        return "" if since is None else f"logging in to etcd takes {time.monotonic() - since:.0f} s"

    def begin(self, endpoint: Endpoint) -> Future[LoggedIn]:
        """Joins the login that is under way, or begins one at `endpoint`. Its exception is a `LoginFailed`."""
        with self._lock:
            if self._under_way is not None:
                return self._under_way
            future: Future[LoggedIn] = Future()
            if self._logged_in is not None:  # a login ended after the caller looked
                future.set_result(self._logged_in)
                return future
            future.set_running_or_notify_cancel()  # a caller that gives up does not cancel it
            thread = threading.Thread(target=self._run, args=(endpoint, future), name="taskgraph-login", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                future.set_exception(LoginFailed(endpoint, grpc.StatusCode.UNAVAILABLE, no_thread(error) or str(error)))
                return future
            self._under_way = future
            self._since = self._since or time.monotonic()
            return future

    async def close(self) -> None:
        """Ends the login that is under way. Later ones fail at once."""
        with self._lock:
            self._closed = True
            channel, under_way = self._channel, self._under_way
        if channel is not None:
            channel.close()  # cancels the call
        if under_way is not None:
            with contextlib.suppress(LoginFailed, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.wrap_future(under_way)

    # The thread of one login.

    def _run(self, endpoint: Endpoint, future: Future[LoggedIn]) -> None:
        logged_in = failed = None
        try:
            logged_in = LoggedIn(endpoint, self._ask(endpoint))
        except LoginFailed as error:
            failed = error
        except grpc.RpcError as error:
            code, details = why(error)
            failed = LoginFailed(endpoint, code, details)
        except Exception as error:  # no file for its socket, a TLS file that is being replaced, a closed connection
            if not isinstance(error, CoordinationError | OSError | ValueError):
                log.exception("logging in to etcd %s failed", endpoint.target)
            failed = LoginFailed(endpoint, grpc.StatusCode.UNAVAILABLE, str(error))
        timed_out = failed is not None and failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        if failed is not None and timed_out:
            failed = LoginFailed(endpoint, failed.code, self.waits())
            log.warning(
                "etcd %s did not answer a login within %g s. It computes a hash for each login: more processors or a "
                "lower --bcrypt-cost let nodes in sooner",
                endpoint.target,
                _LIMIT_S,
            )
        with self._lock:
            self._under_way = None
            if not timed_out:
                self._since = None
            self._logged_in = logged_in
            if logged_in is not None:
                self.last = logged_in.answer.token
        if failed is not None:
            future.set_exception(failed)
        elif logged_in is not None:
            future.set_result(logged_in)

    def _ask(self, endpoint: Endpoint) -> v3.AuthenticateResponse:
        channel = self._options.sync_channel(endpoint)
        try:
            with self._lock:
                self._channel = channel
                if self._closed:
                    raise ValueError("the connection to etcd was closed")
            if len(self._options.endpoints) > 1:
                _probe(channel, endpoint)
            authenticate = channel.unary_unary(
                AUTHENTICATE.path, AUTHENTICATE.request.SerializeToString, AUTHENTICATE.response.FromString
            )
            answer: v3.AuthenticateResponse = authenticate(self._options.login(), timeout=_LIMIT_S)
            return answer
        finally:
            with self._lock:
                self._channel = None
            channel.close()


def _probe(channel: grpc.Channel, endpoint: Endpoint) -> None:
    """Returns if the member answers a call that costs no hash; a refusal is an answer.

    Raises:
        LoginFailed: it does not.
    """
    status = channel.unary_unary(STATUS.path, STATUS.request.SerializeToString, STATUS.response.FromString)
    try:
        status(v3.StatusRequest(), timeout=_SILENT_S)
    except grpc.RpcError as error:
        code, details = why(error)
        if judge(code, details) in (Verdict.NOT_EXECUTED, Verdict.UNKNOWN):
            raise LoginFailed(endpoint, grpc.StatusCode.UNAVAILABLE, details) from error
