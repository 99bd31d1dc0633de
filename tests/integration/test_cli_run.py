"""`taskgraph run`: numbers, errors, Ctrl-C. Real processes, a real etcd."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import termios
import time
from pathlib import Path

import pytest
from cli_kit import DRIVER, LIMIT_S, PATIENT, TIMEOUTS_S, Cli, printed, shell, sums
from processes_kit import becomes, gone, stopped

import taskgraph as tg
from taskgraph.coordination.embedded import EmbeddedEtcd


@pytest.mark.smoke
async def test_run_prints_json_and_leaves_nothing(cli: Cli) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "3", "--json", "-o", "epochs=4", *PATIENT)
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["0"] == sums(epochs=4)
    assert [report["numbers"]["value"] for report in result["reports"]] == sums(epochs=4)
    assert (result["epochs"], result["failovers"], result["restarts"]) == (4, 0, 0)
    shown = [line.removesuffix("  threads=1") for line in done.err.splitlines() if line.startswith("epoch")]
    assert shown == [f"epoch {epoch}/3  value={value}" for epoch, value in enumerate(sums(epochs=4))]
    assert "printed" not in done.err, "the framework's own lines are no news"
    await cli.nothing_left()


@pytest.mark.smoke
async def test_what_is_kept_of_a_finished_job(cli: Cli) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "1", "--json", "--name", "other")
    kept = await cli("result", "other", "--json")
    assert kept.out == done.out
    assert (await cli("result", "other")).out == printed()
    assert (await cli("status", "other")).out == "other  finished   6 epochs\n"
    told = [json.loads(line)["kind"] for line in (await cli("events", "other", "--json")).out.splitlines()]
    assert told[-1] == "finished" and "began" in told


async def test_the_driver_runs_itself(cli: Cli) -> None:
    done = await cli("--nodes", "1", "-o", "epochs=2", python=(str(DRIVER),))
    assert done.code == 0, done.err
    assert done.out == printed(2)
    done = await cli("status", python=(str(DRIVER),))
    assert done.code == 3 and "No job runs here" in done.err


@pytest.mark.smoke
async def test_everything_in_one_process(cli: Cli) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "0", "--name", "alone", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["name"], result["values"]["0"]) == ("alone", sums())
    assert "epoch 5/5  value=105" in done.err


async def test_blas_threads_are_the_jobs_whatever_started_it(cli: Cli) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "1", "--json", "-o", "blas_threads=3")
    assert json.loads(done.out)["reports"][-1]["numbers"]["threads"] == 3


PRINTS = """
import taskgraph as tg


class Talk(tg.Task, state=["n"]):
    def setup(self):
        self.n = 0

    def compose(self, epoch):
        epoch.processor(self.say)

    def say(self, epoch, ins, outs):
        print(f"task {self.task_id} in epoch {epoch.number}", end="\\n" if epoch.number < 2 else "")
        self.n += 1


@tg.job
def talk(epochs: int = 3) -> tg.Job:
    return tg.Job(tasks=2, epochs=epochs, builder=lambda task_id: Talk(), backups=0)
"""


async def test_what_tasks_print_is_shown_with_the_name_of_the_node(cli: Cli) -> None:
    (cli.cwd / "talk.py").write_text(PRINTS)
    done = await cli("run", "talk.py", "--nodes", "2", "--logs")
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    said = sorted(line.partition(" | ") for line in lines if " | " in line)
    assert {node for node, _, _ in said} <= {"n1", "n2"}  # one of them may have begun so late that it has no task
    assert sorted(text for _, _, text in said) == [f"task {t} in epoch {e}" for t in range(2) for e in range(3)]
    assert not any("printed" in line for line in lines)
    done = await cli("run", "talk.py", "--nodes", "2")
    kept = cli.root / "run" / "taskgraph" / "finished" / "talk.logs"
    assert f"the output of its tasks is in {kept}; --logs" in done.err and " | " not in done.err
    assert "task 0 in epoch 0" in "".join(path.read_text() for path in kept.glob("n*.log"))
    await cli.nothing_left()


ODD = """
import taskgraph as tg


class Odd(tg.Task):
    def compose(self, epoch):
        epoch.processor(self.say)

    def say(self, epoch, ins, outs):
        print("Prüfung 処理 \\udcff")
        self.log.info("geprüft")


@tg.job
def odd() -> tg.Job:
    return tg.Job(tasks=1, epochs=1, builder=lambda task_id: Odd(), backups=0)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
async def test_a_task_prints_every_character_whatever_the_encoding_of_the_terminal(cli: Cli, encoding: str) -> None:
    """What a node's output could not take failed the job, and with latin-1 `ü` was shown as something else."""
    (cli.cwd / "odd.py").write_text(ODD, encoding="utf-8")
    command = await cli.start("run", "odd.py", "--nodes", "1", "--logs", PYTHONIOENCODING=encoding)
    _, err = await command.process.communicate()
    assert command.process.returncode == 0
    said = err.decode(encoding)
    for text in ("n1 | Prüfung 処理 \\udcff\n", "INFO geprüft\n"):
        assert text.encode(encoding, "backslashreplace").decode(encoding) in said


STANDS = """
import time

import taskgraph as tg


class Stands(tg.Task):
    def compose(self, epoch):
        epoch.processor(self.think)

    async def think(self, epoch, ins, outs):
        time.sleep(60)


@tg.job
def stands():
    return tg.Job(tasks=1, epochs=1, builder=Stands)
"""


async def test_a_coroutine_that_holds_up_its_whole_node_is_named(cli: Cli) -> None:
    (cli.cwd / "stands.py").write_text(STANDS)
    running = await cli.start("run", "stands.py", "--nodes", "1")
    line = await running.until("the event loop of n1")
    assert "'think' of task 0" in line and "`async def`" in line
    events = await cli("events", "stands")
    assert "'think' of task 0" in events.out
    running.interrupt()
    assert (await running.done()).code == 130
    await cli.nothing_left()


@pytest.mark.smoke
async def test_failure_shows_only_the_users_traceback(cli: Cli) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "2", "-o", "fail_at=3")
    assert done.code == 1
    failure = done.err[done.err.index("taskgraph: job failed") :]
    assert "task 2" in failure and "epoch 3" in failure and "'add'" in failure
    assert 'raise ZeroDivisionError("one shard is empty")' in failure
    assert failure.rstrip().endswith("ZeroDivisionError: one shard is empty")
    assert failure.count("Traceback") == 1 and "taskgraph/launch" not in failure
    await cli.nothing_left()
    again = await cli("result", "sums")
    assert again.code == 1 and "ZeroDivisionError: one shard is empty" in again.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("-o", "epoch=3"), 2, ["no option 'epoch'", "did you mean 'epochs'", "tasks=7"]),
        (("-o", "epochs=many"), 2, ["epochs='many'", "expected int"]),
        (("--set", "stric=true"), 2, ["taskgraph has no setting 'stric' (did you mean 'strict'?)\n"]),
        (("--set", "zzz=true"), 2, ["taskgraph has no setting 'zzz'; its settings are: ", "call_s=10.0"]),
        (("--set", "strict"), 2, ["setting 'strict': write --set name=value", "strict=False"]),
        (("--set", "gather_s=soon"), 2, ["setting gather_s='soon': expected float"]),
        (("--set", "lease_ttl_s=-1"), 2, ["Settings(lease_ttl_s=-1.0)", "above 0"]),
        (("--resume",), 2, ["keeps no checkpoints", "Job(checkpoint="]),
        (("--name", "../x"), 2, ["'../x'", "letters (of any language), digits"]),
        (("--nodes", "-1"), 2, ["nodes=-1", "at least 1"]),
        (("--etcd", "127.0.0.1:1"), 3, ["127.0.0.1:1", "etcd"]),
    ],
)
async def test_what_cannot_begin_says_why(cli: Cli, arguments: tuple[str, ...], code: int, says: list[str]) -> None:
    begins = arguments[0] in ("--resume", "--nodes", "--etcd")  # it needs signal handlers, so the main thread
    done = await (cli if begins else cli.called)("run", str(DRIVER), *arguments)
    assert done.code == code, done.err
    assert all(text in done.err for text in says), done.err
    assert "Traceback" not in done.err
    await cli.nothing_left()


async def test_logs_of_nodes_that_died_alike_are_shown_once(cli: Cli) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "3", "--listen", "192.0.2.1", "--insecure-listen")
    assert done.code == 1 and ": cannot listen on 192.0.2.1 port (any): " in done.err
    assert "--- n1, n2, n3 ended with exit code 1; the end of each log:\n" in done.err and done.err.count("cannot") == 2
    await cli.nothing_left()


async def test_a_setting_of_one_run(cli: Cli, tmp_path: Path) -> None:
    """What strict mode finds is found by nodes: they have the setting that the command line gave."""
    driver = tmp_path / "forgets.py"
    driver.write_text(
        "import taskgraph as tg\n\n\n"
        "class Forgets(tg.Task, state=['count']):\n"
        "    def setup(self):\n        self.count = self.more = 0\n"
        "    def compose(self, epoch):\n        epoch.processor(self.step)\n"
        "    def step(self, epoch, ins, outs):\n        self.more += 1\n        self.count += self.more\n\n\n"
        "@tg.job\ndef forgets():\n    return tg.Job(tasks=2, epochs=3, builder=lambda _: Forgets())\n"
    )
    assert (await cli("run", str(driver), "--nodes", "1")).code == 0
    done = await cli("run", str(driver), "--nodes", "1", "--set", "strict=true", "--set", "epochs-ahead=0")
    assert done.code == 1
    assert "task" in done.err and "replay" in done.err, done.err
    await cli.nothing_left()


