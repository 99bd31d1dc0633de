"""Jobs on a control plane of Kubernetes, with pods that are processes of this host.

These tests run where KUBECONFIG names a cluster without nodes: they bring their own (`kubelet_kit`). They need the
right to do everything there. On a server older than 1.26 a patch takes out what it does not know.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_proxy_kit import ApiProxy
from cli_kit import Cli, Done, sums
from kubelet_kit import Api, Kubelet

from taskgraph.coordination.embedded import EmbeddedEtcd

DRIVERS = Path(__file__).parent / "drivers"
LIMIT_S = 60.0
OLD_SERVER = """
kind: PodDisruptionBudget
$patch: delete
---
kind: Job
spec: {podFailurePolicy: null}
"""

pytestmark = pytest.mark.skipif(
    "KUBECONFIG" not in os.environ, reason="KUBECONFIG names no cluster (one without nodes) for the live tests"
)


@dataclass
class Live:
    """A namespace of a cluster, an etcd for its jobs, and the shell of a user."""

    api: Api
    kubelet: Kubelet
    cli: Cli
    etcd: str
    namespace: str
    patch: Path
    job: str

    async def __call__(self, *words: str, **env: str) -> Done:
        return await self.cli(*words, **{"KUBECONFIG": os.environ["KUBECONFIG"], **env})

    async def submit(self, driver: str, *words: str, cpu: str = "1", **env: str) -> Done:
        place = ("--namespace", self.namespace, "--etcd", self.etcd, "--image", "test", "--patch", str(self.patch))
        pod = ("--workdir", str(DRIVERS), "--cpu", cpu, "--memory", "1Gi", "--node-selector", f"tg={self.namespace}")
        return await self(
            *("submit", str(DRIVERS / driver), "--name", self.job, "--on", "kubernetes", *place, *pod, *words), **env
        )

    def path(self, kind: str, name: str = "", group: str = "api/v1") -> str:
        return f"/{group}/namespaces/{self.namespace}/{kind}/{name}"

    async def get(self, kind: str, name: str = "", group: str = "api/v1") -> Any:
        return await self.api("GET", self.path(kind, name, group))

    async def pods(self, prefix: str) -> dict[str, Any]:
        """Returns the pods whose names begin so and that are not being deleted."""
        found = (await self.get("pods"))["items"]
        names = {each["metadata"]["name"]: each for each in found if "deletionTimestamp" not in each["metadata"]}
        return {name: each for name, each in names.items() if name.startswith(prefix)}

    async def ready(self, count: int) -> dict[str, Any]:
        """Waits until so many nodes are ready, and returns their pods."""

        async def look() -> dict[str, Any]:
            found = {name: each for name, each in (await self.pods(self.job)).items() if "launcher" not in name}
            return found if sum(map(is_ready, found.values())) == count else {}

        try:
            return dict(await until(look))
        except AssertionError:
            logs = [f"{pod.name}:\n{pod.log.read_text()[-1500:]}" for pod in self.kubelet.running(self.job)]
            raise AssertionError(f"{count} nodes did not get ready:\n{chr(10).join(logs)}") from None

    async def status(self, job: str) -> dict[str, Any]:
        done = await self("status", job, "--json")
        return dict(json.loads(done.out)) if done.code == 0 else {}

    async def events(self, job: str) -> list[dict[str, Any]]:
        done = await self("events", job, "--json")
        return [json.loads(line) for line in done.out.splitlines()]

    async def event(self, job: str, *kinds: str) -> dict[str, Any]:
        """Waits for an event of one of these kinds."""

        async def look() -> dict[str, Any] | None:
            return next((each for each in await self.events(job) if each["kind"] in kinds), None)

        return dict(await until(look))

    async def budget(self, name: str) -> tuple[str, str]:
        """Makes the budget that an old server has under another version; returns its name and its API."""
        made = await self("submit", str(DRIVERS / "steady.py"), "--on", "kubernetes", "--image", "x", "--dry-run",
                          "--etcd", "x:1", "--name", name)  # fmt: skip
        (budget,) = (each for each in yaml.safe_load_all(made.out) if each["kind"] == "PodDisruptionBudget")
        if (await self.get("poddisruptionbudgets", name, "apis/policy/v1")).get("kind") == "PodDisruptionBudget":
            return name, "apis/policy/v1"
        budget["apiVersion"] = "policy/v1beta1"
        await self.api("POST", self.path("poddisruptionbudgets", group="apis/policy/v1beta1"), budget)
        return name, "apis/policy/v1beta1"


def is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


async def until(look: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Waits until `look` returns something."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := await look():
            return found
        await asyncio.sleep(0.1)
    raise AssertionError("it did not come in time")


@pytest.fixture
async def live(cli: Cli, embedded_etcd: EmbeddedEtcd) -> AsyncIterator[Live]:
    api = Api(Path(os.environ["KUBECONFIG"]))
    folder = Path(tempfile.mkdtemp(prefix="tgk-"))
    nodes = (await api("GET", "/api/v1/nodes"))["items"]
    if others := [each["metadata"]["name"] for each in nodes if "tg" not in each["metadata"]["labels"]]:
        await api.http.aclose()
        pytest.skip(f"the cluster of KUBECONFIG has nodes of its own, such as {others[0]}")
    namespace, patch = f"tg-{secrets.token_hex(3)}", folder / "patch.yaml"
    version = await api("GET", "/version")
    patch.write_text(OLD_SERVER if int(version["minor"].rstrip("+")) < 26 else "")
    await api("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    for name, value in (("tg-low", 10), ("tg-mid", 100), ("tg-high", 1000)):
        made = {"metadata": {"name": name}, "value": value}
        await api("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", made)
    try:
        async with Kubelet(api, folder, namespace, [f"{namespace}-m{number}" for number in range(1, 5)]) as kubelet:
            yield Live(api, kubelet, cli, embedded_etcd.endpoint, namespace, patch, f"job-{namespace[3:]}")
            await api("DELETE", f"/api/v1/namespaces/{namespace}")
            for pod in kubelet.pods.values():
                pod.ending = True
                if pod.process is not None and pod.process.returncode is None:
                    kubelet.kill(pod)

            async def gone() -> bool:
                return "code" in await api("GET", f"/api/v1/namespaces/{namespace}")

            await until(gone)
    finally:
        await api.http.aclose()
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_job_runs_to_its_end_and_is_removed(live: Live) -> None:
    began = time.monotonic()
    done = await live.submit("sums.py", "--nodes", "3", "-o", "epochs=6")
    assert done.code == 0, done.err
    submitted = time.monotonic() - began

    async def over() -> Any:
        status = (await live.get("jobs", f"{live.job}-launcher", "apis/batch/v1"))["status"]
        return status.get("succeeded") or status.get("failed")

    assert await until(over) == 1
    print(f"submitted after {submitted:.2f} s, over after {time.monotonic() - began:.2f} s")
    done = await live("logs", live.job, "--node", "launcher")
    assert done.code == 0, done.err
    values = [json.loads(line)["values"]["0"] for line in done.out.splitlines() if line.startswith("{")]
    assert values == [sums(epochs=6)]
    assert (await live.get("deployments", live.job, "apis/apps/v1"))["spec"]["replicas"] == 0
    done = await live("result", live.job)
    assert done.code == 0, done.err
    done = await live("shutdown", live.job)
    assert done.code == 0, done.err
    for kind, group in (("deployments", "apis/apps/v1"), ("jobs", "apis/batch/v1"), ("secrets", "api/v1")):
        left = (await live.get(kind, group=group))["items"]
        assert not [each["metadata"]["name"] for each in left if each["metadata"]["name"].startswith(live.job)]


async def test_scale_logs_and_status(live: Live) -> None:
    done = await live.submit("steady.py", "--nodes", "2", "-o", "epochs=100000")
    assert done.code == 0, done.err
    await live.ready(2)
    done = await live("scale", live.job, "4")
    assert done.out == f"job {live.job} on kubernetes, 4 nodes: Deployment {live.job} has 4 replicas now\n"
    await live.ready(4)
    assert len((await live.status(live.job))["nodes"]) == 4
    done = await live("scale", live.job, "2")

    async def two() -> bool:
        return len((await live.status(live.job))["nodes"]) == 2

    await until(two)
    done = await live("logs", live.job, "--node", next(iter(await live.ready(2))))
    assert done.code == 0, done.err
    following = await live.cli.start("logs", live.job, "--follow", KUBECONFIG=os.environ["KUBECONFIG"])
    await live("shutdown", live.job)
    assert (await following.done()).code == 0
    assert not await live.pods(live.job)


async def test_pods_are_preempted_and_come_back(live: Live) -> None:
    """Four machines of two cores: a job of higher priority takes two of them for a while."""
    done = await live.submit(
        *(
            "steady.py",
            "--nodes",
            "1",
            "--extra-nodes",
            "3",
            "--extra-priority",
            "tg-low",
            "--priority-class",
            "tg-mid",
            "-o",
            "epochs=100000",
        ),
        *("-o", "tasks=8", "--min-nodes", "4"),
        cpu="1500m",
    )
    assert done.code == 0, done.err
    await live.ready(4)
    resources = {"requests": {"cpu": "1500m"}}
    container = {"name": "other", "image": "x", "command": ["sleep", "8"], "resources": resources}
    pod = {"priorityClassName": "tg-high", "restartPolicy": "Never", "containers": [container]}
    pod |= {"terminationGracePeriodSeconds": 1, "nodeSelector": {"tg": live.namespace}}
    other = {"metadata": {"name": "other"}, "spec": {"parallelism": 2, "completions": 2, "template": {"spec": pod}}}
    began = time.monotonic()
    await live.api("POST", live.path("jobs", group="apis/batch/v1"), other)

    async def running() -> bool:
        return len(live.kubelet.running("other")) == 2

    await until(running)
    print(f"preempted: the other job ran after {time.monotonic() - began:.2f} s")
    status = await live.status(live.job)
    assert status["state"] == "running"
    assert len(status["nodes"]) == 2
    done = await live("status", live.job)
    assert "Insufficient cpu" in done.out, done.out
    event = await live.event(live.job, "preempted", "deleted")  # servers before 1.26 do not say why
    assert event["text"].startswith(f"{live.job}-extra-")
    assert "Insufficient cpu" in (await live.event(live.job, "unschedulable"))["text"]
    await live.ready(4)
    print(f"back to size after {time.monotonic() - began:.2f} s")
    assert (await live.status(live.job))["attempt"] == 1
    await live("shutdown", live.job)


async def test_a_killed_node_and_a_lack_of_memory_are_told_apart(live: Live) -> None:
    done = await live.submit("steady.py", "--nodes", "3", "-o", "epochs=100000")
    assert done.code == 0, done.err
    pods = await live.ready(3)
    first, second, _ = pods
    live.kubelet.kill(live.kubelet.find(first), out_of_memory=True)
    event = await live.event(live.job, "oom")
    assert event["text"].startswith(f"{first} was killed: it used more memory than its limit")
    await live.ready(3)
    live.kubelet.kill(live.kubelet.find(second))
    event = await live.event(live.job, "crashed")
    assert event["text"].startswith(f"{second} was killed (SIGKILL)")
    await live.ready(3)
    assert (await live.status(live.job))["state"] == "running"
    await live("shutdown", live.job)


async def test_evictions_wait_until_tasks_have_backups_again(live: Live) -> None:
    """`kubectl drain` of several machines: a budget with readiness lets one node go at a time."""
    done = await live.submit("steady.py", "--nodes", "3", "-o", "epochs=100000")
    assert done.code == 0, done.err
    pods = list(await live.ready(3))
    budget, group = await live.budget(live.job)
    version = group.removeprefix("apis/")

    async def evict(pod: str) -> Any:
        eviction = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod}}
        return await live.api("POST", live.path("pods", f"{pod}/eviction"), eviction)

    async def allowed() -> bool:
        status = (await live.get("poddisruptionbudgets", budget, group)).get("status", {})
        return bool(status.get("disruptionsAllowed"))

    await until(allowed)
    answers = [await evict(pod) for pod in pods[:2]]
    assert [answer.get("code") for answer in answers] in ([201, 429], [None, 429]), answers
    began = time.monotonic()

    async def evicted() -> bool:
        return (await evict(pods[1])).get("code") != 429

    await until(evicted)
    print(f"the second eviction was let through after {time.monotonic() - began:.2f} s")
    await live.ready(3)
    status = await live.status(live.job)
    assert (status["state"], status["attempt"]) == ("running", 1)
    await live("shutdown", live.job)


async def test_a_launcher_that_dies_is_replaced_and_no_node_notices(live: Live) -> None:
    done = await live.submit("steady.py", "--nodes", "2", "-o", "epochs=100000")
    assert done.code == 0, done.err
    await live.ready(2)
    first = live.kubelet.find(f"{live.job}-launcher")
    live.kubelet.kill(first)

    async def another() -> bool:
        found = await live.pods(f"{live.job}-launcher")
        second = [name for name in found if name != first.name and is_ready(found[name])]
        return bool(second) and "epoch" in live.kubelet.find(second[0]).log.read_text()  # it follows the job

    await until(another)
    assert (await live.status(live.job))["attempt"] == 1
    node = next(iter(await live.ready(2)))
    live.kubelet.kill(live.kubelet.find(node))
    assert (await live.event(live.job, "crashed"))["text"].startswith(node)
    done = await live("shutdown", live.job)
    assert done.code == 0, done.err


async def test_a_busy_or_forgetful_server_and_cut_watches_lose_nothing(live: Live, tmp_path: Path) -> None:
    """429, 410, and connections that break, for the command and for the launcher's watch."""
    async with ApiProxy(live.api) as proxy:
        live.kubelet.server = proxy.url
        config = live.api.kubeconfig(tmp_path / "kubeconfig", live.api.token, live.namespace, proxy.url)
        proxy.busy = 3
        done = await live.submit("steady.py", "--nodes", "3", "-o", "epochs=100000", KUBECONFIG=str(config))
        assert (done.code, proxy.busy) == (0, 0), done.err
        first, second, _ = await live.ready(3)
        proxy.expired = 2
        proxy.cut()
        live.kubelet.kill(live.kubelet.find(first))

        async def told(pod: str) -> bool:
            return any(
                each["kind"] == "crashed" and each["text"].startswith(pod) for each in await live.events(live.job)
            )

        await until(lambda: told(first))
        await live.ready(3)
        proxy.busy = 4
        proxy.cut()
        live.kubelet.kill(live.kubelet.find(second))
        await until(lambda: told(second))
        assert proxy.refused == 9
        done = await live("scale", live.job, "2", KUBECONFIG=str(config))
        assert done.code == 0, done.err
        await live("shutdown", live.job)


