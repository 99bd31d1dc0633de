"""What later steps of an elastic job rest on: captured on one worker, loaded in place on another.

The state is a tree. Its leaves are objects with `state_dict` and `load_state_dict`, arrays, and values that travel; in
between are dicts, lists, tuples and instances of dataclasses. Objects, arrays, dicts and lists are loaded in place, so
that other names for them stay right; all else is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.errors import StateError, ValueNotEncodable
from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.refusals import GENERAL_ADVICE
from taskgraph.graph.values import encode
from taskgraph.protocol.messages import Encoded

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "State",
    "capture",
    "check_names",
    "check_parameters",
    "is_array",
    "large_sizes",
    "leaves",
    "load",
    "writable",
]


_CLASS_ADVICE = "make its class a dataclass, or give it state_dict() and load_state_dict()"


class State:
    """Objects by name.

    Attributes may be replaced (`s.best = 3`), and none may be added: a newcomer would not have it.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        object.__setattr__(self, "_objects", dict(objects))

    def __getattr__(self, name: str) -> Any:
        objects = object.__getattribute__(self, "_objects")
        if name not in objects:
            raise AttributeError(_unknown_text(name, objects))
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        objects = object.__getattribute__(self, "_objects")
        if name not in objects:
            raise AttributeError(_unknown_text(name, objects))
        objects[name] = value


def _unknown_text(name: str, objects: dict[str, Any]) -> str:
    """Returns the text of the error for a name that the state does not have."""
    return (
        f"the state has no {name!r}, only {', '.join(sorted(objects)) or 'nothing'}: name it in run.state({name}=...), "
        f"or use a variable for what no later step reads"
    )


def check_names(state: Any) -> None:
    """Raises StateError if user code gave a dataclass instance attributes that are no fields."""
    if not _is_dataclass(state):
        return
    fields = _items(state)
    unknown = sorted(getattr(state, "__dict__", {}).keys() - fields.keys())
    if unknown:
        raise StateError(f"{type(state).__name__} of run.state(...): " + _unknown_text(unknown[0], fields))


def check_parameters(state: Any) -> None:
    """Raises StateError if a PyTorch module has a parameter without a shape, or an optimizer one that is not named.

    Likewise if a module is wrapped in DDP or FSDP: its backward pass would wait for other ranks.
    """
    torch = pytorch()
    if torch is None:
        return
    found = list(leaves(state))
    for name, leaf in found:
        for kind in type(leaf).__mro__:
            if kind.__module__.startswith(("torch.nn.parallel.distributed", "torch.distributed.fsdp")):
                raise StateError(
                    f"run.state: {name} is wrapped as {kind.__name__}, which waits for the other ranks of a process "
                    f"group: use the plain module; part.backward(loss) sums the gradients of all workers"
                )
    named = {id(leaf) for _, leaf in found}
    for name, leaf in found:
        for path, parameter in leaf.named_parameters() if isinstance(leaf, torch.nn.Module) else ():
            named.add(id(parameter))
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise StateError(
                    f"the parameter {name}.{path} has no shape yet: call its lazy module once before the first step"
                )
    known = (torch.nn.Module, torch.optim.Optimizer)
    others = [type(leaf) for _, leaf in found if _has_state_dict(leaf) and not isinstance(leaf, known)]
    if any(not kind.__module__.startswith("torch.") for kind in others):
        return  # it may have parameters of its own
    for name, leaf in found:
        groups = leaf.param_groups if isinstance(leaf, torch.optim.Optimizer) else ()
        if any(id(parameter) not in named for group in groups for parameter in group["params"]):
            raise StateError(
                f"the optimizer {name!r} has parameters that run.state does not name: a newcomer would begin with "
                f"others; name their module, as in run.state(model=model, {name}={name})"
            )


def leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """Yields name and object of each leaf: `"opts[0]"` is the first one of a list `opts`.

    Raises:
        StateError: a list, dict or dataclass holds itself, or is nested too deep.
    """
    for name, value in _items(state).items():
        try:
            yield from _leaves(name, value)
        except RecursionError:
            raise StateError(f"run.state: {name} holds itself, or is nested too deep: name its parts") from None


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item)
    elif type(value) is dict or _is_dataclass(value):
        for key, item in _items(value).items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name, value


