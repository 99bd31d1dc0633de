"""The answer of `taskgraph status`: is the job fast, is it safe, what does it wait for.

The first lines answer these questions, in at most 24 lines for any number of tasks; a row per task comes on demand.
No line is wider than 80 columns, unless a name is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from taskgraph.errors import JobError, TaskGraphError, first_names
from taskgraph.observe.events import Event
from taskgraph.observe.format import (
    counted,
    cut_lines,
    holders,
    ids_text,
    last_epoch_text,
    reason_text,
    split_services,
    table,
)
from taskgraph.observe.incidents import FAILOVER
from taskgraph.observe.screen import cut, one_line, printable, width, wrap
from taskgraph.observe.status import NoAnswer, NodeStatus, ReplicaStatus
from taskgraph.protocol.records import JobStatus, NodeRecord, name_of
from taskgraph.protocol.shared import holds_state
from taskgraph.protocol.view import JobView
from taskgraph.settings import Settings

__all__ = ["StatusData", "missing_backups_text", "no_node_text", "reason_lines", "status_text"]

_COLUMNS = 80
_NODES = 6
"""Nodes that are listed, unless tasks are asked for: with the other lines that is less than a screen."""
_ID = len("GPU-8932f937")
"""Characters of a device's UUID that are shown; CUDA accepts them as a name."""
_MAX_NAMED = 8
"""Nodes or task ids that a line names."""
_SLOWEST = 3
_REASON_LINES = 8
_PROBLEMS, _LINES = 2, 3
"""Warnings that are shown, and lines of each."""
_RECENT_S = 2.0
"""A commit that is older is mentioned."""
_SILENT_TEXT = "busy (a failover of many tasks takes seconds), stopped, or not reachable from here"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusData:
    """The data that `taskgraph status` shows of a job.

    Attributes:
        statuses: node -> its answer, or the error in place of an answer.
        tasks: how many tasks the job has, with those of services.
        services: how many of them each service has, by its title, in the order of their ids.
        elastic: the job is elastic.
        commits: the newest commits, as the leader reported them.
        kept: the events that etcd keeps.
        etcd_s: how long etcd took for an answer.
        launched: the words after `taskgraph launch` that start nodes for the job; "": its name.
        no_node_text: what to say if no node is registered.
        logs: the folder with the logs of the nodes that this host started.
        now: the time, in seconds since 1970.
    """

    name: str
    tasks: int
    epochs: int | None
    backups: int
    view: JobView
    statuses: Mapping[str, NodeStatus | TaskGraphError]
    services: Mapping[str, int] = field(default_factory=dict)
    elastic: bool = False
    commits: Sequence[Event] = ()
    kept: Sequence[Event] = ()
    etcd_s: float | None = None
    launched: str = ""
    no_node_text: str = "no nodes are registered"
    logs: str = ""
    now: float = field(default_factory=time.time)

    @property
    def primary_statuses(self) -> list[tuple[str, ReplicaStatus]]:
        """(name of the node, status) of each primary, as the nodes reported them."""
        said = [s for s in self.statuses.values() if isinstance(s, NodeStatus)]
        return [(s.name, r) for s in said for r in s.replicas if r.role == "primary"]

    def primary(self, task: int) -> ReplicaStatus | None:
        """Returns the status of a task's primary, as its node reported it; None: no node did."""
        said = self.statuses.get(self.view.primary_node(task) or "")
        if not isinstance(said, NodeStatus):
            return None
        return next((replica for replica in said.replicas if replica.task == task), None)


def status_text(picture: StatusData, shown: Sequence[int] = ()) -> str:
    """Formats the status of a job.

    Args:
        shown: tasks that get a row each.
    """
    view = picture.view
    lines = [*_head(picture), *_numbers(picture)]
    if not view.nodes:
        lines += ["", *_wrap(picture.no_node_text)]
        if view.status and not view.running:
            return "\n".join(lines)
    else:
        lines += [*_safety(picture), *_node_table(picture, None if shown else _NODES), *_waiting(picture)]
    if shown:
        lines += ["", *_task_table(picture, shown)]
    more = "" if shown else "more: --tasks, --task 3-7, --json" if not picture.elastic else "more: --json"
    logs = f"logs: {picture.logs}" if picture.logs else ""
    if more or logs:
        one = "; ".join(filter(None, (more, logs)))
        lines += [one] if len(one) <= _COLUMNS else [more, logs]
    return "\n".join(lines)


