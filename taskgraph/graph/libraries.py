"""Arrays of other libraries: `tg.arrays(jax.numpy)`, and those travel through DLPack.

A library is its namespace of the array API standard. Its arrays name it themselves (`__array_namespace__`), so nothing
of it is made, and no device taken, where a driver is only imported. On the wire such an array is a codec's value: a
numpy array behind a name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.errors import JobError
from taskgraph.graph import codecs
from taskgraph.graph.refusals import CannotTravel, library_of

__all__ = ["arrays", "codec_of_library"]

_ON_HOST: Final = frozenset((1, 3))
"""DLPack's kinds of devices that the CPU reads: its own memory, and such as CUDA has pinned."""
_OURS: Final = frozenset(("numpy", "cupy"))

_declared: Final[dict[str, codecs.Codec]] = {}


def arrays(namespace: ModuleType) -> None:
    """Makes the arrays of another library travel. Call it where the driver is imported.

    They arrive as arrays of that library, with the same dtype, shape and bits. Arrays on a device are refused: copy
    them to the host first. numpy's and CuPy's arrays travel without; PyTorch's tensors with `import taskgraph.torch`.

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
        if not isinstance(array, np.ndarray):
            raise ValueError(f"an array of {name} came as {type(array).__name__}")
        # It may be the memory that came in, which others read: no library but numpy knows of read-only memory.
        found = namespace.from_dlpack(array if array.flags.writeable else array.copy())
        if np.from_dlpack(found).dtype != array.dtype:
            raise ValueError(f"{name} makes {found.dtype} of {array.dtype} here")
        return found

    _declared[name] = codecs.named(f"arrays of {name}", _to_numpy, decode)


def codec_of_library(value: Any) -> codecs.Codec | None:
    """How an array travels whose library was declared; None for other values. From then on its type has a codec."""
    if not hasattr(type(value), "__dlpack__"):
        return None
    library = library_of(value)
    known = _declared.get(library) if library else None
    if known is not None:
        codecs.bind(type(value), known)
    return known


def _to_numpy(value: Any) -> NDArray[Any]:
    try:
        kind, _ = value.__dlpack_device__()
        if kind not in _ON_HOST:
            raise CannotTravel(value, f"it is not in the host's memory (DLPack's kind of device {kind}): copy it there")
        return np.from_dlpack(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:  # as libraries say "no"
        raise CannotTravel(value, f"numpy cannot read it ({error}): send what it can, e.g. its bits") from error
