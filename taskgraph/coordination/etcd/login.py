"""Logs in to an etcd that has users: one token serves a connection and its leases, and one login runs at a time.

etcd computes a bcrypt hash for every login, and finishes it even if the client gave up. When many nodes log in at once
(a job begins, or a restarted etcd has lost its tokens), the hashes share etcd's processors. Hence

- callers share one login, which continues if a caller gives up: the caller's next call joins it;
- a login may take minutes, so a cheap call before it, and gRPC's pings during it, detect a silent member.

Each login has its own thread: a lease is renewed while the main loop is busy, and may need a token for that.
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
from taskgraph.coordination.etcd.failures import FailureKind, classify_failure, code_and_details
from taskgraph.coordination.etcd.methods import AUTHENTICATE, STATUS
from taskgraph.coordination.etcd.options import Endpoint, EtcdOptions
from taskgraph.errors import CoordinationError, no_thread_text

__all__ = ["LoggedIn", "Login", "LoginFailed", "credentials"]

log = logging.getLogger(__name__)

#: The limit of a login: a hundred nodes at 1 s a hash, on one processor. To give up earlier would cost another hash.
_LOGIN_LIMIT_S = 120.0
#: After this silence of a member (frozen, packets dropped), the login tries the next endpoint, if there is one.
_SILENT_S = 2.0
#: How long `close` waits for the thread after it cancelled the thread's call.
_CLOSE_S = 2.0


def credentials(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call with `token`."""
    return () if token is None else (("token", token),)


class LoginFailed(Exception):
    """Raised for a login without a token.

    Attributes:
        endpoint: the member that was asked.
        code: gRPC's status code.
        details: the reason, in words.
    """

    def __init__(self, endpoint: Endpoint, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.endpoint = endpoint
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """A successful login: the member that was asked, and its answer, which has the token."""

    endpoint: Endpoint
    answer: v3.AuthenticateResponse


class Login:
    """The token of a connection, and the logins that renew it. May be used from any thread.

    Args:
        options: the cluster's endpoints, and the user.

    Attributes:
        last: the newest token, also if etcd has refused it.
        broken_streams: how many streams of leases broke since the last answer to a renewal.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self.last: str | None = None
        self.broken_streams = 0
        self._logged_in: LoggedIn | None = None
        self._under_way: Future[LoggedIn] | None = None
        self._first_began_at: float | None = None  # when the first of several logins that timed out began
        self._channel: grpc.Channel | None = None
        self._closed = False

    @property
    def needed(self) -> bool:
        """True if calls need a token, since the options name a user."""
        return self._options.username is not None

    @property
    def token(self) -> str | None:
        """The token; None if there is none, or etcd refused it."""
        logged_in = self._logged_in
        return None if logged_in is None else logged_in.answer.token

    def drop_token(self, token: str | None) -> None:
        """Drops a token that etcd refused: the next call that needs one logs in."""
        with self._lock:
            if token == self.token:  # otherwise another login has replaced it
                self._logged_in = None

    def waits(self) -> str:
        """Returns how long calls have waited for a login, in words; "" if they do not wait."""
        since = self._first_began_at
        return "" if since is None else f"logging in to etcd takes {time.monotonic() - since:.0f} s"

    def join_or_begin(self, endpoint: Endpoint) -> Future[LoggedIn]:
        """Returns the future of the login under way, or of one that ended meanwhile; else of a new login at `endpoint`.

        Its exception is a `LoginFailed`.
        """
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
                future.set_exception(
                    LoginFailed(endpoint, grpc.StatusCode.UNAVAILABLE, no_thread_text(error) or str(error))
                )
                return future
            self._under_way = future
            self._first_began_at = self._first_began_at or time.monotonic()
            return future

    async def close(self) -> None:
        """Ends the login that is under way. Later logins fail at once."""
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
        """Logs in, in a thread of its own; `future` gets the login, or LoginFailed."""
        logged_in = failed = None
        try:
            logged_in = LoggedIn(endpoint, self._authenticate(endpoint))
        except LoginFailed as error:
            failed = error
        except grpc.RpcError as error:
            code, details = code_and_details(error)
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
                _LOGIN_LIMIT_S,
            )
        with self._lock:
            self._under_way = None
            if not timed_out:
                self._first_began_at = None
            self._logged_in = logged_in
            if logged_in is not None:
                self.last = logged_in.answer.token
        if failed is not None:
            future.set_exception(failed)
        elif logged_in is not None:
            future.set_result(logged_in)

    def _authenticate(self, endpoint: Endpoint) -> v3.AuthenticateResponse:
        """Asks a member for a token. Raises LoginFailed, RpcError or ValueError."""
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
            answer: v3.AuthenticateResponse = authenticate(self._options.login_request(), timeout=_LOGIN_LIMIT_S)
            return answer
        finally:
            with self._lock:
                self._channel = None
            channel.close()


def _probe(channel: grpc.Channel, endpoint: Endpoint) -> None:
    """Checks that a member answers a call that costs no hash. A refusal is an answer.

    Raises:
        LoginFailed: the member does not answer.
    """
    status = channel.unary_unary(STATUS.path, STATUS.request.SerializeToString, STATUS.response.FromString)
    try:
        status(v3.StatusRequest(), timeout=_SILENT_S)
    except grpc.RpcError as error:
        code, details = code_and_details(error)
        if classify_failure(code, details) in (FailureKind.NOT_EXECUTED, FailureKind.UNKNOWN):
            raise LoginFailed(endpoint, grpc.StatusCode.UNAVAILABLE, details) from error
