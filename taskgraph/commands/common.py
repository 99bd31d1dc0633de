"""Code that several commands use: finding a job, its etcd and its token; signals that end a command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import signal
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from taskgraph.coordination.opening import opened
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, JobError, TransportError, UnknownJob
from taskgraph.launch.access import configured, etcd_access, insecure_listen, node_access
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.network.listening import Listening
from taskgraph.network.tls import Tls, check_listener
from taskgraph.observe.screen import say
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.protocol.view import decode_key
from taskgraph.system.files import remove_file
from taskgraph.system.signals import StopSignals, obey_sigterm
from taskgraph.transport.hello import token_mark

if TYPE_CHECKING:
    from taskgraph.coordination.api import Coordinator
    from taskgraph.launch.kept import KeptJob

__all__ = [
    "FoundJob",
    "NewToken",
    "NotSubmitted",
    "access_of",
    "access_words",
    "check_launcher",
    "drop_terminal",
    "ended_text",
    "ended_with_launcher",
    "ending_signals",
    "etcd_of",
    "find_entry",
    "known_at",
    "listening_of",
    "node_tls_of",
    "obey_ending_signals",
    "on_ending_signals",
    "reach",
    "restore_signals",
    "see_also_text",
    "token_of",
    "token_of_new_job",
    "wait_until_launcher_gone",
]

_TOKEN_BYTES = 16
"""Nodes refuse shorter tokens."""
_GONE_POLL_S = 0.3
_ENDED_NAMED = 5
"""Ended jobs that a message names."""
_NODE_ACCESS = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_name")
_ACCESS = ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")


def listening_of(options: argparse.Namespace, nodes: int) -> Listening:
    """Returns where nodes listen, by --listen and its options. Checked before anything starts.

    Raises:
        JobError: an address beyond loopback without TLS, unusable files for TLS, or too few ports.
    """
    host = options.listen or configured("listen") or ""
    found = Listening(
        host=host,
        ports=options.ports or (host and configured("ports")) or "",
        advertise=options.advertise or (host and configured("advertise")) or "",
        insecure=insecure_listen(options.insecure_listen),
    )
    found.check(nodes)
    tls = Tls.of(node_tls_of(options))
    try:
        check_listener(found.host, tls is not None, found.insecure)
        if found.host and tls is not None:
            tls.context(server=True)
    except TransportError as error:
        raise JobError(str(error)) from None
    return found


def node_tls_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the TLS files for connections between nodes, as `Tls.of` takes them; {}: no TLS.

    They come from the options, or else from the environment or `taskgraph.toml`.
    """
    return node_access({name: getattr(options, name) for name in _NODE_ACCESS})


def etcd_of(options: argparse.Namespace) -> str | None:
    """Returns the etcd that the options, the environment or `taskgraph.toml` name; None: none."""
    return options.etcd or configured("etcd")


