"""status, events, result: commands that look."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import uvloop
from msgspec import structs

from taskgraph.clusters.placed import find_kept_by, find_placed
from taskgraph.commands.common import FoundJob, check_launcher, etcd_of, known_at, reach, wait_until_launcher_gone
from taskgraph.commands.placing import waiting
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, JobError, TaskGraphError, Unavailable, UnknownJob
from taskgraph.launch.access import configured
from taskgraph.launch.follow import client_of, find_kept, follow_events, kept_events, node_statuses
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.observe.events import Event
from taskgraph.observe.format import clock_text, counted, ended_status_json, fit_screen, status_json
from taskgraph.observe.incidents import Incidents
from taskgraph.observe.queues_text import set_aside_text
from taskgraph.observe.screen import one_line, say, takes_codes
from taskgraph.observe.status import NodeStatus
from taskgraph.observe.status_text import StatusData, no_node_text, reason_lines, status_text
from taskgraph.protocol.records import JobStatus
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import alongside, any_done

__all__ = ["events", "print_event", "print_values", "result", "show_again", "status", "statuses_of"]

_WATCH_S = 1.0
_COMMITS = 100
"""Commits from which the rate is taken."""
_REFRESH_S = 0.3
_LAST_EVENT_S = 1.0
_COLLECT_S = 60.0
_PRINTED = 2
"""`events --follow` remembers this many times `events_kept` printed events, so that it can print at the end what etcd
kept beside them."""
_CORRUPTING = ("3.5.0", "3.5.1", "3.5.2")


def _find_kept_here(options: argparse.Namespace) -> KeptJob | None:
    """Returns this host's record of an ended job; None: it has none, the job runs here, or the options name an etcd."""
    runtime = Runtime()
    if etcd_of(options) is not None or not options.job or runtime.find(options.job) is not None:
        return None
    placed = find_placed(options.job)
    if placed is not None and "kept" in placed.where:
        return find_kept_by(placed)
    return runtime.find_finished(options.job)


def status(options: argparse.Namespace) -> int:
    """Shows how fast and how safe a job is, and what it waits for."""
    kept = _find_kept_here(options)
    if kept is not None:
        _print_finished(options.job, kept, as_json=options.json)
        return 0
    try:
        return uvloop.run(_status(options))
    except (Unavailable, UnknownJob) as error:
        if options.job:
            from taskgraph.commands.placing import waiting

            for line in uvloop.run(waiting(options.job)):  # perhaps nothing runs yet
                error.add_note(line)
        raise


async def _status(options: argparse.Namespace) -> int:
    """Prints the status once, or with --watch until the job ends."""
    async with reach(options) as reached:
        shown = _tasks_of(options, reached.spec)
        keeper = ViewKeeper(reached.coordinator, reached.name, refresh_s=0.1)
        away = False
        while (kept := _kept_if_launcher_ended(reached.entry)) is None:
            asked_at, began = time.strftime("%H:%M:%S"), time.monotonic()
            try:
                await keeper.load()
            except CoordinationError as error:
                if _kept_if_launcher_ended(reached.entry) is not None:
                    continue
                if not options.watch or not isinstance(error, Unavailable):
                    raise
                if not away:
                    say(f"etcd has not answered since {asked_at} ({error}); trying again")
                away = True
                await asyncio.sleep(_WATCH_S)
                continue
            away = False
            etcd_s, spec, view = time.monotonic() - began, reached.spec, keeper.view
            statuses = await statuses_of(reached, view)
            if options.json:
                found = status_json(
                    spec.name, spec.tasks, spec.epochs, view, statuses, services=spec.services, elastic=spec.elastic
                )
                text = json.dumps(found)
            else:
                text = status_text(await _collect_status(reached, view, statuses, etcd_s), shown) + _etcd_warning(
                    reached
                )
                if view.running:
                    text = "\n".join([text, *map(one_line, await waiting(reached.name))])
            show_again(text, on_screen=options.watch and not options.json)
            if not options.watch or not keeper.view.running:
                return 0
            await asyncio.sleep(_WATCH_S)
    _print_finished(reached.name, kept, as_json=options.json)
    return 0


