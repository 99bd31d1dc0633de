"""Kubeconfigs that cannot be used are errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskgraph.clusters.kubernetes.client import opened_cluster
from taskgraph.errors import JobError

CONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: no-such-program}}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""


async def test_empty_variable_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(CONFIG.replace("user: u}", "user: u, namespace: mine}"))
    monkeypatch.setenv("KUBECONFIG", "")
    async with opened_cluster({"context": "c"}) as cluster:
        assert cluster.namespace == "mine"


@pytest.mark.parametrize(
    ("text", "context", "message"),
    [
        (None, "", "kubeconfig: Configuration file .* not found: name one with --kubeconfig"),
        (CONFIG, "other", "kubeconfig: Context 'other' not found"),
        ("a: [", "", "(?s)kubeconfig: while parsing.*name one"),
        ("{}", "", "kubeconfig: 'clusters'"),
        (CONFIG, "", "kubeconfig: auth exec api version .*/v1 not implemented: use one with a token"),
    ],
)
async def test_unusable_kubeconfigs(tmp_path: Path, text: str | None, context: str, message: str) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    where = {"kubeconfig": str(path), **({"context": context} if context else {})}
    with pytest.raises(JobError, match=message):
        async with opened_cluster(where) as cluster:
            await cluster.get("Job", "fit")
