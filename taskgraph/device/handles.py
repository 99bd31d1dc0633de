"""Sends file descriptors to other processes of this host, which ask for them by *handles*.

    offer ──► handle ──► (any way to the other process) ──► fetch ──► a duplicate of the descriptor
    withdraw ──► close_withdrawn

Memory of a device may be a file descriptor that no other process can open by a path, not even in /proc: it must be sent
through a socket. So a process that offers such memory has a thread that sends descriptors to processes of the same
user. It sends one per segment and process, not per value, so nothing here is fast.

**`withdraw` takes no lock**: finalizers call it, in the middle of any code, also of this module. And it closes nothing:
the thread may be about to send that descriptor, and its number would then be another file's.
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
"""A handle: key of the offering process, and number of the descriptor there; padded with zeros."""
_NUMBER: Final = struct.Struct("!Q")
"""A client's request."""
_FD: Final = struct.Struct("@i")
_CREDENTIALS: Final = struct.Struct("@iII")
_HERE: Final = b"\1"
_GONE: Final = b"\0"
_CLIENT_S: Final = 1.0
"""Timeout for a silent client, while others wait."""
_PAUSE_S: Final = 0.05
"""Pause while no connection can be accepted, usually for too many open files."""
_BUSY_S: Final = 0.01
"""Pause while too many clients wait for a server."""


