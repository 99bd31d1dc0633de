"""`submit --on slurm`: nodes are the elements of an array of one-node jobs. The command submits, and is done.

Slurm keeps the elements: it starts those that wait when there is room, and queues those again whose machine failed or
was wanted for others. `script` has the script, and `folder` says what is in the job's folder. The first
element runs `commands.slurm_companion` beside its node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import os
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from taskgraph.clusters.api import Request
from taskgraph.clusters.slurm.commands import queued_elements, run_slurm
from taskgraph.clusters.slurm.folder import Folder
from taskgraph.clusters.slurm.options import (
    add_slurm_options,
    made_tls_files,
    make_element,
    make_resources,
    needs_certificates,
    own_access,
)
from taskgraph.clusters.slurm.script import array_words, script
from taskgraph.clusters.slurm.state import QueuedElement, surplus_elements, waiting_lines
from taskgraph.clusters.tailing import follow_files
from taskgraph.errors import JobError, TransportError
from taskgraph.network.tls import CA, CERT, KEY
from taskgraph.system.files import remove_file, write_whole

__all__ = ["SlurmLauncher", "arrays_in"]

_GONE_S = 120.0
"""How long `stop` waits for Slurm to end all elements: KillWait is 30 s by default."""
_LOOK_S = 0.3


class SlurmLauncher:
    """Submits an array of one-node jobs, and changes its length."""

    def __init__(self) -> None:
        self._patch: str | None = None  # the text of the user's file, which may be a pipe

    def add_place_options(self, group: argparse._ArgumentGroup) -> None:
        text = "the job's folder, on a file system that all machines see (./NAME.taskgraph)"
        group.add_argument("--folder", metavar="DIR", help=text)

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        add_slurm_options(group)

    def place(self, options: argparse.Namespace) -> dict[str, str]:
        return {"folder": os.path.abspath(options.folder)} if options.folder else {}

    def text(self, request: Request) -> str:
        return "".join((self._script(request), *(f"# {shlex.join(words)}\n" for words in _sbatch_calls(request))))

    def _script(self, request: Request) -> str:
        options = request.options
        if self._patch is None:
            self._patch = _read_patch(options.patch)
        return script(make_element(request), make_resources(options), request.nodes, self._patch)

    async def start(self, request: Request) -> dict[str, str]:
        folder = make_element(request).folder
        made = await _prepare(folder, request.job)
        try:
            token, run = request.token or secrets.token_hex(32), secrets.token_hex(8)
            write_whole(folder.token, f"{token}\n".encode())
            write_whole(folder.run, run.encode())
            write_whole(folder.script, self._script(request).encode())
            if needs_certificates(request):
                await asyncio.to_thread(_write_certificates, folder, request.job)
            for words in _sbatch_calls(request):
                await _submit(folder, words)
        except BaseException:
            with contextlib.suppress(JobError, TransportError):
                await _cancel_all_and_wait(folder)
            if made:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        return {"folder": str(folder.path), "kept": str(folder.kept), "token": token, "run": run, **own_access(request)}

    async def scale(self, job: str, where: Mapping[str, str], nodes: int) -> str:
        folder = _find_folder(job, where)
        there = [each for each in await queued_elements(arrays_in(folder)) if not each.ending]
        if not there:
            raise JobError(f"job {job!r} has no elements in Slurm's queue: it has ended, or was cancelled")
        if leaving := surplus_elements(there, nodes):
            for each in leaving:
                await _dismiss(each)
            names = ", ".join(str(each.number) for each in leaving)
            one = len(leaving) == 1
            return f"element {names} hands over and leaves" if one else f"elements {names} hand over and leave"
        if not (more := nodes - len(there)):
            return f"it has {nodes} already"
        used = {each.number for each in there}
        for words in _array_options([number for number in range(nodes + len(used)) if number not in used][:more]):
            await _submit(folder, ["sbatch", "--parsable", *words, str(folder.script)])
        return f"{more} more wait for machines: `taskgraph status {job}`"

    async def logs(self, job: str, where: Mapping[str, str], node: str | None, *, follow: bool) -> AsyncIterator[str]:
        folder = _find_folder(job, where)
        number = node.partition(".")[0] if node else None  # nodes are called 3.0, 3.1, ... after their element

        def files() -> Sequence[Path]:
            found = folder.logs.glob(f"{glob.escape(number)}.log" if number else "[0-9]*.log")
            return sorted(found, key=lambda path: (len(path.stem), path.stem))

        if not files() and not follow:
            raise JobError(f"job {job!r}: {folder.logs} has no log of {f'node {node!r}' if node else 'its nodes'} yet")
        async for line in follow_files(files, ended=lambda: not follow or folder.ended.exists()):
            yield line

    async def stop(self, job: str, where: Mapping[str, str]) -> None:
        folder = _find_folder(job, where)
        if folder.path.is_dir():
            write_whole(folder.ended, b"1\n")  # an element that is about to start ends at once
            await _cancel_all_and_wait(folder)
            remove_file(folder.etcd_at)
            shutil.rmtree(folder.etcd, ignore_errors=True)

    async def waiting(self, job: str, where: Mapping[str, str]) -> list[str]:
        folder = _find_folder(job, where)
        there = await queued_elements(arrays_in(folder))
        if not there and not folder.ended.exists():
            return [
                "Slurm's queue has no element of it, so all were cancelled: `taskgraph submit` starts it again, with "
                "--resume from its checkpoint"
            ]
        lines = waiting_lines(there)
        no_etcd = where.get("etcd") == f"file:{folder.etcd_at}" and not folder.etcd_at.exists()
        if no_etcd and any(each.number == 0 and each.running for each in there):
            lines.insert(0, f"element 0 runs, and has not started the job's etcd: see {folder.logs}/submit.log")
        return lines


def arrays_in(folder: Folder) -> list[int]:
    """Returns the ids of a job's array jobs; none if the folder has no job."""
    try:
        return [int(word) for word in folder.arrays.read_text().split()]
    except (FileNotFoundError, ValueError):
        return []


