"""What `taskgraph.transport.api` promises, held by every transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import pytest
from transport_kit import EXCHANGES, Cluster, Node, encoded, item, pull

from taskgraph.errors import PeerGone, PeerLost, Refused
from taskgraph.protocol import messages as m
from taskgraph.protocol.sums import encode_sum
from taskgraph.transport import wire
from taskgraph.transport.api import PendingReply


class Gate:
    """A handler that waits, with events for its begin and its end."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, caller: str, call: m.Call) -> m.Reply:
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        assert isinstance(call, m.Pull)
        return item(call, encoded())


async def waits(event: asyncio.Event) -> None:
    async with asyncio.timeout(30):
        await event.wait()


def test_exchanges_cover_all_calls() -> None:
    assert {type(call) for call, _ in EXCHANGES} == set(wire.CALLS)
    assert {type(reply) for _, reply in EXCHANGES} | {m.Refusal} == set(wire.REPLIES)


@pytest.mark.parametrize(("call", "reply"), EXCHANGES, ids=lambda message: type(message).__name__)
async def test_every_message_arrives_as_it_was_sent(cluster: Cluster, call: m.Call, reply: m.Reply) -> None:
    a, b = await cluster.node(), await cluster.node()

    async def handler(caller: str, got: m.Call) -> m.Reply:
        return reply

    b.handler = handler
    assert await a.call(b, call) == reply
    assert b.served == [(a.name, call)]
    (_, got), *_ = b.served
    value = wire.value_of(got)
    assert value is None or all(buffer.readonly and buffer.format == "B" for buffer in value.buffers)


