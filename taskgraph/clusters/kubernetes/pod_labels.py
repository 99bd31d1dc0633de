"""The labels of a job's objects on Kubernetes, and how to select its pods by them."""

from __future__ import annotations

from typing import Any

__all__ = ["EXTRA", "LAUNCHER", "NODE", "job_labels", "labels", "node_labels", "selector"]

NODE, EXTRA, LAUNCHER = "node", "extra-node", "launcher"
"""The components of a job: a label of its pods."""


def labels(job: str, component: str = "") -> dict[str, str]:
    """Returns the labels of the job's objects: of one component, or of those for all (the Secret, say) if it is ""."""
    part = {"app.kubernetes.io/component": component} if component else {}
    common = {"app.kubernetes.io/name": "taskgraph", "app.kubernetes.io/instance": job, **part}
    return {**common, "app.kubernetes.io/managed-by": "taskgraph"}


def job_labels(job: str) -> dict[str, Any]:
    """Returns the labels that select all pods of the job."""
    return {"app.kubernetes.io/name": "taskgraph", "app.kubernetes.io/instance": job}


def node_labels(job: str) -> dict[str, Any]:
    """Returns the labels that select the pods of nodes, the extra ones too: a list means any of its values."""
    return {**job_labels(job), "app.kubernetes.io/component": [NODE, EXTRA]}


def selector(job: str, component: str = "") -> dict[str, Any]:
    """Returns a Kubernetes selector of the job's pods of one component; "": of all nodes."""
    if component:
        return {"matchLabels": {**job_labels(job), "app.kubernetes.io/component": component}}
    nodes = {"key": "app.kubernetes.io/component", "operator": "In", "values": [NODE, EXTRA]}
    return {"matchLabels": job_labels(job), "matchExpressions": [nodes]}
