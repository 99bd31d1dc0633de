"""Sums up what a failure cost: the many events of one failed node become one event, `failover`.

Each node reports what it sees and does: that it lost a node, took tasks over, admitted backups. An incident collects
these events for one failed node:

    open        a node was reported lost, or tasks were taken over from it
    moved       no task has it as its primary
    committed   an epoch committed after the last takeover
    backed up   every task has as many replicas as the job asks for, or as the nodes that are left allow
    finished    all of these, and no event for `_QUIET_S`, since events of other nodes come late

After `_SLOW_S` an incident is finished without a commit, too: epochs may take minutes. After `_LONG_S` it is finished
in any case. A node that was frozen may notice the failure after that: its report opens no second incident, unless tasks
were taken over again, or the failed node had come back as a backup.

The caller passes every event to `note_event`, every commit to `note_commit`, and calls `take_finished` often.
Times are those of the events, by the clocks of the nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from taskgraph.observe.events import Event, task_ids
from taskgraph.observe.format import counted, holders, tasks_text
from taskgraph.protocol.records import name_of
from taskgraph.protocol.view import JobView

__all__ = ["FAILOVER", "Incidents"]

FAILOVER = "failover"
_QUIET_S = 1.0
"""Longer than nodes gather events of one kind before they write them to etcd."""
_SLOW_S = 2.5
_LONG_S = 15.0
_COMMITS = 8192
"""Commits remembered. A failure is known after a second or two, in which a fast job commits some thousands."""
_MAX_NAMED = 8
"""Nodes named in a line."""
_REPORTED = 1024
"""Failed nodes remembered: many more than notice a failure late."""


@dataclass(slots=True)
class _Incident:
    """What the events say about one failed node. Times are those of events, except `opened_at` and `last_event_at`.

    Attributes:
        noticed_at: when the first node reported the failure.
        opened_at, last_event_at: when this process got the first and the latest event, by its own clock.
        moved: the tasks that other nodes took over.
        takers: the names of these nodes.
        last_takeover_at, last_admission_at: when a node last took a task over; when a backup was last admitted.
        restarted: epochs that started again.
        reported: `take_finished` has looked, after `_SLOW_S`, if all tasks have moved.
        undone: number of committed epochs between a checkpoint and the epoch from which the job went back to it.
    """

    node: str
    noticed_at: float
    opened_at: float
    last_event_at: float
    cause: str = ""
    moved: set[int] = field(default_factory=set)
    takers: set[str] = field(default_factory=set)
    last_takeover_at: float = 0.0
    last_admission_at: float = 0.0
    restarted: set[int] = field(default_factory=set)
    undone: int = 0
    reported: bool = False


class Incidents:
    """Collects the events of failed nodes, and sums them up.

    Args:
        tasks, backups: the job's numbers of tasks and of backups per task.
        clock: this process's clock, in seconds.
        services: how many of the tasks each service has, by its title.
    """

    def __init__(
        self, tasks: int, backups: int, clock: Callable[[], float], services: Mapping[str, int] | None = None
    ) -> None:
        self._tasks = tasks
        self._services = services or {}
        self._backups = backups
        self._clock = clock
        self._open: dict[str, _Incident] = {}
        self._commits: deque[float] = deque(maxlen=_COMMITS)
        self._reported: dict[str, None] = {}
        self._all_known = True  # no commit came before those of `_commits`, as one does if the job is followed later

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def note_event(self, event: Event) -> None:
        """Opens, extends or closes the incident of a node by an event. Events may come in any order."""
        if event.kind == FAILOVER:
            self._close(str(event.fields.get("node")))  # another follower of the job has reported it
        elif event.kind == "lost":
            if str(event.fields["lost"]) in self._reported:
                return
            incident = self._incident_of(event, "lost")
            if "lease" in event.fields or ": its lease ended" in event.text:
                incident.cause = "its lease ended"
            elif not incident.cause:
                incident.cause = event.text.partition(": ")[2]
        elif event.kind == "takeover" and event.fields.get("from"):
            incident = self._incident_of(event, "from")
            incident.moved.update(task_ids(event))
            incident.takers.add(event.node)
            incident.last_takeover_at = max(incident.last_takeover_at, float(event.fields.get("until", event.at)))
        elif event.kind == "admitted":
            self._reported.pop(str(event.fields.get("of")), None)
            for incident in self._open.values():
                incident.last_admission_at = max(incident.last_admission_at, float(event.fields.get("until", event.at)))
                incident.last_event_at = self._clock()
        elif event.kind == "restart" and event.epoch is not None:
            for incident in self._open.values():
                incident.restarted.add(event.epoch)
        elif event.kind == "rolled back" and event.epoch is not None:
            for incident in self._open.values():
                incident.undone = max(incident.undone, int(event.fields.get("until", 0)) - event.epoch)

    def _close(self, node: str) -> None:
        """Drops the incident of a node, and remembers that the failure was reported."""
        self._open.pop(node, None)
        self._reported[node] = None
        if len(self._reported) > _REPORTED:
            del self._reported[next(iter(self._reported))]

    def _incident_of(self, event: Event, field_name: str) -> _Incident:
        """Returns the incident of the node that a field of an event names; opens one if there is none."""
        node, now = str(event.fields[field_name]), self._clock()
        incident = self._open.setdefault(node, _Incident(node, event.at, now, now))
        incident.noticed_at, incident.last_event_at = min(incident.noticed_at, event.at), now
        return incident

    def note_commit(self, at: float, epoch: int = 0) -> None:
        """Notes that an epoch committed."""
        if not self._commits or len(self._commits) == _COMMITS:
            self._all_known = not self._commits and epoch == 0
        self._commits.append(at)

    def take_finished(self, view: JobView, *, over: bool = False) -> list[Event]:
        """Closes the incidents that are finished, and returns an event `failover` for each.

        Also returns an event `waits` for an open one whose tasks have not all moved after `_SLOW_S`, once.

        Args:
            over: the job has ended: closes all incidents.
        """
        now, found = self._clock(), []
        for node, incident in list(self._open.items()):
            lasted = now - incident.opened_at
            late = self._first_commit_after(incident) is None and lasted < _SLOW_S
            quiet = now - incident.last_event_at >= _QUIET_S
            if over or lasted >= _LONG_S or (quiet and not late and self._is_recovered(incident, view)):
                self._close(node)
                if incident.moved or not over:  # nodes leave when a job ends
                    found.append(self._to_event(incident, view, over=over))
            elif lasted >= _SLOW_S and not incident.reported:
                incident.reported = True
                if any(primary.record.node == node for primary in view.primaries.values()):
                    text = f"{_describe(incident, view)}: some of its tasks have not moved yet"
                    found.append(Event(incident.noticed_at, "launcher", "waits", text))
        return found

    def _is_recovered(self, incident: _Incident, view: JobView) -> bool:
        """True if the failed node is no primary, and every task has as many replicas as the nodes left allow.

        Of an elastic job: the failed node is no worker of the view.
        """
        if view.workers is not None:
            return all(worker != incident.node for worker, _ in view.workers.record.workers)
        if any(primary.record.node == incident.node for primary in view.primaries.values()):
            return False
        wanted = min(self._backups + 1, sum(node not in view.gone for node in view.nodes))
        return all(len(holders(view, task)) >= wanted for task in range(self._tasks))

    def _first_commit_after(self, incident: _Incident) -> float | None:
        """Returns the time of the first commit after the last takeover, or after the failure; None: there was none."""
        since = max(incident.noticed_at, incident.last_takeover_at)
        at = bisect_right(self._commits, since)
        return self._commits[at] if at < len(self._commits) else None

    def _to_event(self, incident: _Incident, view: JobView, *, over: bool) -> Event:
        """Returns the event `failover`, which says what an incident cost."""
        began, commit = incident.noticed_at, self._first_commit_after(incident)
        redone = len(incident.restarted) + incident.undone
        fields: dict[str, str | int | float] = {
            "node": incident.node,
            "cause": incident.cause,
            "tasks": len(incident.moved),
            "epochs_redone": redone,
        }
        parts = []
        if incident.last_takeover_at:
            fields["takeover_ms"] = _ms(incident.last_takeover_at - began)
        if commit is not None and (self._all_known or commit != self._commits[0]):  # else there may be one before it
            fields["next_commit_ms"] = _ms(commit - began)
            again = f", {counted(redone, 'epoch')} redone" if redone else ""
            next_one = "commit" if view.workers is None else "step"
            parts.append(f"next {next_one} after {commit - began:.2f} s{again}")
        elif commit is None and view.running and not over and view.workers is None:
            parts.append("no commit yet")
        lacking = self._unbacked(view)
        if not lacking and incident.last_admission_at >= began:
            fields["backed_up_ms"] = _ms(incident.last_admission_at - began)
            parts.append(f"all tasks backed up again after {incident.last_admission_at - began:.2f} s")
        elif lacking:
            parts.append(f"{tasks_text(lacking, self._tasks, self._services)} without a backup")
        what = _describe(incident, view)
        if incident.moved:
            takers = sorted(incident.takers)
            more = f" and {len(takers) - _MAX_NAMED} more" if len(takers) > _MAX_NAMED else ""
            moved = tasks_text(incident.moved, self._tasks, self._services)
            what += f": {moved} moved to {' '.join(takers[:_MAX_NAMED])}{more}"
        elif view.workers is not None:
            names = sorted(name_of(worker) for worker, _ in view.workers.record.workers if worker != incident.node)
            what += f": {' '.join(names[:_MAX_NAMED])} {'goes' if len(names) == 1 else 'go'} on" if names else ""
        else:
            what += ": no task was computed there" if not parts else ""
        return Event(began, "launcher", FAILOVER, "; ".join([what, *parts]), fields=fields)

    def _unbacked(self, view: JobView) -> list[int]:
        """Returns the tasks that have no backup; [] if the job asks for none, or does not run."""
        if not self._backups or not view.running:
            return []
        return [task for task in range(self._tasks) if len(holders(view, task)) < 2]


def _describe(incident: _Incident, view: JobView) -> str:
    """Says what happened to the failed node: `n1 died (SIGKILL)`."""
    name, gone = name_of(incident.node), view.gone.get(incident.node)
    cause = incident.cause
    if gone is not None and gone.record.died:
        cause = gone.record.reason.removeprefix("killed by ").replace("exited with code", "exit code")
        return f"{name} died ({cause})"
    verb = "does not answer" if cause.startswith(("its lease ended", "silent")) else "died"
    return f"{name} {verb}" + (f" ({cause})" if cause else "")


def _ms(seconds: float) -> int:
    return round(1000 * max(0.0, seconds))
