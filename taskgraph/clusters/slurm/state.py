"""What Slurm says of a job's elements, and why one went. It does no I/O.

`squeue --json` changes its fields from version to version, so this reads lines of a format of ours, and the words of
`scontrol --oneliner show job`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "QUEUE_FORMAT",
    "QueuedElement",
    "departures",
    "machine_of",
    "parse_queue",
    "surplus_elements",
    "waiting_lines",
    "why_ended",
    "why_left",
]

QUEUE_FORMAT = "%i|%T|%r|%N"
"""Element, state, reason, machine."""
_LINE = re.compile(r"(\d+)_(\d+)\|([A-Z_]+)\|([^|]*)\|(.*)")
_RUNNING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED")
_ENDING = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
_REASONS = {
    "AssocGrpCpuLimit": "your account has its processors",
    "BeginTime": "Slurm waits before it starts them again (cred_expire, 120 s by default)",
    "Dependency": "they depend on another job",
    "JobArrayTaskLimit": "the array may not have more at a time",
    "JobHeldAdmin": "an administrator holds them back",
    "JobHeldUser": "they are held back: `scontrol release` lets them go",
    "Licenses": "a license is missing",
    "PartitionConfig": "the partition has no machine with what they ask for, or does not allow it",
    "PartitionTimeLimit": "the partition allows less than --time",
    "Priority": "other jobs come first",
    "QOSMaxJobsPerUserLimit": "your limit of jobs is reached",
    "ReqNodeNotAvail": "the machines that they need are down or reserved",
    "Resources": "no machine is free",
}
_STATES = {
    "NODE_FAIL": ("lost", "its machine failed"),
    "OUT_OF_MEMORY": ("oom", "it took more memory than --memory allows"),
    "PREEMPTED": ("preempted", "Slurm gave its machine to a job of higher priority"),
    "TIMEOUT": ("timeout", "its time was over (--time)"),
    "CANCELLED": ("cancelled", "it was cancelled (scancel)"),
    "FAILED": ("ended", "its script failed: its log says why"),
}
"""By the state of an element that has ended: kind of the event, and why."""


@dataclass(frozen=True, slots=True, order=True)
class QueuedElement:
    """An element of an array job, as Slurm's queue shows it.

    Attributes:
        array: the id of its array job.
        number: its number, which is unique in the job.
        state: as Slurm spells it.
        reason: why it does not run; "None": it runs.
        machine: where it runs; "": nowhere.
    """

    array: int
    number: int
    state: str
    reason: str
    machine: str

    @property
    def name(self) -> str:
        return f"{self.array}_{self.number}"

    @property
    def running(self) -> bool:
        return self.state in _RUNNING

    @property
    def ending(self) -> bool:
        return self.state in _ENDING


def parse_queue(text: str) -> list[QueuedElement]:
    """Parses the lines of `squeue -h -r -o QUEUE_FORMAT`; other lines are passed over."""
    found = (_LINE.fullmatch(line.strip()) for line in text.splitlines())
    return sorted(
        QueuedElement(int(match[1]), int(match[2]), match[3], match[4], match[5])
        for match in found
        if match is not None
    )


def surplus_elements(elements: Sequence[QueuedElement], nodes: int) -> list[QueuedElement]:
    """Returns the elements to end so that `nodes` stay: those that wait first, then the newest.

    Element 0, which keeps the job, goes last, also while it waits for a machine.
    """
    ordered = sorted(elements, key=lambda each: (each.number == 0, each.running, -each.number))
    return ordered[: max(0, len(elements) - nodes)]


def waiting_lines(elements: Iterable[QueuedElement]) -> list[str]:
    """Returns a line for each reason why elements do not run."""
    by_reason: dict[str, list[int]] = {}
    for each in elements:
        if not each.running and not each.ending:
            by_reason.setdefault(each.reason, []).append(each.number)
    lines = []
    for reason, numbers in sorted(by_reason.items()):
        why = next((text for known, text in _REASONS.items() if reason.startswith(known)), "")
        how = f"{reason}: {why}" if why else reason
        lines.append(f"{'elements' if len(numbers) > 1 else 'element'} {_ranges(numbers)} of the array: {how}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Writes numbers as `0-3,7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def departures(before: Iterable[QueuedElement], now: Iterable[QueuedElement]) -> list[QueuedElement]:
    """Returns the elements that ran before, and now do not, or on another machine. Ending elements still run."""
    there = {each.name: each for each in now if each.running or each.ending}
    gone = []
    for each in before:
        after = there.get(each.name)
        if (each.running or each.ending) and (after is None or after.machine != each.machine):
            gone.append(each)
    return gone


def _parse_words(job: str) -> Mapping[str, str]:
    """Parses the words `Name=value` of `scontrol --oneliner show job`."""
    return dict(word.split("=", 1) for word in job.split() if "=" in word)


def _parse_seconds(text: str) -> float:
    """Parses `[days-]hours:minutes:seconds`, as Slurm writes times; infinity for all else, such as UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return float("inf")
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def machine_of(job: str) -> str:
    """Returns the machine of an element, from what `scontrol show job` said of it; "": none is named."""
    return _parse_words(job).get("NodeList", "").replace("(null)", "")


def why_left(job: str, notice_s: float) -> tuple[str, str]:
    """Returns why an element left in good order, as kind and text of an event.

    Args:
        job: what `scontrol --oneliner show job` said of it when it left.
        notice_s: how long before the end of its time it gets SIGTERM.
    """
    words = _parse_words(job)
    if words.get("JobState") in ("CANCELLED", "COMPLETING"):
        return _STATES["CANCELLED"]
    if words.get("Requeue") == "0":
        return "scaled", "the job is to have fewer nodes"
    if words.get("PreemptTime", "None") not in ("None", "N/A", "Unknown"):
        return _STATES["PREEMPTED"]
    limit_s = _parse_seconds(words.get("TimeLimit", ""))
    if _parse_seconds(words.get("RunTime", "")) + notice_s + _EARLIER_S >= limit_s:
        return _STATES["TIMEOUT"]
    return "signalled", "it got SIGTERM"


_EARLIER_S = 60.0
"""Slurm may send the signal of --signal so much earlier."""


def why_ended(job: str, *, machine_is_down: bool) -> tuple[str, str]:
    """Returns why an element ended that left no file of its own in `left/`, as kind and text of an event.

    Args:
        job: what `scontrol --oneliner show job` says of it now; "": nothing.
    """
    state = _parse_words(job).get("JobState", "")
    if state in _STATES:
        return _STATES[state]
    if machine_is_down:
        return _STATES["NODE_FAIL"]
    if state in ("PENDING", "RUNNING"):
        return "requeued", "Slurm queued it again: its machine failed, or it did not leave within GraceTime or KillWait"
    return "ended", "Slurm does not say why"
