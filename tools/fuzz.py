"""Feeds random and mutated bytes to every reader of bytes from others: no crash, no hang, no allocation bomb.

    python tools/fuzz.py values --inputs 1000000        one reader
    python tools/fuzz.py all --inputs 200000            each of them, one after another

With `atheris` installed (`pip install atheris`) inputs are guided by the code they reach; without, they are valid ones
that were damaged at random. Either way an input counts as a finding if a reader does anything but read it or raise
`DecodeError` (a hello: `HelloRefused`, too), if it takes longer than `_SLOW_S`, or if it takes memory out of
proportion. A finding is written to a file, and is replayed with `python tools/fuzz.py TARGET --replay FILE`.

docs/security.md keeps the figures of the last long run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from taskgraph.transport.frames import Head
    from taskgraph.transport.incoming import IncomingMessage

Target = Callable[[bytes], None]

#: Of the processor's time; libFuzzer's own limit is by the clock.
_SLOW_S = 1.0
_HANG_S = 20
_MALLOC_MIB = 64
_MAX_INPUT = 4096
#: Memory that one input may take: what a reader has anyway, and a multiple of what came.
_PEAK_BYTES, _PEAK_PER_BYTE = 1 << 20, 300
_TRACED = 32
"""One input in this many is run with memory traced: that takes several times as long."""


class Finding(Exception):
    """An input that did what none may do."""


# What reads bytes of others. Modules are imported here, so that atheris sees them.


def _frames() -> tuple[Target, list[bytes]]:
    """An open session's reader, or that of a stranger, fed in pieces; the first byte decides which and how."""
    from taskgraph.errors import DecodeError
    from taskgraph.protocol import messages as m
    from taskgraph.transport import wire
    from taskgraph.transport.frames import HEAD_BYTES, FrameKind, Head, Limits, pack_frame
    from taskgraph.transport.hello import HELLO_LIMITS
    from taskgraph.transport.incoming import IncomingMessage
    from taskgraph.transport.reader import FrameReader

    open_limits = Limits(header=1 << 16, buffers=1 << 10, payload=1 << 20)

    def run(data: bytes) -> None:
        if not data:
            return
        stranger, piece = bool(data[0] & 1), (data[0] >> 1) * 8 + 1

        def on_message_begin(head: Head, sizes: tuple[int, ...], header: bytes) -> IncomingMessage | None:
            if stranger:
                raise DecodeError("before the hello")
            message = wire.from_header(header)
            if wire.value_of(message) is None and (head.payload or sizes):
                raise DecodeError("a payload")
            return IncomingMessage(head, sizes, message)

        def on_complete(incoming: IncomingMessage) -> None:
            incoming.complete()

        def on_whole(
            kind: FrameKind, call: int, sizes: tuple[int, ...], header: bytes, meta: bytes, carried: bytes
        ) -> None:
            if carried and sum(sizes) != len(carried):
                raise Finding(f"buffers of {sizes} in {len(carried)} bytes")
            wire.from_header(header)

        reader = FrameReader(
            HELLO_LIMITS if stranger else open_limits,
            on_message_begin=on_message_begin,
            on_complete=on_complete,
            on_whole=on_whole,
            on_control=lambda head, header: None,
        )
        reader.whole = () if stranger else (FrameKind.CALL, FrameKind.TELL)
        rest = memoryview(data)[1:]
        with contextlib.suppress(DecodeError):
            while rest:
                room = reader.buffer()
                if not room.nbytes:
                    raise Finding("a reader without room for a byte")
                count = min(room.nbytes, piece, rest.nbytes)
                room[:count] = rest[:count]
                reader.parse_received(count)
                rest = rest[count:]
                if len(reader._memory) > (192 << 10) + 2 * len(data):
                    raise Finding(f"a reader with a buffer of {len(reader._memory)} bytes after {len(data)}")

    header = wire.to_header(m.Flag(m.Stamp(1, 1), 1, 1, 1, m.Encoded(b"meta", (memoryview(b"bulk"),), bytes(16))))
    flag = pack_frame(Head(FrameKind.CALL, 1, len(header), 1, 8, 8, 4), (4,), header) + b"metabulk"
    large = pack_frame(Head(FrameKind.CALL, 2, len(header), 1, 0, 3000, 4), (2996,), header)
    chunk = pack_frame(Head(FrameKind.CHUNK, 2, body=1500)) + bytes(1500)
    pull = wire.to_header(m.Pull(m.Stamp(1, 7), 3, 1, 5, "grad"))
    call = pack_frame(Head(FrameKind.CALL, 3, len(pull)), (), pull)
    control = pack_frame(Head(FrameKind.CANCEL, 1)) + pack_frame(Head(FrameKind.GOODBYE, 0))
    hello = pack_frame(Head(FrameKind.HELLO_OPEN, 0, header=60), (), bytes(60))
    assert HEAD_BYTES == 56
    return run, [b"\xfe" + flag + call + control, b"\xfe" + large + call + chunk + chunk, b"\x01" + hello]


