"""Hints beside exceptions of Python or numpy that a wrong use of our API caused.

Such an exception says what failed, but not what to write instead: `assignment destination is read-only`.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Final

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import Epoch, Hold, Reply, Scratch
from taskgraph.errors import exception_name, message_text

__all__ = ["hint"]

_NAMES: Final = {Epoch: "epoch", Hold: "hold", Inputs: "ins", Outputs: "outs", Reply: "reply"}
_INTERNAL: Final = frozenset({"close", "encoded", "fetch", "filled", "given", "put_encoded", "size_bytes", "work"})
"""Methods that only the framework calls."""
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
    "received values are read-only: copy the value, as in x = ins['tag'].copy(), or compute a new one, "
    "x = x + 1 instead of x += 1"
)
_REPLY: Final = "a Reply is not the answer yet: get it with reply.wait(), or with `await reply` in an `async def`"
_OUTS: Final = "put with outs.put('tag', value)"
_NUMPYS: Final = (
    "a value that a node without a device put, or kept as state, is a numpy array: self.xp.asarray(ins['tag']) "
    "makes an array of self.xp on every node, see docs/gpu.md"
)
_TERMINAL: Final = (
    "this process has no terminal, which breakpoint() and input() need: start the job in a terminal, with --nodes 0 or "
    "tg.run(..., nodes=0)"
)
_RANKS: Final = (
    'nodes have no rank and no process group of PyTorch: docs/elastic.md, "A DDP script", says what takes the place of '
    "init_process_group, DDP(...) and rank 0"
)
_OF_RANKS: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""Variables of the environment that `torchrun` sets."""


def hint(error: BaseException) -> str:
    """Returns what to do about an exception; "" if our API did not cause it."""
    if _is_from_missing_terminal(error) and not _has_terminal():
        return _TERMINAL
    if isinstance(error, KeyError):
        return _RANKS if error.args and error.args[0] in _OF_RANKS else ""
    if isinstance(error, ValueError):
        return _value_hint(message_text(error))
    if isinstance(error, AttributeError):
        return _attribute_hint(error.obj)
    if isinstance(error, TypeError):
        return _type_hint(message_text(error))
    return ""


def _value_hint(text: str) -> str:
    if "read-only" in text:
        return _READ_ONLY
    return _RANKS if "process group has not been initialized" in text or "RANK expected" in text else ""


def _is_from_missing_terminal(error: BaseException) -> bool:
    """True if the error is one that `breakpoint()` or `input()` raises without a terminal."""
    return exception_name(error) == "BdbQuit" or (
        isinstance(error, EOFError) and "reading a line" in message_text(error)
    )


def _has_terminal() -> bool:
    """True if standard input is a terminal, where a user may have ended a debugger or an input on purpose."""
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # it is closed
        return False


def _attribute_hint(owner: Any) -> str:
    """Returns the hint for an attribute that an object of ours lacks; "" for other objects."""
    if isinstance(owner, Scratch):
        names = ", ".join(vars(owner)) or "nothing"
        return (
            "epoch.scratch is empty at the beginning of every epoch, and of every attempt at it: keep lasting values "
            f'in the state; now it has: {names}; use getattr(epoch.scratch, "...", default) if a name may be missing'
        )
    if isinstance(owner, Reply):
        return _REPLY
    for cls, name in _NAMES.items():
        if isinstance(owner, cls):
            public = [n for n in dir(cls) if not n.startswith("_") and n not in _INTERNAL]
            also = "; also ins[tag], tag in ins, and for tag in ins" if cls is Inputs else ""
            return f"{name} has: {', '.join(public)}{also}"
    return ""


def _type_hint(text: str) -> str:
    """Returns the hint for a TypeError, by the method or the operand type in its text."""
    if (called := re.match(r"(\w+\.\w+)\(\) ", text)) and (form := _FORMS.get(called[1])):
        return f"call it as {form}"
    if "'Reply'" in text:
        return _REPLY
    if "'Outputs' object" in text:
        return _OUTS
    if "Unsupported type <class 'numpy.ndarray'>" in text:  # as CuPy says it
        return _NUMPYS
    if "'Inputs' object" in text:
        return "read with ins['tag'], or from several tasks ins.all('tag')"
    return ""
