"""Tables of an elastic job: each worker holds all rows that somebody has pushed to, the same on all workers.

    pushes of a part ──summed by id──► carried with its sums ──► all workers apply those of all parts, in their order

So a push counts when its part does. The rows that parts pull are those of the round's beginning. Rows, optimizers and
the log of changed rows are those of tables in task graphs (`taskgraph.tables`).

With `run.shards` the pushes of a piece travel with its result, and are applied on the event loop when the piece is
counted, in the same order on all workers, while user code pulls in its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from taskgraph.errors import TableError
from taskgraph.tables.layout import SegmentLayout
from taskgraph.tables.merging import as_gradients, as_ids, sum_by_id
from taskgraph.tables.options import TableOptions, as_rate
from taskgraph.tables.rows import Ids, table_seed
from taskgraph.tables.saved import write_table
from taskgraph.tables.store import RowStore

if TYPE_CHECKING:
    import torch

    from taskgraph.protocol.dealing import Ticket

__all__ = ["Pushes", "RunTable", "Tables"]

Array = NDArray[Any]
Packed = Sequence[tuple[str, bool, Ids, Array]]
"""What a part pushed: (table, mean, ids, gradients), with each id once; see `Pushes.add`."""


class Pushes:
    """The pushes of one part or piece, to all tables."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, bool], list[tuple[Ids, Array]]] = {}
        self.embedded: list[tuple[str, Ids, torch.Tensor]] = []  # rows that losses may have gradients of

    def add(self, table: str, ids: Ids, gradients: Array, *, mean: bool = False) -> None:
        """Takes gradients of rows.

        Args:
            mean: they are divided by the sum of the weights of all parts, as those of `part.backward`.
        """
        self._kept.setdefault((table, mean), []).append((ids, gradients))

    def packed(self) -> Packed:
        """Returns the sum of what was pushed, as a value that travels."""
        return [(*of, *_summed(pushes)) for of, pushes in sorted(self._kept.items())]

    def take_embedded(self, weight: float, *, mean: bool) -> bool:
        """Pushes weight * gradient of embedded rows that have a gradient, and clears it. Returns False if none has."""
        having = [(name, ids, rows) for name, ids, rows in self.embedded if rows.grad is not None]
        for name, ids, rows in having:
            gradient, rows.grad = rows.grad, None
            assert gradient is not None
            self.add(name, ids, (gradient * weight).cpu().numpy(), mean=mean)
        return bool(having)

    @property
    def table_with_gradient(self) -> str | None:
        """The name of a table with embedded rows that still have a gradient; None: there is none."""
        return next((name for name, _, rows in self.embedded if rows.grad is not None), None)


def _summed(pushes: Sequence[tuple[Ids, Array]]) -> tuple[Ids, Array]:
    """Adds up the gradients of several pushes by id."""
    ids, gradients = zip(*pushes, strict=True)
    return sum_by_id(np.concatenate(ids), np.concatenate(gradients))


class Tables:
    """All tables of a run.

    They are the `PieceEffects` of `run.shards`, too: pushes count with their piece.

    Attributes:
        pushes: the pushes of the part or piece at work; None: user code may not push now.
        in_parts: user code is in the part loop.
    """

    def __init__(self) -> None:
        self.pushes: Pushes | None = None
        self.in_parts = False
        self._tables: dict[str, RunTable] = {}

    def __iter__(self) -> Iterator[RunTable]:
        return iter(self._tables.values())

    def make(self, name: str, options: TableOptions, seed: int) -> RunTable:
        """Makes a table of the run.

        Raises:
            TableError: there is a table of this name already, or the name is no text.
        """
        if not isinstance(name, str) or not name:
            raise TableError(f"run.table({name!r}): the name must be a text")
        if name in self._tables:
            raise TableError(f"run.table({name!r}): there is a table of this name: call it once for each")
        made = self._tables[name] = RunTable(self, name, options, seed)
        return made

    @property
    def bound(self) -> int:
        """How many counted pieces a pull in `run.shards` may lack; 0: as many as count at once."""
        return min((table.options.staleness for table in self if table.options.staleness), default=0)

    def end_piece(self, ticket: Ticket, *, counts: bool) -> Packed | None:
        """Ends a piece. Returns its pushes, packed; None: it pushed nothing, or user code raised in it."""
        pushes, self.pushes = self.pushes, None
        if pushes is None or not counts:
            return None
        pushes.take_embedded(1.0, mean=False)
        return pushes.packed() or None

    def apply_effects(self, ticket: Ticket, effects: Packed | None) -> None:
        """Changes the rows to which a piece that counts now has pushed."""
        if effects is not None:
            self.apply([effects])

    def apply(self, pushed: Sequence[Packed], weight: float = 0.0) -> None:
        """Changes the rows that parts or pieces pushed to: each once, by the sum of its gradients.

        Args:
            pushed: of each part, in the order in which they are summed.
            weight: the sum of the weights of all parts, for gradients that are means.
        """
        found: dict[tuple[str, bool], list[tuple[Ids, Array]]] = {}
        for packed in pushed:
            for name, mean, ids, gradients in packed:
                found.setdefault((name, mean), []).append((ids, gradients))
        for name, table in self._tables.items():
            pushes = found.get((name, False), [])
            if means := found.get((name, True)):
                ids, gradients = _summed(means)
                pushes.append((ids, gradients / weight))
            if pushes:
                table.apply(*map(np.concatenate, zip(*pushes, strict=True)))


