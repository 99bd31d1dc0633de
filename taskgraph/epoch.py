"""The objects that user code uses during an epoch: `Epoch`, `Reply`, `Hold`, `Tag`. `channels` has `Inputs`, `Outputs`.

These classes check the calls of user code and pass them to the attempt at work (`Work`). Both the event loop (async
hooks) and worker threads (plain hooks) may use them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import xxhash

from taskgraph.collectives.declaring import CollectiveDeclaration
from taskgraph.collectives.interface import COLLECTIVES, Collectives
from taskgraph.collectives.ports import To
from taskgraph.device.api import Device
from taskgraph.errors import GraphError, JobError
from taskgraph.graph.blocks import Block
from taskgraph.graph.compose import Composition, ComputeWrapper, is_text
from taskgraph.graph.reported import plain_numbers
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded

if TYPE_CHECKING:
    from taskgraph.tables.interface import EpochTable

__all__ = [
    "AttemptEnded",
    "ComposeEpoch",
    "Epoch",
    "Hold",
    "MapCall",
    "PureEpoch",
    "QueueState",
    "Reply",
    "Scratch",
    "Tag",
    "To",
    "Work",
    "ask_service",
    "job_seed",
    "place_text",
    "reply_future",
    "service_ids",
    "task_ids",
]

T = TypeVar("T")


class AttemptEnded(BaseException):
    """Raised in user code whose attempt is over, to end it: the epoch restarts, or the node is no longer primary.

    It is no `Exception`, so that `except Exception` in user code does not keep a dead attempt alive. The return value
    of the code is ignored.

    Attributes:
        held: True if the code kept the epoch open with `epoch.hold`.
        late: True if the code computes a piece that another task has computed meanwhile.
    """

    def __init__(self, *, held: bool = False, late: bool = False) -> None:
        super().__init__()
        self.held = held
        self.late = late

    def __str__(self) -> str:
        if self.late:
            return (
                "another task has computed this piece, and the epoch went on without this one: its result does not "
                "count, and its `epoch` can no longer be used. Return when epoch.cancelled is true"
            )
        if self.held:
            return (
                "the epoch restarts, or its task goes on elsewhere: what was done in it counts for nothing, and is "
                "done anew. A thread or coroutine of your own ends by this, as it should; clean up in `finally`"
            )
        return (
            "the epoch is over, or it restarts, and this `epoch` can no longer be used. If a thread of yours goes on "
            'after the method returned, keep the epoch open with epoch.hold("why"), and return from the thread when '
            "epoch.cancelled is true"
        )


class Tag(str, Generic[T]):
    """A channel's name with the type of its items, for type checkers: `GRAD = tg.Tag[np.ndarray]("grad")`."""

    def __new__(cls, name: str) -> Self:
        if not isinstance(name, str):
            raise JobError(f"a tag is a text, as in tg.Tag('grad'), not {name!r:.100}")
        return super().__new__(cls, name)


class Scratch(SimpleNamespace):
    """The type of `epoch.scratch`, by which `hints` recognizes a missing name and explains the lifetime."""


class MapCall(NamedTuple):
    """The arguments of `Epoch.map`."""

    tag: str
    pieces: Iterable[Any] | str
    value: Callable[..., Any]
    then: Callable[..., Any] | None
    upto: int | None


class QueueState(NamedTuple):
    """How far a queue is.

    Attributes:
        done: each piece of each pass is done, or set aside.
        left: the number of other pieces: of all passes, or of the pass at work if passes are endless.
    """

    done: bool
    left: int


