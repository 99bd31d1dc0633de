"""Exceptions of user code that are hard to format fail the job by name."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.errors import JobFailed, error_text
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.failing import failure_record
from taskgraph.node.usercode.errors import UserCodeError

ETCD_BYTES = 1_500_000


class BadText(Exception):
    def __str__(self) -> str:
        return self.args[0]  # no string


class Leaves(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class NoName(Exception, metaclass=Nameless):
    pass


def retried(left: int = 900) -> None:
    """Retries within `except`: earlier exceptions are the context of the last one."""
    try:
        raise OSError("no")
    except OSError:
        if left:
            retried(left - 1)
        raise


def nested(depth: int = 3000) -> BaseException:
    error: Exception = ValueError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("more", [error])
    return error


def caught(function: Any) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BadText(7), "BadText: (its __str__ raises TypeError)"),
        (Leaves(), "Leaves: (its __str__ raises SystemExit)"),
        (NoName("x"), "NoName: x"),
        (KeyError("\ud800"), "KeyError: '\\ud800'"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (caught(retried), "OSError: no"),
        (nested(), "ExceptionGroup: more (1 sub-exception)"),
        (ValueError("\U0001f600" * 1_000_000), "ValueError: \U0001f600\U0001f600"),
        (ValueError("\0" * 1_000_000), "ValueError: \0\0"),
    ],
    ids=range(9),
)
def test_errors_of_broken_exceptions(error: BaseException, said: str) -> None:
    record = failure_record(UserCodeError("count", error), 1, 2, "writer")
    assert record.reason.startswith(f"task 1, epoch 2, 'count': {said}")
    assert record.traceback
    assert len(record.to_bytes()) < ETCD_BYTES


def test_exception_without_a_message() -> None:
    assert error_text(KeyError()) == "KeyError"


@pytest.mark.parametrize("make", [lambda: BadText(7), lambda: caught(retried), lambda: NoName("x")])
def test_the_job_fails_by_name(make: Any) -> None:
    class Raising(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if epoch.number == 1 and self.task_id == 1:
                raise make()

    async def scenario(cluster: InProcessCluster) -> int:
        with pytest.raises(JobFailed) as failed:
            await cluster.result()
        assert (failed.value.task, failed.value.epoch, failed.value.where) == (1, 1, "count")
        return len(cluster.nodes)

    assert play(job(Raising), scenario, nodes=3) == 3