def _hello() -> tuple[Target, list[bytes]]:
    """Both sides of the hello; an input is a list of (kind, size, bytes)."""
    from taskgraph.errors import DecodeError
    from taskgraph.transport.frames import FrameKind
    from taskgraph.transport.hello import DiallerHello, HelloRefused, ListenerHello

    kinds = list(FrameKind)

    def run(data: bytes) -> None:
        for side in (ListenerHello(b"t" * 16, "job", "node"), DiallerHello(b"t" * 16, "job", "node", probe=False)):
            with contextlib.suppress(DecodeError, HelloRefused):
                rest = data
                while len(rest) > 1:
                    kind, size = kinds[rest[0] % len(kinds)], rest[1]
                    side.on_frame(kind, rest[2 : 2 + size])
                    rest = rest[2 + size :]
            if side.done:
                raise Finding("a hello without the token")

    (_, opened) = DiallerHello(b"t" * 16, "job", "other", probe=True).open()[0]
    proof = b"\n\x20" + bytes(32)
    challenge = b"\n\x04peer\x12\x20" + bytes(32)
    return run, [
        bytes([0, len(opened)]) + opened + bytes([2, len(proof)]) + proof,
        bytes([1, len(challenge)]) + challenge + bytes([3, len(proof)]) + proof,
    ]


def _headers() -> tuple[Target, list[bytes]]:
    """The header of a call or a reply."""
    from taskgraph.errors import DecodeError
    from taskgraph.protocol import messages as m
    from taskgraph.transport import wire

    value = m.Encoded(b"", (), bytes(16))

    def run(data: bytes) -> None:
        with contextlib.suppress(DecodeError):
            wire.from_header(data)

    stamp = m.Stamp(2, 40)
    samples: list[m.Message] = [
        m.Pull(stamp, 3, 1, 5, "grad"),
        m.Item(stamp, 1, "grad", value),
        m.Report(stamp, 3, 1, True, 2, bytes(16), b"s" * 16, True, {"b": 0.1}, {}),
        m.LedgerPage(2, (m.LedgerEntry(True, "item", 3, 1, "grad", b"d" * 16),)),
        m.WaitsPage(2, (m.Wait("update", "item", 3, "grad", 0.25, (("a", 1), ("b", 2))),)),
        m.RequestRestart(stamp, 3, "why"),
    ]
    return run, [wire.to_header(sample) for sample in samples]


