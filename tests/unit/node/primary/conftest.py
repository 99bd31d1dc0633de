"""Tests that wait for timers alone have a loop whose clock stands while somebody works, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from taskgraph.testing.clock import FastForwardLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name == "test_reporter.py":
        return {"fast-forward": FastForwardLoop}
    return {"asyncio": asyncio.new_event_loop}
