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
    "PlacedJob",
    "etcd_has_ended",
    "find_kept_by",
    "find_placed",
    "forget_placed",
    "how_to_run",
    "is_enclosed",
    "keep_placed",
    "make_placed_job",
    "placed_names",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob:
    """The record of a job that was submitted with `--on`.

    Attributes:
        on: the launcher's name.
        where: what the launcher's `start` returned.
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


def make_placed_job(request: Request, on: str, where: Mapping[str, str]) -> PlacedJob:
    """Makes the record of a job from what its launcher's `start` returned, or else from what the user asked for."""

    def given_or(prefix: str, names: Sequence[str], otherwise: dict[str, str]) -> dict[str, str]:
        return {name: where[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in where} or otherwise

    return PlacedJob(
        job=request.job,
        on=on,
        where=dict(where),
        etcd=where.get("etcd", request.etcd),
        tls=given_or("etcd", ("ca", "cert", "key"), request.etcd_access),
        token=where.get("token", request.token),
        node_tls=given_or("tls", ("ca", "cert", "key", "name"), request.node_tls),
    )


def is_enclosed(job: str) -> bool:
    """Returns True if this host submitted the job by a launcher whose etcd it may not reach (`Enclosed`)."""
    placed = find_placed(job)
    return placed is not None and isinstance(find_launcher(placed.on), Enclosed)


def how_to_run(job: str, command: str) -> str:
    """Returns a sentence: how to run a command on a job whose etcd is out of reach; "": its launcher knows no way."""
    placed = find_placed(job)
    launcher = find_launcher(placed.on) if placed is not None else None
    return launcher.ways(job, placed.where, command) if placed is not None and isinstance(launcher, Enclosed) else ""


def find_kept_by(placed: PlacedJob) -> KeptJob | None:
    """Returns what a launcher kept of a job that has ended, where this host sees it; None: nothing, or it goes on."""
    kept = placed.where.get("kept")
    return Runtime(Path(kept)).find_finished(placed.job) if kept else None


def etcd_has_ended(placed: PlacedJob) -> bool:
    """Returns True if the etcd that a job brought ended with it, or its folder was removed."""
    kept = placed.where.get("kept")
    if kept is None or not placed.etcd.startswith("file:"):
        return False
    return find_kept_by(placed) is not None or not Path(kept).parent.exists()


def _folder() -> Path:
    return Runtime().root / "placed"


def keep_placed(placed: PlacedJob) -> None:
    """Writes a job's record, in place of one of an earlier job of that name."""
    path = Runtime().make_placed_folder() / f"{placed.job}.json"
    with whole_file(path) as file:
        file.write(json.dumps(asdict(placed)).encode())


def find_placed(job: str | None) -> PlacedJob | None:
    """Returns a job's record; None: it was not submitted with `--on` here.

    Raises:
        TaskGraphError: its file cannot be read.
    """
    if job is None or not is_name(job):
        return None
    path = _folder() / f"{job}.json"
    try:
        return PlacedJob(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TaskGraphError(f"{path} cannot be read ({error}): remove it") from error


def placed_names() -> list[str]:
    """Returns the names of jobs that this host submitted with `--on`, also of ended ones until `forget_placed`."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def forget_placed(job: str) -> None:
    """Removes a job's record, and the log of commands that started its nodes."""
    for kind in ("json", "log"):
        remove_file(_folder() / f"{job}.{kind}")
