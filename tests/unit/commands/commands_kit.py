"""Commands on an etcd in memory."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator

import pytest

from taskgraph.cli import parser
from taskgraph.commands import acting, common
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore

ETCD = "127.0.0.1:1"


def in_memory(monkeypatch: pytest.MonkeyPatch) -> MemoryCoordinator:
    """Makes commands find this etcd at `ETCD`."""
    found = MemoryCoordinator(MemoryStore())
    found.version = "3.6.0"  # type: ignore[attr-defined]

    @contextlib.asynccontextmanager
    async def opened(*access: object) -> AsyncIterator[MemoryCoordinator]:
        yield found

    for module in (acting, common):
        monkeypatch.setattr(module, "opened", opened)
    return found


def options(command: str, *more: str) -> argparse.Namespace:
    return parser().parse_args([command, "fit", *more, "--etcd", ETCD])
