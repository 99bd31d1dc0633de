"""Where a seed's checkpoints lie: a place that all its nodes see, and that is slow, full or forgetful for a while.

The files are real, as is all that is above `checkpoint.places.Place`; only the disk is simulated.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from taskgraph.checkpoint.places import Bytes
from taskgraph.testing.simulate.loop import own_time
from taskgraph.testing.simulate.threads import Ends, InlineThreads

__all__ = ["FileThreads", "NodePlace", "SimPlace"]

R = TypeVar("R")


class SimPlace:
    """The files, and what is wrong with them.

    Args:
        moment: told of what was done to the files, and by which node.
        writes: told of what a node writes.
        removes: told of what a node removes.
    """

    def __init__(
        self,
        rng: random.Random,
        moment: Callable[[str, str], None],
        writes: Callable[[str, str], None],
        removes: Callable[[str, str], None],
    ) -> None:
        self.moment = moment
        self.writes = writes
        self.removes = removes
        self._files: dict[str, memoryview] = {}
        self._rng = rng
        self.usual_s = rng.choice((0.0, 0.002, 0.02, 0.1))
        """What a file takes, at most, when nothing is wrong."""
        self.extra_s = 0.0
        self.lose_next = 0
        """Writes that are said to have happened, and are lost, torn or corrupt: a disk that lied."""
        self.spoilt: set[str] = set()
        """Files that are not what was written, for the checks."""
        self.lost_in_use: set[str] = set()
        """Checkpoints of which one was lost while the job went back to them: they had been looked at."""
        self._lags: random.Random | None = None
        self._lag_s = 0.0
        self._since: dict[str, float] = {}  # file -> when it came to be
        self._were: list[
            tuple[str, float, float, int]
        ] = []  # those that were removed: from when, until when, their size

    def mend(self) -> None:
        """It is as fast as usual again."""
        self.extra_s = 0.0

    def seen_by(self, node: str) -> NodePlace:
        return NodePlace(self, node)

    def lags(self, rng: random.Random | None, lag_s: float = 0.0) -> None:
        """From now on a listing is of up to so long ago; without a generator it is of now."""
        self._lags, self._lag_s = rng, lag_s

    @property
    def late(self) -> bool:
        """Whether listings are late."""
        return self._lags is not None

    def _listed(self, start: str) -> dict[str, int | None]:
        """What begins with `start`: name -> size. There now, or at some time before."""
        found: dict[str, int | None]
        if self._lags is None:
            found = {name: data.nbytes for name, data in self._files.items() if name.startswith(start)}
            return found
        at = own_time() - self._lag_s * self._lags.random()
        found = {
            name: data.nbytes
            for name, data in self._files.items()
            if name.startswith(start) and self._since[name] <= at
        }
        found |= {
            name: size for name, since, until, size in self._were if name.startswith(start) and since <= at < until
        }
        return found

    def put(self, path: str, data: bytes) -> None:
        self._since.setdefault(path, own_time())
        if self.lose_next > 0:
            self.lose_next -= 1
            self._spoil(path, data)  # or what was there before stays
            return
        self.spoilt.discard(path)
        self._files[path] = memoryview(data)

    def _spoil(self, path: str, data: bytes) -> bool:
        """Tears a file, or changes a bit of it. False: it is lost."""
        self.spoilt.add(path)
        became = self._rng.randrange(3)
        if became == 0:
            self._files[path] = memoryview(data[: self._rng.randrange(len(data))])
        if became == 1:  # as long as it should be: only who reads it knows
            at = self._rng.randrange(len(data))
            self._files[path] = memoryview(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        return became < 2

    def lose(self, checkpoint: str) -> str:
        """A file of a checkpoint is not what was written any more. Returns which."""
        path = self._rng.choice(sorted(path for path in self._files if f"/{checkpoint}/" in path) or [""])
        if path and not self._spoil(path, bytes(self._files[path])):
            self.remove(path)
        return path

    def get(self, path: str) -> memoryview:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._files[path]

    def names(self, path: str) -> list[str]:
        start = f"{path}/"
        return sorted({name[len(start) :].split("/")[0] for name in self._listed(start)})

    def sizes(self, path: str) -> dict[str, int | None]:
        start = f"{path}/"
        return {name[len(start) :]: size for name, size in self._listed(start).items()}

    def remove(self, path: str) -> None:
        now = own_time()
        for name in [n for n in self._files if n == path or n.startswith(f"{path}/")]:
            self._were.append((name, self._since.pop(name), now, self._files.pop(name).nbytes))


class NodePlace:
    """The place as one node sees it: `checkpoint.places.Place`."""

    def __init__(self, place: SimPlace, node: str) -> None:
        self._place = place
        self._node = node
        self.full = False
        self.extra_s = 0.0

    def __str__(self) -> str:
        return "simulated"

    def mend(self) -> None:
        self.full, self.extra_s = False, 0.0

    def delay_s(self) -> float:
        """How long a call takes just now, at most."""
        return self._place.usual_s + self._place.extra_s + self.extra_s

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        data = b"".join(bytes(part) for part in parts)
        if self.full:
            raise OSError(errno.ENOSPC, "no space left", path)
        self._place.writes(path, self._node)
        self._place.put(path, data)

    def read(self, path: str, limit_bytes: int) -> memoryview:
        return self._place.get(path)

    def names(self, path: str) -> list[str]:
        return self._place.names(path)

    def sizes(self, path: str) -> dict[str, int | None]:
        sizes = self._place.sizes(path)
        self._place.moment("place listed", self._node)
        return sizes

    def remove(self, path: str) -> None:
        self._place.removes(path, self._node)
        self._place.remove(path)
        self._place.moment("place cleared", self._node)

    def remove_empty(self, path: str) -> None:
        pass  # there are no directories


class FileThreads(InlineThreads):
    """The threads that wait for the place. What a killed process had under way there happened, or did not."""

    def __init__(self, rng: random.Random, place: NodePlace, ends: Ends | None, late_s: Callable[[], float]) -> None:
        super().__init__(rng, 0.0, ends, late_s)
        self._place = place

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        self._compute_s = self._place.delay_s()
        return super().run(function)
