"""Requests as the command line makes them."""

from __future__ import annotations

import argparse
from typing import Any

from taskgraph.clusters.api import Request
from taskgraph.clusters.kubernetes.launcher import KubernetesLauncher


def request(line: str = "--image registry.example/fit:1", **given: Any) -> Request:
    """Returns a request with these options of the launcher."""
    launcher, parser = KubernetesLauncher(), argparse.ArgumentParser()
    group = parser.add_argument_group()
    launcher.add_place_options(group)
    launcher.add_options(group)
    parser.add_argument("--result")
    usual: dict[str, Any] = {"job": "fit", "driver": "fit.py", "nodes": 4, "min_nodes": 1, "etcd": "etcd:2379"}
    return Request(**{**usual, "token": "", "drain_s": 60.0, "options": parser.parse_args(line.split()), **given})