class Work(Protocol):
    """The interface of the attempt that user code works for. Any thread may call its methods."""

    task: int
    number: int
    attempt: int
    cancelled: bool
    scratch: Scratch
    device: Device | None
    composing: Composition | None
    """The graph being composed; None outside compose."""

    @property
    def last(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    def neighbors(self, link: str, task: int | None = None) -> tuple[int, ...]:
        """Returns the neighbors of a task along a link, in this epoch; None: those of the attempt's task."""

    def links(self) -> tuple[str, ...]: ...
    def tasks(self) -> int: ...
    def service(self, title: str) -> tuple[int, ...]:
        """Returns the task ids of a service of the job; (): there is no such service."""

    def table(self, epoch: Epoch, name: str) -> EpochTable:
        """Returns a table of the job. Raises TableError if there is no such table."""

    def map(self, epoch: Epoch, call: MapCall) -> None:
        """Declares the processors of `Epoch.map`. Raises GraphError if an argument is wrong."""

    def ask_queue_progress(self, epoch: Epoch, name: str) -> QueueState:
        """Asks a queue's service how far the queue is (done, left). Raises GraphError if that is not known."""

    def kept_results(self, tag: str) -> dict[int, Any]:
        """Returns a map's results in earlier attempts of this epoch, by the pieces' places. The caller adds its own."""

    @property
    def node_name(self) -> str: ...
    def allocate(self, nbytes: int) -> Block | None:
        """Allocates memory that can be sent without a copy; None: there is none."""

    def run_in_thread(self, function: Callable[[], None]) -> Awaitable[None]:
        """Runs code of the framework in a thread, beside the event loop."""

    def run_beside(self, where: str, function: Callable[[], Any]) -> asyncio.Task[None]:
        """Starts a call of user code that does not take the task's turn: in a thread, or an `async def` on the loop."""

    def go_on_without(self, call: asyncio.Task[None]) -> None:
        """Lets the epoch end without a call of `run_beside`, which is one of `late_calls` until it ends."""

    @property
    def late_calls(self) -> Collection[asyncio.Task[None]]:
        """The calls passed to `go_on_without`, in this epoch or earlier, that have not ended."""

    def fetch(self, channels: tuple[tuple[str, int], ...]) -> Awaitable[None]:
        """Pulls the items of optional channels, each a (tag, producer), and waits until all have arrived."""

    def supply(self, tag: str, value: Encoded) -> None:
        """Supplies the item that a processor derived for a channel of its own task; see `compose.DerivedChannel`."""

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None: ...
    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None: ...
    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]: ...
    def wait_in_thread(self, future: concurrent.futures.Future[Encoded], timeout_s: float | None) -> Encoded: ...
    def hold(self, where: str, why: str) -> Callable[[], None]: ...
    def report(self, numbers: dict[str, float]) -> None: ...
    def finish(self) -> None: ...


