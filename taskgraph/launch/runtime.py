"""The user's runtime directory: by what a job of this host is found from any shell, and what is kept of finished ones.

{runtime}/jobs/{name}/job.json    endpoints and token; only the owner can read it
{runtime}/jobs/{name}/*.log       what its nodes print
{runtime}/jobs/{name}/s/          sockets
{runtime}/finished/{name}.json    result and events of the last jobs
{runtime}/finished/{name}.logs/   what their nodes printed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taskgraph.errors import TaskGraphError

__all__ = ["JobEntry", "Runtime", "alive"]

_FINISHED_KEPT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """How to reach a job.

    Attributes:
        etcd: endpoints, separated by commas.
        tls: ca, cert and key files and user, as `EtcdCoordinator.connect` takes them.
        token: the job's token, hex.
        pid: the process that launched it; the entry is stale when that is gone.
        embedded: its etcd ends with it.
    """

    name: str
    etcd: str
    token: str
    pid: int
    embedded: bool
    tls: dict[str, str]

    @property
    def token_bytes(self) -> bytes:
        return bytes.fromhex(self.token)


class Runtime:
    """The directory; made when it is first needed, refused where it is not ours alone."""

    def __init__(self, root: Path | None = None) -> None:
        if root is None:
            given = os.environ.get("TASKGRAPH_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR")
            base = Path(given) if given and Path(given).is_dir() else Path(tempfile.gettempdir())
            root = base / ("taskgraph" if base != Path(tempfile.gettempdir()) else f"taskgraph-{os.getuid()}")
        self.root = root

    def _made(self, path: Path) -> Path:
        for part in (self.root, *(p for p in (*reversed(path.parents), path) if self.root in p.parents)):
            part.mkdir(mode=0o700, exist_ok=True)
            found = part.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise TaskGraphError(
                    f"{part} must be a directory that only you can read (mode 0700, your own): remove it, or set "
                    f"TASKGRAPH_RUNTIME_DIR to another place"
                )
        return path

    def folder(self, name: str) -> Path:
        """The job's folder, made."""
        return self._made(self.root / "jobs" / name)

    def sockets(self, name: str) -> Path:
        """A private folder for the sockets of one launcher's nodes, with a short path."""
        return self._made(self.folder(name) / f"s{secrets.token_hex(2)}")

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether this process alone may run a job of that name on this host now; the kernel lets go when it ends."""
        path = self._made(self.root / "jobs") / f"{name}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                yield False
                return
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    break
            os.close(descriptor)  # it was removed between our opening and locking it
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def put(self, entry: JobEntry) -> None:
        """Makes a job findable."""
        _write_private(self.folder(entry.name) / "job.json", json.dumps(asdict(entry)))

    def find(self, name: str) -> JobEntry | None:
        """The entry of a job of this host, unless its launcher is gone."""
        entry = self._read(self.root / "jobs" / name / "job.json")
        return entry if entry is not None and alive(entry.pid) else None

    def jobs(self) -> list[JobEntry]:
        """Jobs whose launcher lives."""
        entries = [self._read(path) for path in sorted((self.root / "jobs").glob("*/job.json"))]
        return [entry for entry in entries if entry is not None and alive(entry.pid)]

    def _read(self, path: Path) -> JobEntry | None:
        try:
            return JobEntry(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise TaskGraphError(f"{path} cannot be read ({error}): remove it") from error

    def remove(self, name: str) -> None:
        """Forgets a job, its logs and sockets."""
        shutil.rmtree(self.root / "jobs" / name, ignore_errors=True)

    def keep_finished(self, name: str, record: dict[str, Any]) -> None:
        """Keeps what is left of a job; the oldest go."""
        folder = self._made(self.root / "finished")
        _write_private(folder / f"{name}.json", json.dumps(record))
        self._keep_logs(name, folder / f"{name}.logs")
        known = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in known[:-_FINISHED_KEPT]:
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(".logs"), ignore_errors=True)

    def _keep_logs(self, name: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for path in (self.root / "jobs" / name).glob("*.log"):
            if path.stat().st_size:
                path.rename(self._made(folder) / path.name)

    def finished(self, name: str) -> dict[str, Any] | None:
        """What was kept of a finished job."""
        try:
            found: dict[str, Any] = json.loads((self.root / "finished" / f"{name}.json").read_text())
            return found
        except (FileNotFoundError, ValueError):
            return None


def alive(pid: int) -> bool:
    """Whether a process of that id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_private(path: Path, text: str) -> None:
    """Atomically, readable by the owner only."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        scratch.rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        raise
