"""Seeds the process-wide generators of random, numpy and PyTorch alike on all workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

__all__ = ["GeneratorTurn", "derived_seed", "seed_generators"]

_this_thread = threading.local()


class GeneratorTurn:
    """The right to run user code, and so to use the generators of the process.

    The workers of one process share its generators: if two ran at once, each would draw the numbers of the other. So
    one runs at a time, until it waits for other workers. The caller seeds the generators after each wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for the turn, and holds it during the block, which runs user code."""
        with self._lock:
            _this_thread.has_turn = True
            try:
                yield
            finally:
                _this_thread.has_turn = False

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Releases the turn during the block, which waits for other workers; then waits for the turn again."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


def derived_seed(*of: int) -> int:
    """Returns a seed of 63 bits that depends on these numbers alone."""
    text = ",".join(map(str, of)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_generators(seed: int) -> None:
    """Seeds `random`, `numpy.random` and, if user code has imported it, PyTorch.

    Without a turn it does nothing: another worker of this process may be drawing from them.
    """
    if not getattr(_this_thread, "has_turn", False):
        return
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        seed %= 2**64  # PyTorch takes no more
        torch.default_generator.manual_seed(seed)
        for seed_device in _device_seeders(torch):
            seed_device(seed)


@functools.cache
def _device_seeders(torch: ModuleType) -> tuple[Callable[[int], object], ...]:
    """Returns the functions that seed PyTorch's generators of the devices that are here.

    `torch.manual_seed` also calls those of all other kinds of device, which takes a millisecond: each of them formats
    a traceback, for the day when its device is used.
    """
    seeders: list[Callable[[int], object]] = []
    if torch.cuda.is_available():
        seeders.append(torch.cuda.manual_seed_all)
    if torch.backends.mps.is_available():
        seeders.append(torch.mps.manual_seed)
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        seeders.append(torch.xpu.manual_seed_all)
    return tuple(seeders)
