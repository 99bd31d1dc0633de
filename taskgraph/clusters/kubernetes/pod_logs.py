"""The lines that pods of a job print."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from taskgraph.clusters.kubernetes.options import object_name
from taskgraph.clusters.kubernetes.pod_labels import LAUNCHER, NODE, job_labels
from taskgraph.errors import JobError, TransportError
from taskgraph.system.alongside import cancel_and_wait

if TYPE_CHECKING:
    from taskgraph.clusters.kubernetes.client import Cluster

__all__ = ["is_over", "pod_lines"]

_LOOK_S = 2.0
"""How often new pods are looked for."""
_BUFFERED = 1000
"""Lines that are read ahead; pods wait after that."""


async def pod_lines(cluster: Cluster, job: str, node: str | None, *, follow: bool) -> AsyncGenerator[str, None]:
    """Yields the lines of all nodes, each beginning with its node's name; or of one.

    Args:
        node: a node, which is named as its pod; or "launcher"; None: all nodes.
        follow: go on with lines and pods to come, until the job ends.

    Raises:
        JobError: there is no such pod.
    """
    pods = _started_pods(await _job_pods(cluster, job), node)
    if not pods and (node or not follow):
        known = ", ".join(sorted(_started_pods(await _job_pods(cluster, job), None))) or "none"
        raise JobError(f"job {job!r} has no pod{f' {node!r}' if node else ''} that has started; there are: {known}")
    if follow:
        queue: asyncio.Queue[str | None] = asyncio.Queue(_BUFFERED)
        reading = asyncio.ensure_future(_follow_pods(cluster, job, node, queue))
        try:
            while (line := await queue.get()) is not None:
                yield line
            await reading
        finally:
            await cancel_and_wait(reading)
        return
    for name, (container, _) in sorted(pods.items()):
        async for line in cluster.log(name, container, follow=False):
            yield line if node else f"{name}  {line}"


async def _follow_pods(cluster: Cluster, job: str, node: str | None, queue: asyncio.Queue[str | None]) -> None:
    """Puts the lines of pods into the queue, also of later pods; None at the job's end or an error."""

    async def read_pod(pod: str, container: str) -> None:
        try:
            async for line in cluster.log(pod, container, follow=True):
                await queue.put(line if node else f"{pod}  {line}")
        except TransportError as error:  # its machine may be lost; others go on
            await queue.put(f"({error})")

    known: set[tuple[str, str, int]] = set()
    error: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                launcher = await cluster.get("Job", f"{object_name(job)}-launcher")
                for name, (container, starts) in _started_pods(await _job_pods(cluster, job), node).items():
                    if (name, container, starts) not in known:
                        known.add((name, container, starts))
                        group.create_task(read_pod(name, container))
                if launcher is None or is_over(launcher):
                    break
                await asyncio.sleep(_LOOK_S)
    except ExceptionGroup as errors:
        error = errors.exceptions[0]
    await queue.put(None)  # not if this was cancelled: no reader takes lines then
    if error is not None:
        raise error


def is_over(job: Mapping[str, Any]) -> bool:
    """Returns True if a Job of Kubernetes has completed or failed."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(each.get("type") in ("Complete", "Failed") and each.get("status") == "True" for each in conditions)


async def _job_pods(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    return (await cluster.pods(job_labels(job)))[0]


def _started_pods(pods: list[dict[str, Any]], node: str | None) -> dict[str, tuple[str, int]]:
    """Returns pod -> (name of our container, how often it was restarted), for pods that may have printed lines.

    Args:
        node: only this one, as in `pod_lines`.
    """
    found = {}
    for pod in pods:
        name, part = pod["metadata"]["name"], pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if (node is None and part == LAUNCHER) or (node is not None and node not in (name, part)):
            continue
        ours = LAUNCHER if part == LAUNCHER else NODE  # a patch may add others
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            if container["name"] == ours and "waiting" not in (container.get("state") or {}):
                found[name] = ours, int(container.get("restartCount", 0))
    return found
