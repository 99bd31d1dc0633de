"""run: the command that starts nodes here and follows the job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path

import uvloop

from taskgraph.commands.common import (
    NewToken,
    access_of,
    etcd_of,
    listening_of,
    node_tls_of,
    obey_ending_signals,
    restore_signals,
    token_of_new_job,
)
from taskgraph.commands.drivers import job_of
from taskgraph.errors import CheckpointError, JobError, JobFailed
from taskgraph.jobs import Job, JobFunction
from taskgraph.launch.access import AccessOptions
from taskgraph.launch.collector import Collector
from taskgraph.launch.kept import status_of
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.logs import has_user_lines, showing_task_logs
from taskgraph.launch.run import arun
from taskgraph.launch.runtime import Runtime
from taskgraph.launch.shown import JobProgress
from taskgraph.launch.supervise import FrontEndHooks
from taskgraph.network.listening import Listening
from taskgraph.observe.events import Event
from taskgraph.observe.format import counted, ended_status_json
from taskgraph.observe.queues_text import set_aside_text
from taskgraph.observe.screen import say
from taskgraph.observe.values_text import values_text
from taskgraph.protocol.records import JobStatus
from taskgraph.results import JobResult
from taskgraph.system.streams import bound_stderr_waits, wait_until_written

__all__ = ["print_result", "run"]


def run(options: argparse.Namespace, function: JobFunction[...] | None = None) -> int:
    """Starts nodes here, follows the job, prints its values."""
    job = job_of(options, function)
    listening = listening_of(options, options.nodes)  # before anything is written
    token = token_of_new_job(options)
    try:
        return uvloop.run(_Run(options, job).until_over(listening, token))
    except (JobError, CheckpointError):
        if token is not None:
            token.discard()
        raise


class _Run:
    """Runs one job for the command `run`: starts its nodes, shows its events, prints its result."""

    def __init__(self, options: argparse.Namespace, job: Job) -> None:
        self._options = options
        self._job = job
        self._shown = JobProgress(job.name, job.tasks, job.epochs, job.backups, elastic=job.elastic is not None)
        self._follower: Collector | None = None  # None without node processes, as are the nodes
        self._nodes: LocalNodes | None = None
        self._logs = Path()  # the folder with the logs of the nodes
        self._saw_finish = False
        self._interrupted = False

    def _on_event(self, event: Event) -> None:
        """Shows an event, and notes that the job has finished."""
        if event.kind == JobStatus.FINISHED:
            self._saw_finish = True
        self._shown.event(event)

    def _on_start(self, follower: Collector, nodes: LocalNodes) -> None:
        """Called once the nodes are started: notes them and the job's follower, and shows their output if asked to."""
        self._shown.set_view(follower.view)
        self._follower, self._nodes = follower, nodes
        self._logs = Runtime().kept_logs(self._job.name)
        if self._options.logs:
            self._shown.follow_logs(nodes)

    @property
    def _finished(self) -> bool:
        """True if the job has finished, as far as this command knows."""
        # With --nodes 0 there is no follower, only the event.
        return self._saw_finish or (self._follower is not None and self._follower.view.finished)

    async def until_over(self, listening: Listening, token: NewToken | None) -> int:
        """Runs the job; returns the exit code."""
        options, shown = self._options, self._shown
        if options.nodes:  # else tasks run here, and may print faster than a reader takes
            bound_stderr_waits()
        running = asyncio.ensure_future(
            arun(
                self._job,
                nodes=options.nodes,
                replace=options.replace,
                etcd=etcd_of(options),
                resume=options.resume,
                fresh=options.fresh,
                timeout_s=options.timeout,
                hooks=FrontEndHooks(self._on_event, self._on_start),
                access=AccessOptions(
                    etcd=access_of(options),
                    nodes=node_tls_of(options),
                    listening=listening,
                    token=token.token if token is not None else None,
                ),
            )
        )
        self._obey_ending_signals(running)
        here = options.logs and not options.nodes  # show what tasks print in this process
        try:
            async with shown:
                with showing_task_logs(shown.line) if here else contextlib.nullcontext():
                    result = await running
                shown.end(result.reports)
        except JobFailed as error:
            restore_signals()
            with contextlib.suppress(OSError):  # the failure is more important
                self._show_failed(error)
            if self._nodes is not None and self._logs.is_dir():
                print(f"the logs of its nodes are in {self._logs}", file=sys.stderr)
            raise
        except asyncio.CancelledError as error:
            if not self._interrupted:
                raise
            say(f"interrupted{self._left_text(error)}")
            return 130
        restore_signals()
        self._show(result)
        return 0

    def _obey_ending_signals(self, running: asyncio.Future[JobResult]) -> None:
        """Makes the first Ctrl-C (SIGTERM, SIGHUP) end the job in good order, and the second at once."""

        def obey() -> None:
            if not self._interrupted:
                self._interrupted = True
                what = "without its results" if self._finished else "the job"
                say(f"ending {what}; once more to force it", anew=True)
                running.cancel()
            elif self._nodes is not None:
                self._nodes.kill_now()

        obey_ending_signals(finished=lambda: self._finished, obeyed=lambda: self._interrupted, obey=obey)

    def _left_text(self, interrupted: asyncio.CancelledError) -> str:
        """Returns what is left of the job, and how to continue it."""
        name = self._job.name
        notes = getattr(interrupted, "__notes__", ())  # from --nodes 0, or about an etcd that does not answer
        if self._finished and self._follower is not None and self._follower.kept.result:
            left = f"; job {name!r} had finished, and `taskgraph result {name}` has its values; nothing is left behind"
        elif self._finished:
            left = f"; job {name!r} had finished, and its values were not collected; nothing is left behind"
        else:
            left = "" if notes and self._options.nodes else f"; job {name!r} was ended, nothing is left behind"
        resume_hint = self._follower.resume_hint("; ") if self._follower is not None else ""
        return left + resume_hint + "".join(f"; {note}" for note in notes)

    def _new_line(self) -> None:
        """Prints a line end before JSON if tasks ran in this process: they may have left a line unfinished."""
        if self._options.json and self._options.nodes == 0:
            print()  # tasks may have printed an unfinished line

    def _show_failed(self, error: JobFailed) -> None:
        """Prints the failure as JSON for programs; people read it on standard error."""
        if self._options.json:
            self._new_line()
            elastic = self._job.elastic is not None
            print(json.dumps(ended_status_json(self._job.name, status_of(error), None, elastic=elastic)), flush=True)

    def _show(self, result: JobResult) -> None:
        """Prints the result, and where the output of tasks is."""
        self._new_line()
        elastic, kept = self._job.elastic is not None, self._nodes is not None
        print_result(result, as_json=self._options.json, kept=kept, failures=self._shown.failures, elastic=elastic)
        if self._nodes is not None and not self._options.logs and has_user_lines(self._logs):
            print(f"the output of its tasks is in {self._logs}; --logs shows it at once", file=sys.stderr)


