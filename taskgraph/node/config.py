"""What a node process is told to be. Apart from the node itself, so that who launches nodes need not load one."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taskgraph.network.listening import NOWHERE, Listening

__all__ = ["NodeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What a node process is told; through a pipe, never on a command line, since it holds the token.

    Attributes:
        etcd: endpoints; tls: further arguments of `EtcdCoordinator.connect`.
        token: the job's token, hex.
        sockets: a private directory for unix sockets, or "" for none.
        listening: where it is reached from other hosts.
        node_tls: ca, cert and key for TCP between nodes, and for their control service; {}: none.
        parent_fd: a pipe whose end means that the launcher is gone, or -1.
        parent_pid: the launcher, which must be our parent, or 0.
        devices: `CUDA_VISIBLE_DEVICES` of the process; None: as it is.
        sharing: how many nodes compute on its device, as far as its launcher knows: those that it started together.
        path: the launcher's `sys.path`, so that drivers find what they import where it does; []: as it is here.
        collects: its launcher runs the job, and collects the results: for as long as that lives.
        node_id: the node's id, so that the launcher knows it even of a process that dies at once; "": made up here.
    """

    job: str
    name: str
    etcd: str
    token: str = dataclasses.field(repr=False)
    tls: dict[str, str] = field(default_factory=dict, repr=False)
    sockets: str = ""
    listening: Listening = NOWHERE
    node_tls: dict[str, str] = field(default_factory=dict)
    parent_fd: int = -1
    parent_pid: int = 0
    devices: str | None = None
    sharing: int = 1
    path: list[str] = field(default_factory=list)
    collects: bool = False
    node_id: str = ""

    @classmethod
    def of(cls, told: dict[str, Any]) -> NodeConfig:
        """From what `dataclasses.asdict` made of one."""
        return cls(**{**told, "listening": Listening(**told["listening"])})

    @staticmethod
    def new_id(name: str) -> str:
        """An id for a node of that name, never used again."""
        return f"{name}-{uuid.uuid4().hex[:8]}"

    @property
    def folder(self) -> Path | None:
        """The node's own directory for its sockets; it dies with the node."""
        return Path(self.sockets) / self.node_id.rpartition("-")[2] if self.sockets else None
