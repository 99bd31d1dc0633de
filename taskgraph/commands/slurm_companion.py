"""What the first element of a job on Slurm runs beside its node: it submits the job, and ends the array with the job.

    python -P -m taskgraph.commands.slurm_companion FOLDER --element ARRAY_NUMBER [--own-etcd HOST] -- submit ...

It runs the job's etcd if the job brings one, and `taskgraph submit --wait`, which collects the values. It also watches
Slurm's queue, and writes into the job's events why elements went: nothing depends on that. When the job has ended, it
writes FOLDER/ended and ends what is left of the array. On SIGTERM it stops in good order, and another one goes on: the
element was queued again, perhaps on another machine. The etcd's data is in FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from taskgraph.clusters.slurm.commands import machine_is_down, queued_elements, run_slurm
from taskgraph.clusters.slurm.folder import Folder
from taskgraph.clusters.slurm.launcher import arrays_in
from taskgraph.clusters.slurm.options import made_tls_files
from taskgraph.clusters.slurm.state import QueuedElement, departures, machine_of, why_ended, why_left
from taskgraph.commands.arguments import parser
from taskgraph.commands.common import access_of, etcd_of, node_tls_of, token_of
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.opening import opened
from taskgraph.coordination.public import PublicEtcd
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TaskGraphError, TransportError
from taskgraph.launch.begin import command
from taskgraph.launch.follow import Follower
from taskgraph.network.tls import Tls
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.view import decode_key
from taskgraph.system.alongside import alongside
from taskgraph.system.files import remove_file, write_whole
from taskgraph.system.processes import signal_child

__all__ = ["main"]

log = logging.getLogger("taskgraph.slurm")

_UNREACHABLE = 3
"""Exit code of a command that etcd does not answer."""
_TRIES, _TRY_S = 24, 5.0
"""`submit` is tried so often while etcd does not answer."""
_POLL_S = 5.0
"""How often Slurm is asked: each question costs slurmctld some milliseconds."""
_NOTED_S = 60.0
"""An element that noted why it leaves is seen to be gone within this time."""
_LOOK_S = 0.5
_LEAVE_S = 20.0
"""How long nodes may take to leave after the job has ended, before their elements get SIGTERM, and then are cancelled.
Nodes that wait for a job, which was never submitted, do not leave by themselves."""
_SUBMIT_ENDS_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """Runs the companion; returns 0 if the job is over, and 1 if another one is to go on."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    cut = arguments.index("--")
    own = argparse.ArgumentParser(prog="slurm_companion")
    own.add_argument("folder", type=Path)
    own.add_argument("--element", required=True)
    own.add_argument("--own-etcd", metavar="HOST")
    options = own.parse_args(arguments[:cut])
    try:
        companion = _Companion(Folder(options.folder), options.element, arguments[cut + 1 :])
        return uvloop.run(companion.run(options.own_etcd))
    except TaskGraphError as error:
        log.error("cannot go on: %s", error)
        return 1


