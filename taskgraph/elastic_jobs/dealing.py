"""The rounds by which workers deal pieces among themselves: a coroutine on the event loop, beside user code's thread.

    a reason, or another worker has begun ──► contribute the `tally.WorkerNews` ───► the total ──► apply it (`Tally`)
         ▲                                                                                             │
         └───────────────────── pause ◄── pieces to user code (`PieceQueue`) ◄───────────────────────────────┘

A round is a position of the protocol with one part for each worker. It never waits for a piece that computes: every
worker contributes at once what it has. So a lost worker costs one change of the view, and its pieces are dealt again.

While the rounds run, the position and the tag of `RunProgress` are theirs; user code asks for nothing else.

A round begins at once if user code waits for a piece; `PACE_S` after the one before if there is something to say; and
`KEEP_ALIVE_S` after it, so that pieces that take too long are found.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskgraph.elastic_jobs.adding import Merging, chain_digest
from taskgraph.elastic_jobs.piece_queue import FinishedPiece, PieceQueue
from taskgraph.elastic_jobs.state import capture
from taskgraph.elastic_jobs.tally import RoundOutcome, Tally, WorkerNews, holder_of, share_of_round
from taskgraph.errors import StepError
from taskgraph.graph.sums import Sums
from taskgraph.graph.values import decode, encode
from taskgraph.observe.queues import QueueStatus, Rate
from taskgraph.protocol.dealing import Ticket
from taskgraph.protocol.elastic.worker import Phase
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.engine import Engine
    from taskgraph.elastic_jobs.progress import RunProgress

__all__ = ["KEEP_ALIVE_S", "PACE_S", "Dealing", "PieceEffects"]

PACE_S: Final = 0.015
"""Time between two rounds: a round costs each worker some 2 ms of its event loop."""
KEEP_ALIVE_S: Final = 0.25
"""Time between two rounds in which no worker has anything to say."""
_WEIGHT: Final = 0.2
"""Weight of the newest round in the typical time that one takes."""


class PieceEffects(Protocol):
    """Effects of user code that count only if their piece counts, such as pushes to a table.

    What counts so far travels to newcomers by `RunProgress.carried`, which is captured on the event loop then.

    Attributes:
        bound: a piece at work may lack the effects of at most this many counted pieces; 0: of any number.
    """

    @property
    def bound(self) -> int: ...

    def end_piece(self, ticket: Ticket, *, counts: bool) -> Any:
        """Ends a piece, in user code's thread. Returns its effects, as a value that travels; None: it had none.

        Args:
            counts: False if user code raised: the effects are dropped.
        """

    def apply_effects(self, ticket: Ticket, effects: Any) -> None:
        """Applies what `end_piece` returned, maybe None, once its piece counts: on all workers' loops, in one order."""


