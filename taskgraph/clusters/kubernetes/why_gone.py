"""Why a pod went, or does not start: from what Kubernetes says in the pod's status. Pure.

What says most comes first: the condition DisruptionTarget names who ended the pod (a preemption, an eviction, a lost
machine). Then the kubelet's own reasons (OOMKilled, Evicted), then exit codes: 137 alone may be a lack of memory, a
preemption or a person.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PodEvent", "why_gone", "why_restarted", "why_waiting"]

_DRAINED = 75
"""The exit code of a node that was drained while its job goes on, with `--drained-code 75`."""
_DISRUPTIONS = {
    "PreemptionByScheduler": ("preempted", "was preempted: the scheduler gave its place to pods of higher priority"),
    "EvictionByEvictionAPI": ("evicted", "was evicted, as by `kubectl drain` or an autoscaler"),
    "DeletionByTaintManager": ("lost", "was removed: its machine has a taint that it does not tolerate, or is lost"),
    "DeletionByPodGC": ("lost", "was removed: its machine is gone"),
    "TerminationByKubelet": ("evicted", "was ended by its machine, which lacks resources or shuts down"),
}
"""By reason of the condition DisruptionTarget: the kind of the event, and its words."""
_CODES = {
    0: "ended by itself (exit code 0)",
    1: "failed (exit code 1): its log says why",
    2: "was started wrongly (exit code 2): its log says how",
    3: "could not reach etcd (exit code 3)",
    _DRAINED: f"handed over and left (exit code {_DRAINED})",
    134: "crashed (SIGABRT)",
    137: "was killed (SIGKILL): by a person or its machine; a lack of memory is not ruled out",
    139: "crashed (SIGSEGV)",
    143: "was ended (SIGTERM)",
}
_STARTING = ("ContainerCreating", "PodInitializing")
"""Reasons of waiting that pass by themselves."""


@dataclass(frozen=True, slots=True)
class PodEvent:
    """What happened to a pod, for the job's events.

    Attributes:
        kind: the kind of the event: preempted, evicted, lost, oom, deleted, ended or crashed; of pods that do not run
            unschedulable, waiting or restarting.
        text: the rest of a sentence that begins with the pod's name.
    """

    kind: str
    text: str


def why_gone(pod: Mapping[str, Any]) -> PodEvent | None:
    """Returns why a pod ended or is ending; None: it goes on, as far as its status says."""
    status = pod.get("status") or {}
    if (found := _why_disrupted(status)) is not None:
        return found
    ended = [state for state in _terminations(status) if state]
    if any(state.get("reason") == "OOMKilled" for state in ended):
        return _out_of_memory()
    if status.get("reason") in ("Evicted", "NodeShutdown", "Terminated", "NodeLost", "UnexpectedAdmissionError"):
        message = status.get("message", "").strip()
        return PodEvent("evicted", f"was evicted ({status['reason']})" + (f": {message}" if message else ""))
    if pod.get("metadata", {}).get("deletionTimestamp"):
        return PodEvent(
            "deleted", "leaves: it was deleted (scaled away, replaced by a rollout, preempted, or by a person)"
        )
    if status.get("phase") in ("Failed", "Succeeded"):
        failed = [state for state in ended if state.get("exitCode")]  # not those that prepared the pod
        return _by_exit_code((failed or ended)[0]) if ended else PodEvent("ended", f"ended ({status['phase']})")
    return None


def why_restarted(before: Mapping[str, Any] | None, pod: Mapping[str, Any]) -> PodEvent | None:
    """Returns why a container ended that was started again since `before`; None: none was, or it ended with code 0."""
    if before is None:
        return None
    old = _restart_counts(before)
    for container in _containers(pod.get("status") or {}):
        if int(container.get("restartCount", 0)) <= old.get(container.get("name", ""), 0):
            continue
        for state in ("lastState", "state"):
            if ended := (container.get(state) or {}).get("terminated"):
                if ended.get("exitCode") == 0:  # it was drained, or the job has ended: events say so already
                    return None
                found = _out_of_memory() if ended.get("reason") == "OOMKilled" else _by_exit_code(ended)
                return PodEvent(found.kind, f"{found.text}; its container is started again")
        return PodEvent("ended", "was started again")
    return None


def why_waiting(pod: Mapping[str, Any]) -> PodEvent | None:
    """Returns why a pod does not run yet, as the scheduler or the kubelet says; None: it runs, or is about to."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return PodEvent(
                "unschedulable", f"has no machine: {condition.get('message') or condition.get('reason', '')}"
            )
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            return PodEvent("waiting", "waits in its queue")
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason")) and reason not in _STARTING:
            message = waiting.get("message", "").strip()
            return PodEvent(
                "restarting" if reason == "CrashLoopBackOff" else "waiting",
                f"does not start: {reason}" + (f": {message}" if message else ""),
            )
    return None


def _why_disrupted(status: Mapping[str, Any]) -> PodEvent | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason, message = condition.get("reason", ""), (condition.get("message") or "").strip()
            kind, text = _DISRUPTIONS.get(reason, ("evicted", f"was ended by the cluster ({reason})"))
            return PodEvent(kind, f"{text} ({message})" if message else text)
    return None


def _out_of_memory() -> PodEvent:
    return PodEvent("oom", "was killed: it used more memory than its limit (OOMKilled): give more with --memory")


def _by_exit_code(ended: Mapping[str, Any]) -> PodEvent:
    code = int(ended.get("exitCode", 0))
    text = _CODES.get(code) or (f"was killed by signal {code - 128}" if code > 128 else f"failed (exit code {code})")
    return PodEvent("ended" if code in (0, _DRAINED, 143) else "crashed", text)


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _terminations(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields how each container of a pod ended, as Kubernetes has it; {}: it has not."""
    for container in _containers(status):
        yield (container.get("state") or {}).get("terminated") or {}


def _restart_counts(pod: Mapping[str, Any]) -> dict[str, int]:
    """Returns how often each container was started again."""
    found = _containers(pod.get("status") or {})
    return {each.get("name", ""): int(each.get("restartCount", 0)) for each in found}
