"""Gradients of PyTorch parameters: taken from each part, summed with the parts, and put into `p.grad` after the round.

Within the part loop `p.grad` is None, so that an `optimizer.step()` there finds nothing. This module imports PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from taskgraph.errors import StepError
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.sum_layouts import Layout, empty_array
from taskgraph.graph.sums import Sums

__all__ = ["Gradients"]

_HALVES = (torch.float16, torch.bfloat16)


class Gradients:
    """The gradients of the parameters of a run's state, in one round.

    Args:
        leaves: name and object of each leaf of the state.
        zeros: count a gradient that a part lacks as 0.
        allocate: returns memory for large sums.

    Attributes:
        parameters: name -> parameter.
    """

    def __init__(self, leaves: Iterable[tuple[str, Any]], zeros: bool, allocate: Allocate) -> None:
        self.parameters: dict[str, torch.Tensor] = dict(_parameters(list(leaves)))
        self._zeros = zeros
        self._allocate = allocate
        self._versions: dict[str, int] = {}
        self._layouts: dict[tuple[str, ...], Layout] = {}

    def begin_part_loop(self) -> None:
        """Begins the part loop: clears all gradients, and notes the versions of the parameters for `find_changed`."""
        self.clear()
        self._versions = self._current_versions()

    def clear(self) -> None:
        """Sets all `p.grad` to None: a newcomer has no gradient of earlier steps, so no worker may have one."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _current_versions(self) -> dict[str, int]:
        """Returns parameter -> its version now, by which PyTorch counts changes."""
        return {n: p._version for n, p in self.parameters.items() if not p.is_inference()}

    def find_changed(self) -> str | None:
        """Returns the name of a parameter that has changed since the part loop began; None: none has."""
        now = self._current_versions()
        if now == self._versions:
            return None
        return next(name for name, version in now.items() if self._versions.get(name) != version)

    def find_set_gradient(self) -> str | None:
        """Returns the name of a parameter whose `grad` is set; None: no `grad` is set."""
        return next((name for name, parameter in self.parameters.items() if parameter.grad is not None), None)

    def find_hooked(self) -> str | None:
        """Returns the name of a parameter with a hook that PyTorch calls once `grad` is set; None: none has one."""
        hooked = (n for n, p in self.parameters.items() if getattr(p, "_post_accumulate_grad_hooks", None))
        return next(hooked, None)

    def take(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of parameters that have one, and sets `p.grad` to None. StepError: one is sparse."""
        taken: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise StepError(
                    f"the gradient of {name} is sparse, and sums are dense: make its layer with sparse=False"
                )
            taken[name] = gradient
        return taken

    def sums(self, taken: Mapping[str, torch.Tensor], weight: float, kind: str) -> dict[str, Any]:
        """Returns weight * gradient of a part, to be summed under the name `kind`; 16-bit floats as float32."""
        if not self._zeros:
            return {kind: self._flat(taken, weight)}
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad or name in taken}
        whole = {name: taken[name] if name in taken else torch.zeros_like(p) for name, p in trained.items()}
        having = {name: int(name in taken) for name in trained}
        return {kind: self._flat(whole, weight), "parts with a gradient": having}

    def _flat(self, taken: Mapping[str, torch.Tensor], weight: float) -> Sums:
        """Returns weight * gradients as sums with one flat array for each dtype."""
        names = tuple(sorted(taken))
        layout = self._layouts.get(names)
        if layout is None:
            of = tuple(("a", "torch", _numpy_dtype(taken[name]).str, tuple(taken[name].shape)) for name in names)
            layout = self._layouts[names] = ("d", names, of)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for name in names:
            by_dtype.setdefault(_sum_dtype(taken[name]), []).append(taken[name])
        return Sums(layout, [self._weighted(tensors, weight, dtype) for dtype, tensors in by_dtype.items()])

    def _weighted(self, gradients: list[torch.Tensor], weight: float, dtype: torch.dtype) -> NDArray[Any]:
        """Returns weight * gradients as one flat array, which is written once: that takes most of the time."""
        devices = {gradient.device for gradient in gradients}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        size = sum(gradient.numel() for gradient in gradients)
        array: NDArray[Any] = empty_array(size, torch.empty(0, dtype=dtype).numpy().dtype, self._allocate)
        on_host = torch.from_numpy(array)
        flat = on_host if device.type == "cpu" else torch.empty(size, dtype=dtype, device=device)
        at = 0
        for gradient in gradients:
            there = flat[at : at + gradient.numel()]
            torch.mul(gradient.detach().reshape(-1).to(device, dtype), weight, out=there)
            at += gradient.numel()
        if flat is not on_host:
            on_host.copy_(flat)
        return array

    def put(self, total: Mapping[str, Any], kind: str) -> None:
        """Puts the gradients of a total into `p.grad`; those called "gradients" divided by the sum of the weights."""
        having = total.get("parts with a gradient")
        if kind == "gradients" and not total["weight"]:
            raise StepError("the weights of part.backward are 0 in all parts, and have no mean: give one part a weight")
        gradients: dict[str, NDArray[Any]] = total[kind]
        mean = _MeanGradients(gradients.values(), total["weight"] if kind == "gradients" else None, self._allocate)
        for name, gradient in gradients.items():
            parameter = self.parameters.get(name)
            if parameter is None or parameter.shape != gradient.shape:
                raise StepError(
                    f"other workers have a gradient of {name} with shape {tuple(gradient.shape)}, and run.state has no "
                    f"such parameter here: make the same model on all workers"
                )
            if having is None or having[name]:
                parameter.grad = mean.of(gradient).to(parameter.device, parameter.dtype)


class _MeanGradients:
    """Tensors of the mean gradients, in one array for each dtype.

    Args:
        gradients: their sums.
        weight: the sum of the weights; None: take the sums as they are.
    """

    def __init__(self, gradients: Iterable[NDArray[Any]], weight: float | None, allocate: Allocate) -> None:
        self._weight = weight
        sizes: dict[np.dtype[Any], int] = {}
        for gradient in gradients:
            sizes[gradient.dtype] = sizes.get(gradient.dtype, 0) + gradient.size
        self._left = {dtype: empty_array(size, dtype, allocate) for dtype, size in sizes.items()}

    def of(self, gradient: NDArray[Any]) -> torch.Tensor:
        """Returns the mean of one gradient. Call it once for each, in the order of `gradients`."""
        flat = self._left[gradient.dtype]
        out, self._left[gradient.dtype] = flat[: gradient.size].reshape(gradient.shape), flat[gradient.size :]
        if self._weight is None:
            np.copyto(out, gradient)
        else:
            with np.errstate(all="ignore"):
                np.divide(gradient, self._weight, out=out)
        return torch.from_numpy(out)


def _sum_dtype(gradient: torch.Tensor) -> torch.dtype:
    return torch.float32 if gradient.dtype in _HALVES else gradient.dtype


def _numpy_dtype(gradient: torch.Tensor) -> np.dtype[Any]:
    dtype: np.dtype[Any] = torch.empty(0, dtype=_sum_dtype(gradient)).numpy().dtype
    return dtype


def _parameters(leaves: list[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and parameters, each once: of modules, then of optimizers, then tensors that require a gradient."""
    seen: set[int] = set()
    for name, parameter in itertools.chain(
        (
            (f"{name}.{path}", parameter)
            for name, module in leaves
            if isinstance(module, torch.nn.Module)
            for path, parameter in module.named_parameters()
        ),
        (
            (f"{name}.{group}.{index}", parameter)
            for name, optimizer in leaves
            if isinstance(optimizer, torch.optim.Optimizer)
            for group, entry in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(entry["params"])
        ),
        ((name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad),
    ):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter
