"""Looking at and acting on a running job, and jobs that are submitted to one's own etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from cli_kit import DRIVER, Cli, Command, Done, printed, shell, sums
from processes_kit import LIMIT_S, becomes, gone, stopped

from taskgraph.coordination.embedded import EmbeddedEtcd


async def status(cli: Cli, *arguments: str) -> dict:
    done = await cli("status", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


async def interrupted_twice(launch: Command) -> Done:
    """A launcher whose nodes cannot hand over, in an epoch that does not end: it is told to wait for them no longer."""
    launch.process.send_signal(signal.SIGINT)
    await launch.until("once more to end them at once")
    with contextlib.suppress(ProcessLookupError):  # they had left by then
        launch.process.send_signal(signal.SIGINT)
    done = await launch.done()
    assert done.code == 130, done.err
    return done


@pytest.mark.smoke
async def test_status_shows_roles(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2")
    text = ""
    async with asyncio.timeout(LIMIT_S):
        while "  running 0:" not in text:  # nodes write the event that the job began in the background
            text = (await cli("status")).out  # the only job: it needs no name
    assert text.startswith("sums  running 0:") and " epoch 2/5 " in text
    assert "NODE" in text and "n1" in text and "n2" in text and "leader" in text
    assert "task 0 'record' " in text.split("waits for  ")[1], text
    rows = (await cli("status", "--task", "0-1")).out.splitlines()
    assert [line for line in rows if line.startswith("0 ") and "record, " in line], rows
    logs = Path(text.split("logs: ")[1].splitlines()[0])
    assert sorted(path.name for path in logs.glob("n*.log")) == ["n1.log", "n2.log"]  # noqa: ASYNC240 (two files)
    assert "warning" not in text, "an embedded etcd of any version is fine"
    found = await status(cli, "sums")
    assert (found["state"], found["epoch"], len(found["nodes"]), len(found["tasks"])) == ("running", 2, 2, 7)
    assert all(len(task["in_sync"]) == 2 for task in found["tasks"])
    assert found["tasks"][0]["processor"] == "record" and found["tasks"][0]["running_s"] > 0
    assert {node["pid"] for node in found["nodes"]} <= cli.processes().keys()
    watching = await cli.start("status", "sums", "--watch", "--json")
    follow = await cli.start("events", "--follow", "--json")
    await follow.until("began", out=True)
    await watching.until('"running"', out=True)
    cli.open()
    assert (await run.done()).code == 0
    assert (await watching.done()).code == 0
    done = await follow.done()
    assert done.code == 0 and json.loads(done.out.splitlines()[-1])["kind"] == "finished"


async def test_commands_name_a_killed_launcher(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2")
    watching = await cli.start("status", "sums", "--watch", "--json")
    launching = await cli.start("launch", "sums", "--nodes", "1")
    follow = await cli.start("events", "--follow", "--json")
    await follow.until("began", out=True)
    await watching.until('"running"', out=True)
    await launching.until("the job began")
    run.process.kill()
    for command in (watching, follow, launching):
        done = await command.done()
        assert done.code == 3 and f"(process {run.process.pid}) was killed" in done.err, done.err
        assert "watch of" not in done.err


@pytest.mark.smoke
async def test_kill_changes_no_number(cli: Cli) -> None:
    run = await cli.paused("--nodes", "3", "--json")
    before = (await status(cli))["tasks"][0]
    done = await cli("kill", "sums", "--task", "0")
    assert done.code == 0, done.err
    assert f"sent SIGKILL to {before['primary']} (process " in done.out and "the primary of task 0" in done.out
    pid = int(done.out.split("(process ")[1].split()[0])
    await run.until(" moved to ")
    await gone(pid)
    cli.open()
    done = await run.done()
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["0"] == sums() and result["failovers"] > 0
    told = (await cli("events", "sums")).out
    assert "takeover" in told and "finished" in told
    await cli.nothing_left()


async def test_a_stopped_node_can_be_killed_though_it_does_not_answer(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2", "--json")
    primary = (await status(cli))["tasks"][0]["primary"]
    pid = next(node["pid"] for node in (await status(cli))["nodes"] if node["name"] == primary)
    assert "sent SIGSTOP" in (await cli("kill", "--task", "0", "--signal", "SIGSTOP")).out
    seen = await cli("status")
    assert "no answer in 2 s" in seen.out
    done = await cli("kill", "--node", primary, "--signal", "9")
    assert done.code == 0 and f"sent SIGKILL to {primary} (process {pid}" in done.out
    cli.open()
    done = await run.done()
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["values"]["0"] == sums()


async def test_kill_spares_the_only_replica(cli: Cli) -> None:
    """The job failed at once, and the command had said nothing of that."""
    run = await cli.paused("--nodes", "1", "--json")
    done = await cli("kill", "sums", "--task", "0")
    assert done.code == 2 and "only n1 has the state of task" in done.err
    until = "wait until `taskgraph status sums` shows one more in sync"
    assert f"start another node (`taskgraph launch sums`) and {until}, or kill it with --force" in done.err
    assert [node["pid"] for node in (await status(cli))["nodes"]], "nobody was hit"
    done = await cli("kill", "sums", "--task", "0", "--force")
    assert (
        done.code == 0 and "sent SIGKILL to n1" in done.out and "has the state of tasks 0-6: the job fails" in done.err
    )
    assert (await run.done()).code == 1


@pytest.mark.smoke
async def test_drain_hands_over_and_leaves(cli: Cli) -> None:
    run = await cli.paused("--nodes", "3", "--json", epoch=3)
    primary = (await status(cli))["tasks"][0]["primary"]
    done = await cli("drain", "--node", primary)
    assert done.code == 0 and f"{primary} (process " in done.out and "hands its tasks over" in done.out
    cli.open()
    done = await run.done()
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["0"] == sums() and result["failovers"] == 0


async def test_drain_of_the_only_node_does_nothing_unless_forced(cli: Cli) -> None:
    run = await cli.paused("--nodes", "1")
    done = await cli("drain", "--node", "n1")
    assert done.code == 2 and done.out == "" and "only n1 has tasks 0-6: the state is lost" in done.err, done.err
    assert "taskgraph launch sums" in done.err and not (await status(cli))["nodes"][0]["draining"]
    done = await cli("drain", "--node", "n1", "--force")
    assert done.code == 0 and "hands its tasks over and leaves" in done.out and "only n1 has tasks 0-6" in done.err, (
        done.err
    )
    cli.open()
    await run.done()


@pytest.mark.smoke
async def test_shutdown_ends_a_job_without_a_result(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2")
    follow = await cli.start("events", "sums", "--follow")
    await follow.until("began", out=True)
    done = await cli("shutdown", "sums")
    assert done.code == 0 and done.out == "job sums was ended\n"
    done = await run.done()
    assert done.code == 1 and "Traceback" not in done.err and "failed" not in done.err
    assert done.err.splitlines()[-1] == "taskgraph: the job was ended: shut down by `taskgraph shutdown`"
    done = await follow.done()
    assert done.code == 0 and "cancelled" in done.out
    await cli.nothing_left()
    done = await cli("result", "sums")
    assert done.code == 1 and "the job was ended: shut down by" in done.err


async def test_whom_to_act_on_is_asked_for_clearly(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2")
    primary = (await status(cli))["tasks"][0]["primary"]
    other = next(node["name"] for node in (await status(cli))["nodes"] if node["name"] != primary)
    for arguments, says in [
        (("kill", "sums"), "--task T"),
        (("kill", "sums", "--task", "7"), "tasks 0 to 6"),
        (("kill", "sums", "--node", "n9"), "no node is called 'n9'; registered: n1, n2"),
        (("kill", "sums", "--task", "0", "--signal", "SIGNONE"), "no such signal"),
        (("kill", "sums", "--task", "0", "--node", other), f"its primary is {primary}, "),
        (("drain", "sums", "--node", "n9"), "registered: n1, n2"),
        (("result", "sums"), "still running"),
    ]:
        done = await cli(*arguments)
        assert done.code == 2 and says in done.err, (arguments, done.err)
        assert "Traceback" not in done.err
    done = await cli("status", "none")
    assert done.code == 3 and "No job 'none' runs here. Running here: sums." in done.err
    token = (await cli("token", "sums")).out.strip()
    assert len(bytes.fromhex(token)) == 32
    entry = next((cli.root / "run").rglob("job.json"))
    assert entry.stat().st_mode & 0o777 == 0o600
    cli.open()
    assert (await run.done()).code == 0
    for arguments in (("kill", "sums", "--task", "0"), ("drain", "sums", "--node", "n1"), ("shutdown", "sums")):
        done = await cli(*arguments)
        assert done.code == 3, arguments
        assert "job 'sums' has ended (finished): see `taskgraph status sums`" in done.err


# -- one's own etcd ----------------------------------------------------------------------------------------


@pytest.mark.smoke
async def test_a_submitted_job_is_run_by_launch(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    etcd = ("--etcd", embedded_etcd.endpoint)
    done = await cli("submit", str(DRIVER), "--name", "sub1", *etcd)
    assert done.code == 0, done.err
    assert "taskgraph launch sub1 --nodes N" in done.out
    token = cli.cwd / "sub1.token"
    assert token.stat().st_mode & 0o777 == 0o600
    # TASKGRAPH_* and taskgraph.toml say where, too.
    (cli.cwd / "taskgraph.toml").write_text(f'etcd = ["{embedded_etcd.endpoint}"]\ntoken_file = "wrong"\n')
    done = await cli("launch", "sub1", "--nodes", "2", TASKGRAPH_TOKEN_FILE=str(token))
    assert done.code == 0, done.err
    assert done.out == printed()
    found = await cli("result", "sub1", "--json", "--token-file", str(token))
    assert json.loads(found.out)["values"]["0"] == sums()
    told = (await cli("status", "sub1", "--token-file", str(token))).out
    assert told.startswith("sub1  finished")
    corrupting = embedded_etcd.version in ("3.5.0", "3.5.1", "3.5.2")
    assert ("can lose data" in told) == corrupting, "of somebody's own etcd, which this one is to the job"
    done = await cli("kill", "sub1", "--task", "0", "--token-file", str(token))
    assert done.code == 3 and "job 'sub1' has ended (finished)" in done.err
    missing = await cli("launch", "sub1", "--nodes", "1")
    assert missing.code == 2 and "wrong: there is no such file" in missing.err and "taskgraph submit" in missing.err
    await cli.nothing_left()


@pytest.mark.smoke
async def test_nodes_by_hand_and_uncollected_result(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    etcd, token = ("--etcd", embedded_etcd.endpoint), ("--token-file", "t")
    (cli.cwd / "t").write_text("ab" * 32)
    early = await cli.start("node", "--job", "sub2", "--name", "a", *etcd, *token)
    submitted = await cli(
        "submit", str(DRIVER), "--name", "sub2", "-o", "min_nodes=2", "-o", "blas_threads=2", *etcd, *token
    )
    assert submitted.code == 0, submitted.err
    late = await cli.start("node", "--job", "sub2", "--name", "b", *etcd, *token)
    follow = await cli("events", "sub2", "--follow", "--json", *etcd)
    assert json.loads(follow.out.splitlines()[-1])["kind"] == "finished"
    done = await cli("result", "sub2", "--json", *etcd, *token)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["values"]["0"] == sums() and result["reports"][-1]["numbers"]["threads"] == 2
    assert (await early.done()).code == 0
    assert (await late.done()).code == 0
    await cli.nothing_left()


async def test_a_node_of_a_job_that_failed_says_so_with_the_traceback_and_ends_well(
    embedded_etcd: EmbeddedEtcd, cli: Cli
) -> None:
    """Nobody may follow such a job: an INFO without the word "failed" was all that its nodes' logs had."""
    etcd, token = ("--etcd", embedded_etcd.endpoint), ("--token-file", "sub11.token")
    submitted = await cli("submit", str(DRIVER), "--name", "sub11", "-o", "fail_at=1", *etcd)
    assert submitted.code == 0, submitted.err
    done = await cli("node", "--job", "sub11", *etcd, *token)
    assert done.code == 0
    assert " taskgraph.events INFO failed: task 2, epoch 1, " in done.err, done.err
    _, said, why = done.err.partition(" taskgraph.node ERROR job 'sub11' failed: task 2, epoch 1, ")
    assert said and "\nTraceback (most recent call last):\n" in why and "sums.py" in why, done.err
    await cli.nothing_left()


