"""A ring on a CUDA device; task 1 meets an error of it in epoch 2, as often as it is told to."""

from __future__ import annotations

from pathlib import Path

import taskgraph as tg

WRITES_NOWHERE = 'extern "C" __global__ void nowhere(double* x) { x[0] = 1; }'


class Ring(tg.Task, state=["row"]):
    def __init__(self, marks: str, kind: str, times: int) -> None:
        self.marks, self.kind, self.times = Path(marks), kind, times

    def setup(self) -> None:
        self.row = self.xp.arange(300_000.0) + 1.0 * self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.mix, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.row)

    def mix(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == 2 and len(list(self.marks.iterdir())) < self.times:
            (self.marks / f"{len(list(self.marks.iterdir()))}").touch()
            self.go_wrong(ins)
        self.row = (self.row + ins["row"]) / 2.0

    def go_wrong(self, ins: tg.Inputs) -> None:
        cupy = self.xp
        if self.kind == "memory":
            cupy.empty(1 << 50, "u1")
        elif self.kind == "address":
            cupy.RawKernel(WRITES_NOWHERE, "nowhere")((1,), (1,), (cupy.uint64(8),))
            float(self.row[0])
        else:  # it writes to memory that another process lent
            row = ins["row"]
            row += 1.0
            float(row[0])

    def result(self) -> float:
        return float(self.row.sum())


@tg.job
def ring(marks: str, kind: str = "memory", times: int = 1) -> tg.Job:
    return tg.Job(
        tasks=3, epochs=6, builder=lambda _: Ring(marks, kind, times), topology=tg.ring(), requires_gpu=True, backups=1
    )
