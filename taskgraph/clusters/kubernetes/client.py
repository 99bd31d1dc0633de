"""Kubernetes' API, for one namespace: the only module that imports lightkube (extra `kubernetes`).

Objects are plain dicts. Requests that a busy server refuses (429), or that fail on their way, are tried again for a
while. Errors of users say which right, object or option is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from taskgraph.errors import JobError, TransportError

try:
    import httpx2 as http
    import yaml
    from lightkube import ApiError, AsyncClient, KubeConfig
    from lightkube.core.exceptions import ConfigError
    from lightkube.generic_resource import create_namespaced_resource
    from lightkube.types import CascadeType, PatchType
except ImportError as error:
    raise JobError(f"Kubernetes needs lightkube ({error}): pip install 'taskgraph-aio[kubernetes]'") from error

__all__ = ["Cluster", "NotFound", "WatchExpired", "opened_cluster"]

T = TypeVar("T")

_MANAGER = "taskgraph"
"""Our name as an owner of fields, in server-side apply."""
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each further try; a server that asks for more time gets it, up to the last of these."""
_WATCH_S = 240
"""The server ends a watch after this time. One that says nothing for much longer has lost its connection."""
_LATE_S = 30.0
_BUSY = (429, 500, 502, 503, 504)
_FORBIDDEN = re.compile(r'cannot (\w+) resource "([^"]+)"(?: in API group "([^"]*)")?')
_RESOURCES = {
    ("v1", "Pod"): "pods",
    ("v1", "Secret"): "secrets",
    ("v1", "ServiceAccount"): "serviceaccounts",
    ("apps/v1", "Deployment"): "deployments",
    ("batch/v1", "Job"): "jobs",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    ("rbac.authorization.k8s.io/v1", "Role"): "roles",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): "rolebindings",
}
_VERSIONS = {kind: version for version, kind in _RESOURCES}


class NotFound(JobError):
    """There is no such object."""


class WatchExpired(TransportError):
    """The server no longer has the changes since the version at which a watch began: list the pods again."""


@asynccontextmanager
async def opened_cluster(where: Mapping[str, str]) -> AsyncIterator[Cluster]:
    """Connects to a cluster: as a pod does, if this process runs in one; else by the kubeconfig, as kubectl does.

    Args:
        where: "kubeconfig", "context" and "namespace"; those that are missing are as for kubectl.

    Raises:
        JobError: the kubeconfig cannot be read, or has no such context.
    """
    try:
        config = _load_config(where).get(where.get("context"))
        client = AsyncClient(config, namespace=where.get("namespace"), field_manager=_MANAGER)
    except (ConfigError, KeyError, ValueError, OSError, AssertionError, yaml.YAMLError) as error:
        raise JobError(
            f"kubeconfig: {_error_text(error)}: name one with --kubeconfig or KUBECONFIG, and --context"
        ) from error
    try:
        yield Cluster(client)
    finally:
        await client.close()


