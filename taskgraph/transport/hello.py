"""The hello of a session: both sides prove that they know the token of the job, and which node they are.

    dialler  -> OPEN       job, node of the dialler, nonce a
    listener -> CHALLENGE  node of the listener, nonce b
    dialler  -> PROOF      HMAC(token, "dialler",  version, job, both nodes, a, b)
    listener -> WELCOME    HMAC(token, "listener", version, job, both nodes, a, b)

1. The token is never sent.
2. A recorded hello is useless: both sides choose a new nonce. So is a reflected one: the proofs contain the role.
3. With TLS the proofs contain the channel binding, so they are valid on one connection only.
4. The dialler proves itself first. A stranger learns a random number and the id of a node.
5. Either side may send REFUSE with a reason at any step, and close the connection.

The classes do no I/O: `on_frame` takes a frame and returns the frames to send.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, TypeVar

import msgspec

from taskgraph.errors import DecodeError
from taskgraph.transport.frames import PROTOCOL_VERSION, FrameKind, Limits
from taskgraph.transport.refusals import printable

__all__ = ["HELLO_LIMITS", "DiallerHello", "HelloRefused", "ListenerHello", "refusal", "token_mark"]

#: The most that a stranger can make this process read.
HELLO_LIMITS = Limits(header=4096, buffers=0, payload=0)
_NONCE_BYTES = 32

Frames = list[tuple[FrameKind, bytes]]


def token_mark(token: bytes) -> str:
    """Returns a public digest of the token. Nodes compare it; it gives no access."""
    return hmac.new(token, b"taskgraph mark", hashlib.sha256).hexdigest()[:16]


class HelloRefused(Exception):
    """The hello failed. `tell`: the reason has to be sent to the peer (False: the peer refused)."""

    def __init__(self, why: str, *, tell: bool) -> None:
        super().__init__(why)
        self.tell = tell


def _proof(token: bytes, role: bytes, job: str, dialler: str, listener: str, *random: bytes) -> bytes:
    """Returns the HMAC, keyed by the token, over the role, the version, the job, both nodes and the nonces."""
    mac = hmac.new(token, digestmod=hashlib.sha256)
    for part in (role, str(PROTOCOL_VERSION).encode(), job.encode(), dialler.encode(), listener.encode(), *random):
        mac.update(len(part).to_bytes(4, "big") + part)  # with lengths, so that different parts give different bytes
    return mac.digest()


Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class _HelloContent(msgspec.Struct, frozen=True, array_like=True):
    """The base of the contents of HELLO frames. Readers skip fields that a later version adds."""


class Open(_HelloContent, frozen=True):
    """The content of HELLO_OPEN, which a dialler sends first. `probe`: the dialler wants the hello only."""

    job: str
    node: Annotated[str, msgspec.Meta(min_length=1)]
    nonce: Nonce
    probe: bool


class Challenge(_HelloContent, frozen=True):
    """The content of HELLO_CHALLENGE, the listener's answer to HELLO_OPEN."""

    node: str
    nonce: Nonce


class Proof(_HelloContent, frozen=True):
    """The content of HELLO_PROOF and HELLO_WELCOME: the HMAC-SHA256 of the dialler, and of the listener."""

    proof: bytes


class Refuse(_HelloContent, frozen=True):
    """The content of HELLO_REFUSE: why its sender closes the connection."""

    why: str


def refusal(why: str) -> bytes:
    """Returns the content of a HELLO_REFUSE frame."""
    return _pack(Refuse(why))


S = TypeVar("S", bound=_HelloContent)
_pack = msgspec.msgpack.encode


def _parse(cls: type[S], data: bytes) -> S:
    """Decodes the content of a HELLO frame. Raises DecodeError if it is none."""
    try:
        return msgspec.msgpack.decode(data, type=cls)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"a hello that cannot be read: {error}") from None


