"""The user's runtime directory: any shell finds the jobs of this host there, and what is kept of those that ended.

{runtime}/jobs/{name}/job.json    endpoints and token; only the owner can read it; see `launch.entries`
{runtime}/jobs/{name}/launcher-*  the same, of further launchers of nodes for this job
{runtime}/jobs/{name}/*.log       what its nodes and its embedded etcd print
{runtime}/jobs/{name}/ended       the logs of nodes that ended, in that order; only the last ones are kept
{runtime}/locks/                  empty files: one for each job's name, and two that all launchers share
{runtime}/s/*/                    sockets of one launcher's nodes: their paths must be short
{runtime}/finished/{name}.json    result and events of the last jobs
{runtime}/finished/{name}.logs/   what their nodes and etcds printed
{runtime}/placed/{name}.json      jobs that were submitted with `--on`; see `clusters.placed`
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from taskgraph.errors import DecodeError, JobError, TaskGraphError
from taskgraph.launch.entries import JobEntry, lock_file, own_entries, read_entry, remove_entry, write_entry
from taskgraph.launch.kept import KeptJob
from taskgraph.protocol.keys import NAME_RULE, is_name
from taskgraph.system.files import LockedFolder, may_hold_sockets, write_whole

__all__ = ["JobEntry", "Runtime"]

log = logging.getLogger("taskgraph.launch")

_FINISHED_KEPT = 32
_LOGS_KEPT = 500
"""Logs of nodes that ended, beside those of nodes that run. No host has more nodes than that at a time."""
_ENDED = "ended"
_RUN = ".run"
"""A file beside the logs of a job that ended: the id of their run."""
_STALE_KEPT = 4
"""The number of jobs with a killed launcher whose logs stay."""
_SOCKET_PATH = 1 + 8 + 1 + 8 + 1 + 16
"""Characters below `{runtime}/s`: the launcher's folder, the node's, and the socket's name of 16."""
_LOCK_WAIT_S = 10.0
"""A launcher holds a shared lock for milliseconds, and for the removal of some logs at most."""
_MAX_PATH = 99
"""Some kernels allow 104 bytes for a unix socket's path."""


