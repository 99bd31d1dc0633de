"""Libraries that user code may use, and that this package does not import by itself."""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["pytorch"]


def pytorch() -> ModuleType | None:
    """Returns PyTorch, whose tensors travel from then on; None if user code has not imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        import taskgraph.torch  # noqa: F401  # declares how tensors travel
    return torch
