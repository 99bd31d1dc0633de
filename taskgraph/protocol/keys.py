"""The keys of a job in etcd. Only `nodes/` depends on leases, so a pause of etcd does not destroy a healthy job."""

from __future__ import annotations

__all__ = ["NAME_RULE", "Keys", "is_name", "jobs_prefix"]

jobs_prefix = "/taskgraph/"
NAME_RULE = "a name has 1 to 100 letters (of any language), digits, '.', '_' or '-', 200 bytes at most, no '.' first"
_NAME_LETTERS, _NAME_BYTES = 100, 200
"""A file system allows 255 bytes, and our file names have more than the job's name."""


def is_name(text: object) -> bool:
    """Says whether a job may have this name, by `NAME_RULE`."""
    if not isinstance(text, str) or not 0 < len(text) <= _NAME_LETTERS or text.startswith("."):
        return False
    return all(c in ".-" or f"_{c}".isidentifier() for c in text) and len(text.encode()) <= _NAME_BYTES


class Keys:
    """The keys of one job, all below `/taskgraph/{job}/`."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.root = f"{jobs_prefix}{job}/"
        self.spec = self.root + "spec"
        self.epoch = self.root + "epoch"
        self.status = self.root + "status"
        self.generation = self.root + "generation"
        self.checkpoint = self.root + "checkpoint"
        self.collected = self.root + "collected"
        self.workers = self.root + "workers"
        self.names = self.root + "names"
        self.nodes = self.root + "nodes/"
        self.gone_nodes = self.root + "gone/"
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