class Runtime:
    """The user's runtime directory; it is made when it is first needed.

    Raises:
        TaskGraphError: the directory is not ours alone. In /tmp another user may have made it, and what it says would
            decide whose etcd is asked, and which processes are ended.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _default_root()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _check_private(self.root)

    def _make_folder(self, path: Path) -> Path:
        """Makes a private folder, with those above it in the runtime directory, and returns it."""
        for part in (self.root, *(p for p in (*reversed(path.parents), path) if self.root in p.parents)):
            try:
                part.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise TaskGraphError(
                    f"{part} cannot be made ({error.strerror}): set TASKGRAPH_RUNTIME_DIR to a directory of your own"
                ) from error
            _check_private(part)
        return path

    def make_job_folder(self, name: str) -> Path:
        """Makes the job's folder, unless it exists, and returns it."""
        return self._make_folder(self._checked_folder(name))

    def make_placed_folder(self) -> Path:
        """Makes the folder for what `submit --on` remembers, unless it exists, and returns it."""
        return self._make_folder(self.root / "placed")

    def _checked_folder(self, name: str) -> Path:
        """Returns the job's folder, which may not exist. Raises JobError if the name cannot name a folder."""
        if not is_name(name):
            raise JobError(f"{name!r} is no job's name: {NAME_RULE}")
        try:
            os.fsencode(name)
        except UnicodeEncodeError as error:
            raise JobError(
                f"job {name!r}: the locale's encoding, {error.encoding}, has no such letters for the names of files: "
                f"set LC_ALL=C.UTF-8, or give the job another name (Job(name=...), --name)"
            ) from None
        return self.root / "jobs" / name

    def make_socket_folder(self, name: str) -> LockedFolder:
        """Makes a new private folder for sockets of one launcher's nodes, and removes those of killed launchers."""
        self._checked_folder(name)
        base = self.root / "s"
        if may_hold_sockets(base, _MAX_PATH - _SOCKET_PATH):
            return LockedFolder(self._make_folder(base), "")
        return LockedFolder(Path("/tmp"), "taskgraph-s-")

    def claim(self, name: str) -> AbstractContextManager[bool]:
        """Claims a name for the block, which gets False if another process of this host runs a job of that name."""
        return self._locked(f"job-{self._checked_folder(name).name}")

    def _locked(self, lock: str, wait_s: float = 0.0) -> AbstractContextManager[bool]:
        """Locks a file among `locks` for a block, which gets False if another process has it locked for `wait_s`."""
        return lock_file(self._make_folder(self.root / "locks") / lock, wait_s)

    # -- jobs that run ------------------------------------------------------------------------------------------

    def put(self, entry: JobEntry) -> None:
        """Writes a job's first entry. Removes the folders of killed launchers, except for the last few."""
        self._remove_stale_folders()
        write_entry(self.make_job_folder(entry.name) / "job.json", entry)

    def join(self, entry: JobEntry) -> None:
        """Adds the entry of a process that launches nodes for a job, beside those of others on this host.

        None is added if the job's etcd, and so the job, ends with its first launcher.
        """
        with self._joining():
            found, folder = self.find(entry.name), self._checked_folder(entry.name)
            if found is None:
                self.remove(entry.name)  # what a launcher that was killed left
                self.put(entry)
            elif not found.embedded:  # else the job ends with its first launcher
                for path in self._entry_paths(folder)[1:]:
                    if (known := read_entry(path)) is not None and known.stale:
                        remove_entry(path)
                write_entry(folder / f"launcher-{entry.pid}-{secrets.token_hex(4)}.json", entry)

    def leave(self, entry: JobEntry) -> None:
        """Removes this process's entry of a job. The last launcher removes the job's folder with its logs, too.

        A run with its own etcd has removed them before; what nodes have written there since is removed, too.
        """
        folder = self._checked_folder(entry.name)
        with self._joining():
            ours = own_entries(folder)
            for path in ours:
                remove_entry(path)
            if ours and self.find(entry.name) is None:
                self.remove(entry.name)
            elif folder.exists() and not any(path.exists() for path in self._entry_paths(folder)):
                with self.claim(entry.name) as alone:  # else the job begins again just now
                    if alone:
                        self.remove(entry.name)

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        """Locks out other processes, so that only one at a time joins or leaves a job.

        Raises:
            TaskGraphError: another process takes too long.
        """
        with self._locked("joining", _LOCK_WAIT_S) as ours:
            if not ours:
                raise TaskGraphError(
                    f"another launcher has locked {self.root}/locks/joining for {_LOCK_WAIT_S:g} s: it may be stopped "
                    f"(SIGSTOP, Ctrl-Z), or wait for its disk. End it, or let it go on, and try again"
                )
            yield

    def find(self, name: str) -> JobEntry | None:
        """Returns the entry of a job that has a living launcher on this host; None: there is none."""
        entry = self.find_any(name)
        return entry if entry is not None and not entry.stale else None

    def find_killed(self, name: str) -> JobEntry | None:
        """Returns the entry of a job whose launchers were all killed, and left it behind; None: there is none."""
        entry = self.find_any(name)
        return entry if entry is not None and entry.stale else None

    def find_any(self, name: str) -> JobEntry | None:
        """Returns the entry of a job of this host, also if its launcher was killed; None: there is none."""
        return self._find_entry(self._checked_folder(name)) if is_name(name) else None

    def jobs(self) -> list[JobEntry]:
        """Returns an entry of each job that has a launcher here."""
        found = []
        for folder in self._folders():
            try:
                entry = self._find_entry(folder)
            except TaskGraphError as error:  # one broken file hides no other job
                log.warning("%s", error)
                continue
            if entry is not None and not entry.stale:
                found.append(entry)
        return found

    def _folders(self) -> list[Path]:
        """Returns the folders of all jobs."""
        return sorted(path for path in (self.root / "jobs").glob("*") if path.is_dir())

    def _find_entry(self, folder: Path) -> JobEntry | None:
        """Returns the first entry whose launcher lives, else the first; None: the folder has none."""
        entries = [entry for path in self._entry_paths(folder) if (entry := read_entry(path)) is not None]
        return next((entry for entry in entries if not entry.stale), entries[0] if entries else None)

    @staticmethod
    def _entry_paths(folder: Path) -> list[Path]:
        """Returns the paths of a job's entries, that of its first launcher first, whether it exists or not."""
        return [folder / "job.json", *sorted(folder.glob("launcher-*.json"))]

    def _remove_stale_folders(self) -> None:
        """Removes the folders of launchers that were killed, with or without an entry, except for the newest.

        The folder of a job that is just being begun has no entry yet, and is among the newest.
        """
        stale = sorted(filter(self._is_stale, self._folders()), key=_written_at)
        for folder in stale[:-_STALE_KEPT]:
            with self.claim(folder.name) as alone:  # else the job begins again just now
                if alone and self._is_stale(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _is_stale(self, folder: Path) -> bool:
        """Returns True if no launcher of a job's folder lives."""
        try:
            entry = self._find_entry(folder)
        except TaskGraphError:
            return False
        return is_name(folder.name) and (entry is None or entry.stale)

    def remove(self, name: str) -> None:
        """Removes a job's folder, with its entries and logs."""
        folder = self._checked_folder(name)
        for path in own_entries(folder):
            remove_entry(path)
        shutil.rmtree(folder, ignore_errors=True)

    # -- logs, and jobs that ended ------------------------------------------------------------------------------

    def logs(self, name: str) -> Path | None:
        """Returns the folder where nodes of a running job write; None: none were started on this host."""
        return self.left_logs(name) if self.find(name) is not None else None

    def left_logs(self, name: str) -> Path | None:
        """Returns the folder where nodes of a job write or wrote, also if its launcher was killed; None: there are no
        logs.
        """
        folder = self._checked_folder(name)
        return folder if any(folder.glob("n*.log")) else None

    def note_node_ended(self, name: str, log_path: Path) -> None:
        """Notes that a node of the job has ended, and removes the oldest logs of such nodes.

        Nodes may come and go for as long as the job runs.
        """
        try:
            with (self._checked_folder(name) / _ENDED).open("a+") as file:  # several launchers may append
                file.write(f"{log_path.name}\n")
                file.seek(0)
                before = file.read().splitlines()[:-_LOGS_KEPT]
            for log_name in reversed(before):
                log_path.with_name(log_name).unlink()
        except FileNotFoundError:  # older ones went before; or the job has ended
            pass
        except OSError as error:
            log.info("logs of nodes that ended stay: %s", error)

    def keep_finished(self, name: str, kept: KeptJob) -> None:
        """Keeps what is left of a job, and its logs; removes the oldest jobs.

        A record that another launcher of the same run wrote stays, unless this one has the result.

        Raises:
            OSError: the record could not be written. The logs are kept all the same, if possible.
        """
        self._checked_folder(name)
        folder = self._make_folder(self.root / "finished")
        file = folder / f"{name}.json"
        try:
            if kept.result or not kept.run or self.find_finished(name, kept.run) is None:
                write_whole(file, kept.to_bytes())
        except OSError:
            file.unlink(missing_ok=True)  # an earlier job's record would be taken for this one's
            raise
        finally:
            self._keep_logs(name, kept.run)
        for path in sorted(folder.glob("*.json"), key=_written_at)[:-_FINISHED_KEPT]:
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(".logs"), ignore_errors=True)

    def forget_ended(self, name: str, kept: KeptJob | None) -> None:
        """Removes what this host keeps of an earlier job of that name, which would pass for one that runs elsewhere.

        Args:
            kept: what was known of it; a later record stays.
        """
        if self.find_killed(name) is not None:
            self.remove(name)
        if kept is not None and self.find_finished(name) == kept:
            (self.root / "finished" / f"{name}.json").unlink(missing_ok=True)
            shutil.rmtree(self.kept_logs(name), ignore_errors=True)

    def kept_logs(self, name: str) -> Path:
        """Returns where the logs of a finished job are."""
        self._checked_folder(name)
        return self.root / "finished" / f"{name}.logs"

    def _keep_logs(self, name: str, run: str) -> None:
        """Moves the job's logs to `kept_logs`, and removes those of an earlier run.

        All launchers of a run may end at one time: each adds its logs. A launcher that is stopped keeps the lock; the
        others go on after a while.
        """
        folder = self.kept_logs(name)
        with self._locked("logs", _LOCK_WAIT_S):
            if not run or _run_of(folder) != run:
                shutil.rmtree(folder, ignore_errors=True)
            for path in (self.root / "jobs" / name).glob("*.log"):
                with contextlib.suppress(FileNotFoundError):  # another launcher did not wait for the lock
                    if path.stat().st_size:
                        path.rename(self._make_folder(folder) / path.name)
            with contextlib.suppress(OSError):  # there are no logs, or the disk is full
                (folder / _RUN).write_text(run)

    def finished_names(self) -> list[str]:
        """Returns the jobs of which something is kept, the newest first."""
        known = sorted((self.root / "finished").glob("*.json"), key=_written_at, reverse=True)
        return [path.stem for path in known]

    def find_finished(self, name: str, run: str = "") -> KeptJob | None:
        """Returns what is kept of a finished job; None if there is no such record, or a later run was killed.

        Args:
            run: only of that run, which may have had several launchers here; "": of the last one.
        """
        if not is_name(name) or (not run and self.find_killed(name) is not None):
            return None
        try:
            found = KeptJob.from_bytes((self.root / "finished" / f"{name}.json").read_bytes())
        except (FileNotFoundError, DecodeError):
            return None
        return found if run in ("", found.run) else None


