"""What a stranger can make a listener do before it has proven anything: next to nothing. And what is said of it."""

from __future__ import annotations

import contextlib
import logging
import struct
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frames import SMALL, Reading

from taskgraph.errors import DecodeError
from taskgraph.protocol import messages as m
from taskgraph.transport import wire
from taskgraph.transport.frames import (
    MAX_BUFFERS,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    FrameKind,
    Head,
    Limits,
    pack_frame,
)
from taskgraph.transport.hello import (
    HELLO_LIMITS,
    Challenge,
    DiallerHello,
    HelloRefused,
    ListenerHello,
    Open,
    Proof,
    refusal,
)
from taskgraph.transport.refusals import RefusalLog

TOKEN = b"0123456789abcdef"
HELLO_KINDS = [kind for kind in FrameKind if kind.name.startswith("HELLO")]


@contextlib.contextmanager
def at_most(limit_bytes: int) -> Iterator[None]:
    """Fails if the block allocates more memory than the limit at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes


# A head with any numbers in it; most are refused, and none costs anything.
heads = st.builds(
    lambda kind, call, header, buffers, body, payload, meta: struct.pack(
        "!2sBBQIIIQQ16x", b"TG", PROTOCOL_VERSION, kind, call, header, buffers, body, payload, meta
    ),
    st.sampled_from([*FrameKind, 0, 255]),
    st.integers(0, 2**64 - 1),
    *(st.sampled_from([0, 1, 40, 4096, 4097, 2**20, 2**32 - 1]) for _ in range(3)),
    *(st.sampled_from([0, 1, 4096, 2**20, 2**40, 2**64 - 1]) for _ in range(2)),
)


@pytest.mark.parametrize("limits", [HELLO_LIMITS, Limits(header=1 << 16, buffers=1 << 10, payload=1 << 20)])
@settings(deadline=None, max_examples=150)
@given(heads, st.binary(max_size=100), st.lists(st.integers(1, 50), max_size=20))
def test_memory_for_any_head_is_bounded(limits: Limits, head: bytes, rest: bytes, cuts: list[int]) -> None:
    with at_most((192 << 10) + 2 * limits.payload + 100_000 + 200 * limits.buffers), contextlib.suppress(DecodeError):
        Reading(limits).feed(head + rest, cuts)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=500), st.lists(st.integers(1, 50), max_size=20))
def test_memory_for_a_stranger_is_bounded(data: bytes, cuts: list[int]) -> None:
    for prefix in (b"", b"TG\x02", pack_frame(Head(FrameKind.HELLO_OPEN, 0, header=4096))):
        with at_most((192 << 10) + 100_000), contextlib.suppress(DecodeError):
            Reading(HELLO_LIMITS).feed(prefix + data, cuts)


@pytest.mark.parametrize("kind", [kind for kind in FrameKind if not kind.name.startswith("HELLO")])
@pytest.mark.parametrize("body", [1, 1 << 20, 16 << 20])
def test_no_payload_before_the_hello(kind: FrameKind, body: int) -> None:
    """Chunks of unknown messages were skipped, so a stranger could send any number."""
    for payload in (0, body):
        with pytest.raises(DecodeError):
            Reading(HELLO_LIMITS).feed(Head(kind, 1, body=body, payload=payload).pack())


def test_promised_sizes_take_no_memory() -> None:
    """A head that promises the largest header and the most buffers made the reader take 72 MiB at once."""
    reading = Reading()
    with at_most(400_000):
        reading.feed(pack_frame(Head(FrameKind.CALL, 1, header=MAX_HEADER_BYTES, buffers=MAX_BUFFERS)) + bytes(100_000))
    assert reading.reader.mid_frame


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 300_000), max_size=50), st.integers(1, 1_000_000))
def test_large_header_arrives_in_any_pieces(cuts: list[int], size: int) -> None:
    reading = Reading()
    restart = m.RequestRestart(m.Stamp(1, 7), 3, "y" * size)
    header = wire.to_header(restart)
    reading.feed(SMALL + pack_frame(Head(FrameKind.CALL, 9, len(header)), (), header) + SMALL[:0], cuts)
    assert reading.messages[-1] == (9, restart)


# The hello.

frames = st.tuples(st.sampled_from(HELLO_KINDS), st.binary(max_size=120))
opens = st.builds(
    lambda job, node, nonce, probe: (
        FrameKind.HELLO_OPEN,
        msgspec.msgpack.encode(Open(job, node, nonce, probe)),
    ),
    st.sampled_from(["job", "other"]),
    st.sampled_from(["", "peer"]),
    st.sampled_from([b"", bytes(32)]),
    st.booleans(),
)
challenges = st.builds(
    lambda nonce: (FrameKind.HELLO_CHALLENGE, msgspec.msgpack.encode(Challenge("n", nonce))),
    st.sampled_from([bytes(32), bytes(31)]),
)
proofs = st.builds(
    lambda kind, proof: (kind, msgspec.msgpack.encode(Proof(proof))),
    st.sampled_from([FrameKind.HELLO_PROOF, FrameKind.HELLO_WELCOME]),
    st.sampled_from([b"", bytes(32), b"\xff" * 32]),
)


@pytest.mark.parametrize(
    "side", [lambda: ListenerHello(TOKEN, "job", "n"), lambda: DiallerHello(TOKEN, "job", "n", probe=False)]
)
@settings(deadline=None, max_examples=150)
@given(st.lists(frames | opens | challenges | proofs, max_size=6))
def test_hello_needs_the_token(
    side: Callable[[], ListenerHello | DiallerHello], said: list[tuple[FrameKind, bytes]]
) -> None:
    hello = side()
    with contextlib.suppress(DecodeError, HelloRefused):
        for kind, data in said:
            for _, answer in hello.on_frame(kind, data):
                assert TOKEN not in answer and len(answer) <= HELLO_LIMITS.header
    assert not hello.done


def test_hello_steps_come_in_order_and_once() -> None:
    one, other = DiallerHello(TOKEN, "job", "a", probe=False), ListenerHello(TOKEN, "job", "b")
    steps: list[tuple[DiallerHello | ListenerHello, FrameKind]] = [
        (other, FrameKind.HELLO_OPEN),
        (one, FrameKind.HELLO_CHALLENGE),
        (other, FrameKind.HELLO_PROOF),
        (one, FrameKind.HELLO_WELCOME),
    ]
    said: dict[FrameKind, bytes] = dict(one.open())
    for turn in range(len(steps) + 1):
        for side in (one, other):
            expected = next((kind for whose, kind in steps[turn:] if whose is side), None)
            for kind in set(FrameKind) - {expected, FrameKind.HELLO_REFUSE}:
                with pytest.raises(DecodeError, match=rf"{kind.name} where HELLO_\w+ was expected"):
                    side.on_frame(kind, said.get(kind, b""))
        for whose, kind in steps[turn : turn + 1]:
            said |= whose.on_frame(kind, said[kind])
    assert one.done and other.done


def test_refusal_of_a_listener_is_one_short_line() -> None:
    """A stranger may listen on the port of a dead node, and nodes log its refusal."""
    why = "no\n2026-01-01 root INFO all is well \x1b[31m\N{SNOWMAN}" + "z" * 3000
    refused = refusal(why)
    with pytest.raises(HelloRefused) as caught:
        DiallerHello(TOKEN, "job", "a", probe=False).on_frame(FrameKind.HELLO_REFUSE, refused)
    said = str(caught.value)
    assert said.startswith("no?2026-01-01 root INFO all is well ?[31m?zzz")
    assert said.isascii() and said.isprintable() and len(said) <= 300


def test_proofs_contain_the_channel_binding() -> None:
    """Proofs of one connection are not valid on another."""
    for mine, theirs, meet in ((b"", b"", True), (b"x" * 48, b"x" * 48, True), (b"x" * 48, b"", False)):
        one, other = DiallerHello(TOKEN, "job", "a", probe=False), ListenerHello(TOKEN, "job", "b")
        one.binding, other.binding = mine, theirs
        ((_, opened),) = one.open()
        ((_, challenge),) = other.on_frame(FrameKind.HELLO_OPEN, opened)
        ((_, proof),) = one.on_frame(FrameKind.HELLO_CHALLENGE, challenge)
        if not meet:
            with pytest.raises(HelloRefused, match="wrong token"):
                other.on_frame(FrameKind.HELLO_PROOF, proof)
            continue
        ((_, welcome),) = other.on_frame(FrameKind.HELLO_PROOF, proof)
        one.on_frame(FrameKind.HELLO_WELCOME, welcome)
        assert one.done and other.done


# What is said of them.


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_refusal_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RefusalLog(logging.getLogger("refusals"), clock)
    for _ in range(1000):
        refusals.add("1.2.3.4", "wrong token")
    clock.now += 59
    refusals.add("1.2.3.4", "wrong token")
    assert said(caplog) == ["refused a connection from 1.2.3.4: wrong token"]
    clock.now += 2
    refusals.add("5.6.7.8", "wrong token")
    assert said(caplog)[1:] == [
        "refused 1000 more connections since, for like reasons",
        "refused a connection from 5.6.7.8: wrong token",
    ]
    assert refusals.count == 1002


def test_number_of_refusal_lines_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog(logging.getLogger("refusals"), Clock())
    for size in range(5000, 6000):
        refusals.add("x", f"a header of {size} bytes; the limit is 4096")
    assert len(said(caplog)) == 1
    for number in range(1000):
        refusals.add("x", "".join(chr(ord("g") + int(digit)) for digit in str(number)) + "!")
    assert len(said(caplog)) == 20


def test_text_of_refusal_lines_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog(logging.getLogger("refusals"), Clock())
    refusals.add("a\nb", "no\r\n2026-01-01 root INFO all is well \x1b[31m\N{SNOWMAN}" + "z" * 10_000)
    (line,) = said(caplog)
    assert line.startswith("refused a connection from a?b: no??2026-01-01 root INFO all is well ?[31m?zzz")
    assert line.isascii() and line.isprintable() and len(line) < 400