class Dealing:
    """The rounds by which one worker deals pieces with the others. A `CarriedState`: newcomers get the tally.

    Args:
        tally: all pieces, if this worker begins with no copied state.
        what: tells these rounds from other ones; equal on all workers.
        effects: takes and applies the effects of pieces; None: pieces have none.
        keep: called on the event loop before other workers hear of results.
    """

    def __init__(
        self, progress: RunProgress, tally: Tally, what: str, effects: PieceEffects | None, keep: Callable[[], None]
    ) -> None:
        self.tally = tally
        node = progress.node
        self.queue = PieceQueue(node.clock, progress.wait, lambda: node.post(self._wake_rounds))
        self._progress = progress
        self._what = what.encode()
        self._named: Mapping[str, Any] = {}
        self._effects = effects
        self._keep = keep
        self._rate = Rate()
        self._changed = asyncio.Event()
        self._news = _UnconfirmedNews()
        self._ended_at = self._contributed_at = 0.0
        self._round_s = PACE_S  # time between two rounds
        self._given_at = -1  # the position of the last copy of the state
        self._ahead: tuple[int, tuple[int, ...]] = (0, ())  # slots of the next round that came with the last total

    def begin(self, named: Mapping[str, Any]) -> None:
        """Begins the rounds. Called in user code's thread.

        Args:
            named: the state that user code named, captured before the first piece; newcomers get it.
        """
        self._named = named
        self._ahead = self._progress.node.take_ahead(self._progress.position)
        self._progress.node.run_rounds(self._run_rounds, self._end_pieces)

    def _wake_rounds(self) -> None:
        """Wakes `_wait_for_reason`, which then decides whether a round is due."""
        self._changed.set()

    def _end_pieces(self, error: BaseException | None) -> None:
        """Ends user code's pieces after the last round, or with the error that ended the rounds."""
        self.queue.end_pieces(error)

    # -- on the event loop ------------------------------------------------------------------------

    async def _run_rounds(self, engine: Engine) -> None:
        """Runs rounds until all pieces are done or set aside."""
        engine.heard, engine.queues = self._wake_rounds, self._queue_status
        self._ended_at = self._contributed_at = asyncio.get_running_loop().time()
        try:
            while not self.tally.ledger.over:
                await self._wait_for_reason(engine)
                began = asyncio.get_running_loop().time()
                self._apply(await self._run_round(engine))
                self._ended_at = asyncio.get_running_loop().time()
                took_s = PACE_S + self._ended_at - began
                self._round_s += _WEIGHT * (took_s - self._round_s)
            self._progress.node.keep_ahead(self._progress.position, *self._ahead)
        finally:
            engine.heard = _hear_nothing
            engine.withdraw_ask()

    async def _wait_for_reason(self, engine: Engine) -> None:
        """Waits until a round is due here, or another worker has begun one, or the view changes."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            self._give_state()
            if engine.core.position > self._progress.position or engine.core.has_contributions:
                return
            if engine.core.phase != Phase.WORKING:
                return  # the round waits for the view
            due = self._next_round_at(engine)
            if due <= loop.time():
                return
            timer = loop.call_at(due, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()

    def _next_round_at(self, engine: Engine) -> float:
        """Returns when this worker is to begin the next round, by the event loop's clock."""
        queue, now = self.queue, asyncio.get_running_loop().time()
        finished = queue.has_finished or not self._news.empty
        is_new = engine.core.number > self.tally.view[0]
        wants, back = queue.wanted_or_surplus(self._round_s)
        self._news.back += back
        open_pieces = wants > 0 and self.tally.ledger.open > 0
        if queue.is_starving and (finished or open_pieces or is_new):
            return now
        if finished or open_pieces or is_new or back or self._given_at > engine.core.stable:
            return self._ended_at + PACE_S
        soon = self._ended_at + PACE_S
        return max(soon, min(self._ended_at + KEEP_ALIVE_S, now + queue.due_in(self._round_s)))

    async def _run_round(self, engine: Engine) -> Sums:
        """Contributes this worker's news to a round, waits for its total, and returns that."""
        position, slots = self._progress.position, self.tally.slots
        tag, said = self._progress.tag + self._what, False
        dealt = list(self._ahead[1]) if self._ahead[0] == slots else []
        while True:
            if not dealt:
                answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                engine.ask(position, slots, tag, answer)
                found = await answer
                if not isinstance(found, list):
                    total: Sums = found.total.sums()
                    self._progress.position, self._progress.tag = position + 1, chain_digest(self._progress.tag, total)
                    self._ahead = found.of, found.ahead
                    return total
                dealt = found
            merging = Merging(dealt, slots, self._progress.node.allocate)
            for slot in dealt:
                news = {} if said else {slot: encode(self._contribution(engine), what="the results of pieces")}
                merging.add(slot, Sums.of({}, news))
                said = True
            finished = merging.take(lambda sums: None)
            assert finished is not None
            dealt = []
            engine.take_finished_parts(position, slots, tag, finished)

    def _contribution(self, engine: Engine) -> dict[str, Any]:
        """Returns this worker's `WorkerNews` as a value: pieces finished or to give back, how many more it wants."""
        view, me, now = engine.core.view, engine.core.me, asyncio.get_running_loop().time()
        assert view is not None
        holders = tuple(holder_of(name_of(entry.worker), entry.since) for entry in view.entries)
        self._news.holder = holders[view.workers.index(me)]
        if finished := self.queue.take_finished():
            self._keep()
            self._news.add(finished)
        wants, back = self.queue.wanted_or_surplus(self._round_s)
        self._news.back += back
        most = self._most_done(holders.index(self._news.holder), len(holders))
        news = self._news.news(most)
        news.view = (view.number, holders) if view.number > self.tally.view[0] else None
        if self.tally.ledger.open:
            news.wants = 0 if back or self._news.finished > 2 * most else wants
        else:  # what others give back is for those that have nothing
            news.wants = 1 if self.queue.is_idle_within(self._round_s) else 0
        news.elapsed_s, self._contributed_at = now - self._contributed_at, now
        return news.value()

    def _most_done(self, index: int, workers: int) -> int:
        """Returns how many finished pieces this worker may contribute to this round, so that no pull lacks too many."""
        bound = 0 if self._effects is None else self._effects.bound
        return share_of_round(bound, index, workers, self._progress.position) if bound else sys.maxsize

    def _apply(self, total: Sums) -> None:
        """Counts the pieces in a round's total, and queues those dealt to this worker. Raises what fails the job."""
        mine = self._news.holder
        news = [WorkerNews.of(decode(value)) for value in total.collected.values()]
        for each in news:
            if each.holder == mine:
                self._news.confirm(each)
        rows = self.tally.ledger.rows
        outcome = self.tally.apply(news)
        self._rate.add(asyncio.get_running_loop().time(), self.tally.ledger.rows - rows)
        if self._effects is not None:
            for _, ticket, effects in outcome.counted:
                self._effects.apply_effects(ticket, effects)
        self._drop_late(outcome)
        if outcome.failed is not None:
            raise outcome.failed
        if dealt := outcome.dealt.get(mine):
            self.queue.add(dealt)
        elif outcome.starving:
            self._news.back += self.queue.give_back(self._round_s)

    def _queue_status(self) -> tuple[QueueStatus, ...]:
        """Returns how far the pieces are, for `taskgraph shards`."""
        tally, rows_per_s = self.tally, self._rate.at(asyncio.get_running_loop().time())
        kind = "shards" if self._what.startswith(b"run.shards") else "map"
        return (QueueStatus.of(self._progress.node.spec.name, kind, tally.ledger, tally.now, rows_per_s),)

    def _drop_late(self, outcome: RoundOutcome) -> None:
        """Removes pieces from this worker's queue that another worker has finished meanwhile."""
        by_others = {ticket[:2] for holder, ticket, _ in outcome.counted if holder != self._news.holder}
        if by_others:
            self.queue.drop(by_others)

    def _give_state(self) -> None:
        """If a newcomer or a checkpoint waits for the state, captures it between two rounds and gives it to them."""
        node, progress = self._progress.node, self._progress
        if not node.state_wanted:
            return
        carried = {name: each.captured() for name, each in progress.carried.items()}
        copy = capture(
            self._named,
            progress.results_before_steps,
            progress.steps_arguments,
            carried,
            node.take_prepared_memory().allocate,
        )
        node.give_state(self.tally.ledger.done, progress.position, progress.tag, copy)
        self._given_at = progress.position

    # -- what newcomers get -----------------------------------------------------------------------

    def captured(self) -> dict[str, Any]:
        return {"what": self._what, "run": self._progress.node.spec.run, "tally": self.tally.state()}

    def load(self, captured: Mapping[str, Any]) -> None:
        if captured["what"] != self._what:
            raise StepError(
                f"{self._what.decode()}; and the state was made with {captured['what'].decode()}: give the same on all "
                f"workers, and in a program that is resumed"
            )
        self.tally = Tally.of(captured["tally"], same_run=captured["run"] == self._progress.node.spec.run)

    def digests(self) -> dict[str, bytes]:
        return {}  # workers that differ are found by the tags of the rounds


