"""kill, drain, shutdown, forget, token: commands that act on a job."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path

from taskgraph.clusters.placed import etcd_has_ended, find_placed, forget_placed
from taskgraph.commands.common import (
    FoundJob,
    NotSubmitted,
    access_of,
    ended_text,
    etcd_of,
    find_entry,
    reach,
    see_also_text,
)
from taskgraph.coordination.opening import opened
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, JobError, PeerLost, TaskGraphError, TransportError, UnknownJob
from taskgraph.launch import forget as forgetting
from taskgraph.launch.follow import Follower, client_of
from taskgraph.launch.runtime import Runtime
from taskgraph.node.usercode import lastwords
from taskgraph.observe.format import counted, ids_text, tasks_text
from taskgraph.observe.screen import say
from taskgraph.protocol.keys import NAME_RULE, is_name
from taskgraph.protocol.reach import host_of, unix_socket
from taskgraph.protocol.records import NodeRecord, name_of
from taskgraph.protocol.shared import holds_state
from taskgraph.protocol.takeover import remaining_nodes, sole_copies
from taskgraph.protocol.view import JobView
from taskgraph.system import host
from taskgraph.transport.endpoints import host_key

__all__ = [
    "can_signal",
    "drain",
    "drain_risk",
    "forget",
    "kill",
    "kill_risk",
    "shutdown",
    "signal_here",
    "signal_number",
    "signal_process",
    "token",
]


_DRAINS = (signal.SIGTERM, signal.SIGINT)
_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_HARMLESS = (signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH)


async def _read_view(reached: FoundJob) -> JobView:
    """Reads the job's view from etcd, once."""
    keeper = ViewKeeper(reached.coordinator, reached.name, refresh_s=0.1)
    await keeper.load()
    return keeper.view


def _check_running(reached: FoundJob, view: JobView) -> None:
    """Raises UnknownJob if the job has ended."""
    if not view.running:
        how = ended_text(view.status.record.state if view.status else "deleted")
        raise UnknownJob(f"job {reached.name!r} has ended ({how}): see {see_also_text(reached.name)}")


def signal_number(text: str) -> signal.Signals:
    """Parses a signal: `SIGKILL`, `KILL`, `kill` or `9` give SIGKILL; raises JobError."""
    try:
        if text.isdigit():
            return signal.Signals(int(text))
        name = text.upper()
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except (KeyError, ValueError):
        raise JobError(f"--signal {text}: no such signal; e.g. KILL, TERM, STOP, CONT") from None


async def kill(options: argparse.Namespace) -> int:
    """Sends a signal to the node of a task's primary or backup, or to a named node.

    Raises:
        JobError: the job would fail, and --force is not given.
    """
    number = signal_number(options.signal)
    async with reach(options) as reached:
        reached.spec.check_protocol()
        view = await _read_view(reached)
        _check_running(reached, view)
        node, what = _find_target(options, view, reached.spec)
        record = view.nodes[node].record
        risk, fails = kill_risk(view, reached.spec, node, number)
        if fails and not options.force:
            status = f"`taskgraph status {reached.name}`"
            more = "another worker" if reached.spec.elastic else "one more in sync"
            can_wait = reached.spec.backups or reached.spec.elastic
            instead = f"wait until {status} shows {more}, or " if can_wait else ""
            if instead and not remaining_nodes(view, reached.spec.run, node):
                instead = f"start another node (`taskgraph launch {reached.name}`) and {instead}"
            raise JobError(f"{risk}: {instead}kill it with --force")
        try:
            async with client_of(record, reached.entry.token_bytes, reached.entry.node_access) as client:
                await client.kill(number)
        except PeerLost:
            if not signal_here(record, number):
                raise
        print(f"sent {number.name} to {record.name} (process {record.pid} on {record.host}), {what}")
        if risk:
            say(risk)
    return 0