def _find_folder(job: str, where: Mapping[str, str]) -> Folder:
    folder = Folder(Path(where.get("folder") or os.path.abspath(f"{job}.taskgraph")))
    if not folder.script.exists():
        raise JobError(f"{folder.path} is not the folder of a job on Slurm: name the folder of {job!r} with --folder")
    return folder


def _read_patch(path: str | None) -> str:
    try:
        return Path(path).read_text() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"--patch {path} cannot be read: {error}") from error


def _sbatch_calls(request: Request) -> list[list[str]]:
    """Returns the command lines that submit a job: one array of nodes, and one of extra nodes if there are some."""
    sbatch, file = ["sbatch", "--parsable"], str(make_element(request).folder.script)
    calls = [[*sbatch, file]]
    if request.extra_nodes:
        calls.append([*sbatch, *array_words(request.nodes, request.extra_nodes, request.extra_priority), file])
    return calls


def _array_options(numbers: Sequence[int]) -> list[list[str]]:
    """Returns options of sbatch for elements with these numbers: a list for each array of consecutive ones."""
    starts = [number for number in numbers if number - 1 not in numbers]
    calls = []
    for first in starts:
        count = next(count for count in range(1, len(numbers) + 1) if first + count not in numbers)
        calls.append(array_words(first, count))
    return calls


async def _prepare(folder: Folder, job: str) -> bool:
    """Makes the job's folder, or empties that of a job that has ended. Returns True if it made the folder.

    Raises:
        JobError: the folder is in use, or is none of ours.
    """
    path = folder.path
    try:
        made = not path.exists()
        if made:
            path.mkdir(mode=0o700)
        elif any(path.iterdir()) and not folder.script.exists():
            raise JobError(f"{path} has other files: name another --folder, or remove it")
        elif await queued_elements(arrays_in(folder)):
            raise JobError(f"job {job!r} runs already ({path}): `taskgraph shutdown {job}` ends it; or choose a --name")
        path.chmod(0o700)
        for each in (folder.etcd, folder.left, folder.logs, folder.tls, folder.kept):
            shutil.rmtree(each, ignore_errors=True)
        for each in (folder.arrays, folder.ended, folder.etcd_at, folder.result):
            each.unlink(missing_ok=True)
        for each in (folder.left, folder.logs):
            each.mkdir()
    except OSError as error:
        raise JobError(f"--folder {path}: {error.strerror}: {error.filename}") from error
    return made


def _write_certificates(folder: Folder, job: str) -> None:
    from taskgraph.clusters.credentials import job_certificates

    folder.tls.mkdir(mode=0o700, exist_ok=True)
    for name, data in job_certificates(made_tls_files(folder, job)["name"]).items():
        if name in (CA, CERT, KEY):
            write_whole(folder.tls / name, data)


async def _submit(folder: Folder, words: Sequence[str]) -> None:
    number = (await run_slurm(*words, again=False)).strip().partition(";")[0]  # a federation adds its cluster's name
    with folder.arrays.open("a") as file:
        file.write(f"{int(number)}\n")


async def _dismiss(element: QueuedElement) -> None:
    """Ends an element for good: a running one hands over first, a waiting one is cancelled."""
    if not element.running:
        await run_slurm("scancel", element.name, no_job="")
        return
    await run_slurm("scontrol", "update", f"JobId={element.name}", "Requeue=0", no_job="")
    await run_slurm("scancel", "--signal=TERM", element.name, no_job="")


async def _cancel_all_and_wait(folder: Folder) -> None:
    """Cancels all elements, and waits for their end.

    Raises:
        TransportError: Slurm did not end them in time.
    """
    arrays = arrays_in(folder)
    for array in arrays:
        await run_slurm("scancel", str(array), no_job="")
    for _ in range(round(_GONE_S / _LOOK_S)):
        if not (left := await queued_elements(arrays)):
            return
        await asyncio.sleep(_LOOK_S)
    names = ", ".join(each.name for each in left)
    raise TransportError(f"Slurm has not ended {names} within {_GONE_S:g} s: look with `squeue --me`")
