"""The user's runtime directory: by what a job of this host is found from any shell, and what is kept of finished ones.

{runtime}/jobs/{name}/job.json    endpoints and token; only the owner can read it, and the launcher holds a lock on it
{runtime}/jobs/{name}/launcher-*  the same, of further launchers of nodes for it
{runtime}/jobs/{name}/*.log       what its nodes print, and its embedded etcd
{runtime}/jobs/{name}/ended       the logs of nodes that ended, in that order: those of the last ones are kept
{runtime}/joining.lock            held by the launcher that joins or leaves a job just now: its process id
{runtime}/s/*/                    sockets of one launcher's nodes: their paths must be short
{runtime}/finished/{name}.json    result and events of the last jobs
{runtime}/finished/{name}.logs/   what their nodes and etcds printed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from taskgraph.errors import DecodeError, JobError, TaskGraphError
from taskgraph.launch.kept import KeptJob
from taskgraph.network.tls import Tls
from taskgraph.protocol.keys import NAME_RULE, is_name
from taskgraph.system import host
from taskgraph.system.files import ROOT, HeldFolder, may_hold_sockets, remove_file, whole_file, write_whole

__all__ = ["JobEntry", "Runtime", "alive"]

log = logging.getLogger("taskgraph.launch")

_FINISHED_KEPT = 32
_LOGS_KEPT = 500
"""Of nodes that ended, beside those of nodes that run: more than a host has nodes, which end with their job at once."""
_ENDED = "ended"
_RUN = ".run"
"""Beside the logs of a job that has ended: which run's they are."""
_BEGINNING_S = 60.0
"""Nobody takes longer between making a job's folder and the entry in it, but for who holds its claim."""
_STALE_KEPT = 4
"""What is left of jobs whose launcher was killed: their logs may still be wanted."""
_SOCKET_PATH = 1 + 8 + 1 + 8 + 1 + 16
"""Characters below `{runtime}/s`: the launcher's folder, the node's, and the socket's name of 16."""
_JOINING_S = 10.0
"""To join or leave takes milliseconds, and the removal of some logs at most."""
_JOINING_AGAIN_S = 0.02
_COMMAND = 120
"""Characters of a command line that an error shows."""
_MAX_PATH = 99
"""Some kernels take 104 bytes for a unix socket's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """How to reach a job.

    Attributes:
        etcd: endpoints, separated by commas.
        tls: ca, cert and key files and user, as `EtcdCoordinator.connect` takes them.
        node_tls: ca, cert and key files for nodes and their control service.
        token: the job's token, hex.
        pid: the process that launched it; the entry is stale when that is gone.
        embedded: its etcd ends with it.
        started: when that process began, as the kernel tells it, since process ids come again.
        pids: where that process id holds, as `host.pids` tells it; "" where the host does not.
        lives: of a launcher of another container, whose process is not seen here: whether it held its entry when that
            was read. None: it is of this one.
        created: unix time, seconds.
        run: the id of its run, as etcd's `spec` has it; "" where that is not known.
    """

    name: str
    etcd: str
    token: str = field(repr=False)
    pid: int
    embedded: bool
    tls: dict[str, str]
    started: str = ""
    created: float = 0.0
    node_tls: dict[str, str] = field(default_factory=dict)
    run: str = ""
    pids: str = ""
    lives: bool | None = None

    @property
    def stale(self) -> bool:
        """Whether the launcher is gone."""
        if self.lives is not None:
            return not self.lives
        return not alive(self.pid) or (self.started != "" and host.began(self.pid) != self.started)

    @property
    def node_access(self) -> Tls | None:
        """For the control service of nodes on other hosts."""
        return Tls.of(self.node_tls)

    @property
    def token_bytes(self) -> bytes:
        return bytes.fromhex(self.token)


class Runtime:
    """The directory; made when it is first needed, refused where it is not ours alone.

    Raises:
        TaskGraphError: it is there, and not ours alone. In a directory that all users share, another one may have made
            it, and what it says would decide whose etcd is asked, and what processes are ended.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _default_root()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _check_private(self.root)

    def _made(self, path: Path) -> Path:
        for part in (self.root, *(p for p in (*reversed(path.parents), path) if self.root in p.parents)):
            try:
                part.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise TaskGraphError(
                    f"{part} cannot be made ({error.strerror}): set TASKGRAPH_RUNTIME_DIR to a directory of your own"
                ) from error
            _check_private(part)
        return path

    def folder(self, name: str) -> Path:
        """The job's folder, made."""
        return self._made(self._folder(name))

    def _folder(self, name: str) -> Path:
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

    def sockets(self, name: str) -> HeldFolder:
        """A new private folder for the sockets of one launcher's nodes. Removes those of launchers that were killed."""
        self._folder(name)
        base = self.root / "s"
        if may_hold_sockets(base, _MAX_PATH - _SOCKET_PATH):
            return HeldFolder(self._made(base), "")
        return HeldFolder(Path("/tmp"), "taskgraph-s-")

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether this process alone may run a job of that name on this host now; the kernel lets go when it ends."""
        path = self._made(self._folder(name).parent) / f".{name}.lock"  # no other job's folder
        file = _locked(path)
        try:
            yield file is not None
        finally:
            if file is not None:
                remove_file(path)
                os.close(file)

    def put(self, entry: JobEntry) -> None:
        """Makes a job findable. Forgets what launchers left that were killed, but for the last few."""
        self._forget_stale()
        self._write(entry, "job.json")

    def _write(self, entry: JobEntry, file: str) -> None:
        started, created = host.began(entry.pid), entry.created or time.time()
        known = asdict(replace(entry, started=started, created=created, pids=host.pids()))
        del known["lives"]
        path = self.folder(entry.name) / file
        with whole_file(path) as written:
            written.write(json.dumps(known).encode())
            _hold(path, written.fileno())

    def join(self, entry: JobEntry) -> None:
        """The process of `entry` launches nodes for a job, and others of this host may do so, too."""
        with self._joining():
            found = self.find(entry.name)
            if found is None:
                self.remove(entry.name)  # what a launcher that was killed left
                self.put(entry)
            elif not found.embedded:  # else the job ends with who launched it first
                for path in self._files(self._folder(entry.name))[1:]:
                    if (known := self._read(path)) is not None and known.stale:
                        remove_file(path)  # of a launcher that was killed: another one lives
                self._write(entry, f"launcher-{entry.pid}-{host.pids()}.json")

    def leave(self, entry: JobEntry) -> None:
        """It launches no more: the last one that goes takes the job and its logs with it.

        A run with its own etcd does that itself, and nodes that were just being started here may have written since.
        """
        folder = self._folder(entry.name)
        with self._joining():
            ours = False
            for path in self._files(folder):
                known = self._read(path)
                if known is not None and (known.pid, known.pids) == (entry.pid, host.pids()):
                    remove_file(path)
                    _let_go(path)
                    ours = True
            if ours and self.find(entry.name) is None:
                self.remove(entry.name)
            elif folder.exists() and not any(path.exists() for path in self._files(folder)):
                with self.claim(entry.name) as alone:  # else the job begins again just now
                    if alone:
                        self.remove(entry.name)

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        """Within, nobody else joins or leaves any job. The kernel lets go of it when the process ends.

        Raises:
            TaskGraphError: somebody else takes too long.
        """
        path = self._made(self.root) / "joining.lock"
        until = time.monotonic() + _JOINING_S
        while (file := _locked(path)) is None:
            if time.monotonic() > until:
                raise TaskGraphError(
                    f"{path} has been locked for {_JOINING_S:g} s by {_holder(path)}: it may be stopped, or wait for "
                    f"its disk. End it, or let it go on, and try again"
                )
            time.sleep(_JOINING_AGAIN_S)
        try:
            with contextlib.suppress(OSError):  # a full disk: those who wait cannot say whom for
                os.ftruncate(file, 0)
                os.write(file, str(os.getpid()).encode())
            yield
        finally:
            remove_file(path)
            os.close(file)

    def find(self, name: str) -> JobEntry | None:
        """The entry of a job of this host, unless its launchers are gone."""
        entry = self.known(name)
        return entry if entry is not None and not entry.stale else None

    def known(self, name: str) -> JobEntry | None:
        """The entry of a job of this host, also where its launcher was killed and left it: of its last run then."""
        return self._entry(self._folder(name)) if is_name(name) else None

    def jobs(self) -> list[JobEntry]:
        """Jobs of which a launcher lives."""
        return [entry for _, entry in self._entries() if not entry.stale]

    def _entries(self) -> Iterator[tuple[Path, JobEntry]]:
        for folder in sorted(path for path in (self.root / "jobs").glob("*") if path.is_dir()):
            try:
                entry = self._entry(folder)
            except TaskGraphError as error:  # one broken file hides no other job
                log.warning("%s", error)
                continue
            if entry is not None:
                yield folder, entry

    def _entry(self, folder: Path) -> JobEntry | None:
        """The first of a job whose launcher lives, else the first."""
        entries = [entry for path in self._files(folder) if (entry := self._read(path)) is not None]
        return next((entry for entry in entries if not entry.stale), entries[0] if entries else None)

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return [folder / "job.json", *sorted(folder.glob("launcher-*.json"))]

    def _forget_stale(self) -> None:
        stale = sorted(((e.created, folder) for folder, e in self._entries() if e.stale), reverse=True)
        unbegun = [folder for folder in (self.root / "jobs").glob("*") if self._never_began(folder)]
        for folder in (*[folder for _, folder in stale[_STALE_KEPT:]], *unbegun):
            with self.claim(folder.name) as alone:  # else the job begins again just now
                entry = self._entry(folder) if alone else None
                if alone and (entry.stale if entry is not None else self._never_began(folder)):
                    shutil.rmtree(folder, ignore_errors=True)

    def _never_began(self, folder: Path) -> bool:
        """Whether its launcher was killed before it said how to reach the job, and not just a moment ago."""
        if not is_name(folder.name) or not folder.is_dir() or any(path.exists() for path in self._files(folder)):
            return False
        return time.time() - _written_at(folder) > _BEGINNING_S

    def _read(self, path: Path) -> JobEntry | None:
        try:
            raw = json.loads(path.read_text())
            entry = JobEntry(**{f.name: raw[f.name] for f in fields(JobEntry) if f.name in raw})
            return entry if entry.pids in ("", host.pids()) else replace(entry, lives=_is_held(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise TaskGraphError(f"{path} cannot be read ({error}): remove it") from error

    def remove(self, name: str) -> None:
        """Forgets a job and its logs."""
        folder = self._folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        for path in [path for path in _holding if path.parent == folder]:
            _let_go(path)

    def keep_finished(self, name: str, record: dict[str, Any], result: str | None = None) -> None:
        """Keeps what is left of a job; the oldest go.

        Args:
            record: a `kept_record`.
            result: as JSON; None: it is not kept.

        Raises:
            OSError: its record could not be kept; its logs are, where they can be.
        """
        self._folder(name)
        folder = self._made(self.root / "finished")
        file = folder / f"{name}.json"
        try:
            text = json.dumps({"result": None, **record})
            if result is not None:  # as it is: a large one, made again, would take many times its bytes
                text = f'{json.dumps(record)[:-1]}, "result": {result}}}'
            write_whole(file, text.encode())
        except OSError:
            file.unlink(missing_ok=True)  # of an earlier job of that name: it would be taken for this one's
            raise
        finally:
            self._keep_logs(name, record.get("run", ""))
        known = sorted(folder.glob("*.json"), key=_written_at)
        for path in known[:-_FINISHED_KEPT]:
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(".logs"), ignore_errors=True)

    def logs(self, name: str) -> Path | None:
        """Where nodes of a running job write, if some were started on this host."""
        folder = self._folder(name)
        return folder if self.find(name) is not None and any(folder.glob("n*.log")) else None

    def node_ended(self, name: str, log_path: Path) -> None:
        """A node of the job has ended. Of those, whoever launched them, the logs of the last ones are kept: others may
        come and go for as long as the job runs."""
        try:
            with (self._folder(name) / _ENDED).open("a+") as file:  # several launchers may write to its end
                file.write(f"{log_path.name}\n")
                file.seek(0)
                before = file.read().splitlines()[:-_LOGS_KEPT]
            for log_name in reversed(before):
                log_path.with_name(log_name).unlink()
        except FileNotFoundError:  # older ones went before; or the job has ended
            pass
        except OSError as error:
            log.info("logs of nodes that ended stay: %s", error)

    def kept_logs(self, name: str) -> Path:
        """Where the logs of a finished job are."""
        self._folder(name)
        return self.root / "finished" / f"{name}.logs"

    def _keep_logs(self, name: str, run: str) -> None:
        """Those of an earlier run go; not what another launcher of this one kept, which may be all there is."""
        folder = self.kept_logs(name)
        with _alone(folder.parent):
            if not run or _run_of(folder) != run:
                shutil.rmtree(folder, ignore_errors=True)
            for path in (self.root / "jobs" / name).glob("*.log"):
                with contextlib.suppress(FileNotFoundError):  # another launcher was here all the same
                    if path.stat().st_size:
                        path.rename(self._made(folder) / path.name)
            with contextlib.suppress(OSError):  # nothing is kept, or the disk is full
                (folder / _RUN).write_text(run)

    def killed(self, name: str) -> JobEntry | None:
        """The entry of a job whose launcher was killed, and left it: of its last run on this host."""
        entry = self.known(name)
        return entry if entry is not None and entry.stale else None

    def left_logs(self, name: str) -> Path | None:
        """Where the nodes of a job whose launcher was killed wrote, if some did."""
        folder = self._folder(name)
        return folder if any(folder.glob("n*.log")) else None

    def finished_names(self) -> list[str]:
        """Jobs of which something was kept, the last one that ended first."""
        known = sorted((self.root / "finished").glob("*.json"), key=_written_at, reverse=True)
        return [path.stem for path in known]

    def finished(self, name: str, run: str = "") -> KeptJob | None:
        """What was kept of a finished job; nothing where a later run of it was killed, or where that is no record.

        Args:
            run: of that run only, which may have had several launchers here.
        """
        if not is_name(name) or (not run and self.killed(name) is not None):
            return None
        try:
            found = KeptJob.from_json((self.root / "finished" / f"{name}.json").read_text())
        except (FileNotFoundError, UnicodeDecodeError, DecodeError):
            return None
        return found if run in ("", found.run) else None


def _run_of(logs: Path) -> str:
    """The run whose logs were kept there; "": not known."""
    try:
        return (logs / _RUN).read_text()
    except (OSError, ValueError):
        return ""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within, no other process keeps logs there: all launchers of a run end at one time, and whose logs are there is
    written last. Who cannot be alone, since another one is stopped, say, goes on after a while all the same.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # one that cannot be locked
            file = os.open(folder, os.O_RDONLY)
            held.callback(os.close, file)
            until = time.monotonic() + _JOINING_S
            while not _is_ours(file) and time.monotonic() < until:
                time.sleep(_JOINING_AGAIN_S)
        yield


def _is_ours(file: int) -> bool:
    """Locks it, unless another one has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if found.st_uid != os.getuid():  # who cannot remove it, or had better not
        raise TaskGraphError(
            f"{folder} must be a directory of your own, and is another user's (id {found.st_uid}): set "
            f"TASKGRAPH_RUNTIME_DIR to another place"
        )
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise TaskGraphError(
            f"{folder} must be a directory that only you can read (mode 0700): remove it, or set "
            f"TASKGRAPH_RUNTIME_DIR to another place"
        )