def kill_risk(view: JobView, spec: JobSpec, node: str, number: signal.Signals) -> tuple[str, bool]:
    """Returns the warning about a signal to this node ("": no state is at risk), and whether the job would fail.

    Only a node that alone has a task's state can cost anything.
    """
    if number in _HARMLESS:
        return "", False
    again = number in _DRAINS and view.nodes[node].record.draining  # the second such signal ends a node at once
    if number in _DRAINS and not again:
        return drain_risk(view, spec, node), False
    if not (has := _sole_state(view, spec, node)):
        return "", False
    at, pointer = view.stamp.epoch if view.stamp is not None else 0, view.checkpoint
    then = "the job fails"
    if pointer is not None:
        then = f"the job goes back to its checkpoint of {spec.unit} {pointer.record.epoch}"
        then += "" if spec.elastic else f" (it is at epoch {at})"
    if pointer is not None and not remaining_nodes(view, spec.run, node):
        then += " once another node is there; without --replace its launcher fails the job"
    if again:
        return f"{has}, and the node is leaving: a second {number.name} may end it at once: {then}", pointer is None
    if number in _STOPS:
        return (
            f"{has}: if the node is stopped for longer than {spec.setting('lost_after_s'):g} s (lost_after_s), {then}",
            False,
        )
    return f"{has}: {then}", pointer is None


def _sole_state(view: JobView, spec: JobSpec, node: str) -> str:
    """Describes the state that only this node has, and that cannot be made again; "": there is none."""
    if view.workers is not None:
        workers = {worker for worker, _ in view.workers.record.workers}
        others = [worker for worker in workers - {node} if worker in view.nodes and worker not in view.gone]
        return f"only {name_of(node)} has the state" if node in workers and not others else ""
    alone = [task for task in range(spec.tasks) if view.primaries.get(task) and _is_only_holder(view, task, node)]
    if not alone or view.stamp is None or view.stamp.epoch == 0 or view.is_checkpointed:
        return ""  # boundary 0 can be made again, and files have that of the checkpoint
    return f"only {name_of(node)} has the state of task{'s' * (len(alone) > 1)} {ids_text(alone)}"


def _is_only_holder(view: JobView, task: int, node: str) -> bool:
    """Returns True if no other registered node has the task's state."""
    others = [n for n in view.in_sync(task) if n != node and n in view.nodes and n not in view.gone]
    return holds_state(view, task) and node in view.in_sync(task) and not others


def can_signal(record: NodeRecord) -> bool:
    """Returns True if we can signal the node: it is on this host, of our user, not the first process of a container."""
    if _socket_folder(record) is None or record.pid == 1:
        return False
    with contextlib.suppress(ProcessLookupError):  # `signal_here` reports that it has ended
        try:
            os.kill(record.pid, 0)
        except PermissionError:
            return False
    return True


def _socket_folder(record: NodeRecord) -> Path | None:
    """Returns the folder with the sockets of a node; None: the node runs on another host."""
    here = host_of(host_key())
    for endpoint in record.control.split("|"):
        key, path = unix_socket(endpoint)
        if host_of(key) == here:
            return Path(path).parent
    return None