def show_again(text: str, *, on_screen: bool) -> None:
    """Prints a text: on a terminal in place of the one before.

    Args:
        on_screen: False: each text has lines of its own, as in a pipe.
    """
    if on_screen and takes_codes(sys.stdout):
        size = shutil.get_terminal_size()
        text = fit_screen(text, size.columns, size.lines - 1)  # the cursor takes the last line
        print("\x1b[H\x1b[2J", end="")
    print(text, flush=True)


def _tasks_of(options: argparse.Namespace, spec: JobSpec) -> Sequence[int]:
    """Returns the tasks of `--task 3-7,12`, or all of them with `--tasks`."""
    tasks = spec.tasks
    if spec.elastic and (options.task or options.tasks):
        raise JobError("--tasks, --task: the workers of an elastic job have no tasks; leave the option out")
    if not options.task:
        return range(tasks) if options.tasks else ()
    found: list[int] = []
    for part in options.task.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
            raise JobError(f"--task {options.task}: write numbers of tasks, such as 5 or 3-7,12")
        found += range(int(first), int(last or first) + 1)[: tasks + 1]
    if wrong := [task for task in found if task >= tasks]:
        raise JobError(f"--task {wrong[0]}: the job has tasks 0 to {tasks - 1}")
    return found


async def _collect_status(
    reached: FoundJob, view: JobView, statuses: Mapping[str, NodeStatus | TaskGraphError], etcd_s: float
) -> StatusData:
    """Collects what `taskgraph status` shows: the arguments, commits from the leader, events from etcd."""
    spec, logs, launched = reached.spec, Runtime().logs(reached.name), _launched_as(reached)
    leader = next((node for node, said in statuses.items() if isinstance(said, NodeStatus) and said.leader), None)
    commits: list[Event] = []
    if leader is not None:
        with contextlib.suppress(TaskGraphError):  # the status is useful without the rate
            entry = reached.entry
            async with client_of(view.nodes[leader].record, entry.token_bytes, entry.node_access) as client:
                recent = [event async for event, _ in client.events(follow=False, last=_COMMITS)]
                commits = [event for event in recent if event.kind == "commit"]
    kept = await kept_events(reached.coordinator, reached.name)
    incidents = Incidents(spec.tasks, spec.backups, time.monotonic, spec.services)
    for event in kept:
        incidents.note_event(event)
    for commit in commits:
        incidents.note_commit(commit.at, commit.epoch or 0)
    return StatusData(
        name=spec.name,
        tasks=spec.tasks,
        epochs=spec.epochs,
        services=spec.services,
        elastic=spec.elastic,
        backups=spec.backups,
        view=view,
        statuses=statuses,
        commits=commits,
        kept=[*kept, *incidents.take_finished(view, over=True)],
        etcd_s=etcd_s,
        no_node_text=_no_node_text(reached, view, launched),
        launched=launched,
        logs=str(logs) if logs is not None else "",
    )


def _no_node_text(reached: FoundJob, view: JobView, launched: str) -> str:
    """Returns what `taskgraph status` says if no node is registered."""
    spec, known = reached.spec, known_at(reached.name, reached.entry.etcd, reached.spec.run)
    return no_node_text(
        view,
        launched,
        expected=spec.expected_nodes,
        launcher=known.pid if known is not None and not known.stale else None,
        lost_after_s=spec.setting("lost_after_s"),
    )


def _launched_as(reached: FoundJob) -> str:
    """Returns the words after `taskgraph launch` that start nodes for the job on this host."""
    name, etcd, spec = reached.name, reached.entry.etcd, reached.spec
    if known_at(name, etcd, spec.run) is not None or find_placed(name) is not None:
        return name
    token = " --token-file FILE" if spec.token_mark and not configured("token_file") else ""
    return f"{name} --etcd {etcd}{token}"


