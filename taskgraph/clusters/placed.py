"""What this host remembers of jobs that it submitted with `--on`: the launcher, and how to reach the job.

{runtime}/placed/{name}.json    only the owner can read it: it has the token
{runtime}/placed/{name}.log     what commands print that go on in the background
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from taskgraph.clusters.api import Enclosed, Request, find_launcher
from taskgraph.errors import TaskGraphError
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import Runtime
from taskgraph.protocol.keys import is_name
from taskgraph.system.files import remove_file, whole_file

__all__ = [
    "Placed",
    "etcd_has_ended",
    "find_placed",
    "forget_placed",
    "is_enclosed",
    "keep_placed",
    "kept_by",
    "placed_as",
    "placed_names",
    "ways",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A job that was submitted with `--on`.

    Attributes:
        on: the launcher's name.
        where: what its `start` returned.
        etcd, tls, node_tls: as in `JobEntry`; etcd is "" if the launcher brought one.
        token: the job's token, hex.
    """

    job: str
    on: str
    where: dict[str, str]
    etcd: str
    tls: dict[str, str] = field(default_factory=dict, repr=False)
    token: str = field(repr=False)
    node_tls: dict[str, str] = field(default_factory=dict)


def placed_as(request: Request, on: str, where: Mapping[str, str]) -> Placed:
    """Returns what is to be remembered of a job: what its launcher decided goes before what the user asked for."""

    def decided(prefix: str, names: Sequence[str], otherwise: dict[str, str]) -> dict[str, str]:
        return {name: where[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in where} or otherwise

    return Placed(
        job=request.job,
        on=on,
        where=dict(where),
        etcd=where.get("etcd", request.etcd),
        tls=decided("etcd", ("ca", "cert", "key"), request.etcd_access),
        token=where.get("token", request.token),
        node_tls=decided("tls", ("ca", "cert", "key", "name"), request.node_tls),
    )


def is_enclosed(job: str) -> bool:
    """Returns True if a launcher within a cluster submits the job, which this host has handed over."""
    placed = find_placed(job)
    return placed is not None and isinstance(find_launcher(placed.on), Enclosed)


def ways(job: str, command: str) -> str:
    """Returns how to run a command on a job whose etcd cannot be reached from here; "": its launcher knows no way."""
    placed = find_placed(job)
    launcher = find_launcher(placed.on) if placed is not None else None
    return launcher.ways(job, placed.where, command) if placed is not None and isinstance(launcher, Enclosed) else ""


def kept_by(placed: Placed) -> KeptJob | None:
    """Returns what a launcher kept of a job that has ended, on a file system that this host sees."""
    kept = placed.where.get("kept")
    return Runtime(Path(kept)).finished(placed.job) if kept else None


def etcd_has_ended(placed: Placed) -> bool:
    """Returns True if the etcd that a job brought ended with it, or its folder was removed."""
    kept = placed.where.get("kept")
    if kept is None or not placed.etcd.startswith("file:"):
        return False
    return kept_by(placed) is not None or not Path(kept).parent.exists()


def _folder() -> Path:
    return Runtime().root / "placed"


def keep_placed(placed: Placed) -> None:
    """Remembers a job; an earlier one of that name is forgotten."""
    path = Runtime().placed() / f"{placed.job}.json"
    with whole_file(path) as file:
        file.write(json.dumps(asdict(placed)).encode())


def find_placed(job: str | None) -> Placed | None:
    """Returns what is known of a job; None: it was not submitted with `--on` here.

    Raises:
        TaskGraphError: its file cannot be read.
    """
    if job is None or not is_name(job):
        return None
    path = _folder() / f"{job}.json"
    try:
        return Placed(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TaskGraphError(f"{path} cannot be read ({error}): remove it") from error


def placed_names() -> list[str]:
    """Returns the jobs that this host submitted with `--on`, also ended ones until they are forgotten."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def forget_placed(job: str) -> None:
    """Forgets a job, and what the commands printed that started its nodes."""
    for kind in ("json", "log"):
        remove_file(_folder() / f"{job}.{kind}")
