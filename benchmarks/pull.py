"""One pull on our transport between two processes: microseconds over a unix socket, GB/s over TCP.

    python benchmarks/pull.py [--n 1] [--over unix|tcp]

The calls a node makes, without a job around them: hello, frames, digests and all.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import secrets
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from work import arguments, die_with_parent, tell

from taskgraph.graph.values import decode, encode, verify
from taskgraph.protocol.messages import Call, Item, Pull, Reply, Stamp
from taskgraph.settings import Settings
from taskgraph.transport.api import Peer
from taskgraph.transport.stream import StreamTransport

_WARM = 0.25


def transport(token: bytes, over: str, folder: str) -> StreamTransport:
    unix_dir = Path(folder) if over == "unix" else None
    tcp_host = "127.0.0.1" if over == "tcp" else None
    return StreamTransport(Settings(), token, job="bench", verify=verify, unix_dir=unix_dir, tcp_host=tcp_host)


async def produce(n: int, token: bytes, over: str, folder: str, pipe: Connection) -> None:
    value = encode(np.arange(n, dtype=np.float64))

    async def serve(caller: str, call: Call) -> Reply:
        assert isinstance(call, Pull)
        return Item(call.stamp, 1, call.tag, value)

    mine = transport(token, over, folder)
    await mine.start("producer", serve, lambda node: None)
    pipe.send(mine.endpoints)
    await asyncio.to_thread(pipe.recv)
    await mine.close()


def producer(n: int, token: bytes, over: str, folder: str, pipe: Connection) -> None:
    die_with_parent()
    uvloop.run(produce(n, token, over, folder, pipe))


async def refuse(caller: str, call: Call) -> Reply:
    raise RuntimeError("the consumer is never called")


async def consume(given: argparse.Namespace, token: bytes, folder: str, endpoints: tuple[str, ...]) -> None:
    mine, peer = transport(token, given.over, folder), Peer("producer", endpoints)
    await mine.start("consumer", refuse, lambda node: None)
    took: list[float] = []
    created = time.monotonic()
    number = 0
    while time.monotonic() - created < given.seconds * (1 + _WARM) or len(took) < 5:
        began = time.perf_counter()
        reply = await mine.call(peer, Pull(Stamp(0, number), 1, 1, 0, "x"), timeout_s=30.0)
        assert isinstance(reply, Item)
        x = decode(reply.value)
        ended = time.perf_counter()
        if x.shape != (given.n,) or x[-1] != given.n - 1:
            raise SystemExit(f"pulled {x}")
        if number and time.monotonic() - created > given.seconds * _WARM:
            took.append(ended - began)
        number += 1
        del x, reply  # what the next one may receive into
    await mine.close()
    median = statistics.median(took)
    tell({"us": median * 1e6, "gb_per_s": 8 * given.n / median / 1e9, "pulls": len(took)})


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--over", choices=["unix", "tcp"], default="unix")


def main(given: argparse.Namespace) -> None:
    token = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        places = [f"{folder}/{name}" for name in ("producer", "consumer")]
        for place in places:
            Path(place).mkdir(mode=0o700)
        process = context.Process(target=producer, args=(given.n, token, given.over, places[0], theirs), daemon=True)
        process.start()
        try:
            if not ours.poll(30.0):
                raise SystemExit("the producer did not start")
            uvloop.run(consume(given, token, places[1], ours.recv()))
            ours.send("the end")
            process.join(10.0)
        finally:
            process.kill()
            process.join()


if __name__ == "__main__":
    main(arguments(__doc__, options))
