"""The objects of a job on Kubernetes, made of a `Request`. Pure: it asks no cluster.

{name}            Secret (token, certificates), Deployment of nodes, PodDisruptionBudget
{name}-extra      Deployment of the extra nodes, which have another priority
{name}-launcher   Job of one pod, which submits the job and waits for it; its ServiceAccount, Role and RoleBinding

There is no Service: nodes find each other by their addresses, which are in etcd.
"""

from __future__ import annotations

import base64
import math
import shlex
from collections.abc import Mapping
from typing import Any

from taskgraph.clusters.api import Request
from taskgraph.clusters.kubernetes_options import PodOptions, object_name
from taskgraph.clusters.manifest_text import yaml_text
from taskgraph.clusters.patching import patched
from taskgraph.errors import JobError

__all__ = ["CORE_NODES", "labels", "manifest_text", "manifests", "of_job", "of_nodes", "secret"]

CORE_NODES = "taskgraph/nodes"
"""An annotation: how many nodes the first Deployment may have before the second one gets any."""
_SECRET, _RUNTIME = "/etc/taskgraph", "/run/taskgraph"
_READY = "/tmp/taskgraph-ready"
"""Not in a volume, which outlives a container: the file of a killed node must not speak for its successor."""
_NODE, _EXTRA, _LAUNCHER = "node", "extra-node", "launcher"
_LAUNCHER_GRACE_S = 10
_BEYOND_DRAIN_S = 30
"""A node ends within `drain_s`, and needs a moment before and after."""
_LOST_MACHINE_S = 30
_LAUNCHER_STARTS = 20
_ETCD_FILES = {"ca": "etcd-ca.pem", "cert": "etcd-cert.pem", "key": "etcd-key.pem", "password": "etcd-password"}

_COMMENTS = {
    "Deployment.spec.strategy": "A new node first, then an old one leaves.",
    "Deployment.spec.template.spec.terminationGracePeriodSeconds": "Longer than drain_s: a node hands over first.",
    "Deployment.spec.template.spec.shareProcessNamespace": "The pause container waits for orphans of user code.",
    "Deployment.spec.template.spec.tolerations": "Nodes of a lost machine are replaced after this, not after 300 s.",
    "Deployment.spec.template.spec.topologySpreadConstraints": "Backups are on other machines where there are some.",
    "Deployment.spec.template.spec.containers.readinessProbe": "Ready: all tasks of this node have backups in sync.",
    "Deployment.spec.template.spec.containers.resources": "No limit of cores: a node that is held up looks dead.",
    "PodDisruptionBudget.spec.maxUnavailable": "`kubectl drain` waits until tasks have backups again.",
    "Job.spec.backoffLimit": "A launcher that dies is started again. No node notices.",
    "Job.spec.podFailurePolicy.rules": "Evictions do not count; a job that failed (1), or is wrong (2), is final.",
    "Job.spec.template.spec.containers.args": "Submits the job once, waits for it, prints its values, ends its nodes.",
}


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
    return {**of_job(job), "app.kubernetes.io/component": [_NODE, _EXTRA]}


def selector(job: str, component: str = "") -> dict[str, Any]:
    """Returns the selector of the job's pods of one component; "": of all nodes."""
    if component:
        return {"matchLabels": {**of_job(job), "app.kubernetes.io/component": component}}
    nodes = {"key": "app.kubernetes.io/component", "operator": "In", "values": [_NODE, _EXTRA]}
    return {"matchLabels": of_job(job), "matchExpressions": [nodes]}


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
    made = [] if pods.service_account else _rights(request, name)
    made.append(_deployment(request, pods, name, _NODE))
    if request.extra_nodes:
        made.append(_deployment(request, pods, name, _EXTRA))
    made += [_budget(request, name), _launcher(request, pods, name)]
    if namespace:
        for each in made:
            each["metadata"] = {"name": each["metadata"].pop("name"), "namespace": namespace, **each["metadata"]}
    return patched(made, pods.patches)


def manifest_text(request: Request, namespace: str = "") -> str:
    """Returns the objects as YAML, which says at its top how to make the Secret."""
    return _head(request, namespace) + yaml_text(manifests(request, namespace), _COMMENTS)


