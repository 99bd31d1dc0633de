"""Judges a failed RPC: was it executed, and is a retry of use?

For a write, this is the question. gRPC's code alone does not answer it: UNAVAILABLE is both "nothing listens there" and
"the connection broke after your request was sent". So the answer comes from the code and from the few messages, of
gRPC's core and of etcd, that are known to come before anything was proposed. All others count as unknown.
"""

from __future__ import annotations

import enum

import grpc

from taskgraph.coordination.api import AccessRefused, TooLarge
from taskgraph.errors import CoordinationError, LeaseGone

__all__ = ["PermissionRefused", "Verdict", "judge", "refusal", "space_used_up", "way_out", "why"]


class PermissionRefused(AccessRefused):
    """etcd's user may not do this."""


class Verdict(enum.Enum):
    """The possible outcomes of a failed call."""

    NOT_EXECUTED = "not executed: safe to try again, on another endpoint"
    LOGIN = "not executed: the token is stale, log in again"
    REFUSED = "not executed: etcd says no and would say no again"
    UNKNOWN = "it may have been executed"


#: Said by gRPC's core when no connection could be made, or by etcd before a proposal reaches its log.
_NOT_EXECUTED = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "Name resolution failed",
    "etcdserver: no leader",
    "etcdserver: too many requests",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "raft proposal dropped",
)
_LOGIN = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old")
_NOT_LET_IN = (
    "etcdserver: authentication failed",
    "etcdserver: authentication is not enabled",
    "etcdserver: user name is empty",
)
"""etcd checks these before it applies a request."""
_LARGER = "grpc: received message larger than max"
"""gRPC's limit at the server, before anything is decoded; it is a little above etcd's own."""
_TOO_LARGE = "etcdserver: request is too large"
#: etcd checks these before it applies anything of the request.
_REFUSED_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


def why(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """The code and the details of a failed call."""
    if not isinstance(error, grpc.Call):
        return grpc.StatusCode.UNKNOWN, str(error)
    return error.code(), error.details() or error.code().name


def judge(code: grpc.StatusCode, details: str) -> Verdict:
    """Returns what a call that ended with `code` and `details` may have done."""
    if any(text in details for text in _LOGIN):
        return Verdict.LOGIN
    if any(text in details for text in _NOT_EXECUTED):
        return Verdict.NOT_EXECUTED
    if code in _REFUSED_CODES:
        return Verdict.REFUSED
    if details.startswith(_LARGER):
        return Verdict.REFUSED
    # RESOURCE_EXHAUSTED "database space exceeded" belongs here: the transaction that crosses the quota is executed.
    return Verdict.UNKNOWN


def space_used_up(details: str) -> bool:
    """True if etcd's space is used up. All members then say so, so that asking another is of no use."""
    return "database space exceeded" in details


def way_out(details: str) -> str:
    """Returns what to do about a failure that etcd does not explain itself, after a semicolon; else ""."""
    if not space_used_up(details):
        return ""
    return (
        "; it accepts no writes before you compact its history, defragment its members and disarm the alarm "
        "(`etcdctl compact`, `defrag`, `alarm disarm`). To avoid it, start etcd with --auto-compaction-retention, and "
        "delete jobs that ended (`taskgraph forget JOB`)"
    )


def refusal(what: str, code: grpc.StatusCode, details: str) -> CoordinationError:
    """The error for a call that etcd refused."""
    if "requested lease not found" in details:
        return LeaseGone(f"{what}: the lease does not exist; take a new one")
    if details.startswith((_LARGER, _TOO_LARGE)):
        return TooLarge(f"etcd refused {what}: {details}")
    kind: type[CoordinationError] = CoordinationError
    if code is grpc.StatusCode.PERMISSION_DENIED:
        kind = PermissionRefused
    elif details.startswith(_NOT_LET_IN):
        kind = AccessRefused
    return kind(f"etcd refused {what}: {details or code.name}")
