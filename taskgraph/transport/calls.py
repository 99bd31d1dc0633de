"""Parts that all transports share: futures of calls, serving, the owner of tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from taskgraph.errors import PeerLost, Refused, TransportError
from taskgraph.protocol.messages import Accepted, Call, Pull, Reason, Refusal, Reply
from taskgraph.transport.api import CallFuture, PendingReply, Serve, ServeAll, ServeNow
from taskgraph.transport.wire import REPLY_OF

__all__ = [
    "OpenCall",
    "OwnedTasks",
    "answer",
    "answer_all_now",
    "answer_later",
    "answer_now",
    "answer_quietly",
    "call_self",
    "describe",
    "try_answer_all_now",
    "unwrap",
]

log = logging.getLogger("taskgraph.transport")
T = TypeVar("T")


def describe(call: Call) -> str:
    """Describes a call in a few words, without its value."""
    name = getattr(call, "tag", None) or getattr(call, "method", None)
    what = f"{type(call).__name__} {name!r}" if name else type(call).__name__
    stamp = getattr(call, "stamp", None)
    at = f", epoch {stamp.epoch}, attempt {stamp.attempt}" if stamp is not None else ""
    task = getattr(call, "task", None)
    return f"{what}{f' to task {task}' if task is not None else ''}{at}"


class OpenCall(CallFuture):
    """The future of a call, for the transport that sent the call, and settles or fails it."""

    __slots__ = ("message",)
    message: Call  # also of one call of a pull for several epochs

    def settle(self, reply: Reply) -> None:
        """Sets the reply and calls the listener at once; a refusal fails the call. Does nothing if the call is done."""
        if type(reply) is Refusal:
            self.fail(Refused(reply.reason, reply.text))
            return
        try:
            self.set_result(reply)
        except asyncio.InvalidStateError:
            return  # cancelled or failed
        if (listener := self.listener) is not None:
            self.listener = None
            try:
                listener(self)
            except Exception as error:  # must not reach the session
                context = {"message": f"the listener of {describe(self.message)} failed", "exception": error}
                self.get_loop().call_exception_handler(context)

    def fail(self, error: TransportError) -> None:
        """Ends the call with an error, unless it is done."""
        if not self.done():
            self.set_exception(error)
            self.exception()  # so that asyncio does not log it
            self._call_listener_soon()

    def _call_listener_soon(self) -> None:
        """Calls the listener from the event loop, after an error or a cancellation."""
        if (listener := self.listener) is not None:
            self.listener = None
            self.get_loop().call_soon(listener, self)


def answer_now(serve: Serve, caller: str, call: Call) -> Reply | PendingReply | None:
    """Calls `serve.answer_now`; None: it is not there, or cannot answer now. An error becomes a refusal."""
    now: ServeNow | None = getattr(serve, "answer_now", None)
    if now is None:
        return None
    try:
        reply = now(caller, call)
    except Exception as error:
        return _to_refusal(error, caller, call)
    if type(reply) is REPLY_OF[type(call)]:
        return reply
    return reply if reply is None or isinstance(reply, PendingReply) else _check_type(reply, caller, call)


def answer_all_now(serve: Serve, caller: str, pull: Pull) -> list[Reply | PendingReply | None]:
    """Answers the calls of a pull for several epochs now, in order; None for each that has to wait."""
    replies = try_answer_all_now(serve, caller, pull)
    if replies is None:
        replies = [answer_now(serve, caller, pull.each(nth)) for nth in range(pull.count)]
    return replies


def try_answer_all_now(serve: Serve, caller: str, pull: Pull) -> list[Reply | PendingReply | None] | None:
    """Calls `serve.answer_all_now`; None: it is not there, or cannot answer all together. An error becomes a refusal of
    all calls.
    """
    every: ServeAll | None = getattr(serve, "answer_all_now", None)
    try:
        return None if every is None else every(caller, pull)
    except Exception as error:
        return [_to_refusal(error, caller, pull)] * pull.count


async def answer(serve: Serve, caller: str, call: Call) -> Reply:
    """Serves a call and returns the reply; an error of the handler becomes a refusal."""
    return await answer_later(serve, caller, call, answer_now(serve, caller, call))


async def answer_quietly(serve: Serve, caller: str, call: Call) -> Reply | None:
    """Serves a quiet call. Returns None if it was accepted at once: its caller gets no reply."""
    reply = answer_now(serve, caller, call)
    return None if type(reply) is Accepted else await answer_later(serve, caller, call, reply)


async def answer_later(serve: Serve, caller: str, call: Call, now: Reply | PendingReply | None = None) -> Reply:
    """Returns the reply to a call for which `answer_now` returned `now`: that reply, the reply that it is pending
    for, or, if `now` is None, the reply of `serve`. An error becomes a refusal.
    """
    if now is not None and not isinstance(now, PendingReply):
        return now
    try:
        reply = await (serve(caller, call) if now is None else now)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The handler was not cancelled, but something that it awaited was. The caller must not wait for ever.
        log.exception("serving %s for node %s was cut off", describe(call), caller)
        return Refusal(Reason.BAD_MESSAGE, "something that the handler awaited was cancelled")
    except Exception as error:
        return _to_refusal(error, caller, call)
    return _check_type(reply, caller, call)


def _to_refusal(error: Exception, caller: str, call: Call) -> Refusal:
    """Makes a refusal of an error of the handler; logs an unexpected one."""
    if isinstance(error, Refused):
        text = str(error)
        return Refusal(error.reason, "" if text == error.reason else text)
    log.error("serving %s for node %s failed", describe(call), caller, exc_info=error)
    return Refusal(Reason.BAD_MESSAGE, f"{type(error).__name__}: {error}")


def _check_type(reply: Reply, caller: str, call: Call) -> Reply:
    """Returns the reply; in place of a reply of a wrong type, logs the mistake and returns a refusal."""
    if type(reply) is not REPLY_OF[type(call)] and type(reply) is not Refusal:
        log.error("%s for node %s was answered with a %s", describe(call), caller, type(reply).__name__)
        return Refusal(Reason.BAD_MESSAGE, f"the handler answered with a {type(reply).__name__}")
    return reply


def unwrap(reply: Reply) -> Reply:
    """Returns a reply that is no refusal. Raises `Refused` for a refusal."""
    if isinstance(reply, Refusal):
        raise Refused(reply.reason, reply.text)
    return reply


class OwnedTasks:
    """Tasks that end with their owner. Unexpected exceptions are logged."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}  # a dict keeps the order: a seed repeats a schedule

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Starts a coroutine as an asyncio task of this owner."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, TransportError):  # the awaiting code handles these
            log.error("%s failed", task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Cancels all tasks except the calling one, and waits until they have ended."""
        mine = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not mine]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # lets their done callbacks run


async def call_self(tasks: OwnedTasks, serve: Serve, node: str, call: Call) -> Reply:
    """Serves a call of a node to itself, in a task.

    Raises:
        PeerLost: the transport was closed.
        Refused: the handler refused the call.
    """
    task = tasks.spawn(answer(serve, node, call), name=f"serve {node} itself")
    try:
        await asyncio.wait((task,))
    finally:
        task.cancel()
    if task.cancelled():
        raise PeerLost("this node's transport is closed")
    return unwrap(task.result())
