"""Every timeout, size limit and retry of the framework, in one frozen dataclass.

`docs/settings.md` documents each field; a test holds the table to this file.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

from taskgraph.errors import JobError
from taskgraph.options import check_fields

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Timeouts in seconds, sizes in bytes.

    Attributes:
        lease_ttl_s: TTL of a node's lease, and what a node that freezes costs. etcd's floor is 2.
        lease_stall_s: a main loop stuck for longer stops the renewal of the lease.
        lost_after_s: a node whose key has been absent for this long is gone, without a launcher's word.
        min_in_sync: replicas, the primary included, that must hold a boundary before its task is done.
        admit_wait_s: how long epoch 0 waits for the backups wished for, so that it is safe to lose a node early; and a
            later one for a backup that holds a boundary already, so that it comes to hold all of them.
        epochs_ahead: how many epochs a task may work ahead of the last commit; 0: each is committed before the
            next one begins.
        epochs_in_flight: how many epochs of a task may be worked on at a time, where its methods are marked
            `@tg.stateless`; 1: one after another.
        gather_s: where tasks work ahead, how long short epochs wait to be committed together; up to five times as
            long where more than two nodes share a core.
        start_wait_s: how long a job waits for all the nodes its launcher started, beyond `min_nodes`.
        hand_over_s: how long a primary waits for the backup it handed over to before it goes on itself.
        drain_s: how long a node that was told to leave tries to hand everything over.
        takeover_stagger_s: delay per rank of succession, so that the first in line acts alone.
        connect_s: connecting to a peer and proving the token.
        ping_s: how often the kernel asks whether the host at the other end of a quiet TCP connection is still there.
        ping_timeout_s: a TCP connection whose other end acknowledged nothing for this long is broken.
        call_s: a call that is answered from memory (everything but pulls, requests and offers).
        refresh_s: an unconfirmed hint (a message from the future) leads to a re-read of etcd after this time.
        stall_check_s: an epoch that did not move for this long is examined for a cycle of waits.
        slow_compute_s: a hook or compute that runs longer is shown in `status` and told as an event.
        cancel_s: how long a restart waits for a running compute before the node's process ends itself.
        setup_s: limit for `setup()` of a candidate, after which the offer is tried again.
        results_kept_s: how long nodes keep results nobody collects.
        fatal_deaths: nodes whose processes may end while the same code of one task runs, in one epoch: the job fails
            with the last of so many.
        device_failures: nodes that one task may end in one epoch by errors of CUDA devices; the next one fails the job.
        device_memory: how much of a CUDA device's memory the nodes of a launcher that share it may hold together.
        blas_threads: threads of BLAS and OpenMP in a node; the same for any number of nodes: sums are bit-equal.
        deal_devices: a launcher gives each node of its host CUDA devices of its own; False: all nodes see all of them.
        max_value_bytes: the largest single value that may travel.
        max_parked: calls that may wait at one node at a time; more are told to come again.
        events_kept: events kept in etcd per job.
        checkpoints_kept: complete checkpoints kept; the newest is used, those before it where that is corrupt.
        strict: replay every epoch from its snapshot and name the task whose state was forgotten or changed
            outside a sync point. Costs at least a second run of every compute.

    Raises:
        JobError: no such setting, or a value that is no number of its kind.
    """

    lease_ttl_s: float = 5.0
    lease_stall_s: float = 2.0
    lost_after_s: float = 30.0
    min_in_sync: int = 1
    admit_wait_s: float = 10.0
    epochs_ahead: int = 64
    epochs_in_flight: int = 4
    gather_s: float = 0.02
    start_wait_s: float = 15.0
    hand_over_s: float = 2.0
    drain_s: float = 60.0
    takeover_stagger_s: float = 0.3
    connect_s: float = 5.0
    ping_s: float = 5.0
    ping_timeout_s: float = 20.0
    call_s: float = 10.0
    refresh_s: float = 0.05
    stall_check_s: float = 2.0
    slow_compute_s: float = 10.0
    cancel_s: float = 60.0
    setup_s: float = 600.0
    results_kept_s: float = 300.0
    fatal_deaths: int = 3
    device_failures: int = 2
    device_memory: float = 0.9
    blas_threads: int = 1
    deal_devices: bool = True
    max_value_bytes: int = 1 << 40
    max_parked: int = 100_000
    events_kept: int = 1000
    checkpoints_kept: int = 3
    strict: bool = False

    def __new__(cls, *_: Any, **given: Any) -> Self:
        check_fields(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(field.default) is bool:
                fits, what = isinstance(value, bool), "True or False"
            elif type(field.default) is int:
                least = 0 if field.name in _MAY_BE_ZERO else 1
                fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
                what = f"an int from {least} on"
            else:
                zero, part = field.name in _MAY_BE_ZERO, field.name in _PARTS
                number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                fits = number and (value > 0 or (zero and value == 0)) and not (part and value > 1)
                what = "a number above 0, and 1 at most" if part else f"a number of seconds{'' if zero else ' above 0'}"
            if not fits:
                raise JobError(f"Settings({field.name}={value!r}): must be {what}")


_PARTS = ("device_memory",)
"""Of a whole, which is 1."""
_MAY_BE_ZERO = (
    "admit_wait_s",
    "epochs_ahead",
    "gather_s",
    "start_wait_s",
    "hand_over_s",
    "drain_s",
    "takeover_stagger_s",
    "results_kept_s",
)
"""What one may do without."""
