"""The name of a checkpoint, the job it belongs to, and its list of files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from taskgraph.checkpoint.files import FORMAT, FileInfo, Label
from taskgraph.errors import CheckpointError
from taskgraph.version import LOCAL_FINGERPRINT, VERSION

__all__ = ["ChangedDriver", "ChangedJob", "CheckpointName", "ExpectedJob", "Manifest", "MissingFile", "OtherFormat"]

_NAME = re.compile(r"s(\d{4,9})-a(\d{6,18})-e(\d{9,18})-([0-9a-z]{1,16})")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """The name of a checkpoint and of its directory.

    Names sort by the job's history: every start at epoch 0 begins another series, and within a series the attempt
    grows, also after a roll-back and in a resumed run.

    Attributes:
        run: the run that wrote the checkpoint, so that two runs never write into one checkpoint.
    """

    series: int
    attempt: int
    epoch: int
    run: str

    def __str__(self) -> str:
        return f"s{self.series:04d}-a{self.attempt:06d}-e{self.epoch:09d}-{self.run}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """Parses the name of a checkpoint; None for other texts."""
        found = _NAME.fullmatch(text)
        return cls(int(found[1]), int(found[2]), int(found[3]), found[4]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedJob:
    """The job that a checkpoint must belong to.

    Attributes:
        tasks: how many tasks the job has, with those of services.
        services: how many of them each service has, by its title.
        any_servers: accept checkpoints with another number of tasks of a service: `launch.moving` writes them again.
        any_driver: accept checkpoints of another version of the driver.
        epochs: the number of epochs of a resumed job: a checkpoint at its end or later is useless. None: no limit, or
            the job is not resumed.
    """

    job: str
    fingerprint: str
    tasks: int
    services: dict[str, int] = field(default_factory=dict)
    any_servers: bool = False
    any_driver: bool = False
    epochs: int | None = None


class ChangedJob(CheckpointError):
    """The job had another driver, or another number of tasks, when it wrote the checkpoint."""


class ChangedDriver(ChangedJob):
    """The job had another driver, but the right number of tasks, when it wrote the checkpoint."""


class OtherFormat(CheckpointError):
    """Another version of taskgraph wrote the checkpoint, in another format."""


class MissingFile(CheckpointError):
    """A file of a checkpoint is missing: one of a task, or the manifest, so that no such complete checkpoint exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's list of files.

    Attributes:
        tasks: how many tasks the job had, with those of services.
        services: how many of them each service had, by its title.
        files: one for every task with state, and one for task 0, with the reports.
        before: names of earlier checkpoints, newest first; used if this one is corrupt.
    """

    name: str
    job: str
    fingerprint: str
    tasks: int
    files: tuple[FileInfo, ...]
    before: tuple[str, ...] = ()
    services: dict[str, int] = field(default_factory=dict)
    version: str = VERSION

    @property
    def parsed_name(self) -> CheckpointName:
        found = CheckpointName.parse(self.name)
        if found is None:
            raise CheckpointError(f"{self.name!r} is not the name of a checkpoint")
        return found

    def tasks_of(self, title: str) -> range:
        """Returns the ids of a service's tasks; an empty range if there is no such service."""
        at = self.tasks - sum(self.services.values())
        for each, count in self.services.items():
            if each == title:
                return range(at, at + count)
            at += count
        return range(0)

    def file_of(self, task: int) -> FileInfo | None:
        return next((info for info in self.files if info.task == task), None)

    def label(self, task: int) -> Label:
        """Returns the label of a task's file."""
        name = self.parsed_name
        return Label(
            job=self.job,
            fingerprint=self.fingerprint,
            tasks=self.tasks,
            task=task,
            epoch=name.epoch,
            attempt=name.attempt,
            run=name.run,
        )

    def check_job(self, expected: ExpectedJob, path: str) -> None:
        """Raises an error if the job cannot use the checkpoint. `path` is for its message.

        Raises:
            ChangedJob: the job has changed since.
            CheckpointError: the checkpoint is another job's, or leaves the job nothing to do.
        """
        if self.job != expected.job:
            raise CheckpointError(f"{path} is foreign: job is {self.job}, here it is {expected.job}")
        found = []
        if self.fingerprint != expected.fingerprint and not expected.any_driver:
            prints = f"the driver's fingerprint is {self.fingerprint}, here it is {expected.fingerprint}"
            found.append(f"{prints} ({_explain_change(self.fingerprint, expected.fingerprint)})")
        mine, others = self._user_task_counts(expected)
        if mine != others:
            found.append(f"tasks is {mine}, here it is {others} (the number of tasks was changed)")
        elif self.services.keys() != expected.services.keys() or (
            self.services != expected.services and not expected.any_servers
        ):
            found.append(f"it has {_services_text(self.services)}, here it is {_services_text(expected.services)}")
        if found:
            kind = ChangedDriver if mine == others and self.services == expected.services else ChangedJob
            raise kind(f"{path} is foreign: {', and '.join(found)}")
        if expected.epochs is not None and (epoch := self.parsed_name.epoch) >= expected.epochs:
            raise CheckpointError(
                f"{path} is of epoch {epoch}, and a job of {expected.epochs} epochs has nothing to do from there on "
                f"(epochs={epoch + 1} would have)"
            )

    def _user_task_counts(self, expected: ExpectedJob) -> tuple[int, int]:
        """Returns how many tasks are the user's: of the checkpoint, and of the job."""
        return self.tasks - sum(self.services.values()), expected.tasks - sum(expected.services.values())

    def to_bytes(self) -> bytes:
        raw = {"format": FORMAT, **msgspec.to_builtins(self)}
        return json.dumps({**raw, "digest": _digest(raw)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str) -> Manifest:
        """Reads a manifest. Raises CheckpointError, with `path`, if it is torn, corrupt or of another format."""
        try:
            raw = msgspec.json.decode(data, type=dict[str, Any])
            digest = raw.pop("digest", None)
            if raw.get("format") != FORMAT:
                raise OtherFormat(
                    f"{path} was written by another taskgraph, {raw.get('version')}: its format is "
                    f"{raw.get('format')!r}, and {VERSION} here reads {FORMAT!r}"
                )
            if digest != _digest(raw):
                raise CheckpointError(f"{path} is corrupt: it does not match its digest")
            made = msgspec.convert(raw, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is torn or corrupt: {error!r}") from error
        if CheckpointName.parse(made.name) is None:
            raise CheckpointError(f"{path} is corrupt: {made.name!r} is not the name of a checkpoint")
        return made


def _services_text(services: dict[str, int]) -> str:
    return ", ".join(f"{count} tasks of {title}" for title, count in services.items()) or "no table or queue"


def _explain_change(before: str, now: str) -> str:
    """Names the likely reason why the fingerprints of a checkpoint and of this job differ, for the error."""
    if before == LOCAL_FINGERPRINT:
        return "it was written by a job in one process, nodes=0"
    if now == LOCAL_FINGERPRINT:
        return "a job in one process, nodes=0, cannot use those of nodes"
    return "the driver, what it imports from its own directory, or taskgraph was changed since"


def _digest(raw: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())
