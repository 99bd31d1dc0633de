"""Flags and requests of one attempt: sends, receives and answers them; each counts once in the ledger.

A request's effects happen exactly once in an attempt. If a request comes again, because its reply was lost or a new
primary of the sender computed it again, it gets the same reply. A pure request has no effects and is in no sum: its
handler may run again, but not while it runs for the same request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import xxhash

from taskgraph.epoch import Epoch, PureEpoch, place_text
from taskgraph.errors import GraphError, Refused, ValueNotEncodable
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.values import encode
from taskgraph.node.epochs.dealing import deal
from taskgraph.node.epochs.pure import PureWatch
from taskgraph.node.epochs.recording import RecordedCall
from taskgraph.node.usercode.coroutines import is_async
from taskgraph.node.usercode.errors import definition_text
from taskgraph.protocol.messages import Accepted, Answer, Encoded, Flag, Reason, Request
from taskgraph.protocol.sums import ContentConflict
from taskgraph.queues.plan import DEAL

if TYPE_CHECKING:
    from taskgraph.node.epochs.attempt import Attempt

__all__ = ["Messenger"]


class Messenger:
    """Sends, takes and answers the flags and requests of one task in one attempt. Lives on the event loop."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._answers: dict[tuple[int, str, int], tuple[bytes, asyncio.Task[Answer]]] = {}
        self._pure: dict[tuple[int, str, int, bytes], asyncio.Task[Answer]] = {}  # that run
        self._counts: dict[tuple[str, int, str], int] = {}
        self._awaited: dict[concurrent.futures.Future[Encoded], tuple[str, int, str]] = {}
        self.terms: dict[int, int] = {}  # task -> term of the primary that replied

    @property
    def awaited(self) -> list[tuple[str, int, str]]:
        """(where, task, method) of every pending request."""
        return list(self._awaited.values())

    def raise_in_waiting_threads(self) -> None:
        """Raises AttemptEnded in threads that wait for replies, since the attempt is over and waits for them to end."""
        for future in list(self._awaited):
            if not future.done():
                future.set_exception(self._attempt.end_error())
        self._awaited.clear()

    def drop(self) -> None:
        """Calls `raise_in_waiting_threads` and frees the replies to other tasks, since the attempt is over."""
        self.raise_in_waiting_threads()
        self._answers.clear()

    # -- out --------------------------------------------------------------------------------------

    async def send_flag(self, where: str, to: int, value: Encoded) -> None:
        """Sends a flag until it is acknowledged, and counts it in the ledger."""
        attempt = self._attempt
        attempt.ledger.count_sent("flag", attempt.task, to, value.digest.hex(), value.digest)
        if attempt.recording is not None:
            attempt.recording.flags.add((to, value.digest))
        reply = await self._call(
            to, lambda: Flag(attempt.stamp, attempt.task, attempt.term, to, value), "a flag", where
        )
        if isinstance(reply, Accepted):
            self.terms[to] = max(self.terms.get(to, 0), reply.term)

    def request(
        self, where: str, to: int, method: str, value: Encoded, future: concurrent.futures.Future[Encoded]
    ) -> Coroutine[Any, Any, None]:
        """Registers a request, and returns the coroutine that sends it and resolves `future`, at the attempt's end with
        AttemptEnded.
        """
        kind = (where, to, method)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1  # the same in every attempt
        self._awaited[future] = kind
        return self._send_request(where, to, method, count, value, future)

    async def _send_request(
        self, where: str, to: int, method: str, count: int, value: Encoded, future: concurrent.futures.Future[Encoded]
    ) -> None:
        """Sends a request until its reply comes, counts both in the ledger unless the handler is pure, and resolves
        `future`.
        """
        attempt = self._attempt
        replied = None
        if attempt.recording is not None:
            replied = attempt.recording.note_request((where, to, method), value)
        number = xxhash.xxh3_64_intdigest(f"{where}#{count}".encode()) >> 1  # the same in every attempt
        try:
            reply = await self._call(
                to,
                lambda: Request(attempt.stamp, attempt.task, attempt.term, to, method, number, value),
                f"request {method!r}",
                where,
            )
            assert isinstance(reply, Answer)
            if not reply.pure:
                name = f"{method}/{number}"
                attempt.ledger.count_sent("request", attempt.task, to, name, value.digest)
                attempt.ledger.count_received("answer", to, attempt.task, name, reply.value.digest)
                self.terms[to] = max(self.terms.get(to, 0), reply.term)
            if replied is not None:
                replied(reply.value)
            if not future.done():
                future.set_result(reply.value)
        finally:
            self._awaited.pop(future, None)
            if not future.done():
                future.set_exception(attempt.end_error())

    async def _call(self, to: int, message: Callable[[], Flag | Request], what: str, where: str) -> Answer | Accepted:
        """Calls a task's primary; turns a refusal into a GraphError that names the code that sent the message."""
        attempt = self._attempt
        # Only a replaced primary can get DONE or CONFLICT.
        lost = f"{what} from task {attempt.task} to task {to} was refused"
        try:
            reply = await attempt.call(to, message, f"{what} to task {to}", lost)
        except Refused as refused:
            who = f"task {attempt.task}, epoch {attempt.number}, {place_text(where)}"
            raise GraphError(f"{who}: {what} to task {to}: {refused}") from refused
        assert isinstance(reply, Answer | Accepted)
        return reply

    # -- in ---------------------------------------------------------------------------------------

    async def take_flag(self, message: Flag) -> Accepted:
        """Takes and acknowledges a flag. `on_flag` runs before the task is idle again; for an equal flag of the same
        sender it does not run again.
        """
        attempt = self._attempt
        if "on_flag" not in attempt.replica.shape.overrides:
            raise Refused(Reason.NOT_OFFERED, f"task {attempt.task} defines no on_flag(epoch, sender, meta)")
        name = message.value.digest.hex()
        if not attempt.ledger.has_received("flag", message.sender, attempt.task, name):
            attempt.check_open()
            attempt.ledger.count_received("flag", message.sender, attempt.task, name, message.value.digest)
            attempt.spawn(self._run_flag(message))
        return Accepted(attempt.term)

    async def _run_flag(self, message: Flag) -> None:
        """Calls `on_flag` for a flag that arrived."""
        attempt = self._attempt
        task = attempt.replica.user_task
        meta = await attempt.replica.decode_value(message.value)
        where = f"on_flag/{message.sender}/{message.value.digest.hex()}"
        epoch, actor, recording = Epoch(attempt, where), attempt.replica.actor, attempt.recording
        on_flag: Callable[..., Any] = task.on_flag
        if recording is not None:
            on_flag = recording.wrap(RecordedCall(None, where, "on_flag", message.sender, message.value), on_flag)
        await actor.call("on_flag", on_flag, epoch, message.sender, meta, attempt=attempt)
        if recording is not None:
            await recording.check_step("on_flag")

    async def take_request(self, message: Request) -> Answer:
        """Runs the handler of a request, and returns its reply. Unless the handler is pure, it runs once for all copies
        of a request.
        """
        attempt = self._attempt
        handler = attempt.replica.shape.handlers.get(message.method)
        if handler is None and message.method == DEAL:
            return await asyncio.shield(self._pure_handler_task(message, DEAL))
        if handler is None:
            known = ", ".join(repr(name) for name in attempt.replica.shape.handlers) or "none"
            raise Refused(Reason.NOT_OFFERED, f"it handles: {known}; add @tg.handles({message.method!r})")
        answer = self._pure_handler_task if handler.pure else self._handler_task
        # The handler belongs to the attempt: it runs to its end though this call may be cancelled.
        return await asyncio.shield(answer(message, handler.method_name))

    def _handler_task(self, message: Request, method_name: str) -> asyncio.Task[Answer]:
        """Returns the asyncio task that runs a handler with effects for a request: the same one for each copy of the
        request.
        """
        attempt = self._attempt
        key = (message.sender, message.method, message.number)
        known = self._answers.get(key)
        if known is None:
            attempt.check_open()
            name = f"{message.method}/{message.number}"
            attempt.ledger.count_received("request", message.sender, attempt.task, name, message.value.digest)
            answer = attempt.spawn(self._run_request(message, method_name, pure=False))
            self._answers[key] = known = (message.value.digest, answer)
        digest, answer = known
        if digest != message.value.digest:
            raise Refused(Reason.CONFLICT, f"the same request {message.method!r} came with another payload before")
        return answer

    def _pure_handler_task(self, message: Request, method_name: str) -> asyncio.Task[Answer]:
        """Returns the asyncio task that runs a pure handler for a request, or deals pieces: if one still runs for an
        earlier copy of the request, that.
        """
        attempt = self._attempt
        key = (message.sender, message.method, message.number, message.value.digest)
        answer = self._pure.get(key)
        if answer is None:
            attempt.check_open()
            work = deal(attempt, message) if method_name == DEAL else None
            answer = self._pure[key] = attempt.spawn(work or self._run_request(message, method_name, pure=True))
            answer.add_done_callback(lambda _: self._pure.pop(key, None))
        return answer

    async def _run_request(self, message: Request, method_name: str, *, pure: bool) -> Answer:
        """Calls the handler of a request; returns its encoded reply, and counts that in the ledger unless the handler
        is pure.
        """
        attempt = self._attempt
        replica = attempt.replica
        payload = await replica.decode_value(message.value)
        where = f"{message.method}/{message.sender}/{message.number}"
        recording = attempt.recording
        handler = getattr(replica.user_task, method_name)
        what = f"task {attempt.task}, epoch {attempt.number}, handler {message.method!r}"
        name, call = f"handler {message.method}", _call_and_encode(handler, f"{what}: its answer", attempt.allocate)
        watch = None
        if pure and recording is not None and recording.note_pure_call(message.method):
            activity, actor = attempt.activity, replica.actor
            watch = PureWatch(attempt.scratch, recording, lambda: bool(activity.open_holds) or actor.waiting > 0)
            call = watch.wrap(call)
        if recording is not None:
            call = recording.wrap(RecordedCall(None, where, method_name, message.sender, message.value), call)
        value = await replica.actor.call(
            name,
            call,
            PureEpoch(attempt, where) if pure else Epoch(attempt, where),
            message.sender,
            payload,
            attempt=attempt,
        )
        if recording is not None:
            recording.answered[where] = value.digest
            await recording.check_step(message.method)
        if watch is not None:
            watch.check(what)
        if not pure:
            name = f"{message.method}/{message.number}"
            try:
                attempt.ledger.count_sent("answer", attempt.task, message.sender, name, value.digest)
            except ContentConflict as conflict:  # cannot be: a handler runs once per identity
                raise AssertionError(str(conflict)) from conflict
        return Answer(attempt.stamp, attempt.term, pure, value)


def _call_and_encode(handler: Callable[..., Any], what: str, allocate: Allocate) -> Callable[..., Any]:
    """Wraps a handler so that it also encodes its reply: a reply that cannot travel is an error of the handler."""
    if is_async(handler):

        async def run_async(*args: Any) -> Encoded:
            return _encode_answer(await handler(*args), handler, what, allocate)

        return run_async

    def run(*args: Any) -> Encoded:
        return _encode_answer(handler(*args), handler, what, allocate)

    return run


def _encode_answer(answer: Any, handler: Callable[..., Any], what: str, allocate: Allocate) -> Encoded:
    try:
        return encode(answer, what=what, allocate=allocate)
    except ValueNotEncodable as error:
        # The handler has returned, so the traceback does not show it.
        raise ValueNotEncodable(f"{error}{definition_text(handler)}") from None
