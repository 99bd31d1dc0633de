"""Lists the RPCs of etcd that this client calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from taskgraph.coordination.etcd import v3_pb2 as v3

__all__ = [
    "AUTHENTICATE",
    "COMPACT",
    "LEASE_GRANT",
    "LEASE_KEEP_ALIVE",
    "LEASE_REVOKE",
    "LEASE_TIME_TO_LIVE",
    "MEMBER_LIST",
    "RANGE",
    "STATUS",
    "TXN",
    "WATCH",
    "Method",
]

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """One RPC: its path, and the types of its request and response."""

    path: str
    request: type[Request]
    response: type[Response]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


RANGE = Method("/etcdserverpb.KV/Range", v3.RangeRequest, v3.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", v3.TxnRequest, v3.TxnResponse)
COMPACT = Method("/etcdserverpb.KV/Compact", v3.CompactionRequest, v3.CompactionResponse)
LEASE_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", v3.LeaseGrantRequest, v3.LeaseGrantResponse)
LEASE_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", v3.LeaseRevokeRequest, v3.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", v3.LeaseKeepAliveRequest, v3.LeaseKeepAliveResponse)
LEASE_TIME_TO_LIVE = Method(
    "/etcdserverpb.Lease/LeaseTimeToLive", v3.LeaseTimeToLiveRequest, v3.LeaseTimeToLiveResponse
)
WATCH = Method("/etcdserverpb.Watch/Watch", v3.WatchRequest, v3.WatchResponse)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", v3.AuthenticateRequest, v3.AuthenticateResponse)
MEMBER_LIST = Method("/etcdserverpb.Cluster/MemberList", v3.MemberListRequest, v3.MemberListResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", v3.StatusRequest, v3.StatusResponse)
