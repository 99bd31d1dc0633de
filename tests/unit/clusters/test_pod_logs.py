"""The lines of pods, while the cluster refuses some and the reader stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskgraph.clusters.kubernetes.pod_logs import pod_lines
from taskgraph.errors import JobError


class Cluster:
    """A cluster with one pod, which prints for ever, or whose log is refused."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.printed = 0

    async def pods(self, labels: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
        metadata = {"name": "fit-1", "labels": {"app.kubernetes.io/component": "node"}}
        containers = [{"name": name, "state": {"running": {}}} for name in ("node", "sidecar")]
        return [{"metadata": metadata, "status": {"containerStatuses": containers}}], "1"

    async def get(self, kind: str, name: str) -> dict[str, Any]:
        return {}

    async def log(self, pod: str, container: str, *, follow: bool) -> AsyncIterator[str]:
        if self.refuses:
            raise JobError("the log of pod fit-1: you lack a right")
        while True:
            self.printed += 1
            yield f"line {self.printed} of {container}"


async def test_refusal_is_an_error_of_ours_also_while_following() -> None:
    with pytest.raises(JobError, match="you lack a right"):
        async for _ in pod_lines(Cluster(refuses=True), "fit", None, follow=True):  # type: ignore[arg-type]
            pass


async def test_reader_may_leave_while_more_lines_wait() -> None:
    cluster = Cluster()
    async with asyncio.timeout(10), contextlib.aclosing(pod_lines(cluster, "fit", None, follow=True)) as lines:  # type: ignore[arg-type]
        assert await anext(lines) == "fit-1  line 1 of node"
        before = -1
        while cluster.printed > before:  # until no more are read ahead
            before = cluster.printed
            await asyncio.sleep(0.05)
