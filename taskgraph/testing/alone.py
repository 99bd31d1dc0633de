"""`tg.testing.compute` runs one processor alone, without a job."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NoReturn

from taskgraph.channels import Inputs, Outputs
from taskgraph.device.api import Device
from taskgraph.epoch import Epoch, MapCall, Scratch
from taskgraph.errors import GraphError, JobError, TableError
from taskgraph.graph.blocks import Block
from taskgraph.graph.compose import Composition, Processor, name_of
from taskgraph.graph.values import decode, encode
from taskgraph.hints import hint
from taskgraph.node.usercode.coroutines import is_async
from taskgraph.node.usercode.errors import would_block_error
from taskgraph.protocol.messages import Encoded
from taskgraph.shape import arguments_of
from taskgraph.task import Task, shape_of

__all__ = ["compute"]


class _AnyTask(tuple[int, ...]):
    """The consumers of an undeclared channel: contains every task id. A value put to all of them is stored under -1."""

    __slots__ = ()

    def __contains__(self, task: object) -> bool:
        return True


_ANY_TASK = _AnyTask((-1,))


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
        ins: tag -> {task id: value}, or tag -> value for a channel with one producer (task 0). A dict whose
            keys are ints is of the first kind. So is `{}`: a link without producers. If the value itself is such a
            dict, write `{0: value}`.
        outs: the tags that the processor must put; by default it may put any tags.
        epoch, seed: the epoch's number, and the job's seed: `epoch.rng` draws the same numbers as in a job, unless the
            job gives the processor another name.
        scratch: the attributes of `epoch.scratch`.
        replies: method -> the reply to requests for it.

    Returns:
        {tag: value}, or {tag: {task id: value}} if the processor named consumers (`outs.put(tag, value, to=1)`). Values
        are as a consumer would receive them.

    Raises:
        Exceptions of the function; GraphError and ValueNotEncodable as in a job. JobError: the arguments do not fit, or
        the function is a handler or a hook.
    """
    if not callable(function):
        raise JobError(f"compute runs a task's method, as in tg.testing.compute(task.update), not {function!r:.100}")
    if called := _hook_signature(function):
        raise JobError(
            f"compute runs a processor, a method that is called with (epoch, ins, outs), not {called}: test a handler "
            f"or a hook in a job, with tg.testing.run"
        )
    for name, given in (("ins", ins), ("scratch", scratch), ("replies", replies)):
        if given is not None and not isinstance(given, Mapping):
            raise JobError(f"compute({name}={given!r:.100}): must be a dict, {{name: value}}")
    if isinstance(outs, str):
        raise JobError(f"compute(outs={outs!r}): must be a tuple of tags: outs=({outs!r},)")
    work = _StandaloneWork(function, epoch, seed, scratch or {}, replies or {})
    items, inbound = {}, {}
    for tag, given in (ins or {}).items():
        values = given if _is_by_producer(given) else {0: given}
        inbound[str(tag)] = tuple(values)
        for producer, value in values.items():
            items[(str(tag), producer)] = encode(value, what=f"inbound {str(tag)!r}")
    outbound: Mapping[str, tuple[int, ...]]
    outbound = _AnyChannels() if outs is None else {str(tag): _ANY_TASK for tag in outs}
    name = name_of(function)  # which `epoch.rng` depends on
    processor = Processor(name, function, inbound, outbound, sync=False, parallel=False, takes=(), puts=())
    inputs = Inputs(work, processor, items)
    outputs = Outputs(work, processor, inputs)
    try:
        if is_async(function):
            _run_coroutine(function(Epoch(work, name), inputs, outputs))
        else:
            function(Epoch(work, name), inputs, outputs)
    except Exception as error:
        if said := hint(error):
            error.add_note(said)
        empty = ", ".join(repr(tag) for tag, producers in inbound.items() if not producers)
        if empty and isinstance(error, GraphError):
            error.add_note(
                f"no task puts {empty}: ins has {{}} there; if the value is an empty dict, write {{0: {{}}}}"
            )
        raise
    outputs.close()
    missing = [repr(str(tag)) for tag in outs or () if str(tag) not in work.put_values]
    if missing:
        raise GraphError(
            f"task {work.task}, epoch {epoch}, processor: returned without putting {', '.join(missing)}; every "
            f"declared channel is put exactly once per epoch: outs.put(tag, value), with None for nothing"
        )
    return {tag: _decode_channel(by_task) for tag, by_task in work.put_values.items()}


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine, in a new thread if this thread runs an event loop already (a notebook, an async test)."""
    if not _loop_runs():
        asyncio.run(coroutine)
        return
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _hook_signature(function: Callable[..., Any]) -> str:
    """Returns "name(arguments)" of a task's handler or hook, for an error message; "" for other functions."""
    owner, name = getattr(function, "__self__", None), name_of(function)
    given = arguments_of(shape_of(type(owner)), name) if isinstance(owner, Task) else None
    return "" if given is None else f"{name}({', '.join(given)})"


