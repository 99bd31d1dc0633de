"""How an attempt comes to rest: calm, reported, sealed."""

from __future__ import annotations

import asyncio

from taskgraph.node.epochs.quiet import Quiet


async def steps() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calm_without_calls_and_holds() -> None:
    quiet = Quiet()
    await quiet.until_calm()
    quiet.call_began()
    quiet.hold(1, "why")
    waiting = asyncio.ensure_future(quiet.until_calm())
    quiet.call_ended()
    await steps()
    assert not waiting.done() and quiet.holds == ("why",)
    quiet.release(1)
    await waiting
    quiet.release(1)  # twice is no error


async def test_only_the_reported_version_is_sealed() -> None:
    quiet, told = Quiet(), list[int]()
    waiting = asyncio.ensure_future(quiet.until_sealed(told.append))
    await steps()
    assert told == [0]
    quiet.call_began()
    assert not quiet.seal(0), "it has moved on"
    await steps()
    assert told == [0], "it is not idle"
    quiet.call_ended()
    await steps()
    assert told == [0, 1]
    assert not quiet.seal(0) and not quiet.closed
    assert quiet.seal(1) and quiet.closed
    await waiting
    assert quiet.seal(1), "asked again, it says the same"
    assert not quiet.seal(2)


async def test_newer_hold_prevents_the_seal() -> None:
    quiet, told = Quiet(), list[int]()
    waiting = asyncio.ensure_future(quiet.until_sealed(told.append))
    await steps()
    quiet.hold(1, "why")
    assert not quiet.seal(0) and not quiet.closed
    quiet.release(1)
    assert not quiet.seal(0) and not quiet.closed, "it may have sent something meanwhile"
    await steps()
    assert told == [0, 1] and quiet.seal(1)
    await waiting


async def test_no_seal_before_the_report() -> None:
    quiet, told = Quiet(), list[int]()
    assert not quiet.seal(0) and not quiet.closed
    waiting = asyncio.ensure_future(quiet.until_sealed(told.append))
    await steps()
    assert told == [0] and not waiting.done()
    assert quiet.seal(0)
    await waiting


async def test_seal_during_the_report() -> None:
    quiet = Quiet()

    def seal(version: int) -> None:
        assert quiet.seal(version)

    async with asyncio.timeout(5):
        await quiet.until_sealed(seal)


async def test_a_wait_can_be_cancelled() -> None:
    quiet = Quiet()
    quiet.call_began()
    waiting = asyncio.ensure_future(quiet.until_calm())
    await steps()
    waiting.cancel()
    await asyncio.wait([waiting])
    quiet.call_ended()
    await quiet.until_calm()
