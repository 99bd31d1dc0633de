"""Strict mode names mistakes that otherwise show only after a failure; pure handlers have no effects."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jobs_kit import fails, job, run, says

import taskgraph as tg


class Total(tg.Task, state=["total"]):
    def setup(self) -> None:
        self.total = 0
        self.seen = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.work, outbound={"x": self.task_id})
        epoch.processor(self.count, inbound={"x": self.task_id})

    def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", 1)

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["x"]


def test_state_changed_outside_a_sync_point() -> None:
    class Early(Total):
        def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1
            outs.put("x", 1)

    error = fails(job(Early))
    says(error, "epoch 0", "'work' changed state (total) outside a sync point", "epoch.scratch")


def test_state_changed_by_a_handler_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Asked(Total):
        async def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", await epoch.request(1 - self.task_id, "add"))

        @tg.handles("add")
        def add(self, epoch: tg.Epoch, sender: int, payload: None) -> int:
            self.total += 1
            return 1

    says(fails(job(Asked)), "epoch 0", "'add' changed state (total) outside a sync point")
    assert not [record for record in caplog.records if record.exc_info]


class Unequal(type):
    """Who compares its classes has no hash of them, as in Python."""

    __hash__ = None  # type: ignore[assignment]


class Hashless(metaclass=Unequal): ...


class Unbound:
    """As proxies of what is not there yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("bound to nothing")

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


class Refusing: ...


def refused(value: Refusing) -> None:
    raise KeyError("not now")


tg.codec(Refusing, refused, lambda none: Refusing())


@pytest.mark.parametrize("kind", [Hashless, Unbound, Refusing])
def test_hostile_attributes_pass(kind: type) -> None:

    class Has(Total):
        def setup(self) -> None:
            super().setup()
            self.odd = kind()

    class Forgets(Has):
        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.seen += 1
            self.total += self.seen

    assert run(job(Has)).status == "finished"
    says(fails(job(Forgets)), "snapshot() forgets state", "not in the snapshot: seen;")


def test_state_changed_by_compose_is_named() -> None:
    class Early(Total):
        def compose(self, epoch: tg.Epoch) -> None:
            super().compose(epoch)
            self.total += 1

    says(fails(job(Early)), "'compose' changed state (total)")


@pytest.mark.parametrize(("hook", "epoch"), [("on_commit", 1), ("on_event", 0)])
def test_state_changed_between_epochs_is_named(hook: str, epoch: int) -> None:
    def adds(self: Total, *_: Any) -> None:
        self.total += 1

    error = fails(job(type(Total)("Between", (Total,), {hook: adds})))
    assert error.epoch == epoch
    says(error, "state 'total'", "state (total) had changed after its snapshot, when the epoch began", f"in {hook} or")
    assert "snapshot() forgets" not in str(error)


@pytest.mark.parametrize("declared", [True, False])
def test_incomplete_restore_is_named(declared: bool) -> None:

    class Loses(Total, state=["other"]):
        def setup(self) -> None:
            super().setup()
            self.other = 0

        def restore(self, state: Any) -> None:
            self.other = self.seen = state["other"]

    class Whole(Loses):
        def snapshot(self) -> Any:
            return [self.total, self.other]

        def restore(self, state: Any) -> None:
            self.other = state[1]

    lost = "total" if declared else "snapshot()"
    error = fails(job(Loses if declared else Whole))
    says(error, "epoch 1", f"restore() does not take back what snapshot() returned ({lost}):", "super().restore(state)")


def test_forgotten_state_is_named() -> None:
    class Forgetful(Total):
        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.seen += 1
            self.total += self.seen

    error = fails(job(Forgetful, epochs=3))
    assert error.epoch == 1
    says(error, "came out differently", "state 'total'", "snapshot() forgets state", "seen", "state=[...]")


@pytest.mark.parametrize("size", [4, 10_000])
@pytest.mark.parametrize("writes", [False, True])
def test_write_to_a_sent_array_is_named(writes: bool, size: int) -> None:

    class Keeps(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.fill, outbound={"x": "peers"})
            epoch.processor(self.goes_on, outbound={"y": "peers"})
            epoch.processor(self.add, inbound={"x": "peers", "y": "peers"})

        def fill(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            array = outs.empty("x", (2 * size,), "f8")
            epoch.scratch.view = array.reshape(2, size)
            epoch.scratch.view[:] = epoch.number

        def goes_on(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if writes and epoch.number == 1:
                epoch.scratch.view -= 1
            outs.put("y", 0)

        def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            for x in ins.all("x").values():
                assert x.tolist() == [epoch.number] * 2 * size

    keeps = job(Keeps, epochs=3, topology=tg.full())
    if not writes or size == 4:  # what is small is copied into the message
        assert run(keeps).epochs == 3
        return
    says(fails(keeps), "epoch 1: what 'fill' sent as 'x' was written to", "'goes_on' had run", "outs.empty", "a copy")


class Helper:
    """Of the user's: an optimizer, say."""

    count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ((lambda: (n for n in range(100))), "cannot travel: source (of type generator)"),
        (lambda: iter(range(100)), "attributes that differ and are not in the snapshot: source"),
        (lambda: np.random.default_rng(1), "attributes that differ and are not in the snapshot: source"),
        (Helper, "attributes that differ and are not in the snapshot: source"),
        (lambda: {-1}, "attributes that differ and are not in the snapshot: source"),
    ],
    ids=["generator", "iterator", "random", "helper", "set"],
)
def test_forgotten_state_that_cannot_travel(made: Callable[[], Any], told: str) -> None:

    class Forgetful(Total):
        def setup(self) -> None:
            super().setup()
            self.source = made()
            self.function = abs
            self.module = np

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if isinstance(self.source, set):
                self.total += len(self.source)
                self.source.add(epoch.number)
            elif isinstance(self.source, np.random.Generator):
                self.total += int(self.source.integers(10**6))
            else:
                self.total += next(self.source)

    error = fails(job(Forgetful, epochs=3))
    says(error, "epoch 1: replayed from its snapshot", "state 'total'", f"{told};")
    assert not any(name in str(error) for name in ("function", "module"))


