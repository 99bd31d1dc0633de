"""Why a pod went, or does not start: from what Kubernetes says in the pod's status. Pure.

What says most comes first: the condition DisruptionTarget names who ended the pod (a preemption, an eviction, a lost
machine). Then the kubelet's own reasons (OOMKilled, Evicted), then exit codes: 137 alone may be a lack of memory, a
preemption or a person.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Seen", "restarted", "waiting_reason", "why_gone"]

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
class Seen:
    """What happened to a pod.

    Attributes:
        kind: the kind of the event: preempted, evicted, lost, oom, deleted, ended or crashed; of pods that do not run
            unschedulable, waiting or restarting.
        text: the rest of a sentence that begins with the pod's name.
    """

    kind: str
    text: str


def why_gone(pod: Mapping[str, Any]) -> Seen | None:
    """Returns why a pod ended or is ending; None: it goes on, as far as its status says."""
    status = pod.get("status") or {}
    if (found := _disruption(status)) is not None:
        return found
    ended = [state for state in _states(status) if state]
    if any(state.get("reason") == "OOMKilled" for state in ended):
        return _out_of_memory()
    if status.get("reason") in ("Evicted", "NodeShutdown", "Terminated", "NodeLost", "UnexpectedAdmissionError"):
        message = status.get("message", "").strip()
        return Seen("evicted", f"was evicted ({status['reason']})" + (f": {message}" if message else ""))
    if pod.get("metadata", {}).get("deletionTimestamp"):
        return Seen("deleted", "leaves: it was deleted (scaled away, replaced by a rollout, preempted, or by a person)")
    if status.get("phase") in ("Failed", "Succeeded"):
        failed = [state for state in ended if state.get("exitCode")]  # not those that prepared the pod
        return _by_code((failed or ended)[0]) if ended else Seen("ended", f"ended ({status['phase']})")
    return None


def restarted(before: Mapping[str, Any] | None, pod: Mapping[str, Any]) -> Seen | None:
    """Returns why a container that was started again had ended, since `before`; None: none was, or in good order."""
    if before is None:
        return None
    old = _restarts(before)
    for container in _containers(pod.get("status") or {}):
        if int(container.get("restartCount", 0)) <= old.get(container.get("name", ""), 0):
            continue
        for state in ("lastState", "state"):
            if ended := (container.get(state) or {}).get("terminated"):
                if ended.get("exitCode") == 0:  # it was drained, or the job has ended: events say so already
                    return None
                found = _out_of_memory() if ended.get("reason") == "OOMKilled" else _by_code(ended)
                return Seen(found.kind, f"{found.text}; its container is started again")
        return Seen("ended", "was started again")
    return None


def waiting_reason(pod: Mapping[str, Any]) -> Seen | None:
    """Returns why a pod does not run yet, as the scheduler or the kubelet says; None: it runs, or is about to."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Seen("unschedulable", f"has no machine: {condition.get('message') or condition.get('reason', '')}")
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            return Seen("waiting", "waits in its queue")
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason")) and reason not in _STARTING:
            message = waiting.get("message", "").strip()
            return Seen(
                "restarting" if reason == "CrashLoopBackOff" else "waiting",
                f"does not start: {reason}" + (f": {message}" if message else ""),
            )
    return None


def _disruption(status: Mapping[str, Any]) -> Seen | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason, message = condition.get("reason", ""), (condition.get("message") or "").strip()
            kind, text = _DISRUPTIONS.get(reason, ("evicted", f"was ended by the cluster ({reason})"))
            return Seen(kind, f"{text} ({message})" if message else text)
    return None


def _out_of_memory() -> Seen:
    return Seen("oom", "was killed: it used more memory than its limit (OOMKilled): give more with --memory")


def _by_code(ended: Mapping[str, Any]) -> Seen:
    code = int(ended.get("exitCode", 0))
    text = _CODES.get(code) or (f"was killed by signal {code - 128}" if code > 128 else f"failed (exit code {code})")
    return Seen("ended" if code in (0, _DRAINED, 143) else "crashed", text)


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _states(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields how the containers of a pod ended."""
    for container in _containers(status):
        yield (container.get("state") or {}).get("terminated") or {}


def _restarts(pod: Mapping[str, Any]) -> dict[str, int]:
    """Returns how often each container was started again."""
    found = _containers(pod.get("status") or {})
    return {each.get("name", ""): int(each.get("restartCount", 0)) for each in found}
