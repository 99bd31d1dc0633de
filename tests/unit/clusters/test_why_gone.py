"""Why pods went, from statuses as clusters have written them (recorded, and cut to what is read)."""

from __future__ import annotations

from typing import Any

import pytest

from taskgraph.clusters.kubernetes.pod_history import PodHistory
from taskgraph.clusters.kubernetes.why_gone import why_gone, why_restarted, why_waiting

DELETED = "2026-11-02T10:00:00Z"


def pod(status: dict[str, Any], *, deleted: bool = False, uid: str = "1") -> dict[str, Any]:
    metadata = {"name": f"fit-{uid}", "uid": uid}
    return {"metadata": {**metadata, **({"deletionTimestamp": DELETED} if deleted else {})}, "status": status}


def disruption(reason: str, message: str = "") -> dict[str, Any]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}, condition]}


def ended(code: int, reason: str = "Error", phase: str = "Failed") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"phase": phase, "containerStatuses": [{"name": "node", "restartCount": 0, "state": state}]}


RESTARTED = {
    "phase": "Running",
    "containerStatuses": [
        {
            "name": "node",
            "restartCount": 1,
            "state": {"running": {"startedAt": DELETED}},
            "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
        }
    ],
}
UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/4 nodes are available: 4 Insufficient cpu.",
        }
    ],
}


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (
            pod(disruption("PreemptionByScheduler", "preempting to accommodate a higher priority pod")),
            "preempted",
            "preempting to accommodate",
        ),
        (pod(disruption("EvictionByEvictionAPI", "Eviction API: evicting"), deleted=True), "evicted", "kubectl drain"),
        (pod(disruption("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")), "lost", "taint"),
        (pod(disruption("DeletionByPodGC", "PodGC: node no longer exists")), "lost", "no longer exists"),
        (
            pod(disruption("TerminationByKubelet", "terminated in response to imminent node shutdown")),
            "evicted",
            "",
        ),
        (pod(disruption("SomethingNew")), "evicted", "SomethingNew"),
        # The disruption says more than the exit code, which says the same for a lack of memory.
        (pod({**disruption("PreemptionByScheduler"), **ended(137)}), "preempted", "priority"),
        (pod(ended(137, "OOMKilled")), "oom", "--memory"),
        (pod(ended(137)), "crashed", "a lack of memory is not ruled out"),
        (pod(ended(143)), "ended", "SIGTERM"),
        (pod(ended(75)), "ended", "handed over"),
        (pod(ended(0, "Completed", "Succeeded")), "ended", "by itself"),
        (pod(ended(1)), "crashed", "its log says why"),
        (pod(ended(139)), "crashed", "SIGSEGV"),
        (pod(ended(136)), "crashed", "signal 8"),
        (pod(ended(7)), "crashed", "exit code 7"),
        (
            pod({"phase": "Failed", "reason": "Evicted", "message": "The node was low on: ephemeral-storage. "}),
            "evicted",
            "ephemeral-storage",
        ),
        (pod({"phase": "Running"}, deleted=True), "deleted", "scaled away"),
        (pod({"phase": "Failed"}), "ended", "Failed"),
    ],
)
def test_why_a_pod_went(found: dict[str, Any], kind: str, words: str) -> None:
    seen = why_gone(found)
    assert seen is not None
    assert (seen.kind, words in seen.text) == (kind, True), seen.text


def test_a_pod_that_goes_on_has_not_gone() -> None:
    assert why_gone(pod({"phase": "Running"})) is None
    assert why_gone(pod(RESTARTED)) is None
    assert why_gone(pod({})) is None


def test_a_container_that_is_started_again_says_why() -> None:
    seen = why_restarted(pod({"phase": "Running"}), pod(RESTARTED))
    assert seen is not None
    assert seen.kind == "oom"
    assert "started again" in seen.text
    assert why_restarted(pod(RESTARTED), pod(RESTARTED)) is None


def test_a_container_that_prepared_the_pod_is_no_reason() -> None:
    done = {"initContainerStatuses": [{"name": "prepare", "state": {"terminated": {"exitCode": 0}}}]}
    gone = why_gone(pod({**done, **ended(1)}))
    assert gone is not None and gone.kind == "crashed"
    seen = why_restarted(pod({**done, "phase": "Running"}), pod({**done, **RESTARTED}))
    assert seen is not None and seen.kind == "oom"


def test_why_a_pod_does_not_run() -> None:
    seen = why_waiting(pod(UNSCHEDULABLE))
    assert seen is not None
    assert (seen.kind, "4 Insufficient cpu" in seen.text) == ("unschedulable", True)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "fit:2"'}}
    seen = why_waiting(pod({"phase": "Pending", "containerStatuses": [{"name": "node", "state": waiting}]}))
    assert seen is not None
    assert seen.text == 'does not start: ImagePullBackOff: Back-off pulling image "fit:2"'
    starting = {"waiting": {"reason": "ContainerCreating"}}
    assert why_waiting(pod({"phase": "Pending", "containerStatuses": [{"state": starting}]})) is None


def test_history_says_each_thing_once() -> None:
    history = PodHistory()
    assert [seen.kind for _, seen in history.take_list([pod(UNSCHEDULABLE)])] == ["unschedulable"]
    assert history.take_change("MODIFIED", pod(UNSCHEDULABLE)) == []
    preempted = pod(disruption("PreemptionByScheduler"))
    assert [(name, seen.kind) for name, seen in history.take_change("MODIFIED", preempted)] == [("fit-1", "preempted")]
    assert history.take_change("MODIFIED", pod(ended(143), deleted=True)) == []
    assert history.take_change("DELETED", pod(ended(143), deleted=True)) == []


def test_history_notices_pods_that_went_while_nobody_watched() -> None:
    history = PodHistory()
    history.take_list([pod({"phase": "Running"}, uid="1"), pod({"phase": "Running"}, uid="2")])
    assert [name for name, _ in history.take_list([pod({"phase": "Running"}, uid="2")])] == ["fit-1"]


def test_history_begins_now() -> None:
    history = PodHistory()
    assert history.take_list([pod(ended(137), uid="old")]) == []
    assert history.take_change("DELETED", pod(ended(137), uid="old")) == []
    assert [seen.kind for _, seen in history.take_change("DELETED", pod({"phase": "Running"}, uid="new"))] == [
        "deleted"
    ]
