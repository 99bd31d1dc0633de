"""Watches user code on each worker of `tg.testing.run`, in its thread: delays, kills, records and compares it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from types import CodeType
from typing import Any

from taskgraph.elastic_jobs.parts import Part, RoundId
from taskgraph.elastic_jobs.run import Run
from taskgraph.elastic_jobs.run_rows import RunRows
from taskgraph.elastic_jobs.steps import FEW_STEPS, UNCHANGED
from taskgraph.errors import JobError, StateError, ValueNotEncodable
from taskgraph.graph.sums import Sums
from taskgraph.jobs import ElasticCall
from taskgraph.protocol.messages import Encoded
from taskgraph.testing.compared import OneWorkerRecord, WorkerChecks, format_differing, value_digests
from taskgraph.testing.means import MeansCheck
from taskgraph.testing.scene import Scene
from taskgraph.testing.variables import digests_of_plain, variables_of

__all__ = ["Comparer", "Recorder", "Watcher", "with_watcher"]


def with_watcher(call: ElasticCall, watch: Callable[[Run, CodeType], Watcher]) -> ElasticCall:
    """Wraps a call: whenever a worker runs it, `watch(run, code of the function)` makes the run's watcher."""
    code: CodeType = inspect.unwrap(call.function).__code__

    @functools.wraps(call.function)
    def function(run: Run, **arguments: Any) -> Any:
        run.progress.watch = watcher = watch(run, code)
        value = call.function(run, **arguments)
        watcher.on_value(value)
        return value

    return ElasticCall(function, call.arguments, call.node, call.checkpoint_every_s)


class Watcher:
    """A `taskgraph.elastic_jobs.watching.Watch` that lets the scene delay or kill the worker at each stage."""

    def __init__(self, scene: Scene, run: Run, code: CodeType) -> None:
        self._scene = scene
        self._run = run
        self._code = code
        self._endless = False
        self._had_part = False  # in the round at work; a worker without parts has all stages with the total

    def _run_on_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits in the thread of user code until the loop has run a coroutine."""
        progress = self._run.progress
        with progress.turn.released():
            progress.node.wait_for(work)

    def _kill_if_due(self, stage: str, step: int) -> None:
        """Called at a stage of a step: kills the worker if a kill of the test is due (`Scene.kill_if_due`)."""
        if self._scene.kills:
            self._run_on_loop(lambda: self._scene.kill_if_due(self._run.worker, stage, step))

    def on_copied_state(self, step: int) -> None:
        pass

    def at_boundary(self, step: int, state: Any) -> None:
        self._run_on_loop(lambda: self._scene.begin_step(self._run.worker, step, self._endless))

    def at_last_boundary(self, step: int, state: Any) -> None:
        pass

    def on_group(self) -> None:
        pass

    def trials(self, round_id: RoundId, part: Part, feed: RunRows) -> Iterator[Part]:
        self._endless = feed.is_endless
        return iter(())

    def after_trial(self, part: Part, sums: Sums) -> None:
        pass

    def before_part(self, round_id: RoundId, part: Part) -> None:
        self._had_part = True
        self._kill_if_due("part", round_id.step)

    def after_part(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        if not self._run.progress.node.parts_left:
            self._kill_if_due("sums", round_id.step)

    def at_total(self, round_id: RoundId, parts: int) -> None:
        for stage in ("total",) if self._had_part else ("part", "sums", "total"):
            self._kill_if_due(stage, round_id.step)
        self._had_part = False

    def before_piece(self) -> None:
        pass

    def at_shard_stage(self, stage: str, done: int) -> None:
        if stage == "part":
            self._run_on_loop(lambda: self._scene.begin_step(self._run.worker, done, endless=False))
        self._kill_if_due(stage, done)

    def after_piece(self, call: str, position: int, piece: int, found: Encoded) -> Encoded:
        return found

    def on_report(self, position: int, step: int, numbers: dict[str, float]) -> None:
        pass

    def on_value(self, value: Any) -> None:
        """Called when user code has returned the job's value."""


