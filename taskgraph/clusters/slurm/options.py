"""The options of `submit --on slurm`, and what elements of the array run because of them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from taskgraph.clusters.api import Request
from taskgraph.clusters.credentials import certificate_name
from taskgraph.clusters.slurm.folder import Folder
from taskgraph.clusters.slurm.resources import Resources
from taskgraph.clusters.slurm.script import ElementSpec
from taskgraph.errors import JobError
from taskgraph.network.tls import CA, CERT, KEY

__all__ = ["add_slurm_options", "made_tls_files", "make_element", "make_resources", "needs_certificates", "own_access"]

_ETCD = {"ca": "CA", "cert": "CERT", "key": "KEY", "username": "USER", "password_file": "PASSWORD_FILE"}
"""Ends of variables, by name in `Request.etcd_access`. A password without a file is in the environment, which sbatch
passes on."""


def add_slurm_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `submit` that `make_element` and `make_resources` read."""
    add = group.add_argument
    add("--partition", metavar="NAME", help="the partition (the site's default)")
    add("--account", metavar="NAME", help="the account to charge")
    add("--qos", metavar="NAME", help="the quality of service")
    add("--time", metavar="TIME", help="how long an element may run before it is queued again, as sbatch takes it")
    add("--constraint", metavar="FEATURES", help="features that the machines must have")
    add("--cpus-per-node", type=int, default=0, metavar="N", help="cores of each node of the job")
    add("--memory", metavar="SIZE", help="memory of each node, such as 4G")
    add("--gpus", type=int, default=0, metavar="N", help="devices of each node")
    text = "lines to add to the script: of #SBATCH to its header, others to run before the node (`module load`)"
    add("--patch", metavar="FILE", help=text)
    add("--python", metavar="PATH", help="Python on the machines (this one)")
    text = "how a machine finds the name or address that the others reach, as a shell reads it ($(hostname))"
    add("--listen", default="$(hostname)", metavar="HOST", help=text)


def make_resources(options: argparse.Namespace) -> Resources:
    """Returns what each element asks Slurm for; raises JobError for a negative number."""
    for name in ("cpus_per_node", "gpus"):
        if getattr(options, name) < 0:
            raise JobError(f"--{name.replace('_', '-')} {getattr(options, name)}: 1 or more")
    return Resources(
        partition=options.partition or "",
        account=options.account or "",
        qos=options.qos or "",
        time=options.time or "",
        constraint=options.constraint or "",
        memory=options.memory or "",
        cpus=options.cpus_per_node,
        gpus=options.gpus,
    )


def made_tls_files(folder: Folder, job: str) -> dict[str, str]:
    """Returns the `--tls-*` options for the certificates that are made for a job: `ca`, `cert` and `key` with their
    paths, and `name` with the fixed name in them.
    """
    files = {"ca": CA, "cert": CERT, "key": KEY}
    return {**{name: str(folder.tls / file) for name, file in files.items()}, "name": certificate_name(job)}


def needs_certificates(request: Request) -> bool:
    """True if certificates are to be made: the user named none. `--insecure-listen` makes them needless only with an
    etcd of the user's, since the job's own never goes without TLS.

    Without TLS, everybody who reaches the etcd could change the job's spec, and so run code as this user.
    """
    return not request.node_tls and (not request.insecure or not request.etcd)


def _node_tls(request: Request, folder: Folder) -> dict[str, str]:
    if request.node_tls or request.insecure:
        return request.node_tls
    return made_tls_files(folder, request.job)


def _etcd_tls(request: Request, folder: Folder) -> dict[str, str]:
    """Returns the paths of the certificates for clients of the job's own etcd."""
    found = request.node_tls or made_tls_files(folder, request.job)
    return {name: value for name, value in found.items() if name != "name"}


def own_access(request: Request) -> dict[str, str]:
    """Returns how other commands reach the job, as far as the launcher decides that: parts of `where`."""
    folder = _folder(request)
    tls = _node_tls(request, folder)
    found = {f"tls_{name}": value for name, value in tls.items()}
    if not request.etcd:
        found |= {"etcd": f"file:{folder.etcd_at}"}
        found |= {f"etcd_{name}": value for name, value in _etcd_tls(request, folder).items()}
    return found


def make_element(request: Request) -> ElementSpec:
    """Returns what each element of a job's array runs.

    Raises:
        JobError: an option makes no sense.
    """
    options, folder = request.options, _folder(request)
    tls = _node_tls(request, folder)
    if not request.etcd:
        access = _etcd_tls(request, folder)
    else:
        access = {name: value for name, value in request.etcd_access.items() if name in _ETCD}
    variables = {
        "ETCD": request.etcd or f"file:{folder.etcd_at}",
        **{f"ETCD_{_ETCD[name]}": value for name, value in access.items()},
        "TOKEN_FILE": str(folder.token),
        **{f"TLS_{name.upper()}": value for name, value in tls.items()},
    }
    words = request.words if "--name" in request.words else ("--name", request.job, *request.words)
    return ElementSpec(
        job=request.job,
        python=options.python or sys.executable,
        directory=Path.cwd(),
        folder=folder,
        own_etcd=not request.etcd,
        access=variables,
        submit=("submit", request.driver, *words, "--nodes", str(request.nodes), "--result", str(folder.result)),
        node=() if tls else ("--insecure-listen",),
        listen=options.listen,
        drain_s=request.drain_s,
    )


def _folder(request: Request) -> Folder:
    return Folder(Path(os.path.abspath(request.options.folder or f"{request.job}.taskgraph")))
