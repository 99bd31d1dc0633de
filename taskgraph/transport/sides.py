"""The two sides of a session: the one that calls, and the one that serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from taskgraph.errors import DecodeError, PeerLost, Refused
from taskgraph.protocol.messages import Call, Reason, Refusal, Reply
from taskgraph.transport import wire
from taskgraph.transport.calls import answer, answer_later, answer_now, answered, describe
from taskgraph.transport.frames import Head, Incoming, Kind
from taskgraph.transport.hello import Answering, Dialling
from taskgraph.transport.session import VERIFY_AT_ONCE_BYTES, Owner, Session

__all__ = ["AcceptedSession", "DialledSession"]

log = logging.getLogger("taskgraph.transport")

#: Calls of one session that are being received or served at a time; more are refused as PAUSED.
MAX_CALLS = 1 << 17
#: How often a call is made that carries, or brings, memory that cannot be opened: as bytes from the second time on.
_TRIES = 4


@dataclass(eq=False, slots=True)
class _Pending:
    """A call that waits for its reply."""

    message: Call
    reply: asyncio.Future[Reply]
    number: int = 0
    tries: int = 0


class DialledSession(Session):
    """The calling side."""

    _opening_kind = Kind.REPLY

    def __init__(self, owner: Owner, hello: Dialling, *, wanted: str, hello_s: float) -> None:
        super().__init__(owner, hello, hello_s=hello_s)
        self.wanted = wanted  # the node that was meant; another may listen there now
        self._pending: dict[int, _Pending] = {}
        self._last_call = 0
        self.hello_done: asyncio.Future[None] = self._loop.create_future()

    def _opened(self) -> None:
        super()._opened()
        if not self.hello_done.done():
            self.hello_done.set_result(None)

    def begin(self, message: Call) -> asyncio.Future[Reply]:
        """Sends a call; cancelling the future cancels the handler at the peer.

        Raises:
            PeerLost, Refused: it cannot be sent. What comes of it, the future tells.
        """
        if not self.open:
            raise PeerLost(f"node {self.peer}: {self.why or 'no hello yet'}")
        value = wire.value_of(message)
        if value is not None and value.size_bytes > self._owner.max_value_bytes:
            raise Refused(
                Reason.BAD_MESSAGE,
                f"{describe(message)}: {value.size_bytes} bytes; max_value_bytes is {self._owner.max_value_bytes}",
            )
        pending = _Pending(message, self._loop.create_future())
        self._send_call(pending)
        pending.reply.add_done_callback(partial(self._over, pending))
        return pending.reply

    def _send_call(self, pending: _Pending) -> None:
        message = pending.message
        header = wire.to_header(message)  # raises ValueError or TypeError: the caller's mistake
        self._last_call = pending.number = self._last_call + 1
        pending.tries += 1
        self._pending[pending.number] = pending
        self._send(Kind.CALL, pending.number, header, wire.value_of(message))

    def _over(self, pending: _Pending, reply: asyncio.Future[Reply]) -> None:
        if not reply.cancelled():
            reply.exception()  # seen, even if nobody looks
        elif self._pending.pop(pending.number, None) is not None and not self.why:
            self._reader.drop(Kind.REPLY, pending.number)
            if self._take_back(pending.number):
                self._outbox.send(Kind.CANCEL, pending.number)

    def _admits(self, head: Head, parsed: wire.ParsedHeader) -> bool:
        if not 0 < head.call <= self._last_call:
            raise DecodeError(f"a reply to call {head.call}, which was never made")
        pending = self._pending.get(head.call)
        if pending is None:
            return False  # it was cancelled meanwhile
        expected = wire.REPLY_OF[type(pending.message)]
        if parsed.cls is not expected and parsed.cls is not Refusal:
            raise DecodeError(f"a {parsed.cls.__name__} where a {expected.__name__} was expected")
        return True

    def _no_memory(self, head: Head) -> None:
        pending = self._pending.pop(head.call)
        if not pending.reply.done():
            text = f"no memory for a reply of {head.payload} bytes"
            pending.reply.set_exception(Refused(Reason.BAD_MESSAGE, text))

    def _cannot_borrow(self, head: Head) -> None:
        self._on_decline(head.call)

    def _on_decline(self, call: int) -> None:
        pending = self._pending.pop(call, None)
        if pending is None or pending.reply.done():
            return
        if not self.open:
            pending.reply.set_exception(PeerLost(f"node {self.peer}: {self.why}"))
        elif pending.tries >= _TRIES:
            pending.reply.set_exception(PeerLost(f"node {self.peer} goes on lending what cannot be opened here"))
        else:
            self._send_call(pending)  # calls may be made twice: that is how they survive a session, too

    def _on_complete(self, incoming: Incoming) -> None:
        pending = self._pending.pop(incoming.head.call, None)
        if pending is None or pending.reply.done():
            return
        if incoming.parsed.digest is None or incoming.head.payload < VERIFY_AT_ONCE_BYTES:
            try:
                message = self._received_now(incoming)
            except PeerLost as error:
                _settle(pending.reply, error)
            else:
                _settle(pending.reply, message)
        else:
            work = self._settle_later(pending.reply, incoming)
            self._owner.tasks.spawn(work, name=f"verify a reply of {self.peer}")

    async def _settle_later(self, reply: asyncio.Future[Reply], incoming: Incoming) -> None:
        try:
            message = await self._received(incoming)
        except PeerLost as error:
            _settle(reply, error)
        except asyncio.CancelledError:
            _settle(reply, PeerLost("this node's transport is closed"))
            raise
        else:
            _settle(reply, message)

    def _release(self) -> None:
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            if not pending.reply.done():
                pending.reply.set_exception(PeerLost(f"node {self.peer}: {self.why}"))
        if not self.hello_done.done():
            self.hello_done.set_exception(PeerLost(self.why))
            self.hello_done.exception()  # seen, even if the dial was given up


def _settle(reply: asyncio.Future[Reply], came: Reply | PeerLost) -> None:
    if reply.done():
        return
    if isinstance(came, PeerLost):
        reply.set_exception(came)
    elif isinstance(came, Refusal):
        reply.set_exception(Refused(came.reason, came.text))
    else:
        reply.set_result(came)


class AcceptedSession(Session):
    """The serving side."""

    _opening_kind = Kind.CALL

    def __init__(self, owner: Owner, hello: Answering, *, hello_s: float) -> None:
        super().__init__(owner, hello, hello_s=hello_s)
        self._calls: dict[int, asyncio.Future[Any] | None] = {}  # who makes the reply; None: still being received

    def _admits(self, head: Head, parsed: wire.ParsedHeader) -> bool:
        if self.probe:
            raise DecodeError("a call in a session that was dialled as a probe")
        if parsed.cls not in wire.CALLS:
            raise DecodeError(f"a {parsed.cls.__name__} as a call")
        if head.call in self._calls:
            raise DecodeError(f"call {head.call} is made twice")
        if len(self._calls) >= MAX_CALLS:
            self._reply(head.call, Refusal(Reason.PAUSED, f"{MAX_CALLS} calls of this session are being served"))
            return False
        self._calls[head.call] = None
        return True

    def _no_memory(self, head: Head) -> None:
        del self._calls[head.call]
        log.error("no memory for a call of %d bytes from node %s", head.payload, self.peer)
        self._reply(head.call, Refusal(Reason.BAD_MESSAGE, f"no memory for a call of {head.payload} bytes"))

    def _cannot_borrow(self, head: Head) -> None:
        del self._calls[head.call]

    def _on_complete(self, incoming: Incoming) -> None:
        number, parsed = incoming.head.call, incoming.parsed
        if parsed.digest is None:
            call = cast(Call, parsed.message(None))
            reply = answer_now(self._owner.serve, self.peer, call)
            if isinstance(reply, asyncio.Future):
                self._calls[number] = reply
                reply.add_done_callback(partial(self._answered, number, call))
                return
            if reply is not None:
                del self._calls[number]
                self._reply(number, reply)
                return
            work = self._serve(number, partial(answer_later, self._owner.serve, self.peer, call))
        else:
            work = self._serve(number, partial(self._receive_and_answer, incoming))
        task = self._owner.tasks.spawn(work, name=f"serve {self.peer} {number}")
        self._calls[number] = task
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    def _answered(self, number: int, call: Call, future: asyncio.Future[Reply]) -> None:
        if self._calls.pop(number, None) is not None and not future.cancelled():
            self._reply(number, answered(future, self.peer, call))
        elif not future.cancelled():
            future.exception()  # nobody wants it any more

    async def _receive_and_answer(self, incoming: Incoming) -> Reply:
        call = await self._received(incoming)
        del incoming  # see `_serve`
        return await answer(self._owner.serve, self.peer, call)

    async def _serve(self, number: int, answers: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
        answering = answers()  # not before: a task that is cancelled before it begins would leave it unawaited
        del answers  # the handler alone decides how long a value lives
        reply = await answering
        if number in self._calls:  # else it was cancelled, and the handler went on regardless
            self._reply(number, reply)

    def _reply(self, number: int, reply: Reply) -> None:
        value = wire.value_of(reply)
        limit = self._owner.max_value_bytes
        if value is not None and value.size_bytes > limit:
            log.error("a reply of %d bytes; max_value_bytes is %d", value.size_bytes, limit)
            text = f"the reply has {value.size_bytes} bytes; max_value_bytes is {limit}"
            reply, value = Refusal(Reason.BAD_MESSAGE, text), None
        try:
            header = wire.to_header(reply)
        except (TypeError, ValueError) as error:
            log.exception("a %s cannot travel", type(reply).__name__)
            text = f"the reply cannot travel: {error}"
            header, value = wire.to_header(Refusal(Reason.BAD_MESSAGE, text)), None
        self._send(Kind.REPLY, number, header, value)

    def _on_cancel(self, call: int) -> None:
        self._reader.drop(Kind.CALL, call)
        self._take_back(call)
        task = self._calls.pop(call, None)
        if task is not None:
            task.cancel()

    def _release(self) -> None:
        calls, self._calls = self._calls, {}
        for task in calls.values():
            if task is not None:
                task.cancel()
