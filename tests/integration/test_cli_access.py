"""Every command against an etcd that lets in only who has a certificate, or a user and a password."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_kit import DRIVER, Cli, printed, sums
from etcd_kit import etcd_with_tls, etcd_with_users, etcdctl, make_certificates

import taskgraph as tg
from taskgraph.coordination.embedded import EmbeddedEtcd


async def everything(cli: Cli, name: str, *access: str) -> None:
    """submit, launch, node, status, events, kill, drain, result, shutdown, run."""
    token = ("--token-file", f"{name}.token")
    pause = ("-o", "pause_at=2", "-o", f"gate={cli.gate}")
    submitted = await cli("submit", str(DRIVER), "--name", name, *pause, *access)
    assert submitted.code == 0, submitted.err
    told = submitted.out.splitlines()[-1].split()
    assert told[:3] == ["taskgraph", "launch", name]
    launch = await cli.start(*("2" if word == "N" else word for word in told[1:]))
    by_hand = await cli.start("node", "--job", name, "--name", "hand", *access, *token)

    def all_there(found: Any) -> bool:  # the job begins with the first of them
        return {"n1", "n2", "hand"} <= {node["name"] for node in found["nodes"]} and found["epoch"] >= 1

    await cli.status(name, all_there, *access, *token)
    elsewhere = cli.root / "elsewhere"
    elsewhere.mkdir()
    cli.cwd, here = elsewhere, cli.cwd
    done = await cli("status", name, "--json")  # found on this host, from any directory
    assert done.code == 0, done.err
    cli.cwd = here
    elsewhere.rmdir()
    for command in (("kill", name, "--node", "hand", "--signal", "TERM"), ("drain", name, "--node", "n2")):
        done = await cli(*command, *access, *token)
        assert done.code == 0, done.err
    cli.open()
    done = await launch.done()
    assert done.code == 0 and done.out == printed(), done.err
    assert (await by_hand.done()).code == 0
    cli.gate.unlink()
    found, told, ended, done = await asyncio.gather(
        cli("result", name, "--json", *access),
        cli("events", name, *access),
        cli("shutdown", name, *access),
        cli("run", str(DRIVER), "--nodes", "1", "--name", f"{name}-run", *access),
    )
    assert found.code == 0 and json.loads(found.out)["values"]["0"] == sums(), found.err
    assert "finished" in told.out and "job was ended" not in ended.out
    assert done.code == 0 and done.out == printed(), done.err
    await cli.nothing_left()


async def test_with_client_certificates(cli: Cli, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    for path in (certificates.ca, certificates.client, certificates.client_key):
        (cli.cwd / path.name).write_bytes(path.read_bytes())
    async with etcd_with_tls(tmp_path, certificates) as endpoint:
        files = ("--etcd-ca", "ca.pem", "--etcd-cert", "client.pem", "--etcd-key", "client.key")
        await everything(cli, "tls", "--etcd", f"https://{endpoint}", *files)
        refused, plain, unknown = await asyncio.gather(  # each tries for seconds
            cli("status", "tls", "--etcd", f"https://{endpoint}", "--etcd-ca", "ca.pem"),
            cli("status", "tls", "--etcd", endpoint),
            cli("status", "tls", "--etcd", f"https://{endpoint}"),
        )
        assert refused.code == 3 and "wants to see a client certificate" in refused.err, refused.err
        assert plain.code == 3 and "https://" in plain.err and "--etcd-ca" in plain.err, plain.err
        assert unknown.code == 3 and "give that with --etcd-ca" in unknown.err, unknown.err
        assert unknown.err.startswith("taskgraph: "), "no line of a library"


async def test_with_a_user_and_a_password(cli: Cli) -> None:
    (cli.cwd / "word").write_text("word\n")
    (cli.cwd / "wrong").write_text("guess\n")
    async with etcd_with_users("/taskgraph/") as etcd:
        where = ("--etcd", etcd.endpoint)
        await everything(cli, "auth", *where, "--etcd-user", "worker", "--etcd-password-file", "word")
        for command in cli.processes().values():
            assert "word" not in command.split()
        nobody, wrong, found = await asyncio.gather(
            cli("status", "auth", *where),
            cli("status", "auth", *where, "--etcd-user", "worker", "--etcd-password-file", "wrong"),
            cli("result", "auth", *where, TASKGRAPH_ETCD_USER="worker", TASKGRAPH_ETCD_PASSWORD="word"),
        )
        assert nobody.code == 3 and "--etcd-user" in nobody.err, nobody.err
        assert wrong.code == 3 and "invalid user ID or password" in wrong.err, wrong.err
        assert found.code == 0 and found.out == printed()
    async with etcd_with_users("/other/") as etcd:
        access = ("--etcd", etcd.endpoint, "--etcd-user", "worker", "--etcd-password-file", "word")
        done = await cli("run", str(DRIVER), "--nodes", "1", *access)
        assert done.code == 3 and "permission denied" in done.err and "/taskgraph/" in done.err, done.err
    await cli.nothing_left()


async def test_a_job_outlasts_another_password_and_a_permission_that_is_taken_away_for_a_while(cli: Cli) -> None:
    """A node ended with its first write that was refused."""
    (cli.cwd / "word").write_text("word\n")
    async with etcd_with_users("/taskgraph/") as etcd:

        async def root(*arguments: str) -> None:
            await asyncio.to_thread(etcdctl, etcd, "--user", "root:secret", *arguments)

        access = ("--etcd", etcd.endpoint, "--etcd-user", "worker", "--etcd-password-file", "word")
        running = await cli.paused("--nodes", "2", *access)
        await root("role", "revoke-permission", "worker", "--prefix=true", "/taskgraph/")
        cli.open()
        await running.until("permission denied")
        await root("user", "delete", "worker")
        await root("user", "add", "worker:other")
        await root("user", "grant-role", "worker", "worker")
        (cli.cwd / "word").write_text("other\n")
        await root("role", "grant-permission", "worker", "--prefix=true", "readwrite", "/taskgraph/")
        done = await running.done()
        assert done.code == 0 and done.out == printed(), done.err
    await cli.nothing_left()


async def test_tls_where_etcd_does_not_speak_it(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    access = {"TASKGRAPH_ETCD_USER": "x", "TASKGRAPH_ETCD_PASSWORD": "y"}
    over_tls, as_user = await asyncio.gather(
        cli("status", "none", "--etcd", f"https://{embedded_etcd.endpoint}"),
        cli("status", "none", "--etcd", embedded_etcd.endpoint, **access),
    )
    assert over_tls.code == 3 and "does not speak TLS: write http://" in over_tls.err, over_tls.err
    assert as_user.code == 3 and "leave --etcd-user out" in as_user.err, as_user.err


async def test_access_to_ones_own_etcd_does_not_concern_the_embedded_one(cli: Cli) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "1", TASKGRAPH_ETCD_USER="x", TASKGRAPH_ETCD_PASSWORD="y")
    assert done.code == 0 and done.out == printed(), done.err


def test_access_from_python_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKGRAPH_ETCD_USER", "worker")
    with pytest.raises(tg.JobError, match="the password of etcd's user 'worker' is missing"):
        tg.result("any", etcd="127.0.0.1:1")
