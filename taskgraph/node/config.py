"""The configuration of a node's process. Launchers load this without loading a node."""

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
    """The configuration of a node's process. It travels through a pipe, not on a command line: it has the token.

    Attributes:
        etcd: endpoints of etcd.
        tls: further arguments of `EtcdCoordinator.connect`.
        token: the job's token, hex.
        sockets: a private directory for unix sockets, or "" for none.
        listening: the address for other hosts.
        node_tls: ca, cert and key for TCP between nodes, and for their control service, and perhaps a fixed name; {}:
            none.
        parent_fd: a pipe that ends with the launcher, or -1.
        parent_pid: the launcher, which must be our parent, or 0.
        devices: `CUDA_VISIBLE_DEVICES` of the process; None: unchanged.
        sharing: number of nodes that share its device, as far as its launcher knows.
        path: the launcher's `sys.path`, so that drivers find their imports; []: unchanged.
        collects: True if the launcher collects the results: the node keeps them while the launcher lives.
        drained_code: the exit code if the node leaves and its job goes on.
        ready_file: a file that is there while the node is ready (`protocol.readiness`); "": none.
        node_id: the node's id, known to the launcher even if the process dies at once; "": the node makes one.
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
    drained_code: int = 0
    ready_file: str = ""
    node_id: str = ""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> NodeConfig:
        """Makes a configuration from the fields that `dataclasses.asdict` gave."""
        return cls(**{**fields, "listening": Listening(**fields["listening"])})

    @staticmethod
    def new_id(name: str) -> str:
        """Makes a unique id for a node of that name."""
        return f"{name}-{uuid.uuid4().hex[:8]}"

    @property
    def folder(self) -> Path | None:
        """The node's own directory for sockets, removed at its end; None: the node has no sockets."""
        return Path(self.sockets) / self.node_id.rpartition("-")[2] if self.sockets else None