class _Companion:
    """The companion of one job.

    Args:
        folder: the job's folder.
        element: our own element, as Slurm names it.
        words: the words of `taskgraph submit`.
    """

    def __init__(self, folder: Folder, element: str, words: Sequence[str]) -> None:
        self._folder = folder
        self._element = element
        self._words = words
        self._options = parser(words).parse_args(words)

    async def run(self, own_etcd: str | None) -> int:
        """Submits the job, waits for its end, and ends the array. Returns the exit code, see `main`.

        Args:
            own_etcd: the host of the job's own etcd; None: it has none.
        """
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with self._etcd(own_etcd) as etcd:
            etcd_ended = etcd.wait_for_end() if etcd is not None else asyncio.Event().wait()
            async with alongside(self._submit(), self._watch(), stopped.wait(), etcd_ended) as waits:
                submitted, _, stopping, broken = waits
                await asyncio.wait((submitted, stopping, broken), return_when=asyncio.FIRST_COMPLETED)
                if not submitted.done():
                    if broken.done():
                        print(f"the job's etcd {broken.result()}", file=sys.stderr, flush=True)
                    return 1
                write_whole(self._folder.ended, f"{submitted.result()}\n".encode())
            await self._end_elements(stopped)
        shutil.rmtree(self._folder.etcd, ignore_errors=True)
        return 0

    @asynccontextmanager
    async def _etcd(self, host: str | None) -> AsyncIterator[EmbeddedEtcd | None]:
        """Runs the job's own etcd on `host` for a block, and writes where it listens; `host` is None: it has none."""
        if host is None:
            yield None
            return
        folder, options = self._folder, self._options
        tls = {name: value for name, value in access_of(options).items() if name in ("ca", "cert", "key")}
        made = made_tls_files(folder, options.name)  # for this job; else the user's
        name = made["name"] if tls.get("ca") == made["ca"] else node_tls_of(options).get("name", "")
        public = PublicEtcd(host=host, data=folder.etcd, tls=tls, name=name)
        log_path = folder.logs / "etcd.log"
        async with EmbeddedEtcd(public=public, log=log_path, nodes=self._options.nodes) as etcd:
            write_whole(folder.etcd_at, f"{etcd.endpoint} {name}\n".encode())
            try:
                yield etcd
            finally:
                remove_file(folder.etcd_at)

    async def _submit(self) -> int:
        """Runs `taskgraph submit --wait` until the job has ended; returns its exit code."""
        run = self._folder.run.read_text()
        # What it keeps of the ended job is for the host that submitted it.
        env = {**os.environ, "TASKGRAPH_RUNTIME_DIR": str(self._folder.path)}
        for tries in range(_TRIES):
            words = command("taskgraph", *self._words, "--wait", "--run", run)
            process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, env=env)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _end_submit(process)
                raise
            if code >= 0 and (code != _UNREACHABLE or tries == _TRIES - 1):
                return code
            await asyncio.sleep(_TRY_S)
        return _UNREACHABLE

    async def _watch(self) -> None:
        """Writes into the job's events why elements went. An error is logged, and the job goes on."""
        options = self._options
        try:
            async with opened(etcd_of(options) or "", access_of(options)) as coordinator:
                keys, run = Keys(options.name), self._folder.run.read_text()
                while True:
                    found = await coordinator.get(keys.spec)
                    if found is not None and (spec := decode_key(JobSpec.from_bytes, found, keys)).run == run:
                        break
                    await asyncio.sleep(_LOOK_S)
                token = bytes.fromhex(token_of(options) or "")
                follower = Follower(coordinator, spec, token, Tls.of(node_tls_of(options)))
                await follower.start()
                try:
                    await self._report(follower, spec.setting("drain_s"))
                finally:
                    await follower.stop()
        except TaskGraphError as error:
            log.warning("events of Slurm are not written: %s", error)
        except Exception:  # a mistake of ours, or the shared file system: the job does not depend on it
            log.exception("events of Slurm are not written")

    async def _report(self, follower: Follower, drain_s: float) -> None:
        """Asks Slurm, until cancelled, and writes an event for each element that left its machine."""
        array, _, own = self._element.partition("_")
        # Another one of us may have ended with its machine: then this element changed its place unseen.
        again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        before = [QueuedElement(int(array), int(own), "RUNNING", "None", "")] if again else []
        reported: dict[int, float] = {}  # by number: when an element was reported that is not yet seen to be gone

        async def report(number: int, machine: str, kind: str, why: str) -> None:
            text = f"element {number} left {machine or 'its machine'}: {why}"
            await follower.keep_event(Event(time.time(), "slurm", kind, text))

        complaint = ""
        while True:
            try:
                now = await queued_elements(arrays_in(self._folder))
                for number, note in _take_notes(self._folder):
                    reported[number] = time.monotonic()
                    await report(number, machine_of(note), *why_left(note, drain_s))
                for gone in departures(before, now):
                    if time.monotonic() > reported.pop(gone.number, -math.inf) + _NOTED_S:
                        said = await run_slurm("scontrol", "--oneliner", "show", "job", gone.name, no_job="")
                        is_down = await machine_is_down(gone.machine)
                        await report(gone.number, gone.machine, *why_ended(said, machine_is_down=is_down))
                before = now
            except (TransportError, JobError) as error:  # slurmctld is busy: the next time
                if str(error) != complaint:
                    log.warning("Slurm does not say which elements run: %s", error)
                complaint = str(error)
            await asyncio.sleep(_POLL_S)

    async def _end_elements(self, stopped: asyncio.Event) -> None:
        """Ends what is left of the array after the job's end: those that wait at once, others after a while."""
        arrays = arrays_in(self._folder)
        try:
            for array in arrays:
                await run_slurm("scancel", "--state=PENDING", str(array), no_job="")
            if await self._wait_until_gone(arrays, stopped):
                return
            for each in await queued_elements(arrays):
                await run_slurm("scancel", "--signal=TERM", each.name, no_job="")
            if await self._wait_until_gone(arrays, stopped):
                return
            for each in await queued_elements(arrays):
                if each.name != self._element:  # which ends with us
                    await run_slurm("scancel", each.name, no_job="")
        except (JobError, TransportError) as error:
            log.warning("elements of the array may be left: %s", error)

    async def _wait_until_gone(self, arrays: Sequence[int], stopped: asyncio.Event) -> bool:
        """Waits until no other element is left (True) or this one is to stop (True), at most `_LEAVE_S` (False)."""
        for _ in range(round(_LEAVE_S / _LOOK_S)):
            if stopped.is_set() or not [each for each in await queued_elements(arrays) if each.name != self._element]:
                return True
            await asyncio.sleep(_LOOK_S)
        return False


def _take_notes(folder: Folder) -> list[tuple[int, str]]:
    """Removes the notes of elements that left; returns the numbers of the elements, and what Slurm said then."""
    found = []
    for path in sorted(folder.left.iterdir()):
        if note := path.read_text():  # else it is just being written
            found.append((int(path.name.partition(".")[0]), note))
            remove_file(path)
    return found


async def _end_submit(process: asyncio.subprocess.Process) -> None:
    """Ends the process of `submit`, by SIGTERM, then by SIGKILL. The job goes on."""
    signal_child(process, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SUBMIT_ENDS_S):
            await process.wait()
            return
    signal_child(process, signal.SIGKILL)
    await process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
