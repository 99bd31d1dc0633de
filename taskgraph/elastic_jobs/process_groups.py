"""Process groups of `torch.distributed`: Gloo for sums on the host, NCCL through GPUs. This module imports PyTorch."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from taskgraph.errors import JobError

__all__ = ["abort", "make_group", "sum_over"]

_TIMEOUT: Final = datetime.timedelta(seconds=60)
"""The limit of one operation. All workers have computed when it begins, so it takes only as long as the transfer. A
group that was closed from outside holds its thread up to this time."""
_THREADS: Final = 1
_SIGNED: Final = {"u1": "i1", "u2": "i2", "u4": "i4", "u8": "i8"}
_PARTS_OF_COMPLEX: Final = {"c8": "f4", "c16": "f8"}


class ViewKeys(Protocol):
    """Keys that the workers of a view share, by which their processes find each other."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def has(self, key: str) -> bool: ...


class _Store(dist.Store):  # type: ignore[misc]  # PyTorch is checked as untyped
    """The keys of a view as a `Store` of PyTorch."""

    def __init__(self, keys: ViewKeys) -> None:
        super().__init__()
        self._keys = keys

    def set(self, key: str, value: Any) -> None:
        self._keys.set(key, bytes(value, "latin-1") if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._keys.get(key)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        for key in keys:
            self._keys.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are set."""
        return all(map(self._keys.has, keys))


def make_group(backend: str, keys: ViewKeys, rank: int, size: int, host: str) -> Any:
    """Makes the process group of a view. It blocks until all of its workers do so.

    Args:
        backend: "gloo" or "nccl".
        host: an address of this host that the other workers reach, for Gloo.

    Raises:
        JobError: there is no NCCL here.
    """
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = _TIMEOUT
        options._threads = _THREADS
        named = "GLOO_SOCKET_IFNAME" in os.environ
        make = dist.ProcessGroupGloo.create_default_device
        options._devices = [make() if named else dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(_Store(keys), rank, size, options)
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise JobError(
            'communicator="nccl": PyTorch finds no GPU, or was built without NCCL, on some host: install a build with '
            'CUDA on hosts with GPUs, or use "gloo"'
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return dist.ProcessGroupNCCL(_Store(keys), rank, size, options)


def abort(group: Any, backend: str) -> None:
    """Ends the operations of a group from another thread, where the backend can do that."""
    if backend == "nccl":
        group.abort()


def sum_over(
    group: Any, backend: str, zeros: Sequence[NDArray[Any]], held: Sequence[Sequence[NDArray[Any]]]
) -> list[NDArray[Any]]:
    """Returns the sums of flat arrays over all workers of a group.

    Args:
        zeros: an array of zeros for each sum, with its size and dtype; they are changed.
        held: this worker's arrays: each item has one for each sum, and all items are added. May be empty.

    Raises:
        JobError: PyTorch cannot sum such a dtype.
        RuntimeError: the operation failed.
    """
    sums = []
    for index, array in enumerate(zeros):
        for arrays in held:
            array += arrays[index]
        tensor = torch.tensor(_as_summable(array), device="cuda" if backend == "nccl" else "cpu")
        group.allreduce([tensor]).wait()
        sums.append(_with_dtype(tensor.cpu().numpy(), array.dtype))
    return sums


def _with_dtype(total: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Undoes `_as_summable` on a total: returns it with `dtype`, that of the array before."""
    return total.astype(dtype) if dtype.kind in "iu" and dtype.itemsize < total.itemsize else total.view(dtype)


def _as_summable(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the array with a dtype that all backends sum, and the same bits: sums of integers wrap around alike."""
    name = array.dtype.str[1:]
    if name in _PARTS_OF_COMPLEX:
        return array.view(_PARTS_OF_COMPLEX[name])
    signed = array.view(_SIGNED.get(name, name))
    if signed.dtype == np.int16:
        return signed.astype(np.int32)
    if signed.dtype.str[1:] not in ("i1", "i4", "i8", "f4", "f8"):
        raise JobError(f"PyTorch's communicators cannot sum {array.dtype}: add it as float64")
    return signed
