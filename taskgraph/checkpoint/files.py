"""One task's state as a file: a safetensors file that any tool opens, and a value of ours that comes back exactly.

The value is encoded already (`graph.values`): a description and its bulk. The description is a tensor of bytes called
`taskgraph.value`; each piece of bulk is a tensor, too. Arrays have their names, dtypes and shapes, so that other tools
see what a user would: `theta`, `layers.0.weight`. What safetensors has no name for (structured and complex dtypes, big
endian, long bytes) are tensors of bytes. So nothing is converted, and what is read is what was written, bit by bit.
Small arrays lie within the description; they are written a second time under their names, for other tools alone. Those
that lie side by side in one piece of bulk are a tensor each. A header has room for some 100,000 names; arrays beyond
that, the small ones first, are found in the description, or in bytes without a name of their own.

The file's digest is of its header, but for the digest itself, and of all data: whatever is cut off, torn or flipped is
noticed. It is against accidents, not against forgers.

The format, from https://github.com/huggingface/safetensors: the header's length as 8 bytes, little-endian; the header,
JSON; the data.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import xxhash

from taskgraph.errors import CheckpointError, DecodeError
from taskgraph.graph.arrays import PACK_ALIGN, pack_at
from taskgraph.graph.outline import Named, outline
from taskgraph.graph.values import verify
from taskgraph.protocol.messages import Encoded

__all__ = ["FORMAT", "FileInfo", "Label", "pack", "unpack"]

FORMAT: Final = "taskgraph checkpoint 4"
"""Of files and manifests: what is of another one is foreign."""
_VALUE: Final = "taskgraph.value"
_NO_DIGEST: Final = "0" * 32
_ALIGN: Final = 64
_MAX_HEADER: Final = 100_000_000
"""What other readers take, too."""
_NAMES_BYTES: Final = 64_000_000
"""Of the header, for the names of arrays. The rest is for large arrays that then have none: several 100,000 of them."""
_ENTRY_BYTES: Final = 400
"""At most what a name costs in the header beside itself, and with it that of bytes without a name that follow."""
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
    """Whose state a file holds. All of it is in the file, and is compared when it is read."""

    job: str
    fingerprint: str
    tasks: int
    task: int
    epoch: int
    attempt: int
    run: str


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What was written: enough to know the file again."""

    task: int
    size: int
    digest: str


def pack(value: Encoded, label: Label) -> tuple[FileInfo, list[memoryview]]:
    """The file as parts to be written one after the other; bulk is not copied.

    Raises:
        CheckpointError: it has too many large arrays for a file that can be read again.
    """
    named = _named(value)
    by_buffer = {n.buffer: n for n in named if n.buffer is not None and n.part is None}
    parts_of: dict[int | None, list[Named]] = {}
    for n in named:
        if n.part is not None:
            parts_of.setdefault(n.buffer, []).append(n)
    names: dict[str, int] = {_VALUE: 0, "__metadata__": 0}
    entries: list[tuple[str, str, tuple[int, ...], memoryview]] = []

    def add(data: memoryview, of: Named | None, unnamed: str = "") -> str:
        """A tensor more, of an array or of bytes that have no name of their own; what it is called."""
        name = _unused(unnamed if of is None else _tensor_name(of), names)
        dtype, shape = ("U8", (data.nbytes,)) if of is None else (_safe_name(of.dtype), of.shape)
        entries.append((name, dtype, shape, data))
        return name

    buffers: list[str | dict[str, Any]] = []
    for number, data in enumerate(value.buffers):
        unnamed = f"taskgraph.bytes.{number}"
        if number in parts_of:
            parts = [(at, add(part, of, unnamed)) for at, part, of in _parts(data, parts_of[number])]
            buffers.append({"size": data.nbytes, "parts": parts})
        else:
            buffers.append(add(data, by_buffer.get(number), unnamed))
    for small in named:
        if small.buffer is None:
            add(small.data, small)
    entries.append((_VALUE, "U8", (len(value.meta),), memoryview(value.meta)))
    entries.sort(key=lambda entry: -_item_bytes(entry[1]))  # so that all of them are aligned; bytes come last
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "digest": _NO_DIGEST,
            "value_digest": value.digest.hex(),
            "buffers": json.dumps(buffers),
            **{key: str(field) for key, field in asdict(label).items()},
        }
    }
    at = 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _U64.size) % _ALIGN)
    if len(text) > _MAX_HEADER:
        raise CheckpointError(
            f"its header would have {len(text)} bytes, and readers take {_MAX_HEADER}: the state has {len(buffers)} "
            f"large arrays or texts; keep them in fewer, larger ones"
        )
    written = [data.cast("B") if data.nbytes else memoryview(b"") for *_, data in entries]
    digest = _digest(text, written)
    head = _U64.pack(len(text)) + text.replace(_digest_field(_NO_DIGEST), _digest_field(digest), 1)
    return FileInfo(label.task, len(head) + at, digest), [memoryview(head), *written]


def _named(value: Encoded) -> list[Named]:
    """The arrays that have a tensor of their name in the file: large ones, then those side by side, then small ones.

    All that safetensors has a dtype for, as a rule; else as many as the header has room for.
    """
    found = [n for n in outline(value) if _safe_name(n.dtype) and n.data.nbytes]
    found.sort(key=lambda n: (n.buffer is None, n.part is not None))
    room = _NAMES_BYTES
    for at, one in enumerate(found):
        name = _tensor_name(one)
        # Both in the header and, of bulk, in the list of buffers, where what is escaped is escaped again.
        room -= 3 * len(json.dumps(name)) + 20 * len(one.shape) + _ENTRY_BYTES
        if room < 0:
            return found[:at]
    return found


