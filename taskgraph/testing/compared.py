"""What an elastic job computes on one worker alone, and how other workers differ from that.

On one worker there are no newcomers, and it computes all parts in order. Every worker of a run with newcomers must have
the same state before each step, and the same result of each part that it computes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from taskgraph.elastic_jobs.adding import chain_digest
from taskgraph.elastic_jobs.parts import Part, RoundId
from taskgraph.elastic_jobs.state import digests
from taskgraph.errors import StateError, StepError, ValueNotEncodable
from taskgraph.graph.sums import Sums
from taskgraph.protocol.messages import Encoded
from taskgraph.testing.variables import digests_of_plain

__all__ = ["DECIDE", "OneWorkerRecord", "WorkerChecks", "format_differing", "value_digests"]

_NAMED = 3
"""The most differing names in a message."""
_EQUAL_START_ADVICE = (
    "make what run.state gets in the function, since objects of the module keep what an earlier run left; draw and "
    "measure in run.once(...)"
)
DECIDE: Final = "decide `break`, rounds and calls by totals, run.state or run.once alone"


class OneWorkerRecord:
    """What one worker alone computed.

    Attributes:
        states: step -> path -> digest of the state before it.
        variables: step -> name -> digest of the function's local variable before it.
        various: names of variables that differ between workers though their states do not.
        parts: (step, round, part) -> digest of the part's sums.
        results: (position, piece) -> the result of a piece of `run.once` or `run.map`.
        reports: (step, position) -> the numbers of each report there.
        value: path -> digest of a leaf of the job's value.
        steps: the number of steps.
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

    def add_part(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        self.parts[round_id.step, round_id.round, part.number] = chain_digest(b"", sums)


class WorkerChecks:
    """Compares one worker with the record.

    The methods `check_...` raise StateError if a value differs, StepError if the worker takes other steps or rounds.
    """

    def __init__(self, record: OneWorkerRecord, worker: str) -> None:
        self._record = record
        self._worker = worker
        self._joined: int | None = None  # the step before which it began with a copied state
        self._steps = 0
        self._reports: Counter[tuple[int, int]] = Counter()
        self._suspects: set[str] = set()  # names of variables that differ from the record

    def note_joined(self, step: int) -> None:
        """Notes that the worker began with a copied state, before this step."""
        self._joined, self._steps = step, step

    @property
    def _name(self) -> str:
        return self._worker + (f" (joined at step {self._joined})" if self._joined is not None else "")

    @property
    def _new_suspects(self) -> list[str]:
        """The variables that differ from the record, except those that also differ on workers with equal states."""
        return sorted(self._suspects - self._record.various)

    @property
    def _advice(self) -> str:
        """What the user may do about a value that differs."""
        if self._joined is not None:
            names = self._new_suspects
            differ = f" (here {_format_names(names)}?)" if names else ""
            return (
                f"name all that later steps read{differ} in run.state, or derive it from step.number; what is drawn or "
                f"measured anew on each worker counts, too"
            )
        return (
            "the code is not deterministic, or a part changes what later parts or steps read: give it to part.add(...) "
            "or part.collect(...), and change run.state after `for part in step`"
        )

    def note_suspect_variables(self, step: int, variables: dict[str, Any]) -> None:
        """Notes which variables differ before a step. An error names them as a likely cause."""
        known = self._record.variables.get(step, {})
        found = digests_of_plain({name: value for name, value in variables.items() if name in known})
        self._suspects = {name for name in found if found[name] != known[name]}

    def check_step(self, step: int, found: dict[str, bytes]) -> None:
        """Checks the state before a step, and that the one worker took that step, too."""
        self.check_state(step, found)
        if not self._joined:
            self._record.various.update(self._suspects)
        self._steps = step + 1
        if 0 < self._record.steps <= step:
            raise self._surplus_error(f"takes step {step}, and a run of one worker ends after {self._record.steps}")

    def _surplus_error(self, what: str) -> StepError:
        """Returns the error for a worker that takes other steps or rounds; `what` says which."""
        return StepError(f"{self._name} {what}\n{DECIDE}")

    def check_state(self, step: int, found: dict[str, bytes]) -> None:
        known = self._record.states.get(step)
        if known is not None and known != found:
            raise StateError(
                f"the state before step {step} is not the same on {self._name} as in a run of one worker: "
                f"{format_differing(known, found)}\n{self._advice if step else _EQUAL_START_ADVICE}"
            )

    def check_part(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        key = round_id.step, round_id.round, part.number
        if key not in self._record.parts:
            return  # it has more steps or rounds: said when its total is there
        if self._record.parts[key] != chain_digest(b"", sums):
            raise StateError(
                f"part {part.number} of step {round_id.step} is not the same on {self._name} "
                f"as in a run of one worker, from an equal state\n{self._advice}"
            )

    def check_total(self, round_id: RoundId) -> None:
        if (round_id.step, round_id.round, 0) not in self._record.parts:
            raise self._surplus_error(
                f"takes round {round_id.round} of step {round_id.step}, and a run of one worker does not"
            )

    def check_result(self, call: str, position: int, piece: int, found: Encoded) -> Encoded:
        """Checks the result of a piece, and returns it. Of `run.once`, returns the recorded one, without a check."""
        known = self._record.results.get((position, piece))
        if known is None or call == "run.once":  # what `once` computes may differ each time: all get one value
            return known or found
        if known.digest != found.digest:
            raise StateError(
                f"piece {piece} of {call} after {position} sums is not the same on {self._name} as in a run of one "
                f"worker\n{self._advice}"
            )
        return found

    def check_report(self, position: int, step: int, found: dict[str, float]) -> None:
        reports, at = self._record.reports.get((step, position), []), self._reports[step, position]
        self._reports[step, position] += 1
        known = reports[at] if at < len(reports) else {}
        for name in found.keys() & known.keys():
            if repr(known[name]) != repr(found[name]):  # nan is equal to nan
                raise StateError(
                    f"step.report: {name} is {found[name]!r} on {self._name} and {known[name]!r} in a run of one "
                    f"worker, at step {step}\n{self._report_advice}"
                )

    @property
    def _report_advice(self) -> str:
        """What the user may do about a reported number that differs."""
        of_parts = (
            "a local of the part loop has this worker's parts alone: report step.loss, or part.add(...) and step[...], "
            "and no times (strict=False allows them)"
        )
        if self._joined is None:
            return of_parts
        return self._advice if self._new_suspects else f"{self._advice}; {of_parts}"

    def check_value(self, value: Any) -> None:
        if self._steps < self._record.steps:
            raise self._surplus_error(f"ends after step {self._steps - 1}, and a run of one worker goes on")
        found = value_digests(value)
        if found != self._record.value:
            raise StateError(
                f"the value that {self._name} returns is not that of a run of one worker: "
                f"{format_differing(self._record.value, found)}\nreturn what rests on totals and run.state; times and "
                f"names of workers go to the log (strict=False allows them)"
            )


def value_digests(value: Any) -> dict[str, bytes]:
    """Returns the digest of each leaf of a value, by its path; {} if it cannot travel: the job's end reports that."""
    try:
        return digests({"value": value})
    except ValueNotEncodable:
        return {}


def format_differing(one: dict[str, bytes], other: dict[str, bytes]) -> str:
    """Names some leaves that differ, those with the shortest paths first: a learning rate before a layer's weights."""
    names = sorted(path for path in {*one, *other} if one.get(path) != other.get(path))
    return _format_names(sorted(names, key=lambda path: path.count(".")))


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