def access_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns certificates, user and password for etcd, as `EtcdCoordinator.connect` takes them."""
    return etcd_access({name: getattr(options, name) for name in _ACCESS})


def access_words(options: argparse.Namespace) -> str:
    """Returns the options for etcd and TLS as the user gave them, to repeat them in another command."""
    given = [(name.replace("_", "-"), getattr(options, name)) for name in (*_ACCESS, *_NODE_ACCESS)]
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in given if value)


def _token_path(options: argparse.Namespace) -> Path | None:
    """Returns the token file that the options, the environment or `taskgraph.toml` name; None: none."""
    path = options.token_file or configured("token_file")
    return Path(path) if path else None


def token_of(options: argparse.Namespace) -> str | None:
    """Returns the token, hex, from the file of --token-file or `taskgraph.toml`; None: neither names one."""
    path = _token_path(options)
    return _read_token(path) if path is not None else None


def _read_token(path: Path) -> str:
    """Returns the token, hex, in a file. Raises JobError if there is none."""
    try:
        text = path.read_text().strip()
        token = bytes.fromhex(text)
    except FileNotFoundError:
        raise JobError(
            f"--token-file {path}: there is no such file. `taskgraph submit` writes it; `taskgraph token JOB > {path}` "
            f"does on the host where the job was started"
        ) from None
    except OSError as error:
        raise JobError(f"--token-file {path}: {error.strerror}") from error
    except ValueError:
        token = b""
    if len(token) < _TOKEN_BYTES:
        raise JobError(f"--token-file {path}: not a token; write one with `taskgraph token JOB > {path}`")
    return text


@dataclass(frozen=True, slots=True)
class NewToken:
    """The token of a new job, and its file.

    Attributes:
        token: in hex.
        written: this command wrote the file; False: the file was there.
    """

    token: str
    path: Path
    written: bool

    def discard(self) -> None:
        """Removes the file if this command wrote it. Called if the job did not start."""
        if self.written:
            remove_file(self.path)


def token_of_new_job(
    options: argparse.Namespace, otherwise: Path | None = None, *, again: bool = False
) -> NewToken | None:
    """Returns the token of a new job, from the named file. Writes the file with a new token if it is missing.
    None: neither the options nor `otherwise` name a file.

    Args:
        otherwise: the file to write if none is named; None: no file.
        again: the command may have been started before: a file that it wrote then counts as named.
    """
    path = _token_path(options)
    if path is not None and path.exists():
        return NewToken(_read_token(path), path, False)
    named, path = path is not None or again, path or otherwise
    if path is None:
        return None
    if again and path.exists():
        return NewToken(_read_token(path), path, False)
    token = secrets.token_hex(32)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if named:
            return NewToken(_read_token(path), path, False)
        raise JobError(
            f"{path} exists already: use its token with --token-file {path}, or name another file for a new one"
        ) from None
    except OSError as error:
        raise JobError(f"--token-file {path}: the token cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return NewToken(token, path, True)


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job, its etcd, and the way to reach its nodes."""

    name: str
    entry: JobEntry
    spec: JobSpec
    coordinator: Coordinator

    def check_token(self) -> None:
        """Raises JobError if the job's nodes would refuse our token."""
        wanted, name = self.spec.token_mark, self.name
        if not wanted or (self.entry.token and token_mark(self.entry.token_bytes) == wanted):
            return
        if not self.entry.token:
            raise JobError(f"the token of job {name!r} is unknown here: give --token-file")
        raise JobError(
            f"job {name!r} was submitted with another token: give the file that `taskgraph submit` wrote (--token-file)"
        )


def find_entry(options: argparse.Namespace) -> JobEntry:
    """Returns the entry of the job that a command names: this host's; if the options name an etcd, one for that.

    Does not ask etcd.

    Raises:
        UnknownJob: the options name no etcd, and no such job is known here.
        JobError: the options do not say which job.
    """
    runtime, name, etcd = Runtime(), options.job, etcd_of(options)
    if name == "":  # an unset variable of a script must not end the only job
        raise JobError("the job's name is empty: give one, or leave it out if only one job runs on this host")
    if etcd is not None:
        if name is None:
            raise JobError("give the job's name: with --etcd the job is looked for there")
        local = known_at(name, etcd) or _placed_entry(name, etcd)
        token = token_of(options) or (local.token if local is not None else "")
        return JobEntry(
            name=name,
            etcd=etcd,
            token=token,
            pid=os.getpid(),
            embedded=False,
            tls=access_of(options),
            node_tls=node_tls_of(options) or (local.node_tls if local is not None else {}),
        )
    if name is not None:
        found = runtime.find(name)
        if found is not None:
            return _with_given(found, options)
        if ended := _ended_here_text(runtime, name):
            raise UnknownJob(ended)
        if (placed := _placed_entry(name)) is not None:
            return _with_given(placed, options)
        known = ", ".join(e.name for e in runtime.jobs())
        others = f"Running here: {known}." if known else _no_job_text(runtime).partition(". ")[2]
        raise UnknownJob(" ".join(filter(None, (f"No job {name!r} runs here.", others, "Elsewhere: --etcd."))))
    jobs = runtime.jobs()
    if len(jobs) == 1:
        return _with_given(jobs[0], options)
    if not jobs and (elsewhere := _placed_entries(runtime)):
        if len(elsewhere) == 1:
            return _with_given(elsewhere[0], options)
        raise JobError(f"several jobs were submitted here: name one of {', '.join(e.name for e in elsewhere)}")
    if not jobs:
        raise UnknownJob(f"{_no_job_text(runtime)} Elsewhere: give its name and --etcd.")
    raise JobError(f"several jobs run on this host: name one of {', '.join(e.name for e in jobs)}")


def _placed_entries(runtime: Runtime) -> list[JobEntry]:
    """Returns an entry of each job that was submitted here with `--on`, unless this host knows that it has ended."""
    from taskgraph.clusters.placed import find_kept_by, find_placed, placed_names

    def has_ended(name: str) -> bool:
        placed = find_placed(name)
        return runtime.find_finished(name) is not None or (placed is not None and find_kept_by(placed) is not None)

    found = [_placed_entry(name) for name in placed_names() if not has_ended(name)]
    return [entry for entry in found if entry is not None]


