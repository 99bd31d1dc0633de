"""Judges a failed RPC: whether it was executed, and whether a retry may help.

gRPC's code alone is not enough: UNAVAILABLE is both "nothing listens there" and "the connection broke after your
request was sent". So the verdict depends on the code, and on a few messages of gRPC and etcd that certainly precede
any proposal. All other failures count as unknown.
"""

from __future__ import annotations

import enum

import grpc

from taskgraph.coordination.api import AccessRefused, TooLarge
from taskgraph.errors import CoordinationError, LeaseGone

__all__ = [
    "FailureKind",
    "PermissionRefused",
    "advice_on_failure",
    "classify_failure",
    "code_and_details",
    "is_space_used_up",
    "refusal",
]


class PermissionRefused(AccessRefused):
    """The user lacks a permission in etcd."""


class FailureKind(enum.Enum):
    """What a failed call may have done, and whether a retry may help."""

    NOT_EXECUTED = "not executed: safe to try again, on another endpoint"
    LOGIN = "not executed: the token is stale, log in again"
    REFUSED = "not executed: etcd says no and would say no again"
    UNKNOWN = "it may have been executed"


#: Messages of gRPC without a connection, and of etcd before a proposal reaches its log.
_NOT_EXECUTED_TEXTS = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "Name resolution failed",
    "etcdserver: no leader",
    "etcdserver: too many requests",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "raft proposal dropped",
)
_STALE_TOKEN_TEXTS = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old")
_LOGIN_REFUSED_TEXTS = (
    "etcdserver: authentication failed",
    "etcdserver: authentication is not enabled",
    "etcdserver: user name is empty",
)
"""etcd checks these before it applies a request."""
_GRPC_TOO_LARGE_TEXT = "grpc: received message larger than max"
"""gRPC's limit at the server, before anything is decoded; it is a little above etcd's own."""
_ETCD_TOO_LARGE_TEXT = "etcdserver: request is too large"
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


def code_and_details(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Returns the code and the details of a failed call."""
    if not isinstance(error, grpc.Call):
        return grpc.StatusCode.UNKNOWN, str(error)
    return error.code(), error.details() or error.code().name


def classify_failure(code: grpc.StatusCode, details: str) -> FailureKind:
    """Returns the kind of a failed call, by its status code and message."""
    if any(text in details for text in _STALE_TOKEN_TEXTS):
        return FailureKind.LOGIN
    if any(text in details for text in _NOT_EXECUTED_TEXTS):
        return FailureKind.NOT_EXECUTED
    if code in _REFUSED_CODES:
        return FailureKind.REFUSED
    if details.startswith(_GRPC_TOO_LARGE_TEXT):
        return FailureKind.REFUSED
    # RESOURCE_EXHAUSTED "database space exceeded" belongs here: the transaction that crosses the quota is executed.
    return FailureKind.UNKNOWN


def is_space_used_up(details: str) -> bool:
    """True if etcd's space is used up. All members report that, so another endpoint does not help."""
    return "database space exceeded" in details


def advice_on_failure(details: str) -> str:
    """Returns advice on a failure that etcd does not explain, after a semicolon; "" if there is none."""
    if not is_space_used_up(details):
        return ""
    return (
        "; it accepts no writes before you compact its history, defragment its members and disarm the alarm "
        "(`etcdctl compact`, `defrag`, `alarm disarm`). To avoid it, start etcd with --auto-compaction-retention, and "
        "delete jobs that ended (`taskgraph forget JOB`)"
    )


def refusal(what: str, code: grpc.StatusCode, details: str) -> CoordinationError:
    """Returns the error for a call that etcd refused."""
    if "requested lease not found" in details:
        return LeaseGone(f"{what}: the lease does not exist; take a new one")
    if details.startswith((_GRPC_TOO_LARGE_TEXT, _ETCD_TOO_LARGE_TEXT)):
        return TooLarge(f"etcd refused {what}: {details}")
    kind: type[CoordinationError] = CoordinationError
    if code is grpc.StatusCode.PERMISSION_DENIED:
        kind = PermissionRefused
    elif details.startswith(_LOGIN_REFUSED_TEXTS):
        kind = AccessRefused
    return kind(f"etcd refused {what}: {details or code.name}")