async def test_missing_rights_are_named_and_nothing_is_left(live: Live, tmp_path: Path) -> None:
    account = {"metadata": {"name": "guest"}}
    await live.api("POST", live.path("serviceaccounts"), account)
    token = await live.api.account_token(live.namespace, "guest")
    config = str(live.api.kubeconfig(tmp_path / "guest", token, live.namespace))
    done = await live.submit("steady.py", KUBECONFIG=config)
    assert (done.code, done.out) == (2, "")
    assert "you lack a right: `get` on `secrets`" in done.err
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "delete"]}
    some = {"apiGroups": [""], "resources": ["secrets", "serviceaccounts"], "verbs": ["create", "patch"]}
    rbac = "rbac.authorization.k8s.io"
    role = {"metadata": {"name": "guest"}, "rules": [rule, some]}
    await live.api("POST", live.path("roles", group=f"apis/{rbac}/v1"), role)
    binding = {
        "metadata": {"name": "guest"},
        "subjects": [{"kind": "ServiceAccount", "name": "guest"}],
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "guest"},
    }
    await live.api("POST", live.path("rolebindings", group=f"apis/{rbac}/v1"), binding)
    done = await live.submit("steady.py", KUBECONFIG=config)
    assert done.code == 2
    assert f"you lack a right: `patch` on `roles` of {rbac}" in done.err
    names = [each["metadata"]["name"] for each in (await live.get("secrets"))["items"]]
    assert not [name for name in names if name.startswith(live.job)]


