"""Hands file descriptors to other processes of this host. Their handles may travel there by any way.

A piece of a device's memory may be a file descriptor that no other process can open by a path, /proc included: it must
be sent by a socket. So a process that offers such memory has a thread that sends descriptors on request, to processes
of the same user. A descriptor is sent once per piece of memory and process, not once per value: nothing here is fast.

**`withdraw` takes no lock**: finalizers call it, which may run in the middle of any code, also of this module. And it
closes nothing: the thread may be about to send that descriptor, and by then the number may be that of another file.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from typing import Final

from taskgraph.device.api import HANDLE_BYTES

__all__ = ["any_withdrawn", "close_withdrawn", "fetch", "offer", "withdraw"]

log = logging.getLogger("taskgraph.devices")

_HANDLE: Final = struct.Struct("!16sQ")
"""The process that offers the descriptor, and the descriptor's number there; padded."""
_NUMBER: Final = struct.Struct("!Q")
"""The request of a client."""
_FD: Final = struct.Struct("@i")
_CREDENTIALS: Final = struct.Struct("@iII")
_HERE: Final = b"\1"
_GONE: Final = b"\0"
_CLIENT_S: Final = 1.0
"""How long the others wait for a client that says nothing."""
_PAUSE_S: Final = 0.05
"""Between tries while no connection can be accepted: this process has too many files open, as a rule."""
_BUSY_S: Final = 0.01
"""Between tries while a server has too many clients waiting."""


class _Server:
    """The descriptors that this process offers. It listens from the first offer on.

    Attributes:
        key: names it.
    """

    def __init__(self) -> None:
        self.key = os.urandom(16)
        self._numbers = itertools.count(1)
        self._offered: dict[int, int] = {}
        self._withdrawn: deque[int] = deque()
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._listener: socket.socket | None = None

    def offer(self, fd: int) -> int:
        self._start()
        os.set_inheritable(fd, False)
        number = next(self._numbers)
        self._offered[number] = fd
        return number

    def withdraw(self, number: int) -> None:
        fd = self._offered.pop(number, None)
        if fd is not None:
            self._withdrawn.append(fd)

    def take_withdrawn(self) -> list[int]:
        """Returns withdrawn descriptors, once. They are not being sent, and no client can ask for them."""
        with self._sending:
            return self._take_withdrawn()

    def _take_withdrawn(self) -> list[int]:
        return [self._withdrawn.popleft() for _ in range(len(self._withdrawn))]  # others only append

    def forget(self) -> list[int]:
        """Returns all descriptors, and stops listening, in a child of this process: the thread does not run there, and
        locks may stay locked. If the child kept descriptors, memory would stay that its parent freed. If it listened,
        no process could see that its parent ended."""
        if self._listener is not None:
            self._listener.close()
        return [*self._offered.values(), *self._take_withdrawn()]

    def _start(self) -> None:
        with self._starting:
            if self._listener is not None:
                return
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.settimeout(None)  # whatever the default is
                listener.bind(_address(self.key))
                listener.listen()
                threading.Thread(target=self._serve, args=(listener,), name="device-handles", daemon=True).start()
            except BaseException as error:
                listener.close()
                if isinstance(error, RuntimeError):
                    raise OSError(f"no thread can be started that hands descriptors out: {error}") from error
                raise
            self._listener = listener

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except Exception as error:  # it may repeat: the client reports that no descriptor comes
                log.debug("no client can be accepted: %s", error)
                time.sleep(_PAUSE_S)
                continue
            with client:
                try:
                    self._answer(client)
                except Exception as error:  # it was slow, or left
                    log.debug("a client got no descriptor: %s", error)

    def _answer(self, client: socket.socket) -> None:
        if not _is_of_this_user(client):
            return
        client.settimeout(_CLIENT_S)
        asked = client.recv(_NUMBER.size)  # what is sent at once is received at once, by sockets of this kind
        if len(asked) != _NUMBER.size:
            return
        (number,) = _NUMBER.unpack(asked)
        # By hand: `socket.send_fds` drops flags before Python 3.14. A client that left must be no SIGPIPE.
        with self._sending:
            fd = self._offered.get(number)
            if fd is not None:
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
                client.sendmsg([_HERE], passed, socket.MSG_NOSIGNAL)
                return
        client.send(_GONE, socket.MSG_NOSIGNAL)


