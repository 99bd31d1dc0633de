"""Buffers and modes of PyTorch modules in the part loop. This module imports PyTorch.

A part changes the buffers of its worker's modules, such as the running averages of BatchNorm. So each part starts from
the buffers that the round began with; their changes are summed with the parts, and the mean change is added once. The
mean of whole numbers is rounded down: `num_batches_tracked` advances by one. Modes (`train()`, `eval()`) that a part
leaves behind are put back, also after a piece of `run.once` or `run.map`: other workers do not compute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from taskgraph.errors import StepError

__all__ = ["Modules"]


class Modules:
    """The modules of a run's state, in one round.

    Args:
        leaves: name and object of each leaf of the state.
        zeros: a buffer that a part did not change contributes the change 0, and not nothing.
    """

    def __init__(self, leaves: Iterable[tuple[str, Any]], zeros: bool) -> None:
        self._zeros = zeros
        self._modules: dict[str, torch.nn.Module] = {}
        seen: set[torch.nn.Module] = set()  # a module may be part of two leaves
        for name, leaf in leaves:
            if isinstance(leaf, torch.nn.Module):
                self._modules |= dict(leaf.named_modules(memo=seen, prefix=name))
        self._modes: dict[str, bool] = {}
        self._before: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Keeps copies of buffers and modes as they are now, for `take` and `put_back`."""
        self._modes = {path: module.training for path, module in self._modules.items()}
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{path}.{name}": buffer
            for path, module in self._modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None and not torch.nn.parameter.is_lazy(buffer)
        }

    def _put_modes_back(self) -> None:
        for path, module in self._modules.items():
            if module.training != self._modes[path]:  # to set an attribute of a module is slow
                module.training = self._modes[path]

    def put_back(self) -> None:
        """Sets buffers and modes to what they were at `begin`."""
        self._put_modes_back()
        for path, module in self._modules.items():
            for name, now in list(module._buffers.items()):
                before = self._before.get(f"{path}.{name}")
                if before is None:
                    continue
                if now is None or now.shape != before.shape or now.dtype != before.dtype:
                    module._buffers[name] = before.clone()
                elif not torch.equal(now, before):
                    with torch.no_grad():
                        now.copy_(before)

    def take(self) -> dict[str, torch.Tensor]:
        """Returns buffer -> how a part has changed it (unchanged only with `zeros`), and puts buffers and modes back.

        Raises:
            StepError: a part changed the shape or dtype of a buffer, or one whose values cannot be summed.
        """
        self._put_modes_back()
        changes: dict[str, torch.Tensor] = {}
        buffers = self._buffers()
        for name, before in self._before.items():
            now = buffers[name].detach()
            if now.shape != before.shape or now.dtype != before.dtype:
                raise StepError(
                    f"the buffer {name} got shape {tuple(now.shape)} and {now.dtype} in a part, from "
                    f"{tuple(before.shape)} and {before.dtype}: keep what changes its shape outside the part loop"
                )
            same = torch.equal(now, before)
            if same and not (self._zeros and _summable(before)):
                continue
            if not _summable(before):
                raise StepError(
                    f"the buffer {name} of {before.dtype} changed in a part, and has no mean change: change it outside "
                    f"the part loop"
                )
            wide = torch.int64 if not (before.is_floating_point() or before.is_complex()) else before.dtype
            changes[name] = now.to(wide) - before.to(wide)
            if not same:
                with torch.no_grad():
                    buffers[name].copy_(before)
        return changes

    def put(self, changes: Mapping[str, torch.Tensor], parts: int) -> None:
        """Adds the mean of all parts' changes to the buffers. Raises StepError if a worker has other buffers."""
        buffers = self._buffers()
        with torch.no_grad():
            for name, change in changes.items():
                buffer = buffers.get(name)
                if buffer is None or buffer.shape != change.shape:
                    raise StepError(
                        f"other workers have a buffer {name} with shape {tuple(change.shape)}, and run.state has no "
                        f"such buffer here: make the same model on all workers"
                    )
                exact = change.is_floating_point() or change.is_complex()
                mean = change / parts if exact else torch.div(change, parts, rounding_mode="floor")
                buffer.copy_((buffer.to(mean.dtype) + mean.to(buffer.device)).to(buffer.dtype))


def _summable(buffer: torch.Tensor) -> bool:
    return buffer.dtype != torch.bool and (buffer.is_floating_point() or buffer.is_complex() or _is_int(buffer))


def _is_int(buffer: torch.Tensor) -> bool:
    return buffer.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
