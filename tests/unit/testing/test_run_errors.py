"""Errors of users say where they happened and what to do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs_kit import Fit, fails, fit, job, no_op, run, says, task

import taskgraph as tg
from taskgraph.epoch import AttemptEnded


def ordered(**processors: Any) -> None:
    """Nothing; a marker for readers that a compose below declares in this order."""


# -- neighbors and channels -----------------------------------------------------------------------


def test_a_neighbor_that_does_not_exist() -> None:
    def put(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", 1)

    made = task(lambda self, epoch: epoch.processor(put, outbound={"x": "next"}))
    error = fails(job(made, topology={"next": lambda i, n, e: [i + 1]}))
    assert error.task == 1
    says(error, "link 'next' names task 2", "tasks 0 to 1")


@pytest.mark.parametrize(
    ("to", "words"),
    [
        (7, ["outbound 'x' names task 7", "tasks 0 to 1"]),
        (-1, ["names task -1"]),
        ("friends", ["names link 'friends'", "'peers'", "'all'"]),
        ([1, 0, 1], ["names task 1 twice; list(dict.fromkeys(ids)) has each once"]),
        (["peers", "friends"], ["names link 'friends'", "'peers'", "'all'"]),
        (1.5, ["takes a link's name, a task id, or several of them, not 1.5"]),
        (True, ["takes a link's name, a task id, or several of them, not True"]),
        ([0, True], ["a task id, or several of them, not [0, True]"]),
    ],
    ids=str,
)
def test_a_channel_to_nowhere(to: Any, words: list[str]) -> None:
    error = fails(job(task(lambda self, epoch: epoch.processor(no_op, outbound={"x": to}))))
    says(error, "epoch 0", "compose", *words)


def test_unknown_link() -> None:
    says(fails(job(task(lambda self, epoch: epoch.neighbors("up")))), "there is no link 'up'", "'peers'")


def test_a_grid_of_another_size() -> None:
    made = task(lambda self, epoch: epoch.neighbors("north"))
    says(fails(job(made, topology=tg.grid(2, 3))), "2 x 3 = 6 tasks", "the job has 2")


def test_unknown_channel_lists_offered_ones() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.give, outbound={"gradient": 1, "other": 2})  # type: ignore[attr-defined]
        if self.task_id == 1:
            epoch.processor(no_op, name="add", inbound={"grad": 0, "gradient": 0})
        if self.task_id == 2:
            epoch.processor(no_op, name="take", inbound={"other": 0})

    def give(self: tg.Task, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("gradient", 1)
        outs.put("other", 1)

    began = time.monotonic()
    error = fails(job(task(compose, give=give), tasks=3))
    assert time.monotonic() - began < 15
    assert error.task == 1
    says(error, "epoch 0", "'add' pulls 'grad' from task 0", "does not offer it", "'gradient'", "to others: 'other'")


def test_pull_from_a_task_without_channels() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        if self.task_id == 1:
            epoch.processor(no_op, name="take", inbound={"x": 0})

    says(fails(job(task(compose))), "'take' pulls 'x' from task 0", "nothing")


def test_unwanted_put_is_named() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(lambda epoch, ins, outs: outs.put("x", 1), outbound={"x": 1})

    error = fails(job(task(compose)))
    says(error, "epoch 0", "task 0 put 'x' for task 1", "does not take it", "inbound")


def test_cycle_of_waits_is_spelled_out() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        other = 1 - self.task_id
        epoch.processor(no_op, name="receive", inbound={"x": other}, outbound={"y": other})
        epoch.processor(no_op, name="send", outbound={"x": other})
        epoch.processor(no_op, name="done", inbound={"y": other})

    error = fails(job(task(compose)))
    says(
        error,
        "a cycle of waits",
        "'receive'",
        "waits for 'x' from task 1",
        "'send'",
        "in another order",
        "parallel=True",
    )


# -- processors -----------------------------------------------------------------------------------


def given(function: Callable[..., Any], **channels: Any) -> tg.Job:
    """Makes a job of one task whose processor "work" is `function` and puts to its own task."""

    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(function, name="work", outbound=dict.fromkeys(channels, 0))
        if channels:
            epoch.processor(no_op, name="rest", inbound=dict.fromkeys(channels, 0))

    return job(task(compose), tasks=1)


def test_a_declared_channel_that_was_not_put() -> None:
    error = fails(given(lambda epoch, ins, outs: outs.put("x", 1), x=0, y=0))
    says(error, "task 0, epoch 0, work", "without putting 'y' to task 0", "exactly once", "None for nothing")


def test_a_channel_that_was_put_twice() -> None:
    def twice(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", 1)
        outs.put("x", 1)

    says(fails(given(twice, x=0)), "work", "channel 'x' to task 0 was put twice", "put a list, or declare another tag")


def test_undeclared_put() -> None:
    says(
        fails(given(lambda epoch, ins, outs: outs.put("z", 1), x=0)),
        "work",
        "no outbound channel 'z' is declared; outbound are: 'x'",
    )
    says(fails(given(lambda epoch, ins, outs: outs.put("z", 1))), "none (it is a sync point)")


def test_put_outside_the_channel() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(lambda epoch, ins, outs: outs.put("x", 1, to=1), name="work", outbound={"x": self.task_id})
        epoch.processor(no_op, name="rest", inbound={"x": self.task_id})

    says(fails(job(task(compose))), "'x' does not lead to task 1; it leads to: 0")
    says(fails(given(lambda epoch, ins, outs: outs.put("x", 1, to=5), x=0)), "'x' names task 5", "tasks 0 to 0")


def test_undeclared_inbound_channel() -> None:
    says(fails(given(lambda epoch, ins, outs: ins["z"])), "no inbound channel 'z' is declared; inbound are: none")


def test_single_value_of_several_producers() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(lambda epoch, ins, outs: outs.put("x", 1), name="give", outbound={"x": "all"})
        epoch.processor(lambda epoch, ins, outs: ins["x"], name="take", inbound={"x": "all"})

    says(fails(job(task(compose))), "take", "'x' comes from 2 tasks (0, 1)", "ins.all('x')")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), ["object"]),
        ({1, 2}, ["set", "sorted"]),
        (lambda: 0, ["function"]),
        ([1, {"a": object()}], ["object", "[1]['a']"]),
    ],
    ids=["object", "set", "function", "nested"],
)
def test_a_value_that_cannot_travel(value: Any, words: list[str]) -> None:
    error = fails(given(lambda epoch, ins, outs: outs.put("x", value), x=0))
    assert (error.task, error.epoch, error.where) == (0, 0, "work")
    says(error, "channel 'x' of task 0", *words)


def test_refused_value_names_a_way_out() -> None:
    class Own:
        pass

    says(fails(given(lambda epoch, ins, outs: outs.put("x", Own()), x=0)), "Own", "tg.message", "tg.codec")


def test_state_that_cannot_be_kept() -> None:
    def setup(self: Any) -> None:
        self.thing = object()

    error = fails(
        job(type(tg.Task)("Made", (tg.Task,), {"setup": setup, "compose": lambda self, epoch: None}, state=["thing"]))
    )
    says(error, "state 'thing' of task 0", "object")


def test_state_that_was_never_set() -> None:
    made = type(tg.Task)("Made", (tg.Task,), {"compose": lambda self, epoch: None}, state=["thing"])
    says(fails(job(made)), "(Made) declares state 'thing'", "set self.thing in setup()")


def test_two_processors_of_one_name() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(no_op)
        epoch.processor(no_op)

    says(fails(job(task(compose))), "two processors are called 'no_op'", "name=")


def test_two_producers_of_one_channel() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(no_op, name="a", outbound={"x": 0})
        epoch.processor(no_op, name="b", outbound={"x": 0})

    says(fails(job(task(compose))), "'a' and 'b' both declare channel 'x' to task 0", "another tag")


def test_a_parallel_sync_point() -> None:
    made = task(lambda self, epoch: epoch.processor(no_op, parallel=True))
    says(fails(job(made)), "'no_op' has no outbound channel", "leave parallel=True out", "epoch.flag(self.task_id)")


def test_compute_that_is_not_callable() -> None:
    says(fails(job(task(lambda self, epoch: epoch.processor(3)))), "must be callable, not int")


def test_a_processor_declared_outside_compose() -> None:
    says(fails(given(lambda epoch, ins, outs: epoch.processor(no_op))), "work", "in compose(), and only there")


def test_processor_declared_on_a_stale_epoch() -> None:
    def compose(self: Any, epoch: tg.Epoch) -> None:
        self.kept = getattr(self, "kept", epoch)
        self.kept.processor(no_op)

    error = fails(job(task(compose), tasks=1), strict=False)
    assert (error.epoch, error.where) == (1, "compose")
    says(error, "this `epoch` is of a compose() that has returned: use the one that it is given each time")


def test_report_of_a_non_number() -> None:
    says(fails(given(lambda epoch, ins, outs: epoch.report(loss="low"))), "report(loss=...)", "not str", "result()")
    large = fails(given(lambda epoch, ins, outs: epoch.report(loss=10**400)))
    says(large, "report(loss=...)", "too large for a float")


# -- flags and requests ---------------------------------------------------------------------------


def test_flag_without_on_flag() -> None:
    error = fails(job(task(lambda self, epoch: epoch.flag("peers", 1))))
    says(error, "epoch 0, compose: a flag to task", "defines no on_flag(epoch, sender, meta)")


def test_a_request_of_an_unknown_method() -> None:
    def ask(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.request(0, "pull").wait()

    @tg.handles("push")
    def push(self: tg.Task, epoch: tg.Epoch, sender: int, payload: Any) -> None: ...

    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(ask, outbound={"x": 0})
        epoch.processor(no_op, inbound={"x": 0})

    error = fails(job(task(compose, push=push), tasks=1))
    says(error, "task 0, epoch 0, ask: request 'pull' to task 0", "it handles: 'push'", "@tg.handles('pull')")


@pytest.mark.parametrize(("tasks", "words"), [(3, "'peers' names 2 tasks"), (1, "'peers' names no tasks")])
def test_a_request_to_several_or_to_nobody(tasks: int, words: str) -> None:

    def ask(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.request("peers", "push")  # type: ignore[arg-type]

    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(ask, outbound={"x": self.task_id})

    says(fails(job(task(compose), tasks=tasks)), "a request goes to one task, " + words)


@pytest.mark.parametrize("what", ["flag", "request"])
def test_a_sync_point_sends_nothing(what: str) -> None:
    def sync(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.flag(0) if what == "flag" else epoch.request(0, "push")

    error = fails(job(task(lambda self, epoch: epoch.processor(sync)), tasks=1))
    says(
        error,
        "sync",
        f"a sync point runs when the epoch is quiet and cannot send a {what}",
        "outbound channel",
        "on_flag",
    )
    says(error, "epoch.flag(self.task_id)")


def test_request_without_a_channel() -> None:
    class Asking(tg.Task, state=["got"]):
        def setup(self) -> None:
            self.got: int | None = None

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.flag(self.task_id)
            epoch.processor(self.keep)

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: object) -> None:
            epoch.scratch.got = await epoch.request(1 - self.task_id, "double", self.task_id + 1)

        @tg.handles("double", pure=True)
        def double(self, epoch: tg.Epoch, sender: int, payload: int) -> int:
            return 2 * payload

        def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.got = epoch.scratch.got

        def result(self) -> int | None:
            return self.got

    assert tg.testing.run(tg.Job(tasks=2, epochs=1, builder=lambda _: Asking())).values == {0: 2, 1: 4}


def test_compose_asks_nobody() -> None:
    says(fails(job(task(lambda self, epoch: epoch.request(0, "push")))), "compose() cannot wait for an answer")


def test_wait_in_async_def_is_refused() -> None:
    async def ask(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.request(0, "push").wait()

    @tg.handles("push")
    def push(self: tg.Task, epoch: tg.Epoch, sender: int, payload: Any) -> None: ...

    made = task(lambda self, epoch: epoch.processor(ask, outbound={"x": 0}), push=push)
    says(fails(job(made, tasks=1)), "would block the event loop", "`await reply`")


# -- user code that raises ------------------------------------------------------------------------


class Oops(Exception):
    pass


def raises(self: Any, *args: Any) -> Any:
    raise Oops("on purpose")


async def araises(self: Any, *args: Any) -> Any:
    raise Oops("on purpose")


def flags_itself(self: tg.Task, epoch: tg.Epoch) -> None:
    epoch.flag(self.task_id)


def asks_itself(self: tg.Task, epoch: tg.Epoch) -> None:
    epoch.processor(lambda e, ins, outs: e.request(self.task_id, "push").wait(), name="ask", outbound={"x": 0})


def nothing(self: tg.Task, epoch: tg.Epoch) -> None: ...


WHERE: list[tuple[str, int | None, Callable[[], Any]]] = [
    ("compose", 0, lambda: task(raises)),
    ("setup", 0, lambda: task(nothing, setup=raises)),
    ("setup", 0, lambda: task(nothing, setup=araises)),
    ("result", None, lambda: task(nothing, result=raises)),  # after the last epoch
    ("snapshot", 0, lambda: task(nothing, snapshot=raises, restore=nothing)),
    ("restore", 0, lambda: task(nothing, snapshot=lambda self: 1, restore=raises)),
    ("on_commit", 0, lambda: task(nothing, on_commit=raises)),  # of the epoch that was committed
    ("on_commit", 1, lambda: task(nothing, on_commit=lambda self, number, state: number and raises(self))),  # the last
    ("on_event", 0, lambda: task(nothing, on_event=raises)),
    ("on_flag", 0, lambda: task(flags_itself, on_flag=raises)),
    ("on_flag", 0, lambda: task(flags_itself, on_flag=araises)),
    ("handler push", 0, lambda: task(asks_itself, push=tg.handles("push")(lambda self, *args: raises(self)))),
    ("handler push", 0, lambda: task(asks_itself, push=tg.handles("push", pure=True)(lambda self, *a: raises(self)))),
    ("work", 0, lambda: task(lambda self, epoch: epoch.processor(lambda *a: raises(self), name="work"))),
    ("work", 0, lambda: task(lambda self, epoch: epoch.processor(araises, name="work", outbound={"x": 0}))),
    ("work", 0, lambda: task(lambda s, e: e.processor(araises, name="work", outbound={"x": 0}, parallel=True))),
    ("task builder", 0, lambda: lambda task_id: raises(None)),
]


@pytest.mark.parametrize(("where", "epoch", "builder"), WHERE, ids=[f"{i}-{w[0]}" for i, w in enumerate(WHERE)])
def test_traceback_of_user_code(where: str, epoch: int | None, builder: Callable[[], Any]) -> None:
    error = fails(job(builder(), tasks=1))
    assert (error.task, error.epoch, error.where, error.job) == (0, epoch, where, "job")
    says(error, "task 0", repr(where), "Oops: on purpose", *([] if epoch is None else [f"epoch {epoch}"]))
    assert error.traceback_text.startswith("Traceback (most recent call last):\n")
    frames = re.findall(r'File "([^"]+)"', error.traceback_text)
    assert frames[0] == __file__, error.traceback_text
    assert 'raise Oops("on purpose")' in error.traceback_text


def test_cause_of_an_error_is_shown() -> None:
    def work(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        try:
            _ = {}["missing"]
        except KeyError as error:
            raise Oops("because") from error

    text = fails(given(work)).traceback_text
    assert "KeyError: 'missing'" in text
    assert "direct cause" in text
    assert "Oops: because" in text


def test_framework_error_names_the_user_line() -> None:
    def work(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", lambda: 1)  # this line

    error = fails(given(work, x=0))
    found = re.search(r"cannot travel.*\(at (.+), line (\d+)\)$", str(error), re.S)
    assert found is not None and found[1] == __file__, str(error)
    assert "# this line" in Path(__file__).read_text().splitlines()[int(found[2]) - 1]


@pytest.mark.parametrize("sync", [False, True])
def test_generator_as_compute_is_refused(sync: bool) -> None:
    def work(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> Iterator[None]:
        outs.put("x", 1)
        yield

    error = fails(given(work) if sync else given(work, x=0))
    says(error, "'work' has a `yield`", "outs.put(tag, value)")


def test_wrong_compute_signature_shows_the_right_one() -> None:
    def step(self: tg.Task, epoch: tg.Epoch) -> None: ...

    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(self.step, name="one")  # type: ignore[attr-defined]

    error = fails(job(task(compose, step=step)))
    defined, declared = step.__code__.co_firstlineno, compose.__code__.co_firstlineno + 1
    says(error, "epoch 0, compose: 'one' is called as step(self, epoch, ins, outs), but takes (self, epoch), ")
    says(error, f", defined at {__file__}, line {defined} (at {__file__}, line {declared})")
    assert "actor.py" not in str(error)


async def _cancels_itself(*args: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


@tg.handles("get")
async def _answers_with_its_own_end(self: tg.Task, epoch: Any, sender: int, payload: Any) -> None:
    await _cancels_itself()


async def _cancels_itself_and_returns(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    for tag in ("x", "y"):
        if tag in outs._processor.outbound:
            outs.put(tag, 1)


async def _cancels_itself_and_goes_on(*args: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    await asyncio.sleep(0.1)
    task.cancel()


async def _cancels_itself_and_raises(*args: Any) -> None:
    try:
        await _cancels_itself_and_goes_on()
    finally:
        raise ValueError("after all")


async def _puts(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
    outs.put("x", 1)


async def _sends_a_flag(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
    epoch.flag("peers")
    outs.put("x", 1)


async def _asks(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
    await epoch.request(1 - self.task_id, "get")
    outs.put("x", 1)


def _no_op_beside(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
    outs.put("y", 1)


def _nothing(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
    """Does nothing."""


def _through_another_task(self: tg.Task, epoch: tg.Epoch) -> None:
    epoch.processor(self.go, outbound={"x": "peers"})
    epoch.processor(self.beside, outbound={"y": "peers"}, parallel=True)
    epoch.processor(self.end, inbound={"x": "peers", "y": "peers"})


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    ("hook", "code", "others"),
    [
        ("go", _cancels_itself, {}),
        ("go", _cancels_itself_and_returns, {}),
        ("beside", _cancels_itself, {}),
        ("end", _cancels_itself, {}),
        ("end", _cancels_itself_and_returns, {}),
        ("on_flag", _cancels_itself, {"go": _sends_a_flag}),
        ("get", _answers_with_its_own_end, {"go": _asks}),
        ("setup", _cancels_itself, {}),
        ("setup", _cancels_itself_and_goes_on, {}),
        ("on_commit", _cancels_itself, {}),
        ("on_commit", _cancels_itself_and_goes_on, {}),
        ("on_commit", _cancels_itself_and_raises, {}),
    ],
)
def test_self_cancellation_fails_the_job(hook: str, code: Any, others: dict[str, Any], in_flight: bool) -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        _through_another_task(self, epoch)

    if in_flight:
        tg.stateless(compose)
    members = {"go": _puts, "beside": _no_op_beside, "end": _nothing, **others, hook: code}
    made = type(tg.Task)("Made", (tg.Task,), {"compose": compose, **members})
    says(fails(job(made, epochs=20), strict=False), "cancelled the asyncio task it runs in", "return from it")


@tg.handles("get")
def _answers(self: tg.Task, epoch: Any, sender: int, payload: Any) -> None:
    """Answers."""


def _hears(self: tg.Task, epoch: Any, sender: int, meta: Any) -> None:
    """Hears."""


@pytest.mark.parametrize("what", ["flag", "request"])
def test_late_message_fails_the_job(what: str) -> None:
    beside: list[asyncio.Task[None]] = []

    async def go(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
        async def later() -> None:
            await asyncio.sleep(1)
            with pytest.raises(tg.GraphError, match="comes too late"):
                epoch.flag("peers") if what == "flag" else epoch.request(1 - self.task_id, "get")

        beside.append(asyncio.create_task(later()))
        outs.put("x", 1)

    async def end(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
        await asyncio.sleep(5)  # it is sealed, and so is the other task

    members = {"go": go, "beside": _no_op_beside, "end": end, "on_flag": _hears, "get": _answers}
    made = type(tg.Task)("Made", (tg.Task,), {"compose": _through_another_task, **members})
    says(fails(job(made), strict=False), "epoch 0, go", f"a {what} that is sent", "comes too late", "epoch.hold(")
    assert beside


@pytest.mark.parametrize("mistake", ["link", "method", "hold"])
@pytest.mark.parametrize("how", ["flag", "request"])
def test_handler_is_named_with_its_sender(how: str, mistake: str) -> None:

    async def wrong(self: tg.Task, epoch: Any, sender: int, payload: Any) -> None:
        if self.task_id == 1:
            if mistake == "link":
                epoch.flag("pears")
            elif mistake == "method":
                await epoch.request(0, "got")
            else:
                epoch.hold("a hold")

    @tg.handles("get")
    async def answer(self: tg.Task, epoch: Any, sender: int, payload: Any) -> None:
        await wrong(self, epoch, sender, payload)

    async def ask(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
        if self.task_id == 0:
            epoch.flag(1) if how == "flag" else await epoch.request(1, "get")
        outs.put("x", 1)

    def compose(self: tg.Task, epoch: Any) -> None:
        epoch.processor(self.ask, outbound={"x": self.task_id})
        epoch.processor(self.end, inbound={"x": self.task_id})

    members = {"ask": ask, "end": _nothing, "on_flag": wrong, "answer": answer}
    made = job(type(tg.Task)("Made", (tg.Task,), {"compose": compose, **members}))
    named = "on_flag (flagged by task 0)" if how == "flag" else "handler 'get' (asked by task 0)"
    if mistake == "hold":
        with pytest.raises(tg.JobTimeout) as caught:
            run(made, timeout_s=2)
        says(caught.value, f"{named}: a hold")
    else:
        says(fails(made), f"task 1, epoch 0, {named}: ")


def test_unreleased_hold_is_named() -> None:
    with pytest.raises(tg.JobTimeout, match=r"task 0 'hold' is not released \(compose: whywhy") as caught:
        run(job(task(lambda self, epoch: epoch.hold("why" * 10_000)), tasks=1), timeout_s=2)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("what", ["flag", "request"])
@pytest.mark.parametrize("done_s", [3, 0], ids=["finished", "committed"])
@pytest.mark.parametrize("order", range(2))
def test_message_after_its_epoch_fails_the_job(what: str, done_s: int, order: int) -> None:
    beside: list[asyncio.Task[None]] = []

    async def go(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
        async def later() -> None:
            await asyncio.sleep(2)
            with pytest.raises((tg.GraphError, AttemptEnded)):
                epoch.flag("peers") if what == "flag" else epoch.request(1 - self.task_id, "get")

        if epoch.number == 1 and self.task_id == 0:
            beside.append(asyncio.create_task(later()))
        outs.put("x", 1)

    async def end(self: tg.Task, epoch: Any, ins: Any, outs: Any) -> None:
        await asyncio.sleep(0.5 + self.task_id * done_s)  # before, the epoch does not commit

    members = {"go": go, "beside": _no_op_beside, "end": end, "on_flag": _hears, "get": _answers}
    made = type(tg.Task)("Made", (tg.Task,), {"compose": _through_another_task, **members})
    error = fails(job(made, epochs=20), strict=False, order=order)
    says(error, "task 0, epoch 1, go", f"a {what} that is sent", "comes too late", "epoch.hold(")
    assert (error.task, error.epoch) == (0, 1)


def test_returned_value_is_not_put() -> None:
    says(fails(given(lambda epoch, ins, outs: 5, x=0)), "without putting 'x'", "return value of a processor is ignored")


def test_except_exception_does_not_keep_an_attempt() -> None:
    class Stubborn(tg.Task, state=["total"]):
        def setup(self) -> None:
            self.total = 0

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.ask, outbound={"x": self.task_id})
            epoch.processor(self.count, inbound={"x": self.task_id})

        def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            try:
                outs.put("x", epoch.request(1 - self.task_id, "id").wait())
            except Exception:
                outs.put("x", -1000)

        @tg.handles("id")
        def answer(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
            return 1

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += ins["x"]

        def result(self) -> int:
            return self.total

    for stage in ("processor", "sync", "done"):
        assert run(job(Stubborn, epochs=3), kills={(1, 1): stage}).values == {0: 3, 1: 3}


# -- the job as a whole ---------------------------------------------------------------------------


def test_a_builder_that_makes_something_else() -> None:
    says(fails(job(lambda task_id: "a task")), "the task builder returned str for task 0", "tg.Task")


def test_a_class_that_takes_other_arguments() -> None:
    class Needy(tg.Task):
        def __init__(self, rows: int) -> None: ...

        def compose(self, epoch: tg.Epoch) -> None: ...

    with pytest.raises(tg.JobError, match="takes rows; give them with builder=lambda task_id: Needy"):
        job(Needy)


def test_a_class_without_compose() -> None:
    class Idle(tg.Task):
        pass

    says(fails(job(Idle)), "class Idle must define compose(self, epoch)")


def test_min_in_sync_that_cannot_be_met() -> None:
    with pytest.raises(tg.JobError, match=r"min_in_sync=3 .* backups=1 .* at least 2"):
        job(Fit, backups=1, settings=tg.Settings(min_in_sync=3))


def test_hanging_job_says_what_it_waits_for() -> None:
    def work(epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.hold("the rain")

    with pytest.raises(tg.JobTimeout, match=r"did not end within 2 s; it waits: .*the rain"):
        run(given(work), timeout_s=2)


def test_timeout_s_is_real_time() -> None:

    async def work(self: tg.Task, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(30 if epoch.number == 0 else 1e6)

    sleeps = task(lambda self, epoch: epoch.processor(self.work), work=work)
    began = time.monotonic()
    assert run(job(sleeps, epochs=1), strict=False).epochs == 1
    assert time.monotonic() - began >= 0.03
    with pytest.raises(tg.JobTimeout, match=r"did not end within 1 s; .* \d\d+\.\d s.*are of its clock, .* 1000 times"):
        run(job(sleeps, epochs=2), timeout_s=1, strict=False)


@pytest.mark.parametrize("ends", [True, False])
def test_endless_job_fails(ends: bool) -> None:

    def count(self: Any, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if ends and epoch.number == 199:
            epoch.finish()

    counts = task(lambda self, epoch: epoch.processor(self.count), count=count)
    if ends:
        assert run(job(counts, epochs=None), timeout_s=1, strict=False).epochs == 200
        return
    said = r"committed 200 epochs without an end: no processor called epoch\.finish\(\) \(the limit is 200 for each"
    with pytest.raises(tg.JobTimeout, match=said):
        run(job(counts, epochs=None), timeout_s=1)


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        ({(0, 1): "lunch"}, "'lunch' is no stage; the stages are: compose, "),
        ([(0, 1)], "kills=[(0, 1)]: must be {(task, epoch): stage}, as in kills={(2, 1): 'processor'}"),
        ({0: "done"}, "kills={0: 'done'}: must be {(task, epoch): stage}"),
        ({(1, 1): "commit"}, "happens at the leader"),
        ({(9, 1): "sync"}, "there is no task 9 in epoch 1"),
        ({(0, 99): "sync"}, "there is no task 0 in epoch 99"),
    ],
    ids=str,
)
def test_kills_that_make_no_sense(kills: Any, words: str) -> None:
    with pytest.raises(tg.JobError, match=re.escape(words)):
        run(fit(), kills=kills)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"order": "a"}, "order='a'): must be an int"),
        ({"order": 1.5}, "order=1.5): must be an int"),
        ({"nodes": "2"}, "nodes='2'): must be an int of at least 1"),
        ({"nodes": -1}, "nodes=-1): must be an int of at least 1"),
        ({"timeout_s": "5"}, "timeout_s='5'): must be a number of seconds above 0"),
        ({"stuck_s": 0}, "stuck_s=0): must be a number of seconds above 0"),
    ],
    ids=str,
)
def test_other_arguments_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(tg.JobError, match=re.escape(words)):
        tg.testing.run(fit(), **given)


def test_kills_that_never_came_to_pass() -> None:
    def compose(self: tg.Task, epoch: tg.Epoch) -> None:
        epoch.processor(lambda epoch, ins, outs: epoch.finish(), name="work")

    with pytest.raises(tg.JobError, match=r"never came to pass: task 0 in epoch 5 \(sync\)"):
        run(job(task(compose), epochs=None), kills={(0, 5): "sync"})


@pytest.mark.parametrize("start", [tg.testing.run, lambda job: tg.run(job, nodes=0)], ids=["testing", "run"])
def test_traceback_shows_none_of_our_frames(start: Callable[[tg.Job], object]) -> None:

    class Raises(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            raise ValueError("boom")

    with pytest.raises(tg.JobFailed, match="boom") as failed:
        start(job(Raises, tasks=1))
    ours = Path(tg.__file__).parent
    inside = [entry for entry in failed.traceback if ours in Path(entry.path).parents]
    assert len(inside) == 1
