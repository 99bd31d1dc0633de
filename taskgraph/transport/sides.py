"""The two kinds of session: `DialledSession` makes calls, `AcceptedSession` serves them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, cast

from taskgraph.errors import DecodeError, PeerLost, Refused
from taskgraph.protocol.deviceloss import device_error
from taskgraph.protocol.messages import Accepted, Call, Encoded, EncodedOnDevice, Pull, Reason, Refusal, Reply
from taskgraph.protocol.records import name_of
from taskgraph.transport import wire
from taskgraph.transport.api import PendingReply
from taskgraph.transport.calls import OpenCall, answer, answer_all_now, answer_later, answer_now, describe
from taskgraph.transport.devicelending import DeviceBorrowing, DeviceLending, DeviceTicket, OpenMemory
from taskgraph.transport.frames import FrameKind, Head
from taskgraph.transport.hello import DiallerHello, ListenerHello
from taskgraph.transport.incoming import IncomingMessage
from taskgraph.transport.mappings import CannotBorrow
from taskgraph.transport.session import VERIFY_AT_ONCE_BYTES, Session, SessionOwner, call_on_loop_soon
from taskgraph.transport.wire import REPLY_OF

__all__ = ["AcceptedSession", "DialledSession"]

log = logging.getLogger("taskgraph.transport")

#: Calls that a session receives or serves at a time; further calls are refused as PAUSED.
MAX_CALLS = 1 << 17
#: Calls that one frame may make.
MAX_COUNT = 1 << 10
_NUMBERS: Final = 1 << 64  # call ids that fit into a head
#: With more calls than this, a session stops reading for a turn of the event loop after it made a task. uvloop reads
#: up to 32 times in a turn, and other work would wait for seconds.
_BUSY_CALLS: Final = 1 << 10
#: Tries of a call whose message or reply is in memory that cannot be opened. Bytes are sent from the second on.
_TRIES = 4
_REPLY: Final = FrameKind.REPLY  # a global: faster than a member of an enum


class _PendingCall(OpenCall):
    """The future of a call on a session. To cancel it cancels the call."""

    __slots__ = ("first", "number", "session")
    session: DialledSession
    number: int
    first: int  # number of the first call in the frame; mostly its own
    quiet = False  # there may be no reply, and the peer does not hear of a cancellation
    tries = 1

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        self.session.on_cancelled(self)
        if self.listener is not None:
            self._call_listener_soon()
        return True


class DialledSession(Session):
    """The side of a session that dialled its connection: this side calls, and the peer answers."""

    _opening_kinds = (FrameKind.REPLY, FrameKind.REPLY_ON_DEVICE)

    def __init__(self, owner: SessionOwner, hello: DiallerHello, *, wanted: str, hello_s: float) -> None:
        super().__init__(owner, hello, hello_s=hello_s)
        self.wanted = wanted  # the node to be called; another node may listen there now
        self._pending: dict[int, _PendingCall] = {}
        self._last_call = 0
        self._devices = DeviceBorrowing(self._return_tickets, partial(call_on_loop_soon, self._loop))
        self.hello_done: asyncio.Future[None] = self._loop.create_future()

    def _schedule_return(self) -> None:
        self._owner.returning[self.peer] = self  # mostly the peer calls, too, and gets the leases with a reply

    def _on_hello_done(self) -> None:
        super()._on_hello_done()
        if not self.hello_done.done():
            self.hello_done.set_result(None)

    def begin(self, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply]:
        """Sends a call. To cancel the future cancels the handler at the peer, unless the call is quiet.

        Raises:
            PeerLost, Refused: the call cannot be sent.
        """
        if not self.open:
            raise PeerLost(f"node {self.peer}: {self.why or 'no hello yet'}")
        value = wire.value_of(message)
        if value is not None and value.size_bytes > self._owner.max_value_bytes:
            raise Refused(
                Reason.BAD_MESSAGE,
                f"{describe(message)}: {value.size_bytes} bytes; max_value_bytes is {self._owner.max_value_bytes}",
            )
        pending = _PendingCall(loop=self._loop)
        pending.session, pending.message, pending.listener = self, message, None
        if quiet:
            pending.quiet = True
        self._send_call(pending, value)
        return pending

    def begin_all(self, message: Pull) -> list[asyncio.Future[Reply]]:
        """Sends the calls of a pull for several epochs in one frame, and returns their futures, in order."""
        if not self.open:
            raise PeerLost(f"node {self.peer}: {self.why or 'no hello yet'}")
        header = wire.to_header(message)
        first, self._last_call = self._last_call + 1, self._last_call + message.count
        calls: list[asyncio.Future[Reply]] = []
        loop, waiting = self._loop, self._pending
        for number in range(first, first + message.count):
            waiting[number] = pending = _PendingCall(loop=loop)
            pending.session, pending.message, pending.listener = self, message, None
            pending.first, pending.number = first, number
            calls.append(pending)
        self._outbox.send_several(FrameKind.CALL, first, header)
        return calls

    def _send_call(self, pending: _PendingCall, value: Encoded | None) -> None:
        """Numbers a call, lists it as pending, and sends it."""
        message = pending.message
        header = wire.to_header(message)
        self._last_call = pending.number = pending.first = self._last_call + 1
        self._pending[pending.number] = pending
        self._outbox.send(FrameKind.TELL if pending.quiet else FrameKind.CALL, pending.number, header, value)

    def on_cancelled(self, pending: _PendingCall) -> None:
        """Forgets a call that its caller cancelled; tells the peer, if it was sent and is not quiet."""
        if self._pending.pop(pending.number, None) is None or self.why:
            return
        self._reader.drop(pending.number)
        if pending.quiet and self._outbox.idle:
            return  # it was sent
        if self._take_back(pending.number) and not pending.quiet:
            self._outbox.send(FrameKind.CANCEL, pending.number)

    def _admit(self, call: int, cls: type) -> bool:
        if not 0 < call <= self._last_call:
            raise DecodeError(f"a reply to call {call}, which was never made")
        if call not in self._pending:
            return False  # cancelled
        expected = wire.REPLY_OF[type(self._pending[call].message)]
        if cls is not expected and cls is not Refusal:
            raise DecodeError(f"a {cls.__name__} where a {expected.__name__} was expected")
        return True

    def _on_no_memory(self, head: Head) -> None:
        text = f"{name_of(self._hello.node)} has no memory for a reply of {head.payload} bytes"
        self._pending.pop(head.call).fail(Refused(Reason.NO_MEMORY, text))
        self._outbox.send(FrameKind.CANCEL, head.call)  # skips the rest, and returns its tickets

    def _on_cannot_borrow(self, call: int) -> None:
        self._on_decline(call)

    def _on_decline(self, call: int) -> None:
        pending = self._pending.pop(call, None)
        if pending is not None:
            self._retry(pending)

    def _retry(self, pending: _PendingCall) -> None:
        """Sends a call again after memory of its message or its reply could not be opened; fails it after `_TRIES`."""
        if pending.done():
            return  # cancelled
        if not self.open:
            pending.fail(PeerLost(f"node {self.peer}: {self.why}"))
        elif pending.tries >= _TRIES:
            pending.fail(PeerLost(f"node {self.peer} keeps lending memory that cannot be opened"))
        else:
            # Calls may arrive twice: receivers know them by their identity.
            pending.tries += 1
            if type(pending.message) is Pull and pending.message.count != 1:
                pending.message = pending.message.each(pending.number - pending.first)
            self._send_call(pending, wire.value_of(pending.message))

    def _on_complete(self, incoming: IncomingMessage) -> None:
        if incoming.head.kind is FrameKind.REPLY_ON_DEVICE:
            self._on_tickets(incoming)
            return
        pending = self._pending.pop(incoming.head.call, None)
        if pending is None:
            return
        if wire.value_of(incoming.message) is None or incoming.head.payload < VERIFY_AT_ONCE_BYTES:
            try:
                pending.settle(self._complete_now(incoming))
            except PeerLost as error:
                pending.fail(error)
        else:
            work = self._settle_later(pending, incoming)
            self._owner.tasks.spawn(work, name=f"verify a reply of {self.peer}")

    async def _settle_later(self, pending: _PendingCall, incoming: IncomingMessage) -> None:
        """Checks the value of a large reply in a thread, then settles the call."""
        try:
            pending.settle(await self._complete(incoming))
        except PeerLost as error:
            pending.fail(error)
        except asyncio.CancelledError:
            pending.fail(PeerLost("this node's transport is closed"))
            raise

    def _on_tickets(self, incoming: IncomingMessage) -> None:
        """Handles a reply with tickets for device memory: takes its value there, after a thread has opened the
        memory.
        """
        value = incoming.complete()
        if value is None:
            raise DecodeError(
                f"a {type(incoming.message).__name__} without tickets in a {FrameKind.REPLY_ON_DEVICE.name}"
            )
        tickets = self._devices.read_tickets(value, self._owner.max_value_bytes)
        pending = self._pending.pop(incoming.head.call, None)
        if pending is None:
            return
        if self._devices.unopened(tickets):
            work = self._open_and_take(pending, incoming, value, tickets)
            self._owner.tasks.spawn(work, name=f"open memory of {self.peer}")
        else:
            self._take_from_device(pending, incoming, value, tickets)

    async def _open_and_take(
        self, pending: _PendingCall, incoming: IncomingMessage, value: Encoded, tickets: Sequence[DeviceTicket]
    ) -> None:
        """Opens the memory of tickets in a thread, then takes the value; on an error, declines device memory."""
        try:
            while unopened := self._devices.unopened(tickets):  # others may be closed meanwhile
                self._devices.keep(await self._owner.in_thread(partial(self._devices.open, unopened)), tickets)
        except asyncio.CancelledError:
            pending.fail(PeerLost("this node's transport is closed"))
            raise
        except Exception as error:
            self._decline_device(pending, tickets, error)
        else:
            self._take_from_device(pending, incoming, value, tickets)

    def _take_from_device(
        self, pending: _PendingCall, incoming: IncomingMessage, value: Encoded, tickets: Sequence[DeviceTicket]
    ) -> None:
        """Settles a call with a value in the peer's device memory; on an error, calls again without device memory."""
        try:
            there = self._devices.take(value, tickets)
        except Exception as error:
            self._decline_device(pending, tickets, error)
            return
        pending.settle(cast(Reply, wire.with_value(incoming.message, there)))

    def _decline_device(self, pending: _PendingCall, tickets: Sequence[DeviceTicket], error: Exception) -> None:
        """Gives the tickets back, and sends the call again: the peer then copies its values to the host's memory."""
        text = "device memory of node %s cannot be opened, so values go by the host's memory: %s"
        if isinstance(error, CannotBorrow):
            log.info(text, self.peer, error)
        else:
            log.error(text, self.peer, error, exc_info=error)
        self._devices.give_back(tickets)
        self._outbox.send(FrameKind.DECLINE_ON_DEVICE)
        self._retry(pending)

    def _return_tickets(self, numbers: bytes) -> None:
        if self.open:
            self._outbox.send(FrameKind.RETURN_ON_DEVICE, header=numbers)

    def trim(self) -> None:
        self._close_in_thread(self._devices.trim())

    def _close_in_thread(self, opened: list[OpenMemory]) -> None:
        """Drops opened memory in a thread, since the device may be slow."""
        if opened:
            self._owner.in_thread_soon(opened.clear)

    def _take_whole(self, kind: FrameKind, call: int, message: Reply) -> None:
        pending = self._pending.get(call)
        if pending is None or kind is not _REPLY or type(message) is not REPLY_OF[type(pending.message)]:
            super()._take_whole(kind, call, message)
            return
        del self._pending[call]
        pending.settle(message)

    def _take(self, kind: FrameKind, call: int, message: Reply) -> None:
        if kind is not FrameKind.REPLY:
            raise DecodeError(f"a {type(message).__name__} without tickets in a {kind.name}")
        self._pending.pop(call).settle(message)

    def _end_calls(self) -> None:
        self._close_in_thread(self._devices.end())
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            pending.fail(PeerLost(f"node {self.peer}: {self.why}"))
        if not self.hello_done.done():
            self.hello_done.set_exception(PeerLost(self.why))
            self.hello_done.exception()  # so that asyncio does not log it


