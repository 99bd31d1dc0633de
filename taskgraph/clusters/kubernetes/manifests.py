"""The objects of a job on Kubernetes, made of a `Request`. Pure: it asks no cluster.

{name}            Secret (token, certificates), Deployment of nodes, PodDisruptionBudget
{name}-extra      Deployment of the extra nodes, which have another priority
{name}-launcher   Job of one pod, which submits the job and waits for it; its ServiceAccount, Role and RoleBinding

There is no Service: nodes find each other by their addresses, which are in etcd.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from typing import Any

from taskgraph.clusters.api import Request
from taskgraph.clusters.kubernetes.manifest_pods import ETCD_FILES, launcher_pod, node_pod
from taskgraph.clusters.kubernetes.manifest_text import yaml_text
from taskgraph.clusters.kubernetes.options import PodOptions, object_name
from taskgraph.clusters.kubernetes.patching import apply_patches
from taskgraph.clusters.kubernetes.pod_labels import EXTRA, LAUNCHER, NODE, labels, selector
from taskgraph.errors import JobError

__all__ = ["CORE_NODES", "manifest_text", "manifests", "secret"]

CORE_NODES = "taskgraph/nodes"
"""An annotation: how many nodes the first Deployment may have before the second one gets any."""
_LAUNCHER_STARTS = 20

_COMMENTS = {
    "Deployment.spec.strategy": "A new node first, then an old one leaves.",
    "Deployment.spec.template.spec.terminationGracePeriodSeconds": "Longer than drain_s: a node hands over first.",
    "Deployment.spec.template.spec.shareProcessNamespace": "The pause container waits for orphans of user code.",
    "Deployment.spec.template.spec.tolerations": "Nodes of a lost machine are replaced after this, not after 300 s.",
    "Deployment.spec.template.spec.topologySpreadConstraints": "Backups are on other machines where there are some.",
    "Deployment.spec.template.spec.enableServiceLinks": "No variables for each Service of the namespace.",
    "Deployment.spec.template.spec.volumes": "A mode of 288 is 0440, and 292 is 0444.",
    "Deployment.spec.template.spec.containers.readinessProbe": "Ready: all tasks of this node have backups in sync.",
    "Deployment.spec.template.spec.containers.resources": "No limit of cores: a node that is held up looks dead.",
    "PodDisruptionBudget.spec.maxUnavailable": "`kubectl drain` waits until tasks have backups again.",
    "Job.spec.backoffLimit": "A launcher that dies is started again. No node notices.",
    "Job.spec.podFailurePolicy.rules": "Evictions do not count; a job that failed (1), or is wrong (2), is final.",
    "Job.spec.template.spec.containers.args": "Submits the job once, waits for it, prints its values, ends its nodes.",
}


def manifests(request: Request, namespace: str = "") -> list[dict[str, Any]]:
    """Returns all objects but the Secret, in the order in which they are applied.

    Args:
        namespace: written into each object; "": none is.

    Raises:
        JobError: an option is wrong.
    """
    pods, name = PodOptions.of(request.options), object_name(request.job)
    if not request.etcd:
        raise JobError(
            "--etcd: name your etcd as pods reach it, such as etcd:2379; docs/clusters.md has one for a first trial"
        )
    if request.node_tls and "name" not in request.node_tls:
        raise JobError("--tls: name what is in the certificate with --tls-name: pods have no lasting names")
    if request.extra_nodes and not request.extra_priority:
        raise JobError("--extra-nodes: name their priority class with --extra-priority")
    made = [] if pods.service_account else _launcher_rights(request, name)
    made.append(_deployment(request, pods, name, NODE))
    if request.extra_nodes:
        made.append(_deployment(request, pods, name, EXTRA))
    made += [_disruption_budget(request, name), _launcher_job(request, pods, name)]
    if namespace:
        for each in made:
            each["metadata"] = {"name": each["metadata"].pop("name"), "namespace": namespace, **each["metadata"]}
    return apply_patches(made, pods.patches)


def manifest_text(request: Request, namespace: str = "") -> str:
    """Returns the objects as YAML, which says at its top how to make the Secret."""
    return _secret_comments(request, namespace) + yaml_text(manifests(request, namespace), _COMMENTS)


def secret(request: Request, namespace: str, certificates: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the Secret: the token, the certificates, and what gives access to etcd.

    Raises:
        JobError: a file that the user named cannot be read.
    """
    found = {"token": f"{request.token}\n".encode(), **certificates}
    for key, path in _secret_files(request).items():
        try:
            with open(path, "rb") as file:
                found[key] = file.read()
        except OSError as error:
            raise JobError(f"{path}: {error.strerror}") from error
    if "password" in request.etcd_access:
        found[ETCD_FILES["password"]] = request.etcd_access["password"].encode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": object_name(request.job), "namespace": namespace, "labels": labels(request.job)},
        "type": "Opaque",
        "data": {key: base64.b64encode(value).decode() for key, value in found.items()},
    }


