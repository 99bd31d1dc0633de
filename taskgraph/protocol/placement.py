"""Computes the wanted replicas of all tasks from the nodes and the current replicas.

All nodes compute the same function of the same arguments. Transactions keep its consequences safe, so a wish may be bad
but not wrong. The goals, most important first:

    1. The replicas of a task are on different nodes. A wanted replica is on a seat, or where it is now.
    2. A task without a replica, or with too few backups, gets them.
    3. The numbers of primaries per seat differ by at most 1.
    4. So do, among seats with devices, the numbers of primaries that need a device.
    5. The replicas of a task are on as many different hosts as possible.
    6. The numbers of replicas per seat differ by at most 1, or more if hosts or devices require it. They may differ by
       2 if no single move helps.
    7. Nothing moves without need.

The plan starts with the current replicas. First it is completed: tasks without a replica are dealt in contiguous
blocks, so that neighbors in a ring or a tree are often on one node; missing backups go to the seats with the fewest
replicas. Then it is improved step by step:

    - a backup moves from a seat to one with at least two replicas less;
    - a primary changes places with a backup of its task (a *hand-over*, which copies nothing), also in chains of tasks;
    - if no chain is left, a primary moves to a seat without a replica of its task;
    - a primary that needs a device changes places with one that needs none.

Termination: every step makes this tuple smaller in lexicographic order: (sum of squares of primaries per seat, sum of
squares of those that need a device, tasks short of hosts, sum of squares of replicas per seat). An adopted plan has no
step left, so placing again changes nothing. If the replicas differ by at most 1, chains of hand-overs alone even out
the primaries: any n seats have at most n * ceil(D / (backups + 1)) tasks to themselves, where D is the most replicas of
a seat (Hall), and a chain exists while a reachable seat has two primaries less (Harvey, Ladner, Lovasz, Tamir,
Semi-matchings for bipartite graphs, 2006). So balance comes before staying. It costs little: hand-overs copy nothing,
and a lost member has to be replaced anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapreplace
from itertools import pairwise

from taskgraph.protocol.assignment import Assignment, CurrentReplicas, Seat, Wish

__all__ = ["CurrentReplicas", "Seat", "Wish", "place"]


def place(
    seats: Sequence[Seat],
    tasks: int,
    backups: int,
    holdings: Mapping[int, CurrentReplicas],
    needs_device: Callable[[int], bool] = lambda task: False,
    keep: frozenset[str] = frozenset(),
) -> dict[int, Wish]:
    """Decides on one primary and up to `backups` backups for each of `tasks` tasks.

    Args:
        seats: in any order; the result does not depend on it.
        holdings: current replicas; a missing task has none.
        needs_device: the replicas of a task need a seat with devices.
        keep: nodes that are absent, but not known to be gone. They keep their replicas, and get no new ones; their
            hosts are not known. If a task has too many members, theirs are dropped first. A seat that is in `keep`,
            too, counts as a seat.

    Returns:
        task -> wish, for all tasks. There are fewer backups if there are not enough eligible nodes.
    """
    plan = _Plan(seats, tasks, backups, holdings, needs_device, keep)
    plan.replace_lost_primaries()
    plan.place_new_tasks()
    plan.trim()
    plan.fill()
    while True:
        plan.spread_hosts()
        plan.even_out_replicas()
        # All must run: each may find a step after the others found none.
        steps = plan.hand_over(held_only=True) + plan.hand_over(held_only=False) + plan.even_out_primaries()
        steps += plan.even_out_devices()
        if not steps:
            return plan.wishes()


class _Plan(Assignment):
    """An assignment with the steps that complete and improve it."""

    # -- completing -------------------------------------------------------------------------------

    def replace_lost_primaries(self) -> None:
        """Makes a current replica primary of each task without a primary; one on a node in `keep` only if need be."""
        for task, held in enumerate(self.current):
            if self.primary[task] < 0 and held:
                successor = min(held, key=lambda i: (i >= self.seats, self.primary_count(i)))  # then by admission
                self.drop_backup(task, successor)
                self.set_primary(task, successor)

    def place_new_tasks(self) -> None:
        """Gives tasks without a replica a primary: contiguous blocks for each seat, tasks that need a device first."""
        for needs, eligible in ((True, self.device_seats), (False, range(self.seats))):
            fresh = [t for t, p in enumerate(self.primary) if p < 0 and self.needs[t] is needs]
            if eligible:
                blocks = _deal_evenly([(self.primary_count(i), i) for i in eligible], len(fresh))
                for task, seat in zip(fresh, (i for i in eligible for _ in range(blocks[i])), strict=True):
                    self.set_primary(task, seat)

    def trim(self) -> None:
        """Drops surplus backups: those on nodes in `keep` first, then on a host with another replica, then on the
        fullest seat."""
        for task, backups in enumerate(self.backups):
            while len(backups) >= self.size:
                self.drop_backup(
                    task,
                    max(
                        reversed(backups),
                        key=lambda i: (i >= self.seats, self.duplicates_host(task, i), self.replica_count(i)),
                    ),
                )

    def fill(self) -> None:
        """Adds missing backups: on another host, else on the seats with the fewest replicas.

        Each seat gets a share. Each task then takes the first seat of its circle with a share left. An admitted backup
        removes one share and changes no other wish, so wishes stay the same while nodes fulfil them.
        """
        lacking = [t for t, p in enumerate(self.primary) if p >= 0 for _ in range(self.size - len(self.holders(t)))]
        shares = _deal_evenly([(self.replica_count(i), i) for i in range(self.seats)], len(lacking))
        for task in lacking:
            taken = self.holders(task)
            free = [i for i in self.eligible_seats(task) if i not in taken]
            if self.many_hosts:
                hosts = self.hosts_without(task, -1)
                free = [i for i in free if self.hosts[i] not in hosts] or free
            if free:
                seat = min(free, key=lambda i: (shares[i] <= 0, self.tie_break(task, i)))
                self.add_backup(task, seat)
                shares[seat] -= 1

    # -- improving --------------------------------------------------------------------------------

    def spread_hosts(self) -> None:
        """Moves backups from a host with another replica of their task to a host without one."""
        if not self.many_hosts:
            return
        for task, backups in enumerate(self.backups):
            while True:
                taken = {self.hosts[i] for i in self.holders(task)}
                doubles = [i for i in backups if i < self.seats and self.duplicates_host(task, i)]
                free = [i for i in self.eligible_seats(task) if self.hosts[i] not in taken]
                if not doubles or not free:
                    break
                self.drop_backup(task, max(doubles, key=lambda i: (i not in self.current[task], self.replica_count(i))))
                self.add_backup(task, min(free, key=lambda i: (self.replica_count(i), self.tie_break(task, i))))

    def even_out_replicas(self) -> None:
        """Moves backups from fuller to emptier seats, unless their task would be on fewer hosts."""
        while self._make_move(self.replica_count, self._move_backup):
            pass

    def even_out_primaries(self) -> int:
        """Moves primaries from fuller seats to emptier ones without a replica of the task. Returns how many moved."""
        steps = 0
        while self._make_move(self.primary_count, self._move_primary):
            steps += 1
        return steps

    def _make_move(self, load: Callable[[int], int], move: Callable[[int, int], bool]) -> bool:
        """Makes one `move`, from the seat with the most `load` possible to the one with the least; False: none."""
        loads = sorted((load(i), i) for i in range(self.seats))
        for most, fuller in sorted(loads, key=lambda x: (-x[0], x[1])):
            for least, emptier in loads:
                if most - least < 2:
                    break
                if move(fuller, emptier):
                    return True
        return False

    def _move_backup(self, fuller: int, emptier: int) -> bool:
        """Moves a backup between these seats. Returns False if none can be moved."""
        backed = self.backups_at[fuller]
        # First tasks that need no new copy: the emptier seat has them now, or the fuller one does not.
        for tasks in (backed & self.replicas_at[emptier], backed - self.replicas_at[fuller], backed):
            for task in sorted(tasks):
                if self._can_move_backup(task, fuller, emptier):
                    self.drop_backup(task, fuller)
                    self.add_backup(task, emptier)
                    return True
        return False

    def _can_move_backup(self, task: int, backup: int, to: int) -> bool:
        if to == self.primary[task] or to in self.backups[task] or not self.is_eligible(task, to):
            return False
        if not self.many_hosts:
            return True
        others = self.hosts_without(task, backup)
        return self.hosts[to] not in others or self.hosts[backup] in others

    def _move_primary(self, fuller: int, emptier: int) -> bool:
        """Moves a primary between these seats, if the emptier has no backup of the task. Returns False if none can."""
        able = [t for t in self.primaries_at[fuller] if self.is_eligible(t, emptier) and emptier not in self.backups[t]]
        if not able:
            return False
        self._relocate(min(able, key=lambda t: (emptier not in self.current[t], t)), emptier)
        return True

    def _relocate(self, task: int, to: int) -> None:
        """Makes `to` primary. If it is a backup, the two change places. Otherwise the old primary becomes a backup, in
        place of a surplus one."""
        old = self.primary[task]
        if to in self.backups[task]:
            self.hand_over_primary(task, to)
            return
        self.add_backup(task, to)
        self.hand_over_primary(task, to)
        if len(self.backups[task]) >= self.size:
            seats = [i for i in self.backups[task] if i < self.seats]
            most = max(seats, key=lambda i: (self.duplicates_host(task, i), self.replica_count(i), i == old))
            self.drop_backup(task, most)

    def even_out_devices(self) -> int:
        """Evens out the primaries that need a device. Returns how many moved.

        Each moves from the seat with the most to the seat with the fewest. If that one has as many primaries already,
        it gives one that needs no device in return. There is one, since fewer of its primaries need a device.
        """
        load = {i: sum(self.needs[t] for t in self.primaries_at[i]) for i in self.device_seats}
        steps = 0
        while load:
            fuller = max(load, key=lambda i: (load[i], -i))
            emptier = min(load, key=lambda i: (load[i], i))
            if load[fuller] - load[emptier] < 2:
                break
            in_return = self.primary_count(emptier) >= self.primary_count(fuller)
            self._relocate(self._cheapest_task(fuller, emptier, needs=True), emptier)
            if in_return:
                self._relocate(self._cheapest_task(emptier, fuller, needs=False), fuller)
            load[fuller] -= 1
            load[emptier] += 1
            steps += 1
        return steps

    def _cheapest_task(self, giver: int, to: int, needs: bool) -> int:
        """Returns the task, of those that do or do not need a device, whose primary moves to `to` at the least cost."""
        able = (t for t in self.primaries_at[giver] if self.needs[t] is needs)
        return min(able, key=lambda t: (to not in self.current[t], to not in self.backups[t], t))

    def hand_over(self, held_only: bool) -> int:
        """Hands primaries over along chains from fuller to emptier seats. Returns the number of chains.

        With `held_only`, primaries move to current replicas only, not to planned ones.
        """
        hand_overs = _HandOvers(self, held_only)
        chains = 0
        while True:
            seats = sorted(range(self.seats), key=lambda i: (self.primary_count(i), i))
            most = self.primary_count(seats[-1]) if seats else 0
            targets = (i for i in seats if most - self.primary_count(i) >= 2)
            chain = next((c for i in targets if (c := self._chain(i, hand_overs))), None)
            if chain is None:
                return chains
            for giver, to in pairwise(chain):
                task = min(hand_overs.tasks[to][giver])
                hand_overs.remove_task(task)
                self.hand_over_primary(task, to)
                hand_overs.add_task(task)
            chains += 1

    def _chain(self, emptier: int, hand_overs: _HandOvers) -> list[int] | None:
        """Finds the shortest chain of seats to `emptier` from one with at least two primaries more; None: none."""
        after = {emptier: -1}
        ring = [emptier]
        while ring:
            reached: list[int] = []
            for to in ring:
                for giver, tasks in hand_overs.tasks[to].items():
                    if tasks and giver not in after:
                        after[giver] = to
                        reached.append(giver)
            fuller = max(reached, key=lambda i: (self.primary_count(i), -i), default=emptier)
            if self.primary_count(fuller) - self.primary_count(emptier) >= 2:
                chain = [fuller]
                while chain[-1] != emptier:
                    chain.append(after[chain[-1]])
                return chain
            ring = sorted(reached)  # the outcome must not depend on the history of a dict
        return None


class _HandOvers:
    """Indexes the possible hand-overs: `tasks[to][giver]` are the tasks that `giver` can hand over to `to`."""

    def __init__(self, plan: _Plan, held_only: bool) -> None:
        self._plan = plan
        self._held_only = held_only
        self.tasks: list[dict[int, set[int]]] = [{} for _ in range(plan.seats)]
        for task in range(len(plan.primary)):
            self.add_task(task)

    def add_task(self, task: int) -> None:
        for to, giver in self._possible(task):
            self.tasks[to].setdefault(giver, set()).add(task)

    def remove_task(self, task: int) -> None:
        for to, giver in self._possible(task):
            self.tasks[to][giver].remove(task)

    def _possible(self, task: int) -> list[tuple[int, int]]:
        """Returns the hand-overs of the task, (to, giver)."""
        giver = self._plan.primary[task]
        if not 0 <= giver < self._plan.seats:
            return []  # the primary is absent
        held = self._plan.current[task]
        return [
            (to, giver)
            for to in self._plan.backups[task]
            if to < self._plan.seats and (not self._held_only or to in held)
        ]


def _deal_evenly(loads: list[tuple[int, int]], number: int) -> dict[int, int]:
    """Distributes `number` replicas to seats, as (load, seat), so that loads become even. Returns seat -> share."""
    shares = {seat: 0 for _, seat in loads}
    heap = sorted(loads)
    for _ in range(number if heap else 0):
        load, seat = heap[0]
        shares[seat] += 1
        heapreplace(heap, (load + 1, seat))
    return shares
