"""The benchmarks: figures, the table, the environment's list; and a short one of our driver, a peer and a floor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench as bench_command
import contest
import figures
import suite
import work

from taskgraph.device.cuda import device_count

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORK = suite.Work(
    "one",
    "T=7",
    (),
    (suite.Row("ours", "peer", bar=2.0), suite.Row("ours", "gone"), suite.Row("ours", "", 3.0, "<=")),
)


def rounds_of(**rates: dict[int, float]) -> figures.RenewalSchedule:
    return {name: {number: {"rate": rate} for number, rate in of.items()} for name, of in rates.items()}


def test_ratio_is_of_medians() -> None:
    rounds = rounds_of(ours={0: 10.0, 1: 4.0, 2: 6.0}, peer={0: 2.0, 1: 4.0, 2: 1.0})
    line, gone, alone = figures.lines_of(WORK, rounds, {"gone": "skipped: no module"})
    assert (line.ours, line.theirs, line.ratio, line.low, line.high) == (6.0, 2.0, 3.0, 1.0, 6.0)
    assert line.met is True
    assert gone.ratio is None and gone.met is None and gone.note == "gone: skipped: no module"
    assert (alone.ratio, alone.met) == (6.0, False)


def test_failed_round_is_left_out() -> None:
    line = figures.lines_of(WORK, rounds_of(ours={0: 10.0, 1: 4.0}, peer={1: 4.0}), {"peer": "hung"})[0]
    assert (line.low, line.high, line.note) == (1.0, 1.0, "peer: hung")


def test_table_names_missed_bars() -> None:
    text = figures.table(figures.lines_of(WORK, rounds_of(ours={0: 6.0}, peer={0: 6.0}), {"gone": "hung"}))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    assert rows[2] == ["T=7 (epochs/s)", "ours", "peer", "6", "6", "1", "1 to 1", ">= 2", "NO"]
    assert rows[3][2:] == ["gone", "6", "-", "-", "-", "-", "-"]
    assert text.endswith("- gone: hung")


def test_results_are_put_into_the_page() -> None:
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text("utf-8")
    lines = figures.lines_of(WORK, rounds_of(ours={0: 6.0}, peer={0: 6.0}), {"gone": "hung"})
    once = figures.put_into(page, "2 cores.", lines)
    assert "\n2 cores.\n\n0 bars are met, 2 are not.\n\n| Work" in once
    assert figures.put_into(once, "2 cores.", lines) == once
    assert once.startswith(page.partition("<!-- results")[0]) and once.endswith(page.partition("<!-- end of")[2])
    with pytest.raises(ValueError, match="no <!-- results -->"):
        figures.put_into("a page", "2 cores.", lines)


def test_rows_name_contenders_with_scripts() -> None:
    for one in suite.WORKS:
        names = [contender.name for contender in one.contenders]
        assert len(set(names)) == len(names)
        assert {row.subject for row in one.rows} <= set(names)
        assert {row.against for row in one.rows if row.against} <= set(names)
        assert {row.measure for row in one.rows} <= figures.UNITS.keys()
        assert [c.script for c in one.contenders if not (BENCHMARKS / c.script).is_file()] == []
    assert len({one.key for one in suite.WORKS}) == len(suite.WORKS)


def test_tree_is_the_frameworks() -> None:
    import taskgraph as tg

    for tasks in (1, 2, 7, 10):
        for task in range(tasks):
            assert tuple(work.children(task, tasks)) == tg.tree().neighbors("children", task, tasks, 0)
            if task:
                assert (work.parent(task),) == tg.tree().neighbors("parents", task, tasks, 0)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short: else the sockets of a job that runs below it are elsewhere, and left there unseen where it is killed."""
    with tempfile.TemporaryDirectory(prefix="tg-") as name:
        yield Path(name)