def _placed_entry(name: str, etcd: str = "") -> JobEntry | None:
    """Returns the entry of a job that was submitted here with `--on`; None: of no such job.

    Args:
        etcd: only if the job is in this etcd; "": in any.
    """
    from taskgraph.clusters.placed import find_placed

    placed = find_placed(name)
    if placed is None or not placed.etcd or etcd not in ("", placed.etcd):
        return None
    return JobEntry(
        name=name,
        etcd=placed.etcd,
        token=placed.token,
        pid=os.getpid(),
        embedded=False,
        tls=placed.tls,
        node_tls=placed.node_tls,
    )


class NotSubmitted(UnknownJob):
    """The etcd has no such job, or not yet the run that a launcher is to submit."""


def _submitted_later_text(name: str) -> str:
    """Returns the end of a message for a job that its launcher is going to submit; "": no launcher is."""
    from taskgraph.clusters.placed import is_enclosed

    return f": its launcher submits it: `taskgraph logs {name} --node launcher`" if is_enclosed(name) else ""


async def _check_run(coordinator: Coordinator, name: str, run: str) -> None:
    """Raises NotSubmitted if etcd has an ended run of the job, and not the one that this host gave to a launcher."""
    from taskgraph.clusters.placed import find_placed

    placed = find_placed(name)
    if placed is None or (placed.where.get("run") or run) == run:
        return
    status = await coordinator.get(Keys(name).status)
    if status is None or StatusRecord.from_bytes(status.value).state == JobStatus.RUNNING:
        return
    raise NotSubmitted(
        f"etcd at {placed.etcd} has another run of job {name!r}, which has ended (--etcd shows it), and not yet the "
        f"one that was submitted here{_submitted_later_text(name)}"
    )


def _ended_here_text(runtime: Runtime, name: str) -> str:
    """Returns the message that a job has ended, or that its launcher was killed; "": this host knows of no end."""
    kept = runtime.find_finished(name)
    if kept is not None:
        return _has_ended_text(name, kept)
    killed = runtime.find_killed(name)
    return _killed_text(runtime, killed) if killed is not None else ""


def _has_ended_text(name: str, kept: KeptJob) -> str:
    """Returns the message that a job has ended, and what shows more."""
    return f"job {name!r} has ended ({ended_text(kept.state)}): see {see_also_text(name)}"


def _with_given(entry: JobEntry, options: argparse.Namespace) -> JobEntry:
    """Replaces the files of TLS and the token in an entry by those that options name, if any."""
    token = token_of(options) if options.token_file else None  # one of taskgraph.toml may be another job's
    return replace(entry, token=token or entry.token, node_tls=node_tls_of(options) or entry.node_tls)


def known_at(name: str, etcd: str, run: str = "") -> JobEntry | None:
    """Returns this host's entry of a job in that etcd, also after its launcher was killed; None: it has none.

    Args:
        run: the id of the run, if that etcd was asked: it identifies the etcd, whose members may be listed differently.
    """
    known = Runtime().find_any(name)
    return known if known is not None and (known.etcd == etcd or (run and known.run == run)) else None


def _with_what_is_known(entry: JobEntry, run: str) -> JobEntry:
    """Fills a missing token, or missing TLS files, of an entry from what this host knows of the run."""
    local = known_at(entry.name, entry.etcd, run)
    if local is None:
        return entry
    return replace(entry, token=entry.token or local.token, node_tls=entry.node_tls or local.node_tls)


def check_launcher(entry: JobEntry) -> None:
    """Raises UnknownJob if the job's launcher was killed, and its embedded etcd with it."""
    runtime = Runtime()
    if entry.embedded and (killed := runtime.find_killed(entry.name)) is not None:
        raise UnknownJob(_killed_text(runtime, killed))


def ended_with_launcher(entry: JobEntry | None) -> bool:
    """Returns True if the job's embedded etcd has ended with its launcher; False if it has none."""
    if entry is None or not entry.embedded:
        return False
    found = Runtime().find(entry.name)
    return found is None or found.etcd != entry.etcd  # another run has the name


async def wait_until_launcher_gone(entry: JobEntry | None) -> None:
    """Waits until the job's embedded etcd has ended with its launcher; for ever, if the job has none."""
    while not ended_with_launcher(entry):  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(_GONE_POLL_S)


def _no_job_text(runtime: Runtime) -> str:
    """Says that no job runs here, and which ended. Names the folder, since jobs of other users are in other folders."""
    ended = runtime.finished_names()
    if not ended:
        return f"No job was started on this host (looked in {runtime.root})."
    more = ", ..." if len(ended) > _ENDED_NAMED else "."
    return f"No job runs here. Ended here: {', '.join(ended[:_ENDED_NAMED])}{more}"


