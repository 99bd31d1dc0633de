"""One task's state as a safetensors file: other tools read its arrays, and taskgraph reads the exact value.

An encoded value (`graph.values`) has meta and buffers. Meta becomes the tensor `taskgraph.value`, and each buffer
becomes a tensor. A buffer that is one array keeps the array's name, dtype and shape (`theta`, `layers.0.weight`) if
safetensors has that dtype; otherwise its tensor has bytes. Small arrays are inside meta or share a buffer, so
they are written once more under their names, for other tools only.

The manifest of the checkpoint has the digest of the file. It protects from accidents, not from forgery.

The format (https://github.com/huggingface/safetensors): the header's length, 8 bytes, little-endian; the header, JSON;
the data. The safetensors package copies a state before it writes, so this module writes and reads the format
itself.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import xxhash

from taskgraph.errors import CheckpointError
from taskgraph.graph.outline import NamedArray, outline
from taskgraph.protocol.messages import Encoded

__all__ = ["FORMAT", "FileInfo", "Label", "pack_file", "unpack_file"]

FORMAT: Final = "taskgraph checkpoint 5"
"""The format of files and manifests; other formats are refused."""
_VALUE: Final = "taskgraph.value"
_ALIGN: Final = 64
_MAX_HEADER: Final = 100_000_000
"""Other tools refuse longer headers."""
_NAMES_BYTES: Final = 64_000_000
"""The part of the header for named arrays. The rest is for large arrays beyond that, which get no name."""
_ENTRY_BYTES: Final = 400
"""Limit on an array's entry in the header, without its name."""
_U64 = struct.Struct("<Q")

_NAMES: Final = {
    **{np.dtype(f"{kind}{size}").num: f"{kind.upper()}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)},
    **{np.dtype(f"f{size}").num: f"F{8 * size}" for size in (2, 4, 8)},
    np.dtype(np.bool_).num: "BOOL",
    np.dtype(np.longlong).num: "I64",
    np.dtype(np.ulonglong).num: "U64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Identifies the state in a file, for people and other tools."""

    job: str
    fingerprint: str
    tasks: int
    task: int
    epoch: int
    attempt: int
    run: str


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file's entry in the manifest: the task whose state is in it, the size in bytes, the file's digest."""

    task: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a safetensors file; `dtype` is the format's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def pack_file(value: Encoded, label: Label) -> tuple[FileInfo, list[memoryview]]:
    """Makes the file of a task's state: returns its entry, and the parts to write one after another. Copies no buffers.

    Raises:
        CheckpointError: the header would be too long.
    """
    names: dict[str, int] = {_VALUE: 0, "__metadata__": 0}
    named = _named_arrays(value)
    by_buffer = {id(one.buffer): one for one in named if one.buffer is not None}
    buffers = [
        _make_tensor(data, by_buffer.get(id(data)), f"taskgraph.bytes.{number}", names)
        for number, data in enumerate(value.buffers)
    ]
    tensors = [
        *buffers,
        *(_make_tensor(one.data, one, "", names) for one in named if one.buffer is None),
        _Tensor(_VALUE, "U8", (len(value.meta),), memoryview(value.meta)),
    ]
    tensors.sort(key=lambda tensor: -_item_bytes(tensor.dtype))  # aligns every tensor: wide items first
    about = {
        "format": FORMAT,
        "value_digest": value.digest.hex(),
        "buffers": json.dumps([buffer.name for buffer in buffers]),
        **{key: str(field) for key, field in asdict(label).items()},
    }
    header: dict[str, Any] = {"__metadata__": about}
    at = 0
    for tensor in tensors:
        end = at + tensor.data.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _U64.size) % _ALIGN)
    if len(text) > _MAX_HEADER:
        raise CheckpointError(
            f"the state has {len(buffers)} large arrays, too many for the header of a safetensors file "
            f"({len(text)} bytes, at most {_MAX_HEADER}): keep them in fewer, larger arrays"
        )
    head = _U64.pack(len(text)) + text
    parts = [memoryview(head), *(tensor.data.cast("B") for tensor in tensors if tensor.data.nbytes)]
    return FileInfo(label.task, len(head) + at, _digest(parts)), parts


def _make_tensor(data: memoryview, named: NamedArray | None, otherwise: str, names: dict[str, int]) -> _Tensor:
    """Makes a tensor of a named array, or else of bytes named `otherwise`. Adds its name to `names`, those in use."""
    if named is None:
        return _Tensor(_make_unique(otherwise, names), "U8", (data.nbytes,), data)
    return _Tensor(_make_unique(_tensor_name(named), names), _safetensors_dtype(named.dtype), named.shape, data)


def _named_arrays(value: Encoded) -> list[NamedArray]:
    """Returns the arrays that are stored as tensors of their own names: those with a buffer of their own first, then
    small ones, as many as the header has room for. Empty ones and unknown dtypes are left out.
    """
    found = [one for one in outline(value) if _safetensors_dtype(one.dtype) and one.data.nbytes]
    found.sort(key=lambda one: one.buffer is None)
    room = _NAMES_BYTES
    for at, one in enumerate(found):
        # The list of buffers has a large array's name again, with its escapes escaped.
        room -= 3 * len(json.dumps(_tensor_name(one))) + 20 * len(one.shape) + _ENTRY_BYTES
        if room < 0:
            return found[:at]
    return found


def unpack_file(data: memoryview, info: FileInfo, *, path: str) -> Encoded:
    """Returns the value in a file that `pack_file` made; its buffers share the file's memory.

    Raises:
        CheckpointError: the bytes of the file at `path` differ from those that were written.
    """
    if data.nbytes != info.size:
        raise CheckpointError(f"{path} is torn: it has {data.nbytes} bytes, {info.size} were written")
    if _digest([data]) != info.digest:
        raise CheckpointError(f"{path} is corrupt, or foreign: it does not match the digest in the manifest")
    try:
        begin = _U64.size + _U64.unpack_from(data)[0]
        header = json.loads(bytes(data[_U64.size : begin]))
        about = header["__metadata__"]

        def tensor(name: str) -> memoryview:
            at, end = header[name]["data_offsets"]
            return data[begin + at : begin + end]

        buffers = tuple(map(tensor, json.loads(about["buffers"])))
        return Encoded(bytes(tensor(_VALUE)), buffers, bytes.fromhex(about["value_digest"]))
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a file of a checkpoint: {error!r}") from error


def _digest(parts: Iterable[memoryview]) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _safetensors_dtype(dtype: np.dtype[Any]) -> str:
    """Returns the dtype's name in safetensors; "" for other dtypes and byte orders."""
    if not dtype.isnative or sys.byteorder != "little":
        return ""
    return _NAMES.get(dtype.num, "")


def _item_bytes(dtype: str) -> int:
    return 1 if dtype == "BOOL" else int(dtype[1:]) // 8


def _tensor_name(named: NamedArray) -> str:
    """Returns an array's path within the state, with dots. Names outside the state (reports) begin with `taskgraph`.

    Escapes lone surrogates in keys: Python's json accepts them, other tools do not.
    """
    first, *rest = named.path or ("state",)
    name = ".".join(rest) or first if first == "state" else ".".join(("taskgraph", first, *rest))
    return name.encode(errors="backslashreplace").decode()


def _make_unique(name: str, names: dict[str, int]) -> str:
    """Returns the name, with a number if another array has it (keys 1 and "1"; "a.b" and "b" inside "a")."""
    while name in names:
        names[name] += 1
        name = f"{name}~{names[name]}"
    names[name] = 0
    return name