@contextlib.contextmanager
def bench(tmp_path: Path, *arguments: str, script: str = "bench.py") -> Iterator[subprocess.Popen[str]]:
    """A script of ours, told by its environment to keep to a folder of its own."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)


def left(tmp_path: Path) -> list[str]:
    """Processes that know the folder from their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(tmp_path).encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.skipif(device_count() > 0, reason="there is a device")
def test_gpu_bench_needs_a_device(tmp_path: Path) -> None:
    with bench(tmp_path, "overhead", script="gpu.py") as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "no CUDA device can be used here" in text, text


@pytest.mark.slow
def test_gpu_bench_runs_on_the_host(tmp_path: Path) -> None:
    small = ("--side", "64", "--mib", "2", "--rounds", "1", "--seconds", "0.2", "--compute-ms", "1")
    with bench(tmp_path, "overhead", "array", "snapshot", "--host", *small, script="gpu.py") as process:
        text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    assert len(re.findall(r"median \d+\.\d{3} ", text)) == 3, text
    assert left(tmp_path) == []
    assert [path for path in tmp_path.rglob("*") if not path.is_dir() and "locks" not in path.parts] == []


@pytest.mark.slow
def test_short_bench_of_three_contenders(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    names = "ours;stripped asyncio;grpc.aio, called"
    short = ("--works", "small", "--contenders", names, "--repeats", "1", "--seconds", "0.2", "--json", str(out))
    with bench(tmp_path, *short) as process:
        text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    found = json.loads(out.read_text())
    rounds = {name: len(values) for name, values in found["runs"]["small"].items()}
    assert rounds == dict.fromkeys(names.split(";"), 1), text
    assert {line["against"] for line in found["lines"]} == {"stripped asyncio", "grpc.aio, called"}
    assert all(line["ratio"] > 0 for line in found["lines"])
    assert left(tmp_path) == []
    assert os.listdir(tmp_path) == [out.name]


@pytest.mark.slow
def test_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    with bench(tmp_path, "--works", "small", "--contenders", "ours;stripped asyncio", "--seconds", "60") as process:
        deadline = time.monotonic() + 60
        while len(left(tmp_path)) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert any("etcd" in command for command in left(tmp_path))
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=30)
    assert process.returncode == 130, text
    assert left(tmp_path) == []
    assert os.listdir(tmp_path) == []


CONTENDERS = """
import os, subprocess, sys, tempfile, time
tempfile.mkdtemp()
match sys.argv[1]:
    case "hangs":
        time.sleep(60)
    case "hangs at its end":
        print('{"rate": 2.5}', flush=True)
        time.sleep(60)
    case "fails":
        raise SystemExit("the sum is 3, not 4")
    case "leaves a daemon":
        subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
        print('{"rate": 1.5}')
    case "leaves semaphores":
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        living = os.getppid()  # whoever runs contenders: in its stead, somebody else who uses Ray
        made = [f"sem.hdr{child.pid}-1", f"sem.obj{os.getpid()}-1", f"sem.hdr{living}-1", "sem.hdr1000000000", "x"]
        open(os.path.join(os.environ["OMPI_MCA_btl_sm_backing_directory"], "sm_segment.0"), "w").close()
        for name in made:
            open(os.path.join(os.environ["SHARED"], name), "w").close()
        print('{"rate": 0.5}', flush=True)
        time.sleep(60)
"""

