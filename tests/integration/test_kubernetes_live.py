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
from cli_kit import Cli, Done, sums

pytest.importorskip("lightkube")
from kubelet_kit import Api, Kubelet  # it needs lightkube's packages

from taskgraph.coordination.embedded import EmbeddedEtcd

DRIVERS = Path(__file__).parent / "drivers"
MACHINES = ["tg-m1", "tg-m2", "tg-m3", "tg-m4"]
LIMIT_S = 40.0
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

    async def __call__(self, *words: str, **env: str) -> Done:
        return await self.cli(*words, KUBECONFIG=os.environ["KUBECONFIG"], **env)

    async def submit(self, driver: str, *words: str, cpu: str = "2", **env: str) -> Done:
        place = ("--namespace", self.namespace, "--etcd", self.etcd, "--image", "test", "--patch", str(self.patch))
        pod = ("--workdir", str(DRIVERS), "--cpu", cpu, "--memory", "1Gi")
        return await self("submit", str(DRIVERS / driver), "--on", "kubernetes", *place, *pod, *words, **env)

    def path(self, kind: str, name: str = "", group: str = "api/v1") -> str:
        return f"/{group}/namespaces/{self.namespace}/{kind}/{name}"

    async def get(self, kind: str, name: str = "", group: str = "api/v1") -> Any:
        return await self.api("GET", self.path(kind, name, group))

    async def pods(self, prefix: str) -> dict[str, Any]:
        """Returns the pods whose names begin so and that are not being deleted."""
        found = (await self.get("pods"))["items"]
        names = {each["metadata"]["name"]: each for each in found if "deletionTimestamp" not in each["metadata"]}
        return {name: each for name, each in names.items() if name.startswith(prefix)}

    async def ready(self, prefix: str, count: int) -> dict[str, Any]:
        """Waits until so many pods are ready, and returns them."""

        async def look() -> dict[str, Any]:
            found = await self.pods(prefix)
            return found if sum(map(is_ready, found.values())) == count else {}

        return dict(await until(look))

    async def status(self, job: str) -> dict[str, Any]:
        done = await self("status", job, "--json")
        return dict(json.loads(done.out)) if done.code == 0 else {}

    async def events(self, job: str) -> list[dict[str, Any]]:
        done = await self("events", job, "--json")
        return [json.loads(line) for line in done.out.splitlines()]

    async def event(self, job: str, kind: str) -> dict[str, Any]:
        """Waits for an event of this kind."""

        async def look() -> dict[str, Any] | None:
            return next((each for each in await self.events(job) if each["kind"] == kind), None)

        return dict(await until(look))


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
    if others := [each["metadata"]["name"] for each in nodes if "taskgraph-test" not in each["metadata"]["labels"]]:
        await api.http.aclose()
        pytest.skip(f"the cluster of KUBECONFIG has nodes of its own, such as {others[0]}")
    namespace, patch = f"tg-{secrets.token_hex(3)}", folder / "patch.yaml"
    version = await api("GET", "/version")
    patch.write_text(OLD_SERVER if int(version["minor"].rstrip("+")) < 26 else "")
    await api("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    for name, value in (("tg-low", 10), ("tg-high", 1000)):
        made = {"metadata": {"name": name}, "value": value}
        await api("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", made)
    try:
        async with Kubelet(api, folder, MACHINES) as kubelet:
            yield Live(api, kubelet, cli, embedded_etcd.endpoint, namespace, patch)
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
    done = await live.submit("sums.py", "--nodes", "3", "-o", "epochs=6", "--name", "fit")
    assert done.code == 0, done.err
    submitted = time.monotonic() - began

    async def over() -> Any:
        status = (await live.get("jobs", "fit-launcher", "apis/batch/v1"))["status"]
        return status.get("succeeded") or status.get("failed")

    assert await until(over) == 1
    print(f"submitted after {submitted:.2f} s, over after {time.monotonic() - began:.2f} s")
    done = await live("logs", "fit", "--node", "launcher")
    assert done.code == 0, done.err
    values = [json.loads(line)["values"]["0"] for line in done.out.splitlines() if line.startswith("{")]
    assert values == [sums(epochs=6)]
    assert (await live.get("deployments", "fit", "apis/apps/v1"))["spec"]["replicas"] == 0
    done = await live("result", "fit")
    assert done.code == 0, done.err
    done = await live("shutdown", "fit")
    assert done.code == 0, done.err
    for kind, group in (("deployments", "apis/apps/v1"), ("jobs", "apis/batch/v1"), ("secrets", "api/v1")):
        left = (await live.get(kind, group=group))["items"]
        assert not [each["metadata"]["name"] for each in left if each["metadata"]["name"].startswith("fit")]
