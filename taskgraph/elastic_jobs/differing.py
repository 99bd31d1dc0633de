"""Workers whose state, totals or user code differ from those of most others: found by tags, explained by digests.

The tag of a checked step has the digests of the state. If tags differ, the other workers ask the outvoted one for its
digests, and name what differs, before they exclude it. Workers that differ again soon, or are at different calls
a third time, differ for a lasting reason: the job fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from taskgraph.elastic_jobs.state import is_array
from taskgraph.errors import Refused, StateError, StepError, TransportError
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.messages import DescribeState, StateDigests
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.interface import WorkerNode

__all__ = ["END", "DifferingWorkers", "digests_of_arguments", "error_of_wrong_call", "is_checked"]

_AGAIN = 20
"""Workers that differ again within this many sums or steps, since one of them has entered anew, differ for a lasting
reason. A step may have any number of sums, and a loop of another shape has no steps."""
_CALLS_MAY_DIFFER = 2
"""How often workers may be at different calls of the run, however far apart: no bit of a state explains a third time,
as user code does that decides by the worker's own data, once a pass, say."""
_FIRST, _EVERY = 10, 10
"""The first ten steps and every tenth one are checked: digests read the whole state."""
_ASK_S = 1.0
"""Time for the outvoted worker to answer. The others wait for it at this position."""
_NAMED = 3
"""The most differing names in a message."""
_ARGUMENT = "run.steps: "
END: Final = "the end of the function"
"""The call of user code that has returned."""
_DECIDE = "decide by totals, run.state, run.once and run.map alone when to break or return, and what to call next"
_CALLS = "a further round, run.once, run.map, break or return"


def digests_of_arguments(arguments: Mapping[str, int]) -> dict[str, bytes]:
    """Returns digests of what `run.steps` got, beside those of the state."""
    return {f"{_ARGUMENT}{name}": b"%d" % value for name, value in arguments.items()}


def is_checked(step: int) -> bool:
    """True if workers compare their state before this step: its digest is put into the step's tag."""
    return step < _FIRST or step % _EVERY == 0


class DifferingWorkers:
    """Excludes workers that differ from most others.

    Args:
        changed: called when `outvoted` has new workers, which the next view is to exclude.

    Attributes:
        outvoted: workers that differ, until they have left the view.
        differs: the other workers exclude this one because it differs.
    """

    def __init__(self, node: WorkerNode, changed: Callable[[], None]) -> None:
        self._node = node
        self._changed = changed
        self.outvoted: frozenset[str] = frozenset()
        self.differs = False
        self._since: dict[str, int | None] = {}  # the numbers of the views by which the outvoted ones entered
        self._away: frozenset[str] = frozenset()  # they were outvoted, and have left the view
        self._calls_differed = 0
        self._position = self._step = -_AGAIN - 2  # at which workers differed last, or entered anew because of it

    def read_view(self, view: View) -> None:
        """Updates from a view which outvoted workers are excluded by now, and which of them have entered again."""
        workers = frozenset(view.workers)
        left = frozenset(worker for worker in self.outvoted if view.since(worker) != self._since[worker])
        self._away |= left  # the view without them may not have been read
        self.outvoted -= left
        if self._away & workers:
            self._away -= workers
            self._note_difference(self._node.engine.core.position)

    def _note_difference(self, position: int) -> None:
        """Keeps the position, and user code's step, at which workers differ, or enter anew since they differed."""
        self._position = position
        self._step = self._node.digests.step

    def begin_exclusion(self, position: int, outvoted: tuple[str, ...]) -> None:
        """Starts a task that excludes the outvoted workers, whose tags differ; does nothing if this is one of them."""
        self.differs = self._node.id in outvoted
        if not self.differs:
            self._node.own(self._exclude(position, outvoted), "compare states")

    async def _exclude(self, position: int, outvoted: tuple[str, ...]) -> None:
        """Asks what differs, then has the outvoted workers excluded; fails the job if the reason lasts."""
        node = self._node
        mine, view = node.digests, node.engine.core.view
        assert view is not None
        found = [await _compare(node, mine, worker) for worker in outvoted]
        if node.engine.core.view != view:
            return  # another worker has excluded them, or workers were lost: tags are compared anew
        self._calls_differed += all(each.of_calls for each in found)
        soon = position - self._position <= _AGAIN or 0 <= mine.step <= self._step + _AGAIN
        if soon or self._calls_differed > _CALLS_MAY_DIFFER:
            await node.fail_job(_lasting_error(found))
            return
        self._note_difference(position)
        self.outvoted = frozenset(outvoted)
        self._since = {worker: view.since(worker) for worker in outvoted}
        others = [worker for worker in view.workers if worker not in outvoted]
        for each in found if others[:1] == [node.id] else ():  # the others found the same
            node.events.emit("differs", f"{each.text}: it enters anew, with a copied state{each.spoilt}")
        self._changed()