def secret(request: Request, namespace: str, certificates: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the Secret: the token, the certificates, and what gives access to etcd.

    Raises:
        JobError: a file that the user named cannot be read.
    """
    found = {"token": f"{request.token}\n".encode(), **certificates}
    for key, path in _files(request).items():
        try:
            with open(path, "rb") as file:
                found[key] = file.read()
        except OSError as error:
            raise JobError(f"{path}: {error.strerror}") from error
    if "password" in request.etcd_access:
        found[_ETCD_FILES["password"]] = request.etcd_access["password"].encode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": object_name(request.job), "namespace": namespace, "labels": labels(request.job)},
        "type": "Opaque",
        "data": {key: base64.b64encode(value).decode() for key, value in found.items()},
    }


def _files(request: Request) -> dict[str, str]:
    """Returns the files of the user that the Secret has, by key."""
    nodes = {f"{key}.pem": request.node_tls[key] for key in ("ca", "cert", "key") if key in request.node_tls}
    etcd = {_ETCD_FILES[key]: request.etcd_access[key] for key in ("ca", "cert", "key") if key in request.etcd_access}
    return {**nodes, **etcd}


def _head(request: Request, namespace: str) -> str:
    """Returns comments that say how to make the Secret, which is never printed."""
    name = object_name(request.job)
    words = [f"--namespace {namespace}"] if namespace else []
    words += [f"--from-file=token={shlex.quote(request.token_file or f'{name}.token')}"]
    words += [f"--from-file={key}={shlex.quote(path)}" for key, path in _files(request).items()]
    made = []
    if not request.insecure and not request.node_tls:
        made.append(f"taskgraph certs tls --host {name}")
        words += [f"--from-file=tls/{file}" for file in ("ca.pem", "cert.pem", "key.pem")]
    if not request.token_file:
        made.append(f"(umask 077; openssl rand -hex 32 > {name}.token)")
    if "password" in request.etcd_access:
        path = request.etcd_access.get("password_file", "FILE")
        words.append(f"--from-file={_ETCD_FILES['password']}={shlex.quote(path)}")
    made.append(" \\\n#     ".join([f"kubectl create secret generic {name} {words[0]}", *words[1:]]))
    lines = "".join(f"#   {line}\n" for line in made)
    return (
        f"# Job {request.job} on Kubernetes 1.29 or newer. These objects need a Secret with the job's token and\n"
        f"# certificates. `taskgraph submit` without --dry-run makes it, too; by hand:\n{lines}"
    )


def _metadata(job: str, name: str, component: str) -> dict[str, Any]:
    return {"name": name, "labels": labels(job, component)}


def _deployment(request: Request, pods: PodOptions, name: str, component: str) -> dict[str, Any]:
    extra = component == _EXTRA
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
                "spec": _node_pod(request, pods, name, request.extra_priority if extra else pods.priority_class),
            },
        },
    }


def _node_pod(request: Request, pods: PodOptions, name: str, priority_class: str) -> dict[str, Any]:
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_MACHINE_S}
    command = ["taskgraph", "node", "--job", request.job, "--name", "$(POD_NAME)", "--listen", "$(POD_IP)"]
    pod: dict[str, Any] = {"automountServiceAccountToken": False}
    if pods.service_account:
        pod["serviceAccountName"] = pods.service_account
    if priority_class:
        pod["priorityClassName"] = priority_class
    pod |= {
        "terminationGracePeriodSeconds": math.ceil(request.drain_s) + _BEYOND_DRAIN_S,
        "shareProcessNamespace": True,
        "tolerations": [{"key": f"node.kubernetes.io/{what}", **lost} for what in ("not-ready", "unreachable")]
        + pods.tolerations,
    }
    if pods.node_selector:
        pod["nodeSelector"] = pods.node_selector
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    pod["topologySpreadConstraints"] = [{**spread, "labelSelector": selector(request.job)}]
    container = {
        "name": "node",
        "command": [*command, "--ready-file", _READY, *(["--insecure-listen"] if request.insecure else [])],
        "readinessProbe": {"exec": {"command": ["test", "-e", _READY]}, "periodSeconds": 2, "failureThreshold": 1},
        "resources": pods.resources,
    }
    env = [_of_pod("POD_NAME", "metadata.name"), _of_pod("POD_IP", "status.podIP")]
    return {**pod, **_container(request, pods, name, container, env)}


def _launcher(request: Request, pods: PodOptions, name: str) -> dict[str, Any]:
    result = request.options.result or "-"
    expected = max(request.nodes, request.min_nodes)  # the extra nodes may come later, unless the job needs them
    within = ["--wait", "--within", "kubernetes", "--run", "$(JOB_UID)"]
    env = [_of_pod("JOB_UID", "metadata.labels['controller-uid']")]
    container = {
        "name": "launcher",
        "command": ["taskgraph", "submit"],
        "args": [request.driver, *request.words, *within, "--nodes", str(expected), "--result", result],
        "resources": pods.launcher_resources,
    }
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
        "metadata": _metadata(request.job, f"{name}-launcher", _LAUNCHER),
        "spec": {
            "backoffLimit": _LAUNCHER_STARTS,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": labels(request.job, _LAUNCHER)},
                "spec": {
                    "restartPolicy": "Never",
                    "serviceAccountName": pods.service_account or f"{name}-launcher",
                    **({"priorityClassName": pods.priority_class} if pods.priority_class else {}),
                    "terminationGracePeriodSeconds": _LAUNCHER_GRACE_S,
                    **({"nodeSelector": pods.node_selector} if pods.node_selector else {}),
                    **({"tolerations": pods.tolerations} if pods.tolerations else {}),
                    **_container(request, pods, name, container, env),
                },
            },
        },
    }


def _of_pod(name: str, field: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _container(
    request: Request, pods: PodOptions, name: str, container: dict[str, Any], env: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns what pods of nodes and of the launcher have alike: the container's frame, volumes, and no privileges."""
    user = {"runAsUser": pods.user, "runAsGroup": pods.user, "fsGroup": pods.user} if pods.user else {}
    mounts = [
        {"name": "secret", "mountPath": _SECRET, "readOnly": True},
        {"name": "runtime", "mountPath": _RUNTIME},
        *pods.mounts,
    ]
    words = {"name": container["name"], "image": pods.image, **({"workingDir": pods.workdir} if pods.workdir else {})}
    return {
        "securityContext": {"runAsNonRoot": True, **user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                **words,
                **container,
                "env": [*env, *_environment(request, name), *pods.env],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": mounts,
            }
        ],
        "volumes": [
            {"name": "secret", "secret": {"secretName": name, "defaultMode": 0o440 if pods.user else 0o444}},
            {"name": "runtime", "emptyDir": {}},
            *pods.volumes,
        ],
    }