def _head(picture: StatusData) -> list[str]:
    """Returns the first lines: name, state, epoch or step, pace, and why the job failed."""
    view = picture.view
    state = view.status.record.state if view.status else "unknown"
    words = [picture.name, state + _running_since(picture)]
    if view.stamp and state == JobStatus.FINISHED:
        words.append(f" {counted(view.stamp.epoch, 'sum' if picture.elastic else 'epoch')}")
    elif picture.elastic:
        words += _step(picture)
    elif view.stamp:
        attempt = f", attempt {view.stamp.attempt}" if view.stamp.attempt > 1 else ""
        words.append(f" epoch {view.stamp.epoch}{last_epoch_text(picture.epochs)}{attempt}")
    else:
        words.append(" no epoch")
    if view.running:
        words += [f" {word}" for word in _pace(picture)]
    return ["  ".join(words), *reason_lines(view.status.record.reason if view.status else "")]


def reason_lines(reason: str) -> list[str]:
    """Returns why a job failed or was ended, as lines: of a long reason, as with the ends of logs, the two ends."""
    lines = printable(reason).strip().split("\n")
    if left_out := len(lines[_REASON_LINES:]):
        lines[1 : left_out + 2] = [f"... {counted(left_out + 1, 'line')} more: --json"]
    return [f"  {line}" for line in lines] if reason else []


def _step(picture: StatusData) -> list[str]:
    """Returns which step the workers of an elastic job are at, or from where the next ones go on."""
    statuses = [s for s in picture.statuses.values() if isinstance(s, NodeStatus)]
    if steps := [s.stamp[1] for s in statuses if s.stamp is not None]:
        return [f" step {max(steps)}"]
    checkpoint = picture.view.checkpoint
    if checkpoint is not None:
        return [f" checkpoint of sum {checkpoint.record.epoch}"]
    known = statuses or not picture.statuses  # perhaps no worker answers, for want of the token
    return [" no step yet"] if known and picture.view.running else []


def _running_since(picture: StatusData) -> str:
    """Returns for how long a running job has run, as text; "" if that is not known."""
    began = next((event.at for event in picture.kept if event.kind == "began"), None)
    return f" {_duration(picture.now - began)}" if began is not None and picture.view.running else ""


def _pace(picture: StatusData) -> list[str]:
    """Returns words for how fast the job is, how long it will take, and how old the last commit is, if that is old."""
    commits = picture.commits
    if not commits:
        return []
    words, last = [], commits[-1]
    spent, epochs = last.at - commits[0].at, (last.epoch or 0) - (commits[0].epoch or 0)
    rate = epochs / spent if spent > 0 else 0.0
    if rate > 0:
        words.append(f"{rate:.1f}/s" if rate >= 1 else f"one in {1 / rate:.1f} s")
        if picture.epochs is not None:
            words.append(f"left {_duration((picture.epochs - 1 - (last.epoch or 0)) / rate)}")
    if picture.now - last.at > _RECENT_S:
        words.append(f"last commit {_duration(picture.now - last.at)} ago")
    return words