async def test_taken_names_and_running_jobs_are_left_alone(live: Live) -> None:
    other = {"metadata": {"name": f"{live.job}-launcher"}}
    await live.api("POST", live.path("serviceaccounts"), other)
    done = await live.submit("steady.py")
    assert done.code == 2
    assert f"has a ServiceAccount {live.job}-launcher already, which is not of job '{live.job}'" in done.err
    assert "code" not in await live.get("serviceaccounts", f"{live.job}-launcher")
    await live.api("DELETE", live.path("serviceaccounts", f"{live.job}-launcher"))
    done = await live.submit("sums.py", "--nodes", "2", "-o", "pause_at=2",
                             "-o", f"gate={live.cli.gate}")  # fmt: skip
    assert done.code == 0, done.err
    await live.ready(2)
    done = await live.submit("sums.py")
    assert done.code == 2
    assert f"job '{live.job}' runs in namespace {live.namespace} already" in done.err
    live.cli.open()

    async def over() -> bool:
        return bool((await live.get("jobs", f"{live.job}-launcher", "apis/batch/v1"))["status"].get("succeeded"))

    await until(over)
    done = await live.submit("sums.py", "--nodes", "1", "-o", "epochs=3")  # another run, in place of the one that ended
    assert done.code == 0, done.err
    done = await live("result", live.job)
    assert done.code and not done.out, "these would be the values of the run before"
    not_yet = "and not yet the one that was submitted here: its launcher submits it"
    assert not_yet in done.err or "is still running" in done.err, done.err
    await until(over)
    await live("shutdown", live.job)


