"""Nodes for a control plane without containers: the pods bound to them become child processes of the test.

It does what taskgraph sees of a kubelet: variables, volumes (secrets, empty directories), the account's token,
readiness, exit codes, OOMKilled, restarts, logs, and the grace period. A pod's mount paths, and /tmp, are replaced by
directories of its own wherever a word begins with them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import ssl
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import trustme
import yaml

STRATEGIC = "application/strategic-merge-patch+json"
ADDRESS = "127.0.0.1"


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """The API server of a kubeconfig, in its own words."""

    def __init__(self, kubeconfig: Path) -> None:
        self.config = yaml.safe_load(kubeconfig.read_text())
        self.server = self.config["clusters"][0]["cluster"]["server"]
        self.token = self.config["users"][0]["user"]["token"]
        self.http = httpx2.AsyncClient(
            base_url=self.server,
            verify=False,
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=httpx2.Timeout(20, read=None, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=4),
        )

    async def __call__(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """Returns the answer; a refusal has its `code` in it."""
        content = None if body is None else json.dumps(body)
        answer = await self.http.request(method, path, content=content, headers={"Content-Type": kind})
        return answer.json()

    def kubeconfig(self, path: Path, token: str, namespace: str, server: str = "") -> Path:
        """Writes a kubeconfig of another user."""
        cluster = {"server": server or self.server, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "t",
            "clusters": [{"name": "t", "cluster": cluster}],
            "users": [{"name": "t", "user": {"token": token}}],
            "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t", "namespace": namespace}}],
        }
        path.write_text(json.dumps(config))
        return path

    async def account_token(self, namespace: str, account: str) -> str:
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str((await self("POST", path, request))["status"]["token"])


@dataclass
class Pod:
    """A pod that runs here."""

    made: dict[str, Any]
    folder: Path
    process: asyncio.subprocess.Process | None = None
    env: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    out_of_memory: bool = False
    ending: bool = False
    over: bool = False
    ready: bool = False

    @property
    def name(self) -> str:
        return str(self.made["metadata"]["name"])

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.made['metadata']['namespace']}/pods/{self.name}"

    @property
    def container(self) -> dict[str, Any]:
        return dict(self.made["spec"]["containers"][0])

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def words(self, texts: list[str]) -> list[str]:
        """Returns words of a command with variables, and with our directories in place of mounts."""
        filled = [
            re.sub(r"\$\$|\$\((\w+)\)", lambda found: self.env.get(found[1], found[0]) if found[1] else "$", text)
            for text in texts
        ]
        places = {mount["mountPath"]: f"v{index}" for index, mount in enumerate(self.container.get("volumeMounts", []))}
        return [self._own_path(text, {**places, "/tmp": "tmp"}) for text in filled]

    def _own_path(self, text: str, places: dict[str, str]) -> str:
        for path, ours in places.items():
            if text == path or text.startswith(f"{path}/"):
                return f"{self.folder / ours}{text[len(path) :]}"
        return text


class Kubelet:
    """Machines `names`, of `cpu` cores each, with the label `tg` of this value."""

    def __init__(self, api: Api, folder: Path, label: str, names: list[str], cpu: str = "2") -> None:
        self.api, self.folder, self.label, self.names, self.cpu = api, folder, label, names, cpu
        self.server = api.server  # for accounts of pods
        self.lost: set[str] = set()
        self.pods: dict[str, Pod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0
        self._port = 0

    async def __aenter__(self) -> Kubelet:
        server = trustme.CA().issue_cert(ADDRESS)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.configure_cert(context)
        self._server = await asyncio.start_server(self._serve_logs, ADDRESS, 0, ssl=context)
        self._port = self._server.sockets[0].getsockname()[1]
        for name in self.names:
            await self._register(name)
            self._start(self._beat(name))
        self._start(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pod in self.pods.values():
            if pod.process is not None and pod.process.returncode is None:
                _signal(pod, signal.SIGKILL)
                await pod.process.wait()
        for name in self.names:
            await self.api("DELETE", f"/api/v1/nodes/{name}")
        self._server.close()

    def find(self, name: str) -> Pod:
        """Returns the pod of that name, or the only one whose name begins so."""
        (found,) = (pod for pod in self.pods.values() if pod.name.startswith(name) and not pod.over)
        return found

    def running(self, prefix: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.name.startswith(prefix) and not (pod.over or pod.ending)]

    def kill(self, pod: Pod, *, out_of_memory: bool = False) -> None:
        """Kills a pod's process, as the kernel does it if memory is short."""
        pod.out_of_memory = out_of_memory
        _signal(pod, signal.SIGKILL)

    def lose(self, machine: str) -> None:
        """Makes a machine vanish with its pods, without a word."""
        self.lost.add(machine)
        for pod in self.pods.values():
            if pod.made["spec"].get("nodeName") == machine and pod.process is not None and not pod.over:
                _signal(pod, signal.SIGKILL)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"kubelet: {task.exception()!r}", file=sys.stderr)

    async def _register(self, name: str) -> None:
        room = {"cpu": self.cpu, "memory": "16Gi", "pods": "30"}
        status = {
            "capacity": room,
            "allocatable": room,
            "addresses": [{"type": "InternalIP", "address": ADDRESS}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
        }
        labels = {"kubernetes.io/hostname": name, "tg": self.label}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
        await self.api("DELETE", f"/api/v1/nodes/{name}")
        await self.api("POST", "/api/v1/nodes", node)

    async def _beat(self, name: str) -> None:
        while name not in self.lost:
            at = now()
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            status = {"conditions": [{**ready, "lastHeartbeatTime": at, "lastTransitionTime": at}]}
            await self.api("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC)
            await asyncio.sleep(3)

    async def _watch(self) -> None:
        while True:
            listed = await self.api("GET", "/api/v1/pods")
            for made in listed["items"]:
                self._see(made)
            parameters = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
            with contextlib.suppress(httpx2.HTTPError):
                async with self.api.http.stream("GET", "/api/v1/pods", params=parameters) as answer:
                    async for line in answer.aiter_lines():
                        change = json.loads(line)
                        if change["type"] == "ERROR":
                            break
                        if change["type"] in ("ADDED", "MODIFIED"):
                            self._see(change["object"])

    def _see(self, made: dict[str, Any]) -> None:
        uid, machine = made["metadata"]["uid"], made["spec"].get("nodeName")
        if machine not in self.names or machine in self.lost:
            return
        pod, deleted = self.pods.get(uid), made["metadata"].get("deletionTimestamp")
        if pod is None:
            self._count += 1
            self.pods[uid] = pod = Pod(made, self.folder / f"p{self._count}", over=bool(deleted))
            if not deleted and made["status"]["phase"] == "Pending":
                self._start(self._run(pod))
        if deleted and not pod.ending:
            pod.ending = True
            self._start(self._stop(pod, made["metadata"].get("deletionGracePeriodSeconds", 30)))

    async def _run(self, pod: Pod) -> None:
        await self._prepare(pod)
        words = pod.words([*pod.container.get("command", []), *pod.container.get("args", [])])
        always = pod.made["spec"].get("restartPolicy", "Always") == "Always"
        while not pod.ending:
            shutil.rmtree(pod.folder / "tmp", ignore_errors=True)  # a container's own files end with it
            (pod.folder / "tmp").mkdir()
            with pod.log.open("ab") as log:
                pod.process = await asyncio.create_subprocess_exec(
                    *words, env=pod.env, cwd=pod.container.get("workingDir"), stdout=log, stderr=log,
                    stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            running = {"running": {"startedAt": now()}}
            await self._report(pod, "Running", running)
            probing = self._start(self._probe(pod, running))
            code = await pod.process.wait()
            probing.cancel()
            if pod.made["spec"]["nodeName"] in self.lost:
                return
            ended = {
                "exitCode": code if code >= 0 else 128 - code,
                "reason": "OOMKilled" if pod.out_of_memory else "Completed" if code == 0 else "Error",
                "startedAt": now(),
                "finishedAt": now(),
            }
            pod.ready = False
            if pod.ending or not always:
                await self._report(pod, "Succeeded" if code == 0 else "Failed", {"terminated": ended})
                break
            pod.restarts, pod.out_of_memory = pod.restarts + 1, False
            waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
            pod.last = {"terminated": ended}
            await self._report(pod, "Running", waiting)
            await asyncio.sleep(min(0.2 * 2**pod.restarts, 5))
        pod.over = True
        if pod.ending:
            await self._remove(pod)

    async def _prepare(self, pod: Pod) -> None:
        """Makes a pod's directories and variables."""
        pod.folder.mkdir(parents=True)
        metadata, spec = pod.made["metadata"], pod.made["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for index, mount in enumerate(pod.container.get("volumeMounts", [])):
            folder = pod.folder / f"v{index}"
            folder.mkdir(mode=0o700)
            if secret := volumes[mount["name"]].get("secret"):
                path = f"/api/v1/namespaces/{metadata['namespace']}/secrets/{secret['secretName']}"
                while "data" not in (found := await self.api("GET", path)):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                for name, value in found["data"].items():
                    (folder / name).write_bytes(base64.b64decode(value))
        pod.env = {name: value for name, value in os.environ.items() if not name.startswith(("TASKGRAPH_", "KUBE"))}
        pod.env |= {"HOSTNAME": pod.name, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for each in pod.container.get("env", []):
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            pod.env[each["name"]] = pod.words([each["value"]])[0] if source is None else _field(metadata, source)
        if spec.get("automountServiceAccountToken", True) and spec.get("serviceAccountName", "default") != "default":
            token = await self.api.account_token(metadata["namespace"], spec["serviceAccountName"])
            path = self.api.kubeconfig(pod.folder / "kubeconfig", token, metadata["namespace"], self.server)
            pod.env["KUBECONFIG"] = str(path)

    async def _probe(self, pod: Pod, state: dict[str, Any]) -> None:
        probe = pod.container.get("readinessProbe")
        while True:
            ready = True
            if probe is not None:
                words = pod.words(probe["exec"]["command"])
                asking = await asyncio.create_subprocess_exec(*words)
                ready = await asking.wait() == 0
            if ready != pod.ready:
                pod.ready = ready
                await self._report(pod, "Running", state)
            await asyncio.sleep(min(probe.get("periodSeconds", 10), 1) if probe else 60)

    async def _report(self, pod: Pod, phase: str, state: dict[str, Any]) -> None:
        container = {
            "name": pod.container["name"],
            "image": pod.container["image"],
            "imageID": "",
            "ready": pod.ready,
            "restartCount": pod.restarts,
            "state": state,
            "lastState": pod.last,
        }
        ready = "True" if pod.ready else "False"
        conditions = [
            {"type": kind, "status": ready, "lastTransitionTime": now()} for kind in ("Ready", "ContainersReady")
        ]
        status = {
            "phase": phase,
            "podIP": ADDRESS,
            "hostIP": ADDRESS,
            "startTime": now(),
            "conditions": conditions,
            "containerStatuses": [container],
        }
        change = {"metadata": {"uid": pod.made["metadata"]["uid"]}, "status": status}
        await self.api("PATCH", f"{pod.path}/status", change, STRATEGIC)

    async def _stop(self, pod: Pod, grace_s: float) -> None:
        if pod.over or pod.process is None:
            await self._remove(pod)
            return
        _signal(pod, signal.SIGTERM, group=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pod.process.wait(), grace_s)
        if pod.process.returncode is None:
            _signal(pod, signal.SIGKILL)

    async def _remove(self, pod: Pod) -> None:
        uid = pod.made["metadata"]["uid"]
        await self.api("DELETE", pod.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})

    async def _serve_logs(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the API server's GET /containerLogs/NAMESPACE/POD/CONTAINER?follow=true."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path, _, query = head.split()[1].partition("?")
            pod = next((each for each in self.pods.values() if each.name == path.split("/")[3]), None)
            if pod is None:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
            with pod.log.open("rb") as log:
                while True:
                    over = pod.over or "follow=true" not in query
                    while chunk := log.read(1 << 16):
                        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                        await writer.drain()
                    if over:
                        break
                    await asyncio.sleep(0.1)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def _signal(pod: Pod, number: signal.Signals, *, group: bool = True) -> None:
    assert pod.process is not None
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pod.process.pid, number)


def _field(metadata: dict[str, Any], path: str) -> str:
    if found := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
        return str(metadata["labels"][found[1]])
    return {"status.podIP": ADDRESS}.get(path) or str(metadata[path.removeprefix("metadata.")])
