"""The tests that every coordinator has to pass, for pytest. This package needs pytest and pytest-asyncio.

    class TestMine(CoordinatorSuite):
        @pytest.fixture
        def connect(self, tmp_path: Path) -> Connect:
            return lambda: my_package.connect(f"mine://{tmp_path}")

`taskgraph.coordination.opening` says how a package offers its coordinator to jobs. The suite takes about half a minute:
some leases have to end.
"""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("keys", "leases", "watches")))

from taskgraph.testing.conformance.cluster import Cluster, Connect  # noqa: E402
from taskgraph.testing.conformance.keys import KeysSuite  # noqa: E402
from taskgraph.testing.conformance.leases import LeasesSuite  # noqa: E402
from taskgraph.testing.conformance.watches import WatchesSuite  # noqa: E402

__all__ = ["Cluster", "Connect", "CoordinatorSuite"]


class CoordinatorSuite(KeysSuite, LeasesSuite, WatchesSuite):
    """All tests of a coordinator. A subclass has the fixture `connect`."""
