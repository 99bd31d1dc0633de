"""The values of a processor's channels: `Inputs` and `Outputs`.

Like `Epoch`, these classes check the calls of user code, from the event loop and from worker threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from itertools import repeat
from typing import Any, Final, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from taskgraph.device.lookup import device_of
from taskgraph.epoch import Tag, To, Work, task_ids
from taskgraph.errors import GraphError, ValueNotEncodable
from taskgraph.graph.arrays import empty
from taskgraph.graph.compose import Processor
from taskgraph.graph.values import decode, decode_small_array, encode
from taskgraph.protocol.messages import Encoded, EncodedOnDevice

__all__ = ["Inputs", "Outputs"]

T = TypeVar("T")
_ndarray: Final = np.ndarray  # a module-level name is faster to look up

_ReceivedArray = tuple[NDArray[Any], tuple[int, ...], tuple[int, ...], np.dtype[Any], Encoded]
"""An array that user code received, with its shape, strides, dtype and encoded value at that time.

User code cannot write to the array, but may set its shape or dtype."""


def _unchanged_encoding(value: Any, given: Mapping[int, _ReceivedArray]) -> Encoded | None:
    """Returns the encoded value of a received array; None if `value` is no received array, or was changed since."""
    found = given.get(id(value))
    if found is None:
        return None
    array, shape, strides, dtype, encoded = found
    if (
        value is not array
        or (type(array) is _ndarray and array.flags.writeable)
        or array.shape != shape
        or array.strides != strides
        or array.dtype is not dtype
    ):
        return None
    return encoded


class Inputs:
    """The values of a processor's inbound channels. Received values are read-only."""

    __slots__ = (
        "_inbound",
        "_items",
        "_processor",
        "_work",
        "given",
    )

    def __init__(self, work: Work, processor: Processor, items: Mapping[tuple[str, int], Encoded]) -> None:
        self._work = work
        self._processor = processor
        self._inbound = processor.inbound
        self._items = items
        self.given: dict[int, _ReceivedArray] | None = None
        """Large arrays that user code received, by `id`: passing one on needs no encoding."""

    @overload
    def __getitem__(self, tag: Tag[T]) -> T: ...
    @overload
    def __getitem__(self, tag: str) -> Any: ...
    def __getitem__(self, tag: str) -> Any:
        """Returns the value from the only producer of `tag`. Raises GraphError if there is none, or more than one."""
        name = tag if type(tag) is str else str(tag)
        producers = self._inbound.get(name)
        if producers is None:
            raise self._not_declared(name)
        if not producers:
            raise GraphError(
                f"{self._place()}: {name!r} comes from no task: its link has no neighbor here; "
                f"ask `if {name!r} in ins` first, or use ins.all({name!r})"
            )
        if len(producers) > 1:
            raise GraphError(
                f"{self._place()}: {name!r} comes from {len(producers)} tasks "
                f"({', '.join(map(str, producers))}); use ins.all({name!r})"
            )
        try:
            encoded = self._items[name, producers[0]]
        except KeyError:
            raise self._epoch_over() from None
        small = None if encoded.buffers else decode_small_array(encoded.meta)
        return self._decode(encoded) if small is None else small

    @overload
    def all(self, tag: Tag[T]) -> dict[int, T]: ...
    @overload
    def all(self, tag: str) -> dict[int, Any]: ...
    def all(self, tag: str) -> Any:
        """Returns {task id: value} of all producers of `tag`, in the declared order."""
        name = tag if type(tag) is str else str(tag)
        producers = self._inbound.get(name)
        if producers is None:
            raise self._not_declared(name)
        values = {}
        for producer in producers:
            try:
                encoded = self._items[name, producer]
            except KeyError:
                raise self._epoch_over() from None
            small = None if encoded.buffers else decode_small_array(encoded.meta)
            values[producer] = self._decode(encoded) if small is None else small
        return values

    @property
    def size_bytes(self) -> int:
        """The bytes of all values that the processor waited for. For the framework."""
        return sum([self._items[channel].size_bytes for channel in self._processor.takes if channel in self._items])

    def encoded(self, tag: str, producer: int) -> Encoded:
        """Returns a producer's value as it came, still encoded. For the framework."""
        try:
            return self._items[tag, producer]
        except KeyError:
            raise self._epoch_over() from None

    def fetch(self, tag: str) -> Awaitable[None]:
        """Pulls the items of an optional channel, and waits until all have arrived. For the framework."""
        return self._work.fetch(tuple([(tag, producer) for producer in self._inbound[tag]]))

    def _decode(self, encoded: Encoded) -> Any:
        """Decodes a value. Notes a large array, so that to pass it on needs no encoding."""
        value = decode(encoded, device=self._work.device)
        if encoded.buffers and (type(value) is _ndarray or _shares_device_memory(encoded, value)):
            given = self.given
            if given is None:
                self.given = given = {}
            given[id(value)] = (value, value.shape, value.strides, value.dtype, encoded)
        return value

    def __contains__(self, tag: object) -> bool:
        return bool(self._inbound.get(tag if type(tag) is str else str(tag)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._inbound)

    def _epoch_over(self) -> GraphError:
        """Returns the error for `ins` that are used after their epoch."""
        return GraphError(
            f"{self._place()}: the epoch of this `ins` is over. The arguments of a method are valid until it returns: "
            f"keep the values you need, not the ins"
        )

    def _not_declared(self, tag: str) -> GraphError:
        """Returns the error for a channel that is not declared."""
        declared = ", ".join(repr(t) for t in self._inbound) or "none"
        return GraphError(f"{self._place()}: no inbound channel {tag!r} is declared; inbound are: {declared}")

    def _place(self) -> str:
        """Names the task, epoch and processor, for messages."""
        return f"task {self._work.task}, epoch {self._work.number}, {self._processor.name}"


def _shares_device_memory(encoded: Encoded, value: object) -> bool:
    """True if a decoded value is itself an array on a device, in the memory of the producer: no copy was made."""
    return type(encoded) is EncodedOnDevice and device_of(value) is not None


def _channel_text(tag: str, consumer: int) -> str:
    """Names a channel in a message. A consumer below 0 is left out: `tg.testing.compute` has none."""
    return f"{tag!r} to task {consumer}" if consumer >= 0 else repr(tag)


class Outputs:
    """Takes the values of a processor's outbound channels, each exactly once."""

    __slots__ = (
        "_closed",
        "_filling",
        "_inputs",
        "_processor",
        "_put",
        "_work",
    )

    def __init__(self, work: Work, processor: Processor, inputs: Inputs | None = None) -> None:
        self._work = work
        self._processor = processor
        self._inputs = inputs
        self._put: set[tuple[str, int]] = set()
        self._closed = False
        self._filling: list[tuple[str, tuple[int, ...], NDArray[Any]]] | None = None

    @overload
    def put(self, tag: Tag[T], value: T, to: To | None = None) -> None: ...
    @overload
    def put(self, tag: str, value: Any, to: To | None = None) -> None: ...
    def put(self, tag: str, value: Any, to: To | None = None) -> None:
        """Puts `value` into channel `tag`, to all of its consumers or to those in `to`. The value is copied.

        A received array is passed on without encoding it again.

        Raises:
            GraphError: the channel is not declared, does not lead to one of `to`, or was put to one of them already.
            ValueNotEncodable: the value cannot travel; the message says what to send instead.
        """
        consumers = self._claim(tag, to)
        if consumers:
            work, inputs = self._work, self._inputs
            encoded = None if inputs is None or inputs.given is None else _unchanged_encoding(value, inputs.given)
            if encoded is None:
                what = f"channel {str(tag)!r} of task {work.task}"
                stays = work.device is not None
                encoded = encode(value, what=what, allocate=work.allocate, stays=stays, lendable=stays)
            work.put(str(tag), consumers, encoded)

    def empty(
        self, tag: str, shape: int | tuple[int, ...], dtype: DTypeLike = float, to: To | None = None
    ) -> NDArray[Any]:
        """Returns an array to fill, which is sent when the processor returns. Do not keep the array or a view of it.

        Raises:
            ValueNotEncodable: numpy cannot make such an array, or it could not travel.
        """
        try:
            array: NDArray[Any] = empty(shape, dtype, self._work.allocate)
        except (TypeError, ValueError) as error:
            text = f"{self._place()}: outs.empty({tag!r}, {shape!r}, {dtype!r}): {error}"
            raise ValueNotEncodable(text) from None
        consumers = self._claim(tag, to)
        if self._filling is None:
            self._filling = []
        self._filling.append((str(tag), consumers, array))
        return array

    def close(self) -> None:
        """Sends the arrays of `empty`. Raises GraphError if a channel was not put, unless it is optional."""
        if self._filling is not None:
            for tag, consumers, array in self._filling:
                if consumers:
                    encoded = encode(array, what=f"channel {tag!r} of task {self._work.task}", adopt=True)
                    self._work.put(tag, consumers, encoded)
            self._filling = None
        if not self._put.issuperset(self._processor.puts):
            missing = [_channel_text(tag, task) for tag, task in self._processor.puts if (tag, task) not in self._put]
            raise GraphError(
                f"{self._place()}: returned without putting {', '.join(missing[:5])}"
                f"{' ...' if len(missing) > 5 else ''}; every declared channel is put exactly once per epoch: "
                f"outs.put(tag, value), with None for nothing; the return value of a processor is ignored"
            )
        self._closed = True

    @property
    def work(self) -> Work:
        """The attempt that the processor works for. For the framework."""
        return self._work

    def put_encoded(self, tag: str, encoded: Encoded, to: tuple[int, ...] | None = None) -> None:
        """Puts an encoded value, to all consumers if `to` is None. For the framework."""
        if consumers := self._claim(tag, to):
            self._work.put(tag, consumers, encoded)

    @property
    def filled(self) -> tuple[tuple[str, int], ...]:
        """The (tag, consumer) pairs whose array is to be filled, until `close` sends it. For the framework."""
        return tuple([(tag, consumer) for tag, consumers, _ in self._filling or () for consumer in consumers])

    def _claim(self, tag: str, to: To | None) -> tuple[int, ...]:
        """Notes that a channel is put to those in `to`, or to all its consumers; returns them.

        Raises:
            GraphError: the processor may not put this.
        """
        tag = tag if type(tag) is str else str(tag)
        declared = self._processor.outbound.get(tag)
        if declared is None:
            names = ", ".join(repr(t) for t in self._processor.outbound) or "none (it is a sync point)"
            raise GraphError(f"{self._place()}: no outbound channel {tag!r} is declared; outbound are: {names}")
        consumers = declared if to is None else task_ids(self._work, to, self._place, f"channel {tag!r}")
        if to is None and self._put.isdisjoint(channels := [*zip(repeat(tag), consumers)]):  # as a rule
            self._put.update(channels)
            return consumers
        for consumer in consumers:
            if consumer not in declared:
                raise GraphError(
                    f"{self._place()}: channel {tag!r} does not lead to task {consumer}; it leads to: "
                    f"{', '.join(map(str, declared)) or 'no task'}"
                )
            if (tag, consumer) in self._put and self._closed:
                raise GraphError(
                    f"{self._place()}: a put into channel {tag!r} after the processor returned: the arguments of a "
                    f"method are valid until it returns; use the outs of the current call"
                )
            if (tag, consumer) in self._put:
                if (tag, consumer) in self.filled:
                    raise GraphError(
                        f"{self._place()}: channel {_channel_text(tag, consumer)} has an array of outs.empty already, "
                        f"which is sent as it is when the processor returns: fill that, or put, but not both"
                    )
                raise GraphError(
                    f"{self._place()}: channel {_channel_text(tag, consumer)} was put twice; a channel carries one "
                    f"item per epoch: put a list, or declare another tag"
                )
        for consumer in consumers:
            self._put.add((tag, consumer))
        return consumers

    def _place(self) -> str:
        """Names the task, epoch and processor, for messages."""
        return f"task {self._work.task}, epoch {self._work.number}, {self._processor.name}"
