"""The hello: both sides of a new connection prove that they know the job's token, and who they are.

    dialler  -> OPEN       job, node of the dialler, nonce a
    listener -> CHALLENGE  node of the listener, nonce b
    dialler  -> PROOF      HMAC(token, "dialler",  version, job, both nodes, a, b)
    listener -> WELCOME    HMAC(token, "listener", version, job, both nodes, a, b)

The token never travels. A recorded hello is useless, since each side contributes a fresh nonce; a reflected one too,
since each side's proof names its role. Inside TLS both proofs cover the connection's channel binding as well: nobody
can pass them on from one connection to another. The dialler proves itself first: whoever does not know the token learns
a random number and a node's id. Either side may send REFUSE with a reason instead, and hang up.

No I/O here: frames in, frames out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, TypeVar

import msgspec

from taskgraph.errors import DecodeError
from taskgraph.transport.frames import PROTOCOL_VERSION, Kind, Limits
from taskgraph.transport.refusals import printable

__all__ = ["HELLO_LIMITS", "Answering", "Dialling", "HelloRefused", "mark", "refusal"]

#: All a stranger can make this process read: ids and a nonce.
HELLO_LIMITS = Limits(header=4096, buffers=0, payload=0)
_NONCE_BYTES = 32

Frames = list[tuple[Kind, bytes]]


def mark(token: bytes) -> str:
    """By which it is seen that two have the same token: nothing is opened by it, so anybody may know it."""
    return hmac.new(token, b"taskgraph mark", hashlib.sha256).hexdigest()[:16]


class HelloRefused(Exception):
    """The hello failed. `tell` says whether the peer still has to hear why (False: it was the peer who refused)."""

    def __init__(self, why: str, *, tell: bool) -> None:
        super().__init__(why)
        self.tell = tell


def _proof(token: bytes, role: bytes, job: str, dialler: str, listener: str, *random: bytes) -> bytes:
    mac = hmac.new(token, digestmod=hashlib.sha256)
    for part in (role, str(PROTOCOL_VERSION).encode(), job.encode(), dialler.encode(), listener.encode(), *random):
        mac.update(len(part).to_bytes(4, "big") + part)  # lengths: no two lists of parts give the same bytes
    return mac.digest()


Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class _Step(msgspec.Struct, frozen=True, array_like=True):
    """The base of the contents of HELLO frames. Readers skip fields that a later version adds."""


class Open(_Step, frozen=True):
    """Dialler to listener, the first frame of a session. A probe wants the hello only."""

    job: str
    node: Annotated[str, msgspec.Meta(min_length=1)]
    nonce: Nonce
    probe: bool


class Challenge(_Step, frozen=True):
    """Listener to dialler."""

    node: str
    nonce: Nonce


class Proof(_Step, frozen=True):
    """An HMAC-SHA256: the dialler's in HELLO_PROOF, the listener's in HELLO_WELCOME, after which calls may come."""

    proof: bytes


class Refuse(_Step, frozen=True):
    """Either side, in place of any other frame; then the connection is closed."""

    why: str


def refusal(why: str) -> bytes:
    """The content of a HELLO_REFUSE."""
    return _pack(Refuse(why))


S = TypeVar("S", bound=_Step)
_pack = msgspec.msgpack.encode


def _parse(cls: type[S], data: bytes) -> S:
    try:
        return msgspec.msgpack.decode(data, type=cls)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"a hello that cannot be read: {error}") from None


class _Hello:
    """What both sides share.

    Attributes:
        node: the one that this side is.
        peer: the node of the other side; to be believed only once `done`.
        done: both sides have proven themselves.
        probe: the session ends after the hello.
        binding: what is known to the two ends of this connection alone; b"" without TLS. To be set before `open`, and
            before the first frame.
    """

    def __init__(self, token: bytes, job: str, node: str) -> None:
        self._token = token
        self._job = job
        self.node = node
        self._mine = secrets.token_bytes(_NONCE_BYTES)
        self._theirs = b""
        self._expected = Kind.HELLO_OPEN
        self.peer = ""
        self.probe = False
        self.done = False
        self.binding = b""

    def _random(self, a: bytes, b: bytes) -> tuple[bytes, ...]:
        return (a, b, self.binding) if self.binding else (a, b)

    def _expect(self, kind: Kind, data: bytes) -> None:
        if kind is Kind.HELLO_REFUSE:
            why = printable(_parse(Refuse, data).why)  # of somebody who has proven nothing
            raise HelloRefused(why, tell=False)
        if kind is not self._expected or self.done:
            raise DecodeError(f"{kind.name} where {self._expected.name} was expected")


class Dialling(_Hello):
    """The dialler's side."""

    def __init__(self, token: bytes, job: str, node: str, *, probe: bool) -> None:
        super().__init__(token, job, node)
        self.probe = probe
        self._expected = Kind.HELLO_CHALLENGE

    def open(self) -> Frames:
        return [(Kind.HELLO_OPEN, _pack(Open(self._job, self.node, self._mine, self.probe)))]

    def _proof_of(self, role: bytes) -> bytes:
        return _proof(self._token, role, self._job, self.node, self.peer, *self._random(self._mine, self._theirs))

    def on_frame(self, kind: Kind, data: bytes) -> Frames:
        """What to send next.

        Raises:
            HelloRefused: the other side said no, or does not know the token.
            DecodeError: not a hello.
        """
        self._expect(kind, data)
        if kind is Kind.HELLO_CHALLENGE:
            challenge = _parse(Challenge, data)
            self.peer, self._theirs = challenge.node, challenge.nonce
            self._expected = Kind.HELLO_WELCOME
            return [(Kind.HELLO_PROOF, _pack(Proof(self._proof_of(b"dialler"))))]
        proof = _parse(Proof, data).proof
        if not hmac.compare_digest(proof, self._proof_of(b"listener")):
            raise HelloRefused("it does not know this job's token", tell=True)
        self.done = True
        return []


class Answering(_Hello):
    """The listener's side."""

    def _proof_of(self, role: bytes) -> bytes:
        return _proof(self._token, role, self._job, self.peer, self.node, *self._random(self._theirs, self._mine))

    def on_frame(self, kind: Kind, data: bytes) -> Frames:
        """What to send next.

        Raises:
            HelloRefused: another job, or a dialler that does not know the token.
            DecodeError: not a hello.
        """
        self._expect(kind, data)
        if kind is Kind.HELLO_OPEN:
            opened = _parse(Open, data)
            if opened.job != self._job:
                raise HelloRefused("another job's nodes listen here", tell=True)
            self.peer, self.probe, self._theirs = opened.node, opened.probe, opened.nonce
            self._expected = Kind.HELLO_PROOF
            return [(Kind.HELLO_CHALLENGE, _pack(Challenge(self.node, self._mine)))]
        proof = _parse(Proof, data).proof
        if not hmac.compare_digest(proof, self._proof_of(b"dialler")):
            raise HelloRefused("wrong token", tell=True)
        self.done = True
        return [(Kind.HELLO_WELCOME, _pack(Proof(self._proof_of(b"listener"))))]