class RunTable:
    """A table of an elastic job, as `run.table(name, width, ...)` returns it.

    A row without a push is made when it is pulled, from the job's seed, the table's name and the row's id.
    """

    def __init__(self, of: Tables, name: str, options: TableOptions, seed: int) -> None:
        self.name = name
        self.options = options
        self._of = of
        self._seed = table_seed(seed, name)
        self._store = RowStore(options, self._seed)
        self._lock = threading.Lock()  # of the store: user code pulls while pieces are counted on the event loop
        self._lr = options.lr
        self._digests: dict[int, tuple[Array, bytes]] = {}  # id of a block -> the block, its digest

    def pull(self, ids: ArrayLike | None = None) -> Array:
        """Returns rows: in a part, as of the round's beginning; in a piece of `run.shards`, as of the pieces that this
        worker knows to be counted.

        Args:
            ids: int64, of shape (n,), in any order, also more than once. None: all rows of a table that has `rows`.

        Returns:
            An array of the table's dtype, of shape (n, width), which is the caller's own.

        Raises:
            TableError: wrong ids.
        """
        found = self._ids(ids, "pull")
        with self._lock:
            return self._store.pull(found)

    def push(self, ids: ArrayLike | None, gradients: ArrayLike) -> None:
        """Adds gradients, which count when the part does. After the round, each row is changed once, by their sum.

        In a piece of `run.shards` they count with the piece, and each row is changed once for each piece.

        Args:
            ids: int64, of shape (n,); gradients of the same id are added up. None: all rows of a table that has `rows`.
            gradients: floats, of shape (n, width), which become the table's dtype.

        Raises:
            TableError: wrong ids, another shape, no floats, or it is called outside a part.
        """
        found = self._ids(ids, "push")
        options = self.options
        given = as_gradients(gradients, found, options.width, options.numpy_dtype, f"{self._title}.push")
        self._pushes("push").add(self.name, found.copy(), given.copy())

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of a tensor of ids. In a part, `part.backward` pushes their gradient, weighted as all are.

        In a piece of `run.shards` the gradients that `loss.backward()` gives them are pushed when the piece ends.

        Args:
            ids: whole numbers, of any shape.

        Returns:
            A tensor of the table's dtype, of shape (*ids.shape, width), on the ids' device.

        Raises:
            TableError: `ids` is no such tensor.
        """
        from taskgraph.elastic_jobs.embedding import embed_rows

        pushes = self._of.pushes
        found, unique, rows = embed_rows(self.pull, ids, f"{self._title}.embed", trained=pushes is not None)
        if pushes is not None and rows is not None:
            pushes.embedded.append((self.name, unique, rows))
        return found

    @property
    def lr(self) -> float:
        """The learning rate. Set it outside the part loop, on all workers alike."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        if self._of.in_parts or self._of.pushes is not None:
            where = "the part loop" if self._of.in_parts else "a piece of run.shards"
            raise TableError(f"{self._title}.lr is set in {where}: set it before or after, on all workers alike")
        self._lr = as_rate(value, f"{self._title}.lr")

    def save(self, url: str) -> None:
        """Writes the rows that somebody has pushed to as a Parquet file, which `tg.read_table` and pandas read.

        Call it on one worker: `run.once(lambda: table.save(url))`. Needs the extra `parquet`.

        Args:
            url: a path, or with the extra `checkpoint` a URL that fsspec knows. An existing file is replaced.

        Raises:
            TableError: the URL names no place, or pyarrow is not installed.
            OSError: the file cannot be written.
        """
        with self._lock:
            live = self._store.live_rows()
        write_table(url, live["ids"], live["rows"])

    def __len__(self) -> int:
        """Returns the number of rows that somebody has pushed to."""
        return len(self._store)

    def apply(self, ids: Ids, gradients: Array) -> None:
        """Changes rows by the optimizer, each once, by the sum of its gradients in the order given."""
        with self._lock:
            self._store.push(ids, gradients, self._lr)

    @property
    def _title(self) -> str:
        return f"table {self.name!r}"

    def _pushes(self, call: str) -> Pushes:
        """Returns the pushes of the part or piece at work. Raises TableError if there is none."""
        if self._of.pushes is None:
            raise TableError(
                f"{self._title}.{call} outside a part: what all workers push alike could not be counted once; call it "
                f"in `for part in step`, or in a piece of run.shards"
            )
        return self._of.pushes

    def _ids(self, ids: ArrayLike | None, call: str) -> Ids:
        """Returns ids as an array; all of a table with `rows` for None. Raises TableError if they are wrong."""
        rows, what = self.options.rows, f"{self._title}.{call}"
        if ids is None and rows is None:
            raise TableError(f"{what} needs ids: only a table with rows=... knows all of its own")
        return as_ids(range(rows) if ids is None and rows is not None else ids, what, rows)

    # -- in the state that newcomers and checkpoints get ------------------------------------------

    def captured(self) -> dict[str, Any]:
        return {"table": self.options.stored, "lr": self._lr, "blocks": self._store.blocks}

    def load(self, captured: Mapping[str, Any]) -> None:
        self.options.check_stored(captured["table"], self.name)
        self._lr = captured["lr"]
        self._store = RowStore(self.options, self._seed, map(SegmentLayout.of(self.options).unpack, captured["blocks"]))

    def digests(self) -> dict[str, bytes]:
        blocks = self._store.blocks
        known = self._digests
        self._digests = {id(b): known.get(id(b)) or (b, xxhash.xxh3_128_digest(b.data)) for b in blocks}
        whole = xxhash.xxh3_128_digest(b"".join(self._digests[id(b)][1] for b in blocks))
        return {f"{self._title}.lr": repr(self._lr).encode(), self._title: b"array" + whole}