class _UnconfirmedNews:
    """Finished and returned pieces of this worker that are in no total yet: it contributes them to the next round, too.

    Attributes:
        holder: the name under which this worker holds pieces, as in its last contribution.
        back: pieces that it gives back.
    """

    def __init__(self) -> None:
        self.holder = ""
        self.back: list[Ticket] = []
        self._finished: dict[Ticket, FinishedPiece] = {}

    @property
    def empty(self) -> bool:
        return not (self._finished or self.back)

    def add(self, finished: Iterable[FinishedPiece]) -> None:
        """Adds pieces that user code has finished."""
        self._finished.update((each.ticket, each) for each in finished)

    @property
    def finished(self) -> int:
        """How many finished or failed pieces are in no total yet."""
        return len(self._finished)

    def news(self, most: int) -> WorkerNews:
        """Returns the news for the next round: all that is in no total yet, but at most `most` finished pieces."""
        news = WorkerNews(self.holder, back=list(self.back))
        for ticket, each in self._finished.items():
            if each.error:
                news.failed.append((ticket, each.error))
                continue
            if len(news.done) == most:
                continue
            if each.effects is not None:
                news.effects[len(news.done)] = each.effects
            news.done.append((ticket, each.rows))
        return news

    def confirm(self, news: WorkerNews) -> None:
        """Drops what these news of this worker have, since they are in a total now."""
        for ticket, _ in (*news.done, *news.failed):
            self._finished.pop(ticket, None)
        self.back = [ticket for ticket in self.back if ticket not in news.back]


def _hear_nothing() -> None:
    """Does nothing: no rounds run that would wait for messages."""
