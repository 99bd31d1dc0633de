"""taskgraph: fault-tolerant distributed iterative programs on asyncio.

    import taskgraph as tg

A program is a graph of tasks; each task has a primary and backups; each epoch every task composes processors joined
by channels; data is pulled, exactly once, whatever dies. Names are imported when they are first used, so that
`import taskgraph` costs next to nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from taskgraph.version import VERSION as __version__

# gRPC reads these when it is first used. Its handlers for forks know nothing of its asyncio side, which we use, and
# would only print warnings: `rpc.py` sees to children. Names are resolved as everybody else on the host does it: its
# own resolver asks the name server even for a name that is in /etc/hosts, and gives up when that does not answer.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

if TYPE_CHECKING:
    from taskgraph import testing as testing
    from taskgraph.channels import Inputs, Outputs
    from taskgraph.cli import driver_main as main
    from taskgraph.elastic_jobs.groups import Group
    from taskgraph.elastic_jobs.job import elastic
    from taskgraph.elastic_jobs.parts import Part
    from taskgraph.elastic_jobs.run import Run
    from taskgraph.elastic_jobs.steps import Step, Steps
    from taskgraph.elastic_jobs.tables import RunTable
    from taskgraph.epoch import Epoch, Hold, QueueState, Reply, Tag
    from taskgraph.errors import (
        CheckpointError,
        CoordinationError,
        DecodeError,
        FingerprintMismatch,
        GraphError,
        JobCancelled,
        JobError,
        JobFailed,
        JobRunning,
        JobTimeout,
        LeaseGone,
        OutcomeUnknown,
        PeerGone,
        PeerLost,
        PieceFailed,
        Refused,
        StateError,
        StepError,
        TableError,
        TaskGraphError,
        TransportError,
        Unavailable,
        UnknownJob,
        ValueNotEncodable,
        ViewChanged,
    )
    from taskgraph.graph.libraries import arrays
    from taskgraph.graph.values import codec, message
    from taskgraph.jobs import Job, job
    from taskgraph.launch.run import arun, result, run
    from taskgraph.maps.mapping import imap, map
    from taskgraph.queues.queue import WorkQueue
    from taskgraph.results import EpochReport, Failed, JobResult
    from taskgraph.settings import Settings
    from taskgraph.shape import handles, stateless
    from taskgraph.sources.delimited import csv
    from taskgraph.sources.locations import files
    from taskgraph.sources.parquet import parquet
    from taskgraph.sources.text import lines
    from taskgraph.tables.interface import EpochTable
    from taskgraph.tables.saved import read_table
    from taskgraph.tables.table import Table
    from taskgraph.task import BecameBackup, BecamePrimary, Event, NeighborFailed, NeighborRestarted, Task, shard
    from taskgraph.topology import Topology, bipartite, edges, full, grid, inverse, ring, star, tree

__all__ = [
    "BecameBackup",
    "BecamePrimary",
    "CheckpointError",
    "CoordinationError",
    "DecodeError",
    "Epoch",
    "EpochReport",
    "EpochTable",
    "Event",
    "Failed",
    "FingerprintMismatch",
    "GraphError",
    "Group",
    "Hold",
    "Inputs",
    "Job",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobResult",
    "JobRunning",
    "JobTimeout",
    "LeaseGone",
    "NeighborFailed",
    "NeighborRestarted",
    "OutcomeUnknown",
    "Outputs",
    "Part",
    "PeerGone",
    "PeerLost",
    "PieceFailed",
    "QueueState",
    "Refused",
    "Reply",
    "Run",
    "RunTable",
    "Settings",
    "StateError",
    "Step",
    "StepError",
    "Steps",
    "Table",
    "TableError",
    "Tag",
    "Task",
    "TaskGraphError",
    "Topology",
    "TransportError",
    "Unavailable",
    "UnknownJob",
    "ValueNotEncodable",
    "ViewChanged",
    "WorkQueue",
    "__version__",
    "arrays",
    "arun",
    "bipartite",
    "codec",
    "csv",
    "edges",
    "elastic",
    "files",
    "full",
    "grid",
    "handles",
    "imap",
    "inverse",
    "job",
    "lines",
    "main",
    "map",
    "message",
    "parquet",
    "read_table",
    "result",
    "ring",
    "run",
    "shard",
    "star",
    "stateless",
    "testing",
    "tree",
]

_MODULES = {
    "channels": ("Inputs", "Outputs"),
    "elastic_jobs.groups": ("Group",),
    "elastic_jobs.job": ("elastic",),
    "elastic_jobs.parts": ("Part",),
    "elastic_jobs.run": ("Run",),
    "elastic_jobs.steps": ("Step", "Steps"),
    "elastic_jobs.tables": ("RunTable",),
    "epoch": ("Epoch", "Hold", "QueueState", "Reply", "Tag"),
    "graph.libraries": ("arrays",),
    "graph.values": ("codec", "message"),
    "jobs": ("Job", "job"),
    "launch.run": ("arun", "result", "run"),
    "maps.mapping": ("imap", "map"),
    "queues.queue": ("WorkQueue",),
    "results": ("EpochReport", "Failed", "JobResult"),
    "settings": ("Settings",),
    "shape": ("handles", "stateless"),
    "sources.delimited": ("csv",),
    "sources.locations": ("files",),
    "sources.parquet": ("parquet",),
    "sources.text": ("lines",),
    "tables.interface": ("EpochTable",),
    "tables.saved": ("read_table",),
    "tables.table": ("Table",),
    "task": ("BecameBackup", "BecamePrimary", "Event", "NeighborFailed", "NeighborRestarted", "Task", "shard"),
    "topology": ("Topology", "bipartite", "edges", "full", "grid", "inverse", "ring", "star", "tree"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "testing":
            return importlib.import_module("taskgraph.testing")
        if name == "main":
            found = importlib.import_module("taskgraph.cli").driver_main
        elif name in _HOME:
            found = getattr(importlib.import_module(f"taskgraph.{_HOME[name]}"), name)
        elif name in __all__:
            found = getattr(importlib.import_module("taskgraph.errors"), name)
        else:
            raise AttributeError(f"module 'taskgraph' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