class Epoch(Collectives):
    """One epoch, for one processor, handler or hook of a task."""

    __slots__ = (
        "_held_pushes",
        "_rng",
        "_sync",
        "_tables",
        "_where",
        "_work",
    )

    def __init__(self, work: Work, where: str, sync: bool = False) -> None:
        self._work = work
        self._where = where
        self._sync = sync
        self._rng: np.random.Generator | None = None
        self._tables: dict[str, EpochTable] | None = None
        self._held_pushes: list[Any] | None = None  # pushes of a piece, which are sent once it is counted

    @property
    def number(self) -> int:
        """The number of the epoch, counted from 0."""
        return self._work.number

    @property
    def last(self) -> bool:
        """True in the job's last epoch; always False if the job has no `epochs`."""
        return self._work.last

    @property
    def attempt(self) -> int:
        """The number of the attempt. It grows when an epoch restarts."""
        return self._work.attempt

    @property
    def cancelled(self) -> bool:
        """True if the attempt is over: a long `def` compute should return; its return value is ignored.

        In a piece of `epoch.map` also if another task has computed the piece meanwhile, and the epoch went on.
        """
        return self._work.cancelled

    @property
    def scratch(self) -> SimpleNamespace:
        """A namespace that the processors of this task share within an attempt."""
        return self._work.scratch

    @property
    def seed(self) -> int:
        """64 bits of (job seed, task, epoch, processor or message): the same on every replay.

        In `on_flag` and in handlers the seed depends on the message and its sender, not on the order of arrival.
        """
        key = f"{self._work.seed}/{self._work.task}/{self._work.number}/{self._where}"
        return xxhash.xxh3_64_intdigest(key.encode())

    @property
    def rng(self) -> np.random.Generator:
        """A generator seeded with `seed`, fresh in each attempt.

        In `on_flag` and in handlers the generator depends on the message. Which message comes last differs from run to
        run: code that waits for all messages draws in a processor or sync point, or from
        `np.random.default_rng([self.task_id, epoch.number])`.
        """
        if self._rng is None:
            self._rng = np.random.default_rng(self.seed)
        return self._rng

    def neighbors(self, link: str) -> tuple[int, ...]:
        """Returns the task ids along `link` in this epoch. Raises GraphError for an unknown link."""
        return self._work.neighbors(link)

    def processor(
        self,
        compute: Callable[..., Any],
        *,
        inbound: Mapping[str, To] | None = None,
        outbound: Mapping[str, To] | None = None,
        name: str | None = None,
        parallel: bool = False,
    ) -> None:
        """Declares a processor: `compute(epoch, ins, outs)`. Only in `compose`.

        Args:
            inbound, outbound: tag -> neighbors, e.g. `{"gradient": "children"}`.
            name: for messages and `status`; default the function's name.
            parallel: run as soon as it is ready, beside other processors. It must not share state or scratch with them.

        Raises:
            GraphError: the processor does not fit the graph; the message says why.
        """
        self._declare(self._composing("processors are"), compute, inbound, outbound, name, parallel)

    def _composing(self, what: str) -> Composition:
        """Returns the graph that `compose` builds. Raises GraphError outside of it; `what` says what is declared."""
        composition = self._work.composing
        if composition is None:
            kept = "; this `epoch` is of a compose() that has returned: use the one that it is given each time"
            raise GraphError(
                f"{self._place()}: {what} declared in compose(), and only there"
                f"{kept if self._where == 'compose' else ''}"
            )
        return composition

    def _declare(
        self,
        composition: Composition,
        compute: Callable[..., Any],
        inbound: Mapping[str, To] | None,
        outbound: Mapping[str, To] | None,
        name: str | None,
        parallel: bool,
        wrapper: ComputeWrapper | None = None,
    ) -> None:
        """Adds a processor to the graph. Reuses the one of an earlier epoch if that was declared alike."""
        before = composition.before
        if before is not None and composition.add_repeated(
            compute, inbound, outbound, name, parallel, self._work, wrapper
        ):
            return
        composition.add(
            compute,
            self._find_channels("inbound", inbound, composition) if inbound is not None else {},
            self._find_channels("outbound", outbound, composition) if outbound is not None else {},
            name=name,
            parallel=parallel,
            declared=(inbound, outbound),
            wrapper=wrapper,
        )

    def _begin_collective(
        self, kind: str, tag: str, over: str, inbound: Sequence[str] | Mapping[str, To], root: int | None = None
    ) -> CollectiveDeclaration:
        composition = self._composing(f"{kind}() and other collectives are")
        declare = partial(self._declare, composition)
        return CollectiveDeclaration(
            self._work, composition, declare, self.neighbors, kind, tag, over, inbound, root, self._place()
        )

    def flag(self, to: To, meta: Any = None) -> None:
        """Sends a flag to other tasks: their `on_flag(epoch, sender, meta)` runs before their sync points.

        Flags are a set: a flag sent twice in an epoch counts once. In `compose`, flags start an epoch without channels.
        """
        self._refuse_messages("flag", composing=True)
        value = encode(meta, what=f"flag of task {self._work.task}")
        self._work.flag(self._where, task_ids(self._work, to, self._place, "flag"), value)

    def request(self, to: int, method: str, payload: Any = None) -> Reply:
        """Calls a handler of another task; its effects happen once. `await reply`; in a thread `reply.wait()`."""
        self._refuse_messages("request")
        if not isinstance(method, str) or not is_text(method):
            raise GraphError(f"{self._place()}: request(): the method {method!a} is no text that can be encoded")
        ids = task_ids(self._work, to, self._place, f"request {method!r}")
        if len(ids) != 1:
            raise GraphError(f"{self._place()}: a request goes to one task, {to!r} names {len(ids) or 'no'} tasks")
        return self._send_request(ids[0], method, payload)

    def _send_request(self, to: int, method: str, payload: Any) -> Reply:
        """Sends a request to a task whose id is known to be right."""
        what = f"request {method!r} of task {self._work.task}"
        value = encode(payload, what=what, allocate=self._work.allocate)
        return Reply(self._work, self._work.request(self._where, to, method, value))

    def map(
        self,
        tag: str,
        pieces: Iterable[Any] | str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        upto: int | None = None,
    ) -> None:
        """Declares a computation of pieces by whichever task has time. Only in `compose`; all tasks declare the same.

        Each piece is computed by `value(epoch, piece)` on one task. `epoch.rng` there is seeded by the piece, so the
        result does not depend on who computes it; `value` changes no state. `then(epoch, ins)` is a sync point of each
        task that reads `ins[tag]`: the list of all results, in the order of the pieces.

        Args:
            pieces: a sequence of values, the same on all tasks; or the name of a queue of the job.
            upto: the most pieces in this epoch. None: all values; of a queue, what its pass has left.

        Raises:
            GraphError: a wrong argument, or called outside `compose`. While it runs, the job fails with PieceFailed if
                `value` raises three times for a piece; see `tg.WorkQueue` for other ways.
        """
        self._work.map(self, MapCall(str(tag), pieces, value, then, upto))

    def queue(self, name: str) -> QueueState:
        """Returns how far a queue is: `done`, and `left` pieces.

        In the `then` of its `epoch.map` that is after this epoch, in a `def` processor before it. Elsewhere it is not
        known.

        Raises:
            GraphError: there is no such queue, or it is not known here.
        """
        return self._work.ask_queue_progress(self, name)

    def table(self, name: str) -> EpochTable:
        """Returns a table of the job, for this epoch. Raises TableError if the job has none of this name."""
        if self._tables is None:
            self._tables = {}
        if name not in self._tables:
            self._tables[name] = self._work.table(self, name)
        return self._tables[name]

    def hold(self, why: str) -> Hold:
        """Keeps the epoch open until released: `with epoch.hold("..."):` or `.release()`. `status` shows `why`."""
        return Hold(self._work.hold(self._where, why))

    def report(self, /, **numbers: float) -> None:
        """Reports numbers: once the epoch commits, in the progress line, its `commit` event and `JobResult.reports`.

        The last number of each name counts. If several tasks report a name, the lowest task's number is shown.
        """
        self._work.report(plain_numbers(numbers, self._place))

    def finish(self) -> None:
        """Ends the job when this epoch commits; one call in one task is enough. To fail the job instead, raise."""
        self._work.finish()

    def _find_channels(
        self, which: str, given: Mapping[str, To], composition: Composition
    ) -> dict[str, tuple[int, ...]]:
        """Returns the tasks that each declared tag comes from or goes to. Raises GraphError for a wrong argument."""
        if type(given) is not dict and not isinstance(given, Mapping):
            tags = [given] if isinstance(given, str) else given if isinstance(given, list | tuple | set) else []
            tag = next((str(tag) for tag in tags if isinstance(tag, str)), "tag")
            link = next(iter(self._work.links()), "link")
            raise GraphError(
                f"{self._place()}: {which} says {'from' if which == 'inbound' else 'to'} whom each tag travels, as in "
                f"{which}={{{tag!r}: {link!r}}}; it got {given!r:.100}"
            )
        linked = composition.linked
        channels = {}
        for tag, to in given.items():
            if type(to) is not str:
                if to == self._work.task and which == "inbound" and tag in composition.results:
                    channels[str(tag)] = composition.results[tag]  # of a collective: from the task to itself
                    continue
                channels[str(tag)] = task_ids(self._work, to, self._place, f"{which} {tag!r}")
                continue
            if to not in linked:
                linked[to] = task_ids(self._work, to, self._place, f"{which} {tag!r}")
            channels[str(tag)] = linked[to]
        return channels

    def _refuse_messages(self, what: str, *, composing: bool = False) -> None:
        """Raises GraphError in a sync point, and in `compose` unless `composing` is True."""
        if self._sync:
            raise GraphError(
                f"{self._place()}: a sync point runs when the epoch is quiet and cannot send a {what}; "
                f"send it from a processor with an outbound channel, or, where there are no channels, from on_flag: "
                f"flag yourself in compose for that, epoch.flag(self.task_id)"
            )
        if self._work.composing is not None and not composing:
            raise GraphError(
                f"{self._place()}: compose() cannot wait for an answer: send a {what} from a processor (a flag, also "
                f"here)"
            )

    def _place(self) -> str:
        """Names the task, epoch and place in user code, for messages."""
        return f"task {self._work.task}, epoch {self._work.number}, {place_text(self._where)}"


