"""Frozen dataclasses for what is made many times an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform, overload

__all__ = ["frozen"]

T = TypeVar("T")


@overload
def frozen(cls: type[T]) -> type[T]: ...
@overload
def frozen(*, kw_only: bool) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T] | None = None, *, kw_only: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """A dataclass with slots that is frozen for the type checker alone.

    `dataclass(frozen=True)` sets each field by a call of `object.__setattr__`: to make one takes three times as long.
    """
    make = dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)
    return make if cls is None else make(cls)
