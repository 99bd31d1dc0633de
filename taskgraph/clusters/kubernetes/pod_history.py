"""What happened to a job's pods, from what a watch says of them: each thing once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taskgraph.clusters.kubernetes.why_gone import Seen, restarted, waiting_reason, why_gone

__all__ = ["PodHistory"]


class PodHistory:
    """Follows pods. Both methods return what is new, as (the pod's name, what happened)."""

    def __init__(self) -> None:
        self._pods: dict[str, Mapping[str, Any]] = {}
        self._reported: dict[str, set[str]] = {}
        self._is_first = True

    def listed(self, pods: Sequence[Mapping[str, Any]]) -> list[tuple[str, Seen]]:
        """Takes a whole list of pods. The first one says nothing of pods that have ended: that is history."""
        there = {_uid(pod): pod for pod in pods}
        found = [each for uid in [uid for uid in self._pods if uid not in there] for each in self._gone(uid)]
        for uid, pod in there.items():
            if self._is_first and why_gone(pod) is not None:
                self._pods[uid], self._reported[uid] = pod, {"gone"}
            else:
                found += self.changed("MODIFIED", pod)
        self._is_first = False
        return found

    def changed(self, change: str, pod: Mapping[str, Any]) -> list[tuple[str, Seen]]:
        """Takes a change of a watch: ADDED, MODIFIED or DELETED."""
        uid = _uid(pod)
        reported, before = self._reported.setdefault(uid, set()), self._pods.get(uid)
        self._pods[uid] = pod
        found = []
        if "gone" not in reported:
            if (seen := restarted(before, pod)) is not None:
                found.append(seen)
            if (gone := why_gone(pod)) is not None:
                reported.add("gone")
                found.append(gone)
            elif (waits := waiting_reason(pod)) is not None and waits.kind not in reported:
                reported.add(waits.kind)
                found += [waits] if waits.kind != "restarting" else []  # why it ended is reported each time
        named = [(_name(pod), seen) for seen in found]
        return [*named, *self._gone(uid)] if change == "DELETED" else named

    def _gone(self, uid: str) -> list[tuple[str, Seen]]:
        """Forgets a pod that is no longer there; it may have gone without a word."""
        pod, reported = self._pods.pop(uid), self._reported.pop(uid)
        if "gone" in reported:
            return []
        return [(_name(pod), Seen("deleted", "is gone: it was deleted"))]


def _uid(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])