class _Difference(NamedTuple):
    """What differs on one worker.

    Attributes:
        text: says what differs; vague if the worker did not answer.
        spoilt: text about the totals that may rest on it; "": none.
        of_calls: user code asks for something else than on other workers.
    """

    text: str
    spoilt: str = ""
    of_calls: bool = False


async def _compare(node: WorkerNode, mine: StateDigests, worker: str) -> _Difference:
    """Asks a worker for its state's digests and where its user code is, and returns what differs."""
    peer = node.router.peer(worker)
    name, theirs = name_of(worker), None
    if peer is not None:
        try:
            async with asyncio.timeout(_ASK_S):
                theirs = cast(StateDigests, await node.transport.call(peer, DescribeState()))
        except (Refused, TransportError, TimeoutError) as error:
            node.log.info("%s does not describe its state: %s", name, str(error) or "no answer")
    if theirs is not None and theirs.position == mine.position and theirs.call != mine.call:
        return _Difference(f"{name} is at {theirs.call}, and other workers are at {mine.call}", of_calls=True)
    if theirs is None or mine.step < 0 or mine.step != theirs.step:
        return _Difference(f"{name} differs in its totals, its state or its calls ({_CALLS})")
    here, there = dict(mine.digests), dict(theirs.digests)
    names = sorted(path for path in {*here, *there} if here.get(path) != there.get(path))
    if not names:
        return _Difference(f"{name} differs after step {mine.step} in its totals or its calls ({_CALLS})")
    if arguments := [path.removeprefix(_ARGUMENT) for path in names if path.startswith(_ARGUMENT)]:
        return _Difference(
            f"{name} calls run.steps(...) with other arguments than other workers ({', '.join(arguments)})"
        )
    # Numbers first: a learning rate says more than an array that it spoilt.
    names.sort(key=lambda path: (is_array(here.get(path) or there[path]), path.count(".")))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    where = "differs after the last step" if mine.call == END else f"differs before step {mine.step}"
    text = f"the state of {name} {where}: {', '.join(names[:_NAMED])}{more}"
    return _Difference(text, _spoilt_text(mine.step))


def _spoilt_text(step: int) -> str:
    """Returns a text about the totals since the last comparison, if a state differs before this step; "": none."""
    first, last = (step - 1) // _EVERY * _EVERY + 1, step - 1
    if step <= _FIRST or first > last:
        return ""  # before the step that ended last, states were equal
    totals = f"total of step {last} may rest" if first == last else f"totals of steps {first} to {last} may rest"
    return f" (the {totals} on the wrong one)"


def error_of_wrong_call(worker: str, call: str) -> StepError:
    """Returns the error for a worker that got, for this call, a total which other workers made for another call."""
    return StepError(f"{worker} is at {call}, and other workers were at another call: {_DECIDE}")


def _lasting_error(found: Sequence[_Difference]) -> StateError | StepError:
    """Returns the error for workers that differ again just after they copied the state."""
    what = "; ".join(each.text for each in found)
    if all(each.of_calls for each in found):
        return StepError(f"{what}; they differed before, too: {_DECIDE}")
    return StateError(
        f"{what}; it did just before, too: name in run.state all that later steps and a break depend on, and let them "
        f"depend on nothing else: no clock, no rank, no generator of your own"
    )