def _parts(data: memoryview, named: Iterable[Named]) -> Iterator[tuple[int, memoryview, Named | None]]:
    """What a buffer of several parts consists of, but for what is zero between them: where, what, and its name."""
    end = 0
    for one in named:
        assert one.part is not None
        begin = pack_at(end)
        if begin < one.part:  # of what has no name
            yield begin, data[begin : one.part], None
        yield one.part, one.data, one
        end = one.part + one.data.nbytes
    if (begin := pack_at(end)) < data.nbytes:
        yield begin, data[begin:], None


def unpack(data: memoryview, label: Label, info: FileInfo, *, path: str) -> Encoded:
    """The value of a file. It shares the file's memory, but for buffers that are of several tensors.

    Raises:
        CheckpointError: the file is cut off, corrupt, or another one's; named by `path`.
    """
    if data.nbytes != info.size:
        raise CheckpointError(f"{path} is torn: it has {data.nbytes} bytes, {info.size} were written")
    header, text, at = _header(data, path)
    about = header.get("__metadata__")
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is foreign: not a file of a checkpoint of this version ({FORMAT!r})")
    digest = about.get("digest")
    if not isinstance(digest, str) or _digest(_cleared(text, digest), [data[at:]]) != digest:
        raise CheckpointError(f"{path} is corrupt: it does not match the digest it was written with")
    for key, expected in asdict(label).items():
        if about.get(key) != str(expected):
            raise CheckpointError(f"{path} is foreign: its {key} is {about.get(key)}, not {expected}")
    if digest != info.digest:
        raise CheckpointError(f"{path} is another file than the one that was written: its digest is {digest}")
    try:
        meta = bytes(_tensor(data, at, header[_VALUE]))
        buffers = tuple(_buffer(data, at, header, told) for told in json.loads(about["buffers"]))
        value = Encoded(meta, buffers, bytes.fromhex(about["value_digest"]))
        if verify(value):
            return value
    except (KeyError, TypeError, ValueError, DecodeError) as error:
        raise CheckpointError(f"{path} is corrupt: {error!r}") from error
    raise CheckpointError(f"{path} is corrupt: its value does not match the digest it was made with")


def _header(data: memoryview, path: str) -> tuple[dict[str, Any], bytes, int]:
    """The header, its text, and where the data begins."""
    try:
        size = _U64.unpack_from(data, 0)[0]
        if size > min(_MAX_HEADER, data.nbytes - _U64.size):
            raise ValueError(f"a header of {size} bytes")
        text = bytes(data[_U64.size : _U64.size + size])
        header = json.loads(text)
        if not isinstance(header, dict):
            raise TypeError("a header that is no object")
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is foreign or corrupt: not a safetensors file ({error})") from error
    return header, text, _U64.size + size


def _tensor(data: memoryview, at: int, entry: dict[str, Any]) -> memoryview:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= data.nbytes - at:
        raise ValueError(f"a tensor from {begin} to {end} of {data.nbytes - at} bytes")
    return data[at + begin : at + end]


def _buffer(data: memoryview, at: int, header: dict[str, Any], told: Any) -> memoryview:
    """One of the value's buffers: a tensor by its name, or several of them, and where each is in it."""
    if isinstance(told, str):
        return _tensor(data, at, header[told])
    size, parts = told["size"], [(begin, _tensor(data, at, header[name])) for begin, name in told["parts"]]
    if not 0 <= size <= sum(part.nbytes + PACK_ALIGN for _, part in parts):
        raise ValueError(f"{len(parts)} tensors in a buffer of {size} bytes")
    buffer = memoryview(bytearray(size))
    for begin, part in parts:
        buffer[begin : begin + part.nbytes] = part
    return buffer.toreadonly()


def _digest(header: bytes, parts: Iterable[memoryview]) -> str:
    hasher = xxhash.xxh3_128(header)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _cleared(header: bytes, digest: str) -> bytes:
    """The header as it was digested."""
    return header.replace(_digest_field(digest), _digest_field(_NO_DIGEST), 1)


def _digest_field(digest: str) -> bytes:
    return b'"digest":"' + digest.encode("ascii", "replace") + b'"'


def _safe_name(dtype: np.dtype[Any]) -> str:
    """What safetensors calls the dtype; "" where it has no name, or where its bytes are in another order."""
    if not dtype.isnative or sys.byteorder != "little":
        return ""
    return _NAMES.get(dtype.num, "")


def _item_bytes(dtype: str) -> int:
    return 1 if dtype == "BOOL" else int(dtype[1:]) // 8


def _tensor_name(named: Named) -> str:
    """The way to an array within the state; what travels beside the state says so.

    Other tools read JSON that is Unicode: a lone surrogate in a key, which Python's json passes on, is written out.
    """
    first, *rest = named.path or ("state",)
    name = ".".join(rest) or first if first == "state" else ".".join(("taskgraph", first, *rest))
    return name.encode(errors="backslashreplace").decode()


def _unused(name: str, names: dict[str, int]) -> str:
    """The name, with a number where another array has it (the keys 1 and "1", "a.b" and "a" of "b")."""
    while name in names:
        names[name] += 1
        name = f"{name}~{names[name]}"
    names[name] = 0
    return name
