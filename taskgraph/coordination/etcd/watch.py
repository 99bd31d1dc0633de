"""Watches a prefix: yields every event once, in revision order.

A broken stream is opened again on the next endpoint, from the revision after the last delivered one. etcd sends all
events of a revision in one message (we ask for no fragments), so a message is delivered as it comes.

The revision in a message's header is *not* the last revision in the message: a watch that catches up gets old events
with the store's current revision. Only the events and progress notices show the position of the watch.

A watch that is refused after it was created retries: a permission or password may be restored.

A member may be behind the others for a moment. A cluster that is behind for good has lost acknowledged writes, and
would send no events until it has as many revisions again, so the watch raises `DataLost`. An etcd that was set up
anew, or from a backup, may have more revisions and the same cluster id, which depends on members' addresses. So a
watch reports that it was reopened, and its reader lists again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from taskgraph.coordination.api import AccessRefused, DataLost, WatchBatch, WatchCompacted
from taskgraph.coordination.etcd import convert
from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.connection import Connection, OtherCluster, Stream, is_cancelled, pause_s
from taskgraph.coordination.etcd.failures import FailureKind, classify_failure, refusal
from taskgraph.coordination.etcd.methods import RANGE, WATCH
from taskgraph.errors import Unavailable

__all__ = ["check_not_lost", "watch"]

log = logging.getLogger(__name__)


async def watch(connection: Connection, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
    """Yields the events under `prefix` from `start_revision` on, each once and in order.

    A broken stream is opened again, for ever.

    Raises:
        WatchCompacted: events from the position on were compacted away.
        DataLost: etcd lost revisions that it had sent.
        CoordinationError: etcd refuses the watch from the start, or for good.
    """
    position = start_revision  # the first revision not delivered yet
    known = 0  # the last revision that etcd sent
    failures = 0
    refused = False
    while True:
        stream: Stream[v3.WatchResponse] | None = None
        endpoint = connection.endpoint
        try:
            with connection.closed_as_error(f"watch of {prefix!r}"):  # not for each event, for speed
                stream = await connection.stream(WATCH)
                await stream.write(_create_request(prefix, position))
                reason = "etcd ended the stream"
                async with contextlib.aclosing(stream.messages()) as messages:
                    async for answer in messages:
                        if answer is None:  # gRPC returns None for bytes that are no message
                            reason = "its message cannot be read"
                            break
                        if answer.created or answer.canceled:
                            connection.check_cluster(endpoint, answer.header)
                        if answer.canceled:
                            reason = _handle_cancel(answer, connection, stream, prefix, position)
                            break
                        if answer.created:
                            if failures:
                                log.info("watch of %r goes on at etcd %s", prefix, endpoint.target)
                            if answer.header.revision < known:
                                await check_not_lost(connection, prefix, known)
                            known = max(known, answer.header.revision)
                            if failures:
                                yield WatchBatch(position - 1, (), reopened=True)
                            continue
                        failures = 0
                        batch = _to_batch(answer, position)
                        if batch is not None:
                            position = batch.revision + 1
                            known = max(known, batch.revision)
                            yield batch
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
            verdict = classify_failure(error.code(), reason)
            if verdict is FailureKind.LOGIN:
                _forget_token(connection, stream)
            elif verdict is FailureKind.REFUSED:
                final = refusal(f"watch of {prefix!r}", error.code(), reason)
                if not known or not isinstance(final, AccessRefused):
                    raise final from error
        except AccessRefused as error:
            _forget_token(connection, stream)  # if etcd lost the token, it may say only that the watch is not permitted
            if not known and (refused or connection.options.username is None):
                raise
            refused, reason = True, str(error)
        except OtherCluster as other:
            reason = str(other)
        except asyncio.InvalidStateError as error:  # gRPC also raises it for a write to an ended stream
            reason = f"the stream broke before the watch was created: {error}"
        except asyncio.CancelledError:
            if stream is None or not stream.left or is_cancelled():
                raise
            reason = "calls to it fail"
        finally:
            if stream is not None:
                stream.cancel()
        failures += 1
        connection.move_from(endpoint)
        level = logging.WARNING if failures == 1 else logging.DEBUG
        log.log(level, "watch of %r: etcd %s failed (%s); trying again", prefix, endpoint.target, reason)
        await asyncio.sleep(pause_s(failures))


async def check_not_lost(connection: Connection, prefix: str, known: int) -> None:
    """Checks that the cluster still has a revision that one member sent.

    Raises:
        DataLost: all members are behind that revision.
    """
    revision = 0
    for _ in connection.options.endpoints:
        endpoint = connection.endpoint
        try:
            probe = convert.range_request(prefix, prefix=False)
            answer = await connection.call(RANGE, probe, what=f"read of {prefix!r}", again=True)
        except Unavailable as error:
            log.warning("it is not known if etcd lost acknowledged writes: %s", error)
            return
        revision = answer.header.revision
        if revision >= known:
            return
        connection.move_from(endpoint)  # perhaps only this member is behind
    raise DataLost(f"it was at revision {known}, and is at {revision} now")


def _create_request(prefix: str, start_revision: int) -> v3.WatchRequest:
    """Makes the request that creates a watch."""
    key, end = convert.range_of(prefix, prefix=True)
    return v3.WatchRequest(
        create_request=v3.WatchCreateRequest(
            key=key, range_end=end, start_revision=start_revision, progress_notify=True
        )
    )


def _forget_token(connection: Connection, stream: Stream[v3.WatchResponse] | None) -> None:
    """Drops the token that `stream` was opened with, unless a login has replaced it. None: it was not opened."""
    if stream is not None:
        connection.login.drop_token(stream.token)


def _handle_cancel(
    answer: v3.WatchResponse, connection: Connection, stream: Stream[v3.WatchResponse], prefix: str, position: int
) -> str:
    """Handles the end of a watch by etcd. Returns the reason, for the log, if the watch may be opened again; raises
    otherwise.

    Drops the login's token if the token is the reason.

    Raises:
        WatchCompacted: the history from `position` on is gone.
        CoordinationError: etcd refuses this watch.
    """
    if answer.compact_revision:
        raise WatchCompacted(
            f"watch of {prefix!r}: revision {position} was compacted away (up to {answer.compact_revision}); list again"
        )
    reason = answer.cancel_reason or "etcd ended the watch without a reason"
    if classify_failure(grpc.StatusCode.UNKNOWN, reason) is FailureKind.LOGIN:
        _forget_token(connection, stream)
    elif "permission denied" in reason:
        raise refusal(f"watch of {prefix!r}", grpc.StatusCode.PERMISSION_DENIED, reason)
    return reason


def _to_batch(answer: v3.WatchResponse, position: int) -> WatchBatch | None:
    """Converts a message to a batch: its events from `position` on, or a progress notice. None if it has neither."""
    if not answer.events:
        revision = answer.header.revision
        return WatchBatch(revision, ()) if revision >= position else None
    found = []
    for message in answer.events:
        event = convert.event(message)
        if event.kv.mod_revision >= position:
            found.append(event)
    return WatchBatch(found[-1].kv.mod_revision, tuple(found)) if found else None