async def test_an_etcd_out_of_reach_is_an_error_that_says_the_ways(live: Live) -> None:
    done = await live.submit("steady.py", "--nodes", "1", "-o", "epochs=100000", "--etcd", "127.0.0.1:1")
    assert done.code == 0, done.err
    done = await live("status", live.job)
    assert done.code == 3
    assert (
        f"kubectl --namespace {live.namespace} exec job/{live.job}-launcher -- taskgraph status {live.job}" in done.err
    )
    done = await live("shutdown", live.job)
    assert done.code == 3
    assert await live.pods(live.job)


async def test_a_job_that_never_began_is_removed(live: Live) -> None:
    done = await live.submit("steady.py", "--nodes", "1", "--node-selector", "no=such")
    assert done.code == 0, done.err
    done = await live("status", live.job)
    assert done.code == 3 and "has no machine" in done.err
    done = await live("shutdown", live.job)
    assert done.code == 0, done.err
    assert (await live.get("deployments", live.job, "apis/apps/v1"))["code"] == 404
    assert (await live.get("jobs", f"{live.job}-launcher", "apis/batch/v1"))["code"] == 404


async def test_an_elastic_job_shrinks_and_grows_with_the_same_bits(live: Live) -> None:
    quiet = await live("run", str(DRIVERS / "elastic_fit.py"), "--nodes", "0", "--json", "-o", "passes=300")
    assert quiet.code == 0, quiet.err
    hurry = live.cli.root / "hurry"
    options = ("-o", "passes=300", "-o", "pause_s=0.02", "-o", f"hurry={hurry}")
    done = await live.submit("elastic_fit.py", "--nodes", "3", *options)
    assert done.code == 0, done.err
    first = next(iter(await live.ready(3)))
    live.kubelet.kill(live.kubelet.find(first))
    await live.event(live.job, "crashed")
    await live("scale", live.job, "2")
    await live.ready(2)
    await live("scale", live.job, "4")
    await live.ready(4)
    hurry.touch()

    async def over() -> bool:
        return bool((await live.get("jobs", f"{live.job}-launcher", "apis/batch/v1"))["status"].get("succeeded"))

    await until(over)
    done = await live("logs", live.job, "--node", "launcher")
    (line,) = (line for line in done.out.splitlines() if line.startswith("{"))
    assert json.loads(line)["values"] == json.loads(quiet.out.splitlines()[-1])["values"]
    await live("shutdown", live.job)
