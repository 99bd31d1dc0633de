"""The invariants of elastic jobs, checked while a simulation runs.

    E1  a total counts each part once, in one instance, and is their sum along the tree
    E2  whole workers of a view at the same position hold the same totals, and the same state
    E3  what was given out (a report, the value) is undone only if a job without workers returns to a checkpoint
    E4  a pass has each row once
    E5  a worker outside of the view makes nothing stable that the workers of the view lack
    E6  nothing hangs silently: a step, a named wait, or a named failure (see `seed`)

A *history* is a digest of all totals up to one: equal histories count the same instance of each part. A total is *given
out* once a node has called it stable, or has sent a report that rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from taskgraph.elastic_jobs.adding import Total, chain_digest
from taskgraph.graph.sums import Sums
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.worker import Phase
from taskgraph.protocol.view import JobView
from taskgraph.testing.simulate.elastic.workload import Values, Workload, next_weights, tree_sum
from taskgraph.testing.simulate.executions import Violation

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.engine import Engine
    from taskgraph.elastic_jobs.node import ElasticNode
    from taskgraph.elastic_jobs.reports import StableReports
    from taskgraph.results import JobResult

__all__ = ["Checks"]


class Checks:
    """Follows all workers, and checks what they hold: implements `workload.Recorder`.

    Args:
        view: of etcd, after its last write.
        living: returns the nodes whose process exists, frozen or not.
        fail: called with a violation.
    """

    def __init__(
        self,
        workload: Workload,
        view: JobView,
        *,
        living: Callable[[], Iterable[ElasticNode]],
        fail: Callable[[Exception], None],
    ) -> None:
        self._workload = workload
        self._view = view
        self._living = living
        self._fail = fail
        self._instances: list[tuple[int, int, Values]] = []  # position, part and values of each computation
        self._held: dict[str, dict[int, bytes]] = {}  # worker -> position -> digest of its total there
        self._states: dict[bytes, tuple[bytes, str]] = {}  # history -> state, and a worker that had it
        self._totals: dict[bytes, Mapping[str, Any]] = {}  # digest -> what user code got
        self.out: dict[int, bytes] = {}  # position -> digest of the total that was given out

    # -- called by user code ----------------------------------------------------------------------

    def on_part(self, node: str, position: int, part: int, values: Values) -> int:
        self._instances.append((position, part, values.copy()))
        return len(self._instances) - 1

    def on_total(self, node: str, position: int, total: Mapping[str, Any], parts: int) -> None:
        with _CaughtViolation(self._fail):
            self._check_total(node, position, total, parts)

    def on_boundary(self, node: str, position: int, history: bytes, state: bytes) -> None:
        known, other = self._states.setdefault(history, (state, node))
        if known != state:
            self._fail(Violation(f"E2: the states of {node} and {other} differ at {position}, after the same totals"))

    def _check_total(self, node: str, position: int, total: Mapping[str, Any], parts: int) -> None:
        """Checks that a total which user code got is the sum of one instance of each of the parts (E1)."""
        if total["parts"] != parts:
            raise Violation(f"E1: {node} got a total of {total['parts']} parts at {position}, and there are {parts}")
        values: dict[int, Values] = {}
        for part in range(parts):
            instance = int(total["instances"][part])
            if not 0 <= instance < len(self._instances) or self._instances[instance][:2] != (position, part):
                raise Violation(f"E1: {node} got a total at {position} that counts part {part} as {instance}")
            values[part] = self._instances[instance][2]
        if tree_sum(values, Span(0, parts)).tobytes() != total["values"].tobytes():
            raise Violation(f"E1: {node} got a total at {position} that is not the sum of its parts along the tree")
        if (digest := self._held.get(node, {}).get(position)) is not None:  # else the worker has begun anew
            self._totals[digest] = total

    # -- called by the engine ---------------------------------------------------------------------

    def watch(self, node: ElasticNode) -> None:
        """Checks a node's totals, those that it calls stable, and its reports from now on, also after it re-enters."""
        begin_anew = node._begin_anew

        def begin_anew_watched() -> None:
            begin_anew()
            self._held.pop(node.id, None)
            self._watch_engine(node, node.engine)

        node._begin_anew = begin_anew_watched  # type: ignore[method-assign]
        self._watch_engine(node, node.engine)
        self._watch_reports(node)

    def _watch_engine(self, node: ElasticNode, engine: Engine) -> None:
        """Notes each total that the engine keeps, and checks each that it calls stable."""
        keep, stable = engine.totals.keep, engine._stable

        def keep_and_note(position: int, total: Total) -> None:
            keep(position, total)
            self._note_total(node, position, total.sums())

        def check_stable(position: int) -> None:
            with _CaughtViolation(self._fail):
                self._check_stable(node, position)
            stable(position)

        engine.totals.keep = keep_and_note  # type: ignore[method-assign]
        engine._stable = check_stable

    def _watch_reports(self, node: ElasticNode) -> None:
        """Checks each report that a node sends: the total on which it rests is given out by that (E3)."""
        reports = node.reports
        add, note_stable = reports.add, reports.note_stable

        def add_and_note(position: int, step: int, numbers: dict[str, float]) -> None:
            waiting = [at for at, *_ in reports._waiting]
            add(position, step, numbers)
            self._note_sent_reports(node, [*waiting, position], reports)

        def note_stable_and_sent(stable: int) -> None:
            waiting = [at for at, *_ in reports._waiting]
            note_stable(stable)
            self._note_sent_reports(node, waiting, reports)

        reports.add, reports.note_stable = add_and_note, note_stable_and_sent  # type: ignore[method-assign]

    def _note_sent_reports(self, node: ElasticNode, before: list[int], reports: StableReports) -> None:
        """Notes that totals are given out by the reports sent just now: those at `before` that wait no longer."""
        waiting = {at for at, *_ in reports._waiting}
        held = self._held.get(node.id, {})
        with _CaughtViolation(self._fail):
            for position in before:
                if position not in waiting and position - 1 in held:
                    self._note_given_out(node, position - 1, held[position - 1], "reports")

    def _note_given_out(self, node: ElasticNode, position: int, digest: bytes, how: str) -> None:
        """Notes that a total was given out. Raises Violation if another one was given out at this position (E3)."""
        if node.id not in (known.id for known in self._living()) or self._is_left_behind(node):
            return
        if self.out.setdefault(position, digest) != digest:
            raise Violation(f"E3: {node.id} {how} its total at {position}, and another one was given out")

    def _is_left_behind(self, node: ElasticNode) -> bool:
        """True if the job returned to a checkpoint while this worker was paused or gone: its totals no longer count."""
        view, newest = node.engine.core.view, self._view.workers
        assert view is not None and newest is not None
        return view.lineage < newest.record.lineage and (node.paused or node.id in self._view.gone)

    def note_return(self, position: int) -> None:
        """Notes that a new lineage begins after this number of totals: later totals are undone."""
        self.out = {at: digest for at, digest in self.out.items() if at < position}

    def _note_total(self, node: ElasticNode, position: int, total: Sums) -> None:
        """Notes a total that a node holds."""
        self._held.setdefault(node.id, {})[position] = chain_digest(b"", total)

    def _check_stable(self, node: ElasticNode, position: int) -> None:
        """Checks a node that calls all totals before a position stable: all workers of its view hold them (E5)."""
        held = self._held.get(node.id, {})
        for at in range(position):
            if at in held:
                self._note_given_out(node, at, held[at], "calls stable")
        last = position - 1
        if last >= 0 and last not in held and node.engine.core.position < position:
            raise Violation(f"E5: {node.id} calls {last} stable, and does not hold it")
        view = node.engine.core.view
        assert view is not None
        for other in self._living():
            core = other.engine.core
            inside = core.view is not None and core.view.number >= view.number and core.phase != Phase.OUTSIDE
            if inside and other.id in view.workers and core.position < position:
                raise Violation(f"E5: {node.id} calls {last} stable in view {view.number}, and {other.id} lacks it")

    # -- after each message and write -------------------------------------------------------------

    def compare_totals(self) -> None:
        """Compares the totals of all workers of the same view, and those of the newest view with what was given out."""
        with _CaughtViolation(self._fail):
            self._compare_totals()

    def _compare_totals(self) -> None:
        by_view: dict[int, dict[int, tuple[bytes, str]]] = {}
        for node in self._living():
            core = node.engine.core
            if core.view is None or not core.whole or core.phase not in (Phase.WORKING, Phase.LACKING):
                continue
            if node.id not in core.view.workers:
                raise Violation(f"E5: {node.id} works in view {core.view.number}, which does not list it")
            known = by_view.setdefault(core.view.number, {})
            newest = self._view.workers is not None and core.view.number == self._view.workers.record.number
            for position, digest in self._held.get(node.id, {}).items():
                other = known.setdefault(position, (digest, node.id))
                if other[0] != digest:
                    raise Violation(f"E2: {node.id} and {other[1]} hold other totals at {position}")
                if newest and self.out.get(position, digest) != digest:
                    raise Violation(f"E3: {node.id} holds another total at {position} than was given out")

    # -- at the end -------------------------------------------------------------------------------

    def check_finished(self, positions: int) -> None:
        """Checks a job that is finished after this number of totals."""
        if positions != self._workload.positions:
            raise Violation(f"it finished after {positions} totals of {self._workload.positions}")
        if missing := [at for at in range(positions) if at not in self.out]:
            raise Violation(f"E3: it finished, and the total at {missing[0]} was not stable")

    def check_checkpoint(self, pointed: int, position: int, weights: Any) -> None:
        """Checks a checkpoint: its pointer says that it is of `pointed` totals, its file says `position`."""
        if pointed != position:
            raise Violation(f"it holds {position} totals, and its pointer says {pointed}")
        if missing := [at for at in range(position) if at not in self.out]:
            raise Violation(f"the total at {missing[0]} was not stable")
        if weights.tobytes() != self._weights(position).tobytes():
            raise Violation("its state does not follow from the totals that were given out")

    def _weights(self, positions: int) -> Values:
        """Computes the state after this number of totals that were given out."""
        weights = self._workload.first_weights()
        for at in range(positions):
            weights = next_weights(weights, self._totals[self.out[at]]["values"])
        return weights

    def check_result(self, result: JobResult) -> None:
        """Checks that the job's value and reports follow from the totals that were given out."""
        work, plan = self._workload, self._workload.plan
        totals = [self._totals[self.out[at]] for at in range(work.positions)]
        self._check_rows(totals)
        weights = self._weights(work.positions)
        value: Any = result.values[0]
        if value.tobytes() != weights.tobytes():
            raise Violation("E3: the value does not follow from the totals that were given out")
        if not work.erratic and value.tobytes() != work.expected().tobytes():
            raise Violation("the value is not that of an undisturbed run")
        reported = {report.epoch: report.numbers["instance"] for report in result.reports}
        expected = {
            step: float(totals[(step + 1) * work.rounds - 1]["instances"][0]) for step in range(plan.steps or 0)
        }
        if reported != expected:
            raise Violation(f"E3: the reports are {reported}, and the totals that were given out say {expected}")

    def _check_rows(self, totals: list[Mapping[str, Any]]) -> None:
        """Checks that each pass has each row once (E4)."""
        plan, rounds = self._workload.plan, self._workload.rounds
        for which in range(plan.passes or 0):
            first = which * plan.per_pass * rounds
            rows = sum(total["rows"] for total in totals[first : first + plan.per_pass * rounds : rounds])
            if (np.asarray(rows) != 1).any():
                raise Violation(f"E4: pass {which} has rows {rows}")


class _CaughtViolation:
    """Within this block, a violation goes to `fail` and is not raised: the worker that calls must not see it."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Violation):
            self._fail(error)
            return True
        return False
