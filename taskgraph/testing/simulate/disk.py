"""Simulates the disk for a seed's checkpoints: it may be slow or full for a while, and lose or damage files.

Only the disk is simulated; the code above `checkpoint.places.Place` is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar
from unittest import mock

from taskgraph.checkpoint.places import Bytes
from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.launch import resuming
from taskgraph.testing.simulate.loop import own_time
from taskgraph.testing.simulate.threads import FunctionTiming, InlineThreads

__all__ = ["FileThreads", "NodeDisk", "SimDisk", "launcher_uses"]

R = TypeVar("R")


class SimDisk:
    """The shared disk: its files, and their faults.

    Args:
        moment: called with the name of a moment, and the node.
        on_write: called before a node writes a file, with the path and the node.
        on_remove: called before a node removes a path, with the path and the node.
    """

    def __init__(
        self,
        rng: random.Random,
        moment: Callable[[str, str], None],
        on_write: Callable[[str, str], None],
        on_remove: Callable[[str, str], None],
    ) -> None:
        self.moment = moment
        self.on_write = on_write
        self.on_remove = on_remove
        self._files: dict[str, memoryview] = {}
        self._rng = rng
        self.usual_s = rng.choice((0.0, 0.002, 0.02, 0.1))
        """The longest duration of a call without faults."""
        self.extra_s = 0.0
        self.lose_next = 0
        """The number of next writes that the disk acknowledges, but loses, truncates or corrupts."""
        self.damaged: set[str] = set()
        """Files that the disk has lost, truncated or corrupted."""
        self.lost_in_use: set[str] = set()
        """Checkpoints that lost a file while the job rolled back to them, after a node had checked them."""
        self._lag_rng: random.Random | None = None
        self._lag_s = 0.0
        self._created_at: dict[str, float] = {}  # file -> when it was created
        self._removed: list[tuple[str, float, float, int]] = []  # removed files: name, from when, until when, size

    def mend(self) -> None:
        """Makes the disk as fast as usual again."""
        self.extra_s = 0.0

    def for_node(self, node: str) -> NodeDisk:
        """Returns a node's access to this disk."""
        return NodeDisk(self, node)

    def set_lag(self, rng: random.Random | None, lag_s: float = 0.0) -> None:
        """Makes later listings up to `lag_s` old; None makes them current."""
        self._lag_rng, self._lag_s = rng, lag_s

    @property
    def lists_late(self) -> bool:
        """True if listings may be outdated."""
        return self._lag_rng is not None

    def _list_files(self, start: str) -> dict[str, int | None]:
        """Lists the files whose names begin with `start`: name -> size."""
        found: dict[str, int | None]
        if self._lag_rng is None:
            found = {name: data.nbytes for name, data in self._files.items() if name.startswith(start)}
            return found
        at = own_time() - self._lag_s * self._lag_rng.random()
        found = {
            name: data.nbytes
            for name, data in self._files.items()
            if name.startswith(start) and self._created_at[name] <= at
        }
        found |= {
            name: size for name, since, until, size in self._removed if name.startswith(start) and since <= at < until
        }
        return found

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, or loses or damages it if `lose_next` says so."""
        self._created_at.setdefault(path, own_time())
        if self.lose_next > 0:
            self.lose_next -= 1
            self._damage(path, data)  # a lost write keeps the file's old content
            return
        self.damaged.discard(path)
        self._files[path] = memoryview(data)

    def _damage(self, path: str, data: bytes) -> bool:
        """Draws how a file becomes damaged: truncates it, flips a bit, or returns False: the caller must lose it."""
        self.damaged.add(path)
        became = self._rng.randrange(3)
        if became == 0:
            self._files[path] = memoryview(data[: self._rng.randrange(len(data))])
        if became == 1:  # the length stays: only a read shows the damage
            at = self._rng.randrange(len(data))
            self._files[path] = memoryview(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        return became < 2

    def damage_checkpoint(self, checkpoint: str) -> str:
        """Loses, truncates or corrupts a file of a checkpoint. Returns its path; "" if the checkpoint has no file."""
        path = self._rng.choice(sorted(path for path in self._files if f"/{checkpoint}/" in path) or [""])
        if path and not self._damage(path, bytes(self._files[path])):
            self.remove(path)
        return path

    def read(self, path: str) -> memoryview:
        """Returns a file's content. Raises FileNotFoundError."""
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._files[path]

    def names(self, path: str) -> list[str]:
        """Lists the names directly below a path."""
        start = f"{path}/"
        return sorted({name[len(start) :].split("/")[0] for name in self._list_files(start)})

    def file_sizes(self, path: str) -> dict[str, int | None]:
        """Lists all files below a path: name from there on -> size in bytes."""
        start = f"{path}/"
        return {name[len(start) :]: size for name, size in self._list_files(start).items()}

    def remove(self, path: str) -> None:
        """Removes a file, or all files below a path."""
        now = own_time()
        for name in [n for n in self._files if n == path or n.startswith(f"{path}/")]:
            self._removed.append((name, self._created_at.pop(name), now, self._files.pop(name).nbytes))


class NodeDisk:
    """One node's access to the disk: implements `checkpoint.places.Place`."""

    def __init__(self, disk: SimDisk, node: str) -> None:
        self._disk = disk
        self._node = node
        self.full = False
        self.extra_s = 0.0

    def __str__(self) -> str:
        return "simulated"

    def mend(self) -> None:
        """Makes this node's access as fast as usual again, with space left."""
        self.full, self.extra_s = False, 0.0

    def max_call_s(self) -> float:
        """Returns the longest duration of a call now."""
        return self._disk.usual_s + self._disk.extra_s + self.extra_s

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        data = b"".join(bytes(part) for part in parts)
        if self.full:
            raise OSError(errno.ENOSPC, "no space left", path)
        self._disk.on_write(path, self._node)
        self._disk.write(path, data)

    def read(self, path: str, limit_bytes: int) -> memoryview:
        return self._disk.read(path)

    def names(self, path: str) -> list[str]:
        return self._disk.names(path)

    def file_sizes(self, path: str) -> dict[str, int | None]:
        sizes = self._disk.file_sizes(path)
        self._disk.moment("place listed", self._node)
        return sizes

    def remove(self, path: str) -> None:
        self._disk.on_remove(path, self._node)
        self._disk.remove(path)
        self._disk.moment("place cleared", self._node)

    def remove_empty(self, path: str) -> None:
        pass  # there are no directories


class FileThreads(InlineThreads):
    """The threads that call the disk. A call of a killed process may take effect or not."""

    def __init__(
        self, rng: random.Random, disk: NodeDisk, timing: FunctionTiming | None, late_s: Callable[[], float]
    ) -> None:
        super().__init__(rng, 0.0, timing, late_s)
        self._disk = disk

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        self._compute_s = self._disk.max_call_s()
        return super().run(function)


@contextlib.contextmanager
def launcher_uses(disk: SimDisk, rng: random.Random, timing: FunctionTiming | None) -> Iterator[None]:
    """Within this block, the launcher's code reads checkpoints from the simulated disk, with delays as for nodes."""
    own = disk.for_node("launcher")
    threads = FileThreads(rng, own, timing, lambda: 0.0)
    with (
        mock.patch.object(resuming, "CheckpointStore", partial(CheckpointStore, place=own)),
        mock.patch.object(resuming, "PooledThreads", lambda name, limit: threads),
    ):
        yield
