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
        make_session: makes the protocol of a connection after its handshake.
        handshake_s: the time limit of a handshake.
        limit: the most handshakes at a time. One more cancels the oldest: that of a true peer takes milliseconds.
        on_refused: called with (the other end's address, why) of a failed connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: Tls,
        make_session: Callable[[], asyncio.BaseProtocol],
        tasks: OwnedTasks,
        *,
        handshake_s: float,
        limit: int,
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._make_session = make_session
        self._tasks = tasks
        self._handshake_s = handshake_s
        self._limit = limit
        self._on_refused = on_refused
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first
        self._accepting = tasks.spawn(self._accept(), name="accept over TLS")
        self._accepting.add_done_callback(lambda _: listener.close())  # also if the task never ran

    def close(self) -> None:
        """Stops listening and cancels all handshakes."""
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._accepting, *self._handshakes])

    async def _accept(self) -> None:
        """Accepts connections, and begins a handshake on each, until cancelled."""
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
            self._begin_handshake(sock, str(address))

    def _begin_handshake(self, sock: socket.socket, where: str) -> None:
        """Starts a handshake as an asyncio task; beyond the limit cancels the oldest one. Closes the socket if the task
        ends before the event loop has taken the socket over.
        """
        unowned = [sock]  # until the event loop owns it
        task = self._tasks.spawn(self._handshake(unowned, where), name=f"TLS handshake with {where}")
        self._handshakes[task] = None

        def remove(done: asyncio.Task[None]) -> None:
            self._handshakes.pop(done, None)
            for left in unowned:
                left.close()

        task.add_done_callback(remove)
        if len(self._handshakes) > self._limit:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()

    async def _handshake(self, unowned: list[socket.socket], where: str) -> None:
        """Makes the TLS handshake on an accepted socket, then its session; passes a failure to `on_refused`."""
        try:
            context = self._tls.context(server=True)
            sock = unowned.pop()
            sock.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_session,
                sock,
                ssl=context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=CLOSE_S,
            )
        except asyncio.CancelledError:
            if not self._accepting.cancelling():
                self._on_refused(where, "too many connections without a TLS handshake")
            raise
        except (OSError, TransportError) as error:
            why = str(error) or "its end closed the connection"  # asyncio gives no text
            self._on_refused(where, f"no TLS handshake: {why}{advice(error)}")
