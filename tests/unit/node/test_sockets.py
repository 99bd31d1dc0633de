"""The files of a node's sockets are removed while it runs: it listens again, and open connections go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from taskgraph.errors import TaskGraphError
from taskgraph.graph.values import verify
from taskgraph.node import sockets
from taskgraph.node.control import ControlServer
from taskgraph.node.sockets import keep_sockets
from taskgraph.observe.control_client import ControlClient
from taskgraph.observe.events import Event, EventLog
from taskgraph.protocol.messages import Accepted, Call, Reply, Seal, Stamp
from taskgraph.settings import Settings
from taskgraph.system.files import LockedFolder, restore_folder
from taskgraph.transport.api import Peer
from taskgraph.transport.stream import StreamTransport

TOKEN = bytes(32)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, as sockets need."""
    monkeypatch.setattr(sockets, "_LOOK_S", 0.01)
    root = tempfile.mkdtemp(prefix="tg-")
    made = Path(root) / "s"
    made.mkdir(mode=0o700)
    yield made
    shutil.rmtree(root)


async def serve(caller: str, call: Call) -> Reply:
    return Accepted(1)


class Listening:
    """A node's transport and control service, and the keeper of their sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.heard = asyncio.Event()
        self.events = EventLog("n1")
        self.events.listen(self._hear)
        self.control = ControlServer(self.events, TOKEN)
        self.transport = transport(folder)

    def _hear(self, event: Event) -> None:
        assert event.kind == "sockets"
        self.told.append(event.text)
        self.heard.set()

    async def next(self) -> str:
        async with asyncio.timeout(30):
            await self.heard.wait()
        self.heard.clear()
        return self.told[-1]

    async def asked(self) -> str:
        """The control service's answer to a new connection."""
        async with ControlClient(f"unix:{self.folder}/c", TOKEN) as client:
            return await asked(client)


async def asked(client: ControlClient) -> str:
    with pytest.raises(TaskGraphError) as caught:
        await client.status()
    return "it answers" if "the node is starting" in str(caught.value) else type(caught.value).__name__


def transport(folder: Path) -> StreamTransport:
    return StreamTransport(Settings(), TOKEN, job="fit", verify=verify, unix_dir=folder, tcp_host=None)


async def called(caller: StreamTransport, callee: StreamTransport) -> Reply:
    return await caller.call(Peer("n1", callee.endpoints), Seal(Stamp(1, 1), 1, 1), timeout_s=10)


@contextlib.asynccontextmanager
async def started(node: str, folder: Path) -> AsyncIterator[StreamTransport]:
    made = transport(folder)
    await made.start(node, serve, lambda node: None)
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[Listening]:
    made = Listening(folder)
    await made.transport.start("n1", serve, lambda node: None)
    await made.control.start(unix_path=folder / "c")
    keeping = asyncio.ensure_future(keep_sockets(folder, (made.transport, made.control), made.events))
    try:
        yield made
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await made.control.stop()
        await made.transport.close()


@pytest.mark.parametrize("how", ["sockets", "folder", "all"])
async def test_removed_sockets_come_back(base: Path, how: str) -> None:
    held = LockedFolder(base, "")
    async with (
        started("n2", base / "before") as before,
        started("n3", base / "after") as after,
        listening(held.path / "1") as node,
        ControlClient(f"unix:{node.folder}/c", TOKEN) as stands,
    ):
        assert await asked(stands) == await node.asked() == "it answers"
        await called(before, node.transport)
        if how == "sockets":
            for path in node.folder.iterdir():
                path.unlink()
        else:
            shutil.rmtree(node.folder if how == "folder" else base)
        text = await node.next()
        what = f"the sockets of nodes in {held.path} were removed, as a cleaner of temporary files does"
        assert text == f"{what}: they listen there anew"
        assert await asked(stands) == await node.asked() == "it answers"
        await called(before, node.transport)
        await called(after, node.transport)
        for path in (node.folder, node.folder.parent, base):
            assert path.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in node.folder.iterdir()} == {0o600}
        another = LockedFolder(base, "")  # of another launcher, which removes what killed ones left
        assert await node.asked() == "it answers"
        another.remove()
        assert node.told == [text], "told once"
    assert not list(node.folder.iterdir())
    held.remove()


async def test_failed_sockets_are_retried_and_reported_once(base: Path) -> None:
    async with listening(base / "launcher" / "1") as node:
        shutil.rmtree(base)
        os.mknod(base)  # a file is in the way
        assert "nothing can connect to them: [Errno 1] it must be a directory" in await node.next()
        assert await node.asked() != "it answers"
        os.unlink(base)
        assert (await node.next()).endswith("they listen there anew")
        assert len(node.told) == 2 and await node.asked() == "it answers"


async def test_own_removal_is_no_loss(base: Path) -> None:
    """Closing may take long, and is not reported as a removal."""
    async with listening(base / "launcher" / "1") as node:
        await node.transport.close()
        assert not node.transport.unreachable, "it is looked at until the node has written its last events"
        await node.control.stop()
        assert not node.control.unreachable
        assert not list(node.folder.iterdir())


def test_foreign_folder_is_refused(base: Path) -> None:
    (base / "elsewhere").mkdir()
    (base / "launcher").symlink_to("nowhere")
    with pytest.raises(PermissionError, match="must be a directory of your own"):
        restore_folder(base / "launcher" / "1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_other_users_folder_is_refused(base: Path) -> None:
    os.chown(base, 12345, -1)
    with pytest.raises(PermissionError, match="must be a directory of your own"):
        restore_folder(base / "launcher" / "1")
    assert not list(base.iterdir())
