"""Totals that PyTorch's communicators make: one process group for each view, in a thread of its own.

    a view is read ──► the group of the view before is closed, at once ──► a group of this view
    all contributions are there ──► an operation of the group ──► the total, on this worker
    an operation failed, and no other view comes ──► the next view has the same workers, and another group

A thread whose group was closed may still be in an operation: it is not waited for. Its peers close the group too, which
ends the operation. Addresses of a group travel as messages, so no process is special.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from taskgraph.errors import JobError
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.reach import tcp_address

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["GroupClosed", "GroupSums"]

_RENEW_AFTER_S: Final = 1.0
"""How long after a failed operation a view without a lost worker may come, before the same workers try again."""
_KEY_S: Final = 60.0
"""How long a worker waits for the address of another one of its view."""
_MOST_FAILURES: Final = 3
"""Operations that fail one after another, although all workers live, before the job fails."""

_Arrays = Sequence[NDArray[Any]]
Result = concurrent.futures.Future[list[NDArray[Any]]]


class GroupClosed(Exception):
    """Raised by waits and sums of a process group that was closed, since its view is over."""


class _GroupKeys:
    """The keys by which the processes of a view's group find each other: one worker sets a key, all get it."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._found: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Sets a key for all workers of the view."""
        self.put(key, value)
        self._send(key, value)

    def put(self, key: str, value: bytes) -> None:
        """Keeps a key that another worker set, and wakes `get`."""
        with self._changed:
            self._found[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Waits for a key, `_KEY_S` at most.

        Raises:
            GroupClosed: the view is over.
            TimeoutError: no worker has set the key.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._found or self._closed, _KEY_S)
            if self._closed:
                raise GroupClosed
            if key not in self._found:
                raise TimeoutError(f"another worker has not sent its address within {_KEY_S:g} s")
            return self._found[key]

    def has(self, key: str) -> bool:
        return key in self._found

    def close(self) -> None:
        """Ends all waits for keys, with GroupClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _ProcessGroup:
    """The process group of one view, in its thread.

    Args:
        number: of the view.
        rank, size: this worker's place in the view, from 0; the number of the view's workers.
        host: see `process_groups.make_group`.
        send: gives a key to all other workers of the view; called in the thread.
    """

    def __init__(
        self, backend: str, number: int, rank: int, size: int, host: str, send: Callable[[str, bytes], None]
    ) -> None:
        self.number = number
        self._backend = backend
        self.keys = _GroupKeys(send)
        self._waiting: queue.SimpleQueue[tuple[_Arrays, Sequence[_Arrays], Result] | None] = queue.SimpleQueue()
        self._asked: Result | None = None
        self._group: Any = None
        thread = threading.Thread(
            target=self._run, args=(rank, size, host), name=f"process group of view {number}", daemon=True
        )
        thread.start()

    def sum(self, zeros: _Arrays, held: Sequence[_Arrays]) -> Result:
        """Begins an operation (`process_groups.sum_over`). The result has GroupClosed if the group is closed first."""
        self._asked = Result()
        self._waiting.put((zeros, held, self._asked))
        return self._asked

    def close(self) -> None:
        """Closes the process group at once: a sum under way raises GroupClosed. The thread may still be in it, and is
        not waited for.
        """
        self.keys.close()
        self._waiting.put(None)
        if self._asked is not None:
            _set_result(self._asked, GroupClosed())
        if self._group is not None:
            from taskgraph.elastic_jobs.process_groups import abort

            abort(self._group, self._backend)

    def _run(self, rank: int, size: int, host: str) -> None:
        """Makes the process group, and then carries out operations until the group is closed. Runs in the thread."""
        failure: Exception | None = None
        try:
            from taskgraph.elastic_jobs.process_groups import make_group, sum_over

            self._group = make_group(self._backend, self.keys, rank, size, host)
        except Exception as error:
            failure = error
        while (asked := self._waiting.get()) is not None:
            zeros, held, result = asked
            try:
                if failure is not None:
                    raise failure
                found = sum_over(self._group, self._backend, zeros, held)
            except Exception as error:
                failure = error  # the workers may have gone apart
                _set_result(result, error)
            else:
                _set_result(result, found)
        self._group = None  # its connections are closed: peers in an operation see that


def _set_result(result: Result, found: list[NDArray[Any]] | Exception) -> None:
    """Sets the future of an operation to arrays or an error, unless it is done."""
    try:
        if isinstance(found, Exception):
            result.set_exception(found)
        else:
            result.set_result(found)
    except concurrent.futures.InvalidStateError:
        pass  # the group was closed meanwhile


class GroupSums:
    """Sums what the workers of a view contributed, with one process group for each view.

    Args:
        backend: "gloo" or "nccl".
        fail: fails the job.
        send: sends a key to all other workers of a view: its number, key and value.
        changed: called when the same workers are to try again, in another view.

    Attributes:
        failed_in: the number of the view in which an operation failed although all workers live; -1: none.
    """

    def __init__(
        self,
        node: NodeCore,
        backend: str,
        *,
        fail: Callable[[JobError], Awaitable[None]],
        send: Callable[[int, str, bytes], None],
        changed: Callable[[], None],
    ) -> None:
        # Before user code runs, and before the node has a lease to renew: another thread must not find half of PyTorch.
        import taskgraph.elastic_jobs.process_groups  # noqa: F401

        self._node = node
        self._backend = backend
        self._fail = fail
        self._send = send
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._group: _ProcessGroup | None = None
        self._view = -1
        self._failures = 0
        self.failed_in = -1

    def begin_view(self, view: View) -> None:
        """Closes the process group of the view before, and makes one of this view, if it has other workers."""
        self.close()
        self._view = view.number
        if len(view.workers) > 1:
            number, rank = view.number, view.workers.index(self._node.id)

            def send(key: str, value: bytes) -> None:
                self._loop.call_soon_threadsafe(self._send, number, key, value)

            self._group = _ProcessGroup(self._backend, number, rank, len(view.workers), self._host(), send)

    def _host(self) -> str:
        """Returns an address of this host that other workers reach; without any, that of loopback."""
        addresses = (tcp_address(endpoint)[0] for endpoint in self._node.transport.endpoints)
        return next(filter(None, addresses), "127.0.0.1")

    def put_key(self, view: int, key: str, value: bytes) -> bool:
        """Takes a key that another worker of the view set. Returns False if this worker has no group of that view yet:
        keep the key until then."""
        if self._group is None or self._group.number != view:
            return False
        self._group.keys.put(key, value)
        return True

    async def sum(self, view: int, zeros: _Arrays, held: Sequence[_Arrays]) -> _Arrays | None:
        """Returns the sums over a view's workers (`process_groups.sum_over`); None: the view or its group has ended."""
        if view != self._view:
            return None
        if self._group is None:
            for arrays in held:
                for total, array in zip(zeros, arrays, strict=True):
                    total += array
            return zeros
        try:
            sums = await asyncio.wrap_future(self._group.sum(zeros, held))
        except GroupClosed:
            return None
        except Exception as error:
            await self._handle_failure(view, error)
            return None
        self._failures = 0
        return sums

    async def _handle_failure(self, view: int, error: Exception) -> None:
        """After a failed operation, waits for a view without a lost worker; if none comes, asks for a new, equal view.

        Fails the job instead if PyTorch cannot sum the dtype, or the group failed too often.
        """
        if isinstance(error, JobError):
            await self._fail(error)
            return
        await asyncio.sleep(_RENEW_AFTER_S)
        if self._view != view:
            return
        self._failures += 1
        first_line = str(error).partition("\n")[0]
        if self._failures >= _MOST_FAILURES:
            text = (
                f"communicator={self._backend!r} failed {self._failures} times though all workers live: {first_line}. "
                f"Look at the network between the hosts (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or leave it out"
            )
            await self._fail(JobError(text))
            return
        self._node.events.emit("regrouped", f"{self._backend} failed ({first_line}): its group is made anew")
        self.failed_in = view
        self._changed()

    def close(self) -> None:
        """Closes the process group, if there is one: sums under way return None."""
        if self._group is not None:
            self._group.close()
        self._group, self._view = None, -1
