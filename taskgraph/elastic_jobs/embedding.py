"""Rows of a table as PyTorch's tensors, with gradients. This module imports PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from taskgraph.errors import TableError

__all__ = ["embed_rows"]


def embed_rows(
    pull: Callable[[NDArray[np.int64]], NDArray[Any]], ids: torch.Tensor, what: str, *, trained: bool
) -> tuple[torch.Tensor, NDArray[np.int64], torch.Tensor | None]:
    """Returns the rows of a tensor of ids.

    Args:
        pull: returns the rows of ids, each once.
        what: the call, for messages.
        trained: losses may have gradients of the rows.

    Returns:
        A tensor of shape (*ids.shape, width); the ids, each once; and their rows, as a leaf whose `grad` a backward
        pass sets, or None.
    """
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        given = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TableError(f"{what} takes a tensor of whole numbers, not {given}")
    unique, place = np.unique(ids.detach().cpu().numpy(), return_inverse=True)
    unique = unique.astype(np.int64)
    rows = torch.from_numpy(pull(unique)).to(ids.device)
    trained = trained and torch.is_grad_enabled()
    if trained:
        rows.requires_grad_()
    found = torch.nn.functional.embedding(torch.from_numpy(place.reshape(ids.shape)).to(ids.device), rows)
    return found, unique, rows if trained else None
