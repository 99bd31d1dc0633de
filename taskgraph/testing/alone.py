"""`tg.testing.compute`: one processor alone, without a job."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

from taskgraph.device.api import Device
from taskgraph.epoch import Epoch, Inputs, Outputs, Scratch
from taskgraph.errors import JobError
from taskgraph.graph.blocks import Block
from taskgraph.graph.compose import Composition, Processor
from taskgraph.graph.values import decode, encode
from taskgraph.hints import hint
from taskgraph.node.usercode.actor import is_async
from taskgraph.protocol.messages import Encoded

__all__ = ["compute"]

_CONSUMER = 0


def compute(
    function: Callable[..., Any],
    ins: Mapping[str, Any] | None = None,
    *,
    outs: tuple[str, ...] | None = None,
    epoch: int = 0,
    seed: int = 0,
    scratch: Mapping[str, Any] | None = None,
    replies: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs one processor and returns what it put.

    Args:
        function: a task's method, e.g. `task.update`, called as `function(epoch, ins, outs)`.
        ins: tag -> {task id: value}, or tag -> value for a channel with one producer (task 0).
        outs: the tags it may put; default: whatever it puts.
        epoch, seed: the epoch's number, and the job's seed for `epoch.rng`.
        scratch: what `epoch.scratch` holds.
        replies: method -> what a request to it answers.

    Returns:
        {tag: value}: values as a consumer would receive them.

    Raises:
        What the function raises; GraphError and ValueNotEncodable as in a job.
    """
    work = _Alone(function, epoch, seed, scratch or {}, replies or {})
    items, inbound = {}, {}
    for tag, given in (ins or {}).items():
        values = given if isinstance(given, Mapping) else {0: given}
        inbound[str(tag)] = tuple(values)
        for producer, value in values.items():
            items[(str(tag), producer)] = encode(value, what=f"inbound {str(tag)!r}")
    outbound: Mapping[str, tuple[int, ...]]
    outbound = _Anything() if outs is None else {str(tag): (_CONSUMER,) for tag in outs}
    puts = tuple([(str(tag), _CONSUMER) for tag in outs or ()])
    processor = Processor("processor", function, inbound, outbound, sync=False, parallel=False, takes=(), puts=puts)
    inputs = Inputs(work, processor, items)
    outputs = Outputs(work, processor, inputs)
    try:
        if is_async(function):
            asyncio.run(function(Epoch(work, "processor"), inputs, outputs))
        else:
            function(Epoch(work, "processor"), inputs, outputs)
    except Exception as error:
        if said := hint(error):
            error.add_note(said)
        raise
    outputs.close()
    return {tag: decode(value) for tag, value in work.put_values.items()}


class _Anything(dict[str, tuple[int, ...]]):
    """Outbound channels of a processor that may put what it likes."""

    def get(self, tag: str, default: Any = None) -> Any:
        return (_CONSUMER,)


class _Alone:
    """`taskgraph.epoch.Work` without a job."""

    task = 0
    attempt = 1
    last = False
    cancelled = False
    device: Device | None = None
    composing: Composition | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        number: int,
        seed: int,
        scratch: Mapping[str, Any],
        replies: Mapping[str, Any],
    ) -> None:
        owner = getattr(function, "__self__", None)
        self.task = vars(owner).get("task_id", 0) if owner is not None and hasattr(owner, "__dict__") else 0
        self.number = number
        self.seed = seed
        self.scratch = Scratch(**scratch)
        self.put_values: dict[str, Encoded] = {}
        self._replies = replies

    def neighbors(self, link: str) -> tuple[int, ...]:
        raise JobError(f"a processor alone has no topology (asked for link {link!r}); test it with tg.testing.run")

    def links(self) -> tuple[str, ...]:
        return ()

    def tasks(self) -> int:
        return 1 << 31

    def allocate(self, nbytes: int) -> Block | None:
        return None

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        self.put_values[tag] = value

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        pass

    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]:
        future: concurrent.futures.Future[Encoded] = concurrent.futures.Future()
        if method in self._replies:
            future.set_result(encode(self._replies[method], what=f"reply to {method!r}"))
        else:
            future.set_exception(JobError(f"request {method!r}: say what it answers with replies={{{method!r}: ...}}"))
        return future

    def wait_in_thread(self, future: concurrent.futures.Future[Encoded], timeout_s: float | None) -> Encoded:
        return future.result(timeout_s)

    def hold(self, where: str, why: str) -> Callable[[], None]:
        return lambda: None

    def report(self, where: str, numbers: dict[str, float]) -> None:
        pass

    def finish(self, where: str) -> None:
        pass
