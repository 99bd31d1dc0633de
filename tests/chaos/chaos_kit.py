"""A job of real nodes on a real etcd, faults at it, and the judgement: the same bits, every item once, nothing left.

async with chaos("--nodes", "4", epochs=60) as job:
    await job.began()
    job.inject("kill,commit")
    await job.injected()
    job.judge(await job.done(), failovers=1)
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cli_kit import Cli, Command, Done, kill_at_once, shell

import taskgraph as tg
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.node.inject import VARIABLE
from taskgraph.protocol.placement import CurrentReplicas, Seat, place
from taskgraph.protocol.records import NodeRecord
from taskgraph.protocol.view import JobView
from taskgraph.results import plain_value

DRIVER = Path(__file__).parent / "drivers" / "ledgered.py"
NAME = "ledgered"
LIMIT_S = 100.0
"""Nothing here takes longer on a machine that is busy; a run that hangs says what it waits for."""
_LOOK_S = 2.0
_AHEAD = 200
"""Epochs of the failure-free run that are computed at a time."""
_OF_THE_NUMBERS = ("tasks", "talk", "flying", "ballast")
"""Options that change the result."""


@cache
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ledgered", DRIVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Calm:
    """The run without faults, made in one process, in step: what every task has after every epoch."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._epochs = 0
        self._values: dict[int, dict[int, dict[str, Any]]] = {}
        self._reports: list[dict[str, Any]] = []

    def after(self, epochs: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Values and reports as the JSON of a result has them, of a run of so many epochs."""
        if epochs > self._epochs:
            self._run(-(-epochs // _AHEAD) * _AHEAD)
        return {str(task): found[epochs] for task, found in self._values.items()}, self._reports[:epochs]

    def _run(self, epochs: int) -> None:
        module, values = driver(), self._values

        class Told(module.kind(talk=self._options["talk"], flying=self._options["flying"])):  # type: ignore[misc]
            ballast = self._options["ballast"]

            def on_commit(self, number: int, state: dict[str, Any]) -> None:
                values.setdefault(self.task_id, {})[number + 1] = plain_value(module.shown(state))

        job = tg.Job(
            tasks=self._options["tasks"], epochs=epochs, builder=Told, topology=module.TOPOLOGY, name=NAME, backups=0
        )
        self._reports = json.loads(tg.run(job, nodes=0).to_json())["reports"]
        self._epochs = epochs


@cache
def calm(options: frozenset[tuple[str, Any]]) -> Calm:
    return Calm(dict(options))


def judge(
    result: dict[str, Any], *, tasks: int = 7, talk: bool = False, flying: bool = False, ballast: int = 0
) -> None:
    """The bits of the failure-free run, and a ledger in which every item is once, in its order."""
    epochs = result["epochs"]
    options = {"tasks": tasks, "talk": talk, "flying": flying, "ballast": ballast}
    values, reports = calm(frozenset(options.items())).after(epochs)
    for task in range(tasks):
        got = result["values"][str(task)]
        names, consumed = driver().expected_names(task, tasks, epochs, talk=talk)
        assert (got["names"], got["consumed"]) == (names, consumed), f"task {task}: an item twice, or missing"
    assert result["values"] == values, "not the bits of the run without failures"
    assert result["reports"] == reports, "every epoch is reported once, with the same numbers"


class Chaos:
    """One running job, seen through its etcd."""

    driver = DRIVER
    name = NAME

    def __init__(
        self, cli: Cli, command: Command, nodes: int, options: dict[str, Any], faults: Path, etcd: str
    ) -> None:
        self.cli = cli
        self.command = command
        self.options = options
        self._nodes = nodes
        self._faults = faults
        self._etcd = etcd
        self._keeper: ViewKeeper | None = None
        self._coordinator: EtcdCoordinator | None = None
        self.followed = asyncio.Event()

    # -- what is there ----------------------------------------------------------------------------

    @property
    def view(self) -> JobView:
        assert self._keeper is not None, "await began() first"
        return self._keeper.view

    @property
    def epoch(self) -> int:
        return self.view.epoch.record.epoch if self.view.epoch is not None else -1

    def primary(self, task: int) -> NodeRecord:
        node = self.view.primary_node(task)
        assert node is not None
        return self.view.nodes[node].record

    def backups(self, task: int) -> list[NodeRecord]:
        first = self.view.primary_node(task)
        return [self.view.nodes[n].record for n in self.view.in_sync(task) if n != first and n in self.view.nodes]

    def nodes(self) -> list[NodeRecord]:
        return [versioned.record for versioned in self.view.nodes.values()]

    def leads(self) -> list[int]:
        """The tasks, by primary: those whose primaries are on different nodes."""
        by_node: dict[str, int] = {}
        for task, primary in sorted(self.view.primaries.items()):
            by_node.setdefault(primary.record.node, task)
        return sorted(by_node.values())

    # -- waiting ----------------------------------------------------------------------------------

    async def until(self, what: str, true: Callable[[JobView], bool], limit_s: float = LIMIT_S) -> None:
        """Waits for the job to be so; fails with what was waited for and what the job said."""
        assert self._keeper is not None
        try:
            async with asyncio.timeout(limit_s):
                while not true(self.view) and self.view.running:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await self._keeper.wait_until(lambda view: true(view) or not view.running)
                            break
                    with contextlib.suppress(tg.errors.CoordinationError):  # etcd may be away
                        await self._keeper.refresh()  # what is silent is left by whoever asks, not by whoever listens
        except TimeoutError:
            raise AssertionError(f"waited {limit_s:g} s for {what}, in vain:\n{await self.story()}") from None
        assert true(self.view), f"the job ended before {what}:\n{await self.story()}"

    async def last_second_of(self, lease: int) -> float:
        """Returns when a lease, not renewed any more, has about a second left; and the last time at which it had."""
        assert self._coordinator is not None
        had_at = 0.0
        while True:
            asked_at = time.monotonic()
            if not await self._coordinator.lease_left(lease):
                return had_at
            had_at = asked_at
            await asyncio.sleep(0.02)

    async def until_epoch(self, number: int) -> None:
        await self.until(f"epoch {number}", lambda view: view.epoch is not None and view.epoch.record.epoch >= number)

    async def settled(self, nodes: int | None = None) -> None:
        """Waits until every task has all its replicas in sync on nodes that live, so many nodes are there, and
        nothing moves any more: whoever is primary then stays it until the next fault."""
        replicas = 1 + self.options.get("backups", 1)

        def is_so(view: JobView) -> bool:
            if nodes is not None and len(view.nodes) != nodes:
                return False
            return (
                len(view.primaries) == self.options.get("tasks", 7)
                and all(
                    primary.record.node in view.nodes
                    and len([n for n in view.in_sync(task) if n in view.nodes]) >= min(replicas, len(view.nodes))
                    for task, primary in view.primaries.items()
                )
                and self._placed(view)
            )

        await self.until("all replicas in sync, where they stay", is_so)

    def _placed(self, view: JobView) -> bool:
        """Whether placement wishes for nothing that is not so."""
        seats = [Seat(n, v.record.host, v.record.devices) for n, v in view.nodes.items() if not v.record.draining]
        held = {t: CurrentReplicas(view.primary_node(t), tuple(view.in_sync(t))) for t in view.primaries}
        wishes = place(seats, len(held), self.options.get("backups", 1), held)
        return all(
            (wish.primary, {wish.primary, *wish.backups}) == (now.primary, {now.primary, *now.members})
            for task, wish, now in ((task, wish, held[task]) for task, wish in wishes.items())
        )

    async def began(self) -> None:
        """Waits for the job's first epochs, with all its nodes, and begins to follow it."""
        await self.command.until("the job began")
        await asyncio.wait_for(self.followed.wait(), LIMIT_S)
        await self.settled(self._nodes)

    # -- faults -----------------------------------------------------------------------------------

    def inject(self, *names: str) -> None:
        """Faults at named moments; see `taskgraph/node/inject.py`. They are there at once and together."""
        for name in names:
            (self._faults / f".{name}").touch()
        for name in names:
            (self._faults / f".{name}").rename(self._faults / name)

    def release(self, name: str) -> None:
        """Ends a hold."""
        (self._faults / name).unlink()

    async def injected(self, limit_s: float = LIMIT_S) -> None:
        """Waits until every fault that was put has happened."""
        try:
            async with asyncio.timeout(limit_s):
                while left := sorted(path.name for path in self._faults.iterdir()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"the job never came to {left}:\n{await self.story()}") from None

    async def reinforce(
        self, count: int = 1, *arguments: str, python: tuple[str, ...] = ("-m", "taskgraph")
    ) -> Command:
        """More nodes, from a launcher of their own."""
        before = set(self.view.nodes)  # dead nodes among them may vanish meanwhile
        command = await self.cli.start(
            "launch", self.name, "--nodes", str(count), *arguments, python=python, **{VARIABLE: str(self._faults)}
        )
        await self.until("more nodes", lambda view: not before.issuperset(view.nodes))
        return command

    # -- the end ----------------------------------------------------------------------------------

    async def story(self) -> str:
        """What the job said, for a failure's message."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                told = await self.cli("events", self.name)
                state = await self.cli("status", self.name)
                return f"{told.out}{told.err}\n{state.out}{state.err}"
        return "(neither events nor status answered within 10 s)"

    async def done(self, limit_s: float = LIMIT_S) -> Done:
        """The command's end. A hang fails here, with what the job waits for."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.command.done(limit_s + 1)
        except TimeoutError:
            raise AssertionError(f"it did not end within {limit_s:g} s:\n{await self.story()}") from None

    async def finishes(
        self, *, failovers: int = 0, restarts: int | None = 0, limit_s: float = LIMIT_S
    ) -> dict[str, Any]:
        """The job is told to finish, ends well and is judged; nothing of it is left.

        Args:
            failovers: at least so many.
            restarts: how many epochs began again; None: any number.
        """
        (self.cli.root / "finish").touch()
        done = await self.done(limit_s)
        assert done.code == 0, done.err
        result: dict[str, Any] = json.loads(done.out.splitlines()[-1])
        numbers = {name: value for name, value in self.options.items() if name in _OF_THE_NUMBERS}
        await asyncio.to_thread(judge, result, **numbers)  # the run to compare with wants an event loop of its own
        assert result["failovers"] >= failovers, done.err
        assert restarts is None or result["restarts"] == restarts, done.err
        return result

    async def follow(self) -> None:
        """Keeps `view` up to date, from the moment the job is found on."""
        entry = await self._entry()
        async with await EtcdCoordinator.connect(self._etcd or entry.etcd) as coordinator:
            keeper = ViewKeeper(coordinator, self.name, refresh_s=0.1)
            await keeper.load()
            self._keeper, self._coordinator = keeper, coordinator
            self.followed.set()
            await keeper.run()

    async def _entry(self) -> JobEntry:
        runtime = Runtime(self.cli.root / "run" / "taskgraph")
        async with asyncio.timeout(LIMIT_S):
            while (entry := runtime.find(self.name)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return entry


@contextlib.asynccontextmanager
async def chaos(
    *arguments: str,
    kind: type[Chaos] = Chaos,
    etcd: str = "",
    seen_etcd: str = "",
    env: dict[str, str] | None = None,
    python: tuple[str, ...] = ("-m", "taskgraph"),
    **options: Any,
) -> AsyncIterator[Chaos]:
    """Runs the job; afterwards no process, socket or temporary file of it is left.

    Args:
        arguments: of `taskgraph run`.
        kind: the job, and how its end is judged.
        etcd: its endpoints; "": an etcd of its own.
        seen_etcd: where the test itself looks, where that is another way to the same.
        env: more of the environment, for what is started.
        python: what Python is called with; see `netns_kit`.
        options: of the driver.
    """
    async with shell() as cli:
        faults = cli.root / "faults"
        faults.mkdir()
        options.setdefault("pace_s", 0.02)
        options["finish"] = cli.root / "finish"
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        words += ["--etcd", etcd] if etcd else []
        command = await cli.start(
            "run",
            str(kind.driver),
            "--json",
            *words,
            *arguments,
            python=python,
            **{VARIABLE: str(faults), **(env or {})},
        )
        nodes = int(arguments[arguments.index("--nodes") + 1])
        job = kind(cli, command, nodes, options, faults, seen_etcd or etcd)
        try:
            async with asyncio.TaskGroup() as group:
                following = group.create_task(_followed(job))
                yield job
                following.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await cli.nothing_left()


async def _followed(job: Chaos) -> None:
    """A job whose own etcd ends with it is followed no further."""
    with contextlib.suppress(tg.errors.CoordinationError):
        await job.follow()


@contextlib.contextmanager
def frozen(*nodes: NodeRecord) -> Iterator[None]:
    """These processes do not run within the block."""
    for node in nodes:
        os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGCONT)


def kill(*nodes: NodeRecord, number: signal.Signals = signal.SIGKILL) -> None:
    """All of them at once."""
    pids = {node.pid for node in nodes}
    if number == signal.SIGKILL:
        kill_at_once(pids)
        return
    for pid in pids:
        os.kill(pid, number)