def _duration(seconds: float) -> str:
    """Formats a duration: `0:07`, `4:12`, `1:04:12`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _numbers(picture: StatusData) -> list[str]:
    """Returns lines with the numbers of the last epoch, and the failures so far."""
    numbers = ""
    if picture.commits:
        pairs = picture.commits[-1].fields.items()
        shown = [f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in islice(pairs, 4 * _MAX_NAMED)]
        numbers = cut(one_line("  ".join(shown)), _COLUMNS)
    failures = [event for event in picture.kept if event.kind == FAILOVER]
    if not failures:
        return [numbers] if numbers else []
    last = failures[-1]
    words = [counted(len(failures), "failover"), time.strftime("%H:%M:%S", time.localtime(last.at))]
    if (commit_ms := last.fields.get("next_commit_ms")) is not None:
        words.append(f"{float(commit_ms) / 1000:.2f} s")
    at = "at" if len(failures) == 1 else "the last at"
    text = f"{words[0]}, {at} {', '.join(words[1:])}"
    both = f"{numbers}   {text}"
    return [both] if numbers and width(both) <= _COLUMNS else [line for line in (numbers, text) if line]


def _safety(picture: StatusData) -> list[str]:
    """Returns the line `ok`, or warnings (`WARN`) with what to do."""
    view, backups = picture.view, picture.backups
    live = [node for node in view.nodes if node not in view.gone]
    answering = sum(1 for node in live if isinstance(picture.statuses.get(node), NodeStatus))
    words = []
    if view.workers is not None:
        count = len(view.workers.record.workers)
        words.append(f"{counted(count, 'worker')}: {'each has' if count > 1 else 'it alone has'} the whole state")
    elif picture.elastic:
        words.append("no workers yet")
    elif backups:
        words.append(_backed_up_text(picture))
    else:
        words.append("no backups (backups=0): the tasks of a node that dies are lost")
    words.append(f"{answering}/{len(live)} nodes answer")
    if picture.etcd_s is not None:
        words.append(f"etcd {1000 * picture.etcd_s:.1f} ms")
    problems = _silent_nodes(picture)
    if view.running and (
        lacking := missing_backups_text(
            view, picture.launched or picture.name, picture.tasks, backups, services=picture.services
        )
    ):
        problems.insert(0, lacking)
    mark = "WARN" if problems else "ok  "
    lines = [f"{mark} {'   '.join(words)}"]
    for text in problems[:_PROBLEMS]:
        lines += _wrap(text, "     ")[:_LINES]
    if left_out := len(problems[_PROBLEMS:]):
        lines.append(f"     and {counted(left_out, 'reason')} more: --json")
    return lines


def _backed_up_text(picture: StatusData) -> str:
    """Says which tasks have all their backups: `4/4 tasks backed up, and queue images`."""
    lacking = [task for task in range(picture.tasks) if len(holders(picture.view, task)) <= picture.backups]
    own, without = split_services(lacking, picture.tasks, picture.services)
    tasks = picture.tasks - sum(picture.services.values())
    services = f", but not {first_names(without, 2)}" if without else ""
    if picture.services and not without:
        services = f", and {first_names(list(picture.services), 2)}"
    return f"{tasks - len(own):,}/{tasks:,} tasks backed up{services}"


def _wrap(text: str, indent: str = "") -> list[str]:
    """Breaks a text into lines of at most 80 columns."""
    return [indent + line for part in text.split("\n") for line in wrap(part, _COLUMNS - len(indent))]


def _node_table(picture: StatusData, most: int | None) -> list[str]:
    """Returns a table of nodes: of `most` nodes, with those that do not answer; None: of all."""
    view, statuses = picture.view, picture.statuses
    primaries, backups = dict.fromkeys(view.nodes, 0), dict.fromkeys(view.nodes, 0)
    for task in range(picture.tasks):
        first = view.primary_node(task)
        if first in primaries:
            primaries[first] += 1
        for node in holders(view, task):
            if node != first and node in backups:
                backups[node] += 1
    some = any(v.record.devices for v in view.nodes.values())
    workers = {worker for worker, _ in view.workers.record.workers} if view.workers is not None else set()
    outside = "waits" if view.workers is None else "enters"
    what = ["WORKER"] if picture.elastic else ["PRIMARY", "BACKUP"]
    rows = [["NODE", "STATE", "MEMORY", *what, *(["DEVICES"] if some else []), "PID", "HOST"]]
    in_order = sorted(view.nodes, key=lambda node: (isinstance(statuses.get(node), NodeStatus), node))
    shown = in_order if most is None else in_order[:most]
    for node in sorted(shown):
        record, said = view.nodes[node].record, statuses.get(node)
        rows.append(
            [
                record.name,
                _node_state(said, record),
                f"{said.usage.memory_bytes >> 20} MiB" if isinstance(said, NodeStatus) else "-",
                *(f"{count[node]:,}" for count in (primaries, backups) if not picture.elastic),
                *(["yes" if node in workers else outside] if picture.elastic else []),
                *([" ".join(i[:_ID] for i in record.device_ids) or "-"] if some else []),
                str(record.pid),
                record.host,
            ]
        )
    lines = cut_lines(table(rows), _COLUMNS)
    left_out = len(in_order) - len(shown)
    return [*lines, *([f"... and {counted(left_out, 'node')} more, which answer: --tasks, --json"] if left_out else [])]


def _node_state(said: NodeStatus | TaskGraphError | None, record: NodeRecord) -> str:
    """Describes a node's state, or why it did not answer."""
    if isinstance(said, JobError):
        return "not asked"
    if isinstance(said, NoAnswer):
        return f"no answer in {said.within_s:g} s"
    if isinstance(said, TaskGraphError):
        return "does not answer"
    states = (("leader", said and said.leader), ("paused", said and said.paused), ("draining", record.draining))
    return ", ".join(word for word, on in states if on) or "ok"


