"""A small, typed client of etcd's public v3 API on gRPC.

It uses only the RPCs in `methods`. (Compact is for tests: etcd's operator decides how much history etcd keeps.) Its
messages have their own protobuf package, and RPCs are called by path, so that another etcd client in the process cannot
conflict with it.

Rules:
    - A read is retried on the next endpoint until its timeout. A write is retried only if it was certainly not
      executed: no connection could be made, or etcd refused it before proposing it. Otherwise the caller gets
      `OutcomeUnknown` at once.
    - A watch survives broken streams, dead endpoints and restarts of etcd without losing or repeating a revision.
    - A lease is renewed by its own thread, so that a busy main loop does not lose it, and only while the main loop
      ticks, so that a stuck main loop does.
    - If etcd has users, calls and leases share one token, and one login at a time renews it.

Must not know: jobs, tasks, epochs, or which keys exist.
"""

from __future__ import annotations

from taskgraph.coordination.etcd.coordinator import EtcdCoordinator
from taskgraph.coordination.etcd.lease import EtcdLease
from taskgraph.coordination.etcd.options import EtcdOptions

__all__ = ["EtcdCoordinator", "EtcdLease", "EtcdOptions"]
