"""What `taskgraph trace` shows of a worker: what its time goes to, step by step.

    mark = trace.begin()                     # None if the node is not traced
    ...                                      # the work
    trace.keep(mark, "part", "part 3")

A span belongs to the step that user code is at when it begins, and to the view that the worker has read then. What may
take longer than a step (a change of the view, a copy of the state, a checkpoint) belongs to none.
"""

from __future__ import annotations

from typing import NamedTuple

from taskgraph.observe.trace import Tracing, clock

__all__ = ["SpanStart", "WorkerTrace"]


class SpanStart(NamedTuple):
    """The beginning of a span.

    Attributes:
        began: nanoseconds, by `clock()`.
        view: the view's number.
        step: the step's number; -1: none.
    """

    began: int
    view: int
    step: int


class WorkerTrace:
    """The spans of one worker, from its event loop and from the thread of user code.

    Attributes:
        step: the number of the step that user code is at; -1: it has begun none. Set in the thread of user code.
        view: the number of the view that the worker has read.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.step = -1
        self.view = -1
        self._tracing = tracing
        self._step_began: SpanStart | None = None
        self._waiting: tuple[str, SpanStart | None] = ("", None)
        self._changing: tuple[int, SpanStart | None] = (-1, None)

    @property
    def on(self) -> bool:
        """True while the node is traced."""
        return self._tracing.on

    def begin(self, *, of_step: bool = True) -> SpanStart | None:
        """Returns the beginning of a span, for `keep`; None: it is not traced.

        Args:
            of_step: the span belongs to the step at work.
        """
        tracing, step = self._tracing, self.step if of_step else -1
        return SpanStart(clock(), self.view, step) if tracing.on and tracing.is_traced(step) else None

    def keep(self, mark: SpanStart | None, kind: str, text: str, *, peer: str = "", size_bytes: int = -1) -> None:
        """Adds a span that began at `mark` and ends now to the trace; does nothing for None.

        Args:
            kind: says on which track it is (`observe.trace_file`).
            text: what a viewer shows.
            peer: the name of the other worker; "": none.
        """
        if mark is not None and mark.began >= self._tracing.since:
            stamp = mark.view, mark.step
            self._tracing.keep(kind, text, peer, mark.began, clock(), -1, stamp, 0, size_bytes)

    def begin_step(self, number: int) -> None:
        """Ends the step before, if any, and begins a step."""
        self.end_step()
        self.step = number
        self._step_began = self.begin()

    def end_step(self) -> None:
        """Ends the step at work."""
        self.keep(self._step_began, "step", f"step {self.step}")
        self._step_began = None

    def begin_wait_span(self, what: str) -> None:
        """Ends the span of user code's last wait, and begins one for `what`; "": it does not wait now.

        Does nothing if user code still waits for the same.
        """
        before, mark = self._waiting
        if what != before:
            self.keep(mark, "wait for", f"waits for {before}")
            self._waiting = what, self.begin() if what else None

    def begin_view_change(self, number: int) -> None:
        """Begins the span of the change to view `number`. If another one is open, ends that as given up."""
        before, mark = self._changing
        self.keep(mark, "view", f"change to view {before}, given up")
        self._changing, self.view = (number, self.begin(of_step=False)), number

    def end_view_change(self, workers: str) -> None:
        """Ends the span of the change of the view, as its workers go on."""
        number, mark = self._changing
        self.keep(mark, "view", f"change to view {number}: {workers}")
        self._changing = number, None