def place_text(where: str) -> str:
    """Describes a place in user code for a message; for a handler also the sender of the request."""
    called, *message = where.rsplit("/", 2)  # as `node.epochs.messenger` names it; a processor's name stays as it is
    if len(message) != 2 or not message[0].isdigit():
        return where
    by = f"by task {message[0]}"
    return f"on_flag (flagged {by})" if called == "on_flag" else f"handler {called!r} (asked {by})"


class ComposeEpoch(Epoch):
    """The epoch of a `compose` whose graph may be used for later epochs.

    Attributes:
        asked: True if `compose` used a value that may differ in another epoch, or did something in this epoch. The
            graph is then for this epoch only.
    """

    __slots__ = ("asked",)

    def __init__(self, work: Work) -> None:
        super().__init__(work, "compose")
        self.asked = False

    def __getattribute__(self, name: str) -> Any:
        # Every other public name, also a future one, sets `asked`. The topology knows which links change.
        if name not in _SAFE_TO_REUSE and not name.startswith("_"):
            object.__setattr__(self, "asked", True)
        return object.__getattribute__(self, name)

    def neighbors(self, link: str) -> tuple[int, ...]:
        composition = self._work.composing
        if composition is None or not composition.is_constant(link):
            self.asked = True
        return self._work.neighbors(link)


