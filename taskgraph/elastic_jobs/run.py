"""`Run`: what user code gets. All of it is used in the thread of user code."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from taskgraph.elastic_jobs.data import data_of, loader_arguments
from taskgraph.elastic_jobs.dealing import PieceEffects
from taskgraph.elastic_jobs.groups import Group, GroupTurns
from taskgraph.elastic_jobs.lanes import LaneOptions, SourceLanes, pack_pieces, unpack_pieces
from taskgraph.elastic_jobs.parts import Part, capture_modules
from taskgraph.elastic_jobs.progress import RunProgress
from taskgraph.elastic_jobs.rows import Rows
from taskgraph.elastic_jobs.run_rows import NumberedRunRows, RunRows
from taskgraph.elastic_jobs.seeding import GeneratorTurn
from taskgraph.elastic_jobs.shards import SourcePieces
from taskgraph.elastic_jobs.state import State
from taskgraph.elastic_jobs.steps import Step, StepOptions, Steps
from taskgraph.elastic_jobs.tables import RunTable, Tables
from taskgraph.errors import StateError, StepError, TableError
from taskgraph.options import check_fields
from taskgraph.protocol.dealing import QueueLedger
from taskgraph.results import Failed
from taskgraph.sources.reading import Source, Values, as_source, is_source, pieces_digest, pieces_of
from taskgraph.tables.options import TableOptions

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.usercall import UserCall

__all__ = ["Group", "Part", "Run", "State", "Step", "Steps"]

R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")


class Run:
    """One run of an elastic job, on one worker.

    Attributes:
        progress: where user code is.
        named: what `run.state` named: a `State`, an instance of a dataclass, or None.
        effects: effects of user code that count with the pieces of `run.shards`: what it pushes to tables.
        tables: the tables that `run.table` made.
    """

    def __init__(self, node: UserCall) -> None:
        self.progress = RunProgress(node, GeneratorTurn())
        self.named: Any = None
        self.tables = Tables()
        self.effects: PieceEffects | None = self.tables
        self._shards: SourcePieces[Any] | None = None
        self._steps: Steps | None = None
        self._turns: GroupTurns | None = None

    @property
    def worker(self) -> str:
        """The name of this worker, which no other worker ever gets."""
        return self.progress.node.name

    @property
    def log(self) -> logging.Logger:
        """A logger: INFO and above are among what user code prints, as a task's are."""
        return logging.getLogger(f"taskgraph.task.{self.worker}")

    @property
    def pieces_set_aside(self) -> list[Failed]:
        """The pieces that `run.shards` has set aside, for the job's result."""
        return [] if self._shards is None else self._shards.set_aside

    @property
    def positions(self) -> int:
        """The number of totals that user code has got."""
        return self.progress.position

    @property
    def deals(self) -> bool:
        """True if the job has called `run.shards`: its value may depend on the time that pieces took."""
        return self._shards is not None

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers of the view, the most senior one first. What decides bits must not use them."""
        return self.progress.node.workers

    def once(self, function: Callable[[], T]) -> T:
        """Calls a function on one worker; all get its value. Call it outside the part loop, on all workers alike.

        What it does outside the job may happen twice, if its worker is lost meanwhile.
        """
        _check_callable("run.once", function)
        (value,) = self._compute_pieces("run.once", lambda _: function(), [None])
        return cast(T, value)

    def map(self, function: Callable[[V], R], pieces: Iterable[V]) -> list[R]:
        """Calls a function with each piece once, dealt to the workers; all get all results, in order.

        Call it outside the part loop, on all workers alike and with the same pieces.
        """
        _check_callable("run.map", function)
        return self._compute_pieces("run.map", function, list(pieces))

    def group(self) -> Group:
        """Begins a turn of a loop that has no steps and parts. Returns the workers that it works with.

        Call it at the top of each turn, in place of `run.steps`: the state is copied here for newcomers and
        checkpoints. Members enter or leave the group only after one of its operations has raised `ViewChanged`.

        Raises:
            StepError: the job has called `run.steps` or `run.shards`.
        """
        if self._turns is None:
            self._check_no_loop_begun("run.group()")
            if self.progress.watch is not None:
                self.progress.watch.on_group()
            self._turns = GroupTurns(self)
        return self._turns.begin_turn()

    def shards(
        self,
        source: Source | Iterable[Any],
        *,
        passes: int = 1,
        shuffle: bool = False,
        attempts: int = 3,
        on_error: str = "fail",
    ) -> SourcePieces[Any]:
        """Returns an iterator over pieces that go to free workers, in place of `run.steps`; once.

        A piece counts when the loop asks for the next one. The pieces of a lost worker go to others at once.

        Args:
            source: an object with `pieces()` and `read(piece)`, as `tg.files` gives; or a sequence of values. All
                workers give the same.
            passes: over all pieces.
            shuffle: each pass has an order of its own, from the job's seed.
            attempts: how many errors in one piece, given to `SourcePieces.fail` or raised by the source, are too many.
            on_error: what follows then: "fail": the job fails; "set aside": it goes on without that piece.

        Raises:
            StepError: the job has called it, `run.steps` or `run.group` before.
            JobError: an argument does not fit.
        """
        self._check_no_loop_begun("run.shards(...)")
        if passes is None:
            raise StepError("run.shards(passes=None) would have no end, since `break` does not fit: give a number")
        of = as_source(source)
        pieces = pieces_of(of) if isinstance(of, Values) else self._pieces_of("run.shards(source)", of)
        number, seed = len(pieces), self.progress.node.spec.seed
        ledger = QueueLedger(
            number, passes=passes, seed=seed, shuffle=shuffle, overlap=True, attempts=attempts, on_error=on_error
        )
        options = f"{passes=}, {shuffle=}, {attempts=}, {on_error=}"
        what = f"run.shards of {number} pieces (digest {pieces_digest(pieces)}), {options}"
        self._shards = SourcePieces(self, of, pieces, ledger, what)
        return self._shards

    def _check_no_loop_begun(self, call: str) -> None:
        """Raises StepError if the job has begun a loop already: `run.steps`, `run.group` or `run.shards`."""
        others = {"run.steps(...)": self._steps, "run.group()": self._turns, "run.shards(...)": self._shards}
        for other, made in others.items():
            if made is not None:
                again = "again" if other == call else f"in a job that has called {other}"
                raise StepError(f"{call} {again}: a job has one loop, since newcomers begin at its top")

    def _compute_pieces(self, call: str, function: Callable[[Any], Any], pieces: list[Any]) -> list[Any]:
        """Computes pieces as `RunProgress.compute_pieces` does. Raises StepError within a loop over parts or pieces."""
        if self._steps is not None and self._steps.in_part_loop:
            raise StepError(f"{call} in the part loop: call it before or after `for part in step`")
        if self._shards is not None and self._shards.number >= 0:
            raise StepError(f"{call} in the loop over run.shards: call it before or after that")
        return self.progress.compute_pieces(call, function, pieces, capture_modules(self.named))

    def check_part_loop_ended(self) -> None:
        """Raises StepError if user code is in a loop over parts or pieces, or has left it early."""
        if self._steps is not None:
            self._steps.check_part_loop_ended()
        if self._shards is not None:
            self._shards.check_ended()

    @overload
    def state(self, holder: T, /) -> T: ...
    @overload
    def state(self, holder: None = None, /, **objects: Any) -> State: ...
    def state(self, holder: Any = None, /, **objects: Any) -> Any:
        """Names all that later steps rest on; once, before the first step.

        Args:
            holder: an instance of a dataclass: its fields are the state, and keep their types.
            objects: by name: objects with `state_dict` and `load_state_dict`, arrays, values that travel, and dicts,
                lists, tuples and instances of dataclasses of them. Objects and arrays are loaded in place.

        Returns:
            `holder`, or the objects as attributes, which may be replaced: `s.best = 3`.

        Raises:
            StateError: it was called before, or after the first step began; or `holder` is no such instance.
        """
        if self.named is not None:
            raise StateError("run.state(...) is called once: name everything in one call")
        if self.progress.in_steps:
            raise StateError(
                "run.state(...) after the first step: a newcomer gets the state before its first step; call it before "
                "`for step in steps`"
            )
        if holder is None:
            self.named = State(objects)
        elif objects or isinstance(holder, type) or not dataclasses.is_dataclass(holder):
            raise StateError(
                f"run.state takes an instance of a dataclass, or objects by name (run.state(w=w)), not "
                f"{type(holder).__name__}{' and objects by name' if objects else ''}"
            )
        else:
            self.named = holder
        return self.named

    def table(self, name: str, width: int, **options: Any) -> RunTable:
        """Makes a table of parameters: rows by id, which all workers hold alike; before the first step.

        Args:
            name: the table's.
            width: numbers in a row.
            options: `init`, `scale`, `optimizer`, `lr`, `dtype` and `rows`, as of `tg.Table`. `staleness=k`: in
                `run.shards` a pull lacks at most the last k pieces counted; 0: as many as count at once.

        Raises:
            TableError: an option does not fit, there is a table of this name, or the first step has begun.
        """
        if self.progress.in_steps:
            raise TableError(f"run.table({name!r}, ...) after the first step: make all tables before it")
        check_fields(TableOptions, options, "run.table")
        for option in ("servers", "backups"):
            if option in options:
                raise TableError(f"run.table({option}=...): in an elastic job every worker has all rows; leave it out")
        made = self.tables.make(name, TableOptions(width, **options), self.progress.node.spec.seed)
        self.progress.carried[f"table {name!r}"] = made
        return made

    def steps(
        self,
        data: Any = None,
        *,
        rows: int | None = None,
        batch: int | None = None,
        parts: int = 24,
        passes: int | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        buffer: int = 0,
        unused: str = "error",
        nonfinite: str = "event",
    ) -> Steps:
        """Returns the steps of the run; once.

        Args:
            data: in place of `rows`: an array, an object with `len(data)` and `data[row]`, or a PyTorch DataLoader, of
                which dataset, batch size, shuffling, `drop_last` and `collate_fn` count. Its `num_workers` and
                prefetching do not: user code's thread reads the rows of a part when it asks for `part.data`. Or a
                source (`tg.lines(url)`, ..., an object with `pieces()` and `read(piece)`), whose rows are read one
                after another: part i reads every `parts`-th piece, from piece i on.
            rows: the number of rows.
            batch: rows of a step.
            parts: parts of a step: micro-batches, which are summed in a fixed order.
            passes: over all rows; None: until `break`.
            seed: of the order of the rows; None: the job's.
            shuffle: False: the rows' own order. Of a source, the order of its pieces.
            drop_last: leave out the smaller step that ends a pass. Not with a source.
            buffer: of a source: how many rows of a piece are kept back, of which one is drawn each time; 0: their own
                order.
            unused: "zero": a parameter without a gradient in some parts has the gradient 0 there.
            nonfinite: what nan or inf in a total gives: "event", "error" or "ignore".

        Raises:
            StepError: it was called before, or the arguments do not fit.
        """
        if self._turns is not None or self._shards is not None:
            self._check_no_loop_begun("run.steps(...)")
        if self._steps is not None:
            raise StepError(
                "run.steps(...) is called once: code between two loops would run on a newcomer with a fresh state. "
                "Tell phases by step.number"
            )
        for name, value, known in (
            ("unused", unused, ("error", "zero")),
            ("nonfinite", nonfinite, ("event", "error", "ignore")),
        ):
            if value not in known:
                raise StepError(f"run.steps({name}={value!r}): must be one of {', '.join(map(repr, known))}")
        if data is not None and rows is not None:
            raise StepError("run.steps(data, rows=...): give one of them: the rows of data are counted")
        seed = self.progress.node.spec.seed if seed is None else seed
        if is_source(data):
            if batch is None or drop_last:
                what = "needs batch=..." if batch is None else "with drop_last=True: the last step is not known before"
                raise StepError(f"run.steps(source) {what}")
            feed: RunRows = self._lanes(data, LaneOptions(batch, parts, passes, seed, shuffle, buffer))
        else:
            if buffer:
                raise StepError("run.steps(buffer=...) is for sources: rows with numbers are all shuffled")
            found = None
            if (loader := loader_arguments(data)) is not None:
                if batch is not None:
                    raise StepError("run.steps(loader, batch=...): the loader's batch_size counts; leave out batch")
                batch, shuffle, drop_last = loader.batch, loader.shuffle, loader.drop_last
            if data is not None:
                found = data_of(data)
                rows = found.rows
            if rows is None or batch is None:
                raise StepError("run.steps(...) needs rows=... and batch=..., or a DataLoader, or data with batch=...")
            feed = NumberedRunRows(Rows(rows, batch, parts, passes, seed, shuffle, drop_last), found)
        self._steps = Steps(self, feed, StepOptions(unused == "zero", nonfinite))
        return self._steps

    def _pieces_of(self, call: str, source: Source) -> list[Any]:
        """Returns the pieces of a source: one worker finds them, and all get them."""
        (packed,) = self._compute_pieces(call, lambda _: pack_pieces(source), [None])
        return unpack_pieces(packed)

    def _lanes(self, source: Source, options: LaneOptions) -> SourceLanes:
        """Makes the lanes of a source, which travel with the state."""
        call = "run.steps(source)"
        pieces = self._pieces_of(call, source)
        lanes = SourceLanes(
            source, pieces, options, lambda function, numbers: self._compute_pieces(call, function, [*numbers])
        )
        self.progress.carried["lanes"] = lanes
        return lanes


def _check_callable(call: str, function: Any) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise StepError(f"{call} takes a function, not {kind}: `lambda: save(model)`, and not `save(model)`")
