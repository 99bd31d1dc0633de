"""One call of `tg.testing.run` with its time limits: what runs of task graphs and of elastic jobs have in common."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from taskgraph.errors import JobTimeout
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.usercode.errors import user_frames
from taskgraph.results import JobResult
from taskgraph.testing.clock import SPEED, Turn
from taskgraph.testing.guard import RUN_FACTOR, Stuck

__all__ = ["ROUNDS_PER_S", "LimitedRun"]

ROUNDS_PER_S = 200
"""Epochs that a small job commits in a second, about, or steps: a job without an end fails after about `timeout_s`."""


class LimitedRun:
    """One call of `tg.testing.run`. All methods but `progress` and `error_of_stuck_code` run in the loop's thread.

    Args:
        endless: the job has no last epoch or step of its own; it fails after `ROUNDS_PER_S` times `timeout_s` of them.

    Attributes:
        turn: tracks which thread runs: the loop's, or one of its workers.
        max_rounds: how many epochs or steps an endless job may do; None: the job ends by itself.
    """

    def __init__(self, name: str, timeout_s: float, stuck_s: float | None, endless: bool) -> None:
        self.turn = Turn()
        self.max_rounds = max(1, int(timeout_s * ROUNDS_PER_S)) if endless else None
        self._name = name
        self._timeout_s = timeout_s
        self._stuck_s = stuck_s
        self._limit = f"did not end within {timeout_s:g} s"
        self._endless_text = ""
        self._deadline: asyncio.Timeout | None = None
        self._cluster: InProcessCluster | None = None

    async def run_job(self, nodes: int) -> JobResult:
        """Runs the job on this many nodes."""
        raise NotImplementedError

    def progress(self) -> int:
        """Returns a number that grows while the job makes progress."""
        raise NotImplementedError

    async def result_of(self, cluster: InProcessCluster) -> JobResult:
        """Waits for the result of the job; raises JobTimeout at the limit."""
        name = cluster.spec.name
        try:
            async with asyncio.timeout(self._timeout_s * SPEED) as self._deadline:
                return await cluster.result()
        except TimeoutError:
            if self._endless_text:
                limit = f"the limit is {ROUNDS_PER_S} for each second of timeout_s"
                raise JobTimeout(f"job {name!r} {self._endless_text} ({limit})", job=name) from None
            text = f"job {name!r} {self._limit}; {cluster.waits()}"
            clock = f"durations are of its clock, which runs up to {SPEED} times as fast while it waits"
            raise JobTimeout(f"{text} ({clock})", job=name) from None

    def fail_endless(self, text: str) -> None:
        """Fails an endless job, which has done `max_rounds` epochs or steps, with JobTimeout.

        Args:
            text: what it did, for the message: "committed 1000 epochs ...".
        """
        if not self._endless_text:
            self._endless_text = text
            self.end_wait()

    def end_wait(self) -> None:
        """Makes `result_of` raise JobTimeout now."""
        if self._deadline is not None:
            self._deadline.reschedule(0.0)

    def end_slow_run(self, took_s: float) -> None:
        """Makes `result_of` raise JobTimeout now: by the real clock the run has taken too long, `took_s`."""
        if self._deadline is not None:
            self._limit = (
                f"still ran after {took_s:.0f} real seconds (the limit is {RUN_FACTOR} times stuck_s: if all of it is "
                "slow, its setup() for one, give a larger one)"
            )
            self._deadline.reschedule(0.0)

    def error_of_stuck_code(self, stuck: Stuck) -> JobTimeout:
        """Returns an error with the stack of the user code that does not return."""
        text = ""
        if stuck.frame is not None:
            frames = traceback.StackSummary.extract(reversed([*traceback.walk_stack(stuck.frame)]))
            text = "".join(traceback.format_list(user_frames(frames)))
        return self.stuck_error("its code", text)

    def stuck_error(self, what: str, text: str, **where: Any) -> JobTimeout:
        """Returns an error for code that runs without a wait: `what` names it, `text` is its stack."""
        assert self._stuck_s is not None
        name = self._cluster.spec.name if self._cluster is not None else self._name
        limit = f"runs for more than {self._stuck_s:g} s without a wait: it seems not to end (the limit is stuck_s)"
        if "task" not in where:
            what = f"job {name!r}: {what}"
        return JobTimeout(f"{what} {limit}", job=name or "", traceback_text=text, **where)
