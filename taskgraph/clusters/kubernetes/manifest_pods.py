"""The pods of a job on Kubernetes: what runs in them, with which variables and volumes, and without privileges."""

from __future__ import annotations

import math
from typing import Any

from taskgraph.clusters.api import Request
from taskgraph.clusters.kubernetes.options import PodOptions
from taskgraph.clusters.kubernetes.pod_labels import selector

__all__ = ["ETCD_FILES", "launcher_pod", "node_pod"]

_SECRET, _RUNTIME = "/etc/taskgraph", "/run/taskgraph"
_READY = "/tmp/taskgraph-ready"
"""Not in a volume, which outlives a container: the file of a killed node must not speak for its successor."""
_LAUNCHER_GRACE_S = 10
_BEYOND_DRAIN_S = 30
"""A node ends within `drain_s`, and needs a moment before and after."""
_LOST_MACHINE_S = 30
ETCD_FILES = {"ca": "etcd-ca.pem", "cert": "etcd-cert.pem", "key": "etcd-key.pem", "password": "etcd-password"}
"""The files in the Secret that give access to etcd."""


def node_pod(request: Request, pods: PodOptions, name: str, priority_class: str) -> dict[str, Any]:
    """Returns the spec of the nodes' pods, for a Deployment's template."""
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
        "enableServiceLinks": False,
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
    env = [_field_variable("POD_NAME", "metadata.name"), _field_variable("POD_IP", "status.podIP")]
    return {**pod, **_pod_frame(request, pods, name, container, env)}


def launcher_pod(request: Request, pods: PodOptions, name: str) -> dict[str, Any]:
    """Returns the spec of the launcher's pod."""
    result = request.options.result or "-"
    expected = max(request.nodes, request.min_nodes)  # the extra nodes may come later, unless the job needs them
    given = [_literal(word) for word in (request.driver, *request.words)]
    within = ["--wait", "--within", "kubernetes", "--run", "$(JOB_UID)"]
    env = [_field_variable("JOB_UID", "metadata.labels['controller-uid']")]
    container = {
        "name": "launcher",
        "command": ["taskgraph", "submit"],
        "args": [*given, *within, "--nodes", str(expected), "--result", _literal(result)],
        "resources": pods.launcher_resources,
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": True,  # whatever an account of the user says
        "serviceAccountName": pods.service_account or f"{name}-launcher",
        **({"priorityClassName": pods.priority_class} if pods.priority_class else {}),
        "terminationGracePeriodSeconds": _LAUNCHER_GRACE_S,
        **({"nodeSelector": pods.node_selector} if pods.node_selector else {}),
        **({"tolerations": pods.tolerations} if pods.tolerations else {}),
        **_pod_frame(request, pods, name, container, env),
    }


def _literal(word: str) -> str:
    """Returns a word for a container's command in which Kubernetes replaces no `$(VARIABLE)`."""
    return word.replace("$", "$$")


def _field_variable(name: str, field: str) -> dict[str, Any]:
    """Returns an environment variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _pod_frame(
    request: Request, pods: PodOptions, name: str, container: dict[str, Any], env: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the part of a pod's spec that nodes and launcher share: security, the container in it, and volumes.

    Args:
        container: what is special about the container.
        env: its own variables, which come first.
    """
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
            found[f"TASKGRAPH_ETCD_{key.upper()}"] = f"{_SECRET}/{ETCD_FILES[key]}"
    if "username" in request.etcd_access:
        found["TASKGRAPH_ETCD_USER"] = request.etcd_access["username"]
    if "password" in request.etcd_access:
        found["TASKGRAPH_ETCD_PASSWORD_FILE"] = f"{_SECRET}/{ETCD_FILES['password']}"
    found["TASKGRAPH_RUNTIME_DIR"] = _RUNTIME
    return [{"name": name, "value": value} for name, value in found.items()]
