"""How an attempt comes to rest: calm, reported, sealed."""

from __future__ import annotations

import asyncio

from taskgraph.node.epochs.activity import Activity


async def steps() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calm_without_calls_and_holds() -> None:
    activity = Activity()
    await activity.wait_until_idle()
    activity.call_began()
    activity.hold(1, "why")
    waiting = asyncio.ensure_future(activity.wait_until_idle())
    activity.call_ended()
    await steps()
    assert not waiting.done() and activity.holds == ("why",)
    activity.release(1)
    await waiting
    activity.release(1)  # twice is no error


async def test_only_the_reported_version_is_sealed() -> None:
    activity, told = Activity(), list[int]()
    waiting = asyncio.ensure_future(activity.wait_until_sealed(told.append))
    await steps()
    assert told == [0]
    activity.call_began()
    assert not activity.seal(0), "it has moved on"
    await steps()
    assert told == [0], "it is not idle"
    activity.call_ended()
    await steps()
    assert told == [0, 1]
    assert not activity.seal(0) and not activity.closed
    assert activity.seal(1) and activity.closed
    await waiting
    assert activity.seal(1), "asked again, it says the same"
    assert not activity.seal(2)


async def test_newer_hold_prevents_the_seal() -> None:
    activity, told = Activity(), list[int]()
    waiting = asyncio.ensure_future(activity.wait_until_sealed(told.append))
    await steps()
    activity.hold(1, "why")
    assert not activity.seal(0) and not activity.closed
    activity.release(1)
    assert not activity.seal(0) and not activity.closed, "it may have sent something meanwhile"
    await steps()
    assert told == [0, 1] and activity.seal(1)
    await waiting


async def test_no_seal_before_the_report() -> None:
    activity, told = Activity(), list[int]()
    assert not activity.seal(0) and not activity.closed
    waiting = asyncio.ensure_future(activity.wait_until_sealed(told.append))
    await steps()
    assert told == [0] and not waiting.done()
    assert activity.seal(0)
    await waiting


async def test_seal_during_the_report() -> None:
    activity = Activity()

    def seal(version: int) -> None:
        assert activity.seal(version)

    async with asyncio.timeout(5):
        await activity.wait_until_sealed(seal)


async def test_a_wait_can_be_cancelled() -> None:
    activity = Activity()
    activity.call_began()
    waiting = asyncio.ensure_future(activity.wait_until_idle())
    await steps()
    waiting.cancel()
    await asyncio.wait([waiting])
    activity.call_ended()
    await activity.wait_until_idle()