async def statuses_of(reached: FoundJob, view: JobView) -> Mapping[str, NodeStatus | TaskGraphError]:
    """Asks all nodes for their status; returns node -> status, or the error in its place.

    Asks none if they speak another protocol, or would refuse our token: then each has that error.
    """
    entry, run = reached.entry, reached.spec.run
    try:
        reached.spec.check_protocol()
        reached.check_token()
    except JobError as error:
        return dict.fromkeys(view.live_nodes(run), error)
    return await node_statuses(view, run, entry.token_bytes, entry.node_access)


def _kept_if_launcher_ended(entry: JobEntry) -> KeptJob | None:
    """Returns this host's record of the job if its launcher and embedded etcd have ended meanwhile; else None.

    Raises:
        UnknownJob: the launcher was killed.
    """
    check_launcher(entry)
    runtime = Runtime()
    return runtime.find_finished(entry.name) if entry.embedded and runtime.find(entry.name) is None else None


def _print_finished(name: str, kept: KeptJob, *, as_json: bool) -> None:
    """Prints the status of an ended job, of which this host kept the record."""
    found = kept.parsed_result if kept.result else None
    if as_json:
        print(json.dumps(ended_status_json(name, kept.status, found, elastic=kept.elastic)))
        return
    reason = kept.status.reason if kept.status is not None else ""
    done = f"   {counted(found['epochs'], 'sum' if kept.elastic else 'epoch')}" if found else ""
    print("\n".join([f"{name}  {kept.state or 'unknown'}{done}", *reason_lines(reason)]))


def _etcd_warning(reached: FoundJob) -> str:
    """Returns a warning if the version of etcd is one that can lose data; "": it is not."""
    from taskgraph.coordination.etcd import EtcdCoordinator

    etcd = reached.coordinator
    if reached.entry.embedded or not isinstance(etcd, EtcdCoordinator) or etcd.version not in _CORRUPTING:
        return ""
    return f"\nwarning: etcd {etcd.version} can lose data when it is killed under load; upgrade it to 3.5.3 or later"


def events(options: argparse.Namespace) -> int:
    """Prints what happened to a job."""
    kept = _find_kept_here(options)
    if kept is not None:
        for event in kept.events:
            print_event(event, as_json=options.json)
        return 0
    return uvloop.run(_events(options))


async def _events(options: argparse.Namespace) -> int:
    """Prints the events in etcd; with --follow also later ones, until the job ends."""
    async with reach(options) as reached:
        if not options.follow:
            for event in await kept_events(reached.coordinator, reached.name):
                print_event(event, as_json=options.json)
            return 0
        printed: deque[Event] = deque(maxlen=_PRINTED * reached.spec.setting("events_kept"))
        following = _print_until_end(reached, printed, as_json=options.json)
        async with alongside(following, wait_until_launcher_gone(reached.entry), _wait_until_ended(reached)) as waits:
            await any_done(*waits)
            if waits[0].done():
                await waits[0]
                return 0
    check_launcher(reached.entry)
    # Older events than those remembered were printed before.
    since = min((event.at for event in printed), default=0.0) if len(printed) == printed.maxlen else 0.0
    for event in (Runtime().find_finished(reached.name) or KeptJob()).events:
        if event.at >= since and event not in printed:
            print_event(event, as_json=options.json)
    return 0


async def _wait_until_ended(reached: FoundJob) -> None:
    """Waits until the job has ended, and a moment more, in which its last event reaches etcd."""
    keeper = ViewKeeper(reached.coordinator, reached.name, refresh_s=_REFRESH_S)
    await keeper.load_persistently()
    async with alongside(keeper.run()):
        await keeper.wait_until(lambda view: not view.running, structure=True)
        await asyncio.sleep(_LAST_EVENT_S)


