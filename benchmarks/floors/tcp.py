"""The floor of a transfer between hosts: bytes over TCP on loopback, received into a buffer that is ready. GB/s."""

from __future__ import annotations

import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import arguments, tasks_of, tell


def send(task: int, port: int, size: int) -> None:
    data = b"x" * size
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            connection.sendall(data)


def main(listener: socket.socket, size: int, seconds: float) -> None:
    listener.settimeout(30.0)
    with listener.accept()[0] as connection:
        connection.settimeout(30.0)
        buffer = memoryview(bytearray(size))
        took: list[float] = []
        created = time.monotonic()
        while time.monotonic() - created < seconds or len(took) < 6:
            began = time.perf_counter()
            connection.sendall(b"?")
            at = 0
            while at < size:
                got = connection.recv_into(buffer[at:])
                if not got:
                    raise SystemExit("the sender is gone")
                at += got
            took.append(time.perf_counter() - began)
            if buffer[0] != ord("x") or buffer[-1] != ord("x"):
                raise SystemExit("other bytes than were sent")
    median = statistics.median(took[1:])
    tell({"gb_per_s": size / median / 1e9, "ms": median * 1e3})


if __name__ == "__main__":
    given = arguments(__doc__, lambda parser: parser.set_defaults(n=8_388_608))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tasks_of(send, 2, listener.getsockname()[1], 8 * given.n),
    ):
        main(listener, 8 * given.n, given.seconds)
