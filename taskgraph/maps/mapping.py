"""`tg.map` and `tg.imap`: what the caller runs. The job runs in a thread; the caller reads the results as they come."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeVar, cast

import numpy as np

from taskgraph.driver.loading import check_not_importing
from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.errors import JobError, JobFailed, JobRunning, PieceFailed
from taskgraph.graph.values import decode
from taskgraph.jobs import Job
from taskgraph.launch.run import arun
from taskgraph.launch.supervise import FrontEndHooks
from taskgraph.maps.functions import as_list, check_function, find_function, make_reference, register_here
from taskgraph.maps.job import map_pieces
from taskgraph.maps.journal import Journal
from taskgraph.maps.records import MapRecord, RecordKind
from taskgraph.maps.showing import MapProgress
from taskgraph.protocol.keys import NAME_RULE, is_name
from taskgraph.results import Failed

__all__ = ["imap", "map"]

R = TypeVar("R")
V = TypeVar("V")

_DEATHS: Final = 3
"""A piece at which this many nodes died is to blame, if all nodes have died."""
_IN_VAIN: Final = 2
"""Jobs, one after the other, whose nodes all died before they had a result, until the map gives up."""
_END_S: Final = 0.5
"""Once all results are there, the job has this time to end: a node may still compute what another one has done."""
_POLL_S: Final = 0.01
"""How often the caller looks for results: a look is a few calls of the system."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of a call, beside the function and the pieces."""

    nodes: int
    attempts: int
    on_error: str
    resume: bool
    name: str
    progress: bool

    def check(self) -> None:
        """Raises JobError if an argument does not fit."""
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 0:
            raise JobError(f"tg.map(nodes={self.nodes!r}): must be an int of at least 1, or 0 for this process")
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise JobError(f"tg.map(attempts={self.attempts!r}): must be an int of at least 1")
        if self.on_error not in ("fail", "set aside"):
            raise JobError(f'tg.map(on_error={self.on_error!r}): must be "fail" or "set aside"')
        if self.name and not is_name(self.name):
            raise JobError(f"tg.map(name={self.name!r}): {NAME_RULE}")
        if self.resume and not self.name and not self.nodes:
            raise JobError("tg.map(resume=True, nodes=0): give it the name that the earlier call had: name='...'")


def map(
    fn: Callable[[V], R],
    pieces: Iterable[V],
    *,
    nodes: int = 4,
    attempts: int = 3,
    on_error: str = "fail",
    resume: bool = False,
    name: str = "",
    progress: bool = False,
) -> list[R]:
    """Calls a function with each piece, on nodes of this host, and returns the results in the order of the pieces.

    Pieces go to free nodes; those of a node that dies go to others. `random`, numpy and PyTorch are seeded by the
    number of the piece, so what a piece draws is the same on each run.

    Args:
        fn: a function at the top level of a module or a file, which nodes import; with `nodes=0` any function.
        pieces: values that travel, as the results have to be.
        nodes: processes, one piece at a time in each. One that dies is replaced. 0: this process.
        attempts: how many errors in one piece are too many. The death of a node is no error of its pieces.
        on_error: what follows then: "fail": PieceFailed; "set aside": the result of that piece is a `Failed`.
        resume: compute only what an earlier call with the same name, function and pieces lacks, which failed, was ended
            or was killed.
        name: of the job, and of what a later call can go on from; "": that of the function.
        progress: show a line on standard error.

    Raises:
        PieceFailed: a piece raised `attempts` times.
        JobError: the function cannot be imported by nodes, or an argument does not fit.
        ValueNotEncodable: a piece does not travel.
        JobRunning: a map or a job of that name is running on this host.
        JobFailed: the job cannot go on.
    """
    given = as_list(pieces)
    found: list[Any] = [None] * len(given)
    options = _Options(nodes, attempts, on_error, resume, name, progress)
    for number, result in _Map(fn, given, options).results():
        found[number] = result
    return found


