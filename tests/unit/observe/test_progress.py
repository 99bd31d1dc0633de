"""The progress of a run, on a terminal and piped."""

from __future__ import annotations

import errno
import io

import pytest

from taskgraph.observe.events import Event
from taskgraph.observe.format import holders
from taskgraph.observe.progress import ProgressDisplay, numbers_text
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import EpochRecord, MemberRecord, NodeRecord, PrimaryRecord, StatusRecord, WorkersRecord
from taskgraph.protocol.view import JobView
from taskgraph.results import EpochReport


@pytest.fixture(autouse=True)
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests, whatever the one is that they are run at."""
    monkeypatch.setenv("TERM", "xterm")


class Screen(io.StringIO):
    """Remembers what was written, as a terminal or as a pipe."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def commit(epoch: int, **numbers: float) -> Event:
    return Event(0.0, "n1", "commit", f"epoch {epoch} committed", epoch=epoch, transient=True, fields=dict(numbers))


def event(kind: str, text: str, *, transient: bool = False) -> Event:
    return Event(0.0, "n1", kind, text, transient=transient)


def test_piped_every_epoch_of_a_short_job_is_a_line_however_fast() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 3, 11, out=out, clock=clock)
    for epoch in range(11):
        clock.now += 0.0001
        progress.event(commit(epoch, value=epoch * 105))
    progress.end()
    assert out.lines == [f"epoch {epoch}/10  value={epoch * 105}" for epoch in range(11)]


def test_what_was_reported_before_a_checkpoint_was_not_of_this_run() -> None:
    """A result holds all reports, those of the run before, too: they came after the last epoch of this one."""
    out = Screen(terminal=False)
    progress = ProgressDisplay("fit", 3, 20, out=out, clock=Clock())
    view = JobView("fit")
    record = EpochRecord(epoch=16, attempt=2, lineage=2, base=16)
    view.reset(1, [KeyValue(Keys("fit").epoch, record.to_bytes(), 1, 1, 0)])
    progress.set_view(view)
    for epoch in (16, 17, 19):
        progress.event(commit(epoch, value=epoch))
    progress.end([EpochReport(epoch, {"value": float(epoch)}, {}) for epoch in range(20)])
    assert out.lines == [f"epoch {epoch}/19  value={epoch}" for epoch in (16, 17, 19, 18)]


def test_piped_a_fast_long_job_is_one_line_a_second_and_the_last() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 3, 1000, out=out, clock=clock)
    for epoch in range(1000):  # 10 s of 100 epochs a second
        clock.now = epoch / 100
        progress.event(commit(epoch))
    progress.end()
    assert 10 <= len(out.lines) <= 13
    assert out.lines[0] == "epoch 0/999" and out.lines[-1] == "epoch 999/999"


def test_piped_a_slow_long_job_shows_every_epoch() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 3, None, out=out, clock=clock)
    for epoch in range(300):
        clock.now = epoch / 10
        progress.event(commit(epoch))
    assert out.lines == [f"epoch {epoch}" for epoch in range(300)]


def test_piped_every_lasting_event_is_a_line_after_the_epoch_before_it() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 3, 1000, out=out, clock=clock)
    for epoch in range(100):
        clock.now = epoch / 1000
        progress.event(commit(epoch))
    progress.event(event("restart", "epoch 99 starts again"))
    progress.event(event("primary", "told too often to be shown", transient=True))
    assert out.lines[-2] == "epoch 99/999" and out.lines[-1].endswith(" epoch 99 starts again")


def of_task(task: int, kind: str, text: str) -> Event:
    return Event(float(task), "n2", kind, f"task {task}: {text}", task=task)


def test_what_each_node_tells_of_one_task_of_a_class_is_one_line() -> None:
    out = Screen(terminal=False)
    progress = ProgressDisplay("fit", 200, 10, out=out, clock=Clock())
    for task in range(200):
        progress.event(of_task(task, "unheld", "Fit changed self.theta"))
    progress.event(of_task(3, "unheld", "Fit changed self.steps"))
    assert [line.partition(" ")[2] for line in out.lines] == [
        "task 0: Fit changed self.theta",
        "task 3: Fit changed self.steps",
    ]


def failure(kind: str, text: str, **fields: str | int) -> Event:
    return Event(1.0, "n2", kind, text, fields=fields)


