"""Durable checkpoints: a job's state at one boundary, in files that outlive its nodes and its etcd."""

from __future__ import annotations

from taskgraph.checkpoint.files import FileInfo
from taskgraph.checkpoint.manifest import Manifest, Name, Origin
from taskgraph.checkpoint.places import check_url
from taskgraph.checkpoint.store import Store

__all__ = ["FileInfo", "Manifest", "Name", "Origin", "Store", "check_url"]
