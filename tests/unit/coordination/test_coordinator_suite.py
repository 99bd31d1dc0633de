"""The coordinators of this package pass the suite, and so does one that others may have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskgraph.coordination.opening import open_coordinator
from taskgraph.testing.conformance import Connect, CoordinatorSuite


class TestOurs(CoordinatorSuite):
    """In memory, simulated, and on a real etcd; see `connect` in `conftest.py`."""


class TestOfAnotherPackage(CoordinatorSuite):
    """Found by its entry point."""

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        return lambda: open_coordinator(f"sqlite://{tmp_path}/store", {})
