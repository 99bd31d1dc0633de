"""A real Slurm on this host, for the tests of a module: munged, slurmctld, and one slurmd for each of its machines.

The machines are called m1 to m8, and have two cores each. m1 to m3 are in the partitions `low`, whose jobs may be
preempted, and may take GRACE_S for that, and `high`, which goes before it; m4 and m5 are in `core`, and the others in
`spare`, and no job takes those away. Everything is in one folder and on free ports, so several may run at a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from processes_kit import free_port

T = TypeVar("T")

GRACE_S = 8
"""Slurm kills a preempted element after this time."""
MACHINES = 8
LIMIT_S = 100.0
"""Nothing here takes longer on a machine that is busy."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "squeue", "scontrol", "scancel")

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=10
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_min_interval=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
KillWait=3
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
_PARTITIONS = """
PartitionName=low Nodes=m[1-3] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=m[1-3] PriorityTier=10 PreemptMode=OFF
PartitionName=core Nodes=m[4-5] PriorityTier=1 PreemptMode=OFF
PartitionName=spare Nodes=m[6-8] PriorityTier=1 PreemptMode=OFF
"""


def why_not() -> str:
    """Returns why no Slurm can be started here; "": it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root here"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]:
        return f"{', '.join(missing)} missing: on Debian and Ubuntu, apt-get install slurm-wlm munge"
    return ""


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Slurm:
    """One Slurm.

    Attributes:
        folder: everything that it writes.
        env: the environment in which Slurm's commands find it.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tg-slurm-"))
        self.env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Starts all daemons; returns once all machines are idle."""
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(1024))
        self._configure()
        munge = [f"--{name}={self.folder}/munge.{end}" for name, end in (("key-file", "key"), ("socket", "sock"))]
        more = [f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munge.seed"]
        self.run("munged", "--force", *munge, *more, f"--log-file={self.folder}/log/munged.log")
        self.run("slurmctld", "-c")
        for number in range(1, MACHINES + 1):
            self.run("slurmd", "-N", f"m{number}")
        self.until(lambda: self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split(), self._all_idle)

    def _all_idle(self, names: Sequence[str]) -> bool:
        return len(set(names)) == MACHINES

    def _configure(self) -> None:
        host = socket.gethostname()
        ports = [free_port() for _ in range(MACHINES + 1)]
        lines = [_CONF.format(folder=self.folder, host=host, port=ports[0])]
        for number, port in enumerate(ports[1:], 1):
            (self.folder / "spool" / f"m{number}").mkdir()
            where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            lines.append(f"NodeName=m{number} {where} CPUs=2 RealMemory=9000")
        lines.append(_PARTITIONS.format(grace=GRACE_S))
        (self.folder / "slurm.conf").write_text("\n".join(lines))

    def run(self, *words: str) -> str:
        """Runs a command of Slurm; returns what it prints."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def until(self, look: Callable[[], T], fits: Callable[[T], object], limit_s: float = LIMIT_S) -> T:
        """Looks until what is seen fits."""
        deadline = time.monotonic() + limit_s
        while not fits(seen := look()):
            assert time.monotonic() < deadline, f"after {limit_s:g} s it is {str(seen)[:500]}\n{self._queue()}"
            time.sleep(0.1)
        return seen

    def _queue(self) -> str:
        """Returns what waits and why, and what the daemons complained of."""
        lines = [line for path in self.folder.glob("log/slurm*.log") for line in path.read_text().splitlines()]
        complaints = [line for line in lines if "error" in line and "pmix" not in line]
        return "\n".join((self.run("squeue", "-r"), *complaints[-20:]))

    def elements(self, name: str) -> dict[str, str]:
        """Returns the state of each element of the arrays of that name that has not ended, by its number."""
        lines = self.run("squeue", "-h", "-r", "--name", name, "-o", "%K %T").splitlines()
        return {number: state for number, _, state in (line.partition(" ") for line in lines)}

    def arrays(self, name: str) -> list[str]:
        """Returns the ids of a job's arrays, the first of them first."""
        return sorted(set(self.run("squeue", "-h", "--name", name, "-o", "%F").split()), key=int)

    def machine(self, name: str, number: int) -> str:
        """Returns the machine of an element."""
        lines = self.run("squeue", "-h", "-r", "--name", name, "-o", "%K %N").splitlines()
        return dict(line.split() for line in lines if line.count(" ") == 1)[str(number)]

    def kill_machine(self, name: str) -> None:
        """Kills a machine's daemon and all that runs on it, and lets Slurm know that it is down."""
        jobs = self.run("squeue", "-h", "-w", name, "-o", "%A").split()
        steps = [pid for pid, command in self._steps() if any(f"[{job}." in command for job in jobs)]
        daemon = int((self.folder / f"slurmd-{name}.pid").read_text())
        # All stand still first, since none may report that another one died.
        everything = [daemon, *steps, *(child for step in steps for child in _descendants(step))]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in everything:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=killed")

    def _steps(self) -> Iterator[tuple[int, str]]:
        """Yields the processes `slurmstepd` of this Slurm, with their command lines."""
        mine = f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdecimal() or not (entry / "comm").read_text().startswith("slurmstepd"):
                    continue
                if mine in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()

    def stop(self) -> None:
        """Ends all jobs and daemons, and removes the folder."""
        try:
            self.run("scancel", "-u", "root")
            self.until(lambda: self.run("squeue", "-h"), lambda text: not text)
        finally:
            for step, _ in self._steps():
                for pid in [*_descendants(step), step]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            pids = [*self.folder.glob("slurmd-*.pid"), self.folder / "slurmctld.pid", self.folder / "munged.pid"]
            for number in (signal.SIGTERM, signal.SIGKILL):
                for path in pids:
                    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
                        os.kill(int(path.read_text()), number)
                time.sleep(0.3)
            shutil.rmtree(self.folder, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    """Returns the processes below one, the deepest first."""
    with contextlib.suppress(OSError):
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [each for child in children for each in (*_descendants(child), child)]
    return []
