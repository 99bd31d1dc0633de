"""Entries of launchers say how to reach a job of this host, and their locks show which launchers live.

A launcher locks its entry for as long as it lives. The kernel unlocks a file when the process ends, so an entry that
is not locked belongs to a launcher that was killed. This also holds between containers that share the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from taskgraph.errors import TaskGraphError
from taskgraph.network.tls import Tls
from taskgraph.system.files import remove_file, whole_file

__all__ = ["JobEntry", "lock_file", "own_entries", "read_entry", "remove_entry", "write_entry"]

_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """An entry: how to reach a job.

    Attributes:
        etcd: endpoints, separated by commas.
        token: the job's token, hex.
        pid: the launcher's process.
        embedded: the job's etcd ends with the launcher.
        tls: ca, cert and key files and user, as `EtcdCoordinator.connect` takes them.
        created: unix time, seconds.
        node_tls: ca, cert and key files for nodes and their control service.
        run: the id of the job's run, as etcd's `spec` has it; "": unknown.
        path: the entry's file; None: of a launcher that has written no entry yet.
    """

    name: str
    etcd: str
    token: str = field(repr=False)
    pid: int
    embedded: bool
    tls: dict[str, str]
    created: float = 0.0
    node_tls: dict[str, str] = field(default_factory=dict)
    run: str = ""
    path: Path | None = field(default=None, repr=False, compare=False)

    @property
    def stale(self) -> bool:
        """Says whether the launcher has ended, as its entry is not locked; False of an entry not written yet."""
        return self.path is not None and not _is_locked(self.path)

    @property
    def node_access(self) -> Tls | None:
        """The TLS files for the control service of nodes on other hosts; None: no TLS."""
        return Tls.of(self.node_tls)

    @property
    def token_bytes(self) -> bytes:
        return bytes.fromhex(self.token)


_own: dict[Path, int] = {}
"""The entries of this process, each with the descriptor that keeps it locked."""


def write_entry(path: Path, entry: JobEntry) -> None:
    """Writes an entry. If it is this process's own, the entry is locked before others can see it."""
    known = asdict(replace(entry, created=entry.created or time.time(), path=None))
    del known["path"]
    with whole_file(path) as file:
        file.write(json.dumps(known).encode())
        _unlock(path)
        if entry.pid == os.getpid():
            _own[path] = os.dup(file.fileno())
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(_own[path], fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_entry(path: Path) -> JobEntry | None:
    """Returns an entry, or None if there is none.

    Raises:
        TaskGraphError: the file cannot be read.
    """
    try:
        raw = json.loads(path.read_text())
        return JobEntry(**{f.name: raw[f.name] for f in fields(JobEntry) if f.name in raw}, path=path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TaskGraphError(f"{path} cannot be read ({error}): remove it") from error


def remove_entry(path: Path) -> None:
    """Removes and unlocks an entry, if there is one."""
    remove_file(path)
    _unlock(path)


def _unlock(path: Path) -> None:
    """Unlocks an entry, if this process has locked it."""
    if (descriptor := _own.pop(path, None)) is not None:
        os.close(descriptor)


def _unlock_in_child() -> None:
    """Unlocks entries in a forked process, which may outlive the launcher."""
    for path in list(_own):
        _unlock(path)


os.register_at_fork(after_in_child=_unlock_in_child)


def own_entries(folder: Path) -> list[Path]:
    """Returns the paths of the entries that this process has locked in a job's folder."""
    return [path for path in _own if path.parent == folder]


def _is_locked(path: Path) -> bool:
    """Returns True if an entry is there and locked, or if its file system has no locks."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


@contextlib.contextmanager
def lock_file(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Locks a file for the block, which gets False if another process had it locked for `wait_s`.

    The file stays: a lock on a file that was removed would keep no other process out.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + wait_s
        while not (ours := _lock(file)) and time.monotonic() < until:
            time.sleep(_AGAIN_S)
        yield ours
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Locks an open file. Returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
