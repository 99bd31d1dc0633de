"""The labels of a job's objects on Kubernetes, and how to select its pods by them."""

from __future__ import annotations

from typing import Any

__all__ = ["EXTRA", "LAUNCHER", "NODE", "labels", "of_job", "of_nodes", "selector"]

NODE, EXTRA, LAUNCHER = "node", "extra-node", "launcher"
"""The components of a job: a label of its pods."""


def labels(job: str, component: str = "") -> dict[str, str]:
    """Returns the labels of the job's objects."""
    part = {"app.kubernetes.io/component": component} if component else {}
    of_job = {"app.kubernetes.io/name": "taskgraph", "app.kubernetes.io/instance": job, **part}
    return {**of_job, "app.kubernetes.io/managed-by": "taskgraph"}


def of_job(job: str) -> dict[str, Any]:
    """Returns the labels of all pods of the job, to select them."""
    return {"app.kubernetes.io/name": "taskgraph", "app.kubernetes.io/instance": job}


def of_nodes(job: str) -> dict[str, Any]:
    """Returns the labels of the pods that are nodes; a list is of alternatives."""
    return {**of_job(job), "app.kubernetes.io/component": [NODE, EXTRA]}


def selector(job: str, component: str = "") -> dict[str, Any]:
    """Returns the selector of the job's pods of one component; "": of all nodes."""
    if component:
        return {"matchLabels": {**of_job(job), "app.kubernetes.io/component": component}}
    nodes = {"key": "app.kubernetes.io/component", "operator": "In", "values": [NODE, EXTRA]}
    return {"matchLabels": of_job(job), "matchExpressions": [nodes]}