def test_failure_is_one_line() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 9, 1000, out=out, clock=clock)
    progress.event(failure("lost", "n1 died: its port refuses connections", lost="n1-7"))
    progress.event(failure("takeover", "tasks 0-1 7: n2 is primary after n1", count=3, **{"from": "n1-7"}))
    progress.event(failure("evicted", "tasks 0-1: n1 is no longer in sync", of="n1-7"))
    progress.event(failure("admitted", "tasks 0-1: n3 has a backup now", of="n3-7"))
    progress.event(failure("failover", "n1 died (SIGKILL): 3 tasks moved to n2", node="n1-7"))
    clock.now += 0.5
    progress.event(failure("hand-over", "task 7: n4 is primary after n2", **{"from": "n2-7"}))
    progress.tick()
    clock.now += 11
    progress.event(failure("admitted", "tasks 0-1: n5 has a backup now", of="n5-7"))
    progress.end()
    assert [line.partition(" ")[2] for line in out.lines] == [
        "n1 died (SIGKILL): 3 tasks moved to n2",
        "tasks 0-1: n5 has a backup now",
    ]
    assert progress.failures == 1


def test_long_event_wraps_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Screen(terminal=True)
    text = "n1 died (SIGKILL): 4 tasks moved to n2 n3 n4; next commit after 0.07 s"
    ProgressDisplay("fit", 3, 5, out=out).event(failure("failover", text, node="n1-7"))
    lines = out.getvalue().replace("\x1b[2K", "").replace("\r", "").split("\n")
    assert lines[0].endswith("moved to n2 n3 n4; next") and lines[1] == " " * 9 + "commit after 0.07 s"


def told_at(at: float, node: str, kind: str, task: int | None, text: str) -> Event:
    return Event(at, node, kind, text if task is None else f"task {task}: {text}", task=task)


def test_code_of_many_tasks_that_takes_long_is_one_line_and_who_pauses_has_a_name() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 9, 1000, out=out, clock=clock)
    for task in range(4):
        progress.event(told_at(1.0, "n2", "slow", task, "'add' runs for 10 s"))
    progress.event(told_at(2.0, "n2", "paused", None, "the lease could not be renewed"))
    told = [line.partition(" ")[2] for line in out.lines]
    assert told == ["tasks 0-3: 'add' runs for 10 s", "n2: the lease could not be renewed"]


@pytest.mark.parametrize("terminal", [False, True])
def test_nodes_that_leave_after_the_end_are_not_shown(terminal: bool) -> None:
    out = Screen(terminal=terminal)
    progress = ProgressDisplay("fit", 3, 5, out=out)
    progress.event(event("gone", "n1 was killed"))
    progress.event(event("finished", "the job finished after epoch 4"))
    progress.event(event("gone", "n2 was killed"))
    progress.event(event("failed", "task 1: result() raised"))
    progress.end()
    assert "n1 was killed" in out.getvalue() and "n2" not in out.getvalue()
    assert "result() raised" not in out.getvalue(), "the command prints it, with the traceback"


@pytest.mark.parametrize("terminal", [False, True])
def test_that_the_job_finished_comes_after_its_last_epoch(terminal: bool) -> None:
    out = Screen(terminal=terminal)
    progress = ProgressDisplay("fit", 3, 3, out=out)
    progress.event(commit(0))
    progress.event(event("finished", "the job finished after epoch 2"))
    progress.tick()
    progress.event(commit(1))
    progress.end([EpochReport(epoch, {}, {}) for epoch in range(3)])
    if terminal:
        assert out.getvalue().rpartition("\r\x1b[2K")[2].startswith("fit  epoch 2/2 ")
    else:
        assert [line.partition(" ")[2] for line in out.lines] == ["0/2", "1/2", "2/2", "the job finished after epoch 2"]


def test_that_the_job_finished_is_told_also_while_its_values_are_collected_for_long() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 3, 3, out=out, clock=clock)
    progress.event(event("finished", "the job finished after epoch 2"))
    progress.tick()
    assert out.lines == []
    clock.now += 3
    progress.tick()
    progress.end()
    assert [line.partition(" ")[2] for line in out.lines] == ["the job finished after epoch 2"]