async def test_a_node_without_the_token_gets_nothing(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    etcd = ("--etcd", embedded_etcd.endpoint)
    run = await cli.paused("--nodes", "2", "--name", "sub3", *etcd)
    (cli.cwd / "other").write_text("cd" * 32)
    done = await cli("kill", "sub3", "--task", "0", *etcd, "--token-file", "other")
    assert done.code == 2 and "refuses" in done.err and "--token-file" in done.err
    async with shell() as stranger:
        done = await stranger("launch", "sub3", *etcd)
        assert done.code == 2 and "--token-file" in done.err
        done = await stranger("token", "sub3", *etcd)
        assert done.code == 2 and "not known here" in done.err
    cli.open()
    assert (await run.done()).code == 0


async def test_a_node_with_another_version_of_the_driver_is_refused(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    etcd = ("--etcd", embedded_etcd.endpoint)
    mine = Path(shutil.copy(DRIVER, cli.cwd / "mine.py"))
    submitted = await cli("submit", "mine.py", "--name", "sub4", *etcd)
    assert submitted.code == 0, submitted.err
    expected = submitted.out.split("driver ")[1].split(";")[0]
    mine.write_bytes(DRIVER.read_bytes() + b"\n# another version\n")  # noqa: ASYNC240 (a few bytes)
    done = await cli("launch", "sub4", "--nodes", "1", *etcd, "--token-file", "sub4.token")
    assert done.code == 1
    assert "refused" in done.err and expected in done.err and "here it has" in done.err, done.err
    assert (await cli("shutdown", "sub4", *etcd)).out == "job sub4 was ended\n"
    assert (await cli("shutdown", "sub4", *etcd)).out == "job sub4 had ended already\n"


async def test_launched_nodes_leave_before_the_etcd_of_the_run_ends(cli: Cli) -> None:
    """The last node of a job is one of `launch`: it must read that the job has ended, or it waits and is killed."""
    run = await cli.start("run", str(DRIVER.with_name("steady.py")), "--nodes", "1", "-o", "epochs=1000000")
    await run.until("epoch ")
    launch = await cli.start("launch", "steady", "--nodes", "1")
    await run.until("n2 has a backup now")
    assert (await cli("drain", "steady", "--node", "n1")).code == 0
    while [node["name"] for node in (await status(cli, "steady"))["nodes"]] != ["n2"]:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.1)
    assert (await cli("shutdown", "steady")).code == 0
    assert (await run.done()).code == 1
    done = await launch.done()
    assert done.code == 1 and "the job was ended: shut down by" in done.err
    assert "has not ended with the job" not in done.err
    await cli.nothing_left()


async def test_submit_needs_an_etcd(cli: Cli) -> None:
    done = await cli("submit", str(DRIVER))
    assert done.code == 2 and "--etcd" in done.err and "taskgraph run" in done.err


async def test_ctrl_c_of_launch_ends_its_nodes_but_not_the_job(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    etcd = ("--etcd", embedded_etcd.endpoint)
    run = await cli.paused("--nodes", "1", "--name", "sub5", "--json", *etcd)
    launch = await cli.start("launch", "sub5", "--nodes", "1", *etcd)
    await run.until("n2")
    assert [n["name"] for n in (await status(cli, "sub5"))["nodes"]] == ["n1", "n2"], "names are unique in a job"
    await interrupted_twice(launch)
    cli.open()
    done = await run.done()
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["values"]["0"] == sums()
    assert os.listdir(cli.root / "run" / "taskgraph" / "jobs") == []
    await cli.nothing_left()


async def test_nodes_of_a_run_are_scaled_and_their_logs_shown(cli: Cli) -> None:
    run = await cli.paused("--nodes", "1")
    more = await cli("scale", "2")
    assert more.code == 0 and "job sums on local, 2 nodes: 1 more started" in more.out, more.err
    shown = await cli("logs", "--node", "n1")
    assert shown.code == 0 and "the job began" in shown.out, shown.err
    run.interrupt()
    assert (await run.done()).code == 130
    (cli.root / "run/taskgraph/placed/sums.log").unlink()  # what the command in the background printed is kept
    await cli.nothing_left()


async def test_launch_ends_with_a_run_that_ends_as_it_begins(cli: Cli) -> None:
    run = await cli.paused("--nodes", "1")
    launch = await cli.start("launch", "sums")

    def sockets() -> int:
        found = 0
        for fd in Path(f"/proc/{launch.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # descriptors come and go
                found += os.readlink(fd).startswith("socket:")
        return found

    await becomes(lambda: sockets() >= 4)
    await asyncio.sleep(0.04)  # it asks the run's etcd for the job now
    with stopped(launch.process.pid):
        run.interrupt()
        assert (await run.done()).code == 130
    done = await launch.done()
    assert done.code == 3 and "job 'sums' has ended" in done.err, done
