"""What to say beside an exception of Python's or numpy's own that a wrong use of ours led to.

Such an exception names what failed, and not what to write instead: `assignment destination is read-only`.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Final

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import Epoch, Hold, Reply, Scratch
from taskgraph.errors import kind_of, said

__all__ = ["hint"]

_NAMES: Final = {Epoch: "epoch", Hold: "hold", Inputs: "ins", Outputs: "outs", Reply: "reply"}
_OURS: Final = frozenset({"close", "filled", "given"})
"""What these have for the framework."""
_FORMS: Final = {
    "Epoch.processor": "epoch.processor(self.add, inbound={'theta': 'parents'}, outbound={'grad': 'parents'})",
    "Epoch.flag": "epoch.flag('children', meta)",
    "Epoch.request": "epoch.request(task_id, 'method', payload)",
    "Epoch.hold": "with epoch.hold('why'): ...",
    "Epoch.report": "epoch.report(loss=0.5)",
    "Epoch.finish": "epoch.finish()",
    "Inputs.all": "ins.all('tag')",
    "Outputs.put": "outs.put('tag', value, to=task_id)",
    "Outputs.empty": "outs.empty('tag', shape, dtype, to=task_id)",
    "Reply.wait": "reply.wait(timeout_s=5)",
}
_READ_ONLY: Final = (
    "what a task receives is read-only: write to a copy of it, as in x = ins['tag'].copy(), or compute a new one, "
    "x = x + 1 instead of x += 1"
)
_REPLY: Final = "a Reply is not the answer yet: reply.wait() gives it, in an `async def` await reply"
_OUTS: Final = "put with outs.put('tag', value)"
_NUMPYS: Final = (
    "what a node without a device put, or kept as state, is numpy's: self.xp.asarray(ins['tag']) is one of self.xp "
    "on every node, see docs/gpu.md"
)
_TERMINAL: Final = (
    "nodes have no terminal: breakpoint() and input() need one, and everything in its process: --nodes 0, or "
    "tg.run(..., nodes=0)"
)


def hint(error: BaseException) -> str:
    """What to do about it, or "" where the exception has nothing to do with us."""
    if _asks(error) and not _terminal():
        return _TERMINAL
    if isinstance(error, ValueError):
        return _READ_ONLY if "read-only" in said(error) else ""
    if isinstance(error, AttributeError):
        return _of_attribute(error.obj)
    if isinstance(error, TypeError):
        return _of_type(said(error))
    return ""


def _asks(error: BaseException) -> bool:
    """Whether it is what `breakpoint()` and `input()` raise where nobody answers."""
    return kind_of(error) == "BdbQuit" or (isinstance(error, EOFError) and "reading a line" in said(error))


def _terminal() -> bool:
    """Whether somebody can type here, who may have ended a debugger, or an input, on purpose."""
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # it is closed
        return False


def _of_attribute(owner: Any) -> str:
    if isinstance(owner, Scratch):
        held = ", ".join(vars(owner)) or "nothing"
        return (
            f"epoch.scratch is empty at the beginning of every epoch, and of every attempt at it: what is to stay is "
            f'state; here it holds: {held}; getattr(epoch.scratch, "...", default) is what may not be there yet'
        )
    if isinstance(owner, Reply):
        return _REPLY
    for cls, name in _NAMES.items():
        if isinstance(owner, cls):
            public = [n for n in dir(cls) if not n.startswith("_") and n not in _OURS]
            also = "; also ins[tag], tag in ins, and for tag in ins" if cls is Inputs else ""
            return f"{name} has: {', '.join(public)}{also}"
    return ""


def _of_type(text: str) -> str:
    """Python names the method that was called wrongly, or the type of the operand that does not fit."""
    if (called := re.match(r"(\w+\.\w+)\(\) ", text)) and (form := _FORMS.get(called[1])):
        return f"it is called as {form}"
    if "'Reply'" in text:
        return _REPLY
    if "'Outputs' object" in text:
        return _OUTS
    if "Unsupported type <class 'numpy.ndarray'>" in text:  # as CuPy says it
        return _NUMPYS
    if "'Inputs' object" in text:
        return "read with ins['tag'], or from several tasks ins.all('tag')"
    return ""
