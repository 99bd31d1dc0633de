"""What an elastic job computes on one worker alone, and how other workers differ from that.

On one worker there are no newcomers, and it computes all parts in order. Every worker of a run with newcomers must have
the same state before each step, and the same result of each part that it computes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from taskgraph.elastic_jobs.adding import chain_digest
from taskgraph.elastic_jobs.parts import Part, Place
from taskgraph.elastic_jobs.state import digests
from taskgraph.errors import StateError, StepError
from taskgraph.graph.sums import Sums
from taskgraph.protocol.messages import Encoded
from taskgraph.testing.variables import digests_of

__all__ = ["Comparison", "Record", "differing", "value_digests"]

_NAMED = 3
"""The most differing names in a message."""
_MADE_ALIKE = (
    "make what run.state gets in the function, since objects of the module keep what an earlier run left; draw and "
    "measure in run.once(...)"
)


class Record:
    """What one worker alone computed.

    Attributes:
        states: step -> path -> digest of the state before it.
        variables: step -> name -> digest of the function's variables before it.
        various: names of variables that differ between workers though their states do not.
        parts: (step, round, part) -> digest.
        results: (position, piece) -> the result of a piece of `run.once` or `run.map`.
        reports: (step, position) -> the numbers of each report there.
        value: path -> digest.
        steps: the number of steps that had a round.
    """

    def __init__(self) -> None:
        self.states: dict[int, dict[str, bytes]] = {}
        self.variables: dict[int, dict[str, bytes]] = {}
        self.various: set[str] = set()
        self.parts: dict[tuple[int, int, int], bytes] = {}
        self.results: dict[tuple[int, int], Encoded] = {}
        self.reports: dict[tuple[int, int], list[dict[str, float]]] = {}
        self.value: dict[str, bytes] = {}
        self.steps = 0

    def part(self, place: Place, part: Part, sums: Sums) -> None:
        self.parts[place.step, place.round, part.number] = chain_digest(b"", sums)
        self.steps = place.step + 1


class Comparison:
    """Compares one worker with the record. All methods raise an error if it differs.

    Args:
        worker: its name.
    """

    def __init__(self, record: Record, worker: str) -> None:
        self._record = record
        self._worker = worker
        self._joined: int | None = None  # the step before which it began with a copied state
        self._steps = 0
        self._reports: Counter[tuple[int, int]] = Counter()
        self._suspects: set[str] = set()  # variables that are other ones than in the record

    def copied(self, step: int) -> None:
        self._joined, self._steps = step, step

    @property
    def _who(self) -> str:
        return self._worker + (f" (joined at step {self._joined})" if self._joined is not None else "")

    @property
    def _newly_suspect(self) -> list[str]:
        return sorted(self._suspects - self._record.various)

    @property
    def _why(self) -> str:
        if self._joined is not None:
            names = self._newly_suspect
            differ = f" (here {_listed(names)}?)" if names else ""
            return (
                f"name all that later steps read{differ} in run.state, or derive it from step.number; what is drawn or "
                f"measured anew on each worker counts, too"
            )
        return (
            "the code is not deterministic, or a part reads what an earlier part of this worker left: keep that in "
            "run.state, and change it after `for part in step`"
        )

    def variables(self, step: int, variables: dict[str, Any]) -> None:
        known = self._record.variables.get(step, {})
        found = digests_of({name: value for name, value in variables.items() if name in known})
        self._suspects = {name for name in found if found[name] != known[name]}

    def step(self, step: int, found: dict[str, bytes]) -> None:
        """It is about to begin a step."""
        self.state(step, found)
        if not self._joined:
            self._record.various.update(self._suspects)
        if 0 < self._record.steps <= step:
            raise self._error_of_more(f"takes step {step}, and a run of one worker ends after {self._record.steps}")

    def _error_of_more(self, what: str) -> StepError:
        return StepError(f"{self._who} {what}\ndecide `break`, rounds and calls by totals, run.state or run.once alone")

    def state(self, step: int, found: dict[str, bytes]) -> None:
        known = self._record.states.get(step)
        if known is not None and known != found:
            raise StateError(
                f"the state before step {step} is not the same on {self._who} as in a run of one worker: "
                f"{differing(known, found)}\n{self._why if step else _MADE_ALIKE}"
            )

    def part(self, place: Place, part: Part, sums: Sums) -> None:
        self._steps = place.step + 1
        key = place.step, place.round, part.number
        if key not in self._record.parts:
            return  # it has more steps or rounds: said when its total is there
        if self._record.parts[key] != chain_digest(b"", sums):
            raise StateError(
                f"part {part.number} of step {place.step} is not the same on {self._who} as in a run of one worker, "
                f"from an equal state\n{self._why}"
            )

    def total(self, place: Place) -> None:
        self._steps = place.step + 1
        if (place.step, place.round, 0) not in self._record.parts:
            raise self._error_of_more(
                f"takes round {place.round} of step {place.step}, and a run of one worker does not"
            )

    def result(self, call: str, position: int, piece: int, found: Encoded) -> Encoded:
        known = self._record.results.get((position, piece))
        if known is None or call == "run.once":  # what `once` computes may differ each time: all get one value
            return known or found
        if known.digest != found.digest:
            raise StateError(
                f"piece {piece} of {call} after {position} sums is not the same on {self._who} as in a run of one "
                f"worker\n{self._why}"
            )
        return found

    def report(self, position: int, step: int, found: dict[str, float]) -> None:
        reports, at = self._record.reports.get((step, position), []), self._reports[step, position]
        self._reports[step, position] += 1
        known = reports[at] if at < len(reports) else {}
        for name in found.keys() & known.keys():
            if repr(known[name]) != repr(found[name]):  # nan is equal to nan
                raise StateError(
                    f"step.report: {name} is {found[name]!r} on {self._who} and {known[name]!r} in a run of one "
                    f"worker, at step {step}\n{self._why_of_report}"
                )

    @property
    def _why_of_report(self) -> str:
        of_parts = (
            "a local of the part loop has this worker's parts alone: report step.loss, or part.add(...) and step[...], "
            "and no times (strict=False allows them)"
        )
        if self._joined is None:
            return of_parts
        return self._why if self._newly_suspect else f"{self._why}; {of_parts}"

    def value(self, value: Any) -> None:
        if self._steps < self._record.steps:
            raise self._error_of_more(f"ends after step {self._steps - 1}, and a run of one worker goes on")
        found = value_digests(value)
        if found != self._record.value:
            raise StateError(
                f"the value that {self._who} returns is not that of a run of one worker: "
                f"{differing(self._record.value, found)}\nreturn what rests on totals and run.state; times and names "
                f"of workers go to the log (strict=False allows them)"
            )


def value_digests(value: Any) -> dict[str, bytes]:
    """Returns the digest of each leaf of a value, by its path."""
    return digests({"value": value})


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> str:
    """Names leaves that differ; numbers first: a learning rate says more than an array that it spoilt."""
    names = sorted(path for path in {*one, *other} if one.get(path) != other.get(path))
    return _listed(sorted(names, key=lambda path: path.count(".")))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
