"""The command line as a user has it: real processes, a runtime directory of their own, and a look for what is left."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from processes_kit import becomes, running

from taskgraph.cli import main

DRIVER = Path(__file__).parent / "drivers" / "sums.py"
LIMIT_S = 100.0
QUICK = ("events", "kill", "result", "shards")
"""Commands that are called in this process: one of their own takes 0.3 s of processor time for each call."""
_IN_PROCESS = threading.Lock()
TIMEOUTS_S = (4, 12, 60)
"""For `--timeout` of a job that has to begin before, one after another: how long that takes depends on the machine."""
PATIENT = ("--set", "start_wait_s=100", "--set", "admit_wait_s=100", "--set", "lease_ttl_s=60")
"""A job begins with all its nodes and backups, however slow the machine is, and loses none that stands still."""


def sums(tasks: int = 7, epochs: int = 6) -> list[int]:
    """What the driver computes."""
    return [epoch * sum(range(tasks)) for epoch in range(epochs)]


def printed(epochs: int = 6) -> str:
    """The same as a run prints it."""
    return "".join(f"{value}\n" for value in sums(epochs=epochs))


def kill_at_once(pids: Iterable[int]) -> None:
    """SIGKILL for all: none of them does anything more once another is gone, though this process may be held up."""
    pids = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Done:
    code: int
    out: str
    err: str


@dataclass
class Command:
    """A command that runs."""

    process: asyncio.subprocess.Process
    err: list[str] = field(default_factory=list)
    out: list[str] = field(default_factory=list)

    async def until(self, *texts: str, out: bool = False) -> str:
        """The next line of standard error (or output) that contains one of `texts`."""
        stream = self.process.stdout if out else self.process.stderr
        lines = self.out if out else self.err
        assert stream is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while line := (await stream.readline()).decode():
                    lines.append(line)
                    if any(text in line for text in texts):
                        return line
        raise AssertionError(f"it ended, or took too long, without {' or '.join(map(repr, texts))}: {''.join(lines)}")

    async def done(self, limit_s: float = LIMIT_S) -> Done:
        assert self.process.stdout is not None and self.process.stderr is not None
        streams = _read(self.process.stdout, self.out), _read(self.process.stderr, self.err)
        try:
            async with asyncio.timeout(limit_s):
                *_, code = await asyncio.gather(*streams, self.process.wait())
        except TimeoutError:
            raise AssertionError(f"it did not end within {limit_s:g} s: {''.join(self.err)}") from None
        return Done(code, "".join(self.out), "".join(self.err))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


async def _read(stream: asyncio.StreamReader, found: list[str]) -> None:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    while piece := await stream.read(1 << 16):
        found.append(decode(piece))


class Cli:
    """One user's shell."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cwd = root / "cwd"
        self.gate = root / "gate"
        for folder in ("cwd", "run", "tmp"):
            (root / folder).mkdir(mode=0o700)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TASKGRAPH_", "OMP_"))},
            "TASKGRAPH_RUNTIME_DIR": str(root / "run"),
            "TMPDIR": str(root / "tmp"),
        }
        self._commands: list[Command] = []

    async def start(self, *arguments: str, python: tuple[str, ...] = ("-m", "taskgraph"), **env: str) -> Command:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *python, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.cwd,
            env={**self.env, **env},
        )
        command = Command(process)
        self._commands.append(command)
        return command

    async def __call__(self, *arguments: str, python: tuple[str, ...] = (), **env: str) -> Done:
        if arguments[0] in QUICK and not python and not env:
            return await self.called(*arguments)
        return await (await self.start(*arguments, python=python or ("-m", "taskgraph"), **env)).done()

    async def called(self, *arguments: str) -> Done:
        """Calls a command in this process."""
        return await asyncio.to_thread(self._called, *arguments)

    async def paused(self, *arguments: str, epoch: int = 2) -> Command:
        """A run that stops in this epoch, where task 0 computes until `open` is called."""
        paused = self.root / "paused"
        paused.unlink(missing_ok=True)
        options = ("-o", f"pause_at={epoch}", "-o", f"gate={self.gate}", "-o", f"paused={paused}")
        command = await self.start("run", str(DRIVER), *PATIENT, *options, *arguments)
        await command.until(f"epoch {epoch - 1}/", f"epoch {epoch} waits")  # no commit if another node leads just then
        await becomes(paused.exists, LIMIT_S)
        return command

    async def status(self, job: str, reached: Callable[[dict[str, Any]], bool] = bool, *arguments: str) -> Any:
        """What `status --json` says of a job, once it says what is `reached`."""

        def is_so(done: Done) -> bool:
            return done.code == 0 and reached(json.loads(done.out))

        return json.loads((await self.once(is_so, "status", job, "--json", *arguments)).out)

    async def held(self, job: str, *, backups: int = 1) -> Any:
        """The status once every task has its backups, on nodes that answer: on a busy machine they come late."""

        def is_so(now: dict[str, Any]) -> bool:
            living = {node["name"] for node in now["nodes"] if node["answers"]}
            return all(len(living & set(task["in_sync"])) > backups for task in now["tasks"])

        return await self.status(job, is_so)

    async def registered(self, job: str, node: str) -> None:
        """Returns once this node belongs to the job, be it without a task or a state."""
        await self.status(job, lambda now: node in {known["name"] for known in now["nodes"]})

    async def once(self, reached: Callable[[Done], bool], *arguments: str) -> Done:
        """What a command says, which is called until it says what is `reached`."""
        done = Done(0, "", "")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while not reached(done := await self.called(*arguments)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                return done
        raise AssertionError(f"{' '.join(arguments)} does not say so within {LIMIT_S:g} s: {done}")

    def _called(self, *arguments: str) -> Done:
        names = ("TASKGRAPH_RUNTIME_DIR", "TMPDIR")
        with (
            _IN_PROCESS,
            contextlib.chdir(self.cwd),
            patch.dict(os.environ, {name: self.env[name] for name in names}),
            patch.object(sys, "path", [*filter(None, self.env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            try:
                code = main(arguments)
            except SystemExit as error:  # of argparse
                code = int(error.code or 0)
        return Done(code, out.getvalue(), err.getvalue())

    def open(self) -> None:
        self.gate.touch()

    def processes(self) -> dict[int, str]:
        """Every process that was started from here and lives: pid -> command line."""
        found = {}
        mark = f"TASKGRAPH_RUNTIME_DIR={self.root / 'run'}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    async def node_processes(self, count: int) -> list[int]:
        """Waits until this many node processes live, and no fork server that looks as they do; returns their pids."""

        def nodes() -> list[int]:
            return [pid for pid, command in self.processes().items() if "taskgraph.node.process" in command]

        await becomes(lambda: len(nodes()) == count)
        return nodes()

    def files(self) -> list[str]:
        """What is left in the runtime and temporary directories, without locks and copies of finished jobs."""
        roots = (self.root / "run", self.root / "tmp")
        left = [str(path.relative_to(self.root)) for root in roots for path in root.rglob("*")]
        lasting = ("run/taskgraph", "run/taskgraph/jobs", "run/taskgraph/placed", "run/taskgraph/s")
        kept = ("run/taskgraph/finished", "run/taskgraph/locks", "run/taskgraph/maps")
        return [path for path in left if path not in lasting and not path.startswith(kept)]

    async def nothing_left(self) -> None:
        """Fails where a process, a socket or any other file of a job is left."""
        left = self.processes()

        def none() -> bool:
            nonlocal left
            if not any(map(running, left)):  # a look at all processes takes 10 ms of processor time
                left = self.processes()
            return not left

        with contextlib.suppress(TimeoutError):
            await becomes(none)
        assert not (processes := self.processes()), f"left: {processes}"
        assert not (files := self.files()), f"left: {files}"

    async def end(self) -> None:
        for command in self._commands:
            if command.process.returncode is None:
                command.process.kill()
            await command.process.communicate()  # also of one that ended while nobody listened
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def shell() -> AsyncIterator[Cli]:
    # Not pytest's directory: a unix socket's path is limited to 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="tg-"))
    cli = Cli(root)
    try:
        yield cli
    finally:
        await cli.end()
        shutil.rmtree(root, ignore_errors=True)
