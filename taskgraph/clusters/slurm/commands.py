"""Runs Slurm's commands, again if slurmctld is too busy to answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from taskgraph.clusters.slurm.state import QUEUE_FORMAT, QueuedElement, parse_queue
from taskgraph.errors import JobError, TransportError
from taskgraph.system.environment import user_env

__all__ = ["machine_is_down", "queued_elements", "run_slurm"]

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_BUSY = re.compile(
    r"unable to contact slurm controller|socket timed out|temporarily unavailable|connection refused"
    r"|connect failure|try again|communication connection failure|too many requests",
    re.IGNORECASE,
)
_NO_SUCH = re.compile(r"invalid job id|job/step already complet", re.IGNORECASE)
_DOWN = re.compile(r"down|fail|unk|drain", re.IGNORECASE)


async def run_slurm(*words: str, again: bool = True, no_job: str | None = None) -> str:
    """Runs a command of Slurm; returns what it prints.

    Args:
        again: run it again if the controller is busy; False if a second run would do the work twice.
        no_job: what to return if Slurm no longer knows the job; None: that is an error.

    Raises:
        JobError: the command is missing, or Slurm refuses it.
        TransportError: slurmctld does not answer.
    """
    for pause_s in (*_PAUSES_S, 0.0):
        code, out, complaint = await _run_once(words)
        if code == 0:
            return out
        if no_job is not None and _NO_SUCH.search(complaint):
            return no_job
        if not _BUSY.search(complaint):
            raise JobError(f"`{' '.join(words[:1])}` of Slurm failed: {complaint}")
        if not again or not pause_s:
            break
        await asyncio.sleep(pause_s)
    unknown = "" if again else "; it may have taken the job all the same: look with `squeue --me`"
    raise TransportError(f"`{words[0]}`: Slurm's controller does not answer ({complaint}){unknown}")


async def _run_once(words: Sequence[str]) -> tuple[int, str, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=user_env(),  # sbatch passes it on
        )
    except FileNotFoundError:
        raise JobError(
            f"Slurm's command {words[0]!r} is not on PATH: run this on a host of the cluster from which jobs are "
            f"submitted (a login node), perhaps after `module load slurm`"
        ) from None
    out, complaint = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), complaint.decode(errors="replace").strip()


async def queued_elements(arrays: Sequence[int]) -> list[QueuedElement]:
    """Returns the elements of these array jobs that have not ended."""
    if not arrays:
        return []
    jobs = ",".join(map(str, arrays))
    return parse_queue(await run_slurm("squeue", "-h", "-r", "-j", jobs, "-o", QUEUE_FORMAT, no_job=""))


async def machine_is_down(machine: str) -> bool:
    """True if Slurm has lost a machine, or has taken it out of service; False for "", no machine."""
    return bool(machine) and bool(_DOWN.search(await run_slurm("sinfo", "-h", "-n", machine, "-o", "%T")))