@pytest.mark.smoke
async def test_no_such_driver(cli: Cli) -> None:
    done = await cli("run", "nowhere.py")
    assert done.code == 2 and "there is no file" in done.err and "nowhere.py" in done.err


async def test_a_job_of_that_name_is_running_here(cli: Cli) -> None:
    first = await cli.paused("--nodes", "1")
    done = await cli("run", str(DRIVER), "--nodes", "1")
    assert done.code == 2
    assert f"process {first.process.pid}" in done.err and "taskgraph shutdown sums" in done.err and "--name" in done.err
    other = await cli("run", str(DRIVER), "--nodes", "1", "--name", "sums2", "-o", "epochs=2")
    assert other.code == 0, "the first one is not in the way of another name"
    cli.open()
    assert (await first.done()).code == 0


async def test_a_job_of_that_name_is_running_elsewhere(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    name = "elsewhere"
    first = await cli.paused("--nodes", "1", "--etcd", embedded_etcd.endpoint, "--name", name)
    async with shell() as another_host:
        done = await another_host("run", str(DRIVER), "--etcd", embedded_etcd.endpoint, "--name", name)
        assert done.code == 2 and f"a job '{name}' is running already" in done.err
        assert f"taskgraph shutdown {name}" in done.err
    cli.open()
    assert (await first.done()).code == 0


async def test_fewer_nodes_than_min_nodes_waits_says_so_and_goes_on(cli: Cli) -> None:
    run = await cli.start("run", str(DRIVER), "--nodes", "1", "-o", "min_nodes=2", "--json")
    line = await run.until("waits for nodes")
    assert "1 of at least 2" in line
    launch = await cli.start("launch", "sums", "--nodes", "1")
    done = await run.done()
    assert done.code == 0, done.err
    assert json.loads(done.out)["values"]["0"] == sums()
    assert (await launch.done()).code in (0, 3), "the etcd was the run's"
    await cli.nothing_left()


async def test_a_job_that_does_not_end_in_time(cli: Cli) -> None:
    for limit_s in TIMEOUTS_S:
        options = ("--timeout", str(limit_s), "-o", "pause_at=1", "-o", "gate=/nowhere")
        done = await cli("run", str(DRIVER), "--nodes", "1", *options)
        if "record" in done.err:
            break
    assert done.code == 1
    assert f"did not end within {limit_s} s" in done.err and "record" in done.err, "it names what runs"
    await cli.nothing_left()
    kept = json.loads((await cli("status", "sums", "--json")).out)
    assert (kept["state"], kept["reason"].partition("; ")[0]) == ("failed", f"it did not end within {limit_s} s")
    assert "record" in kept["reason"]
    done = await cli("result", "sums")
    assert done.code == 1 and f"job failed: it did not end within {limit_s} s" in done.err


async def test_nodes_import_what_their_launcher_does_and_not_what_lies_in_the_working_directory(cli: Cli) -> None:
    """A `queue.py` there was taken for Python's own in every node, and each job failed."""
    (cli.cwd / "queue.py").write_text("raise SystemExit('no queue')")
    for folder, name, text in (("lib", "late_helper", "NAME = 'late'"), ("drivers", "queue", "")):
        (cli.root / folder).mkdir()
        (cli.root / folder / f"{name}.py").write_text(text)
    driver = cli.root / "drivers" / "which.py"
    driver.write_text(
        "import taskgraph as tg\n"
        "class Which(tg.Task):\n"
        "    def compose(self, epoch):\n"
        "        pass\n"
        "    def result(self):\n"
        "        import late_helper\n"
        "        return [tg.__file__, late_helper.NAME]\n"
        "@tg.job\n"
        "def which():\n"
        "    return tg.Job(tasks=1, epochs=1, builder=Which)\n"
    )
    lib = str(cli.root / "lib")
    program = f"import sys; sys.path.append({lib!r}); from taskgraph.cli import main; sys.exit(main())"
    for nodes in ("0", "2"):
        done = await cli("run", str(driver), "--nodes", nodes, "--json", python=("-P", "-c", program))
        assert done.code == 0, done.err
        assert json.loads(done.out.splitlines()[-1])["values"] == {"0": [tg.__file__, "late"]}
    await cli.nothing_left()


@pytest.mark.smoke
async def test_ctrl_c_ends_the_job_and_leaves_nothing(embedded_etcd: EmbeddedEtcd, cli: Cli) -> None:
    run = await cli.paused("--nodes", "2")
    await cli.node_processes(2)
    run.interrupt()
    done = await run.done()
    assert done.code == 130 and "interrupted" in done.err and "Traceback" not in done.err
    await cli.nothing_left()
    assert (await cli("status", "sums")).out == "sums  cancelled\n  interrupted\n"

    theirs = await cli.paused("--nodes", "1", "--etcd", embedded_etcd.endpoint, "--name", "ctrl-c")
    (node,) = await cli.node_processes(1)
    os.kill(node, signal.SIGSTOP)  # it cannot leave by itself
    theirs.interrupt()
    assert (await theirs.done()).code == 130
    status = await cli("status", "ctrl-c", "--etcd", embedded_etcd.endpoint)
    assert status.out.startswith("ctrl-c  cancelled"), "etcd has it, too"
    assert "no nodes are registered" in status.out
    await cli.nothing_left()


async def on_a_terminal(cli: Cli, *arguments: str) -> tuple[asyncio.subprocess.Process, int]:
    """A command whose controlling terminal is the one that the descriptor is the other end of."""
    ours, its = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taskgraph", *arguments),
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=cli.cwd,
        env=cli.env,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(its)
    return process, ours


async def test_a_terminal_that_is_closed_ends_the_job_in_good_order(cli: Cli) -> None:
    options = ("-o", "pause_at=2", "-o", f"gate={cli.gate}")
    process, terminal = await on_a_terminal(cli, "run", str(DRIVER), "--nodes", "2", *options)
    said = b""
    while b"epoch 1/" not in said and b"epoch 2 waits" not in said:
        said += await asyncio.to_thread(os.read, terminal, 4096)
    os.close(terminal)
    async with asyncio.timeout(LIMIT_S):
        assert await process.wait() == 130
    await cli.nothing_left()
    assert (await cli("status", "sums")).out == "sums  cancelled\n  interrupted\n"


async def test_a_second_ctrl_c_forces(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2")
    for pid in await cli.node_processes(2):
        os.kill(pid, signal.SIGSTOP)
    run.interrupt()
    await run.until("once more to force it")
    run.interrupt()
    assert (await run.done(10.0)).code == 130
    await cli.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_killed_launcher_leaves_nothing(cli: Cli, number: signal.Signals) -> None:
    run = await cli.paused("--nodes", "1")
    run.process.send_signal(number)
    await run.process.communicate()
    await becomes(lambda: not cli.processes())
    done = await cli("run", str(DRIVER), "--nodes", "1", "-o", "epochs=2")
    assert done.code == 0, "what it left is not in the way: " + done.err
    await cli.nothing_left()


def etcd_processes(cli: Cli) -> tuple[int, int]:
    """The guard of the embedded etcd, and etcd itself."""
    found = {pid: command for pid, command in cli.processes().items() if "--listen-client-urls" in command}
    guard, etcd = sorted(found, key=lambda pid: "guard.py" not in found[pid])
    return guard, etcd


@pytest.mark.smoke
async def test_dead_embedded_etcd_fails_the_run(cli: Cli) -> None:
    run = await cli.paused("--nodes", "3")
    _, etcd = etcd_processes(cli)
    os.kill(etcd, signal.SIGKILL)
    began = time.monotonic()
    done = await run.done()
    took = time.monotonic() - began
    assert done.code == 1 and "its embedded etcd has ended" in done.err and "--etcd" in done.err
    assert "was killed by SIGKILL" in done.err and "Traceback" not in done.err
    kept = cli.root / "run" / "taskgraph" / "finished" / "sums.logs"
    assert f"are kept in {kept}" in done.err and (kept / "n1.log").exists()
    assert took < 9.0, f"{took:.1f} s: as long as calls of etcd are tried"
    await cli.nothing_left()
    assert "sums  failed" in (await cli("status", "sums")).out


async def test_an_etcd_that_ends_by_itself_shows_the_end_of_its_log(cli: Cli) -> None:
    """As when its disk is full; here its log is written by the test, and etcd told to leave."""
    run = await cli.paused("--nodes", "1")
    log = next((cli.root / "run").rglob("etcd.log"))
    guard, etcd = etcd_processes(cli)
    with stopped(guard), log.open("a") as file:  # it looks at the log when etcd has written its last line
        os.kill(etcd, signal.SIGTERM)
        await gone(etcd)
        file.write("no space left on device\n")
    done = await run.done()
    assert done.code == 1 and "the end of its log:\n" in done.err and "no space left on device" in done.err, done.err
    await cli.nothing_left()