def imap(
    fn: Callable[[V], R],
    pieces: Iterable[V],
    *,
    nodes: int = 4,
    attempts: int = 3,
    on_error: str = "fail",
    resume: bool = False,
    name: str = "",
    progress: bool = False,
) -> Iterator[tuple[int, R]]:
    """Calls a function with each piece, as `tg.map` does, and yields number and result of each piece as they come.

    It begins with the first result that is asked for. Leaving the loop early ends the job; `resume=True` goes on.
    """
    return _Map(fn, as_list(pieces), _Options(nodes, attempts, on_error, resume, name, progress)).results()


class _Map:
    """One call of `tg.map` or `tg.imap`."""

    def __init__(self, function: Callable[[Any], Any], pieces: list[Any], options: _Options) -> None:
        options.check()
        check_function(function)
        name = options.name or _name_of(function)
        check_not_importing(name)
        self._function = register_here(function) if options.nodes == 0 else make_reference(function)
        self._pieces = pieces
        self._options = options
        self._name = name
        self._missing = np.ones(len(pieces), bool)
        self._errors: dict[int, Failed] = {}
        self._failed: Failed | None = None

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yields number and result of each piece, as they come. Ends the job if the caller takes no more."""
        pytorch()  # the results may be tensors
        options = self._options
        try:
            with ExitStack() as stack:
                journal = self._journal(stack)
                (journal.check_same_or_begin if options.resume else journal.begin_anew)(self._identity, self._pieces)
                if options.resume:
                    yield from self._read(journal)
                    self._errors.clear()
                    self._failed = None
                yield from self._compute(journal)
        finally:
            if options.nodes == 0:
                find_function(self._function, forget=True)

    @property
    def _identity(self) -> str:
        """What a call that resumes must have alike: the function's reference, or with `nodes=0` the map's name."""
        return self._name if self._options.nodes == 0 else self._function

    def _journal(self, stack: ExitStack) -> Journal:
        """Returns the map's folder, locked; without a name, a temporary one if that is in use or with `nodes=0`."""
        if self._options.name or (self._options.nodes and self._options.resume):
            return stack.enter_context(Journal(self._name, keep=True))
        if self._options.nodes:
            with contextlib.suppress(JobRunning):
                return stack.enter_context(Journal(self._name, keep=True))
        self._name = f"{self._name}-{secrets.token_hex(4)}"
        return stack.enter_context(Journal(self._name, keep=False))

    def _compute(self, journal: Journal) -> Iterator[tuple[int, Any]]:
        """Runs jobs until no result is missing, and yields the results. If all nodes died, another job goes on."""
        shown = MapProgress(self._name, len(self._pieces), int((~self._missing).sum()), self._options.progress)
        deaths, in_vain = Counter[int](), 0
        with shown:
            while self._missing.any():
                before = int(self._missing.sum())
                error = yield from self._run(journal, shown)
                if error is None:
                    break
                died = journal.find_deaths()
                deaths.update(piece for _, piece in died)
                in_vain = in_vain + 1 if self._missing.sum() == before else 0
                if not died or in_vain >= _IN_VAIN or self._failed is not None or max(deaths.values()) >= _DEATHS:
                    raise self._explain_end(error, died, deaths).with_traceback(None)
        for number in np.flatnonzero(self._missing).tolist():
            raise JobFailed(f"map {self._name!r}: the result of piece {number} is not there: was its file removed?")

    def _run(self, journal: Journal, shown: MapProgress) -> Generator[tuple[int, Any], None, BaseException | None]:
        """Runs a job for the missing pieces, and yields results. Returns the job's error if some are still missing."""
        options = self._options
        journal.begin_job(np.flatnonzero(self._missing))
        job = map_pieces(
            folder=str(journal.folder),
            call=journal.run,
            function=self._function,
            attempts=options.attempts,
            on_error=options.on_error,
        )
        with _JobThread(job, options.nodes, self._name, shown) as running:
            over = False
            while not over:
                over = running.wait(_POLL_S)  # looked at before the files: these have all then
                for number, result in self._read(journal):
                    if not isinstance(result, Failed):
                        shown.count_done()
                    yield number, result
                shown.tick(self._errors.values())
                if not self._missing.any():
                    running.wait(_END_S)
                    return None
            return running.error

    def _read(self, journal: Journal) -> Iterator[tuple[int, Any]]:
        """Reads what workers have written since, and yields missing pieces with their results, or `Failed`."""
        options = self._options
        for record in journal.read():
            piece, is_result = record.piece, record.kind == RecordKind.RESULT
            if not is_result:
                self._note_error(record)
                if options.on_error == "fail" or record.attempt + 1 < options.attempts:
                    continue
            if self._missing[piece]:
                self._missing[piece] = False
                yield piece, decode(record.value, writable=True) if is_result else self._errors[piece]

    def _note_error(self, record: MapRecord) -> None:
        """Keeps the last error of a piece in `_errors`, and in `_failed` the first one that fails the map."""
        said = decode(record.value)
        failed = Failed(record.piece, said["node"], said["traceback"])
        self._errors[record.piece] = failed
        if record.kind == RecordKind.FAILED and self._failed is None:
            self._failed = failed

    def _explain_end(self, error: BaseException, died: list[tuple[str, int]], deaths: Counter[int]) -> BaseException:
        """Returns the error to raise for a job that `error` ended: PieceFailed, if a piece is to blame, else `error`.

        Args:
            died: (worker, piece) of each worker that died in this job.
            deaths: piece -> how many workers died at it, in all jobs of the map.
        """
        if isinstance(error, JobFailed) and self._failed is not None:
            failed, often = self._failed, f"raised on {self._failed.node}, in {self._options.attempts} attempts"
            error = self._piece_failed(failed.piece, failed.node, often, failed.traceback)
        elif isinstance(error, JobFailed) and deaths:
            (piece, times), *_ = deaths.most_common()
            node = next((worker for worker, at in reversed(died) if at == piece), "")
            if times > 1:
                often = (
                    f"ended its process {times} times, on {node} the last time: os._exit, a crash in an extension, or "
                    f"more memory than there is"
                )
                error = self._piece_failed(piece, node, often, "")
        done = int((~self._missing).sum())
        if done and (self._options.nodes or self._options.name):
            error.add_note(f"{done} of {len(self._pieces)} pieces are done: resume=True (--resume) computes the others")
        return error

    def _piece_failed(self, piece: int, node: str, often: str, traceback: str) -> PieceFailed:
        """Returns the error for a piece that is to blame; `often` says what it did."""
        text = f"map {self._name!r}: piece {piece} {often}"
        return PieceFailed(text, piece=piece, node=node, traceback=traceback, job=self._name)