class _Hello:
    """The base of `DiallerHello` and `ListenerHello`: one side of a hello.

    Attributes:
        node: this node.
        peer: the other node. Not to be trusted before `done`.
        done: both sides proved themselves.
        probe: the session ends after the hello.
        binding: the channel binding of TLS, or b"". To be set before the first frame.
    """

    def __init__(self, token: bytes, job: str, node: str) -> None:
        self._token = token
        self._job = job
        self.node = node
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._peer_nonce = b""
        self._expected = FrameKind.HELLO_OPEN
        self.peer = ""
        self.probe = False
        self.done = False
        self.binding = b""

    def _nonces(self, a: bytes, b: bytes) -> tuple[bytes, ...]:
        """Returns the nonces and, over TLS, the channel binding: what makes a proof valid for one connection only."""
        return (a, b, self.binding) if self.binding else (a, b)

    def _expect(self, kind: FrameKind, data: bytes) -> None:
        """Raises HelloRefused for a refusal of the peer, and DecodeError if the frame is not the next step."""
        if kind is FrameKind.HELLO_REFUSE:
            why = printable(_parse(Refuse, data).why)  # the peer may be a stranger
            raise HelloRefused(why, tell=False)
        if kind is not self._expected or self.done:
            raise DecodeError(f"{kind.name} where {self._expected.name} was expected")


class DiallerHello(_Hello):
    """The dialler's side of a hello."""

    def __init__(self, token: bytes, job: str, node: str, *, probe: bool) -> None:
        super().__init__(token, job, node)
        self.probe = probe
        self._expected = FrameKind.HELLO_CHALLENGE

    def open(self) -> Frames:
        """Returns the first frames of the hello, to be sent before any answer."""
        return [(FrameKind.HELLO_OPEN, _pack(Open(self._job, self.node, self._nonce, self.probe)))]

    def _proof_of(self, role: bytes) -> bytes:
        """Returns the proof that the dialler or the listener has to send."""
        return _proof(self._token, role, self._job, self.node, self.peer, *self._nonces(self._nonce, self._peer_nonce))

    def on_frame(self, kind: FrameKind, data: bytes) -> Frames:
        """Takes a frame, and returns the frames to send.

        Raises:
            HelloRefused: the listener refused, or does not know the token.
            DecodeError: the frame is not the next step of a hello.
        """
        self._expect(kind, data)
        if kind is FrameKind.HELLO_CHALLENGE:
            challenge = _parse(Challenge, data)
            self.peer, self._peer_nonce = challenge.node, challenge.nonce
            self._expected = FrameKind.HELLO_WELCOME
            return [(FrameKind.HELLO_PROOF, _pack(Proof(self._proof_of(b"dialler"))))]
        proof = _parse(Proof, data).proof
        if not hmac.compare_digest(proof, self._proof_of(b"listener")):
            raise HelloRefused("it does not know this job's token", tell=True)
        self.done = True
        return []


class ListenerHello(_Hello):
    """The listener's side of a hello."""

    def _proof_of(self, role: bytes) -> bytes:
        """Returns the proof that the dialler or the listener has to send."""
        return _proof(self._token, role, self._job, self.peer, self.node, *self._nonces(self._peer_nonce, self._nonce))

    def on_frame(self, kind: FrameKind, data: bytes) -> Frames:
        """Takes a frame, and returns the frames to send.

        Raises:
            HelloRefused: the dialler belongs to another job, or does not know the token.
            DecodeError: the frame is not the next step of a hello.
        """
        self._expect(kind, data)
        if kind is FrameKind.HELLO_OPEN:
            opened = _parse(Open, data)
            if opened.job != self._job:
                raise HelloRefused("another job's nodes listen here", tell=True)
            self.peer, self.probe, self._peer_nonce = opened.node, opened.probe, opened.nonce
            self._expected = FrameKind.HELLO_PROOF
            return [(FrameKind.HELLO_CHALLENGE, _pack(Challenge(self.node, self._nonce)))]
        proof = _parse(Proof, data).proof
        if not hmac.compare_digest(proof, self._proof_of(b"dialler")):
            raise HelloRefused("wrong token", tell=True)
        self.done = True
        return [(FrameKind.HELLO_WELCOME, _pack(Proof(self._proof_of(b"listener"))))]