def _environment(request: Request, name: str) -> list[dict[str, Any]]:
    """Returns the variables by which taskgraph finds etcd, the token and the certificates: in `kubectl exec`, too."""
    found = {"TASKGRAPH_ETCD": request.etcd, "TASKGRAPH_TOKEN_FILE": f"{_SECRET}/token"}
    if not request.insecure:
        found |= {"TASKGRAPH_TLS": _SECRET, "TASKGRAPH_TLS_NAME": request.node_tls.get("name", name)}
    for key in ("ca", "cert", "key"):
        if key in request.etcd_access:
            found[f"TASKGRAPH_ETCD_{key.upper()}"] = f"{_SECRET}/{_ETCD_FILES[key]}"
    if "username" in request.etcd_access:
        found["TASKGRAPH_ETCD_USER"] = request.etcd_access["username"]
    if "password" in request.etcd_access:
        found["TASKGRAPH_ETCD_PASSWORD_FILE"] = f"{_SECRET}/{_ETCD_FILES['password']}"
    found["TASKGRAPH_RUNTIME_DIR"] = _RUNTIME
    return [{"name": name, "value": value} for name, value in found.items()]


def _budget(request: Request, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": labels(request.job)},
        "spec": {"maxUnavailable": 1, "selector": selector(request.job)},
    }


def _rights(request: Request, name: str) -> list[dict[str, Any]]:
    """Returns the launcher's account and its rights: to see pods, and to end the nodes with the job."""
    metadata = _metadata(request.job, f"{name}-launcher", _LAUNCHER)
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