def test_forgotten_set_is_named() -> None:
    class Forgetful(Total):
        def setup(self) -> None:
            self.total, self.met = 0, set[int]()

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += self.task_id in self.met
            self.met.add(self.task_id)

    says(fails(job(Forgetful, epochs=3)), "it may be an attribute", "cannot travel: met (of type set);")


class Counts(Total):
    """Nothing that it puts, and no state, tells of `seen`."""

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().count(epoch, ins, outs)
        self.seen += 1

    def result(self) -> Any:
        return self.seen


class Stateless(tg.Task):
    """The same, and no state at all."""

    def setup(self) -> None:
        self.seen = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.seen += 1

    def result(self) -> Any:
        return self.seen


class Remembers(Stateless):
    """It cannot even tell its result without what it forgot."""

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.last = epoch.number

    def result(self) -> Any:
        return self.last


@pytest.mark.parametrize("task", [Counts, Stateless, Remembers])
def test_forgotten_state_in_the_result_is_named(task: type[tg.Task]) -> None:
    says(fails(job(task, epochs=3)), "'result'", "as after a failure", "snapshot() forgets state", "state=[...]")


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (lambda: np.zeros(3), "are one object, and two once they are restored; give each"),
        (lambda: [0.0], "are one object, and two once they are restored"),
    ],
    ids=["array", "list"],
)
def test_shared_state_attributes_are_named(first: Callable[[], Any], words: str) -> None:
    class Aliased(tg.Task, state=["best", "cur"]):
        def setup(self) -> None:
            self.best, self.cur = first(), first()

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.cur[0] += 1.0
            if epoch.number == 0:
                self.best = self.cur

    error = fails(job(Aliased, epochs=3))
    assert error.epoch == 1
    says(error, "(state 'best')", "self.cur and self.best", words)


def test_stateless_task_that_remembers_is_named() -> None:
    class Memory(tg.Task):
        def setup(self) -> None:
            self.steps = 0

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.work, outbound={"x": self.task_id})
            epoch.processor(self.count, inbound={"x": self.task_id})

        def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", self.steps)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.steps += 1

    says(fails(job(Memory, epochs=3)), "'x' to task", "steps")


def test_a_snapshot_of_another_class() -> None:
    made = Total()
    made.task_id = 3
    with pytest.raises(tg.StateError, match="lacks 'total' and holds undeclared 'other'"):
        made.restore({"other": 1})


PURE_EFFECTS: dict[str, tuple[Callable[[tg.Epoch], Any], str]] = {
    "flag": (lambda epoch: epoch.flag(0), "cannot send a flag"),
    "request": (lambda epoch: epoch.request(0, "get"), "cannot send a request"),
    "report": (lambda epoch: epoch.report(x=1), "cannot report"),
    "finish": (lambda epoch: epoch.finish(), "cannot finish the job"),
    "hold": (lambda epoch: epoch.hold("why"), "cannot hold the epoch"),
    "scratch": (lambda epoch: setattr(epoch.scratch, "n", 1), "cannot set epoch.scratch.n"),
    "delete": (lambda epoch: delattr(epoch.scratch, "here"), "cannot delete epoch.scratch.here"),
}


@pytest.mark.parametrize("effect", PURE_EFFECTS)
def test_a_pure_handler_has_no_effects(effect: str) -> None:
    act, words = PURE_EFFECTS[effect]

    class Asks(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.ask, outbound={"x": self.task_id})
            epoch.processor(self.take, inbound={"x": self.task_id})

        def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            epoch.scratch.here = 5
            outs.put("x", epoch.request(self.task_id, "get").wait())

        @tg.handles("get", pure=True)
        def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
            assert vars(epoch.scratch) == {"here": epoch.scratch.here} and not hasattr(epoch.scratch, "there")
            return act(epoch) or 1

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...

    says(fails(job(Asks)), "handler 'get'", "it is marked pure", words, "leave pure=True out")