async def _print_until_end(reached: FoundJob, printed: deque[Event], *, as_json: bool) -> None:
    """Prints events until the last event of the job."""
    async for event in follow_events(reached.coordinator, reached.name):
        printed.append(event)
        print_event(event, as_json=as_json)
        if event.kind in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELLED):
            return


def print_event(event: Event, *, as_json: bool) -> None:
    """Prints an event: a line for people, or a line of JSON."""
    if as_json:
        print(event.to_bytes().decode(), flush=True)
        return
    epoch = f"epoch {event.epoch}" if event.epoch is not None else ""
    print(one_line(f"{clock_text(event.at)}  {event.node:<8} {epoch:<12} {event.kind:<10} {event.text}"), flush=True)


def result(options: argparse.Namespace) -> int:
    """Prints the result of an ended job."""
    if (kept := _find_kept_here(options)) is not None:
        print_values(kept.require_result(options.job), as_json=options.json)
        return 0
    return uvloop.run(_result(options))


def print_values(found: dict[str, Any], *, as_json: bool) -> None:
    """Prints a result as `KeptJob.parsed_result` has it."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    if found["values"]:
        from taskgraph.observe.values_text import values_text

        print(values_text({int(task): value for task, value in found["values"].items()}))
    aside = {name: [one["piece"] for one in pieces] for name, pieces in found.get("set_aside", {}).items()}
    if text := set_aside_text(aside):
        print(text, file=sys.stderr)
    if left_out := found.get("left_out"):
        print(left_out, file=sys.stderr)


async def _result(options: argparse.Namespace) -> int:
    """Prints the result of an ended job that etcd or the job's nodes keep."""
    async with reach(options) as reached:
        kept = await find_kept(reached.coordinator, reached.name)
        if kept is None:
            raise UnknownJob(f"job {reached.name!r} was deleted")
        if kept.state == JobStatus.RUNNING:
            raise _still_running(reached.name)
        if kept.result or kept.state != JobStatus.FINISHED:
            print_values(kept.require_result(reached.name), as_json=options.json)
        else:
            await _collect_and_print(reached, as_json=options.json)
        return 0


async def _collect_and_print(reached: FoundJob, *, as_json: bool) -> None:
    """Collects the result of a submitted job from its nodes, and prints it. Raises JobError if they have none yet."""
    from taskgraph.launch.collector import Collector  # loads numpy, with the values of a job

    follower = Collector(reached.coordinator, reached.spec, reached.entry.token_bytes, reached.entry.node_access)
    await follower.start()
    try:
        if not follower.view.collected:  # else no node is asked
            reached.check_token()
        async with asyncio.timeout(_COLLECT_S):
            collected = await follower.collect(let_go=not reached.spec.expected_nodes)
        if collected is None and follower.view.running:
            raise _still_running(reached.name)
        if collected is None:  # another command may have collected it meanwhile, or a `result()` raised
            kept = await find_kept(reached.coordinator, reached.name) or KeptJob()
            lost = follower.kept.not_kept or kept.not_kept
            found = structs.replace(kept, not_kept=lost).require_result(reached.name)
        else:
            found = follower.kept.parsed_result if follower.kept.result else json.loads(collected.to_json())
        print_values(found, as_json=as_json)
        if follower.only_on_nodes and as_json:  # not before all of it is written
            await follower.mark_taken()
        elif follower.only_on_nodes:
            print(follower.only_on_nodes_text(), file=sys.stderr)
    except TimeoutError:
        why = follower.unreachable or "they are still computing it"
        raise JobError(f"the nodes of job {reached.name!r} keep its result, but did not send it: {why}") from None
    finally:
        await follower.stop()


def _still_running(name: str) -> JobError:
    """Returns the error for a job that has no result yet."""
    return JobError(f"job {name!r} is still running: `taskgraph status {name}`")
