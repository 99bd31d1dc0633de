"""One of the elastic examples, whose steps are slow until a file is there: workers die and join in few steps.

The environment names the example (PACED_EXAMPLE, `module:function`) and the file (PACED_UNTIL).
"""

import importlib
import inspect
import os
import sys
import time
import typing
from pathlib import Path

from taskgraph.elastic_jobs.job import elastic
from taskgraph.elastic_jobs.steps import Step

PAUSE_S = 0.5
"""Pause of each worker before its first part of a step. A newcomer that follows has no parts, and does not wait."""

_parts = Step.__iter__


def _paced(step):
    for number, part in enumerate(_parts(step)):
        if number == 0 and not Path(os.environ["PACED_UNTIL"]).exists():
            time.sleep(PAUSE_S)
        yield part


def _as_job_of_this_file(module, name):
    function = vars(importlib.import_module(module))[name].__wrapped__

    def call(run, **options):
        return function(run, **options)

    call.__name__ = call.__qualname__ = name
    call.__signature__ = inspect.signature(function)
    call.__annotations__ = typing.get_type_hints(function)
    return {name: elastic(checkpoint_every_s=0.5)(call)}


Step.__iter__ = _paced
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
vars().update(_as_job_of_this_file(*os.environ["PACED_EXAMPLE"].split(":")))
