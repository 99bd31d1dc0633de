"""Libraries that user code may use, and that this package does not import by itself."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

__all__ = ["pytorch", "pytorch_threads"]

_lock = threading.Lock()
_before: list[int] = []  # PyTorch's number of threads before the first of the callers that are in `pytorch_threads`


def pytorch() -> ModuleType | None:
    """Returns PyTorch, whose tensors travel from then on; None if user code has not imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        import taskgraph.torch  # noqa: F401  # declares how tensors travel
    return torch


@contextlib.contextmanager
def pytorch_threads(count: int) -> Iterator[None]:
    """PyTorch computes with so many threads meanwhile: their number decides the last bits.

    Nodes get it by their environment. With `nodes=0` the process may have loaded PyTorch with another one.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with _lock:
        _before.append(_before[0] if _before else torch.get_num_threads())
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                torch.set_num_threads(before)