def _is_by_producer(given: Any) -> bool:
    """True for {task id: value}, also for `{}`; False if it is one producer's value itself."""
    return isinstance(given, Mapping) and all(type(key) is int for key in given)


def _decode_channel(by_task: dict[int, Encoded]) -> Any:
    """Decodes the value put into one channel, or {consumer: value} if the processor named consumers."""
    values = {task: decode(value) for task, value in by_task.items()}
    return values.get(_ANY_TASK[0], values)


class _AnyChannels(dict[str, tuple[int, ...]]):
    """The outbound channels of a processor that may put any tag."""

    def get(self, tag: str, default: Any = None) -> Any:
        return _ANY_TASK


class _StandaloneWork:
    """Implements `taskgraph.epoch.Work` for one processor without a job: collects what is put, in `put_values`."""

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
        self.put_values: dict[str, dict[int, Encoded]] = {}
        self._replies = replies
        self._async = is_async(function)

    def neighbors(self, link: str, task: int | None = None) -> tuple[int, ...]:
        return self.links()

    def links(self) -> NoReturn:
        raise GraphError(
            f"task {self.task}, epoch {self.number}: a processor alone has no topology: name tasks, and no links, or "
            f"test it with tg.testing.run"
        )

    def tasks(self) -> int:
        return 1 << 31

    def service(self, title: str) -> tuple[int, ...]:
        return ()

    def table(self, epoch: Epoch, name: str) -> NoReturn:
        raise TableError(f"table({name!r}): a processor alone has no tables: test it with tg.testing.run")

    def map(self, epoch: Epoch, call: MapCall) -> NoReturn:
        raise GraphError(f"map({call.tag!r}): a processor alone composes nothing: test it with tg.testing.run")

    def ask_queue_progress(self, epoch: Epoch, name: str) -> NoReturn:
        raise GraphError(f"queue({name!r}): a processor alone has no queues: test it with tg.testing.run")

    def kept_results(self, tag: str) -> dict[int, Any]:
        return {}

    node_name = ""

    def allocate(self, nbytes: int) -> Block | None:
        return None

    def run_in_thread(self, function: Callable[[], None]) -> Awaitable[None]:
        return asyncio.to_thread(function)

    def run_beside(self, where: str, function: Callable[[], Any]) -> NoReturn:
        raise AssertionError("only maps do this")

    def go_on_without(self, call: asyncio.Task[None]) -> NoReturn:
        raise AssertionError("only maps do this")

    late_calls = ()

    def fetch(self, channels: tuple[tuple[str, int], ...]) -> NoReturn:
        raise GraphError("a processor alone has no optional channels: test it with tg.testing.run")

    def supply(self, tag: str, value: Encoded) -> None:
        pass

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        before = self.put_values.setdefault(tag, {})
        if before and (consumers is _ANY_TASK or _ANY_TASK[0] in before):
            raise GraphError(
                f"task {self.task}, epoch {self.number}, processor: channel {tag!r} was put twice, to all of its "
                f"consumers and to some: a channel carries one item per epoch"
            )
        before |= dict.fromkeys(consumers, value)

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
        if self._async and _loop_runs():
            raise would_block_error()
        return future.result(timeout_s)

    def hold(self, where: str, why: str) -> Callable[[], None]:
        """Holds nothing: a processor alone has no epoch that could end too early."""
        return lambda: None

    def report(self, numbers: dict[str, float]) -> None:
        pass

    def finish(self) -> None:
        pass
