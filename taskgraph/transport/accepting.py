"""Accepting TLS connections: a session exists only after the handshake.

The event loop's own servers do not bound the number of handshakes, and do not say why a handshake failed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from taskgraph.errors import TransportError
from taskgraph.network.tls import Tls, advice
from taskgraph.transport.calls import OwnedTasks

__all__ = ["CLOSE_S", "TlsListener"]

log = logging.getLogger("taskgraph.transport")

#: Time that an ended session waits for the TLS close of the peer.
CLOSE_S = 1.0
#: Pause after a failed accept: no descriptor is free, or a firewall dropped the connection.
_PAUSE_S = 1.0


class TlsListener:
    """A listening TLS socket that makes sessions.

    Args:
        listener: the listening socket; this object closes it.
        make: makes the protocol of a connection after its handshake.
        handshake_s: the time limit of a handshake.
        limit: handshakes at a time. The oldest is cancelled beyond that: an honest one takes milliseconds.
        refused: called with (where, why) of a failed connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: Tls,
        make: Callable[[], asyncio.BaseProtocol],
        tasks: OwnedTasks,
        *,
        handshake_s: float,
        limit: int,
        refused: Callable[[str, str], None],
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._make = make
        self._tasks = tasks
        self._handshake_s = handshake_s
        self._limit = limit
        self._refused = refused
        self._shaking: dict[asyncio.Task[None], None] = {}  # oldest first
        self._accepting = tasks.spawn(self._accept(), name="accept over TLS")
        self._accepting.add_done_callback(lambda _: listener.close())  # also if the task never ran

    def close(self) -> None:
        """Stops listening and cancels all handshakes."""
        self._accepting.cancel()
        for task in self._shaking:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._accepting, *self._shaking])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:  # the peer left first
                continue
            except OSError as error:
                log.error("cannot accept a connection: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._begin(sock, str(address))

    def _begin(self, sock: socket.socket, where: str) -> None:
        ours = [sock]  # until the event loop owns it
        task = self._tasks.spawn(self._shake(ours, where), name=f"TLS handshake with {where}")
        self._shaking[task] = None

        def over(done: asyncio.Task[None]) -> None:
            self._shaking.pop(done, None)
            for left in ours:
                left.close()

        task.add_done_callback(over)
        if len(self._shaking) > self._limit:
            oldest = next(iter(self._shaking))
            del self._shaking[oldest]
            oldest.cancel()

    async def _shake(self, ours: list[socket.socket], where: str) -> None:
        try:
            context = self._tls.context(server=True)
            sock = ours.pop()
            sock.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                sock,
                ssl=context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=CLOSE_S,
            )
        except asyncio.CancelledError:
            if not self._accepting.cancelling():
                self._refused(where, "too many connections without a TLS handshake")
            raise
        except (OSError, TransportError) as error:
            why = str(error) or "its end closed the connection"  # asyncio gives no text
            self._refused(where, f"no TLS handshake: {why}{advice(error)}")
