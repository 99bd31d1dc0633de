"""Lets arrays of other libraries travel through DLPack, for example after `tg.arrays(jax.numpy)`.

A library is known by the name of its array API namespace, which each of its arrays reports (`__array_namespace__`). So
a declaration creates no array and takes no device. On the wire such an array is the name of a codec, and a numpy array
or a device array.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import numpy as np

from taskgraph.device.lookup import device_of, from_dlpack
from taskgraph.errors import JobError
from taskgraph.graph import codecs
from taskgraph.graph.orders import copy_in_order
from taskgraph.graph.refusals import CannotTravel, library_of

__all__ = ["arrays", "codec_of_library"]

_HOST_DEVICE_TYPES: Final = frozenset((1, 3))
"""DLPack's device types whose memory the CPU can read: host memory, and host memory that CUDA has pinned."""
_BUILT_IN_LIBRARIES: Final = frozenset(("numpy", "cupy"))

_codecs_by_library: Final[dict[str, codecs.Codec]] = {}


def arrays(namespace: ModuleType) -> None:
    """Makes the arrays of another library travel. Call it where the driver is imported.

    The arrays arrive as arrays of that library, with the same dtype, shape and bits. An array from a CUDA device
    arrives on the receiving node's device, if that node has a device and CuPy. numpy's and CuPy's arrays travel without
    this call; PyTorch's tensors with `import taskgraph.torch`.

    Args:
        namespace: the library's array API namespace, e.g. `jax.numpy`.

    Raises:
        JobError: `namespace` is not an array API namespace, or its arrays travel without this call.
    """
    name = getattr(namespace, "__name__", "")
    if name in _BUILT_IN_LIBRARIES:
        raise JobError(f"arrays of {name} travel as they are: remove tg.arrays({name})")
    if not isinstance(namespace, ModuleType) or not callable(getattr(namespace, "from_dlpack", None)):
        raise JobError(
            f"tg.arrays({name or repr(namespace)}): it is no namespace of the array API, which has from_dlpack; "
            f"tg.codec(type, encode, decode) teaches any other type"
        )

    def decode(array: Any) -> Any:
        # The array may be a view of received memory that others read: only numpy respects read-only memory.
        if (device := device_of(array)) is not None:
            own = device.copy(array)
        elif isinstance(array, np.ndarray):
            own = array if array.flags.writeable else copy_in_order(array)
        else:
            raise ValueError(f"an array of {name} came as {type(array).__name__}")
        found = namespace.from_dlpack(own)
        try:
            as_read = _import_dlpack(found)
        except BufferError:
            # numpy before 2.1 makes every DLPack import read-only, and cannot export a read-only array. Libraries on
            # top of numpy, such as array_api_strict, inherit this: their arrays could not be written, or sent again.
            as_read = _import_dlpack(found := namespace.asarray(own))
        if as_read is None or as_read.dtype != array.dtype:
            raise ValueError(f"{name} makes {found.dtype} of {array.dtype} here")
        return found

    _codecs_by_library[name] = codecs.register(f"arrays of {name}", _export_array, decode)


def codec_of_library(value: Any) -> codecs.Codec | None:
    """Returns the codec of an array whose library was declared, and binds it to the array's type; None otherwise."""
    if not hasattr(type(value), "__dlpack__"):
        return None
    library = library_of(value)
    known = _codecs_by_library.get(library) if library else None
    if known is not None:
        codecs.bind(type(value), known)
    return known


def _import_dlpack(value: Any) -> Any:
    """Views a library's array as a numpy or device array; None if this process cannot read its memory."""
    kind, _ = value.__dlpack_device__()
    return np.from_dlpack(value) if kind in _HOST_DEVICE_TYPES else from_dlpack(value)


def _export_array(value: Any) -> Any:
    """Returns a library's array as a numpy or device array. Raises CannotTravel."""
    try:
        found = _import_dlpack(value)
        if found is None:
            kind, _ = value.__dlpack_device__()
            raise CannotTravel(
                value,
                f"it is on a device (DLPack's kind {kind}), and only CUDA's are read, with CuPy: copy it to the host",
            )
        return found
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise CannotTravel(value, f"it cannot be read ({error}): send what can, e.g. its bits") from error
