"""A child process that user code forks ends when it returns into the framework."""

from __future__ import annotations

import subprocess
import sys

_JOB = """
import asyncio, os, sys
import taskgraph as tg


async def forks():
    future = asyncio.get_running_loop().create_future()
    child = os.fork()
    if child:
        children.append(child)
    elif how in ("raises", "raises in a task"):
        raise KeyError("in the child")
    elif how == "exits":
        sys.exit(7)
    elif how == "ends by itself":
        os._exit(9)
    elif how in ("awaits", "awaits in a task"):
        await asyncio.sleep(0)
    elif how == "awaits a future in a task":
        await future
    elif how == "runs a loop":
        os._exit(asyncio.new_event_loop().run_until_complete(asyncio.sleep(0.05, 11)))

class Counts(tg.Task, state=["epochs"]):
    def setup(self):
        self.epochs = 0
    def compose(self, epoch):
        epoch.processor(self.send, outbound={"a": self.task_id})
        epoch.processor(self.count, inbound={"a": self.task_id})
    async def send(self, epoch, ins, outs):
        if epoch.number == 3 and self.task_id == 1:
            if how == "after an await":
                await asyncio.sleep(0.01)
            if "in a task" in how:
                task = asyncio.create_task(forks())
                await (asyncio.sleep(0.05) if "which nobody" in how else task)
            else:
                await forks()
        outs.put("a", 1)
    def count(self, epoch, ins, outs):
        self.epochs += ins["a"]
    def result(self):
        return self.epochs

for how in sys.argv[1:]:
    children = []
    job = tg.Job(tasks=2, epochs=6, builder=lambda task: Counts(), name="forking")
    values = tg.run(job, nodes=0, timeout_s=30).values
    print(values, [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children], flush=True)
    print("== next", file=sys.stderr, flush=True)
"""


_SAID = "a function forked this process, and the child returned from it"


_CASES = [
    ("returns", 1, _SAID),
    ("after an await", 1, _SAID),
    ("awaits", 1, f"task 1, 'send': {_SAID}"),
    ("raises", 1, f"KeyError: 'in the child'\ntask 1, 'send': {_SAID}"),
    ("in a task", 1, f"the event loop: {_SAID}"),
    ("in a task which nobody awaits", 1, f"the event loop: {_SAID}"),
    ("awaits in a task", 1, f"the event loop: {_SAID}"),
    ("awaits a future in a task", 1, f"the event loop: {_SAID}"),
    ("raises in a task", 1, f"the event loop: {_SAID}"),
    ("exits", 7, ""),
    ("ends by itself", 9, ""),
    ("runs a loop", 11, ""),
]
"""Where a coroutine forks or what the child does then, the child's exit code, and what it prints."""


def test_forked_child_of_a_coroutine_ends() -> None:
    script = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _JOB, *(how for how, _, _ in _CASES)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{{0: 6, 1: 6}} [{code}]" for _, code, _ in _CASES], done.stderr
    for (how, _, told), said in zip(_CASES, done.stderr.split("== next\n")[:-1], strict=True):
        assert told in said and bool(told) == bool(said), (how, said)


_SIGNALLED = """
import asyncio, os, signal, time
import taskgraph as tg

told, ended = [], []

class Ends(tg.Task):
    def compose(self, epoch):
        epoch.processor(self.fork)
    def fork(self, epoch, ins, outs):
        for waits_s in (0, 0, 0, 0, 0.05):  # the first ones get the signal before they have run a line
            child = os.fork()
            if not child:
                time.sleep(20)
                os._exit(9)
            time.sleep(waits_s)
            os.kill(child, signal.SIGTERM)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.append, "SIGTERM")
    await tg.arun(tg.Job(tasks=1, epochs=1, builder=lambda task: Ends()), nodes=0, timeout_s=60)
    print(set(ended), told)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    print(told)

asyncio.run(main())
"""


def test_signal_to_a_child_is_its_own() -> None:
    # As `multiprocessing.Pool` ends its workers.
    run = subprocess.run([sys.executable, "-c", _SIGNALLED], capture_output=True, text=True, timeout=120, check=False)

    assert run.stdout.splitlines() == ["{-15} []", "['SIGTERM']"], run.stderr
