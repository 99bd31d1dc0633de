"""Arrays of other libraries: `tg.arrays(jax.numpy)`, and those travel through DLPack.

A library is its namespace of the array API standard. Its arrays name it themselves (`__array_namespace__`), so nothing
of it is made, and no device taken, where a driver is only imported. On the wire such an array is a codec's value: a
numpy array, or one of a device, behind a name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import numpy as np

from taskgraph.device.lookup import device_of, from_dlpack
from taskgraph.errors import JobError
from taskgraph.graph import codecs
from taskgraph.graph.orders import copied
from taskgraph.graph.refusals import CannotTravel, library_of

__all__ = ["arrays", "codec_of_library"]

_ON_HOST: Final = frozenset((1, 3))
"""DLPack's kinds of devices that the CPU reads: its own memory, and such as CUDA has pinned."""
_OURS: Final = frozenset(("numpy", "cupy"))

_declared: Final[dict[str, codecs.Codec]] = {}


def arrays(namespace: ModuleType) -> None:
    """Makes the arrays of another library travel. Call it where the driver is imported.

    They arrive as arrays of that library, with the same dtype, shape and bits, and on the device of a node that has one
    where they were on a CUDA device, which takes CuPy. numpy's and CuPy's arrays travel without; PyTorch's tensors with
    `import taskgraph.torch`.

    Args:
        namespace: what the library's arrays name as their namespace of the array API, e.g. `jax.numpy`.

    Raises:
        JobError: it is none, or its arrays travel without.
    """
    name = getattr(namespace, "__name__", "")
    if name in _OURS:
        raise JobError(f"arrays of {name} travel as they are: remove tg.arrays({name})")
    if not isinstance(namespace, ModuleType) or not callable(getattr(namespace, "from_dlpack", None)):
        raise JobError(
            f"tg.arrays({name or repr(namespace)}): it is no namespace of the array API, which has from_dlpack; "
            f"tg.codec(type, encode, decode) teaches any other type"
        )

    def decode(array: Any) -> Any:
        # It may be the memory that came in, which others read: no library but numpy knows of read-only memory.
        if (device := device_of(array)) is not None:
            own = device.copy(array)
        elif isinstance(array, np.ndarray):
            own = array if array.flags.writeable else copied(array)
        else:
            raise ValueError(f"an array of {name} came as {type(array).__name__}")
        found = namespace.from_dlpack(own)
        try:
            as_read = _read(found)
        except BufferError:
            # numpy before 2.1 takes all that comes by DLPack for read-only, and hands on nothing that is. So it is with
            # a library that is numpy beneath, array_api_strict for one: nothing could be written, and nothing sent on.
            as_read = _read(found := namespace.asarray(own))
        if as_read is None or as_read.dtype != array.dtype:
            raise ValueError(f"{name} makes {found.dtype} of {array.dtype} here")
        return found

    _declared[name] = codecs.named(f"arrays of {name}", _to_ours, decode)


def codec_of_library(value: Any) -> codecs.Codec | None:
    """Makes a codec for the type of an array whose library was declared; None for other values."""
    if not hasattr(type(value), "__dlpack__"):
        return None
    library = library_of(value)
    known = _declared.get(library) if library else None
    if known is not None:
        codecs.bind(type(value), known)
    return known


def _read(value: Any) -> Any:
    """A library's array as numpy's, or as that of its device; None where it is in memory that is not read here."""
    kind, _ = value.__dlpack_device__()
    return np.from_dlpack(value) if kind in _ON_HOST else from_dlpack(value)


def _to_ours(value: Any) -> Any:
    try:
        found = _read(value)
        if found is None:
            kind, _ = value.__dlpack_device__()
            raise CannotTravel(
                value,
                f"it is on a device (DLPack's kind {kind}), and only CUDA's are read, with CuPy: copy it to the host",
            )
        return found
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:  # as libraries say "no"
        raise CannotTravel(value, f"it cannot be read ({error}): send what can, e.g. its bits") from error
