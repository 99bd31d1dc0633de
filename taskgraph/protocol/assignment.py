"""The assignment of tasks to nodes, as numbers: the state that `placement` changes.

It has the eligible nodes and the host of each node, and keeps its indexes consistent. `placement` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Assignment", "CurrentReplicas", "Seat", "Wish"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A node that may get replicas: registered, not gone, not draining. `devices`: the number of its CUDA devices."""

    node: str
    host: str
    devices: int = 0


@dataclass(frozen=True, slots=True)
class CurrentReplicas:
    """The current replicas of a task.

    Attributes:
        primary: the primary in etcd; None: the task never had one. It may be missing in `members`, and may be no seat
            (draining or lost).
        members: the nodes in sync that are not evicted, in the order of admission, which is the order of succession.
    """

    primary: str | None
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """The wanted replicas of a task.

    Attributes:
        primary: the wanted primary; None if no node is eligible.
        backups: current replicas first, in the order of admission.
    """

    primary: str | None
    backups: tuple[str, ...]


class Assignment:
    """A plan of which nodes have the replicas of each task; it starts with the current ones. Arguments as in `place`.

    Nodes are numbers: seats first, then the nodes in `keep`; -1: no primary.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        tasks: int,
        backups: int,
        holdings: Mapping[int, CurrentReplicas],
        needs_device: Callable[[int], bool],
        keep: frozenset[str],
    ) -> None:
        by_id = {seat.node: seat for seat in seats}
        self.names = sorted(by_id)
        self.seats = len(self.names)  # smaller numbers are seats, others are kept nodes
        self.names += sorted(keep - by_id.keys())
        numbers = {name: i for i, name in enumerate(self.names)}
        host_names = sorted({seat.host for seat in seats})
        host_numbers = {host: i for i, host in enumerate(host_names)}
        self.hosts = [host_numbers[by_id[n].host] if n in by_id else -1 - i for i, n in enumerate(self.names)]
        self.many_hosts = len(host_names) > 1
        self.size = backups + 1
        self.device_seats = [i for i in range(self.seats) if by_id[self.names[i]].devices > 0]
        self.has_device = [n not in by_id or by_id[n].devices > 0 for n in self.names]
        self.needs = [needs_device(t) for t in range(tasks)]
        self.primary = [-1] * tasks
        self.backups: list[list[int]] = [[] for _ in range(tasks)]
        self.current: list[list[int]] = [[] for _ in range(tasks)]  # current replicas by admission; constant
        self.replicas_at: list[set[int]] = [set() for _ in self.names]  # tasks by the nodes of their current replicas
        self.primaries_at: list[set[int]] = [set() for _ in self.names]  # tasks by the node of their primary
        self.backups_at: list[set[int]] = [set() for _ in self.names]  # tasks by the nodes of their backups
        for task in range(tasks):
            holding = holdings.get(task)
            if holding is None:
                continue
            order = holding.members if holding.primary in holding.members else (holding.primary, *holding.members)
            held = [numbers[name] for name in dict.fromkeys(order) if name in numbers]
            self.current[task] = held = [i for i in held if self.is_eligible(task, i)]
            if holding.primary in numbers and numbers[holding.primary] in held:
                self.set_primary(task, numbers[holding.primary])
            for node in held:
                self.replicas_at[node].add(task)
                if node != self.primary[task]:
                    self.add_backup(task, node)

    # -- the state --------------------------------------------------------------------------------

    def is_eligible(self, task: int, node: int) -> bool:
        """True if the node may have replicas of the task: it needs no device, or the node has one or is in `keep`."""
        return self.has_device[node] or not self.needs[task]

    def eligible_seats(self, task: int) -> Sequence[int]:
        return self.device_seats if self.needs[task] else range(self.seats)

    def set_primary(self, task: int, node: int) -> None:
        self.primary[task] = node
        self.primaries_at[node].add(task)

    def add_backup(self, task: int, node: int) -> None:
        self.backups[task].append(node)
        self.backups_at[node].add(task)

    def drop_backup(self, task: int, node: int) -> None:
        self.backups[task].remove(node)
        self.backups_at[node].remove(task)

    def hand_over_primary(self, task: int, backup: int) -> None:
        """Makes `backup` primary, and the primary a backup."""
        old = self.primary[task]
        self.drop_backup(task, backup)
        self.primaries_at[old].remove(task)
        self.set_primary(task, backup)
        self.add_backup(task, old)

    def holders(self, task: int) -> list[int]:
        """Returns the planned nodes of the task's replicas, its primary (-1: none) first."""
        return [self.primary[task], *self.backups[task]]

    def primary_count(self, node: int) -> int:
        return len(self.primaries_at[node])

    def replica_count(self, node: int) -> int:
        return len(self.primaries_at[node]) + len(self.backups_at[node])

    def hosts_without(self, task: int, node: int) -> set[int]:
        """Returns the hosts of the task's replicas, except of the one on `node`."""
        return {self.hosts[i] for i in self.holders(task) if i != node}

    def duplicates_host(self, task: int, node: int) -> bool:
        """True if another replica of the task is on the host of `node`."""
        return self.many_hosts and self.hosts[node] in self.hosts_without(task, node)

    def tie_break(self, task: int, seat: int) -> int:
        """Returns a sort key among equally good seats: task t prefers seat t, t + 1, ... modulo the number of seats."""
        return (seat - task) % self.seats

    # -- the outcome ------------------------------------------------------------------------------

    def wishes(self) -> dict[int, Wish]:
        wishes: dict[int, Wish] = {}
        for task, primary in enumerate(self.primary):
            rank = {node: n for n, node in enumerate(self.current[task])}
            backups = sorted(self.backups[task], key=lambda i: (rank.get(i, len(rank)), i))
            wishes[task] = Wish(self.names[primary] if primary >= 0 else None, tuple(self.names[i] for i in backups))
        return wishes
