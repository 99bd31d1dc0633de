"""What a node tells of an epoch while it is traced: what there was, and nothing that there was not."""

from __future__ import annotations

import asyncio
from collections import Counter

from cluster_kit import play
from trace_kit import spans_of

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.observe.trace import Span

EPOCHS = 12


class Pair(tg.Task):
    """Task 0 gives `x`, and task 1 takes it, twice, and gives it back."""

    @tg.stateless
    async def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id:
            epoch.processor(self.look, inbound={"x": 0}, outbound={"x": 0})
            epoch.processor(self.look_again, inbound={"x": 0})
        else:
            epoch.processor(self.give, outbound={"x": 1})
            epoch.processor(self.take, inbound={"x": 1})

    async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.01)
        outs.put("x", epoch.number)

    async def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", ins["x"])

    async def look_again(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass

    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass


def test_all_that_an_epoch_is_and_waits_only_for_what_was_lacking() -> None:
    nodes: list[Node] = []

    async def traced(cluster: InProcessCluster, name: str) -> None:
        nodes.append(cluster.node(name))
        nodes[0].tracing.start()

    async def scenario(cluster: InProcessCluster) -> list[Span]:
        await cluster.result()
        return spans_of(nodes[0].tracing)

    job = tg.Job(tasks=2, epochs=EPOCHS, builder=lambda _: Pair(), backups=0)
    spans = play(job, scenario, nodes=1, stages={("processor", 0, 0): traced})
    assert all(span[3] <= span[4] for span in spans)
    assert [span[4] for span in spans] == sorted(span[4] for span in spans), "in the order they ended"
    seen = Counter(span[:3] + span[5:6] for span in spans if 1 <= span[6] < EPOCHS)
    once = {
        *(("code", name, "", 0) for name in ("give", "take")),
        *(("code", name, "", 1) for name in ("look", "look_again")),
        *(("epoch", "", "", task) for task in (0, 1)),
        *(("done", "", "task 0", task) for task in (0, 1)),
        *((kind, "x", f"task {1 - task}", task) for kind in ("put", "pull") for task in (0, 1)),
        ("wait", "look", "", 1),
    }
    assert {span for span in once if seen[span] != EPOCHS - 1} == set(), seen
    assert not any(span[1] == "compose" for span in seen), "it asks nothing of the epoch: what it declared stands"
    waited = {span[1] for span in seen if span[0] == "wait"}
    assert waited == {"look"}, "look_again has what was looked at; before a sync point, all items are here"
    (first,) = {span[5:9] for span in spans if span[:2] == ("code", "give") and span[6] == 5}
    assert first == (0, 5, 1, 1)
