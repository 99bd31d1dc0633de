"""Fixtures: a user's shell."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from cli_kit import Cli, shell


@pytest.fixture
async def cli() -> AsyncIterator[Cli]:
    async with shell() as made:
        yield made