def signal_here(record: NodeRecord, number: signal.Signals) -> bool:
    """Signals a node of this host that does not answer, for example a stopped one (SIGSTOP).

    Returns:
        False if the node runs on another host.

    Raises:
        JobError: its process has ended.
        TransportError: the process is another user's, or the first process of a container, which the kernel spares.
    """
    folder = _socket_folder(record)
    if folder is None:
        return False
    if record.pid == 1 and number in (signal.SIGKILL, signal.SIGSTOP):
        raise TransportError(
            f"{record.name} does not answer, and is the first process (pid 1) of its container, which no "
            f"{number.name} from within reaches: end the container"
        )
    try:
        if number == signal.SIGKILL:
            lastwords.mark_intended(folder)
        there = signal_process(record.pid, number)
    except PermissionError as error:
        raise TransportError(
            f"{record.name} (process {record.pid}) is another user's: only that user, or root, can send it a signal"
        ) from error
    if not there:
        raise JobError(f"{record.name} (process {record.pid}) has ended")
    return True


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Sends a signal to a process of taskgraph; False: there is none with that id."""
    if host.has_proc() and "taskgraph" not in host.command(pid):
        return False  # the process has ended, or another one has its id
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _find_target(options: argparse.Namespace, view: JobView, spec: JobSpec) -> tuple[str, str]:
    """Returns the node to signal, and its role in words.

    Raises:
        JobError: the options name no node, an unknown one, or contradict each other.
        TransportError: the task has no such node at the moment.
    """
    if spec.elastic:
        if options.node is None or options.task is not None or options.backup:
            raise JobError("the workers of an elastic job have no tasks: give --node NAME alone")
        node = _node_named(view, options.node)
        workers = [worker for worker, _ in view.workers.record.workers] if view.workers is not None else []
        return node, f"one of {counted(len(workers), 'worker')}" if node in workers else "which is no worker yet"
    if options.task is None:
        if options.backup:
            raise JobError("--backup goes with --task T: a node of one of its backups")
        if options.node is None:
            raise JobError("give --task T (its primary), --task T --backup, or --node NAME")
        node = _node_named(view, options.node)
        primaries = [t for t in range(spec.tasks) if view.primary_node(t) == node]
        return node, f"primary of {tasks_text(primaries, spec.tasks, spec.services)}"
    if not 0 <= options.task < spec.tasks:
        raise JobError(f"--task {options.task}: the job has tasks 0 to {spec.tasks - 1}")
    primary = view.primary_node(options.task)
    backups = [n for n in view.in_sync(options.task) if n != primary and n in view.nodes]
    if options.node is not None:
        node = _node_named(view, options.node)
        if node not in (backups if options.backup else [primary]):
            raise JobError(_contradiction(options, view, primary, backups, node))
        return node, f"a backup of task {options.task}" if options.backup else f"the primary of task {options.task}"
    if options.backup:
        if not backups and spec.backups == 0:
            raise JobError(f"task {options.task} has no backup in sync (the job has backups=0)")
        if not backups:
            raise TransportError(f"task {options.task} has no backup in sync at the moment")
        return backups[0], f"a backup of task {options.task}"
    if primary is None or primary not in view.nodes:
        raise TransportError(f"task {options.task} has no living primary at the moment")
    return primary, f"the primary of task {options.task}"


def _contradiction(
    options: argparse.Namespace, view: JobView, primary: str | None, backups: list[str], node: str
) -> str:
    """Returns why the named node does not have the named role for the task, and which nodes have it."""

    def shown_name(holder: str) -> str:
        return view.nodes[holder].record.name if holder in view.nodes else name_of(holder)

    what = "a backup in sync" if options.backup else "the primary"
    holders = f"its primary is {shown_name(primary)}" if primary is not None else "it has no primary at the moment"
    in_sync = (
        f"its backups in sync are {', '.join(map(shown_name, backups))}" if backups else "it has no backup in sync"
    )
    if options.backup or node not in backups:
        instead = "give --node alone to signal this node in any case"
    else:
        instead = "add --backup"
    return (
        f"--task {options.task} and --node {options.node} contradict each other: {shown_name(node)} is not {what} of "
        f"task {options.task}: {holders}, {in_sync}; {instead}"
    )


def _node_named(view: JobView, name: str) -> str:
    """Returns the id of the node with this name or id. Raises JobError unless there is exactly one."""
    found = [node for node, v in view.nodes.items() if name in (node, v.record.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise JobError(f"several nodes are called {name!r}: give the id, {' or '.join(sorted(found))}")
    known = ", ".join(sorted(name_of(node) for node in view.nodes)) or "none"
    raise JobError(f"no node is called {name!r}; registered: {known}")


async def drain(options: argparse.Namespace) -> int:
    """Asks a node to hand its tasks over and leave."""
    async with reach(options) as reached:
        reached.spec.check_protocol()
        view = await _read_view(reached)
        _check_running(reached, view)
        node = _node_named(view, options.node)
        record, risk = view.nodes[node].record, drain_risk(view, reached.spec, node)
        if risk and not options.force:
            raise JobError(f"{risk}: start one first (`taskgraph launch {reached.name}`), or drain it with --force")
        async with client_of(record, reached.entry.token_bytes, reached.entry.node_access) as client:
            await client.drain("taskgraph drain")
        print(f"{record.name} (process {record.pid} on {record.host}) {drain_text(view, reached.spec, node)}")
        if risk:
            say(risk)
    return 0


def drain_text(view: JobView, spec: JobSpec, node: str) -> str:
    """Describes what a node does when it is drained, as the predicate of a sentence."""
    if not spec.elastic:
        return "hands its tasks over and leaves"
    if view.workers is None or node not in {worker for worker, _ in view.workers.record.workers}:
        return "leaves: it is no worker yet"
    others = {worker for worker, _ in view.workers.record.workers} - {node} - view.gone.keys()
    if any(other in view.nodes and not view.nodes[other].record.draining for other in others):
        return "leaves before its next part"
    if spec.checkpoint is not None:
        return "leaves once a checkpoint is complete, or another worker has the state"
    return f"leaves once another worker has the state: start one with `taskgraph launch {spec.name}`"


def drain_risk(view: JobView, spec: JobSpec, node: str) -> str:
    """Returns which tasks are lost if this node leaves and no other node comes; "" if none."""
    alone = sole_copies(view, spec.tasks, node)
    if not alone or remaining_nodes(view, spec.run, node):
        return ""
    tasks = f"task{'s' * (len(alone) > 1)} {ids_text(alone)}"
    return (
        f"only {name_of(node)} has {tasks}: the state is lost when the node leaves, after at most "
        f"{spec.setting('drain_s'):g} s (drain_s), unless another node is there by then"
    )


async def shutdown(options: argparse.Namespace) -> int:
    """Ends a job without a result, and removes what a launcher (`--on`) made for it."""
    from taskgraph.commands.placing import is_placed, may_remove, remove, stop

    try:
        await _cancel(options)
    except NotSubmitted as error:
        if not is_placed(options):
            raise
        say(str(error))
        await remove(options)
        with contextlib.suppress(NotSubmitted):
            await _cancel(options)  # it was submitted meanwhile
    except (UnknownJob, CoordinationError) as error:
        if not is_placed(options) or not await may_remove(options):
            raise
        say(str(error))  # what the launcher made is removed all the same
    if is_placed(options):
        print(await stop(options))
    return 0


async def _cancel(options: argparse.Namespace) -> None:
    """Sets the job's status in etcd to cancelled, unless the job has ended; prints which of the two."""
    async with reach(options) as reached:
        options.job = reached.name
        follower = Follower(reached.coordinator, reached.spec, b"")
        ended = await follower.cancel_job("shut down by `taskgraph shutdown`")
        print(f"job {reached.name} {'was ended' if ended else 'had ended already'}")


