"""What each element of the array asks Slurm for, as lines of the script's header."""

from __future__ import annotations

import re
from dataclasses import dataclass

from taskgraph.errors import JobError

__all__ = ["UNQUOTED", "Resources", "check_header_value", "parse_time_limit_s"]

_HMS = 3
"""Hours, minutes, seconds."""
UNQUOTED = frozenset("\"'\\`$\n\r\0")
"""Characters that mean something in a line of #SBATCH, or in the shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What each element asks Slurm for; "" or 0: the site's default."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    constraint: str = ""
    memory: str = ""
    cpus: int = 0
    gpus: int = 0

    def lines(self) -> list[str]:
        """Returns the options for the script's header; raises JobError for a value that no line can hold."""
        named = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "constraint": self.constraint,
            "mem": self.memory,
            "cpus-per-task": str(self.cpus or ""),
            "gres": f"gpu:{self.gpus}" if self.gpus else "",
        }
        return [f"--{name}={check_header_value(name, value)}" for name, value in named.items() if value]


def parse_time_limit_s(text: str) -> float:
    """Parses a time limit to seconds, as sbatch takes it: 90, 90:00, 1:30:00, 1-12, 1-12:30, 1-12:30:00; 0: no limit.

    Raises:
        JobError: the text is no time limit.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise JobError(f"--time {text!r}: write minutes, hours:minutes:seconds or days-hours:minutes")
    days, *rest = match.groups()
    numbers = [int(each) for each in rest if each is not None]
    if days is None and len(numbers) < _HMS:  # minutes first
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:_HMS]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def check_header_value(name: str, value: str) -> str:
    """Returns an option's value for a line of #SBATCH; raises JobError if it is empty, or has spaces or quotes."""
    if not value or any(char.isspace() for char in value) or not UNQUOTED.isdisjoint(value):
        raise JobError(f"--{name} {value!r}: Slurm takes no such value: write it without spaces and quotes")
    return value
