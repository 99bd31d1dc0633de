"""Where replicas should be: nodes, tasks and current holders in; wished replicas out.

Every node computes this same function of the same arguments; transactions make what follows from it safe, the
function only makes it good. What good means, the earlier the more it weighs:

    1. A task's replicas are on different nodes. A replica is only wished for on a seat, or stays where it is held.
    2. A task held by nobody, or with too few backups, gets what it lacks.
    3. Numbers of primaries per seat differ by at most 1.
    4. A task's replicas are on as many different hosts as there are.
    5. Numbers of replicas per seat differ by at most 1, unless hosts, devices or the identity of the primaries
       stand against it.
    6. Nothing moves that need not.

How. The plan starts as what is held. It is completed (tasks held by nobody in contiguous blocks, so that neighbors
in a ring or a tree are often on one node; missing backups on the seats with the fewest replicas) and then improved
step by step: a backup moves from a fuller seat to one with at least two replicas less; a primary changes places
with a backup of its task (a *hand-over*, which copies nothing), along a chain of tasks where one does not suffice;
and only where no chain of hand-overs is left a primary moves to a seat that holds nothing of its task.

Every step makes (sum of squares of primaries per seat, tasks short of hosts, sum of squares of replicas per seat)
smaller in lexicographic order. Hence it ends; and the outcome, once adopted, has no step left: placing again
changes nothing. Where replicas are even to 1, chains of hand-overs alone make the primaries even to 1: any n seats
have at most n * ceil(D / (backups + 1)) tasks all to themselves, D being the most replicas on one seat (Hall), and
a chain exists while a seat has two primaries more than another that it can reach (Harvey, Ladner, Lovasz, Tamir,
Semi-matchings for bipartite graphs, 2006).

So balance comes before holding, to the last primary. That is cheap: a member whose node left has to be replaced
by a copy anyway, and hand-overs are free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

__all__ = ["Holding", "Seat", "Wish", "place"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A node that may hold replicas: registered, not gone, not draining."""

    node: str
    host: str
    devices: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds a task now.

    Attributes:
        primary: the node etcd names as primary, in or out of `members`; it may be no seat (draining, or lost).
        members: the in-sync set in the order of admission, which is the order of succession.
    """

    primary: str | None
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """Who should hold a task.

    Attributes:
        primary: None where no node is eligible.
        backups: those that hold it already first, in the order of their admission.
    """

    primary: str | None
    backups: tuple[str, ...]


def place(
    seats: Sequence[Seat],
    tasks: int,
    backups: int,
    holdings: Mapping[int, Holding],
    needs_device: Callable[[int], bool] = lambda task: False,
    keep: frozenset[str] = frozenset(),
) -> dict[int, Wish]:
    """Wishes for each of `tasks` tasks one primary and up to `backups` backups.

    Args:
        seats: in any order; the result does not depend on it.
        holdings: current holders; a task that is not there is held by nobody.
        needs_device: whether a task's replicas need a seat with devices.
        keep: nodes that are absent and not known to be gone. What they hold stays theirs, as primary or as one of
            the backups asked for; they take nothing new, and their hosts are not known. Where a task has more
            members than asked for, theirs go first. A node that is also a seat is a seat.

    Returns:
        task -> wish, for all tasks. Fewer backups than asked for where there are fewer eligible nodes.
    """
    plan = _Plan(seats, tasks, backups, holdings, needs_device, keep)
    plan.lead_orphans()
    plan.lead_fresh()
    plan.trim()
    plan.fill()
    while True:
        plan.spread_hosts()
        plan.even_replicas()
        # All three must run: each may find a step after the others found none.
        steps = plan.hand_over(held_only=True) + plan.hand_over(held_only=False) + plan.even_primaries()
        if not steps:
            return plan.wishes()


class _Plan:
    """A complete assignment under improvement. Nodes are numbers: seats by node id, then kept nodes by node id."""

    def __init__(
        self,
        seats: Sequence[Seat],
        tasks: int,
        backups: int,
        holdings: Mapping[int, Holding],
        needs_device: Callable[[int], bool],
        keep: frozenset[str],
    ) -> None:
        by_id = {seat.node: seat for seat in seats}
        self.names = sorted(by_id)
        self.seats = len(self.names)  # numbers below are seats, from there on kept nodes
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
        self.held: list[list[int]] = [[] for _ in range(tasks)]
        self.led: list[set[int]] = [set() for _ in self.names]  # tasks by the node of their primary
        self.backed: list[set[int]] = [set() for _ in self.names]  # tasks by the nodes of their backups
        for task in range(tasks):
            holding = holdings.get(task)
            if holding is None:
                continue
            order = holding.members if holding.primary in holding.members else (holding.primary, *holding.members)
            held = [numbers[name] for name in dict.fromkeys(order) if name in numbers]
            self.held[task] = held = [i for i in held if self.eligible(task, i)]
            if holding.primary in numbers and numbers[holding.primary] in held:
                self.lead(task, numbers[holding.primary])
            for node in held:
                if node != self.primary[task]:
                    self.back(task, node)

    # -- the state ----------------------------------------------------------------------------------------------

    def eligible(self, task: int, node: int) -> bool:
        return self.has_device[node] or not self.needs[task]

    def eligible_seats(self, task: int) -> Sequence[int]:
        return self.device_seats if self.needs[task] else range(self.seats)

    def lead(self, task: int, node: int) -> None:
        self.primary[task] = node
        self.led[node].add(task)

    def back(self, task: int, node: int) -> None:
        self.backups[task].append(node)
        self.backed[node].add(task)

    def drop(self, task: int, node: int) -> None:
        self.backups[task].remove(node)
        self.backed[node].remove(task)

    def swap(self, task: int, backup: int) -> None:
        """Makes `backup` primary, and the primary a backup."""
        old = self.primary[task]
        self.drop(task, backup)
        self.led[old].remove(task)
        self.lead(task, backup)
        self.back(task, old)

    def holders(self, task: int) -> list[int]:
        return [self.primary[task], *self.backups[task]]

    def leads(self, node: int) -> int:
        return len(self.led[node])

    def replicas(self, node: int) -> int:
        return len(self.led[node]) + len(self.backed[node])

    def hosts_without(self, task: int, node: int) -> set[int]:
        return {self.hosts[i] for i in self.holders(task) if i != node}

    def duplicates_host(self, task: int, node: int) -> bool:
        """Whether `node` adds no host of its own to those of the task's other replicas."""
        return self.many_hosts and self.hosts[node] in self.hosts_without(task, node)

    def turn(self, task: int, node: int) -> int:
        """Breaks ties between seats: in a circle from the primary on, so that one node's backups are spread."""
        return (node - self.primary[task] - 1 - task) % max(1, self.seats - 1)

    # -- completing ---------------------------------------------------------------------------------------------

    def lead_orphans(self) -> None:
        """A task that lost its primary goes to a member; to one that is absent only where there is no other."""
        for task, held in enumerate(self.held):
            if self.primary[task] < 0 and held:
                heir = min(held, key=lambda i: (i >= self.seats, self.leads(i)))  # then by admission
                self.drop(task, heir)
                self.lead(task, heir)

    def lead_fresh(self) -> None:
        """Tasks held by nobody: even numbers on the seats, in contiguous blocks. The choosiest tasks first."""
        for needs, seats in ((True, self.device_seats), (False, list(range(self.seats)))):
            fresh = [t for t, p in enumerate(self.primary) if p < 0 and self.needs[t] is needs]
            if not fresh or not seats:
                continue
            heap = [(self.leads(i), i) for i in seats]
            heapify(heap)
            blocks = dict.fromkeys(seats, 0)
            for _ in fresh:
                count, seat = heap[0]
                blocks[seat] += 1
                heapreplace(heap, (count + 1, seat))
            rest = iter(fresh)
            for seat, count in blocks.items():
                for _ in range(count):
                    self.lead(next(rest), seat)

    def trim(self) -> None:
        """Lets surplus members go: absent ones, those on a host with another replica, those on the fullest seat."""
        for task, backups in enumerate(self.backups):
            while len(backups) >= self.size:
                self.drop(
                    task,
                    max(
                        reversed(backups),
                        key=lambda i: (i >= self.seats, self.duplicates_host(task, i), self.replicas(i)),
                    ),
                )

    def fill(self) -> None:
        """Adds missing backups: on another host, else on the seat with the fewest replicas."""
        loads = [self.replicas(i) for i in range(self.seats)]
        for task, primary in enumerate(self.primary):
            while primary >= 0 and len(self.backups[task]) < self.size - 1:
                taken = self.holders(task)
                free = [i for i in self.eligible_seats(task) if i not in taken]
                if not free:
                    break
                if self.many_hosts:
                    hosts = self.hosts_without(task, -1)
                    free = [i for i in free if self.hosts[i] not in hosts] or free
                least = min([loads[i] for i in free])
                seat = min((i for i in free if loads[i] == least), key=lambda i: self.turn(task, i))
                self.back(task, seat)
                loads[seat] += 1

    # -- improving ----------------------------------------------------------------------------------------------

    def spread_hosts(self) -> None:
        """Moves backups that share a host with another replica of their task to a host that has none."""
        if not self.many_hosts:
            return
        for task, backups in enumerate(self.backups):
            while True:
                taken = {self.hosts[i] for i in self.holders(task)}
                doubles = [i for i in backups if i < self.seats and self.duplicates_host(task, i)]
                free = [i for i in self.eligible_seats(task) if self.hosts[i] not in taken]
                if not doubles or not free:
                    break
                self.drop(task, max(doubles, key=lambda i: (i not in self.held[task], self.replicas(i))))
                self.back(task, min(free, key=lambda i: (self.replicas(i), self.turn(task, i))))

    def even_replicas(self) -> None:
        """Moves backups from fuller to emptier seats, as long as that makes the task no poorer in hosts."""
        while self._step(self.replicas, self._move_backup):
            pass

    def even_primaries(self) -> int:
        """Moves primaries to seats that hold nothing of their task, where no hand-over is left. Returns the steps."""
        steps = 0
        while self._step(self.leads, self._move_primary):
            steps += 1
        return steps

    def _step(self, load: Callable[[int], int], move: Callable[[int, int], bool]) -> bool:
        """One move from the fullest to the emptiest seat between which there is one."""
        loads = sorted((load(i), i) for i in range(self.seats))
        for most, full in sorted(loads, key=lambda x: (-x[0], x[1])):
            for least, empty in loads:
                if most - least < 2:
                    break
                if move(full, empty):
                    return True
        return False

    def _move_backup(self, full: int, empty: int) -> bool:
        best: tuple[bool, bool, int] | None = None
        for task in self.backed[full]:
            held = self.held[task]
            cost = (empty not in held, full in held, task)  # what the seat holds anyway, what is no copy yet
            if best is not None and cost >= best:
                continue
            if empty == self.primary[task] or empty in self.backups[task] or not self.eligible(task, empty):
                continue
            if self.many_hosts:
                others = self.hosts_without(task, full)
                if self.hosts[empty] in others and self.hosts[full] not in others:
                    continue
            best = cost
        if best is None:
            return False
        self.drop(best[2], full)
        self.back(best[2], empty)
        return True

    def _move_primary(self, full: int, empty: int) -> bool:
        able = [t for t in self.led[full] if self.eligible(t, empty) and empty not in self.backups[t]]
        if not able:
            return False
        task = min(able, key=lambda t: (empty not in self.held[t], t))
        self.back(task, empty)
        self.swap(task, empty)
        if len(self.backups[task]) >= self.size:
            seats = [i for i in self.backups[task] if i < self.seats]
            self.drop(task, max(seats, key=lambda i: (self.duplicates_host(task, i), self.replicas(i), i == full)))
        return True

    def hand_over(self, held_only: bool) -> int:
        """Hands primaries over along chains, from fuller to emptier seats. Returns the number of chains.

        With `held_only` only to members that are in sync already.
        """
        chains = 0
        while True:
            seats = sorted(range(self.seats), key=lambda i: (self.leads(i), i))
            most = self.leads(seats[-1]) if seats else 0
            if not any(self._chain(i, held_only) for i in seats if most - self.leads(i) >= 2):
                return chains
            chains += 1

    def _chain(self, empty: int, held_only: bool) -> bool:
        """The shortest chain that ends at `empty`, from a seat with at least two primaries more."""
        after: dict[int, tuple[int, int]] = {empty: (-1, -1)}  # seat -> (task it hands over, to which seat)
        ring = [empty]
        while ring:
            reached: list[int] = []
            for to in ring:
                for task in sorted(self.backed[to]):
                    giver = self.primary[task]
                    if giver < self.seats and giver not in after and (not held_only or to in self.held[task]):
                        after[giver] = (task, to)
                        reached.append(giver)
            if reached:
                full = max(reached, key=lambda i: (self.leads(i), -i))
                if self.leads(full) - self.leads(empty) >= 2:
                    while full != empty:
                        task, to = after[full]
                        self.swap(task, to)
                        full = to
                    return True
            ring = reached
        return False

    # -- the outcome --------------------------------------------------------------------------------------------

    def wishes(self) -> dict[int, Wish]:
        wishes: dict[int, Wish] = {}
        for task, primary in enumerate(self.primary):
            rank = {node: n for n, node in enumerate(self.held[task])}
            backups = sorted(self.backups[task], key=lambda i: (rank.get(i, len(rank)), i))
            wishes[task] = Wish(self.names[primary] if primary >= 0 else None, tuple(self.names[i] for i in backups))
        return wishes
