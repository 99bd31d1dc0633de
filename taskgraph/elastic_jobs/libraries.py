"""Libraries that user code may use, and that this package does not import by itself."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from taskgraph.system.blas import OpenBlas, openblas_here

__all__ = ["import_pytorch_of", "library_threads", "pytorch"]

_lock = threading.Lock()
_before: list[tuple[OpenBlas, int]] = []  # libraries, and their threads before the first caller of `library_threads`
_inside: list[None] = []  # one for each caller that is in it


def pytorch() -> ModuleType | None:
    """Returns PyTorch, whose tensors travel from then on; None if user code has not imported it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        import taskgraph.torch  # noqa: F401  # declares how tensors travel
    return torch


def import_pytorch_of(function: Callable[..., Any]) -> None:
    """Imports PyTorch, if a function of a driver imports it when it is called, or a function that it names does.

    That would be too late: its generators and threads are set before, and the launcher has to decode tensors.
    """
    function = inspect.unwrap(function)
    if any(map(_imports_pytorch, _named_codes(function))) and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")


def _named_codes(function: Callable[..., Any]) -> Iterator[CodeType]:
    """Yields the code of a function, of the functions and methods of its module that it names, and so on."""
    found: list[Any] = [function]
    seen: set[int] = set()
    while found:
        each = found.pop()
        if id(each) in seen or not isinstance(each, type | FunctionType) or each.__module__ != function.__module__:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            found += vars(each).values()
        else:
            for code in _with_inner(each.__code__):
                yield code
                found += [each.__globals__[name] for name in code.co_names if name in each.__globals__]


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yields code, and that of the functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _with_inner(each)


def _imports_pytorch(code: CodeType) -> bool:
    """True if code has a statement that imports PyTorch or a module of it."""
    imported = (each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    return any(name.partition(".")[0] == "torch" for name in imported)


@contextlib.contextmanager
def library_threads(count: int) -> Iterator[None]:
    """Makes PyTorch and OpenBLAS use this many threads in the block: their number decides the last bits.

    Node processes get the number by their environment. With `nodes=0` the libraries may have had another number; they
    get it back when the last caller leaves its block.
    """
    with _lock:
        if not _before:
            _before.extend((each, each.threads()) for each in _threaded_libraries())
        _inside.append(None)
        for each, _ in _before:
            each.set_threads(count)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                for each, before in _before:
                    each.set_threads(before)
                _before.clear()


def _threaded_libraries() -> list[OpenBlas]:
    """Returns the libraries here that compute in threads: OpenBLAS, and PyTorch if it is imported."""
    torch = sys.modules.get("torch")
    return [*openblas_here(), *([OpenBlas(torch.get_num_threads, torch.set_num_threads)] if torch is not None else ())]
