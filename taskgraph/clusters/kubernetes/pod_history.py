"""What happened to a job's pods, from what a watch says of them: each thing once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taskgraph.clusters.kubernetes.why_gone import PodEvent, why_gone, why_restarted, why_waiting

__all__ = ["PodHistory"]


class PodHistory:
    """Follows pods. Both methods return what is new, as (the pod's name, what happened)."""

    def __init__(self) -> None:
        self._pods: dict[str, Mapping[str, Any]] = {}
        self._reported: dict[str, set[str]] = {}
        self._is_first = True

    def take_list(self, pods: Sequence[Mapping[str, Any]]) -> list[tuple[str, PodEvent]]:
        """Takes a list of all pods. Of the first list, pods that have ended already are not reported."""
        there = {_pod_uid(pod): pod for pod in pods}
        found = [each for uid in [uid for uid in self._pods if uid not in there] for each in self._forget(uid)]
        for uid, pod in there.items():
            if self._is_first and why_gone(pod) is not None:
                self._pods[uid], self._reported[uid] = pod, {"gone"}
            else:
                found += self.take_change("MODIFIED", pod)
        self._is_first = False
        return found

    def take_change(self, change: str, pod: Mapping[str, Any]) -> list[tuple[str, PodEvent]]:
        """Takes a change that a watch yields: ADDED, MODIFIED or DELETED, and the pod."""
        uid = _pod_uid(pod)
        reported, before = self._reported.setdefault(uid, set()), self._pods.get(uid)
        self._pods[uid] = pod
        found = []
        if "gone" not in reported:
            if (seen := why_restarted(before, pod)) is not None:
                found.append(seen)
            if (gone := why_gone(pod)) is not None:
                reported.add("gone")
                found.append(gone)
            elif (waits := why_waiting(pod)) is not None and waits.kind not in reported:
                reported.add(waits.kind)
                found += [waits] if waits.kind != "restarting" else []  # why it ended is reported each time
        named = [(_pod_name(pod), seen) for seen in found]
        return [*named, *self._forget(uid)] if change == "DELETED" else named

    def _forget(self, uid: str) -> list[tuple[str, PodEvent]]:
        """Forgets a pod that is no longer there. Returns its end as an event, unless that was reported."""
        pod, reported = self._pods.pop(uid), self._reported.pop(uid)
        if "gone" in reported:
            return []
        return [(_pod_name(pod), PodEvent("deleted", "is gone: it was deleted"))]


def _pod_uid(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


def _pod_name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])
