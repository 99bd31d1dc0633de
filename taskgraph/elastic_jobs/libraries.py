"""Libraries that user code may use, and that this package does not import by itself."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

from taskgraph.system.blas import OpenBlas, openblas_here

__all__ = ["library_threads", "pytorch"]

_lock = threading.Lock()
_before: list[tuple[OpenBlas, int]] = []  # libraries, and their threads before the first caller of `library_threads`
_inside: list[None] = []  # one for each caller that is in it


def pytorch() -> ModuleType | None:
    """Returns PyTorch, whose tensors travel from then on; None if user code has not imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        import taskgraph.torch  # noqa: F401  # declares how tensors travel
    return torch


@contextlib.contextmanager
def library_threads(count: int) -> Iterator[None]:
    """Makes PyTorch and OpenBLAS use this many threads in the block: their number decides the last bits.

    Nodes get it by their environment. With `nodes=0` the process may have loaded them with another one.
    """
    with _lock:
        if not _before:
            _before.extend((each, each.threads()) for each in _threaded_libraries())
        _inside.append(None)
        for each, _ in _before:
            each.set_threads(count)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                for each, before in _before:
                    each.set_threads(before)
                _before.clear()


def _threaded_libraries() -> list[OpenBlas]:
    """Returns the libraries here that compute in threads: OpenBLAS, and PyTorch if it is imported."""
    torch = sys.modules.get("torch")
    return [*openblas_here(), *([OpenBlas(torch.get_num_threads, torch.set_num_threads)] if torch is not None else ())]