_SAFE_TO_REUSE = frozenset({"processor", "neighbors", "asked"}.union(COLLECTIVES))


class PureEpoch(Epoch):
    """The epoch of a handler that is marked pure.

    A pure handler may run any number of times, so it cannot send or report anything.
    """

    __slots__ = ()

    @property
    def scratch(self) -> SimpleNamespace:
        return _ReadOnlyScratch(self, self._work.scratch)

    def flag(self, to: To, meta: Any = None) -> None:
        raise self.refusal("send a flag")

    def request(self, to: int, method: str, payload: Any = None) -> Reply:
        raise self.refusal("send a request")

    def hold(self, why: str) -> Hold:
        raise self.refusal("hold the epoch")

    def report(self, /, **numbers: float) -> None:
        raise self.refusal("report")

    def finish(self) -> None:
        raise self.refusal("finish the job")

    def refusal(self, what: str) -> GraphError:
        """Returns the error for a call that a pure handler must not make."""
        method = self._where.rsplit("/", 2)[0]
        return GraphError(
            f"task {self._work.task}, epoch {self._work.number}, handler {method!r}: it is marked pure, so it may run "
            f"any number of times, and cannot {what}; leave pure=True out"
        )


class _ReadOnlyScratch(Scratch):
    """`epoch.scratch` of a pure handler: read-only."""

    __slots__ = ("_epoch",)

    def __init__(self, epoch: PureEpoch, scratch: Scratch) -> None:
        super().__init__()
        object.__setattr__(self, "_epoch", epoch)
        vars(self).update(vars(scratch))

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._epoch.refusal(f"set epoch.scratch.{name}")

    def __delattr__(self, name: str) -> None:
        raise self._epoch.refusal(f"delete epoch.scratch.{name}")


