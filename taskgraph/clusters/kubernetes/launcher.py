"""`submit --on kubernetes`: nodes are pods of a Deployment, and the launcher is a Job of one pod.

The command makes the objects of `manifests` and is done: Kubernetes keeps the pods alive. The launcher's pod runs
`submit --wait --within kubernetes`, which uses `watch_pods` and `ended` here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import secrets
import shlex
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from taskgraph.clusters.api import Request
from taskgraph.clusters.credentials import job_certificates
from taskgraph.clusters.kubernetes.manifests import CORE_NODES, manifest_text, manifests, secret
from taskgraph.clusters.kubernetes.options import add_pod_options, object_name
from taskgraph.clusters.kubernetes.pod_history import PodHistory
from taskgraph.clusters.kubernetes.pod_labels import job_labels, labels, node_labels
from taskgraph.clusters.kubernetes.pod_logs import is_over, pod_lines
from taskgraph.clusters.kubernetes.why_gone import PodEvent, why_waiting
from taskgraph.errors import JobError, TaskGraphError, TransportError
from taskgraph.observe.format import counted

if TYPE_CHECKING:
    from taskgraph.clusters.kubernetes.client import Cluster

__all__ = ["KubernetesLauncher"]

_PLACE = ("namespace", "context", "kubeconfig")
_PAUSE_S, _LONG_PAUSE_S = 0.5, 30.0
_LOOK_S = 0.3
_NAMED = 3
"""Pods that a line of `waiting` names."""
_GONE_S = 60.0
"""How long deleted objects may stay: pods need not hand over, as the job has ended."""


class KubernetesLauncher:
    """Makes a job's objects in one namespace."""

    def add_place_options(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument("--namespace", metavar="NAME", help="the namespace (the kubeconfig's)")
        group.add_argument("--context", metavar="NAME", help="the context of the kubeconfig (its current one)")
        group.add_argument("--kubeconfig", metavar="FILE", help="the kubeconfig (KUBECONFIG, else ~/.kube/config)")

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        add_pod_options(group)

    def place(self, options: argparse.Namespace) -> dict[str, str]:
        return {name: value for name in _PLACE if (value := getattr(options, name, None))}

    def text(self, request: Request) -> str:
        return manifest_text(request, request.options.namespace or "")

    async def start(self, request: Request) -> dict[str, str]:
        where = self.place(request.options)
        async with _opened(where) as cluster:
            request = dataclasses.replace(request, token=request.token or secrets.token_hex(32))
            name = object_name(request.job)
            own = request.insecure or request.node_tls
            certificates = {} if own else await asyncio.to_thread(job_certificates, name)
            made = [secret(request, cluster.namespace, certificates), *manifests(request, cluster.namespace)]
            await _check_names(cluster, request.job, made)
            try:
                uids = {each["kind"]: await cluster.apply(each) for each in made}
            except BaseException as error:
                try:
                    await _remove_objects(cluster, request.job)
                except TaskGraphError as left:
                    error.add_note(f"what was made before that is left: {left}")
                raise
            return {**where, "namespace": cluster.namespace, "token": request.token, "run": uids.get("Job", "")}

    async def scale(self, job: str, where: Mapping[str, str], nodes: int) -> str:
        name = object_name(job)
        async with _opened(where) as cluster:
            core = await _find_deployment(cluster, job)
            extra = await cluster.replicas(f"{name}-extra")
            if extra is None:
                await cluster.scale(name, nodes)
                return f"Deployment {name} has {counted(nodes, 'replica')} now"
            first = min(nodes, int((core["metadata"].get("annotations") or {}).get(CORE_NODES, nodes)))
            await cluster.scale(name, first)
            await cluster.scale(f"{name}-extra", nodes - first)
            return f"Deployment {name} has {counted(first, 'replica')} now, and {name}-extra {nodes - first}"

    async def logs(self, job: str, where: Mapping[str, str], node: str | None, *, follow: bool) -> AsyncIterator[str]:
        async with (
            _opened(where) as cluster,
            contextlib.aclosing(pod_lines(cluster, job, node, follow=follow)) as lines,
        ):
            async for line in lines:
                yield line

    async def stop(self, job: str, where: Mapping[str, str]) -> None:
        async with _opened(where) as cluster:
            await _remove_objects(cluster, job)

            async def remaining_pods() -> list[str]:
                return [pod["metadata"]["name"] for pod in (await cluster.pods(job_labels(job)))[0]]

            await _wait_until_gone(remaining_pods)

    async def waiting(self, job: str, where: Mapping[str, str]) -> list[str]:
        async with _opened(where) as cluster:
            pods, _ = await cluster.pods(job_labels(job))
        return _waiting_lines(pods)

    async def has_ended(self, job: str, where: Mapping[str, str]) -> bool:
        """Returns True if the launcher's Job is over, or was deleted."""
        async with _opened(where) as cluster:
            launcher = await cluster.get("Job", f"{object_name(job)}-launcher")
        return launcher is None or is_over(launcher)

    def ways(self, job: str, where: Mapping[str, str], command: str) -> str:
        """Returns a sentence: how to run a command where the job's etcd can be reached."""
        words = "".join(f" --{name} {shlex.quote(where[name])}" for name in _PLACE if name in where)
        return (
            f"from outside the cluster: `kubectl{words} exec job/{object_name(job)}-launcher -- taskgraph {command} "
            f"{job}`, or `kubectl{words} port-forward` to your etcd, and --etcd localhost:2379"
        )

    async def watch_pods(self, job: str, report: Callable[[str, str, str], Awaitable[None]]) -> None:
        """Reports why pods go, and why others do not start, for ever. What Kubernetes does not tell is not reported.

        Args:
            report: takes the kind of an event, the pod's name, and the rest of a sentence that begins with it.
        """
        history, pause_s = PodHistory(), _PAUSE_S
        while True:
            try:
                async with _opened({}) as cluster:
                    async for name, seen in _watch_changes(cluster, job, history):
                        pause_s = _PAUSE_S
                        await report(seen.kind, name, seen.text)
            except TransportError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONG_PAUSE_S)

    async def ended(self, job: str) -> None:
        """Scales the nodes to 0, once the job has ended."""
        name = object_name(job)
        async with _opened({}) as cluster:
            for deployment in (name, f"{name}-extra"):
                if await cluster.replicas(deployment):
                    await cluster.scale(deployment, 0)


