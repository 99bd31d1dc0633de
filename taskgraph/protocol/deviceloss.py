"""What is to be done when a task's code met an error of its CUDA device: does its process end, or the job?

After such an error the process's context may be unusable for good (it is *poisoned*), and so may what it computes. So
the process ends, and others take over what it held. That heals a device that is ill, and memory that was short because
others used it; it does not heal a task that always asks for more memory than there is. How often a task was failed over
for that must outlive the processes that counted: each leaves it in etcd, in its own `gone/{node}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from taskgraph.errors import class_name
from taskgraph.protocol.records import name_of
from taskgraph.protocol.view import JobView

__all__ = ["Outcome", "device_error", "hint", "outcome"]

_MODULES = ("cupy_backends.",)
"""Where CuPy's errors of CUDA's runtime, driver and libraries are."""
_COMPILING = "cupy_backends.cuda.libs.nvrtc"
"""But for this one: a kernel that does not compile is a mistake in it, and harms no context."""
_NAMES = frozenset(
    (
        ("cupy.cuda.memory", "OutOfMemoryError"),
        ("cupy.cuda.cufft", "CuFFTError"),
        ("torch", "OutOfMemoryError"),
        ("torch.cuda", "OutOfMemoryError"),
        ("torch", "AcceleratorError"),
        ("taskgraph.device.virtual", "DriverError"),
    )
)
_CHAIN = 20
"""Exceptions of a chain that are looked at."""


def device_error(error: BaseException | None) -> BaseException | None:
    """The error of a CUDA device that `error` is, or was raised in the wake of; None where there is none.

    Classes are known by their names: none of their libraries is loaded for that.
    """
    found = error
    for _ in range(_CHAIN):
        if found is None:
            return None
        if any(_of_device(kind) for kind in type(found).__mro__):
            return found
        found = found.__cause__ or found.__context__
    return None


def _of_device(kind: type) -> bool:
    module = kind.__module__
    return (module, class_name(kind)) in _NAMES or (module.startswith(_MODULES) and module != _COMPILING)


def hint(error: BaseException) -> str:
    """What to add to what such an error says; "" where that says it all."""
    said = str(error).replace("_", "").lower()
    if "illegaladdress" not in said and not said.endswith("cuda error 700"):
        return ""
    return " (to write to an array that `ins` gave is one such access: it is read-only; tg.testing.run finds who does)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows. With neither, the process ends now.

    Attributes:
        fail: why the job has to fail with the error.
        wait: what the process waits for before it ends: snapshots are bytes on the host, which it can still give.
    """

    fail: str = ""
    wait: str = ""


def outcome(
    view: JobView,
    me: str,
    run: str,
    task: int,
    epoch: int,
    *,
    limit: int,
    backups: int,
    needs_device: Callable[[int], bool],
) -> Outcome:
    """Decides what follows where a task's code met an error of its device.

    Args:
        me: the node that met it; it holds what the view gives it.
        limit: how many nodes the same task may end in the same epoch. The next such error is the job's end.
        backups: how many each task should have.
    """
    before = sorted(n for n, g in view.gone.items() if g.record.task == task and g.record.epoch == epoch)
    if len(before) >= limit:
        names = " and ".join(map(name_of, before))
        return Outcome(fail=f"the same ended {names} in this epoch before (device_failures={limit})")
    others = {n: r for n, r in view.live_nodes(run).items() if n != me and not r.draining}
    if not others:
        return Outcome(fail="no other node is there to go on")
    mine = {t for t, p in view.primaries.items() if p.record.node == me} | {task}
    alone = []
    for held in sorted(mine):
        able = {n for n, r in others.items() if r.devices or not needs_device(held)}
        if not able:
            return Outcome(fail=f"no other node may hold task {held}, so that ending this one would not help")
        primary = view.primaries.get(held)
        stateful = primary is not None and primary.record.stateful and epoch > 0 and view.checkpoint is None
        if stateful and not any(n in view.nodes and n not in view.gone for n in view.in_sync(held) if n != me):
            if not backups:
                return Outcome(fail=f"no other node holds the state of task {held}: with backups the job would go on")
            alone.append(str(held))
    return Outcome(wait=f"another node to hold the state of task {', '.join(alone)}" if alone else "")