def capture(
    state: Any,
    before_steps: Sequence[Any],
    steps_arguments: Mapping[str, int],
    carried: Mapping[str, Any],
    allocate: Allocate,
    group_members: Sequence[str] = (),
) -> Encoded:
    """Encodes all that newcomers and checkpoints get: the state and what travels with it, as they are now.

    Args:
        before_steps: the results of `run.once` and `run.map` before the first step.
        steps_arguments: the arguments of `run.steps`.
        carried: name -> a value that a `CarriedState` captured.
        allocate: returns memory for large arrays: other processes of the host read them there.
        group_members: the members of the group of `run.group`, by name.

    Raises:
        ValueNotEncodable: a part of it cannot travel; the message says which.
    """
    pytorch()
    content = {name: _captured(value) for name, value in _items(state).items()}
    whole = {
        "state": content,
        "early": list(before_steps),
        "arguments": dict(steps_arguments),
        "carried": dict(carried),
        "members": list(group_members),
    }
    return encode(whole, what="run.state", allocate=allocate)


def digests(state: Any) -> dict[str, bytes]:
    """Returns the digest of each leaf of the state, by its path."""
    pytorch()
    return {
        path: (b"array" if getattr(value, "ndim", 0) else b"") + _digest(value, path)
        for path, value in _captured_leaves(state)
    }


def large_sizes(state: Any) -> tuple[int, ...]:
    """Returns the bytes of each array of the state that `capture` gives memory of its own."""
    pytorch()
    sizes = [getattr(value, "nbytes", 0) for _, value in _captured_leaves(state)]
    return tuple(nbytes for nbytes in sizes if nbytes >= INLINE_BYTES)


def _captured_leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """Yields path and captured value of each leaf of the state."""

    def walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for name, item in value.items():
                yield from walk(f"{path}.{name}" if path else str(name), item)
        elif type(value) in (list, tuple):
            for index, item in enumerate(value):
                yield from walk(f"{path}.{index}", item)
        else:
            yield path, value

    yield from walk("", {name: _captured(value) for name, value in _items(state).items()})


def is_array(digest: bytes) -> bool:
    """True if the digest is that of an array, and not of a number or a text."""
    return len(digest) > 16


