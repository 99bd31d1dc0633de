"""gRPC's asyncio channels, and what becomes of them where their process is forked.

All channels of a process share one thread of gRPC's, and whoever forgets the last of them waits for its end. A forked
child has no such thread: where its garbage collector finds the last channel of its parent in a cycle, it waits for
ever, busily, whatever the child was forked for. A program that runs a job and forks workers afterwards knows nothing of
channels, and cycles come about anywhere, as exceptions hold frames. Therefore:

- what is closed holds no channel, and no exception that leaves a run (`forget_frames`);
- before a fork what is left of them in cycles is collected, so that the child can connect like any other process;
- in the child, channels that somebody holds all the same are never forgotten: a job runs in another thread, or an
  exception is kept. None is made there, as that would wait for the thread, too.
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

__all__ = ["aio_channel", "alive", "answered", "close", "forget_frames", "within"]

T = TypeVar("T")

_MORE_S = 0.05
"""What came while the event loop stood still is read within this."""
_INNERMOST = "AioChannel"
_open: WeakSet[grpc.aio.Channel] = WeakSet()
_some = False
"""Whether any may be alive: one was made since none was found."""
_fork = threading.local()
"""What a child is to inherit (`held`), while it is forked: by each thread for itself, as several may fork at a time."""
_inherited = False


def aio_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, int]]
) -> grpc.aio.Channel:
    """A channel for the running event loop, over TLS where there are credentials; `close` ends it.

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
    """Ends it, and its calls at once."""
    _open.discard(channel)
    await channel.close(None)


def alive() -> list[object]:
    """Channels that are not forgotten, closed ones too. A call holds the innermost part of its own, so that is asked
    for; it cannot be referred to weakly. By its name: its module is gRPC's own affair."""
    return [found for found in gc.get_objects() if class_name(type(found)) == _INNERMOST]


def forget_frames(error: BaseException, before: BaseException | None) -> None:
    """Has an exception, and those that led to it, keep where they came from, and nothing that their frames held there.

    Args:
        before: what was handled when that began which failed: it is its caller's, as what led to it is.
    """
    seen = {id(before)}
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def _now_open() -> list[object]:
    while True:
        try:
            return list(_open)
        except RuntimeError:  # another thread has made one, or closed one
            continue


async def answered(call: Awaitable[T], timeout_s: float) -> T:
    """The answer of a call that was made without gRPC's own timeout.

    That goes by `time.time`, which code of users replaces: where it stands still every call would time out at once. One
    that is given up is cancelled, and the other side hears of that.

    Raises:
        grpc.aio.AioRpcError: it failed, or did not answer in time, as gRPC would say it.
    """
    answering = asyncio.ensure_future(call)
    try:
        if await within(answering, timeout_s):
            return answering.result()
    finally:
        answering.cancel()
        del answering  # which has what it failed with, whose traceback leads here: in a cycle a channel stays
    nothing = grpc.aio.Metadata()
    raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "Deadline Exceeded")


async def within(work: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Whether it is done in time: by what came, and not by when the event loop, which may have stood still, read it."""
    if not work.done():
        await _until(work, timeout_s)
    if not work.done():
        await _until(work, _MORE_S)
    return work.done()


async def _until(work: asyncio.Future[Any], timeout_s: float | None) -> None:
    """Returns when it is done, or the time is over. As `asyncio.wait`, whose frame has the task that waits since Python
    3.14: one that is cancelled there is in a cycle, with the channel of its call."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    wake = partial(_set, over)
    work.add_done_callback(wake)
    timer = None if timeout_s is None else loop.call_later(timeout_s, _set, over)
    try:
        await over
    finally:
        if timer is not None:
            timer.cancel()
        work.remove_done_callback(wake)


def _set(future: asyncio.Future[None], _: object = None) -> None:
    if not future.done():
        future.set_result(None)


def _before_fork() -> None:
    global _some
    _fork.held = []
    if not _some:
        return
    held = _now_open()
    if not held and alive():
        gc.collect()
        held = alive()
    _fork.held, _some = held, bool(held)


def _after_in_parent() -> None:
    _fork.held = []


def _after_in_child() -> None:
    global _inherited
    for channel in _fork.held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))  # what Python refers to it forgets at its end
        _inherited = True


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