def _silent_nodes(picture: StatusData) -> list[str]:
    """Returns why nodes do not answer: one line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for node, said in sorted(picture.statuses.items()):
        if isinstance(said, TaskGraphError) and node in picture.view.nodes:
            why = _SILENT_TEXT if isinstance(said, NoAnswer) else reason_text(said)
            by_reason.setdefault(why, []).append(picture.view.nodes[node].record.name)
    return [f"{first_names(names, _MAX_NAMED)}: {why}" for why, names in by_reason.items()]


def _waiting(picture: StatusData) -> list[str]:
    """Says what the job waits for: the leader's findings if an epoch is slow, else the task at work longest."""
    found = [w for said in picture.statuses.values() if isinstance(said, NodeStatus) for w in said.waits]
    working = sorted(
        ((node, replica) for node, replica in picture.primary_statuses if replica.processor),
        key=lambda each: -each[1].running_s,
    )
    waiting = [(node, replica) for node, replica in picture.primary_statuses if replica.waits and not replica.processor]
    lines = []
    if found:
        lines += cut_lines([f"waits for  {one_line(found[0])}"], _COLUMNS)
        if len(found) > 1:
            lines += cut_lines([f"           {one_line(found[1])}"], _COLUMNS)
        if len(found) > 2:
            lines.append(f"           and {len(found) - 2:,} more")
    elif working:
        node, replica = working[0]
        others = f"; {counted(len(waiting), 'task')} wait" if waiting else ""
        text = f"task {replica.task} {replica.processor!r} on {node}, running {_short_time(replica.running_s)}{others}"
        lines += cut_lines([f"waits for  {one_line(text)}"], _COLUMNS)
    elif waiting:
        node, replica = waiting[0]
        others = f"; {counted(len(waiting), 'task')} wait" if len(waiting) > 1 else ""
        text = f"task {replica.task} on {node}: {replica.waits[0]}{others}"
        lines += cut_lines([f"waits for  {one_line(text)}"], _COLUMNS)
    if len(working) > 1:
        slow = (f"{replica.task} ({node}) {_short_time(replica.running_s)}" for node, replica in working[:_SLOWEST])
        lines += cut_lines([f"slowest    {'   '.join(slow)}"], _COLUMNS)
    return lines


def _short_time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _task_table(picture: StatusData, shown: Sequence[int]) -> list[str]:
    """Returns a table of these tasks."""
    view = picture.view
    rows = [["TASK", "PRIMARY", "BACKUPS", "TERM", "DOING"]]
    for task in shown:
        first = view.primary_node(task)
        rows.append(
            [
                " ".join([str(task), *split_services([task], picture.tasks, picture.services)[1]]),
                name_of(first) if first else "-",
                " ".join(name_of(node) for node in holders(view, task) if node != first) or "-",
                str(view.term(task)),
                _activity(picture.primary(task)),
            ]
        )
    return cut_lines(table(rows), _COLUMNS)


def _activity(replica: ReplicaStatus | None) -> str:
    """Describes what a task's primary runs or waits for."""
    if replica is None:
        return "-"
    if replica.processor:
        return f"{replica.processor}, {_short_time(replica.running_s)}"
    return "; ".join(replica.waits[:2]) or "-"


