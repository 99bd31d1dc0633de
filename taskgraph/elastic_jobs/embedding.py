"""Rows of a table as PyTorch's tensors, with gradients. This module imports PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from taskgraph.errors import TableError

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.tables import Pushes, RunTable

__all__ = ["embedded"]


def embedded(table: RunTable, ids: torch.Tensor, pushes: Pushes | None) -> torch.Tensor:
    """Returns the rows of ids; see `RunTable.embed`.

    Args:
        pushes: takes the gradient of the rows; None: they need none.
    """
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        what = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TableError(f"table {table.name!r}.embed takes a tensor of whole numbers, not {what}")
    unique, place = np.unique(ids.detach().cpu().numpy(), return_inverse=True)
    rows = torch.from_numpy(table.pull(unique)).to(ids.device)
    if pushes is not None and torch.is_grad_enabled():
        rows.requires_grad_()
        pushes.embedded.append((table.name, unique.astype(np.int64), rows))
    return torch.nn.functional.embedding(torch.from_numpy(place.reshape(ids.shape)).to(ids.device), rows)
