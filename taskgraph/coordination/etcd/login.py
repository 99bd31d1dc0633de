"""Logging in to an etcd that has users: one token for a connection and for its leases, and one login at a time.

etcd computes a bcrypt hash for every login, and goes on computing it where the client has given up. Where many log in
at once (a job that begins, an etcd that was restarted and has forgotten its tokens), the hashes share its processors,
and a limit that is too short for all of them lets nobody in: everybody gives up, and asks for another hash. Hence

- a login goes on while those who wait for it come and go: a call that gives up is followed by one that joins it;
- a member that is silent is told from one that is busy: by another call before the login, by gRPC's pings during it;
- what a login may take is long, and doubled whenever that was too short;
- logins that follow one another closely have pauses between them, doubled, with jitter.

A thread of its own for each: a lease is renewed while the main loop is busy, and may need a token for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
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

__all__ = ["Entered", "Login", "LoginFailed", "Pace", "Patience", "credentials", "jitter"]

log = logging.getLogger(__name__)

#: What a login may take at first: to give one up costs etcd a hash. A hundred nodes at 1 s a hash and two processors.
_FIRST_LIMIT_S = 60.0
_LAST_LIMIT_S = 480.0
#: A member that is silent (frozen, packets dropped) is given up after this, if there is another endpoint; later where
#: `Patience` has learnt that connecting takes longer.
_SILENT_S = 2.0
#: What `Patience` begins with, and where it ends.
_FIRST_PATIENCE_S = 1.0
_LAST_PATIENCE_S = 8.0
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
#: After this time without a login the next one counts as the first.
_CALM_S = 60.0
#: How long `close` waits for the thread, whose call it has cancelled.
_CLOSE_S = 2.0

_random = random.SystemRandom()


def jitter() -> float:
    """By what a pause is multiplied, so that nodes do not come in step. It is not drawn from `random` itself: the
    program that runs a job may have seeded that, and draw other numbers each time."""
    return _random.uniform(0.5, 1.0)


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


class Pace:
    """What the next login may take, and how long it has to wait. Decides; whoever asks has the clock.

    Attributes:
        limit_s: what the next login may take.
    """

    def __init__(self) -> None:
        self.limit_s = _FIRST_LIMIT_S
        self._close = 0  # logins that followed one another closely
        self._ended_at = 0.0

    def wait_s(self, now: float) -> float:
        """How long to wait before the next login."""
        if now - self._ended_at > _CALM_S:
            self._close = 0
        if not self._close:
            return 0.0
        pause_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._close - 1, 10)) * jitter()
        return max(0.0, self._ended_at + pause_s - now)

    def ended(self, now: float, code: grpc.StatusCode) -> None:
        """A login ended with `code`."""
        self._ended_at = now
        if code is grpc.StatusCode.UNAVAILABLE:  # nobody is there: it cost no hash
            return
        self._close += 1
        timed_out = code is grpc.StatusCode.DEADLINE_EXCEEDED
        self.limit_s = min(_LAST_LIMIT_S, 2 * self.limit_s) if timed_out else _FIRST_LIMIT_S


class Patience:
    """How long a new connection may be silent, for those who give it up with their channel: leases and logins.

    A member that is away is to be left soon; behind a slow link connecting takes several round trips, and who gives up
    sooner than that never gets through. So it is doubled where nothing came, and follows what it took where something
    did.

    Attributes:
        limit_s: what the next one has.
    """

    def __init__(self) -> None:
        self.limit_s = _FIRST_PATIENCE_S

    def silent(self) -> None:
        """Nothing came in time."""
        self.limit_s = min(_LAST_PATIENCE_S, 2 * self.limit_s)

    def answered(self, took_s: float) -> None:
        """The first answer came."""
        self.limit_s = min(_LAST_PATIENCE_S, max(_FIRST_PATIENCE_S, 2 * took_s))


@dataclass(frozen=True, slots=True)
class Entered:
    """A login that got a token."""

    endpoint: Endpoint
    answer: v3.AuthenticateResponse


class Login:
    """The token of a connection, and how to get another. May be used from any thread.

    Args:
        options: where the cluster is, and as whom to log in.

    Attributes:
        last: the newest token, whether or not etcd takes it.
        patience: with new connections, its own and those of leases.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._pace = Pace()
        self.patience = Patience()
        self._lock = threading.Lock()
        self.last: str | None = None
        self._entered: Entered | None = None
        self._under_way: Future[Entered] | None = None
        self._since: float | None = None  # when the first login of this row was begun
        self._channel: grpc.Channel | None = None
        self._closing = threading.Event()

    @property
    def needed(self) -> bool:
        """Whether this etcd has users, as far as we were told."""
        return self._options.username is not None

    @property
    def token(self) -> str | None:
        """What etcd takes, as far as is known."""
        entered = self._entered
        return None if entered is None else entered.answer.token

    def refused(self, token: str | None) -> None:
        """etcd did not take `token`: the next one that needs a token logs in."""
        with self._lock:
            if token == self.token:  # else it was replaced meanwhile
                self._entered = None

    def told(self) -> str:
        """What those wait for who wait for a token; "" where nobody has to."""
        since = self._since
        return "" if since is None else f"logging in to etcd takes {time.monotonic() - since:.0f} s"

    def begin(self, endpoint: Endpoint) -> Future[Entered]:
        """The login that is under way; else one that begins at `endpoint`. Its exception is a `LoginFailed`."""
        with self._lock:
            if self._under_way is not None:
                return self._under_way
            future: Future[Entered] = Future()
            if self._entered is not None:  # since whoever asks has looked
                future.set_result(self._entered)
                return future
            future.set_running_or_notify_cancel()  # who waits for it and gives up does not cancel it
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
        """Ends the login that is under way; none begins any more that takes any time."""
        self._closing.set()
        with self._lock:
            channel, under_way = self._channel, self._under_way
        if channel is not None:
            channel.close()  # cancels the call
        if under_way is not None:
            with contextlib.suppress(LoginFailed, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.wrap_future(under_way)

    # The thread of one login.

    def _run(self, endpoint: Endpoint, future: Future[Entered]) -> None:
        entered = failed = None
        try:
            entered = Entered(endpoint, self._ask(endpoint))
        except LoginFailed as error:
            failed = error
        except grpc.RpcError as error:
            code, details = why(error)
            failed = LoginFailed(endpoint, code, self.told() if code is grpc.StatusCode.DEADLINE_EXCEEDED else details)
        except Exception as error:  # no file for its socket, a TLS file that is being replaced, closed meanwhile
            if not isinstance(error, CoordinationError | OSError | ValueError):
                log.exception("logging in to etcd %s failed", endpoint.target)
            failed = LoginFailed(endpoint, grpc.StatusCode.UNAVAILABLE, str(error))
        if failed is not None and failed.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            log.warning(
                "etcd %s did not answer a login within %g s; the next one may take longer. It computes a hash for "
                "each: where many log in at once, more processors or a lower --bcrypt-cost let them in sooner",
                endpoint.target,
                self._pace.limit_s,
            )
        with self._lock:
            self._pace.ended(time.monotonic(), failed.code if failed is not None else grpc.StatusCode.OK)
            self._under_way = None
            if failed is None or failed.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._since = None
            self._entered = entered
            if entered is not None:
                self.last = entered.answer.token
        if failed is not None:
            future.set_exception(failed)
        elif entered is not None:
            future.set_result(entered)

    def _ask(self, endpoint: Endpoint) -> v3.AuthenticateResponse:
        closed = ValueError("the connection to etcd was closed")
        if self._closing.wait(self._pace.wait_s(time.monotonic())):
            raise closed
        channel = self._options.sync_channel(endpoint)
        try:
            with self._lock:
                self._channel = channel
            if self._closing.is_set():
                raise closed
            if len(self._options.endpoints) > 1:
                _probe(channel, endpoint, self.patience)
            authenticate = channel.unary_unary(
                AUTHENTICATE.path, AUTHENTICATE.request.SerializeToString, AUTHENTICATE.response.FromString
            )
            answer: v3.AuthenticateResponse = authenticate(self._options.login(), timeout=self._pace.limit_s)
            return answer
        finally:
            with self._lock:
                self._channel = None
            channel.close()


def _probe(channel: grpc.Channel, endpoint: Endpoint, patience: Patience) -> None:
    """Returns where somebody is there: any answer, a refusal too, says that.

    Raises:
        LoginFailed: nobody, or nobody of use. This cost no hash.
    """
    status = channel.unary_unary(STATUS.path, STATUS.request.SerializeToString, STATUS.response.FromString)
    limit_s, asked_at = max(_SILENT_S, patience.limit_s), time.monotonic()
    try:
        status(v3.StatusRequest(), timeout=limit_s)
        patience.answered(time.monotonic() - asked_at)
    except grpc.RpcError as error:
        code, details = why(error)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            patience.silent()
        if judge(code, details) in (Verdict.NOT_EXECUTED, Verdict.UNKNOWN):
            raise LoginFailed(endpoint, grpc.StatusCode.UNAVAILABLE, details) from error