class _DescriptorServer:
    """The descriptors that this process offers; listens from the first offer on.

    Attributes:
        key: identifies this process in handles.
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
        """Returns withdrawn descriptors, each once, for the caller to close: the thread is not sending any of them."""
        with self._sending:
            return self._take_withdrawn_unlocked()

    def _take_withdrawn_unlocked(self) -> list[int]:
        return [self._withdrawn.popleft() for _ in range(len(self._withdrawn))]  # others only append

    def forget(self) -> list[int]:
        """Stops listening, and returns all descriptors for the caller to close. For a forked child, without the thread.

        Takes no lock: the parent may have held it during the fork. A child that kept descriptors would keep memory that
        its parent freed; if it listened, clients would not notice the end of its parent.
        """
        if self._listener is not None:
            self._listener.close()
        return [*self._offered.values(), *self._take_withdrawn_unlocked()]

    def _start(self) -> None:
        with self._starting:
            if self._listener is not None:
                return
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.settimeout(None)  # user code may have set a default
                listener.bind(_address(self.key))
                listener.listen()
                threading.Thread(target=self._serve, args=(listener,), name="device-handles", daemon=True).start()
            except BaseException as error:
                listener.close()
                if isinstance(error, RuntimeError):
                    raise OSError(f"no thread can be started to send descriptors: {error}") from error
                raise
            self._listener = listener

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except Exception as error:  # may repeat; the client reports its timeout
                log.debug("no client can be accepted: %s", error)
                time.sleep(_PAUSE_S)
                continue
            with client:
                try:
                    self._send_descriptor_to(client)
                except Exception as error:  # the client was slow, or left
                    log.debug("a client got no descriptor: %s", error)

    def _send_descriptor_to(self, client: socket.socket) -> None:
        if not _is_of_this_user(client):
            return
        client.settimeout(_CLIENT_S)
        request = client.recv(_NUMBER.size)  # unix sockets do not split so little
        if len(request) != _NUMBER.size:
            return
        (number,) = _NUMBER.unpack(request)
        # `socket.send_fds` drops flags before Python 3.14. Without MSG_NOSIGNAL a client that left causes SIGPIPE.
        with self._sending:
            fd = self._offered.get(number)
            if fd is not None:
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
                client.sendmsg([_HERE], passed, socket.MSG_NOSIGNAL)
                return
        client.send(_GONE, socket.MSG_NOSIGNAL)


_server = _DescriptorServer()


def _after_fork() -> None:
    global _server
    inherited, _server = _server, _DescriptorServer()
    _close_all(inherited.forget())


os.register_at_fork(after_in_child=_after_fork)


def offer(fd: int) -> bytes:
    """Takes over a descriptor; other processes of the same user can now fetch a duplicate by the returned handle.

    Raises:
        OSError: it failed; the descriptor remains the caller's.
    """
    _check_linux()
    close_withdrawn()
    server = _server
    return _HANDLE.pack(server.key, server.offer(fd)).ljust(HANDLE_BYTES, b"\0")


def withdraw(handle: bytes) -> None:
    """Stops offering a descriptor; `close_withdrawn` closes it. Duplicates in other processes stay open.

    Finalizers may call it: it does not wait. Ignores handles of other processes, and those withdrawn before.
    """
    server = _server
    if len(handle) == HANDLE_BYTES:
        key, number = _HANDLE.unpack_from(handle)
        if key == server.key:
            server.withdraw(number)


def close_withdrawn() -> None:
    """Closes withdrawn descriptors. Call it now and then in a thread: closing the last duplicate frees the memory."""
    _close_all(_server.take_withdrawn())


def any_withdrawn() -> bool:
    """True if `close_withdrawn` has descriptors to close."""
    return bool(_server._withdrawn)


def fetch(handle: bytes, timeout_s: float = 5.0) -> int:
    """Returns a duplicate of an offered descriptor. Blocks, so call it in a worker thread.

    Raises:
        ConnectionRefusedError: the offering process ended.
        TimeoutError: it did not answer in time.
        OSError: it did not send the descriptor.
    """
    _check_linux()
    if len(handle) != HANDLE_BYTES:
        raise OSError(f"not a handle of a descriptor: it has {len(handle)} bytes, not {HANDLE_BYTES}")
    key, number = _HANDLE.unpack_from(handle)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            return _receive_descriptor(server, key, number, time.monotonic() + timeout_s)
    except TimeoutError:
        raise TimeoutError(f"the process that offered the descriptor did not send it within {timeout_s} s") from None
    except ConnectionRefusedError:
        text = "the process that offered the descriptor ended, or is in another network namespace"
        raise ConnectionRefusedError(text) from None
    except ConnectionError as error:
        raise _no_answer_error() from error


def _receive_descriptor(server: socket.socket, key: bytes, number: int, until: float) -> int:
    while True:
        server.settimeout(_remaining_s(until))
        try:
            server.connect(_address(key))
            break
        except BlockingIOError:  # the backlog is full; unix sockets do not wait for that
            time.sleep(min(_BUSY_S, _remaining_s(until)))
    if not _is_of_this_user(server):  # any user may take the name of an ended process
        raise OSError("the descriptor would come from a process of another user")
    server.settimeout(_remaining_s(until))
    server.send(_NUMBER.pack(number), socket.MSG_NOSIGNAL)
    server.settimeout(_remaining_s(until))
    # `socket.recv_fds` drops flags before Python 3.14. Children of this process must not inherit the descriptor.
    room = socket.CMSG_LEN(_FD.size)
    answer, passed, _, _ = server.recvmsg(len(_HERE), room, socket.MSG_CMSG_CLOEXEC)
    if answer == _GONE:
        raise OSError("the descriptor was withdrawn by the process that offered it")
    if answer != _HERE:
        raise _no_answer_error()
    for level, kind, data in passed:
        if (level, kind, len(data)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.size):
            fd: int = _FD.unpack(data)[0]
            return fd
    raise OSError("the descriptor was sent, but not received: this process has too many files open")


def _no_answer_error() -> OSError:
    return OSError("the process that offered the descriptor did not send it: it is ending, or of another user")


def _remaining_s(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _address(key: bytes) -> str:
    """Returns the socket's name, an abstract one: it leaves no file behind."""
    return f"\0taskgraph-{key.hex()}"


def _is_of_this_user(peer: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _check_linux() -> None:
    if sys.platform != "linux":
        raise OSError("descriptors can be sent to other processes on Linux only")
