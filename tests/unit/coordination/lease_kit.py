"""A lease without an etcd."""

from __future__ import annotations

import time

from taskgraph.coordination.etcd.lease import EtcdLease
from taskgraph.coordination.etcd.login import Login
from taskgraph.coordination.etcd.options import EtcdOptions


def lease_of(options: EtcdOptions, login: Login, *, number: int = 7, ttl_s: float = 0.1) -> EtcdLease:
    """A lease that is not started."""

    async def revoke(_: int) -> None: ...

    return EtcdLease(
        options,
        number,
        ttl_s=ttl_s,
        stall_limit_s=60.0,
        sent_at=time.monotonic(),
        revoke=revoke,
        forget=lambda _: None,
        endpoint=options.endpoints[0],
        login=login,
    )
