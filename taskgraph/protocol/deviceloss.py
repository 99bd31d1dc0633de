"""Decides after an error of a CUDA device in user code whether the process ends, or the job.

After such an error the CUDA context of the process may be *poisoned*: unusable, with wrong results. So the process
ends, and backups take over its tasks. That helps against a faulty device, and against memory that other processes used,
but not if a task needs more memory than there is. Each process that ends writes the task and the epoch into its
`gone/{node}` in etcd; these records are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from taskgraph.errors import class_name
from taskgraph.protocol.records import name_of
from taskgraph.protocol.shared import holds_state
from taskgraph.protocol.view import JobView

__all__ = ["Decision", "decide", "device_error", "illegal_access_hint"]

_MODULES = ("cupy_backends.",)
"""The start of the modules with CuPy's errors of CUDA's runtime, driver and libraries."""
_COMPILER_MODULE = "cupy_backends.cuda.libs.nvrtc"
"""An exception from `_MODULES`: a kernel that does not compile harms no context."""
_CLASSES = frozenset(
    (
        ("cupy.cuda.memory", "OutOfMemoryError"),
        ("cupy.cuda.cufft", "CuFFTError"),
        ("torch", "OutOfMemoryError"),
        ("torch.cuda", "OutOfMemoryError"),
        ("torch", "AcceleratorError"),
        ("taskgraph.device.virtual", "DriverError"),
    )
)
_MAX_CHAIN = 20
"""The most exceptions of a chain that are checked."""


def device_error(error: BaseException | None) -> BaseException | None:
    """Finds an error of a CUDA device in the chain of `error`; None: there is none.

    Classes are recognized by name, so their libraries need not be loaded.
    """
    found = error
    for _ in range(_MAX_CHAIN):
        if found is None:
            return None
        if any(_is_device_error(kind) for kind in type(found).__mro__):
            return found
        found = found.__cause__ or found.__context__
    return None


def _is_device_error(kind: type) -> bool:
    module = kind.__module__
    return (module, class_name(kind)) in _CLASSES or (module.startswith(_MODULES) and module != _COMPILER_MODULE)


def illegal_access_hint(error: BaseException) -> str:
    """Returns a hint on the cause of an illegal access, to add to the error's text; "" for other device errors."""
    said = str(error).replace("_", "").lower()
    if "illegaladdress" not in said and not said.endswith("cuda error 700"):
        return ""
    return " (to write to an array that `ins` gave is one such access: it is read-only; tg.testing.run finds who does)"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the job fails or the process ends after a device error. If both texts are "", the process ends now.

    Attributes:
        fail: why the job has to fail; "": it continues, and the process ends.
        wait: what the process waits for before it ends; "": nothing. Backups can still get its snapshots, which are on
            the host.
    """

    fail: str = ""
    wait: str = ""


def decide(
    view: JobView,
    me: str,
    run: str,
    task: int,
    epoch: int,
    *,
    limit: int,
    backups: int,
    needs_device: Callable[[int], bool],
) -> Decision:
    """Decides after a device error in the code of `task` in `epoch` if the job fails, or the process of `me` ends.

    Args:
        me: the node with the error.
        limit: the job fails if as many nodes ended for this task and epoch before.
        backups: the wanted backups of a task.
    """
    before = sorted(n for n, g in view.gone.items() if g.record.task == task and g.record.epoch == epoch)
    if len(before) >= limit:
        names = " and ".join(map(name_of, before))
        return Decision(fail=f"the same ended {names} in this epoch before (device_failures={limit})")
    others = {n: r for n, r in view.live_nodes(run).items() if n != me and not r.draining}
    if not others:
        return Decision(fail="no other node is there to go on")
    mine = {t for t, p in view.primaries.items() if p.record.node == me} | {task}
    alone = []
    for held in sorted(mine):
        able = {n for n, r in others.items() if r.devices or not needs_device(held)}
        if not able:
            return Decision(fail=f"no other node may hold task {held}, so that ending this one would not help")
        stateful = holds_state(view, held) and epoch > 0 and view.checkpoint is None
        if stateful and not any(n in view.nodes and n not in view.gone for n in view.in_sync(held) if n != me):
            if not backups:
                return Decision(fail=f"no other node holds the state of task {held}: with backups the job would go on")
            alone.append(str(held))
    return Decision(wait=f"another node to hold the state of task {', '.join(alone)}" if alone else "")
