"""Opens the coordinator of a job: etcd, or another one that an installed package offers.

A package offers a coordinator for URLs of a scheme by an entry point:

    [project.entry-points."taskgraph.coordination"]
    sqlite = "my_package:connect"

The entry point names a function `async def connect(url: str, **access: str) -> Coordinator`. `access` has what the user
gave to reach etcd (`--etcd-ca` etc.); most coordinators refuse it. `taskgraph.testing.conformance` is the suite that a
coordinator has to pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from taskgraph.coordination.api import Coordinator
from taskgraph.errors import CoordinationError, TaskGraphError

__all__ = ["GROUP", "open_coordinator", "opened"]

GROUP: Final = "taskgraph.coordination"
_ETCD: Final = ("", "http", "https", "unix")
"""Schemes of etcd's endpoints."""


async def open_coordinator(where: str, access: Mapping[str, str]) -> Coordinator:
    """Opens a coordinator. Close it at the end.

    Args:
        where: endpoints of an etcd, separated by commas; or a URL whose scheme an installed package offers.
        access: for etcd: see `EtcdOptions.make`. Another coordinator gets it as keyword arguments; most refuse any.

    Raises:
        Unavailable: it does not answer.
        CoordinationError: no installed package offers the scheme, or the coordinator refuses the URL or access.
    """
    scheme, separator, _ = where.partition(",")[0].strip().partition("://")
    if not separator or scheme in _ETCD:
        from taskgraph.coordination.etcd import EtcdCoordinator  # gRPC: only where etcd is used

        return await EtcdCoordinator.connect(where, **access)
    function = _find_connect(scheme, where)
    try:
        return await function(where, **access)
    except TaskGraphError:
        raise
    except Exception as error:
        raise CoordinationError(f"--etcd {where}: the coordinator failed: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def opened(where: str, access: Mapping[str, str]) -> AsyncIterator[Coordinator]:
    """Opens a coordinator for a block, as `open_coordinator` does."""
    coordinator = await open_coordinator(where, access)
    try:
        yield coordinator
    finally:
        await coordinator.close()


def _find_connect(scheme: str, where: str) -> Callable[..., Awaitable[Coordinator]]:
    """Returns the function that an installed package offers for a scheme."""
    from importlib.metadata import entry_points  # it takes longer to import than a command for etcd should

    offered = entry_points(group=GROUP)
    found = tuple(offered.select(name=scheme))
    if not found:
        others = ", ".join(sorted({f"{name}://" for name in offered.names})) or "none"
        raise CoordinationError(
            f"--etcd {where}: no installed package offers {scheme}:// (offered: {others}). Install the one that does, "
            f"on every host; or write HOST:PORT of an etcd, or https://HOST:PORT"
        )
    try:
        function: Callable[..., Awaitable[Coordinator]] = found[0].load()
    except Exception as error:
        package = "" if found[0].dist is None else f" of the package {found[0].dist.name}"
        raise CoordinationError(
            f"--etcd {where}: {found[0].value}{package} cannot be loaded: {type(error).__name__}: {error}. "
            f"Install a version of it that fits this Python and this taskgraph"
        ) from error
    return function