RUNNER = """
import json, pathlib, os, sys
sys.path.insert(0, sys.argv[1])
import contest
contest._SHARED = pathlib.Path(os.environ["SHARED"])
contest._END_S = 1.0
contest.adopt_orphans()
found = {}
for how in ("hangs", "hangs at its end", "fails", "leaves a daemon", "leaves semaphores"):
    limit_s = 1.0 if how == "hangs" else 30.0  # it may take a while until it has told its figures
    outcome = contest.run([sys.executable, sys.argv[2], how], env={}, timeout_s=limit_s)
    found[how] = [outcome.figures, outcome.why_not, len(contest.descendants())]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_contender_that_hangs_or_fails_is_ended(tmp_path: Path) -> None:
    script, shared = tmp_path / "contender.py", tmp_path / "shm"
    script.write_text(CONTENDERS)
    shared.mkdir()
    (shared / "sem.hdr1000000000-1").touch()  # of a process that died before
    command = [sys.executable, "-c", RUNNER, str(BENCHMARKS), str(script)]
    env = {**os.environ, "TMPDIR": str(tmp_path), "SHARED": str(shared)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as runner:
        told, errors = runner.communicate(timeout=60)
    assert runner.returncode == 0, errors
    assert json.loads(told) == {
        "hangs": [{}, "hung: killed after 1 s", 0],
        "hangs at its end": [{"rate": 2.5}, "did not end by itself", 0],
        "fails": [{}, "ended with code 1; its last line: the sum is 3, not 4", 0],
        "leaves a daemon": [{"rate": 1.5}, "", 0],
        "leaves semaphores": [{"rate": 0.5}, "did not end by itself", 0],
    }
    assert sorted(os.listdir(tmp_path)) == [script.name, shared.name]
    not_its = {"sem.hdr1000000000-1", f"sem.hdr{runner.pid}-1", "sem.hdr1000000000", "x"}
    assert set(os.listdir(shared)) == not_its


def test_works_can_be_reduced_to_what_has_a_bar() -> None:
    small, thousand = (bench_command.chosen(key, "", barred=True)[0] for key in ("small", "thousand"))
    assert all(row.bar is not None for row in small.rows) and len(small.rows) == 10
    assert {one.name for one in small.contenders} == {row.against for row in small.rows} | {
        r.subject for r in small.rows
    }
    assert thousand == bench_command.chosen("thousand", "")[0]
    assert [one.name for one in bench_command.chosen("small", "ours;Gloo")[0].contenders] == ["ours", "Gloo"]


def test_trees_of_any_size_are_works() -> None:
    some, small = bench_command.chosen("10x4096,small", "ours;Gloo;grpc.aio, heap kept")
    assert some.title == "T=10, 32 KiB" and small.key == "small"
    assert [(one.name, one.arguments) for one in some.contenders] == [
        (name, ("--tasks", "10", "--n", "4096")) for name in ("ours", "grpc.aio, heap kept", "Gloo")
    ]
    assert [row.against for row in some.rows] == ["grpc.aio, heap kept", "Gloo"]


@pytest.mark.parametrize("key", ["1x3", "7x0", "x", "7x", "7x1x1", "-7x1", "7.0x1", "large-15"])
def test_what_is_no_work_is_said_with_all_that_there_are(key: str) -> None:
    with pytest.raises(SystemExit, match=f"no work {key}; there are: small, .*start; and TxN, a tree of T tasks"):
        bench_command.chosen(f"small,{key}", "")


def test_titles_tell_how_large_items_are() -> None:
    titles = [work.title for work in bench_command.chosen("2x1,2x127,2x128,2x1000,2x131072,2x8388609", "")]
    sizes = ["8 B", "1016 B", "1 KiB", "7.812 KiB", "1 MiB", "64 MiB"]
    assert titles == [f"T=2, {size}" for size in sizes]


def test_what_no_python_can_import_is_skipped_by_name() -> None:
    pythons = bench_command.Pythons("")
    python, why = pythons.find(("no_such_module",))
    assert python is None and why == "skipped: ModuleNotFoundError: No module named 'no_such_module'"
    assert pythons.find(("json", "grpc")) == (sys.executable, "")


def test_the_interpreter_of_the_peers_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders run in folders of their own."""
    (tmp_path / "python").write_text(
        f"#!/bin/sh\ntouch ${contest.SEGMENTS_IN}/one\necho ${contest.SEGMENTS_IN} > where\n"
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert bench_command.Pythons("python").find(("no_such_module",)) == (str(tmp_path / "python"), "")
    assert not Path((tmp_path / "where").read_text().strip()).exists()  # what an import left in shared memory
