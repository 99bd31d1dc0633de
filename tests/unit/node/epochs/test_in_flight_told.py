"""Several epochs of a task at a time, where something goes wrong, or is told of them."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from cluster_kit import Counting, holder, play, set_up_when_offered
from flight_kit import result
from trace_kit import spans_of

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.observe.trace import Span
from taskgraph.observe.trace_file import TraceFile

__all__ = ["set_up_when_offered"]


class GivesUp(Counting, state=["total"]):
    """Its epoch 2 awaits what it cancelled."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 2:
            given_up = asyncio.get_running_loop().create_future()
            given_up.cancel()
            await given_up
        await super().count(epoch, ins, outs)


class GivesUpInFlight(GivesUp, state=["total"]):
    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)


@pytest.mark.parametrize("kind", [GivesUp, GivesUpInFlight])
def test_who_awaits_what_it_cancelled_fails_the_job(kind: type[GivesUp]) -> None:
    with pytest.raises(tg.JobFailed, match="CancelledError") as caught:
        play(tg.Job(tasks=2, epochs=5, builder=lambda _: kind()), result, nodes=1)
    assert caught.value.epoch == 2


class InFlight(Counting, state=["total"]):
    """Of its epochs only what is added to the state has an order."""

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.early, outbound={"x": self.task_id})
        epoch.processor(self.count, inbound={"x": self.task_id})

    @tg.stateless
    async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", epoch.number)


@pytest.mark.usefixtures("set_up_when_offered")
def test_what_the_earliest_done_waits_for_is_told_however_many_others_are_held() -> None:
    """Later epochs need no more than the acknowledgement of the one member; epoch 0 waits for the other backup."""

    class SlowSetup(InFlight, state=["total"]):
        async def setup(self) -> None:  # type: ignore[override]
            self.total = 0
            setups.append(self.task_id)
            if setups.count(self.task_id) == 3:
                await asyncio.sleep(10_000)

    setups: list[int] = []
    waiting = tg.Job(tasks=2, epochs=9, builder=lambda _: SlowSetup(), backups=2, settings=tg.Settings(admit_wait_s=20))

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        ended = asyncio.ensure_future(cluster.result())
        await asyncio.sleep(15)
        for task in range(2):
            primary = holder(cluster, task).roles.primaries[task]
            assert [attempt.number for attempt in primary.attempts] == [0, 1, 2, 3]
            assert primary.waiting_for.startswith("the admission of n")
        assert not ended.done()
        await asyncio.sleep(10)
        assert ended.done()
        return ended.result()

    assert play(waiting, scenario, nodes=3).values == {0: 9, 1: 9}


def test_status_tells_what_the_earliest_epoch_waits_for() -> None:
    """What is pulled in epoch 2 does not come; what is in the later ones is here."""
    gate = asyncio.Event()

    class Pair(InFlight, state=["total"]):
        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.early, outbound={"x": 1 - self.task_id})
            epoch.processor(self.count, inbound={"x": 1 - self.task_id})

        @tg.stateless
        async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if (self.task_id, epoch.number) == (1, 2):
                await gate.wait()
            outs.put("x", epoch.number)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(5)
        node = holder(cluster, 0)
        assert [attempt.number for attempt in node.roles.primaries[0].attempts] == [2, 3, 4, 5]
        (told,) = [replica for replica in node.status().replicas if replica.role == "primary" and not replica.task]
        assert told.waits == ("count waits for 'x' from task 1",)
        gate.set()
        return await cluster.result()

    assert play(tg.Job(tasks=2, epochs=9, builder=lambda _: Pair()), scenario, nodes=1).values == {0: 9, 1: 9}


@pytest.mark.parametrize("later_s", [0.0, 0.001])
def test_a_trace_shows_each_epoch_on_a_row_of_its_own(later_s: float) -> None:
    """Of this there are four at a time: whatever is within an epoch's time and on its row is the epoch's."""

    class Slow(InFlight, state=["total"]):
        @tg.stateless
        async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(0.1 + epoch.number * later_s)
            await super().early(epoch, ins, outs)

    async def traced(cluster: InProcessCluster, name: str) -> None:
        node.append(cluster.node(name))
        node[0].tracing.start()

    async def scenario(cluster: InProcessCluster) -> list[Span]:
        await cluster.result()
        return spans_of(node[0].tracing)

    node: list[Node] = []
    job = tg.Job(tasks=1, epochs=30, builder=lambda _: Slow())
    spans = play(job, scenario, nodes=1, stages={("compose", 0, 0): traced})
    file = io.BytesIO()
    out = TraceFile(file, (1, 30), zero_ns=0)
    out.node("n1", "", 0, spans)
    out.close({})
    events = json.loads(file.getvalue())["traceEvents"]
    tasks = {e["tid"] for e in events if e.get("name") == "thread_name" and e["args"]["name"].startswith("task 0")}
    shown = [(e["tid"], e["name"], e["args"]["epoch"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    epochs = [one for one in shown if one[1] == "epoch"]
    assert len(epochs) == 29
    pairs = [(one, other) for one in epochs for other in shown if other[0] == one[0] in tasks and other[2] != one[2]]
    assert len({tid for tid, *_ in epochs}) == 4
    assert not [(one, other) for one, other in pairs if other[3] < one[4] and one[3] < other[4]]
    assert {name for _, name, *_ in shown} >= {"epoch", "early", "count"}
    assert later_s or any(name == "count waits for its turn" for _, name, *_ in shown)


class Marked(tg.Task, state=["total"]):
    """Its first compute reads the state, though it is marked; what it puts does not show that."""

    how: str

    def setup(self) -> None:
        self.total = 1

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.beside, outbound={"y": self.task_id}, parallel=True)
        epoch.processor(self.give, outbound={"z": self.task_id})
        epoch.processor(self.early, inbound={"z": self.task_id}, outbound={"x": self.task_id})
        epoch.processor(self.late, inbound={"x": self.task_id, "y": self.task_id})

    async def beside(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("y", None)  # not marked, but those behind it do not wait for it: it is parallel

    @tg.stateless
    async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("z", None)

    @tg.stateless
    async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.how == "scratch":
            epoch.scratch.seen = self.total
        elif self.how == "report":
            epoch.report(seen=self.total)
        elif self.how == "finish" and self.total > 1:
            epoch.finish()
        outs.put("x", self.total if self.how == "put" else 0)

    async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += 1 + getattr(epoch.scratch, "seen", 0)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("put", "puts another 'x' to task 0"),
        ("scratch", "leaves another epoch.scratch.seen"),
        ("report", "leaves another reported 'seen'"),
        ("finish", "leaves another epoch.finish()"),
    ],
)
def test_strict_mode_compares_all_that_comes_of_what_may_be_early(how: str, what: str) -> None:
    class Fresh(Marked, state=["total"]):
        pass

    Fresh.how = how
    with pytest.raises(tg.JobFailed) as caught:
        tg.testing.run(tg.Job(tasks=1, epochs=3, builder=lambda _: Fresh()), timeout_s=20.0)
    assert caught.value.epoch == 1
    assert f"'early' is marked @tg.stateless, but on the object as setup() makes it, it {what}" in str(caught.value)
