"""Detects user code that kills one node after another.

A successor computes the epoch in which its predecessor died. If user code ends the process (`os._exit`, a crash in an
extension, too much memory), the successor dies, too, and so would all nodes. The launcher of a node writes into
`gone/{node}` which user code ran when the process died; these records are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from taskgraph.protocol.records import GoneRecord, RunningCode
from taskgraph.protocol.view import JobView, Versioned

__all__ = ["DeadlyCode", "find_deadly_code"]


@dataclass(frozen=True, slots=True)
class DeadlyCode:
    """Code of one task in one epoch, and the nodes that died while it ran, with their records, oldest first."""

    task: int
    epoch: int
    deaths: dict[str, GoneRecord]

    def includes(self, ran: RunningCode) -> bool:
        """True if `ran` is code of this task: in this epoch, or on a node that was not its primary yet (epoch -1)."""
        return ran.task == self.task and ran.epoch in (self.epoch, -1)


def find_deadly_code(view: JobView, limit: int) -> DeadlyCode | None:
    """Finds the task and epoch during whose code the most nodes died; None if fewer than `limit` did.

    Deaths in committed epochs do not count, nor deaths in a `setup` that succeeded later, nor deaths by a command.
    """
    if view.epoch is None:
        return None
    at = view.epoch.record.epoch
    found: dict[tuple[int, int], dict[str, GoneRecord]] = {}
    for node in sorted(view.deaths_from(at), key=lambda node: view.gone[node].mod_revision):
        for place in _blamed(view, view.gone[node], at):
            found.setdefault(place, {})[node] = view.gone[node].record
    task, epoch = max(found, key=lambda place: (len(found[place]), -place[0]), default=(0, 0))
    deaths = found.get((task, epoch), {})
    return DeadlyCode(task, epoch, deaths) if len(deaths) >= limit else None


def _blamed(view: JobView, gone: Versioned[GoneRecord], at: int) -> Iterator[tuple[int, int]]:
    """Yields the (task, epoch) pairs for which a death counts while epoch `at` is at work."""
    for ran in () if gone.record.intended else gone.record.running_code:
        waits = ran.epoch < 0 and (at == 0 or gone.mod_revision > _last_admission(view, ran.task))
        if waits or ran.epoch >= at:
            yield ran.task, max(ran.epoch, at)


def _last_admission(view: JobView, task: int) -> int:
    """Returns the revision at which a node was last admitted to a task; 0: none was."""
    return max((member.create_revision for member in view.members_of(task).values()), default=0)