def alive(pid: int) -> bool:
    """Whether a process of that id runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return host.state(pid) != "Z"


_holding: dict[Path, int] = {}
"""The entries that this process wrote, each locked until it is removed. By that it is seen to live where its process is
not seen: in other containers that have the directory, too."""


def _hold(path: Path, file: int) -> None:
    """Locks an entry before it is there."""
    _let_go(path)
    held = os.dup(file)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        log.debug("%s cannot be locked: %s", path, error)
        os.close(held)
    else:
        _holding[path] = held


def _let_go(path: Path) -> None:
    if (held := _holding.pop(path, None)) is not None:
        os.close(held)


def _is_held(path: Path) -> bool:
    """Whether the process that wrote an entry lives; also where nobody can tell, as it loses what is taken from it."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _locked(path: Path) -> int | None:
    """A file that is locked by us now, which we remove before we close it; None: another process has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _is_ours(file):
            os.close(file)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file).st_ino == path.stat().st_ino:
                return file
        os.close(file)  # it was removed between our opening and locking it


def _holder(lock: Path) -> str:
    """Who holds a lock with its process's id in it, for people."""
    try:
        pid = int(lock.read_bytes())
    except (OSError, ValueError):
        return "another process"
    command = " ".join(host.command(pid).split())[:_COMMAND]
    return f"process {pid} (`{command}`)" if command else f"process {pid}"


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another launcher made room, too
        return 0.0