_server = _Server()


def _after_fork() -> None:
    global _server
    inherited, _server = _server, _Server()
    _close(inherited.forget())


os.register_at_fork(after_in_child=_after_fork)


def offer(fd: int) -> bytes:
    """Takes a descriptor over: from now on other processes of the same user can fetch a duplicate by the handle.

    Raises:
        OSError: the descriptor remains the caller's.
    """
    _need_linux()
    close_withdrawn()
    server = _server
    return _HANDLE.pack(server.key, server.offer(fd)).ljust(HANDLE_BYTES, b"\0")


def withdraw(handle: bytes) -> None:
    """Stops offering a descriptor; `close_withdrawn` closes it. Duplicates in other processes stay open.

    Finalizers may call it: it waits for nothing. Nothing is done where it was withdrawn before, or is not of this
    process, which may be a child of the one that offered it.
    """
    server = _server
    if len(handle) == HANDLE_BYTES:
        key, number = _HANDLE.unpack_from(handle)
        if key == server.key:
            server.withdraw(number)


def close_withdrawn() -> None:
    """Closes what was withdrawn. To be called now and then, in a thread: the last who closes memory frees it."""
    _close(_server.take_withdrawn())


def any_withdrawn() -> bool:
    """True if there is a descriptor to close."""
    return bool(_server._withdrawn)


def fetch(handle: bytes, timeout_s: float = 5.0) -> int:
    """Returns a new descriptor of what this or another process offered. It blocks: call it in a worker thread.

    Raises:
        OSError: there is none. ConnectionRefusedError: no process listens; TimeoutError: no answer in time.
    """
    _need_linux()
    if len(handle) != HANDLE_BYTES:
        raise OSError(f"no handle of a descriptor: it has {len(handle)} bytes, not {HANDLE_BYTES}")
    key, number = _HANDLE.unpack_from(handle)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            return _fetch(server, key, number, time.monotonic() + timeout_s)
    except TimeoutError:
        raise TimeoutError(f"who offered the descriptor did not send it within {timeout_s} s") from None
    except ConnectionRefusedError:
        text = "the process that offered the descriptor ended, or is in another network namespace"
        raise ConnectionRefusedError(text) from None
    except ConnectionError as error:
        raise _unanswered() from error


def _fetch(server: socket.socket, key: bytes, number: int, until: float) -> int:
    while True:
        server.settimeout(_left(until))
        try:
            server.connect(_address(key))
            break
        except BlockingIOError:  # too many wait already: unlike others, these sockets do not wait for that
            time.sleep(min(_BUSY_S, _left(until)))
    if not _is_of_this_user(server):  # the name of a process that ended is anybody's
        raise OSError("the descriptor would come from a process of another user")
    server.settimeout(_left(until))
    server.send(_NUMBER.pack(number), socket.MSG_NOSIGNAL)
    server.settimeout(_left(until))
    # By hand: `socket.recv_fds` drops flags before Python 3.14. Programs that this process starts must not inherit it.
    room = socket.CMSG_LEN(_FD.size)
    answer, passed, _, _ = server.recvmsg(len(_HERE), room, socket.MSG_CMSG_CLOEXEC)
    if answer == _GONE:
        raise OSError("the descriptor was withdrawn by the process that offered it")
    if answer != _HERE:
        raise _unanswered()
    for level, kind, data in passed:
        if (level, kind, len(data)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.size):
            fd: int = _FD.unpack(data)[0]
            return fd
    raise OSError("the descriptor was sent, but not received: this process has too many files open")


def _unanswered() -> OSError:
    return OSError("the process that offered the descriptor did not send it: it is ending, or of another user")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _address(key: bytes) -> str:
    """An abstract name: no file that could be left behind."""
    return f"\0taskgraph-{key.hex()}"


def _is_of_this_user(peer: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _close(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _need_linux() -> None:
    if sys.platform != "linux":
        raise OSError("descriptors are handed to other processes on Linux alone")