def test_a_commit_told_by_two_leaders_is_shown_once() -> None:
    out = Screen(terminal=False)
    progress = ProgressDisplay("fit", 3, 5, out=out)
    for epoch in (0, 1, 1, 2):
        progress.event(commit(epoch))
    assert out.lines == ["epoch 0/4", "epoch 1/4", "epoch 2/4"]


def test_numbers_that_a_step_reports_later_are_shown() -> None:
    out = Screen(terminal=False)
    progress = ProgressDisplay("fit", 3, 2, out=out)
    for numbers in ({"loss": 0.5}, {"loss": 0.5, "accuracy": 0.75}, {"loss": 0.5}):
        progress.event(commit(0, **numbers))
    assert out.lines == ["epoch 0/1  loss=0.5", "epoch 0/1  loss=0.5  accuracy=0.75"]


def test_what_a_killed_leader_told_nobody_is_shown_at_the_end() -> None:
    out = Screen(terminal=False)
    progress = ProgressDisplay("fit", 3, 4, out=out)
    progress.event(commit(0, value=0.0))
    progress.event(commit(2, value=210.0))
    progress.end([EpochReport(epoch, {"value": epoch * 105.0}, {}) for epoch in range(4)])
    progress.end()
    assert out.lines == ["epoch 0/3  value=0", "epoch 2/3  value=210", "epoch 1/3  value=105", "epoch 3/3  value=315"]


