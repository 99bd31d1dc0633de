"""Runs one contender at a time, and leaves nothing of it behind.

Every run has a folder of its own for temporary files, and a session of its own, so that a Ctrl-C reaches only us. On
Linux all descendants stay ours to find, daemons too (we adopt orphans): whatever is left when the contender has ended,
ran out of time, or was interrupted, is killed and reaped, and its folder removed. So are the named semaphores of Ray's
channels, which outlive the processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SEGMENTS_IN", "Outcome", "adopt_orphans", "descendants", "ended_by", "run"]

_END_S = 5.0
"""A contender gets this long to end before it is killed: ours stops its nodes and its etcd."""
_GONE_S = 30.0
"""Killed processes get this long to be gone: gigabytes of memory take a busy machine seconds to give back."""
_PR_SET_CHILD_SUBREAPER = 36
_TAIL = 400
_SHARED = Path("/dev/shm")
"""Where Linux keeps named semaphores and other shared memory."""
_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-\d+")
"""Those of the channels of Ray's compiled graphs: the process that made one, and when."""
SEGMENTS_IN = "OMPI_MCA_btl_sm_backing_directory"
"""Where Open MPI keeps its segments, says this variable. It leaves them where it is killed, and after a mere import."""


@dataclass
class Outcome:
    """What a run gave: figures, or why there are none; or figures, and what was wrong all the same."""

    figures: dict[str, float] = field(default_factory=dict)
    why_not: str = ""
    wall_s: float = 0.0


def adopt_orphans() -> None:
    """From now on processes whose parent ends become our children instead of init's (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[int]:
    """All processes below this one, as far as /proc tells."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    pending = [os.getpid()]
    while pending:
        children = below.get(pending.pop(), [])
        found.update(children)
        pending += children
    return found


def run(command: list[str], *, env: dict[str, str], timeout_s: float) -> Outcome:
    """Runs a contender to its end, whose last line of output is JSON."""
    before, shared = descendants(), _semaphores()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tgb-"))
    segments = Path(tempfile.mkdtemp(prefix="tgb-", dir=_SHARED if _SHARED.is_dir() else None))
    try:
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            places = {"TMPDIR": str(folder), "TASKGRAPH_RUNTIME_DIR": str(folder), SEGMENTS_IN: str(segments)}
            process = subprocess.Popen(
                command,
                env={**os.environ, **places, **env},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                code = _wait(process, folder / "out", timeout_s)
            finally:
                _end(process)
            outcome = _outcome(code, folder, timeout_s)
            outcome.wall_s = time.monotonic() - began
            return outcome
    finally:
        _sweep(before)
        _remove_semaphores(_semaphores() - shared)
        shutil.rmtree(segments, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], out: Path, timeout_s: float) -> int | None:
    """The exit code; None: it did not end in time, or not soon after it printed its figures."""
    deadline = time.monotonic() + timeout_s
    printed = False
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.1)
        if not printed and _figures_in(out):
            printed, deadline = True, min(deadline, time.monotonic() + _END_S)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.poll() is None:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _sweep(before: set[int]) -> None:
    """Kills what the contender left, until there is nothing."""
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + _GONE_S
    while (left := descendants() - before) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if left:
        print(f"processes {sorted(left)} cannot be killed", file=sys.stderr)


def _semaphores() -> set[str]:
    return {entry.name for entry in _SHARED.glob("sem.*") if _SEMAPHORE.fullmatch(entry.name)}


def _remove_semaphores(appeared: set[str]) -> None:
    """Those of ours whose maker is dead. Who lives is no contender's: somebody else uses Ray on this machine."""
    for name in appeared:
        path, made = _SHARED / name, _SEMAPHORE.fullmatch(name)
        if made is None or Path("/proc", made[1]).exists():
            continue
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()


def _outcome(code: int | None, folder: Path, timeout_s: float) -> Outcome:
    figures = _figures_in(folder / "out")
    if figures and code == 0:
        return Outcome(figures)
    if figures and code is None:
        return Outcome(figures, "did not end by itself")
    if code is None:
        return Outcome(why_not=f"hung: killed after {timeout_s:g} s")
    said = [(folder / name).read_text(errors="replace").strip() for name in ("err", "out")]
    last = (said[0] or said[1] or "nothing").splitlines()[-1]
    return Outcome(why_not=f"ended with code {code}; its last line: {last[-_TAIL:]}")


def _figures_in(out: Path) -> dict[str, float]:
    """What the last whole line of JSON says."""
    for line in reversed(out.read_text(errors="replace").splitlines(keepends=True)):
        if line.startswith("{") and line.endswith("}\n"):
            found: Any = json.loads(line)
            return {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {}


@contextlib.contextmanager
def ended_by(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """The first signal becomes KeyboardInterrupt, so that contexts are left; later signals are ignored.

    A later one would cut that short, which is bounded anyway.
    """
    ended = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