def no_node_text(
    view: JobView,
    name: str,
    *,
    expected: int = 0,
    launcher: int | None = None,
    lost_after_s: float = Settings().lost_after_s,
) -> str:
    """Says that no node is registered, why that may be so, and what to do.

    Args:
        expected: how many nodes were started with the job.
        launcher: the process of this host that starts nodes for the job, if there is one.
    """
    none = "no nodes are registered"
    if not view.running:
        return none
    if view.workers is not None:
        return f"{none}{_lost_workers_text(view, name, lost_after_s)}"
    members = {
        node
        for task in view.primaries
        if holds_state(view, task)
        for node in view.in_sync(task)
        if node not in view.gone
    }
    if members:
        names = first_names(sorted(map(name_of, members)), _MAX_NAMED)
        return (
            f"{none}. {names} had the state of the tasks, and {'has' if len(members) == 1 else 'have'} lost contact "
            f"with etcd.\nA node that is only cut off comes back by itself: look first which processes live.\n"
            f"If you launch new nodes, they give up absent ones after {lost_after_s:g} s (lost_after_s), with their "
            f"state:\n{_after_loss(view, name)}"
        )
    started = bool(view.primaries)
    many = "nodes" if started or not expected else counted(expected, "node")
    if launcher is not None:
        return f"{none} yet: its launcher (process {launcher}) is starting {many}"
    if expected and not started:
        return (
            f"{none} yet: it was submitted by a run that starts {many}, on another host or here.\n"
            f"If that run has ended: `taskgraph launch {name}` starts some"
        )
    return f"{none}: start some with `taskgraph launch {name}`"


def _lost_workers_text(view: JobView, name: str, lost_after_s: float) -> str:
    """Says what became of the workers of an elastic job, and what happens if new ones are started."""
    assert view.workers is not None
    absent = sorted(name_of(worker) for worker, _ in view.workers.record.workers if worker not in view.gone)
    launch, checkpoint = f"`taskgraph launch {name}`", view.checkpoint
    then = f"goes on from its checkpoint of sum {checkpoint.record.epoch}" if checkpoint else "fails: no checkpoint"
    if not absent:
        return f": all workers have ended, and the state with them.\nIf you start new nodes ({launch}), the job {then}"
    return (
        f". {first_names(absent, _MAX_NAMED)} had the state, and {'has' if len(absent) == 1 else 'have'} lost contact "
        f"with etcd.\nA worker that is only cut off comes back by itself: look first which processes live.\n"
        f"If you start new nodes ({launch}), they give up absent workers after {lost_after_s:g} s (lost_after_s), and "
        f"the job {then}"
    )


def _after_loss(view: JobView, name: str) -> str:
    """Says what happens to the job if its tasks' state is lost, and what to do if all nodes died."""
    at, checkpoint = view.stamp.epoch if view.stamp else 0, view.checkpoint
    if at and (checkpoint is None or checkpoint.record.epoch > at):
        return f"the job fails then. If all are dead: `taskgraph shutdown {name}` ends it"
    what = f"goes on from its checkpoint of epoch {checkpoint.record.epoch}" if at and checkpoint else "begins anew"
    return f"the job {what}. If all are dead: `taskgraph launch {name}`"


def missing_backups_text(
    view: JobView, name: str, tasks: int, backups: int, *, services: Mapping[str, int] | None = None
) -> str:
    """Says which tasks have too few backups, and what to do; "" if all tasks have enough."""
    have = {task: len(holders(view, task)) - (view.primary_node(task) in holders(view, task)) for task in range(tasks)}
    lacking = [task for task, count in have.items() if count < backups]
    nodes = sum(1 for node, v in view.nodes.items() if node not in view.gone and not v.record.draining)
    if backups == 0 or not lacking:
        return ""
    what = "no backup" if all(have[task] == 0 for task in lacking) else f"fewer than {backups} backups"
    own, names = split_services(lacking, tasks, services or {})
    ids = ids_text(own)
    which = f"task{'s' * (len(own) != 1)} {ids}" if len(ids) < _COLUMNS // 2 else f"{len(own):,} tasks of {tasks:,}"
    whose = " and ".join([*([which] if own else []), *names])
    whose += " has" if len(own) + len(names) == 1 else " have"
    if nodes <= backups:
        there = f"there {'is' if nodes == 1 else 'are'} {nodes}"
        return f"{whose} {what}: that takes {backups + 1} nodes, and {there}: start more with `taskgraph launch {name}`"
    return f"{whose} {what} at the moment: more are made as soon as a node can take them"
