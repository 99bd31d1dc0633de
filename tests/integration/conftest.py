"""Fixtures: a user's shell. Most tests here start processes, so those without `smoke` are `slow`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cli_kit import Cli, shell


@pytest.fixture
async def cli() -> AsyncIterator[Cli]:
    async with shell() as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("smoke"):
            item.add_marker("slow")