def _run_of(logs: Path) -> str:
    """Returns the run whose logs are kept there; "": unknown."""
    try:
        return (logs / _RUN).read_text()
    except (OSError, ValueError):
        return ""


def _check_private(folder: Path) -> None:
    """Raises TaskGraphError unless a folder is the user's own, and only the user may enter it."""
    found = folder.lstat()
    if found.st_uid != os.getuid():  # the user cannot remove it, or had better not
        raise TaskGraphError(
            f"{folder} must be a directory of your own, and is another user's (id {found.st_uid}): set "
            f"TASKGRAPH_RUNTIME_DIR to another place"
        )
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise TaskGraphError(
            f"{folder} must be a directory that only you can read (mode 0700): remove it, or set "
            f"TASKGRAPH_RUNTIME_DIR to another place"
        )


def _written_at(path: Path) -> float:
    """Returns when a file was written; 0: it is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another launcher removed it
        return 0.0


def _default_root() -> Path:
    """Returns `$TASKGRAPH_RUNTIME_DIR/taskgraph`, `$XDG_RUNTIME_DIR/taskgraph`, or a folder for temporary files.

    $XDG_RUNTIME_DIR may be another user's, after `su`, and is ignored then, also by root: what root leaves there the
    other user can neither use nor remove.
    """
    if given := os.environ.get("TASKGRAPH_RUNTIME_DIR"):
        if not (os.path.isdir(given) and os.access(given, os.X_OK)):
            raise TaskGraphError(f"TASKGRAPH_RUNTIME_DIR={given}: there is no such directory, or you may not enter it")
        return Path(given).absolute() / "taskgraph"
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isdir(xdg) and os.stat(xdg).st_uid == os.getuid() and os.access(xdg, os.W_OK | os.X_OK):
        return Path(xdg).absolute() / "taskgraph"
    return Path(tempfile.gettempdir()) / f"taskgraph-{os.getuid()}"