@asynccontextmanager
async def _opened(where: Mapping[str, str]) -> AsyncIterator[Cluster]:
    from taskgraph.clusters.kubernetes.client import opened_cluster  # printing needs no client

    async with opened_cluster(where) as cluster:
        yield cluster


async def _watch_changes(cluster: Cluster, job: str, history: PodHistory) -> AsyncGenerator[tuple[str, PodEvent], None]:
    """Yields what happens to the pods of nodes, as (pod, event), until the connection breaks: TransportError."""
    from taskgraph.clusters.kubernetes.client import WatchExpired

    while True:
        pods, version = await cluster.pods(node_labels(job))
        for seen in history.take_list(pods):
            yield seen
        try:
            async with contextlib.aclosing(cluster.watch(node_labels(job), version)) as changes:
                async for change, pod in changes:
                    for seen in history.take_change(change, pod):
                        yield seen
        except WatchExpired:
            await asyncio.sleep(_PAUSE_S)


async def _find_deployment(cluster: Cluster, job: str) -> dict[str, Any]:
    found = await cluster.get("Deployment", object_name(job))
    if found is None or not _belongs_to(found, job):
        raise JobError(
            f"namespace {cluster.namespace} has no nodes of job {job!r}: they were removed, or are elsewhere "
            f"(--namespace, --context)"
        )
    return found


async def _check_names(cluster: Cluster, job: str, made: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the names of the objects to make are free or the job's own; removes the launcher of an ended run.

    Raises:
        JobError: the job runs, or an object of such a name is not the job's.
    """
    for each in made:
        kind, name = each["kind"], each["metadata"]["name"]
        found = await cluster.get(kind, name)
        if found is not None and not _belongs_to(found, job):
            raise JobError(
                f"namespace {cluster.namespace} has a {kind} {name} already, which is not of job {job!r}: choose "
                f"another --name or --namespace, or delete it"
            )
        if found is not None and kind == "Job":
            if not is_over(found):
                raise JobError(
                    f"job {job!r} runs in namespace {cluster.namespace} already: `taskgraph shutdown {job}` ends it "
                    f"(on a host that did not submit it: with --on kubernetes and --etcd)"
                )
            await cluster.delete(kind, name)

            async def remaining_launcher(name: str = name) -> list[str]:
                return [f"Job {name}"] if await cluster.get("Job", name) is not None else []

            await _wait_until_gone(remaining_launcher)


async def _wait_until_gone(left: Callable[[], Awaitable[Sequence[str]]]) -> None:
    """Waits until `left`, which names the deleted objects that are still there, names none.

    Raises:
        TransportError: some are there after a while.
    """
    until = time.monotonic() + _GONE_S
    while names := await left():
        if time.monotonic() > until:
            raise TransportError(
                f"{', '.join(names)}: deleted, but still there after {_GONE_S:g} s: look with `kubectl describe`"
            )
        await asyncio.sleep(_LOOK_S)


async def _remove_objects(cluster: Cluster, job: str) -> None:
    """Deletes all objects of a job, the launcher first."""
    name = object_name(job)
    launcher = f"{name}-launcher"
    for kind, each in (
        *(("Job", launcher), ("Deployment", name), ("Deployment", f"{name}-extra"), ("PodDisruptionBudget", name)),
        *(("RoleBinding", launcher), ("Role", launcher), ("ServiceAccount", launcher), ("Secret", name)),
    ):
        found = await cluster.get(kind, each)
        if found is not None and _belongs_to(found, job):
            await cluster.delete(kind, each)


def _belongs_to(found: Mapping[str, Any], job: str) -> bool:
    """True if an object has this job's labels."""
    its = (found["metadata"] if isinstance(found["metadata"], dict) else {}).get("labels") or {}
    return all(its.get(key) == value for key, value in labels(job).items())


def _waiting_lines(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each reason why pods do not run."""
    by_reason: dict[str, list[str]] = {}
    for pod in pods:
        if (seen := why_waiting(pod)) is not None and not pod["metadata"].get("deletionTimestamp"):
            by_reason.setdefault(seen.text, []).append(pod["metadata"]["name"])
    lines = []
    for text, names in by_reason.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"{', '.join(sorted(names)[:_NAMED])}{more}{': each' if len(names) > 1 else ''} {text}")
    return lines
