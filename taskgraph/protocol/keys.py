"""The layout of a job's keys. Only `nodes/` hangs on leases: a pause of etcd must not destroy a healthy job."""

from __future__ import annotations

__all__ = ["Keys", "jobs_prefix"]

jobs_prefix = "/taskgraph/"


class Keys:
    """Keys of one job, all under `/taskgraph/{job}/`."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.root = f"{jobs_prefix}{job}/"
        self.spec = self.root + "spec"
        self.epoch = self.root + "epoch"
        self.status = self.root + "status"
        self.generation = self.root + "generation"
        self.checkpoint = self.root + "checkpoint"
        self.collected = self.root + "collected"
        self.result = self.root + "result"
        self.names = self.root + "names"
        self.nodes = self.root + "nodes/"
        self.gone_nodes = self.root + "gone/"
        self.forgotten = self.root + "forgotten"
        self.tasks = self.root + "tasks/"
        self.events = self.root + "events/"

    def node(self, node: str) -> str:
        return self.nodes + node

    def gone(self, node: str) -> str:
        return self.gone_nodes + node

    def primary(self, task: int) -> str:
        return f"{self.tasks}{task}/primary"

    def members(self, task: int) -> str:
        return f"{self.tasks}{task}/members/"

    def member(self, task: int, node: str) -> str:
        return f"{self.tasks}{task}/members/{node}"

    def event(self, name: str) -> str:
        return self.events + name
