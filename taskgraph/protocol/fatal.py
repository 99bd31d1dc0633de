"""Has the code of one task ended the processes of several nodes, in the same epoch?

A successor repeats the epoch that its predecessor died in. Where the code itself ends its process (`os._exit`, a crash
in an extension, more memory than there is), the successor dies of it, too, and so would every node there is. What ran
when a process died its launcher writes into `gone/{node}`; these records are the count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from taskgraph.protocol.records import GoneRecord, Ran
from taskgraph.protocol.view import JobView, Versioned

__all__ = ["Fatal", "blamed", "fatal"]


@dataclass(frozen=True, slots=True)
class Fatal:
    """The nodes that died while the code of this task ran, in this epoch: their records by their ids, oldest first."""

    task: int
    epoch: int
    deaths: dict[str, GoneRecord]

    def counts(self, ran: Ran) -> bool:
        """Whether this is what they died of, of all that ran."""
        return ran.task == self.task and ran.epoch in (self.epoch, -1)


def fatal(view: JobView, limit: int) -> Fatal | None:
    """Where so many nodes died of the same; the most there are, where other code ran beside it each time.

    What went through in the end does not count any more: epochs that are committed, set-ups before that of a
    backup that is there.
    """
    if view.epoch is None:
        return None
    at = view.epoch.record.epoch
    found: dict[tuple[int, int], dict[str, GoneRecord]] = {}
    for node in sorted(view.deaths_from(at), key=lambda node: view.gone[node].mod_revision):
        for place in blamed(view, view.gone[node], at):
            found.setdefault(place, {})[node] = view.gone[node].record
    task, epoch = max(found, key=lambda place: (len(found[place]), -place[0]), default=(0, 0))
    deaths = found.get((task, epoch), {})
    return Fatal(task, epoch, deaths) if len(deaths) >= limit else None


def blamed(view: JobView, gone: Versioned[GoneRecord], at: int) -> Iterator[tuple[int, int]]:
    """For what a death counts while epoch `at` is at work: tasks and epochs."""
    for ran in () if gone.record.meant else gone.record.ran:
        waits = ran.epoch < 0 and (at == 0 or gone.mod_revision > _last_admission(view, ran.task))
        if waits or ran.epoch >= at:
            yield ran.task, max(ran.epoch, at)


def _last_admission(view: JobView, task: int) -> int:
    return max((member.create_revision for member in view.members_of(task).values()), default=0)
