"""The protocol of launchers, and how to find one by its name.

A launcher turns a `Request` into what a cluster's scheduler understands: `--dry-run` prints that, and without it the
launcher applies it. Other packages add launchers with an entry point:

    [project.entry-points."taskgraph.launchers"]
    flux = "taskgraph_flux:FluxLauncher"

    taskgraph submit fit.py --on flux --nodes 8
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from taskgraph.errors import JobError

__all__ = ["GROUP", "Enclosed", "Inside", "Launcher", "Request", "find_launcher", "launcher_names"]

GROUP = "taskgraph.launchers"
"""The group of entry points."""
_OWN = {
    "kubernetes": "taskgraph.clusters.kubernetes.launcher:KubernetesLauncher",
    "local": "taskgraph.clusters.local:LocalLauncher",
    "slurm": "taskgraph.clusters.slurm.launcher:SlurmLauncher",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `taskgraph submit DRIVER --on LAUNCHER` asks for.

    Attributes:
        job: the job's name.
        driver: the driver as the user typed it.
        words: the options of `submit` that describe the job (-o, --set, --name, --resume, --fresh), as typed.
        nodes: how many nodes the job is to have.
        min_nodes: the job does not begin with fewer.
        extra_nodes: further nodes, with `extra_priority`.
        extra_priority: the name of a priority class or partition, whose nodes the scheduler may take away; "": none.
        etcd: endpoints as nodes reach them; "": the launcher brings an etcd.
        etcd_access: certificates and user for etcd, as `EtcdCoordinator.connect` takes them.
        token: the job's token, hex.
        token_file: the file with the token; "": the user named none.
        node_tls: ca, cert and key files for connections between nodes; {}: the user named none.
        insecure: nodes may listen without TLS.
        drain_s: how long a node that leaves may take, in seconds.
        options: what `Launcher.add_place_options` and `Launcher.add_options` added to the command line.
    """

    job: str
    driver: str
    words: tuple[str, ...] = ()
    nodes: int
    min_nodes: int
    extra_nodes: int = 0
    extra_priority: str = ""
    etcd: str = ""
    etcd_access: dict[str, str] = field(default_factory=dict, repr=False)
    token: str = field(repr=False)
    token_file: str = ""
    node_tls: dict[str, str] = field(default_factory=dict)
    insecure: bool = False
    drain_s: float
    options: argparse.Namespace


@runtime_checkable
class Launcher(Protocol):
    """Starts the nodes of jobs somewhere. Each method but the first three may raise JobError with what to do.

    `where` is what `start` returned: how to find the job's nodes again, also from another process. It is kept on the
    host of the command. If it was lost, it is what `place` makes of the command line.

    Names in `where` by which the launcher says how commands reach the job, if it decides that: `etcd`, `etcd_ca`,
    `etcd_cert`, `etcd_key`, `token` (hex), `tls_ca`, `tls_cert`, `tls_key`, `tls_name`; and `kept`: the runtime
    directory, on a file system that the command sees, with the values and events of the job once it has ended; and
    `run`, the id of the run (`submit --run ID`), by which commands do not take an earlier run of the job for this one.
    """

    def add_place_options(self, group: argparse._ArgumentGroup) -> None:
        """Adds the options that say where nodes are: a namespace, say. All commands with `--on` have them."""

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        """Adds the other options of `submit`."""

    def place(self, options: argparse.Namespace) -> dict[str, str]:
        """Returns what the options of `add_place_options` say, in place of a `where` that was lost."""

    def text(self, request: Request) -> str:
        """Returns what `start` would apply, for `--dry-run`, without any secret. It changes nothing."""

    async def start(self, request: Request) -> dict[str, str]:
        """Submits the job, from here or from within the cluster, and starts its nodes; returns `where` they are."""

    async def scale(self, job: str, where: Mapping[str, str], nodes: int) -> str:
        """Changes how many nodes the job has; returns what was done, as a sentence."""

    def logs(self, job: str, where: Mapping[str, str], node: str | None, *, follow: bool) -> AsyncIterator[str]:
        """Yields the lines that all nodes have printed, or one of them (`node`); with `follow` also lines to come."""

    async def stop(self, job: str, where: Mapping[str, str]) -> None:
        """Removes all that `start` made, after the job has ended. It is no error if nothing is there."""

    async def waiting(self, job: str, where: Mapping[str, str]) -> list[str]:
        """Returns lines for `status`: which nodes do not run yet, and what the scheduler says about them."""


@runtime_checkable
class Inside(Protocol):
    """What a launcher does in `submit --wait --within NAME`, a command that it starts itself within the cluster."""

    async def watch_pods(self, job: str, report: Callable[[str, str, str], Awaitable[None]]) -> None:
        """Reports why nodes go, and why others do not start, until it is cancelled.

        Args:
            report: takes the kind of an event, a node's name, and the rest of a sentence that begins with it.
        """

    async def ended(self, job: str) -> None:
        """Ends the job's nodes. Called after the job has ended and its values are kept."""


@runtime_checkable
class Enclosed(Protocol):
    """What a launcher knows of jobs whose etcd the submitting host may not reach."""

    async def has_ended(self, job: str, where: Mapping[str, str]) -> bool:
        """Returns True if the cluster says that the job has ended."""

    def ways(self, job: str, where: Mapping[str, str], command: str) -> str:
        """Returns a sentence for the user: how to run a command (status, say) where the job's etcd can be reached."""


def launcher_names() -> list[str]:
    """Returns the names of all installed launchers."""
    return sorted({*_OWN, *(point.name for point in entry_points(group=GROUP))})


def find_launcher(name: str) -> Launcher:
    """Makes the launcher of that name.

    Raises:
        JobError: there is none, or it cannot be loaded.
    """
    found = [point for point in entry_points(group=GROUP) if point.name == name] if name not in _OWN else []
    if name not in _OWN and not found:
        raise JobError(f"--on {name}: there is no such launcher; installed: {', '.join(launcher_names())}")
    reference = _OWN.get(name) or found[0].value
    module, _, attribute = reference.partition(":")
    try:
        made: Launcher = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise JobError(f"--on {name}: launcher {reference} cannot be loaded: {error}") from error
    return made
