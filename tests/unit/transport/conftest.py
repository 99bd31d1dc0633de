"""Fixtures: a cluster for each kind of transport, on both event loops."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from softdevice import SoftDevice
from transport_kit import KINDS, Cluster, cluster_of

from taskgraph.device import shared
from taskgraph.device.shared import SharedMemory


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for unix sockets, whatever pytest's own is called."""
    with tempfile.TemporaryDirectory(prefix="tg") as name:
        yield Path(name)


@pytest.fixture(params=KINDS)
async def cluster(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(request.param, folder) as cluster:
        yield cluster


@pytest.fixture(params=["unix", "tcp"])
async def streams(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(request.param, folder) as cluster:
        yield cluster


@pytest.fixture
def soft() -> SoftDevice:
    """A device whose streams run whenever they like."""
    return SoftDevice(races=True)


@pytest.fixture
def memory(soft: SoftDevice) -> Iterator[SharedMemory]:
    """What is lent of its memory."""
    yield shared.offer_memory(soft)
    shared._offered.clear()
