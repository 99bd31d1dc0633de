"""The place of a seed's checkpoints: all nodes see it, and it may be slow, full or forgetful for a while.

Only the disk is simulated; the code above `checkpoint.places.Place` is real.
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
    """The files, and their faults.

    Args:
        moment: called with a named moment, and the node.
        writes: called before a node writes a file, with its path and the node.
        removes: called before a node removes a path.
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
        """How long a file takes at most without faults."""
        self.extra_s = 0.0
        self.lose_next = 0
        """How many of the next writes the disk acknowledges, but loses, tears or corrupts."""
        self.spoilt: set[str] = set()
        """Files that differ from what was written."""
        self.lost_in_use: set[str] = set()
        """Checkpoints that lost a file while the job went back to them, after a node had checked them."""
        self._lags: random.Random | None = None
        self._lag_s = 0.0
        self._since: dict[str, float] = {}  # file -> when it came to be
        self._were: list[tuple[str, float, float, int]] = []  # removed files: name, from when, until when, size

    def mend(self) -> None:
        """Makes the place as fast as usual."""
        self.extra_s = 0.0

    def seen_by(self, node: str) -> NodePlace:
        return NodePlace(self, node)

    def lags(self, rng: random.Random | None, lag_s: float = 0.0) -> None:
        """Makes later listings up to `lag_s` old; without a generator they are new."""
        self._lags, self._lag_s = rng, lag_s

    @property
    def late(self) -> bool:
        """True if listings are late."""
        return self._lags is not None

    def _listed(self, start: str) -> dict[str, int | None]:
        """Files whose names begin with `start`, as a listing shows them: name -> size."""
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
        if became == 1:  # of the right length: only reading shows the damage
            at = self._rng.randrange(len(data))
            self._files[path] = memoryview(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        return became < 2

    def lose(self, checkpoint: str) -> str:
        """Loses or damages a file of a checkpoint. Returns its path."""
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
        """Returns how long a call takes now, at most."""
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
    """The threads that wait for the place. Calls of a killed process may have happened or not."""

    def __init__(self, rng: random.Random, place: NodePlace, ends: Ends | None, late_s: Callable[[], float]) -> None:
        super().__init__(rng, 0.0, ends, late_s)
        self._place = place

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        self._compute_s = self._place.delay_s()
        return super().run(function)
