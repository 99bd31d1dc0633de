"""submit: puts a job into an etcd; with --on a launcher also starts its nodes."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

import uvloop

from taskgraph.commands.common import (
    FoundJob,
    NewToken,
    access_of,
    access_words,
    etcd_of,
    node_tls_of,
    token_of_new_job,
)
from taskgraph.commands.drivers import job_of
from taskgraph.coordination.api import AccessRefused, Coordinator
from taskgraph.coordination.opening import opened
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import DecodeError, JobError
from taskgraph.jobs import Job, JobFunction
from taskgraph.launch.runtime import JobEntry
from taskgraph.protocol.keys import NAME_RULE, Keys, is_name
from taskgraph.protocol.view import decode_key
from taskgraph.transport.hello import token_mark

__all__ = ["submit"]


def submit(options: argparse.Namespace, function: JobFunction[...] | None = None) -> int:
    """Puts a job into an etcd. Its nodes are started with `launch` or `node`, or by the launcher of --on."""
    job = job_of(options, function)
    if options.on is not None:
        from taskgraph.commands.placing import place_job

        return place_job(options, job)
    _check_without_launcher(options)
    _check_nodes(options, job)
    etcd = etcd_of(options)
    if etcd is None:
        raise JobError("submit needs your etcd: give --etcd, or use `taskgraph run`, which brings its own")
    spec = JobSpec.of(job, expected_nodes=options.nodes or 0)
    if options.run is not None:
        spec = dataclasses.replace(spec, run=options.run)
    token = token_of_new_job(options, Path(f"{spec.name}.token"), again=options.run is not None)
    assert token is not None
    spec = dataclasses.replace(spec, token_mark=token_mark(bytes.fromhex(token.token)))
    try:
        new = uvloop.run(_submit(options, etcd, spec))
    except _NotSubmitted as error:
        token.discard()
        raise error.why from None
    if token.written:
        print(f"wrote the job's token to {token.path}, which only you can read")
    if options.wait:
        how = f"with driver {spec.fingerprint}" if new else "before (--run): this command follows it"
        print(f"submitted job {spec.name} {how}", flush=True)
        return uvloop.run(_wait(options, etcd, spec, token))
    print(f"submitted job {spec.name} with driver {spec.fingerprint}; start nodes on any host that has the driver")
    print("(on several hosts each with --listen HOST, a name or address that the others can reach):")
    print(f"  taskgraph launch {spec.name} --nodes N --etcd {etcd}{access_words(options)} --token-file {token.path}")
    return 0


def _check_without_launcher(options: argparse.Namespace) -> None:
    """Raises JobError if an option needs --on, or --wait, which are not given."""
    if options.within is not None:
        from taskgraph.commands.waiting import inside_of

        inside_of(options.within)  # what is wrong is said before the job is submitted
    for name in ("extra_nodes", "extra_priority", "dry_run", "insecure_listen"):
        if getattr(options, name):
            raise JobError(f"--{name.replace('_', '-')} goes with --on")
    if options.nodes is not None and not options.wait:
        raise JobError("--nodes goes with --on: without it `taskgraph launch` starts the nodes")
    if options.within is not None and not options.wait:
        raise JobError("--within goes with --wait: the launcher's pod of a job runs it")
    if options.result is not None and not options.wait:
        raise JobError("--result goes with --wait: without it `taskgraph result` has the values")


def _check_nodes(options: argparse.Namespace, job: Job) -> None:
    """Raises JobError if --run is no name, or the job cannot begin with --nodes."""
    if options.run is not None and not is_name(options.run):
        raise JobError(f"--run {options.run!r}: {NAME_RULE}")
    if options.nodes is None:
        return
    if options.nodes < 1:
        raise JobError(f"--nodes {options.nodes}: at least 1")
    if job.min_nodes > options.nodes:
        raise JobError(f"the job begins with {job.min_nodes} nodes (min_nodes), and is to have {options.nodes}")


class _NotSubmitted(Exception):
    """The job certainly is not in etcd. `why` is the error that kept it out."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(str(why))
        self.why = why


async def _submit(options: argparse.Namespace, etcd: str, spec: JobSpec) -> bool:
    """Puts the job into etcd; returns False if that run was submitted before.

    Raises:
        _NotSubmitted: an error came before etcd could have the job.
    """
    from taskgraph.launch.resuming import begin, plan  # loads numpy

    submitting = False
    try:
        async with opened(etcd, access_of(options)) as coordinator:
            if options.run is not None and await _was_submitted(coordinator, spec):
                return False
            planned, beginning = await plan(coordinator, spec, resume=options.resume, fresh=options.fresh)
            submitting = True
            await begin(coordinator, planned, beginning)
            return True
    except BaseException as error:  # also Ctrl-C
        if not submitting or isinstance(error, JobError | DecodeError | AccessRefused):  # else etcd may have the job
            raise _NotSubmitted(error) from None
        raise


async def _was_submitted(coordinator: Coordinator, spec: JobSpec) -> bool:
    """True if the job in etcd is this very run."""
    keys = Keys(spec.name)
    found = await coordinator.get(keys.spec)
    return found is not None and decode_key(JobSpec.from_bytes, found, keys).run == spec.run


async def _wait(options: argparse.Namespace, etcd: str, spec: JobSpec, token: NewToken) -> int:
    """Follows the submitted job to its end. Returns the exit code."""
    from taskgraph.commands.waiting import wait_for

    async with opened(etcd, access_of(options)) as coordinator:
        keys = Keys(spec.name)
        found = await coordinator.get(keys.spec)
        if found is None:
            raise JobError(f"job {spec.name!r} was deleted from etcd")
        entry = JobEntry(
            name=spec.name,
            etcd=etcd,
            token=token.token,
            pid=os.getpid(),
            embedded=False,
            tls=access_of(options),
            node_tls=node_tls_of(options),
            run=spec.run,
        )
        reached = FoundJob(spec.name, entry, decode_key(JobSpec.from_bytes, found, keys), coordinator)
        reached.check_token()  # a run that was submitted before may have another
        return await wait_for(reached, options)
