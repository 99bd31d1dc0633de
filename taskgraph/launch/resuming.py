"""Decides where a job begins: at epoch 0, or at its newest usable checkpoint.

If there are checkpoints, the user must say which (`--resume`, `--fresh`). To continue needs neither the etcd nor the
nodes of the earlier run, and any number of nodes will do.

A resumed run continues the run that was begun last. If that run left no checkpoint, the job starts at epoch 0, even if
earlier runs left some: the last run was begun to replace them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from taskgraph.checkpoint.manifest import (
    ChangedDriver,
    ChangedJob,
    CheckpointName,
    ExpectedJob,
    MissingFile,
    OtherFormat,
)
from taskgraph.checkpoint.store import CheckpointStore, NewestCheckpoint
from taskgraph.coordination.api import Coordinator
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CheckpointError, DecodeError, JobError, JobTimeout
from taskgraph.launch.moving import move
from taskgraph.launch.submit import StartPoint, check_not_running, submit
from taskgraph.node.usercode.threads import PooledThreads
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import CheckpointRecord, EpochRecord

__all__ = ["Resume", "begin", "finish_checkpoint", "plan"]

log = logging.getLogger("taskgraph")

Resume = bool | Literal["changed"]
"""True: go on from the newest checkpoint; "changed": also from one of an earlier version of the driver."""

_SLOW_S = 5.0
"""After this time a slow directory is reported: all files of a checkpoint are read before a job goes on from it."""
_CHANGED = "(--resume-changed, resume='changed')"


async def plan(
    coordinator: Coordinator,
    spec: JobSpec,
    *,
    resume: Resume = False,
    fresh: bool = False,
    timeout_s: float | None = None,
) -> tuple[JobSpec, StartPoint]:
    """Decides where the job begins. The returned spec has the series of its checkpoints.

    Args:
        timeout_s: limit for looking at the checkpoint directory; None: none.

    Raises:
        JobError: there are checkpoints, and neither `resume` nor `fresh` was given; or the job keeps none; or `resume`
            has a wrong value.
        JobRunning: a job of that name is running.
        CheckpointError: it is to be resumed, and none of its checkpoints can be used; or etcd knows of one, and its
            place is empty.
        JobTimeout: the place takes longer than that.
    """
    _check_options(spec, resume, fresh)
    start_point = StartPoint(EpochRecord(epoch=0, attempt=1, writer=spec.run))
    if spec.checkpoint is None:
        return spec, start_point
    keys = Keys(spec.name)
    before = await coordinator.get(keys.spec)
    await check_not_running(coordinator, keys)  # its checkpoints change while it runs
    start_point = dataclasses.replace(start_point, after=before.mod_revision if before is not None else 0)
    changed = resume == "changed"
    expected = dataclasses.replace(_expected_job(spec), any_servers=True, any_driver=changed, epochs=spec.epochs)
    store = CheckpointStore(spec.checkpoint, expected)
    pointer, attempt = await _read_pointer(coordinator, spec, before)
    checkpoints = await _look_in_thread(
        store, partial(_list_checkpoints, store, pointer, bool(resume)), spec.name, timeout_s
    )
    if pointer is not None and not checkpoints.names and not fresh:
        raise CheckpointError(
            f"job {spec.name!r} left the checkpoint {pointer} in {store}, as etcd says, and there is none now: is that "
            f"place mounted here? To start from the beginning all the same: --fresh, fresh=True"
        )
    if checkpoints.names and not resume and not fresh:
        raise JobError(_resume_or_fresh_text(spec, store, checkpoints))
    spec = dataclasses.replace(spec, checkpoint_series=checkpoints.series + 1, checkpoint_changed=changed)
    if resume and checkpoints.current:
        checkpoints = await _move_services(store, checkpoints, spec)
        return _start_from_checkpoint(spec, start_point, store, checkpoints, attempt)
    newest = checkpoints.names[0] if checkpoints.names else None
    if resume:
        _warn_of_beginning(spec, store, newest, unfinished=checkpoints.attempt > 0)
    return spec, dataclasses.replace(start_point, over=newest)


def _check_options(spec: JobSpec, resume: Resume, fresh: bool) -> None:
    """Raises JobError if the options contradict each other or the job."""
    if not isinstance(resume, bool) and resume != "changed":
        raise JobError(
            f"resume={resume!r}: must be True, False, or 'changed' (from a checkpoint of a driver that was changed "
            f"since, too)"
        )
    if resume and fresh:
        raise JobError("resume and fresh: either the one or the other")
    if resume and spec.checkpoint is None:
        raise JobError(
            f"resume: job {spec.name!r} keeps no checkpoints: give it "
            f"{'@tg.elastic' if spec.elastic else 'Job'}(checkpoint='file:///...'), or run it from its beginning"
        )


def _resume_or_fresh_text(spec: JobSpec, store: CheckpointStore, checkpoints: _Checkpoints) -> str:
    """Returns the text of the error that asks: go on from the checkpoints, or start at epoch 0?"""
    ways = "continue from there (--resume, resume=True), or start from the beginning (--fresh, fresh=True"
    if not checkpoints.current:
        ways = "they are of an earlier run than the last; start from the beginning (--resume or --fresh"
    return (
        f"job {spec.name!r} has checkpoints in {store}, the newest of {spec.unit} {checkpoints.names[0].epoch}: "
        f"{ways}; they are removed once there are newer ones)"
    )


def _warn_of_beginning(
    spec: JobSpec, store: CheckpointStore, newest: CheckpointName | None, *, unfinished: bool
) -> None:
    """Logs why a job that was to be resumed starts at epoch 0."""
    if newest is None and unfinished:
        log.warning(
            "the checkpoints in %s were not finished, since the run before ended while it wrote them: the job starts "
            "from its beginning",
            store,
        )
    elif newest is None:
        log.warning("%s holds no checkpoint yet: the job starts from its beginning", store)
    else:
        log.warning(
            "the run that was begun last left no complete checkpoint in %s: the job starts from its beginning. The "
            "checkpoint of %s %d there is of an earlier run, and is removed once there is a newer one (to go on "
            "from it instead, end this run before that, and remove what is there of later series than s%04d)",
            store,
            spec.unit,
            newest.epoch,
            newest.series,
        )


async def _move_services(store: CheckpointStore, checkpoints: _Checkpoints, spec: JobSpec) -> _Checkpoints:
    """Writes the usable checkpoint again if a table has another number of servers now; it is then the usable one."""
    before = checkpoints.usable.manifest
    if before is None or before.services == spec.services:
        return checkpoints
    threads = PooledThreads("checkpoints", limit=1)
    try:
        manifest = await threads.run(lambda: move(store, before, spec.services, spec.run))
    except OSError as error:
        raise CheckpointError(f"{store}: the rows of tables cannot be moved to other servers: {error}") from error
    finally:
        threads.close()
    moves = (
        f"{title} from {count} to {spec.services[title]}"
        for title, count in before.services.items()
        if count != spec.services[title]
    )
    log.info("rows move to another number of servers: %s", ", ".join(moves))
    return dataclasses.replace(checkpoints, usable=dataclasses.replace(checkpoints.usable, manifest=manifest))


def _start_from_checkpoint(
    spec: JobSpec, start_point: StartPoint, store: CheckpointStore, checkpoints: _Checkpoints, attempt: int
) -> tuple[JobSpec, StartPoint]:
    """Returns spec and start point of a job that goes on from its usable checkpoint; CheckpointError if there is none.

    Args:
        attempt: the last one in etcd.
    """
    found = checkpoints.usable
    if found.manifest is None:
        raise CheckpointError(_unusable_text(store, checkpoints))
    for refused in found.refused:
        log.warning("%s", refused)
    name = found.manifest.parsed_name
    if found.manifest.fingerprint != spec.fingerprint:
        log.warning(
            "the checkpoint of %s %d was written by driver %s; it goes on with this one, %s",
            spec.unit,
            name.epoch,
            found.manifest.fingerprint,
            spec.fingerprint,
        )
    lineage = max(checkpoints.attempt, attempt, name.attempt) + 1
    record = CheckpointRecord(
        epoch=name.epoch, attempt=name.attempt, name=str(name), before=found.manifest.before, writer=spec.run
    )
    epoch = EpochRecord(epoch=name.epoch, attempt=lineage, lineage=lineage, base=name.epoch, writer=spec.run)
    log.info("the job goes on from the checkpoint of %s %d: %s/%s", spec.unit, name.epoch, store, name)
    spec = dataclasses.replace(spec, checkpoint_series=name.series)  # no new one is begun
    return spec, StartPoint(epoch, record, found.refused, start_point.after)


def _unusable_text(store: CheckpointStore, checkpoints: _Checkpoints) -> str:
    """Says why no checkpoint can be used, and what to do."""
    found = checkpoints.usable
    back = ""
    if found.was_refused_for(ChangedJob):
        back = "go back to the driver that wrote them, with its number of tasks, or "
    if found.was_refused_for(ChangedDriver):
        back = f"use them if the state still fits {_CHANGED}, {back}"
    if found.was_refused_for(OtherFormat):
        back = f"go on with the taskgraph that wrote them, on all hosts, {back or 'or '}"
    shared = "Do all hosts see the same place? " if found.was_refused_for(MissingFile) else ""
    one = len(checkpoints.current) == 1
    which = "the one checkpoint" if one else f"none of the {len(checkpoints.current)} checkpoints"
    why = dict.fromkeys(text.partition(" is foreign: ")[2] or text for text in found.refused)
    return (
        f"{which} in {store} {'cannot' if one else 'can'} be used: {'; '.join(why)}\n"
        f"{shared}To run the job, {back}start from the beginning (--fresh, fresh=True)"
    )


async def begin(coordinator: Coordinator, spec: JobSpec, start_point: StartPoint) -> None:
    """Submits the job as `plan` says; raises what `submit` does.

    Then it notes in the place that the run was begun over earlier ones: it may be killed before it writes anything
    there, and one that was refused did not begin. If that fails, the job runs all the same.
    """
    await submit(coordinator, spec, start_point)
    if start_point.over is None:
        return
    assert spec.checkpoint is not None
    store = CheckpointStore(spec.checkpoint, _expected_job(spec))
    threads = PooledThreads("checkpoints", limit=1)
    try:
        async with asyncio.timeout(_SLOW_S):
            await threads.run(lambda: store.note_series(spec.checkpoint_series, spec.run))
    except OSError as error:  # of which TimeoutError is one
        log.warning(
            "it cannot be noted in %s that this run began anew (%s): if it ends before its first checkpoint, --resume "
            "goes on from that of %s %d, of an earlier run",
            store,
            str(error) or f"it takes longer than {_SLOW_S:g} s",
            spec.unit,
            start_point.over.epoch,
        )
    finally:
        threads.close()


async def finish_checkpoint(spec: JobSpec, pointer: CheckpointRecord) -> None:
    """Writes the final manifest of a checkpoint that the pointer names, if its writer died before. An error is only
    logged.

    A job whose etcd ends with it can be resumed from there only then.
    """
    assert spec.checkpoint is not None
    threads = PooledThreads("checkpoints", limit=1)
    try:
        store = CheckpointStore(spec.checkpoint, _expected_job(spec))
        async with asyncio.timeout(_SLOW_S):
            await threads.run(lambda: store.finish(pointer.name))
    except (OSError, CheckpointError) as error:  # of which TimeoutError is one
        log.warning("the last manifest of checkpoint %s is not there: %s", pointer.name, error)
    finally:
        threads.close()


def _expected_job(spec: JobSpec) -> ExpectedJob:
    """Returns what a checkpoint must say of its job, so that this job can go on from it."""
    return ExpectedJob(job=spec.name, fingerprint=spec.fingerprint, tasks=spec.tasks, services=spec.services)


async def _read_pointer(coordinator: Coordinator, spec: JobSpec, before: KeyValue | None) -> tuple[str | None, int]:
    """Reads from etcd which checkpoint the run `before` points to (None: none), and its last attempt (0: none).

    If that run kept its checkpoints in another directory, its pointer does not count.
    """
    keys = Keys(spec.name)
    pointer, epoch = await coordinator.get(keys.checkpoint), await coordinator.get(keys.epoch)
    with contextlib.suppress(DecodeError):
        here = before is not None and JobSpec.from_bytes(before.value).checkpoint == spec.checkpoint
        return (
            CheckpointRecord.from_bytes(pointer.value).name if here and pointer is not None else None,
            EpochRecord.from_bytes(epoch.value).attempt if epoch is not None else 0,
        )
    return None, 0


async def _look_in_thread(
    store: CheckpointStore, look: Callable[[], _Checkpoints], job: str, timeout_s: float | None
) -> _Checkpoints:
    """Reads a directory in a thread that can be left behind if the directory hangs, and returns its checkpoints.
    Reports a slow one.
    """
    threads = PooledThreads("checkpoints", limit=1)
    looking = threads.run(look)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if not (await asyncio.wait([looking], timeout=_SLOW_S))[0]:
                log.warning("%s is slow: what it holds is still being read after %g s", store, _SLOW_S)
            await asyncio.wait([looking])
    except TimeoutError:
        assert limit.expired() and timeout_s is not None
        text = f"job {job!r} did not begin within {timeout_s:g} s: what {store} holds is still being read"
        raise JobTimeout(text, job=job) from None
    finally:
        looking.cancel()
        threads.close()
    return looking.result()


@dataclass(frozen=True, slots=True)
class _Checkpoints:
    """The checkpoints in a directory.

    Attributes:
        names: of all complete checkpoints, the newest first.
        series: the number of the series that was begun last.
        attempt: the highest attempt of all checkpoints, complete or not.
        usable: the newest of that series that can be used; only looked for if the job is resumed.
    """

    names: list[CheckpointName]
    series: int
    attempt: int
    usable: NewestCheckpoint

    @property
    def current(self) -> list[CheckpointName]:
        """The complete checkpoints of the series that began last: of a run, and of the runs that resumed it."""
        return [name for name in self.names if name.series == self.series]


def _list_checkpoints(store: CheckpointStore, pointer: str | None, resume: bool) -> _Checkpoints:
    """Lists the checkpoints; for a resumed job it also finds the usable one."""
    try:
        if pointer is not None:
            # Complete, if the leader died between the pointer and the last manifest.
            with contextlib.suppress(CheckpointError):
                store.finish(pointer)
        names = store.complete_names()
        series, attempt = store.highest_series_and_attempt()
        found = store.find_newest(str(name) for name in names if name.series == series) if resume else None
    except OSError as error:
        raise CheckpointError(f"{store} cannot be read: {error}") from error
    if found is None:
        found = NewestCheckpoint()
    return _Checkpoints(names, series, attempt, found)