def _values() -> tuple[Target, list[bytes]]:
    """Values, as a message brings them; the first byte says how much of the input is a buffer."""
    import numpy as np
    from google.protobuf import timestamp_pb2

    from taskgraph.errors import DecodeError
    from taskgraph.graph import encoding, values
    from taskgraph.graph.outline import outline
    from taskgraph.graph.values import decode, digest_of, encode
    from taskgraph.protocol.messages import Encoded

    def run(data: bytes) -> None:
        if not data:
            return
        bulk = min(data[0] * 16, len(data) - 1)
        meta, buffer = data[1 : len(data) - bulk], data[len(data) - bulk :]
        encoded = Encoded(meta, (memoryview(buffer),) if bulk else (), b"")
        digest_of(encoded.meta, encoded.buffers)
        for read in (decode, lambda e: decode(e, writable=True), outline):
            with contextlib.suppress(DecodeError):
                read(encoded)

    samples: list[Any] = [
        None,
        [1, -(1 << 70), 2.5, 1j, "text", b"bytes", (), {"k": [None, True]}, {(1, 2): "x"}],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.zeros(2, [("a", "i1"), (("title", "b"), "f8", (2, 2)), ("c", [("d", "M8[25s]")])]),
        [np.longdouble(3), np.void(b"ab"), np.bytes_(b"y"), np.str_("z")],
        {"theta": np.zeros(3), "n": np.int64(4)},
        timestamp_pb2.Timestamp(seconds=3),
    ]
    found = [b"\0" + encode(sample).meta for sample in samples]
    found.append(found[-1].replace(b"Timestamp", b"\xed\xa0\x80estamp"))  # a name with half a character
    with mock.patch.multiple(encoding, INLINE_BYTES=1000), mock.patch.multiple(values, INLINE_BYTES=1000):
        for sample, size in (
            (np.zeros(510), 4080),  # it has a buffer of its own
            ([np.zeros(100), np.zeros(110)], 1680),  # both are in one buffer
        ):
            (buffer,) = (encoded := encode(sample)).buffers
            assert buffer.nbytes == size and size % 16 == 0
            found.append(bytes((size // 16,)) + encoded.meta + bytes(buffer))
    return run, found


def _records() -> tuple[Target, list[bytes]]:
    """What is read from etcd."""
    from taskgraph.driver.spec import JobSpec
    from taskgraph.errors import DecodeError
    from taskgraph.observe.events import Event
    from taskgraph.protocol import records

    kinds: list[Any] = [records.EpochRecord, records.StatusRecord, records.PrimaryRecord, records.MemberRecord]
    kinds += [records.NodeRecord, records.GoneRecord, records.CheckpointRecord, Event, JobSpec]

    def run(data: bytes) -> None:
        if data:
            with contextlib.suppress(DecodeError):
                kinds[data[0] % len(kinds)].from_bytes(data[1:])

    whole = [b'{"epoch": 3, "attempt": 1}', b'{"state": "running"}', b'{"node": "n", "term": 2, "stateful": true}']
    return run, [bytes([n]) + text for n, text in enumerate(whole)]


TARGETS: dict[str, Callable[[], tuple[Target, list[bytes]]]] = {
    "frames": _frames,
    "hello": _hello,
    "headers": _headers,
    "values": _values,
    "records": _records,
}


def checked(target: Target) -> Target:
    """The target with bounds on time, and for one input in `_TRACED` on memory."""
    count = 0

    def run(data: bytes) -> None:
        nonlocal count
        count += 1
        traced = count % _TRACED == 0
        if traced:
            tracemalloc.start()
        began = time.thread_time()  # of the processor: the machine may be busy with other things
        try:
            target(data)
        finally:
            took_s = time.thread_time() - began
            peak = tracemalloc.get_traced_memory()[1] if traced else 0
            if traced:
                tracemalloc.stop()
        if took_s > _SLOW_S:
            raise Finding(f"{took_s:.1f} s for {len(data)} bytes")
        if peak > _PEAK_BYTES + _PEAK_PER_BYTE * len(data):
            raise Finding(f"{peak} bytes of memory for {len(data)}")

    return run


# Without atheris.


def damaged(seeds: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Valid inputs, damaged: more often a little than a lot."""
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(1 + int(rng.expovariate(0.5))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(8):
                case 0 | 1 if at < len(data):
                    data[at] = rng.randrange(256)
                case 2 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case 3:
                    del data[at : at + rng.randrange(1, 20)]
                case 4:
                    data[at:at] = rng.randbytes(rng.randrange(1, 20))
                case 5:
                    number = rng.choice((0, 1, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
                    packed = struct.pack(rng.choice("<>") + "Q", number)
                    data[at : at + 8] = packed[: rng.choice((4, 8))]
                case 6:
                    other = rng.choice(seeds)
                    data[at:] = other[rng.randrange(len(other) + 1) :]
                case _:
                    data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(1, 60)]
            del data[_MAX_INPUT:]
        yield bytes(data)


def fuzz_plain(
    target: Target, seeds: list[bytes], inputs: int, seed: int, keep: Path | None = None
) -> tuple[int, bytes | None]:
    """Runs this many inputs; returns how many, and the one that was a finding.

    Args:
        keep: a file that gets each input before it is run: it is there when the process is not.
    """
    source = damaged(seeds, random.Random(seed))
    for number, data in zip(range(1, inputs + 1), source, strict=False):
        if keep is not None:
            keep.write_bytes(data)
        try:
            target(data)
        except Exception:
            logging.exception("input %d", number)
            return number, data
    return inputs, None


def fuzz_one(name: str, inputs: int, seed: int, plain: bool, keep: Path | None) -> None:
    """One target; ends the process where atheris does it."""
    began = time.monotonic()
    if plain:
        target, seeds = TARGETS[name]()
        ran, found = fuzz_plain(checked(target), seeds, inputs, seed, keep)
        if found is not None:
            Path(f"finding-{name}").write_bytes(found)
        print(json.dumps(_figures(name, "random damage", ran, time.monotonic() - began, found is not None)))
        sys.exit(found is not None)
    import atheris

    with atheris.instrument_imports(include=["taskgraph"]):
        target, seeds = TARGETS[name]()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for number, data in enumerate(seeds):
            (Path(folder) / f"seed-{number}").write_bytes(data)
        limits = [f"-timeout={_HANG_S}", f"-malloc_limit_mb={_MALLOC_MIB}", f"-max_len={_MAX_INPUT}"]
        how = [f"-runs={inputs}", f"-seed={seed + 1}", "-print_final_stats=1", f"-artifact_prefix=finding-{name}-"]
        atheris.Setup([sys.argv[0], *limits, *how, folder], checked(target))
        atheris.Fuzz()


def _figures(name: str, how: str, inputs: int, seconds: float, found: bool) -> dict[str, Any]:
    return {"target": name, "inputs": inputs, "seconds": round(seconds, 1), "how": how, "findings": int(found)}


def run_in_process_of_its_own(name: str, inputs: int, seed: int, plain: bool) -> dict[str, Any]:
    """One target in a process that a crash may take with it; returns the figures."""
    command = [sys.executable, __file__, name, "--inputs", str(inputs), "--seed", str(seed), "--here"]
    began = time.monotonic()
    ended = subprocess.run([*command, *(["--plain"] if plain else [])], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if plain and ended.returncode < 0:  # it crashed: once more, to know with what
        subprocess.run([*command, "--plain", "--keep", f"finding-{name}"], capture_output=True, check=False)
        return _figures(name, "random damage", 0, seconds, True)
    ran = re.search(r"number_of_executed_units: (\d+)", ended.stderr)
    if plain and ended.returncode in (0, 1) and ended.stdout.startswith("{"):
        figures: dict[str, Any] = json.loads(ended.stdout)
    else:
        reached = re.findall(r"cov: (\d+)", ended.stderr)
        figures = _figures(name, "atheris", int(ran[1]) if ran else 0, seconds, ended.returncode != 0)
        figures["covered"] = int(reached[-1]) if reached else 0
    if ended.returncode:
        # What is left out: libFuzzer's progress.
        print("\n".join(line for line in ended.stderr.splitlines() if not line.startswith("#")), file=sys.stderr)
    return figures


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("target", choices=[*TARGETS, "all"])
    options.add_argument("--inputs", type=int, default=100_000, help="of each target (100000)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--plain", action="store_true", help="without atheris, although it is installed")
    options.add_argument("--replay", type=Path, metavar="FILE", help="one input, from a file")
    options.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    names = list(TARGETS) if given.target == "all" else [given.target]
    if given.replay is not None:
        checked(TARGETS[given.target]()[0])(given.replay.read_bytes())
        return 0
    plain = given.plain or importlib.util.find_spec("atheris") is None
    if given.here:
        fuzz_one(given.target, given.inputs, given.seed, plain, given.keep)
        return 0
    found = 0
    for name in names:
        figures = run_in_process_of_its_own(name, given.inputs, given.seed, plain)
        found += figures["findings"]
        print(json.dumps(figures), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