def _default_root() -> Path:
    """`$TASKGRAPH_RUNTIME_DIR/taskgraph`, `$XDG_RUNTIME_DIR/taskgraph`, or a folder of ours for temporary files.

    Nobody names $XDG_RUNTIME_DIR for us: it may be another user's, after `su`, and is passed over then; by root, too,
    who may write there, and would leave what its owner can neither use nor remove.
    """
    given = os.environ.get("TASKGRAPH_RUNTIME_DIR")
    if given and not (os.path.isdir(given) and os.access(given, os.X_OK)):
        raise TaskGraphError(f"TASKGRAPH_RUNTIME_DIR={given}: there is no such directory, or you may not enter it")
    if not given:
        xdg = os.environ.get("XDG_RUNTIME_DIR", "")
        usable = os.path.isdir(xdg) and os.access(xdg, os.W_OK | os.X_OK)
        given = xdg if usable and os.stat(xdg).st_uid in (os.getuid(), ROOT) else ""
    try:
        shared = Path(tempfile.gettempdir())
    except FileNotFoundError:  # none that can be written to, as in a container whose root is read-only
        if not given:
            raise
    else:
        if not given or Path(given) == shared:
            return shared / f"taskgraph-{os.getuid()}"
    return Path(given).absolute() / "taskgraph"