def test_on_a_terminal_one_line_is_rewritten() -> None:
    out, clock = Screen(terminal=True), Clock()
    progress = ProgressDisplay("fit", 3, 400, out=out, clock=clock)
    for epoch in range(100):
        clock.now = epoch / 8
        progress.event(commit(epoch, loss=0.5))
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[2Kfit  epoch 99/399  8.0/s  loss=0.5")
    progress.event(event("restart", "epoch 3 starts again"))
    clock.now += 0.5
    progress.tick()
    last = out.getvalue().split("\n")
    assert last[-2].endswith("epoch 3 starts again"), "an event stays, above the line"
    assert last[-1].split("\r\x1b[2K")[-1] == "fit  epoch 99/399  8.0/s  loss=0.5", "and is not said again in it"
    progress.end()
    progress.tick()
    assert out.getvalue().endswith("\n"), "the prompt that follows has a line of its own"


def test_elastic_job_in_this_process_shows_steps() -> None:
    out = Screen(terminal=False)
    progress = ProgressDisplay("fit", 1, None, elastic=True, out=out)
    progress.event(commit(3, loss=0.5))
    assert out.lines == ["step 3  loss=0.5"]


def test_on_a_terminal_a_fast_job_does_not_write_every_epoch() -> None:
    out, clock = Screen(terminal=True), Clock()
    progress = ProgressDisplay("fit", 3, None, out=out, clock=clock)
    for epoch in range(1000):
        clock.now = epoch / 1000
        progress.event(commit(epoch))
    assert out.getvalue().count("\r") <= 11


def test_the_line_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Screen(terminal=True)
    progress = ProgressDisplay("a-job-with-a-long-name", 3, 400, out=out)
    progress.event(commit(5, loss=0.123456789, accuracy=0.98765, slope=17.0))
    assert len(out.getvalue().split("\x1b[2K")[-1]) == 39


def test_nodes_and_replicas_come_from_the_view() -> None:
    keys = Keys("fit")
    node = NodeRecord(
        name="n1", run="r", host="h", pid=1, endpoints=(), control="", fingerprint="f", lease=1, writer="w"
    ).to_bytes()
    member = MemberRecord(writer="w").to_bytes()
    values = {
        keys.epoch: EpochRecord(epoch=3, attempt=1, writer="w").to_bytes(),
        keys.node("n1-a"): node,
        keys.node("n2-b"): node,
        keys.member(0, "n1-a"): member,
        keys.member(0, "n2-b"): member,
        keys.member(1, "n1-a"): member,
        # Evicted at this boundary, and dead: it holds the state still, but nobody will ask it.
        keys.member(1, "n2-b"): MemberRecord(until=3, writer="w").to_bytes(),
        keys.member(1, "n3-c"): member,
    }
    view = JobView("fit")
    view.reset(9, [KeyValue(key, value, 1, 1, 0) for key, value in values.items()])
    assert len(view.in_sync(1)) == 3 and holders(view, 1) == ["n1-a"]
    progress = ProgressDisplay("fit", 2, None, 1, out=Screen(terminal=True))
    assert progress.text() == "fit  starting"
    progress.set_view(view)
    progress.event(commit(2))
    assert progress.text() == "fit  epoch 2  0.0/s  2 nodes  1/2 backed up"
    progress.event(event("cancelled", "the job was ended: interrupted"))
    assert progress.text() == "fit  epoch 2  0.0/s", "its nodes leave, and that is no news"


def running(*nodes: str) -> JobView:
    """Task 0 on these nodes, in epoch 0."""
    keys = Keys("fit")
    values = {
        keys.status: StatusRecord(state="running").to_bytes(),
        keys.epoch: EpochRecord(epoch=0, attempt=1, writer="w").to_bytes(),
        keys.primary(0): PrimaryRecord(node=nodes[0], term=1, stateful=True, writer="w").to_bytes(),
    }
    for node in nodes:
        record = NodeRecord(
            name=node, run="r", host="h", pid=1, endpoints=(), control="", fingerprint="f", lease=1, writer="w"
        )
        values |= {keys.node(node): record.to_bytes(), keys.member(0, node): MemberRecord(writer="w").to_bytes()}
    view = JobView("fit")
    view.reset(9, [KeyValue(key, value, 1, 1, 0) for key, value in values.items()])
    return view


def test_elastic_job_shows_steps() -> None:
    keys, view = Keys("fit"), JobView("fit")
    progress = ProgressDisplay("fit", 1, None, out=Screen(terminal=True), clock=Clock())
    progress.set_view(view)
    assert progress.text() == "fit  starting"
    nodes = running("n1", "n2").nodes
    values = {
        keys.status: StatusRecord(state="running"),
        keys.epoch: EpochRecord(epoch=0, attempt=1, writer="w"),
        keys.workers: WorkersRecord(number=0, lineage=0, workers=(("n2", 0), ("n1", 0)), writer="w"),
        **{keys.node(node): known.record for node, known in nodes.items()},
    }
    view.reset(9, [KeyValue(key, record.to_bytes(), 1, 1, 0) for key, record in values.items()])
    assert progress.text() == "fit  no report of a step yet  2 workers"
    progress.event(commit(7, loss=0.5))
    assert progress.text() == "fit  step 7  0.0/s  2 nodes  loss=0.5"
    assert view.leading_node == "n2"


def test_setting_up_counts_tasks() -> None:
    progress = ProgressDisplay("fit", 3, None, 1, out=Screen(terminal=True))
    progress.set_view(running("n1", "n2"))
    assert progress.text() == "fit  setting up: 1 of 3 tasks on 2 nodes"


def test_last_node_is_warned_of_once() -> None:
    out, clock = Screen(terminal=False), Clock()
    progress = ProgressDisplay("fit", 1, None, 1, out=out, clock=clock)
    progress.event(commit(0))
    for view in (running("n1"), running("n1", "n2"), running("n1")):
        progress.set_view(view)
        for _ in range(3):
            clock.now += 1
            progress.tick()
    warnings = [line for line in out.lines if "!" in line]
    assert len(warnings) == 1 and warnings[0].endswith(
        "! no task has a backup: another failure ends the job. Start a node: taskgraph launch fit"
    )


def test_nobody_reading_is_no_reason_to_fail() -> None:
    class Closed(Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = ProgressDisplay("fit", 3, 5, out=Closed(terminal=False))
    progress.event(commit(0))
    progress.event(event("restart", "epoch 3 starts again"))
    progress.end()


def test_numbers_are_short() -> None:
    assert numbers_text({"loss": 1 / 3, "n": 12345678, "big": 1e300}) == "  loss=0.333333  n=12345678  big=1e+300"
    assert numbers_text({}) == ""


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_cannot_be_written_ends_no_job(number: int) -> None:
    """Nobody reads it, the disk is full, or the terminal is gone."""

    class Broken(Screen):
        def flush(self) -> None:
            raise OSError(number, "cannot be written")

    progress = ProgressDisplay("fit", 3, 11, out=Broken(terminal=False), clock=Clock())
    progress.event(event("began", "the job began"))
    progress.event(commit(0))
    progress.tick()
    progress.end()
