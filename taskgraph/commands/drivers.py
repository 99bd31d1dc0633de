"""Makes the job of a driver, as `run` and `submit` name it. This loads neither gRPC nor what runs a job."""

from __future__ import annotations

import argparse
import dataclasses

from taskgraph.driver.loading import load_driver, make_job
from taskgraph.jobs import Job, JobFunction
from taskgraph.options import fields_of, parse
from taskgraph.settings import Settings
from taskgraph.system.streams import open_missing

__all__ = ["job_of"]


def job_of(options: argparse.Namespace, function: JobFunction[...] | None) -> Job:
    """Makes the job of `function`, or else of the named driver, with its options and settings. Raises JobError."""
    function = function or load_driver(options.driver)
    job = make_job(function, function.parse_options(options.option or ()))
    open_missing()  # the driver may have closed standard streams
    if options.set:
        given = parse("taskgraph", fields_of(Settings), options.set, flag="--set", kind="setting")
        job = dataclasses.replace(job, settings=dataclasses.replace(job.settings, **given))
    if options.min_nodes is not None:
        job = dataclasses.replace(job, min_nodes=options.min_nodes)
    return dataclasses.replace(job, name=options.name) if options.name else job