def _load_config(where: Mapping[str, str]) -> KubeConfig:
    if path := where.get("kubeconfig"):
        return KubeConfig.from_file(path)
    files = [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    if "context" not in where and not files:
        return KubeConfig.from_env()
    files = files or ["~/.kube/config"]
    # kubectl takes several files; lightkube one.
    return KubeConfig.from_file(next((path for path in files if Path(path).expanduser().exists()), files[0]))


class Cluster:
    """One namespace of a cluster.

    Every method raises JobError if the cluster refuses, and TransportError if it cannot be reached.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @property
    def namespace(self) -> str:
        return str(self._client.namespace)

    async def apply(self, made: Mapping[str, Any]) -> str:
        """Makes an object, or changes it, by server-side apply, also fields that others have set. Returns its uid."""
        kind = _resource_class(made["apiVersion"], made["kind"])

        async def call() -> str:
            applied = await self._client.patch(
                kind, made["metadata"]["name"], dict(made), patch_type=PatchType.APPLY, force=True
            )
            return str(applied["metadata"]["uid"])

        return await _retry(f"{made['kind']} {made['metadata']['name']}", call)

    async def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Returns an object; None: there is none."""
        with contextlib.suppress(NotFound):
            return dict(await _retry(f"{kind} {name}", lambda: self._client.get(_class_of_kind(kind), name)))
        return None

    async def delete(self, kind: str, name: str) -> None:
        """Deletes an object and what it owns, without waiting. It is no error if it is gone."""

        async def call() -> None:
            await self._client.delete(_class_of_kind(kind), name, cascade=CascadeType.BACKGROUND)

        with contextlib.suppress(NotFound):
            await _retry(f"{kind} {name}", call)

    async def replicas(self, deployment: str) -> int | None:
        """Returns how many pods a Deployment is to have; None: there is no such Deployment."""
        with contextlib.suppress(NotFound):
            name = f"the scale of Deployment {deployment}"
            scale = await _retry(name, lambda: self._client.get(_class_of_kind("Deployment").Scale, deployment))
            return (scale.spec.replicas if scale.spec is not None else None) or 0
        return None

    async def scale(self, deployment: str, replicas: int) -> None:
        """Changes how many pods a Deployment has."""
        change = {"spec": {"replicas": replicas}}
        await _retry(
            f"the scale of Deployment {deployment}",
            lambda: self._client.patch(
                _class_of_kind("Deployment").Scale,
                deployment,
                change,
                patch_type=PatchType.MERGE,
            ),
        )

    async def pods(self, labels: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        """Returns the pods with these labels, and the version of that list."""

        async def call() -> tuple[list[dict[str, Any]], str]:
            listed = self._client.list(_class_of_kind("Pod"), labels=dict(labels))
            found = [dict(each) async for each in listed]
            return found, listed.resourceVersion

        return await _retry("pods", call)

    async def watch(self, labels: Mapping[str, str], version: str) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields changes of pods since the version that `pods` returned: ADDED, MODIFIED or DELETED, and the pod.

        Raises:
            WatchExpired: list the pods again.
            TransportError: the connection broke: list again after a pause.
        """
        changes: AsyncGenerator[tuple[str, Any], None] = self._client.watch(  # type: ignore[assignment]
            _class_of_kind("Pod"), labels=dict(labels), server_timeout=_WATCH_S, resource_version=version
        )
        try:
            while True:
                try:
                    async with asyncio.timeout(_WATCH_S + _LATE_S):
                        kind, pod = await anext(changes)
                except (ApiError, http.HTTPError, ValueError, TimeoutError, StopAsyncIteration) as error:
                    raise _watch_error(error) from error
                yield kind, dict(pod)
        finally:
            await changes.aclose()

    async def log(self, pod: str, container: str, *, follow: bool) -> AsyncIterator[str]:
        """Yields the lines that a container has printed, with `follow` until it ends; none if the pod is gone."""
        try:
            async for line in self._client.log(pod, container=container, follow=follow, newlines=False):
                yield line
        except ApiError as error:
            if error.status.code != 404:
                raise _refusal(f"the log of pod {pod}", error) from error
        except (http.HTTPError, RuntimeError) as error:  # lightkube reads a refusal of a stream wrongly: RuntimeError
            raise TransportError(f"the log of pod {pod} cannot be read: {_error_text(error)}") from error


@functools.cache  # lightkube registers each class once
def _resource_class(version: str, kind: str) -> Any:
    if (plural := _RESOURCES.get((version, kind))) is None:
        raise JobError(f"{kind} of {version}: objects of this kind cannot be applied: print them with --dry-run")
    group, _, version = version.rpartition("/")
    return create_namespaced_resource(group, version, kind, plural)


def _class_of_kind(kind: str) -> Any:
    return _resource_class(_VERSIONS[kind], kind)


async def _retry(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Calls, and again if the server is busy or cannot be reached. Raises the errors that `Cluster` names."""
    for pause_s in (*_PAUSES_S, None):
        try:
            return await call()
        except ApiError as error:
            if error.status.code not in _BUSY or pause_s is None:
                raise _refusal(what, error) from error
            pause_s = max(pause_s, min(_retry_after_s(error), _PAUSES_S[-1]))
        except http.HTTPStatusError as error:  # not in the API's words: from a proxy in front of it
            if error.response.status_code not in _BUSY or pause_s is None:
                raise JobError(f"{what}: the cluster's address answers {error}: is it the API server?") from error
        except (ConfigError, OSError) as error:  # a program that gives credentials
            raise JobError(
                f"kubeconfig: {error}: use one with a token or a certificate, or print with --dry-run and apply with "
                f"kubectl"
            ) from error
        except http.HTTPError as error:
            if pause_s is None:
                raise TransportError(
                    f"Kubernetes cannot be reached ({_error_text(error)}): see `kubectl version`"
                ) from error
        assert pause_s is not None
        await asyncio.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def _retry_after_s(error: ApiError) -> float:
    """Returns how long a busy server asks us to wait, in seconds; 0: it does not say."""
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):
        return float(error.response.headers.get("Retry-After", 0))
    return 0.0


def _refusal(what: str, error: ApiError) -> JobError:
    code, message = error.status.code, error.status.message or str(error)
    if code == 404:
        return NotFound(f"{what}: {message}")
    if code == 401:
        return JobError("Kubernetes does not know you: the credentials of the kubeconfig have expired or are wrong")
    if code == 403 and (found := _FORBIDDEN.search(message)):
        verb, resource, group = found.groups()
        return JobError(
            f"{what}: you lack a right: `{verb}` on `{resource}`{f' of {group}' if group else ''}: an administrator "
            f"gives it with a Role ({message})"
        )
    if code == 409:
        return JobError(f"{what}: somebody changed it at the same time: try again ({message})")
    return JobError(f"{what}: Kubernetes refuses it: {message}")


def _watch_error(error: Exception) -> TransportError | JobError:
    if isinstance(error, ApiError):
        if error.status.code in (410, 504) or error.status.reason in ("Expired", "Gone"):
            return WatchExpired(str(error))
        if error.status.code not in _BUSY:
            return _refusal("pods", error)
    return TransportError(f"the watch of pods broke: {_error_text(error)}")


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
