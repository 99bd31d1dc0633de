"""Links cut by a firewall that refuses: connections are reset, and none can be made, though both ends live."""

from __future__ import annotations

import asyncio

import pytest

from taskgraph.errors import PeerGone
from taskgraph.testing.simulate.network import SimNetwork, SimTransport
from taskgraph.testing.simulate.seed import run_seed


def _refuses(one: str, other: str) -> bool:
    """Half of the links, by their ends."""
    return sum(map(ord, one + other)) % 2 == 0


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, knock = SimNetwork.cut, SimTransport._wait_for_link

    def cut_and_reset(network: SimNetwork, one: str, other: str) -> int:
        number = cut(network, one, other)
        if _refuses(one, other):
            network.reset(one, other)
        return number

    async def knock_or_be_refused(transport: SimTransport, node: str) -> None:
        network, ends = transport.network, (transport.node, node)
        if (network.is_cut(*ends) or network.is_cut(*reversed(ends))) and _refuses(*ends):
            await asyncio.sleep(network.delay(*ends))
            raise PeerGone(f"node {node}: nobody listens")
        await knock(transport, node)

    monkeypatch.setattr(SimNetwork, "cut", cut_and_reset)
    monkeypatch.setattr(SimTransport, "_wait_for_link", knock_or_be_refused)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("seed", [651, 961, *range(20)])
def test_refusing_links_heal(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.problem, outcome.transcript.text(messages=False)