class Hold:
    """Keeps an epoch open. Releasing twice is no error."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def release(self) -> None:
        """Lets the epoch end. Any thread may call it."""
        self._release()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _mark_retrieved(answer: asyncio.Future[Encoded]) -> None:
    """Keeps asyncio from logging the answer's exception: user code may have stopped waiting for it."""
    if not answer.cancelled():
        answer.exception()


def service_ids(epoch: Epoch, title: str) -> tuple[int, ...]:
    """Returns the task ids of a service by its title, such as "table users"; (): the job has no such service."""
    return epoch._work.service(title)


def job_seed(epoch: Epoch) -> int:
    """Returns the seed of the job."""
    return epoch._work.seed


def ask_service(epoch: Epoch, to: int, method: str, payload: Any = None) -> Reply:
    """Sends a request to a task of a service. `Epoch.request` refuses their ids, and is for the user's tasks."""
    epoch._refuse_messages("request")
    return epoch._send_request(to, method, payload)


def reply_future(reply: Reply) -> asyncio.Future[Encoded]:
    """Returns an asyncio future of the answer, still encoded. asyncio logs no error if the caller never awaits it."""
    answer = asyncio.wrap_future(reply._future)
    answer.add_done_callback(_mark_retrieved)
    return answer


class Reply:
    """The pending answer to a request."""

    __taskgraph_way_out__ = (
        "it is not the answer yet: send the value of reply.wait(), or `await reply` in an `async def`"
    )

    def __init__(self, work: Work, future: concurrent.futures.Future[Encoded]) -> None:
        self._work = work
        self._future = future

    @property
    def done(self) -> bool:
        """True if the answer, or an error, has arrived."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        # Shielded: code that stops waiting, after a timeout, may wait again, and others may wait, too.
        answer = asyncio.wrap_future(self._future)
        answer.add_done_callback(_mark_retrieved)
        encoded = yield from asyncio.shield(answer).__await__()
        return decode(encoded, device=self._work.device)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the answer in a worker thread, and returns it. Other hooks of the task may run meanwhile.

        Raises:
            TimeoutError: no answer within `timeout_s`; None: it waits without a limit.
        """
        return decode(self._work.wait_in_thread(self._future, timeout_s), device=self._work.device)


def task_ids(work: Work, to: To, at: Callable[[], str], what: str) -> tuple[int, ...]:
    """Returns the ids of the tasks that `to` names, each once, even if several links lead to it.

    Args:
        at, what: the place and the call, for messages.
    """
    if type(to) is str:
        try:
            return work.neighbors(to)
        except JobError:
            pass  # the checks below find and explain the error
    what = f"{at()}: {what}"
    try:
        given = (to,) if isinstance(to, str) or hasattr(to, "__index__") else tuple(to)
        if any(isinstance(one, bool) for one in given):
            raise TypeError
        names = [one if isinstance(one, str) else int(one.__index__()) for one in given]
    except (TypeError, AttributeError):
        raise GraphError(f"{what} takes a link's name, a task id, or several of them, not {to!r}") from None
    ids = [one for one in names if isinstance(one, int)]
    for task in ids:
        if not 0 <= task < work.tasks():
            raise GraphError(f"{what} names task {task}, but the job has tasks 0 to {work.tasks() - 1}")
    if len(set(ids)) != len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise GraphError(f"{what} names task {twice} twice; list(dict.fromkeys(ids)) has each once")
    links = {one for one in names if isinstance(one, str)}
    if links and (unknown := links.difference(work.links())):
        known = ", ".join(map(repr, work.links())) or "none"
        raise GraphError(f"{what} names link {min(unknown)!r}, but the topology's links are: {known}")
    found: list[int] = []
    for one in names:
        found += work.neighbors(one) if isinstance(one, str) else [one]
    return tuple(dict.fromkeys(found))