def _digest(value: Any, path: str) -> bytes:
    """Returns a digest of a captured value, without a copy of an array."""
    torch, array = pytorch(), value
    if torch is not None and type(value) is torch.Tensor and value.device.type == "cpu":
        with contextlib.suppress(TypeError, RuntimeError):  # numpy has no such tensors
            array = value.detach().numpy()
    if type(array) is not np.ndarray or array.dtype.kind not in "biufc" or array.nbytes < INLINE_BYTES:
        try:
            return encode(value, what=f"run.state: {path}").digest
        except ValueNotEncodable as error:
            raise ValueNotEncodable(str(error).replace(GENERAL_ADVICE, _CLASS_ADVICE)) from None
    digest = xxhash.xxh3_128(f"{value.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def load(state: Any, loaded: Mapping[str, Any]) -> None:
    """Loads a captured state into `state`, in place where the module says so.

    Raises:
        StateError: the state has other names, or objects of other kinds or shapes, than the captured one.
    """
    known = _items(state)
    _check_names_alike("run.state", known, loaded)
    for name, old in known.items():
        new = _loaded(name, old, loaded[name])
        if isinstance(state, State):
            object.__getattribute__(state, "_objects")[name] = new
        elif new is not old:
            object.__setattr__(state, name, new)  # it may be frozen


def _check_names_alike(what: str, known: Mapping[str, Any], loaded: Any) -> None:
    """Raises StateError if a captured state, or an instance of a dataclass in it, has other names than the own one."""
    names = loaded.keys() if isinstance(loaded, dict) else {}
    if names != known.keys():
        here, there = (", ".join(sorted(each)) or "nothing" for each in (known, names))
        raise StateError(
            f"{what} names {here} here, and {there} where it is copied from: name the same on all workers, and in a "
            f"program that is resumed"
        )


def _items(value: Any) -> dict[Any, Any]:
    """Returns name -> value of a state, a dict or an instance of a dataclass; {} for None."""
    if value is None:
        return {}
    if isinstance(value, State):
        found: dict[Any, Any] = object.__getattribute__(value, "_objects")
        return found
    if isinstance(value, dict):
        return value
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _captured(value: Any) -> Any:
    """Returns an object of the state as a value that travels: a module or optimizer as its state dict."""
    torch = pytorch()
    if torch is not None and isinstance(value, torch.nn.Module):
        return {
            "state": _captured(value.state_dict()),
            "training": {name: module.training for name, module in value.named_modules()},
            "trained": {name: tensor.requires_grad for name, tensor in value.named_parameters()},
        }
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach() if type(value) is torch.Tensor else value.detach().as_subclass(torch.Tensor)
    if _has_state_dict(value):
        return _captured(value.state_dict())
    if _is_dataclass(value):
        return _captured(_items(value))
    if isinstance(value, dict):
        return {name: _captured(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_captured, value))
    return value


def _loaded(name: str, known: Any, new: Any) -> Any:
    """Loads a captured value in place into `known`, and returns `known`; if impossible, returns the new value."""
    torch = pytorch()
    if torch is not None and isinstance(known, torch.nn.Module):
        _load_module(name, known, new)
        return known
    if torch is not None and isinstance(known, torch.Tensor):
        return _loaded_tensor(torch, known, new)
    if _has_state_dict(known):
        _load_dict(name, known, new)
        return known
    if isinstance(known, np.ndarray) and _fits(known, new):
        known[...] = new
        return known
    if _is_dataclass(known):
        _check_names_alike(f"{name} of run.state", _items(known), new)
        for field, old in _items(known).items():
            object.__setattr__(known, field, _loaded(f"{name}.{field}", old, new[field]))
        return known
    if isinstance(known, dict) and isinstance(new, dict):
        there = dict(known)
        known.clear()
        for key, item in new.items():
            known[key] = _loaded(f"{name}.{key}", there.get(key), item)
        return known
    if type(known) in (list, tuple) and type(new) is type(known):
        pairs = itertools.zip_longest(known[: len(new)], new)
        items = [_loaded(f"{name}[{index}]", *pair) for index, pair in enumerate(pairs)]
        if type(known) is tuple:
            return tuple(items)
        known[:] = items
        return known
    return writable(new)


def _load_module(name: str, module: Any, captured: Any) -> None:
    """Loads a captured PyTorch module: its state, and the modes and `requires_grad` that a state dict lacks."""
    state = module.state_dict()
    state.clear()  # keeps the versions of the modules, which a plain dict has not
    state.update(writable(captured["state"]))
    _load_dict(name, module, state)
    for path, part in module.named_modules():
        part.training = captured["training"].get(path, part.training)
    for path, tensor in module.named_parameters():
        tensor.requires_grad_(captured["trained"].get(path, tensor.requires_grad))


def _load_dict(name: str, known: Any, state: Any) -> None:
    """Calls `load_state_dict`. Raises StateError, with advice, if the object is unlike the captured one."""
    try:
        known.load_state_dict(copy.deepcopy(writable(state)) if type(state) is dict else state)
    except (KeyError, RuntimeError, ValueError) as error:
        raise StateError(
            f"{name!r} of run.state({name}=...) is unlike the one that it is copied from ({error}): make it alike on "
            f"all workers, and in a program that is resumed; steps must not add layers or groups"
        ) from error


def _loaded_tensor(torch: ModuleType, known: Any, new: Any) -> Any:
    """Loads a tensor in place if shape and dtype are equal, and returns it; else returns a new one."""
    if not isinstance(new, torch.Tensor):
        return writable(new)
    if new.shape == known.shape and new.dtype == known.dtype:
        with torch.no_grad():
            known.copy_(new)
        return known
    return new.clone().to(known.device).requires_grad_(known.requires_grad)


def _has_state_dict(value: Any) -> bool:
    """True if an object has `state_dict` and `load_state_dict`."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not _has_state_dict(value)


def _fits(known: np.ndarray[Any, Any], new: Any) -> bool:
    """True if an array can be loaded in place from a captured one."""
    same = isinstance(new, np.ndarray) and new.shape == known.shape and new.dtype == known.dtype
    return same and known.flags.writeable


def writable(value: Any) -> Any:
    """Copies a tree of dicts, lists, tuples and arrays: decoded arrays cannot be written."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {name: writable(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(writable, value))
    return value