def print_result(result: JobResult, *, as_json: bool, kept: bool, failures: int = 0, elastic: bool = False) -> None:
    """Prints the values on standard output, and a summary on standard error.

    Args:
        kept: `taskgraph result` can print the values again.
        failures: how many nodes failed, if the command has followed the job.
        elastic: the job is elastic, and has sums in place of epochs.
    """
    wait_until_written()  # on a terminal the values come after the events
    try:
        if as_json or result.values:
            print(result.to_json() if as_json else values_text(result.values), flush=True)
    except OSError as error:
        if kept:
            error.add_note(
                f"the job finished: `taskgraph result {result.name}` has its values, as far as they are kept"
            )
        raise
    if as_json:
        return
    words = [f"{counted(result.epochs, 'sum' if elastic else 'epoch')} in {result.wall_s:.2f} s"]
    if result.failovers:
        moved = counted(result.failovers, "task")
        words.append(f"{counted(failures, 'failover')} ({moved})" if failures else f"{moved} failed over")
    if result.restarts:
        words.append(counted(result.restarts, "restart"))
    print(f"job {result.name}: {', '.join(words)}", file=sys.stderr)
    if text := set_aside_text({name: [one.piece for one in some] for name, some in result.set_aside.items()}):
        print(text, file=sys.stderr)