class _JobThread:
    """Runs the job in a thread of its own, so that the caller's thread reads results meanwhile, also in a notebook."""

    def __init__(self, job: Job[Any], nodes: int, name: str, shown: MapProgress) -> None:
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        hooks = (
            FrontEndHooks(shown.show_if_wrong, lambda follower, nodes: shown.set_workers(follower.view))
            if shown.on
            else None
        )

        async def run() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if not self._cancelled:
                await arun(job, nodes=nodes, name=name, replace=nodes > 0, hooks=hooks)

        def thread() -> None:
            try:
                asyncio.run(run())
            except BaseException as error:
                self.error = error
            finally:
                self._ended.set()

        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(thread,), name="taskgraph-map", daemon=True)

    def __enter__(self) -> _JobThread:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the job, if it runs, and waits for that."""
        self._cancelled = True
        if self._loop is not None and not self._ended.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has just ended
                self._loop.call_soon_threadsafe(cast("asyncio.Task[Any]", self._task).cancel)
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the job's end, at most this long. Returns True if it has ended."""
        return self._ended.wait(timeout_s)


def _name_of(function: Any) -> str:
    """Returns a job's name for a function."""
    name = getattr(function, "__name__", "").strip("<>_") or "map"
    return name[:80] if is_name(name[:80]) else "map"
