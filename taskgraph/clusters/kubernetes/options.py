"""The options of `submit --on kubernetes` that describe pods, checked before anything is made."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskgraph.clusters.kubernetes.patching import read_patches
from taskgraph.errors import JobError

__all__ = ["PodOptions", "add_pod_options", "object_name"]

_USER = 10001
"""The user id of the `Dockerfile`'s image. Any other than 0 would do."""
_MAX_NAME = 40
"""Characters: names of pods add up to 23 to it, and a host's name has at most 63."""
_OBJECT = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_CPU = re.compile(r"\d+(\.\d+)?|\d+m")
_MEMORY = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?")
_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """What the pods of a job are like, in the words of Kubernetes.

    Attributes:
        image: the image of nodes and launcher.
        workdir: the directory in the image where they work; "": the image's own.
        resources: `resources` of a node's container.
        launcher_resources: those of the launcher's.
        priority_class, queue, service_account: names; "": none is given.
        user: the user id of all processes; None: the cluster assigns one.
        node_selector: labels that machines must have.
        tolerations, volumes, mounts, env: entries of a pod, or of a container.
        patches: what the patch file changes.
    """

    image: str
    workdir: str
    resources: dict[str, Any]
    launcher_resources: dict[str, Any]
    priority_class: str
    queue: str
    service_account: str
    user: int | None
    node_selector: dict[str, str]
    tolerations: list[dict[str, Any]]
    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    env: list[dict[str, Any]]
    patches: list[dict[str, Any]]

    @classmethod
    def of(cls, options: argparse.Namespace) -> PodOptions:
        """Makes the options of pods from the parsed command line.

        Raises:
            JobError: an option is wrong, or one is missing.
        """
        if not options.image:
            raise JobError(
                "--image: name the image that has your driver and taskgraph; docs/clusters.md says how to build one"
            )
        if not _CPU.fullmatch(options.cpu):
            raise JobError(f"--cpu {options.cpu}: write cores, such as 2, 0.5 or 500m")
        if not _MEMORY.fullmatch(options.memory):
            raise JobError(f"--memory {options.memory}: write bytes with a unit, such as 512Mi or 4Gi")
        memory = {"memory": options.memory}
        gpus = _parse_gpus(options.gpus) if options.gpus else {}
        volumes = [_parse_volume(index, text) for index, text in enumerate(options.volume or ())]
        return cls(
            image=options.image,
            workdir=options.workdir or "",
            resources={"requests": {"cpu": options.cpu, **memory}, "limits": {**memory, **gpus}},
            launcher_resources={"requests": {"cpu": "100m", **memory}, "limits": memory},
            priority_class=_check_name("--priority-class", options.priority_class),
            queue=_check_name("--queue", options.queue),
            service_account=_check_name("--service-account", options.service_account),
            user=_parse_user(options.user),
            node_selector=dict(_parse_node_selector(options.node_selector or ())),
            tolerations=[_parse_toleration(text) for text in options.toleration or ()],
            volumes=[volume for volume, _ in volumes],
            mounts=[mount for _, mount in volumes],
            env=[_parse_env(text) for text in options.env or ()],
            patches=read_patches(Path(options.patch)) if options.patch else [],
        )


def add_pod_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options that `PodOptions.of` reads."""
    add = group.add_argument
    add("--image", metavar="IMAGE", help="the image that has the driver and taskgraph")
    add("--workdir", metavar="DIR", help="the directory in the image where the driver is (the image's own)")
    add("--cpu", default="1", metavar="CORES", help="cores that each node requests, such as 2 or 500m (1)")
    add("--memory", default="2Gi", metavar="SIZE", help="memory that each node requests and gets at most (2Gi)")
    add("--gpus", metavar="N", help="devices for each node: N of nvidia.com/gpu, or RESOURCE=N")
    add("--priority-class", metavar="NAME", help="the priority class of the pods")
    add("--queue", metavar="NAME", help="Kueue's local queue for the nodes")
    add("--node-selector", action="append", metavar="KEY=VALUE", help="a label that machines must have")
    text = "a taint that the nodes tolerate"
    add("--toleration", action="append", metavar="KEY[=VALUE][:EFFECT]", help=text)
    text = "mount a volume: SOURCE is a claim, `empty`, or a directory of the machine (/...)"
    add("--volume", action="append", metavar="SOURCE:PATH[:ro]", help=text)
    add("--env", action="append", metavar="NAME=VALUE", help="a variable of nodes and launcher")
    text = "pods run as this account, which has the launcher's rights already; no account is made"
    add("--service-account", metavar="NAME", help=text)
    text = f"user id of all processes ({_USER}); `cluster`: the cluster assigns one, as OpenShift does"
    add("--user", default=str(_USER), metavar="UID", help=text)
    add("--patch", metavar="FILE", help="a YAML file with changes to the printed objects")


def object_name(job: str) -> str:
    """Returns the name of a job's objects: the job's name, with '-' in place of '_' and '.', in lower case.

    Raises:
        JobError: Kubernetes cannot have that name.
    """
    name = re.sub(r"[_.]", "-", job.lower())
    if len(name) > _MAX_NAME or not _OBJECT.fullmatch(name):
        raise JobError(
            f"job {job!r}: names of Kubernetes have at most {_MAX_NAME} letters a-z, digits and '-', and begin with a "
            "letter: choose another with --name"
        )
    return name


def _check_name(option: str, text: str | None) -> str:
    if text and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", text):
        raise JobError(f"{option} {text}: Kubernetes has no such names: write letters a-z, digits, '-' and '.'")
    return text or ""


def _parse_user(text: str) -> int | None:
    if text == "cluster":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise JobError(f"--user {text}: a number other than 0, or `cluster`")
    return int(text)


def _parse_gpus(text: str) -> dict[str, int]:
    resource, _, count = text.rpartition("=")
    if not count.isdecimal() or int(count) < 1 or (resource and not _KEY.fullmatch(resource)):
        raise JobError(f"--gpus {text}: write a number of devices, such as 1 or amd.com/gpu=1")
    return {resource or "nvidia.com/gpu": int(count)}


def _parse_node_selector(texts: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key):
            raise JobError(f"--node-selector {text}: write KEY=VALUE, such as pool=fast")
        found.append((key, value))
    return found


def _parse_toleration(text: str) -> dict[str, Any]:
    rest, colon, effect = text.rpartition(":")
    if not colon:
        rest, effect = text, ""
    key, equals, value = rest.partition("=")
    if not _KEY.fullmatch(key) or (colon and effect not in _EFFECTS):
        raise JobError(f"--toleration {text}: write KEY[=VALUE][:EFFECT]; effects are {', '.join(_EFFECTS)}")
    what = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **what, **({"effect": effect} if effect else {})}


def _parse_env(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise JobError(f"--env {text}: write NAME=VALUE")
    return {"name": name, "value": value}


def _parse_volume(index: int, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parses `--volume`: returns a volume of the pod, and its mount in a container."""
    source, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not source or not path.startswith("/") or mode not in ("", "ro", "rw"):
        raise JobError(f"--volume {text}: write SOURCE:PATH[:ro], such as my-claim:/data, empty:/scratch or /mnt:/mnt")
    name = f"volume-{index}"
    if source.startswith("/"):
        what: dict[str, Any] = {"hostPath": {"path": source, "type": "Directory"}}
    elif source == "empty":
        what = {"emptyDir": {}}
    else:
        what = {"persistentVolumeClaim": {"claimName": _check_name("--volume", source)}}
    return {"name": name, **what}, {"name": name, "mountPath": path, **({"readOnly": True} if mode == "ro" else {})}