def _killed_text(runtime: Runtime, entry: JobEntry) -> str:
    """Returns the message that the launcher of a job was killed, and what may be left."""
    logs = runtime.left_logs(entry.name)
    return (
        f"the launcher of job {entry.name!r} (process {entry.pid}) was killed"
        + (", and its etcd ended with it" if entry.embedded else f"; the job may go on: look with --etcd {entry.etcd}")
        + (f"; logs of its nodes: {logs}" if logs is not None else "")
    )


def ended_text(state: str) -> str:
    """Returns how a job ended, as the predicate of a sentence."""
    return {JobStatus.CANCELLED: "was cancelled", "deleted": "was deleted", "": "ended"}.get(state, state)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that end a command in good order: Ctrl-C, SIGTERM, and SIGHUP unless under `nohup`."""
    hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)


def on_ending_signals(react: Callable[[int], object]) -> None:
    """Makes the running loop call `react` with each of `ending_signals` that comes."""

    def handle(number: int) -> None:
        if number == signal.SIGHUP:
            drop_terminal()
        react(number)

    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, handle, number)


def obey_ending_signals(*, finished: Callable[[], bool], obeyed: Callable[[], bool], obey: Callable[[], None]) -> None:
    """Makes the running loop call `obey` on each of `ending_signals` that does not repeat another (`StopSignals`).

    After the job has finished, the first signal only prints a warning: ending now would lose the results.

    Args:
        finished: has the job finished?
        obeyed: is the command ending already?
    """
    orders, spared = StopSignals(), False

    def react(number: int) -> None:
        nonlocal spared
        if number == signal.SIGHUP and (obeyed() or spared):  # closing the terminal after Ctrl-C is no second order
            return
        if not orders.is_new(number):
            return
        if finished() and not obeyed() and not spared:
            spared = True
            say("the job has finished, and its results are being collected; once more to end without them", anew=True)
            return
        obey()

    on_ending_signals(react)


def restore_signals() -> None:
    """Lets `ending_signals` end this process again, as before `on_ending_signals`: only printing is left."""
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.remove_signal_handler(number)
    obey_sigterm()


def drop_terminal() -> None:
    """Redirects output from a closed terminal to /dev/null, where writing is no error."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(null, descriptor)
    finally:
        os.close(null)


def see_also_text(name: str) -> str:
    """Returns the commands that show more of a job."""
    return f"`taskgraph status {name}`, `taskgraph events {name}`"


@asynccontextmanager
async def _watching_quietly(entry: JobEntry) -> AsyncIterator[None]:
    """Drops warnings about broken watches of an embedded etcd: it ends with its launcher, which the command reports."""
    log = logging.getLogger("taskgraph.coordination.etcd.watch")
    before = log.level
    if entry.embedded:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@asynccontextmanager
async def reach(options: argparse.Namespace) -> AsyncIterator[FoundJob]:
    """Connects to the job's etcd and reads its spec.

    Raises:
        UnknownJob: the job is not there, or it has just ended with its embedded etcd.
    """
    entry = find_entry(options)
    try:
        async with _watching_quietly(entry), opened(entry.etcd, entry.tls) as coordinator:
            keys = Keys(entry.name)
            kv = await coordinator.get(keys.spec)
            if kv is None:
                raise NotSubmitted(f"etcd at {entry.etcd} has no job {entry.name!r}{_submitted_later_text(entry.name)}")
            spec = decode_key(JobSpec.from_bytes, kv, keys)
            if not options.etcd:
                await _check_run(coordinator, entry.name, spec.run)
            yield FoundJob(entry.name, _with_what_is_known(entry, spec.run), spec, coordinator)
    except CoordinationError as error:
        if not ended_with_launcher(entry):
            from taskgraph.clusters.placed import find_kept_by, find_placed, how_to_run

            placed = find_placed(entry.name) if etcd_of(options) is None else None
            if placed is not None and (kept := find_kept_by(placed)) is not None:  # its etcd ended with it
                raise UnknownJob(_has_ended_text(entry.name, kept)) from error
            if etcd_of(options) is None and (text := how_to_run(entry.name, options.command)):
                error.add_note(text)
            raise
        again = Runtime().find(entry.name) is not None
        text = f"another run of job {entry.name!r} has begun" if again else _ended_here_text(Runtime(), entry.name)
        raise UnknownJob(text or f"job {entry.name!r} has just ended") from error
