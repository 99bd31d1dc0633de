"""Durable checkpoints: a job's state at one boundary, in files that outlive its nodes and its etcd."""

from __future__ import annotations

from taskgraph.checkpoint.files import FileInfo
from taskgraph.checkpoint.manifest import CheckpointName, ExpectedJob, Manifest
from taskgraph.checkpoint.places import check_url
from taskgraph.checkpoint.store import CheckpointStore

__all__ = ["CheckpointName", "CheckpointStore", "ExpectedJob", "FileInfo", "Manifest", "check_url"]
