"""A node in a process of its own, for the tests of memory that is lent. Started as `python lending_node.py FOLDER`.

It says its endpoint in a line. A pull of a number gives an array of that many bytes from its pool, filled with the
epoch's number; the array before is dropped. A pull of "places" gives where the pool's memory was of the next ones.
An offer is kept.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from taskgraph.graph.blocks import block_behind
from taskgraph.graph.values import encode, verify
from taskgraph.protocol import messages as m
from taskgraph.settings import Settings
from taskgraph.transport.stream import StreamTransport


async def main() -> None:
    transport = StreamTransport(
        Settings(), b"0123456789abcdef", job="job", verify=verify, unix_dir=Path(sys.argv[1]), tcp_host=None
    )
    kept: list[m.Encoded] = []

    def put(size: int, fill: int) -> m.Encoded:
        return encode(np.full(size, fill, np.uint8), allocate=transport.allocate)

    def place(value: m.Encoded) -> int:
        block = block_behind(value.buffers[0])
        assert block is not None
        origin: Any = block.origin
        return int(origin.region.ino << 40 | origin.offset)

    async def serve(caller: str, call: m.Call) -> m.Reply:
        if isinstance(call, m.Offer):
            kept.append(call.value)
            return m.Accepted(1)
        assert isinstance(call, m.Pull)
        if call.tag == "places":
            kept.clear()
            many = [put(1 << 20, 255) for _ in range(6)]
            return m.Item(call.stamp, 1, call.tag, encode([place(value) for value in many]))
        kept[:] = [put(int(call.tag), call.stamp.epoch)]
        return m.Item(call.stamp, 1, call.tag, kept[0])

    await transport.start("child", serve, lambda node: None)
    print(transport.endpoints[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    uvloop.run(main())