def _secret_files(request: Request) -> dict[str, str]:
    """Returns the paths of the user's files that go into the Secret, by their keys in it."""
    nodes = {f"{key}.pem": request.node_tls[key] for key in ("ca", "cert", "key") if key in request.node_tls}
    etcd = {ETCD_FILES[key]: request.etcd_access[key] for key in ("ca", "cert", "key") if key in request.etcd_access}
    return {**nodes, **etcd}


def _secret_comments(request: Request, namespace: str) -> str:
    """Returns comments that say how to make the Secret, which is never printed."""
    name = object_name(request.job)
    words = [f"--namespace {namespace}"] if namespace else []
    words += [f"--from-file=token={shlex.quote(request.token_file or f'{name}.token')}"]
    words += [f"--from-file={key}={shlex.quote(path)}" for key, path in _secret_files(request).items()]
    made = []
    if not request.insecure and not request.node_tls:
        made.append(f"taskgraph certs tls --host {name}")
        words += [f"--from-file=tls/{file}" for file in ("ca.pem", "cert.pem", "key.pem")]
    if not request.token_file:
        made.append(f"(umask 077; openssl rand -hex 32 > {name}.token)")
    if "password" in request.etcd_access:
        path = request.etcd_access.get("password_file", "FILE")
        words.append(f"--from-file={ETCD_FILES['password']}={shlex.quote(path)}")
    made.append(" \\\n#     ".join([f"kubectl create secret generic {name} {words[0]}", *words[1:]]))
    lines = "".join(f"#   {line}\n" for line in made)
    return (
        f"# Job {request.job} on Kubernetes 1.29 or newer. These objects need a Secret with the job's token and\n"
        f"# certificates. `taskgraph submit` without --dry-run makes it, too; by hand:\n{lines}"
    )


def _metadata(job: str, name: str, component: str) -> dict[str, Any]:
    return {"name": name, "labels": labels(job, component)}


def _deployment(request: Request, pods: PodOptions, name: str, component: str) -> dict[str, Any]:
    extra = component == EXTRA
    metadata = _metadata(request.job, f"{name}-extra" if extra else name, component)
    if request.extra_nodes and not extra:
        metadata["annotations"] = {CORE_NODES: str(request.nodes)}
    of_pod = labels(request.job, component)
    if pods.queue:
        queue = {"kueue.x-k8s.io/queue-name": pods.queue}
        metadata["labels"], of_pod = {**metadata["labels"], **queue}, {**of_pod, **queue}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": request.extra_nodes if extra else request.nodes,
            "revisionHistoryLimit": 2,
            "selector": selector(request.job, component),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": of_pod},
                "spec": node_pod(request, pods, name, request.extra_priority if extra else pods.priority_class),
            },
        },
    }


def _launcher_job(request: Request, pods: PodOptions, name: str) -> dict[str, Any]:
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "launcher", "operator": "In", "values": [1, 2]},
        },
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request.job, f"{name}-launcher", LAUNCHER),
        "spec": {
            "backoffLimit": _LAUNCHER_STARTS,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": labels(request.job, LAUNCHER)},
                "spec": launcher_pod(request, pods, name),
            },
        },
    }


def _disruption_budget(request: Request, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": labels(request.job)},
        "spec": {"maxUnavailable": 1, "selector": selector(request.job)},
    }


def _launcher_rights(request: Request, name: str) -> list[dict[str, Any]]:
    """Returns the launcher's ServiceAccount, and its rights: to see pods, and to end the nodes with the job."""
    metadata = _metadata(request.job, f"{name}-launcher", LAUNCHER)
    rbac = "rbac.authorization.k8s.io"
    rules = [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": [name, f"{name}-extra"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(metadata)},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": dict(metadata), "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": dict(metadata),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": f"{name}-launcher"},
            "subjects": [{"kind": "ServiceAccount", "name": f"{name}-launcher"}],
        },
    ]