async def test_waiting_call_does_not_block_others(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    b.handler = gate = Gate()
    waiting = asyncio.ensure_future(a.call(b, pull()))
    await waits(gate.entered)
    b.handler = b._accept
    assert await a.call(b, m.Seal(m.Stamp(1, 1), 1, 1)) == m.Accepted(1)
    assert not waiting.done()
    gate.release.set()
    assert isinstance(await waiting, m.Item)


async def test_concurrent_calls_get_their_own_replies(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()

    async def handler(caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        return item(call, encoded(call.tag.encode(), bytes(len(call.tag) * 30_000)))

    a.handler = b.handler = handler
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(one.call(other, pull("x" * n)))
            for n in range(1, 9)
            for one, other in ((a, b), (b, a), (a, a))
        ]
    for number, task in enumerate(tasks):
        reply = task.result()
        assert isinstance(reply, m.Item) and reply.value.meta == b"x" * (number // 3 + 1)


async def test_cancelled_call_cancels_the_handler(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    for target in (b, a):  # a peer, and oneself
        target.handler = gate = Gate()
        waiting = asyncio.ensure_future(a.call(target, pull()))
        await waits(gate.entered)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await waits(gate.cancelled)
        target.handler = target._accept
        assert await a.call(target, m.Seal(m.Stamp(1, 1), 1, 1)) == m.Accepted(1)


async def test_timeout_cancels_the_handler(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    for target in (b, a):
        await a.call(target, SEAL)  # to dial may take its time, too
        target.handler = gate = Gate()
        while not gate.entered.is_set():  # a busy machine may take longer until the call is there
            with pytest.raises(PeerLost, match=r"no answer .* within 0.2 s to Pull 'grad' to task 5"):
                await a.call(target, pull(), timeout_s=0.2)
        await waits(gate.cancelled)
    assert a.lost.empty()


async def test_refusal_has_reason_and_text(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()

    async def raises(caller: str, call: m.Call) -> m.Reply:
        raise Refused(m.Reason.STALE, "term 3 is behind 4")

    async def returns(caller: str, call: m.Call) -> m.Reply:
        return m.Refusal(m.Reason.CLOSING)

    for target in (b, a):
        target.handler = raises
        with pytest.raises(Refused, match="term 3 is behind 4") as caught:
            await a.call(target, pull())
        assert caught.value.reason == m.Reason.STALE
        target.handler = returns
        with pytest.raises(Refused) as caught:
            await a.call(target, pull())
        assert (caught.value.reason, str(caught.value)) == (m.Reason.CLOSING, m.Reason.CLOSING)


async def test_failing_handler_is_logged_and_answers(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    a, b = await cluster.node(), await cluster.node()

    async def raises(caller: str, call: m.Call) -> m.Reply:
        raise LookupError("no such thing")

    async def wrong(caller: str, call: m.Call) -> m.Reply:
        return m.WaitsPage(1, ())

    async def cut_off(caller: str, call: m.Call) -> m.Reply:
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    for handler, text in ((raises, "no such thing"), (wrong, "WaitsPage"), (cut_off, "cancelled")):
        b.handler = handler
        caplog.clear()
        with caplog.at_level(logging.ERROR), pytest.raises(Refused, match=text) as caught:
            await a.call(b, pull())
        assert caught.value.reason == m.Reason.BAD_MESSAGE
        assert len(caplog.records) == 1 and a.name in caplog.text


async def test_immediate_reply_needs_no_handler(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    item = m.Item(m.Stamp(1, 7), 4, "grad", encoded(b"x", bytes(100_000)))
    for target in (b, a):
        target.at_once = lambda caller, call: item if isinstance(call, m.Pull) else None
        reply = await a.call(target, pull())
        assert (
            isinstance(reply, m.Item) and reply.value.meta == b"x" and bytes(reply.value.buffers[0]) == bytes(100_000)
        )
        assert target.served == []
        assert await a.call(target, m.Seal(m.Stamp(1, 1), 1, 1)) == m.Accepted(1)
        assert len(target.served) == 1


async def test_pending_reply_needs_no_handler(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    for target in (b, a):
        asked = asyncio.Event()
        coming: list[PendingReply] = []

        def later(
            caller: str, call: m.Call, coming: list[PendingReply] = coming, asked: asyncio.Event = asked
        ) -> PendingReply:
            coming.append(PendingReply())
            asked.set()
            return coming[-1]

        target.at_once = later
        waiting = asyncio.ensure_future(a.call(target, m.Seal(m.Stamp(1, 1), 1, 1)))
        await waits(asked)
        coming[0].settle(m.Accepted(7))
        assert await waiting == m.Accepted(7)
        asked.clear()
        waiting = asyncio.ensure_future(a.call(target, m.Seal(m.Stamp(1, 1), 1, 1)))
        await waits(asked)
        coming[1].settle(m.Refusal(m.Reason.ATTEMPT_GONE, "over"))
        with pytest.raises(Refused, match="over"):
            await waiting
        asked.clear()
        waiting = asyncio.ensure_future(a.call(target, m.Seal(m.Stamp(1, 1), 1, 1)))
        await waits(asked)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(30):
            while not coming[2].done:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert coming[2].reply is None, "it was cancelled"
        coming[2].settle(m.Accepted(8))  # nobody wants it any more
        assert target.served == []


class Awaited(PendingReply):
    """A pending reply that records its cancellation."""

    def __init__(self, left: Callable[[], None]) -> None:
        super().__init__()
        self.left = left

    def cancel(self) -> None:
        if not self.done:
            super().cancel()
            self.left()


class Shelf:
    """Gives items on command, and records pulled and cancelled epochs."""

    def __init__(self) -> None:
        self.asked: dict[int, PendingReply] = {}
        self.gone: set[int] = set()
        self.changed = asyncio.Event()

    def __call__(self, caller: str, call: m.Call) -> PendingReply | None:
        if not isinstance(call, m.Pull):
            return None
        assert call.count == 1, "each call is served by itself"
        coming = self.asked[call.stamp.epoch] = Awaited(partial(self.leave, call.stamp.epoch))
        self.changed.set()
        return coming

    def leave(self, epoch: int) -> None:
        self.gone.add(epoch)
        self.changed.set()

    async def until(self, count: int, *, gone: bool = False) -> None:
        async with asyncio.timeout(30):
            while len(self.gone if gone else self.asked) < count:
                self.changed.clear()
                await self.changed.wait()


def several(count: int) -> m.Pull:
    one = pull()
    return m.Pull(one.stamp, one.sender, one.sender_term, one.task, one.tag, count)


async def test_pull_of_several_epochs_makes_several_calls(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    await a.call(b, SEAL)  # a session is open now
    b.at_once = shelf = Shelf()
    wanted = several(5)
    begun = a.transport.calls_now(b.peer, wanted)
    assert begun is not None and len(begun) == 5
    await shelf.until(5)
    first = wanted.stamp.epoch
    assert sorted(shelf.asked) == list(range(first, first + 5))
    large = encoded(b"x", bytes(2_000_000))
    items = [item(wanted.each(n), large if n == 3 else encoded(bytes([n]))) for n in range(5)]
    for number in (3, 0):  # in any order
        shelf.asked[first + number].settle(items[number])
        assert await asyncio.wait_for(begun[number], 30) == items[number]
    shelf.asked[first + 1].settle(m.Refusal(m.Reason.STALE, "behind"))
    with pytest.raises(Refused, match="behind"):
        await begun[1]
    begun[2].cancel()  # one of them, and no other
    await shelf.until(1, gone=True)
    assert shelf.gone == {first + 2} and not begun[4].done()
    shelf.asked[first + 4].settle(items[4])
    assert await begun[4] == items[4]
    assert await a.call(b, SEAL) == m.Accepted(1), "later calls have numbers of their own"


async def test_pull_of_several_epochs_ends_with_its_nodes(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    for crashes, stays in ((b, a), (a, b)):
        target = b
        if not stays.transport.endpoints:
            break
        await a.call(target, SEAL)
        target.at_once = shelf = Shelf()
        begun = a.transport.calls_now(target.peer, several(3))
        assert begun is not None
        await shelf.until(3)
        cluster.crash(crashes)
        for reply in begun:
            with pytest.raises((PeerLost, asyncio.CancelledError)):
                await asyncio.wait_for(reply, 30)
        if crashes is a:
            await shelf.until(3, gone=True)
        else:
            b = await cluster.node()


async def test_calls_of_a_pull_may_be_answered_together(cluster: Cluster) -> None:
    """An item, two pending replies, a refusal, a handler's reply, and an error."""
    a, b = await cluster.node(), await cluster.node()
    await a.call(b, SEAL)
    wanted = several(5)
    items = [item(wanted.each(nth), encoded(bytes([nth]))) for nth in range(5)]
    left: list[int] = []
    later, came, unwanted = (Awaited(partial(left.append, nth)) for nth in range(3))
    came.settle(items[2])
    replies = [items[0], later, came, m.Refusal(m.Reason.STALE, "behind"), None]
    b.at_once = lambda caller, call: replies[call.stamp.epoch - wanted.stamp.epoch] if type(call) is m.Pull else None
    b.all_at_once = lambda caller, pull: list(replies)

    async def handler(caller: str, call: m.Call) -> m.Reply:
        return items[4] if type(call) is m.Pull else m.Accepted(1)

    b.handler = handler
    begun = a.transport.calls_now(b.peer, wanted)
    assert begun is not None
    for nth in (0, 2, 4):
        assert await asyncio.wait_for(begun[nth], 30) == items[nth]
    with pytest.raises(Refused, match="behind"):
        await begun[3]
    assert [call for _, call in b.served if type(call) is m.Pull] == [wanted.each(4)]
    assert not begun[1].done()
    later.settle(items[1])
    assert await asyncio.wait_for(begun[1], 30) == items[1]

    replies[:] = [unwanted, items[1], items[2], items[3], items[4]]
    begun = a.transport.calls_now(b.peer, wanted)
    assert begun is not None and await asyncio.wait_for(begun[4], 30) == items[4]
    begun[0].cancel()
    await time_passes(a, b)
    assert left == [2] and unwanted.done

    def raises(caller: str, call: m.Call) -> m.Reply:
        raise Refused(m.Reason.PAUSED, "not now")

    b.at_once = lambda caller, call: raises(caller, call) if type(call) is m.Pull else None
    b.all_at_once = raises  # type: ignore[assignment]
    for reply in a.transport.calls_now(b.peer, wanted) or [pytest.fail("none begun")]:
        with pytest.raises(Refused, match="not now"):
            await asyncio.wait_for(reply, 30)


async def test_calls_now_needs_a_session(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    await a.transport.close()
    assert a.transport.calls_now(b.peer, several(2)) is None


async def test_call_without_a_task_ends_like_others(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    for target in (b, a):
        await a.call(target, pull_free := m.Seal(m.Stamp(1, 1), 1, 1))  # a session is open now
        item = m.Item(m.Stamp(1, 7), 4, "grad", encoded(b"x", bytes(5_000_000)))

        async def gives(caller: str, call: m.Call, item: m.Item = item) -> m.Reply:
            return item

        async def refuses(caller: str, call: m.Call) -> m.Reply:
            raise Refused(m.Reason.STALE, "behind")

        target.handler = gives
        if (begun := a.transport.call_now(target.peer, pull())) is not None:  # else it has to be called
            reply = await begun
            assert isinstance(reply, m.Item) and reply.value.digest == item.value.digest
        target.handler = refuses
        if (begun := a.transport.call_now(target.peer, pull())) is not None:
            with pytest.raises(Refused, match="behind"):
                await begun
        target.handler = gate = Gate()
        if (begun := a.transport.call_now(target.peer, pull())) is not None:
            await waits(gate.entered)
            begun.cancel()
            await waits(gate.cancelled)
        target.handler = target._accept
        assert await a.call(target, pull_free) == m.Accepted(1)


async def test_call_without_a_task_is_lost_with_its_peer(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    await a.call(b, m.Seal(m.Stamp(1, 1), 1, 1))
    b.handler = gate = Gate()
    begun = a.transport.call_now(b.peer, pull())
    assert begun is not None
    await waits(gate.entered)
    cluster.crash(b)
    with pytest.raises(PeerLost):
        await begun


REPORT = m.Report(m.Stamp(1, 7), 3, 1, True, 2, encode_sum(5), encode_sum(6))
SEAL = m.Seal(m.Stamp(1, 1), 1, 1)


class Heard:
    """A handler with immediate replies, and a record of its calls."""

    def __init__(self, reply: m.Reply) -> None:
        self.event = asyncio.Event()
        self.reply = reply

    def __call__(self, caller: str, call: m.Call) -> m.Reply | None:
        if not isinstance(call, m.Report):
            return None
        self.event.set()
        return self.reply


async def begun(a: Node, b: Node, call: m.Call) -> asyncio.Future[m.Reply]:
    """Sends a quiet call."""
    await a.call(b, SEAL)  # a session is open now
    reply = a.transport.call_now(b.peer, call, quiet=True)
    assert reply is not None
    return reply


async def time_passes(a: Node, b: Node) -> None:
    """Waits until all messages have arrived."""
    for _ in range(10):
        await a.call(b, SEAL)


async def test_accepted_quiet_call_gets_no_reply(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    b.at_once = heard = Heard(m.Accepted(1))
    reply = await begun(a, b, REPORT)
    await waits(heard.event)
    await time_passes(a, b)
    assert not reply.done()
    reply.cancel()  # it is forgotten, and that is all
    await time_passes(a, b)
    assert reply.cancelled()
    assert await a.call(b, REPORT) == m.Accepted(1)


async def test_quiet_call_gets_refusals_and_late_replies(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    b.at_once = Heard(m.Refusal(m.Reason.STALE, "behind"))
    with pytest.raises(Refused, match="behind"):
        await (await begun(a, b, REPORT))
    b.at_once = Heard(item(pull(), encoded()))  # no answer to a report
    with pytest.raises(Refused, match="answered with a Item"):
        await (await begun(a, b, REPORT))
    b.at_once = lambda caller, call: None  # a task answers
    assert await (await begun(a, b, REPORT)) == m.Accepted(1)
    later = PendingReply()
    b.at_once = lambda caller, call: later if call == REPORT else None
    reply = await begun(a, b, REPORT)
    await time_passes(a, b)
    later.settle(m.Accepted(2))
    assert await reply == m.Accepted(2)
    a.at_once = Heard(m.Accepted(1))
    own = await begun(a, a, REPORT)
    assert not own.done() or own.result() == m.Accepted(1)


async def test_quiet_call_ends_with_peer_or_transport(cluster: Cluster) -> None:
    a, b, c = await cluster.node(), await cluster.node(), await cluster.node()
    b.at_once = c.at_once = Heard(m.Accepted(1))
    lost, closed = await begun(a, b, REPORT), await begun(a, c, REPORT)
    await time_passes(a, b)
    cluster.crash(b)
    with pytest.raises(PeerLost):
        await lost
    assert not closed.done()
    await a.transport.close()
    with pytest.raises((PeerLost, asyncio.CancelledError)):
        await closed


async def test_call_now_needs_a_session(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    begun = a.transport.call_now(b.peer, m.Seal(m.Stamp(1, 1), 1, 1))
    assert begun is None or await begun == m.Accepted(1)  # in memory there is nothing to make
    await a.transport.close()
    assert a.transport.call_now(b.peer, m.Seal(m.Stamp(1, 1), 1, 1)) is None


async def test_crashed_peer_is_lost_then_gone(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    b.handler = gate = Gate()
    waiting = asyncio.ensure_future(a.call(b, pull()))
    await waits(gate.entered)
    cluster.crash(b)
    with pytest.raises(PeerLost):
        await waiting
    assert await asyncio.wait_for(a.lost.get(), 30) == b.name
    for _ in range(2):
        with pytest.raises(PeerGone):
            await a.call(b, pull())
    with pytest.raises(PeerGone):
        await a.transport.probe(b.peer, timeout_s=5)
    assert a.lost.empty()


async def test_crash_of_a_caller_cancels_its_calls(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    b.handler = gate = Gate()
    waiting = asyncio.ensure_future(a.call(b, pull()))
    await waits(gate.entered)
    cluster.crash(a)
    assert await asyncio.wait_for(b.lost.get(), 30) == a.name
    await waits(gate.cancelled)
    with pytest.raises(PeerLost):
        await waiting


async def test_two_sessions_are_lost_once(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    await a.call(b, m.Seal(m.Stamp(1, 1), 1, 1))
    await b.call(a, m.Seal(m.Stamp(1, 1), 1, 1))
    cluster.crash(b)
    assert await asyncio.wait_for(a.lost.get(), 30) == b.name
    with pytest.raises(PeerGone):
        await a.call(b, pull())
    assert a.lost.empty()


async def test_probe_is_answered_during_a_call(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    await a.transport.probe(b.peer, timeout_s=5)
    b.handler = gate = Gate()
    waiting = asyncio.ensure_future(a.call(b, pull()))
    await waits(gate.entered)
    await a.transport.probe(b.peer, timeout_s=5)
    gate.release.set()
    await waiting
    assert a.lost.empty() and b.lost.empty()


async def test_goodbye_is_no_loss(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    await a.call(b, m.Seal(m.Stamp(1, 1), 1, 1))
    b.handler = gate = Gate()
    waiting = asyncio.ensure_future(a.call(b, pull()))
    await waits(gate.entered)
    await b.transport.close()
    assert gate.cancelled.is_set()
    with pytest.raises(PeerLost, match="goodbye"):
        await waiting
    with pytest.raises(PeerGone):
        await a.call(b, pull())
    with pytest.raises(PeerLost):
        await b.call(a, pull())
    assert a.lost.empty() and b.lost.empty()


async def test_close_ends_calls_to_oneself(cluster: Cluster) -> None:
    a = await cluster.node()
    a.handler = gate = Gate()
    waiting = asyncio.ensure_future(a.call(a, pull()))
    await waits(gate.entered)
    await a.transport.close()
    await a.transport.close()
    with pytest.raises(PeerLost):
        await waiting
    assert gate.cancelled.is_set()


async def test_handler_may_close_the_transport(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()

    async def closes(caller: str, call: m.Call) -> m.Reply:
        await b.transport.close()
        return m.Accepted()

    b.handler = closes
    with pytest.raises(PeerLost):
        await a.call(b, m.Seal(m.Stamp(1, 1), 1, 1))


async def test_unknown_node_is_gone(cluster: Cluster) -> None:
    a, b = await cluster.node(), await cluster.node()
    peer = b.peer
    await b.transport.close()
    with pytest.raises(PeerGone):
        await a.call(peer, pull())