async def forget(options: argparse.Namespace) -> int:
    """Deletes what etcd keeps of ended jobs. If one of them is refused, the others are deleted all the same."""
    refused: list[TaskGraphError] = []
    for name in options.job:
        placed = find_placed(name) if etcd_of(options) is None else None
        if placed is not None and etcd_has_ended(placed):
            forget_placed(name)
            print(f"job {name} is forgotten: its etcd had ended with it")
            continue
        try:
            etcd, access = _etcd_of_job(options, name)
            async with opened(etcd, access) as coordinator:
                count = await forgetting.forget(coordinator, name)
        except (JobError, UnknownJob) as error:
            refused.append(error)
            continue
        forget_placed(name)
        here = "; this host keeps its copy" if Runtime().find_finished(name) is not None else ""
        print(f"job {name} is forgotten by etcd at {etcd} ({count} key{'s' * (count > 1)}){here}")
    for why in refused[:-1]:
        say(str(why))
    if refused:
        raise refused[-1]
    return 0


def _etcd_of_job(options: argparse.Namespace, name: str) -> tuple[str, dict[str, str]]:
    """Returns the etcd that keeps a job, and the access to it.

    Raises:
        JobError: this is no name of a job, or its etcd is unknown.
    """
    if not is_name(name):
        raise JobError(f"{name!r} cannot be the name of a job: {NAME_RULE}")
    if (etcd := etcd_of(options)) is not None:
        return etcd, access_of(options)
    if (placed := find_placed(name)) is not None and placed.etcd:
        return placed.etcd, placed.tls
    known = Runtime().find_any(name)
    if known is None or (known.embedded and known.stale):
        raise JobError(
            f"job {name!r}: give its etcd with --etcd. A run without --etcd leaves nothing in an etcd, and this host "
            f"drops its copies of old jobs by itself"
        )
    return known.etcd, known.tls


def token(options: argparse.Namespace) -> int:
    """Prints the token of a job of this host, for its nodes on other hosts."""
    entry = Runtime().find_killed(options.job) if options.job and etcd_of(options) is None else None
    if entry is None or entry.embedded:  # with an etcd of its own, a job outlives a killed launcher
        entry = find_entry(options)
    if not entry.token:
        raise JobError(f"the token of job {entry.name!r} is not known here: `taskgraph submit` wrote it to a file")
    print(entry.token)
    return 0
