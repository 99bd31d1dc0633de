"""Durable checkpoints: a job's state at one boundary, in files that outlive its nodes and its etcd."""

from __future__ import annotations

from taskgraph.checkpoint.files import FileInfo
from taskgraph.checkpoint.manifest import ExpectedJob, Manifest, Name
from taskgraph.checkpoint.places import check_url
from taskgraph.checkpoint.store import Store

__all__ = ["ExpectedJob", "FileInfo", "Manifest", "Name", "Store", "check_url"]
