"""Standard streams that are closed, full, or of an encoding that has not every character."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BEGIN = """
import asyncio, sys, uvloop
from taskgraph import cli
def command(options):
    uvloop.run(asyncio.sleep(0))
    print({text}, file=sys.{stream})
    return 0
cli._load_command = lambda name: command
sys.exit(cli.main(["status"]))
"""


def run(redirect: str, *, text: str = "'said'", stream: str = "stdout", **env: str) -> subprocess.CompletedProcess[str]:
    """A command that runs an event loop and says something, from a shell that redirects its streams."""
    script = BEGIN.format(text=text, stream=stream)
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), **env},
    )


@pytest.mark.parametrize("redirect", ["<&-", "2>&-", "<&- 2>&-"])
def test_command_runs_with_closed_streams(redirect: str) -> None:
    """libuv aborts the process where a descriptor of its own has the number of a standard stream."""
    done = run(redirect)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")


def test_command_runs_without_output() -> None:
    assert run(">&-").returncode == 0
    assert run("2>&-", stream="stderr").returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_standard_error_ends_no_command(unbuffered: str) -> None:
    assert run("2>/dev/full", stream="stderr", PYTHONUNBUFFERED=unbuffered).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_standard_output_is_one_error() -> None:
    done = run(">/dev/full")
    assert (done.returncode, done.stderr) == (1, "taskgraph: standard output: No space left on device\n")


@pytest.mark.parametrize("asked", ["--help", "--version", "run --help"])
def test_unread_help_is_no_error(asked: str) -> None:
    """ "Exception ignored in: <_io.TextIOWrapper name='<stdout>' ...", it said, and ended with 120."""
    command = [sys.executable, "-m", "taskgraph", *asked.split()]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as unread:
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, "taskgraph: standard output: No space left on device\n")


FAILING = """
import sys
from taskgraph import cli
from taskgraph.errors import JobError
def command(options):
    print("said by a driver")
    raise JobError("no such job")
cli._load_command = lambda name: command
sys.exit(cli.main(["status"]))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_standard_output_keeps_our_exit_code() -> None:
    alone = {"PYTHONPATH": str(Path(__file__).parents[2])}  # with PYTHONUNBUFFERED it fails where it is printed
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", FAILING]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=alone)
    assert (done.returncode, done.stderr) == (2, "taskgraph: no such job\n")


TEE = """
import sys
from taskgraph import cli
class Tee:
    def write(self, text):
        return sys.__stdout__.write(text)
    def flush(self):
        sys.__stdout__.flush()
def command(options):
    sys.stdout = Tee()
    print("said by a driver")
    return 0
cli._load_command = lambda name: command
sys.exit(cli.main(["status"]))
"""


def test_driver_may_replace_standard_output() -> None:
    """One that writes to a file, too, say. Commands looked whether it was closed, and ended in a traceback."""
    done = subprocess.run([sys.executable, "-c", TEE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said by a driver\n", "")


CLOSING = """
import sys
import taskgraph as tg
for stream in (sys.stdout, sys.stderr):
    stream.close()
class Idle(tg.Task):
    def compose(self, epoch): epoch.processor(self.run)
    def run(self, epoch, ins, outs): pass
    def result(self): return 7
@tg.job
def fit(): return tg.Job(tasks=1, builder=Idle, epochs=2)
if __name__ == "__main__":
    tg.main(fit)
"""


@pytest.mark.parametrize("command", [["-m", "taskgraph", "run", "fit.py"], ["fit.py"]])
def test_driver_may_close_the_streams(tmp_path: Path, command: list[str]) -> None:
    """It ended in a traceback, before the job or after it."""
    (tmp_path / "fit.py").write_text(CLOSING)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    line = [sys.executable, *command, "--nodes", "0"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_unencodable_characters_are_escaped(stream: str, unbuffered: str) -> None:
    """A value of a job that finished must not be lost for a surrogate in it."""
    text = r"'ab \xe4 \ud800'"
    done = run("", text=text, stream=stream, PYTHONIOENCODING="ascii", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, getattr(done, stream)) == (0, "ab \\xe4 \\ud800\n")
    done = run("", text=text, stream=stream, PYTHONIOENCODING="utf-8", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, getattr(done, stream)) == (0, "ab ä \\ud800\n")


NODE = """
import logging, resource, sys
from taskgraph.system.streams import DroppingOutput
untaken, reported = DroppingOutput(), []
print("kept"), print("ä", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for _ in range(3):
    print("x" * 300)
    print("y" * 300, file=sys.stderr)
untaken.report_to(reported.append)
assert len(reported) == 1 and sys.argv[1] in reported[0] and "File too large" in reported[0], reported
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
print("z")
"""


def test_full_log_of_a_node_is_reported_once(tmp_path: Path) -> None:
    """A `print` in a task raised on a full disk, and failed the job."""
    log = tmp_path / "n1.log"
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", NODE, str(log)], stdout=file, stderr=file, check=False, cwd=Path(__file__).parents[2]
        )
    assert done.returncode == 0
    assert log.read_text() == "kept\nä\n" + "x" * (100 - len("kept\nä\n".encode()))


TELLS = """
import sys, time
from taskgraph.system import streams
streams.prepare_streams()
streams.bound_stderr_waits()
print("ready", flush=True)
for number in range({lines}):
    print(f"{{number:{width}}}", file=sys.stderr)
streams.wait_until_written()
print("done", flush=True)
"""


def telling(lines: int, width: int, reader: int) -> subprocess.Popen[bytes]:
    """A process that says so many lines of so many characters on standard error."""
    return subprocess.Popen(
        [sys.executable, "-c", TELLS.format(lines=lines, width=width)],
        stdout=subprocess.PIPE,
        stderr=reader,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_unread_standard_error_blocks_no_launcher() -> None:
    """It held up the event loop of a launcher: no signal and no time limit ended it."""
    read, write = os.pipe()
    with telling(20_000, 99, write) as process:  # 2 MB
        os.close(write)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert process.stdout.readline() == b"done\n" and process.wait(30) == 0
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read().startswith(b" " * 98 + b"0\n" + b" " * 98 + b"1\n")


def test_slow_reader_loses_nothing() -> None:
    read, write = os.pipe()
    with telling(20_000, 99, write) as process, os.fdopen(read, "rb") as pipe:
        os.close(write)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        assert [int(line) for line in pipe] == list(range(20_000))
        assert process.wait(30) == 0
