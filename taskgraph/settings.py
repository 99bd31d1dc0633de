"""Every timeout, size limit and retry of the framework, in one frozen dataclass.

`docs/settings.md` documents each field; a test holds the table to this file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from taskgraph.errors import JobError
from taskgraph.options import check_fields

__all__ = ["Settings"]

_MINUTE, _HOUR, _DAY, _MONTH = 60, 3600, 86_400, 2_592_000
"""Upper limits of settings in seconds: no wait may last for ever, since a job that hangs in it would not say so."""


def _number_up_to(most: int, default: Any, *, least: int | None = None) -> Any:
    """Declares a field that takes numbers from `least` (None: above 0) to `most`."""
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Timeouts in seconds, sizes in bytes.

    Attributes:
        lease_ttl_s: TTL of a node's lease: a node that freezes delays the job this long. etcd's minimum is 2.
        lease_stall_s: a main loop stuck for longer stops the renewal of the lease.
        lost_after_s: a node whose key has been absent this long counts as gone, even if no launcher reported its end.
        min_in_sync: replicas, the primary included, that must hold a boundary before its task is done.
        admit_wait_s: how long epoch 0 waits for the wished backups, so that losing a node early is safe; and how long a
            later epoch waits for a backup that stored some boundaries already, until it has all.
        epochs_ahead: how many epochs a task may work ahead of the last commit; 0: each is committed before the
            next one begins.
        epochs_in_flight: how many epochs of a task may be worked on at a time, if its methods are marked
            `@tg.stateless`; 1: one after another.
        gather_s: how long short epochs wait to be committed together, if tasks work ahead; up to five times as
            long if more than two nodes share a core.
        start_wait_s: how long a job waits for all the nodes its launcher started, beyond `min_nodes`.
        hand_over_s: how long a primary waits for the backup that takes its task over before it goes on itself.
        drain_s: how long a leaving node tries to hand its tasks over.
        takeover_stagger_s: delay for each rank of succession, so that the first successor acts alone.
        connect_s: limit for connecting to a peer and proving the token.
        ping_s: how often the kernel asks whether the host at the other end of a quiet TCP connection is still there.
        ping_timeout_s: a TCP connection whose other end acknowledged nothing for this long is broken.
        call_s: limit for a call that is answered from memory (all calls but pulls, requests and offers).
        refresh_s: if a message is of an epoch that the view does not show yet, the node reads etcd after this time.
        stall_check_s: an epoch without progress for this long is examined for a cycle of waits.
        slow_compute_s: a hook or compute that runs longer is shown in `status` and reported as an event.
        cancel_s: how long a restart waits for a running compute before the node's process ends itself, and how long a
            node that ends waits for a `teardown()`.
        setup_s: limit for a candidate to receive a boundary and run `setup()`, after which the offer is tried again.
        results_kept_s: how long nodes keep results that are not collected, unless the launcher lives.
        fatal_deaths: the number of nodes whose processes end while the same code of one task runs in one epoch, that
            fails the job. In an elastic job: how often all its workers may die before it gets past the same sum.
        device_failures: nodes that one task may end in one epoch by errors of CUDA devices, and attempts of an epoch
            that may end since another node's device failed to copy a value; the next one fails the job.
        device_memory: how much of a CUDA device's memory the nodes of a launcher that share it may hold together.
        blas_threads: threads of BLAS and OpenMP in a node; the same for any number of nodes: sums are bit-equal.
        deal_devices: a launcher gives each node of its host CUDA devices of its own; False: all nodes see all of them.
        max_value_bytes: the largest single value that may travel.
        max_parked: pulls, flags and requests that may wait at one node at a time, and half as many of later epochs;
            further ones are refused, and sent again later.
        max_totals_bytes: memory for the totals of an elastic job that its workers keep for newcomers; a newcomer that
            needs earlier ones copies the state again.
        sliced_bytes: the sums of a step of an elastic job that have this size or more are added up in slices, one on
            each worker, if three workers or more have parts.
        events_kept: events kept in etcd per job; each node may add 31 before it prunes.
        checkpoints_kept: complete checkpoints kept; the newest is used, or an earlier one if that is corrupt.
        strict: replay every epoch from its snapshot, and `result()` from the last one, and name the task whose state
            was forgotten, changed outside a sync point, or separated from the objects that `setup()` made of it. Costs
            at least a second run of every compute.

    Raises:
        JobError: there is no such setting, or the value is of the wrong type or out of range.
    """

    lease_ttl_s: float = _number_up_to(_HOUR, 5.0)
    lease_stall_s: float = _number_up_to(_HOUR, 2.0)
    lost_after_s: float = _number_up_to(_DAY, 30.0)
    min_in_sync: int = _number_up_to(1_000, 1, least=1)
    admit_wait_s: float = _number_up_to(_DAY, 10.0, least=0)
    epochs_ahead: int = _number_up_to(1_000_000, 64, least=0)
    epochs_in_flight: int = _number_up_to(1_000, 4, least=1)
    gather_s: float = _number_up_to(_MINUTE, 0.02, least=0)
    start_wait_s: float = _number_up_to(_DAY, 15.0, least=0)
    hand_over_s: float = _number_up_to(_HOUR, 2.0, least=0)
    drain_s: float = _number_up_to(_DAY, 60.0, least=0)
    takeover_stagger_s: float = _number_up_to(_MINUTE, 0.3, least=0)
    connect_s: float = _number_up_to(_HOUR, 5.0)
    ping_s: float = _number_up_to(_HOUR, 5.0)
    ping_timeout_s: float = _number_up_to(_DAY, 20.0)
    call_s: float = _number_up_to(_HOUR, 10.0)
    refresh_s: float = _number_up_to(_MINUTE, 0.05)
    stall_check_s: float = _number_up_to(_DAY, 2.0)
    slow_compute_s: float = _number_up_to(_MONTH, 10.0)
    cancel_s: float = _number_up_to(_MONTH, 60.0)
    setup_s: float = _number_up_to(_MONTH, 600.0)
    results_kept_s: float = _number_up_to(_MONTH, 300.0, least=0)
    fatal_deaths: int = _number_up_to(1_000_000, 3, least=1)
    device_failures: int = _number_up_to(1_000_000, 2, least=1)
    device_memory: float = _number_up_to(1, 0.9)
    blas_threads: int = _number_up_to(10_000, 1, least=1)
    deal_devices: bool = True
    max_value_bytes: int = _number_up_to(1 << 50, 1 << 40, least=1)
    max_parked: int = _number_up_to(100_000_000, 100_000, least=1)
    max_totals_bytes: int = _number_up_to(1 << 50, 1 << 30, least=1)
    sliced_bytes: int = _number_up_to(1 << 50, 2 << 20, least=1)
    events_kept: int = _number_up_to(1_000_000, 1000, least=1)
    checkpoints_kept: int = _number_up_to(1_000_000, 3, least=1)
    strict: bool = False

    def __new__(cls, *_: Any, **given: Any) -> Self:
        check_fields(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _is_allowed(value, field):
                raise JobError(f"Settings({field.name}={value!r}): must be {_allowed_text(field)}")


def _is_allowed(value: Any, field: dataclasses.Field[Any]) -> bool:
    if isinstance(field.default, bool) or isinstance(value, bool):
        return isinstance(field.default, bool) and isinstance(value, bool)
    if not isinstance(value, int if isinstance(field.default, int) else int | float):
        return False
    least, most = field.metadata["least"], field.metadata["most"]
    return bool((value > 0 if least is None else value >= least) and value <= most)


def _allowed_text(field: dataclasses.Field[Any]) -> str:
    """Describes the values that a setting accepts, for messages."""
    if isinstance(field.default, bool):
        return "True or False"
    unit = " of seconds" if field.name.endswith("_s") else ""
    what = "an int" if isinstance(field.default, int) else f"a number{unit}"
    least, most = field.metadata["least"], field.metadata["most"]
    return f"{what} above 0, and {most} at most" if least is None else f"{what} from {least} to {most}"
