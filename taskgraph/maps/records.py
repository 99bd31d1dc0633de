"""Values in files: records, one after the other, each whole or at the torn end of a file.

    kind  piece  attempt  sizes of meta and buffers | digest | meta | buffers

A writer has a file of its own, and only appends to it. So a reader sees whole records, and perhaps the beginning of
one at the end: the writer is at it, or died.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded

__all__ = [
    "AtWorkFile",
    "MapRecord",
    "PieceFile",
    "RecordKind",
    "RecordReader",
    "RecordWriter",
    "pack_record",
    "write_pieces",
]

_HEAD: Final = struct.Struct("<BqIIQ16s")
"""Kind, piece, attempt, number of buffers, bytes of meta, digest; the sizes of the buffers follow."""
_AT: Final = struct.Struct("<q")
_WHOLE_BYTES: Final = 1 << 18
"""Records that wait take so much at most: larger ones are written at once."""
_CHUNK_BYTES: Final = 1 << 22
"""A reader takes so much at a time."""


class RecordKind(IntEnum):
    RESULT = 1
    ERROR = 2
    """An error of user code: node and traceback."""
    FAILED = 3
    """The error that fails the map: node and traceback."""


class MapRecord(NamedTuple):
    """A record of a file: a result, an error, or a piece to compute, as a value.

    Attributes:
        piece: the number of the piece.
        attempt: from 0: how many errors of user code the piece had before.
    """

    kind: RecordKind
    piece: int
    attempt: int
    value: Encoded


def pack_record(record: MapRecord) -> bytes:
    """Returns the bytes of a record."""
    value = record.value
    sizes = [buffer.nbytes for buffer in value.buffers]
    head = _HEAD.pack(record.kind, record.piece, record.attempt, len(sizes), len(value.meta), value.digest)
    return b"".join((head, struct.pack(f"<{len(sizes)}Q", *sizes), value.meta, *value.buffers))


def _unpack_record(data: memoryview, at: int) -> tuple[MapRecord | None, int]:
    """Returns the record at an offset, and its size in bytes. None if the data ends before that; 0: size unknown."""
    end = at + _HEAD.size
    if len(data) < end:
        return None, 0
    kind, piece, attempt, count, meta_bytes, digest = _HEAD.unpack_from(data, at)
    first = end + 8 * count
    if len(data) < first:
        return None, first - at
    sizes = struct.unpack_from(f"<{count}Q", data, end)
    whole = first + meta_bytes + sum(sizes) - at
    if len(data) < at + whole:
        return None, whole
    meta, buffers, begin = bytes(data[first : first + meta_bytes]), [], first + meta_bytes
    for size in sizes:
        buffers.append(data[begin : begin + size])
        begin += size
    return MapRecord(RecordKind(kind), piece, attempt, Encoded(meta, tuple(buffers), digest)), whole


class RecordWriter:
    """Appends records to a file, in any thread. Small ones are written together, by `flush`.

    Raises:
        OSError: the disk is full, or the like.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._waiting = bytearray()

    def write(self, record: MapRecord) -> None:
        """Writes a record, at the next `flush` at the latest."""
        with self._lock:
            if record.value.size_bytes >= _WHOLE_BYTES:
                self._write(self._waiting + pack_record(record))
                return
            self._waiting += pack_record(record)
        if len(self._waiting) >= _WHOLE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered records to the file. Readers see them, also if this process dies afterwards."""
        with self._lock:
            if self._waiting:
                self._write(self._waiting)

    def _write(self, data: bytes | bytearray) -> None:
        """Appends bytes, which include all buffered records, to the file; then empties the buffer."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._waiting = bytearray()

    def close(self) -> None:
        self.flush()
        os.close(self._file)


class AtWorkFile:
    """A file with the number of the piece that a worker computes; -1: none. It outlives the process."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_AT.pack(-1))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _AT.size)

    def note(self, piece: int) -> None:
        """Writes the number of the piece that the worker computes from now on; -1: none."""
        self._memory[:] = _AT.pack(piece)

    @staticmethod
    def read(path: Path) -> int:
        """Returns the number in a worker's file; -1 also if there is none yet."""
        data = path.read_bytes()
        return _AT.unpack(data)[0] if len(data) == _AT.size else -1


class RecordReader:
    """Reads the records of a file while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> Iterator[MapRecord]:
        """Yields the whole records since the last call.

        Raises:
            OSError: the file cannot be read.
            ValueError: its bytes are no records.
        """
        with self._path.open("rb") as file:
            wanted = _CHUNK_BYTES
            while True:
                file.seek(self._at)
                data, begin = memoryview(file.read(wanted)), 0
                while True:
                    record, size = _unpack_record(data, begin)
                    if record is None:
                        break
                    begin += size
                    yield record
                self._at += begin
                if begin == 0 and size <= len(data):  # not even a head
                    return
                if begin == 0 and len(data) < size and len(data) < wanted:
                    return  # torn
                wanted = max(_CHUNK_BYTES, size)


def write_pieces(folder: Path, pieces: Sequence[Any]) -> bytes:
    """Writes the pieces of a map. Returns a digest of all of them.

    Raises:
        ValueNotEncodable: a piece does not travel; the message has its number.
    """
    import xxhash

    digest, offsets, at = xxhash.xxh3_128(), np.zeros(len(pieces) + 1, np.int64), 0
    with (folder / "pieces").open("wb", buffering=_CHUNK_BYTES) as file:
        for number, piece in enumerate(pieces):
            value = encode(piece, what=f"piece {number} of the map")
            digest.update(value.digest)
            at += file.write(pack_record(MapRecord(RecordKind.RESULT, number, 0, value)))
            offsets[number + 1] = at
    np.save(folder / "offsets.npy", offsets)
    return digest.digest()


class PieceFile:
    """The pieces of a map, read one by one."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        self._data = memoryview(b"")
        if self._offsets[-1]:
            with (folder / "pieces").open("rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Any:
        record, _ = _unpack_record(self._data, int(self._offsets[number]))
        if record is None:
            raise OSError(f"piece {number} cannot be read: the file of the pieces was changed")
        return decode(record.value, writable=True)
