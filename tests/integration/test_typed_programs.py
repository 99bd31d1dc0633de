"""What a type checker finds in programs that use the package, as it is installed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import taskgraph

PROGRAM = """
    import taskgraph as tg

    ROW = tg.Tag[float]("row")

    class Fit(tg.Task, state=["total"]):
        def setup(self) -> None:
            self.total = 0.0

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.send, outbound={ROW: "right"})
            epoch.processor(self.add, inbound={ROW: "left"})

        def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put(ROW, 1.0)

        def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += ins[ROW]

    @tg.job
    def fit(tasks: int = 3) -> tg.Job:
        return tg.Job(tasks=tasks, epochs=2, builder=Fit, topology=tg.ring())

    @tg.elastic
    def train(run: tg.Run, lr: float = 0.1) -> dict[str, float]:
        return {"lr": lr}

    @tg.elastic(seed=3)
    def count(run: tg.Run) -> int:
        return 3

    def mistakes(epoch: tg.Epoch, ins: tg.Inputs) -> None:
        fit(taks=3)  # error: call-arg
        fit(tasks="3")  # error: arg-type
        tg.nothing  # error: attr-defined
        tg.Job(tasks=2, epochs=1, builder=Fit, bakups=1)  # error: call-arg
        epoch.nothing()  # error: attr-defined
        ins[ROW].upper()  # error: attr-defined
        train(rate=3)  # error: call-arg
        train(lr="3")  # error: arg-type
        tg.elastic(sed=3)  # error: call-overload
        tg.run(train(lr=0.3)).value.upper()  # error: attr-defined
        tg.testing.run(count()).value.upper()  # error: attr-defined

    if __name__ == "__main__":
        print(tg.run(fit(tasks=2), nodes=0).values, fit.options())
        print(tg.run(train(), nodes=0).value["lr"] + tg.run(count(), nodes=0).value)
        tg.main(fit)
        tg.main(train)
"""


def test_mistakes_are_found_and_nothing_else(tmp_path: Path) -> None:
    """A job function took any arguments, and the package had every name."""
    program = textwrap.dedent(PROGRAM)
    (tmp_path / "fit.py").write_text(program)
    found = subprocess.run(  # as `make lint` does it: what that knows of the package is not made anew
        [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "fit.py")],
        cwd=Path(taskgraph.__file__).parent.parent,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    wanted = {
        (number, line.partition("# error: ")[2])
        for number, line in enumerate(program.splitlines(), 1)
        if "# error: " in line
    }
    errors = [line for line in found.stdout.splitlines() if "fit.py:" in line and ": error: " in line]
    numbers = [int(line.partition("fit.py:")[2].split(":")[0]) for line in errors]
    assert {*zip(numbers, [line.rpartition("[")[2].rstrip("]") for line in errors], strict=True)} == wanted, found
