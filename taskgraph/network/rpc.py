"""gRPC's asyncio channels, in processes that fork.

All channels of a process share one thread of gRPC. Destroying the last channel waits for the end of that thread. A
forked child has no such thread: if its garbage collector finds the parent's last channel in a cycle, the child waits
for ever, at full load. A program that runs a job and forks workers afterwards does not know of channels, and cycles
are common, since exceptions hold frames. Therefore:

- closed connections hold no channel, nor do exceptions that leave a run (`forget_frames`);
- before a fork, channels in cycles are collected, so that the child can connect like any other process;
- in the child, channels that are still referenced (a job runs in another thread, or an exception is kept) are never
  destroyed, and no new one is made, as that would wait for the thread too.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import traceback
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio

from taskgraph.errors import CoordinationError, class_name

__all__ = ["aio_channel", "await_answer", "close", "forget_frames", "living_channels", "wait_within"]

T = TypeVar("T")

_MORE_S = 0.05
"""After the event loop stood still, it reads an answer that came within this time."""
_INNERMOST = "AioChannel"
_open: WeakSet[grpc.aio.Channel] = WeakSet()
_some = False
"""True if channels may be alive: one was made after the last search found none."""
_fork = threading.local()
"""`held`: the channels that the child inherits, during a fork. Several threads may fork at the same time."""
_inherited = False


def aio_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, int | str]]
) -> grpc.aio.Channel:
    """Makes a channel for the running event loop, over TLS if there are credentials; `close` ends it.

    Raises:
        CoordinationError: this process was forked while its parent had channels.
    """
    global _some
    if _inherited:
        raise CoordinationError(
            "this process was forked while its parent was connected to etcd or to nodes (a job ran in another thread, "
            "or an exception of a connection is kept), and gRPC cannot be used in such a child. Fork it when no job "
            'runs, or start it otherwise, e.g. with multiprocessing.get_context("spawn")'
        )
    _some = True
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options)
    _open.add(channel)
    _some = True  # once more: a fork in between found none
    return channel


async def close(channel: grpc.aio.Channel) -> None:
    """Closes a channel, and ends its calls at once."""
    _open.discard(channel)
    await channel.close(None)


def living_channels() -> list[object]:
    """Returns gRPC's inner objects of all channels that still exist, closed ones too. They are found by their class's
    name: they allow no weak reference, and their module is private to gRPC.
    """
    return [found for found in gc.get_objects() if class_name(type(found)) == _INNERMOST]


def forget_frames(error: BaseException, before: BaseException | None) -> None:
    """Clears the frames of an exception and of its causes; their tracebacks keep file and line.

    Args:
        before: the exception that the caller handled already, which keeps its frames.
    """
    seen = {id(before)}
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def _list_open() -> list[object]:
    """Copies the set of open channels; tries again if another thread changes it meanwhile."""
    while True:
        try:
            return list(_open)
        except RuntimeError:  # another thread has made one, or closed one
            continue


async def await_answer(call: Awaitable[T], timeout_s: float) -> T:
    """Waits for the answer of a call, and returns it; without gRPC's own timeout, but cancels the call after
    `timeout_s`.

    gRPC's timeout uses `time.time`, which user code may replace: if that stands still, every call times out at once.

    Raises:
        grpc.aio.AioRpcError: the call failed, or did not answer in time.
    """
    answering = asyncio.ensure_future(call)
    try:
        if await wait_within(answering, timeout_s):
            return answering.result()
    finally:
        answering.cancel()
        del answering  # its exception's traceback leads here: the cycle would keep a channel
    nothing = grpc.aio.Metadata()
    raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "Deadline Exceeded")


async def wait_within(work: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Waits until the work is done or the time is over; returns whether it is done. Adds `_MORE_S` to the time, since
    the event loop may have stood still until it was over.
    """
    if not work.done():
        await _wait_for(work, timeout_s)
    if not work.done():
        await _wait_for(work, _MORE_S)
    return work.done()


async def _wait_for(work: asyncio.Future[Any], timeout_s: float | None) -> None:
    """Waits until the work is done, or the time is over. Not by `asyncio.wait`: since Python 3.14 its frame refers to
    the waiting task, so that a cancelled task is in a cycle with the channel of its call.
    """
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    wake = partial(_set_result, over)
    work.add_done_callback(wake)
    timer = None if timeout_s is None else loop.call_later(timeout_s, _set_result, over)
    try:
        await over
    finally:
        if timer is not None:
            timer.cancel()
        work.remove_done_callback(wake)


def _set_result(future: asyncio.Future[None], _: object = None) -> None:
    if not future.done():
        future.set_result(None)


def _before_fork() -> None:
    """Collects channels in cycles; notes the channels that the child inherits all the same."""
    global _some
    _fork.held = []
    if not _some:
        return
    held = _list_open()
    if not held and living_channels():
        gc.collect()
        held = living_channels()
    _fork.held, _some = held, bool(held)


def _after_in_parent() -> None:
    """Forgets the channels that a child inherited."""
    _fork.held = []


def _after_in_child() -> None:
    """Keeps inherited channels from being destroyed, and forbids new ones."""
    global _inherited
    for channel in _fork.held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))  # else Python destroys it at its end
        _inherited = True


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