class Recorder(Watcher):
    """Records what one worker alone computes. Checks also that no mean is summed, and no sum averaged."""

    def __init__(self, record: OneWorkerRecord, scene: Scene, run: Run, code: CodeType) -> None:
        super().__init__(scene, run, code)
        self._record = record
        self._means = MeansCheck()
        self._before_piece: dict[str, bytes] = {}
        self._trained = False  # a part has called `part.backward`

    def at_boundary(self, step: int, state: Any) -> None:
        super().at_boundary(step, state)
        self.at_last_boundary(step, state)
        self._record.steps = step + 1
        states = self._record.states
        if step == FEW_STEPS and self._trained and states[0] and states[step] == states[0]:
            raise StateError(UNCHANGED)
        self._record.variables[step] = digests_of_plain(variables_of(self._code))

    def at_last_boundary(self, step: int, state: Any) -> None:
        self._record.states[step] = self._run.progress.digests(state)

    def on_group(self) -> None:
        raise JobError(
            "tg.testing.run: strict mode compares with a run of one worker, and what a group computes depends on how "
            "many workers it has: give nodes=3, strict=False"
        )

    def trials(self, round_id: RoundId, part: Part, feed: RunRows) -> Iterator[Part]:
        super().trials(round_id, part, feed)
        return self._means.trials(round_id, part, feed)

    def after_trial(self, part: Part, sums: Sums) -> None:
        self._means.after_trial(part, sums)

    def after_part(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        self._means.after_part(round_id, part, sums)
        if round_id.step == 0 and "weight" in sums.tree():
            self._trained = True
        self._record.add_part(round_id, part, sums)

    def at_total(self, round_id: RoundId, parts: int) -> None:
        self._means.at_total()

    def before_piece(self) -> None:
        self._before_piece = self._digests()

    def _digests(self) -> dict[str, bytes]:
        """Returns digests of the state by path; {} if a value has no encoding yet: the first step reports that."""
        try:
            return self._run.progress.digests(self._run.named)
        except (ValueError, ValueNotEncodable):  # ValueError: a lazy parameter
            return {}

    def after_piece(self, call: str, position: int, piece: int, found: Encoded) -> Encoded:
        if changed := format_differing(self._before_piece, self._digests()):
            raise StateError(
                f"{call} changed {changed} in run.state, and its function runs on one worker only: change the state "
                f"after it, by what it returns"
            )
        self._record.results[position, piece] = found
        return found

    def on_report(self, position: int, step: int, numbers: dict[str, float]) -> None:
        self._record.reports.setdefault((step, position), []).append(numbers)

    def on_value(self, value: Any) -> None:
        self._record.value = value_digests(value)


class Comparer(Watcher):
    """Compares what a worker computes with the record of one worker alone."""

    def __init__(self, record: OneWorkerRecord, scene: Scene, run: Run, code: CodeType) -> None:
        super().__init__(scene, run, code)
        self._comparison = WorkerChecks(record, run.worker)

    def on_copied_state(self, step: int) -> None:
        self._comparison.note_joined(step)

    def at_boundary(self, step: int, state: Any) -> None:
        self._comparison.note_suspect_variables(step, variables_of(self._code))
        self._comparison.check_step(step, self._run.progress.digests(state))
        super().at_boundary(step, state)

    def at_last_boundary(self, step: int, state: Any) -> None:
        self._comparison.check_state(step, self._run.progress.digests(state))

    def after_part(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        self._comparison.check_part(round_id, part, sums)
        super().after_part(round_id, part, sums)

    def at_total(self, round_id: RoundId, parts: int) -> None:
        self._comparison.check_total(round_id)
        super().at_total(round_id, parts)

    def after_piece(self, call: str, position: int, piece: int, found: Encoded) -> Encoded:
        return self._comparison.check_result(call, position, piece, found)

    def on_report(self, position: int, step: int, numbers: dict[str, float]) -> None:
        self._comparison.check_report(position, step, numbers)

    def on_value(self, value: Any) -> None:
        if not self._run.deals:
            self._comparison.check_value(value)