class Counts(tg.Task):
    """Task 0 is a server with values in its scratch; the other tasks send requests to it."""

    def compose(self, epoch: tg.Epoch) -> None:
        scratch = epoch.scratch
        scratch.by, scratch.all, scratch.seen, scratch.sets = {}, [], set(), {0: set()}
        scratch.sums = np.zeros(2)
        epoch.processor(self.take)
        if self.task_id:
            epoch.flag(self.task_id)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        await epoch.request(0, "get")

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...


IN_PLACE: dict[str, Callable[[tg.Epoch, int], object]] = {
    "by": lambda epoch, sender: epoch.scratch.by.__setitem__(sender, 1),
    "all": lambda epoch, sender: epoch.scratch.all.append(sender),
    "seen": lambda epoch, sender: epoch.scratch.seen.add(sender),
    "sets": lambda epoch, sender: epoch.scratch.sets[0].add(sender),
    "sums": lambda epoch, sender: epoch.scratch.sums.__iadd__(1),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["def", "async"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_pure_handler_that_changes_scratch_is_named(name: str, asynchronous: bool) -> None:

    class Plain(Counts):
        @tg.handles("get", pure=True)
        def get(self, epoch: tg.Epoch, sender: int, payload: None) -> None:
            IN_PLACE[name](epoch, sender)

    class Async(Counts):
        @tg.handles("get", pure=True)
        async def get(self, epoch: tg.Epoch, sender: int, payload: None) -> None:
            await asyncio.sleep(0.001)
            IN_PLACE[name](epoch, sender)

    error = fails(job(Async if asynchronous else Plain))
    says(
        error, "task 0, epoch 0, handler 'get'", "marked pure", f"changed epoch.scratch.{name},", "leave pure=True out"
    )


HELD: dict[str, Callable[[], object]] = {
    "deque": lambda: deque([np.zeros(3)]),
    "defaultdict": lambda: defaultdict(list, {0: [np.zeros(3)]}),
    "beside a set": lambda: {"rows": np.zeros((2, 2)), "seen": {1, 2}},
    "beside an object": lambda: [np.zeros(3), object()],
}


@pytest.mark.parametrize("held", HELD)
def test_reading_pure_handler_passes(held: str) -> None:

    class Reads(Counts):
        def compose(self, epoch: tg.Epoch) -> None:
            super().compose(epoch)
            epoch.scratch.held = HELD[held]()

        @tg.handles("get", pure=True)
        def get(self, epoch: tg.Epoch, sender: int, payload: None) -> int:
            return len(epoch.scratch.held)

    assert run(job(Reads, tasks=3)).status == "finished"


def test_pure_handler_beside_a_waiting_processor() -> None:

    class Waits(Counts):
        def compose(self, epoch: tg.Epoch) -> None:
            super().compose(epoch)
            epoch.processor(self.ask, outbound={"asked": self.task_id})
            epoch.processor(self.taken, inbound={"asked": self.task_id})

        def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            for _ in range(20):
                epoch.request(1 - self.task_id, "get").wait()
            outs.put("asked", 1)

        def taken(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None: ...

        @tg.handles("get", pure=True)
        def get(self, epoch: tg.Epoch, sender: int, payload: None) -> None:
            epoch.scratch.by[sender] = epoch.scratch.by.get(sender, 0) + 1

    says(fails(job(Waits, tasks=2)), "handler 'get'", "changed epoch.scratch.by,")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["def", "async"])
def test_changes_beside_a_pure_handler_pass(asynchronous: bool) -> None:
    asked, added = threading.Event(), threading.Event()

    class Beside(Counts):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
            await epoch.request(0, "count")
            if self.task_id == 1:
                assert await epoch.request(0, "get") == 5
            elif asynchronous:
                await epoch.request(0, "count")

        @tg.handles("count")
        def count(self, epoch: tg.Epoch, sender: int, payload: None) -> None:
            epoch.scratch.by[sender] = epoch.scratch.by.get(sender, 0) + 1
            if not asynchronous and sender == 1 and epoch.number == 0:
                threading.Thread(target=self.add, args=(epoch.scratch, epoch.hold("adds"))).start()

        def add(self, scratch: Any, hold: tg.Hold) -> None:
            with hold:
                assert asked.wait(10)
                scratch.all.append(1)
                added.set()

    class Plain(Beside):
        @tg.handles("get", pure=True)
        def get(self, epoch: tg.Epoch, sender: int, payload: None) -> int:
            asked.set()
            assert added.wait(10)
            return 5

    class Async(Beside):
        @tg.handles("get", pure=True)
        async def get(self, epoch: tg.Epoch, sender: int, payload: None) -> int:
            seen = dict(epoch.scratch.by)
            for _ in range(1000):
                await asyncio.sleep(0.01)
                added.set() if seen != epoch.scratch.by else None
                if added.is_set():
                    break
            return 5

    assert run(job(Async if asynchronous else Plain, tasks=3)).status == "finished"
    assert added.is_set()
