"""What code of users does to logging ends no node."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.node import loggers
from taskgraph.node.loggers import guard_loggers


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("no such table")


class Exiting(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        raise SystemExit(4)


class Choosy(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise LookupError("request_id")


def filtered() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.addFilter(Choosy())
    return handler


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger of a node that is guarded; others are as they were afterwards."""
    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    monkeypatch.setattr(loggers, "_told", False)
    factory, handlers = logging.getLogRecordFactory(), logging.root.handlers[:]
    for name in ("taskgraph.node", "taskgraph.task.3", "theirs"):
        logging.getLogger(name)
    guard_loggers()
    guard_loggers()
    yield logging.getLogger("taskgraph.node")
    logging.setLogRecordFactory(factory)
    logging.root.handlers[:] = handlers


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (Raising(), "the logging handler Raising raises RuntimeError: no such table"),
        (Exiting(), "the logging handler Exiting raises SystemExit: 4"),
        (filtered(), "the logging filter Choosy raises LookupError: request_id"),
    ],
)
def test_a_handler_that_raises_is_told_once_by_name_and_ends_nothing_of_the_node(
    ours: logging.Logger, handler: logging.Handler, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next line that a node logged raised in the middle of it, and every node ended."""
    logging.root.addHandler(handler)
    ours.warning("one %d", 1)
    ours.error("two", exc_info=ValueError("why"))
    told = capsys.readouterr().err
    assert told.count(says) == 1 and told.startswith("taskgraph node: ") and "Traceback" in told
    for name in ("taskgraph.task.3", "theirs"):  # code of users hears of it where it logs
        with pytest.raises((RuntimeError, SystemExit, LookupError)):
            logging.getLogger(name).warning("three")


def test_a_line_that_their_factory_makes_no_record_of_is_told_all_the_same(
    ours: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[str] = []

    class Got(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            got.append(f"{record.getMessage()} {record.lineno > 0} {record.exc_info is not None}")

    def factory(*_: Any, **__: Any) -> logging.LogRecord:
        raise LookupError("request_id")

    logging.root.addHandler(Got())
    logging.setLogRecordFactory(factory)
    ours.warning("one %d", 1)
    ours.error("two", exc_info=ValueError("why"))
    assert got == ["one 1 True False", "two True True"]
    assert capsys.readouterr().err.count("raises LookupError: request_id") == 1


@tg.job
def counting(epochs: int = 3) -> tg.Job:
    class Counting(tg.Task, state=["count"]):
        def setup(self) -> None:
            self.count = 0

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.add)

        def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.count += 1

        def result(self) -> int:
            return self.count

    return tg.Job(tasks=1, epochs=epochs, builder=Counting)


@pytest.mark.parametrize("nodes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_handler_of_a_program_that_raises_comes_out_of_no_run(
    nodes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "_told", False)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers, Raising()])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)  # which a launcher warns of
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]
    assert tg.run(counting(), nodes=nodes).value == 3
    told = capfd.readouterr().err
    assert told.count("taskgraph: the logging handler Raising raises RuntimeError: no such table") == 1
    with pytest.raises(RuntimeError):
        logging.getLogger("theirs").warning("four")
    monkeypatch.undo()
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]


def test_all_loggers_of_a_node_are_there_when_it_begins() -> None:
    """So that each is guarded: none is made later, when a module is loaded."""
    import taskgraph.node.process  # noqa: F401

    there = {name.removeprefix("taskgraph.").partition(".")[0] for name in logging.root.manager.loggerDict}
    assert there >= {"node", "control", "events", "transport", "checkpoint", "devices", "view", "tls", "coordination"}