class AcceptedSession(Session):
    """The side of a session that accepted its connection: the peer calls, and this side answers."""

    _opening_kinds = (FrameKind.CALL, FrameKind.TELL)

    def __init__(self, owner: SessionOwner, hello: ListenerHello, *, hello_s: float) -> None:
        super().__init__(owner, hello, hello_s=hello_s)
        # Number of a call -> the task or the pending reply; None while the call is received.
        self._calls: dict[int, asyncio.Future[Any] | PendingReply | None] = {}
        self._devices = DeviceLending()
        self._backpressure = False  # the peer does not read its replies
        self._resting = False  # until the next turn of the event loop

    def _on_same_host(self) -> None:
        self._devices.start()

    def _on_backpressure(self, full: bool) -> None:
        """Stops reading from a peer that does not read our replies."""
        self._backpressure = full
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        """Pauses reading while the peer does not read our replies, or while many calls are served; else resumes it."""
        if self.open:
            assert self._transport is not None
            if self._backpressure or self._resting:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _end_rest(self) -> None:
        """Reads from the peer again, after a rest of one turn of the event loop."""
        self._resting = False
        self._pause_or_resume()

    def _on_device(self, kind: FrameKind, data: bytes) -> None:
        if kind is FrameKind.RETURN_ON_DEVICE:
            self._devices.take_returned(data)
        else:
            self._devices.stop()

    def _admit(self, call: int, cls: type) -> bool:
        if self.probe:
            raise DecodeError("a call in a session that was dialled as a probe")
        if cls not in wire.REPLY_OF:
            raise DecodeError(f"a {cls.__name__} as a call")
        if call in self._calls:
            raise DecodeError(f"call {call} is made twice")
        if len(self._calls) >= MAX_CALLS:
            self._reply(call, _too_many_calls())
            return False
        self._calls[call] = None
        return True

    def _on_no_memory(self, head: Head) -> None:
        del self._calls[head.call]
        log.error("no memory for a call of %d bytes from node %s", head.payload, self.peer)
        text = f"{name_of(self._hello.node)} has no memory for a call of {head.payload} bytes"
        self._reply(head.call, Refusal(Reason.NO_MEMORY, text))

    def _on_cannot_borrow(self, call: int) -> None:
        del self._calls[call]

    def _on_decline(self, call: int) -> None:
        self._devices.take_back(call)  # the peer skipped that reply

    def _on_complete(self, incoming: IncomingMessage) -> None:
        call = incoming.head.call
        if wire.value_of(incoming.message) is None:
            self._take(incoming.head.kind, call, cast(Call, incoming.message))
        else:
            self._spawn(call, partial(self._receive_and_answer, incoming))

    def _take(self, kind: FrameKind, call: int, message: Call) -> None:
        if type(message) is Pull and message.count != 1:
            self._take_all(call, message)
            return
        reply = answer_now(self._owner.serve, self.peer, message)
        if reply is None:
            self._spawn(call, partial(answer_later, self._owner.serve, self.peer, message))
        elif isinstance(reply, PendingReply):
            self._calls[call] = reply
            reply.listen(self._reply, call)
        elif type(reply) is Accepted and kind is FrameKind.TELL:
            del self._calls[call]
        else:
            self._reply(call, reply)

    def _take_all(self, first: int, pull: Pull) -> None:
        """Serves a frame that makes several calls. Each call has a number of its own."""
        if not 0 < pull.count <= MAX_COUNT:
            raise DecodeError(f"a frame of {pull.count} calls")
        if first + pull.count > _NUMBERS:
            raise DecodeError(f"{pull.count} calls from number {first} on; numbers have 64 bits")
        del self._calls[first]
        numbers = range(first, first + pull.count)
        if not self._calls.keys().isdisjoint(numbers):
            raise DecodeError(f"one of the calls {first} to {numbers[-1]} is made twice")
        if len(self._calls) + pull.count > MAX_CALLS:
            for number in numbers:
                self._reply(number, _too_many_calls())
            return
        serve, caller, answered = self._owner.serve, self.peer, self._reply
        for nth, reply in enumerate(answer_all_now(serve, caller, pull)):
            number = first + nth
            if isinstance(reply, PendingReply):
                self._calls[number] = reply
                if reply.reply is None:
                    reply.listener, reply.number = answered, number
                else:
                    answered(number, reply.reply)
            elif reply is None:
                self._spawn(number, partial(answer_later, serve, caller, pull.each(nth)))
            else:
                self._reply(number, reply)

    def _spawn(self, number: int, answers: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
        """Starts an asyncio task that answers a call. Beyond `_BUSY_CALLS` of them, stops reading from the peer for a
        turn of the event loop.
        """
        task = self._owner.tasks.spawn(self._serve(number, answers), name=f"serve {self.peer} {number}")
        self._calls[number] = task
        task.add_done_callback(partial(self._on_served, number))
        if len(self._calls) > _BUSY_CALLS and not self._resting:
            self._resting = True
            self._pause_or_resume()
            self._loop.call_soon(self._end_rest)

    def _on_served(self, number: int, task: asyncio.Task[Any]) -> None:
        if self._calls.get(number) is task:  # else the call was cancelled, or its reply is copied from a device
            del self._calls[number]

    async def _receive_and_answer(self, incoming: IncomingMessage) -> Reply:
        """Completes a call with a value, and returns its reply."""
        call = await self._complete(incoming)
        del incoming  # see `_serve`
        return await answer(self._owner.serve, self.peer, call)

    async def _serve(self, number: int, answers: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
        """Answers a call and sends the reply, unless the call was cancelled."""
        answering = answers()  # here, since a task may be cancelled before it runs
        del answers  # the handler alone keeps the value of the call alive
        reply = await answering
        if number in self._calls:  # else the call was cancelled
            self._reply(number, reply)

    def _reply(self, number: int, reply: Reply) -> None:
        """Sends the reply to a call. Values on a device that cannot be lent are copied first."""
        self._calls.pop(number, None)
        kind, limit, value = _REPLY, self._owner.max_value_bytes, wire.value_of(reply)
        if value is not None and value.size_bytes > limit:
            log.error("a reply of %d bytes; max_value_bytes is %d", value.size_bytes, limit)
            text = f"the reply has {value.size_bytes} bytes; max_value_bytes is {limit}"
            reply, value = Refusal(Reason.BAD_MESSAGE, text), None
        if type(value) is EncodedOnDevice:
            value, kind = self._devices.lend(number, value), FrameKind.REPLY_ON_DEVICE
            if value is None:
                self._spawn(number, partial(self._stage_reply, reply))
                return
        try:
            header = wire.to_header(reply)
        except (TypeError, ValueError, OverflowError) as error:
            log.exception("a %s cannot travel", type(reply).__name__)
            text = f"the reply cannot travel: {error}"
            header, value = wire.to_header(Refusal(Reason.BAD_MESSAGE, text)), None
            kind = FrameKind.REPLY
            self._devices.take_back(number)
        self._outbox.send(kind, number, header, value)
        if (returning := self._owner.returning) and (other := returning.pop(self.peer, None)):
            other.give_back()

    async def _stage_reply(self, reply: Reply) -> Reply:
        """Returns the reply with the buffers that cannot be lent copied to the host; a refusal if the copy fails."""
        value = wire.value_of(reply)
        assert value is not None
        try:
            hosted = await self._owner.copy_to_host(value, but=self._devices.can_lend)
        except Exception as error:
            # The epoch restarts, and the task meets the error of its device itself.
            log.exception("a %s cannot be copied to the host", type(reply).__name__)
            return _copy_failed(error)
        return cast(Reply, wire.with_value(reply, hosted))

    def _on_cancel(self, call: int) -> None:
        self._reader.drop(call)
        self._take_back(call)
        self._devices.take_back(call)  # also after it was sent: the caller skips it
        task = self._calls.pop(call, None)
        if task is not None:
            task.cancel()

    def _end_calls(self) -> None:
        self._devices.spoil_all()
        calls, self._calls = self._calls, {}
        for task in calls.values():
            if task is not None:
                task.cancel()


def _too_many_calls() -> Refusal:
    return Refusal(Reason.PAUSED, f"{MAX_CALLS} calls of this session are being served")


def _copy_failed(error: Exception) -> Refusal:
    reason = Reason.NOT_COPIED if device_error(error) is None else Reason.DEVICE_ERROR
    return Refusal(reason, f"it cannot be copied to the host: {type(error).__name__}: {error}")
