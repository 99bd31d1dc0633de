"""The trial, by a node's first array, whether arrays can stay on its device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cupy_kit import launch_on, stand_in
from softdevice import SoftDevice

from taskgraph.device import cuda, digest
from taskgraph.graph.values import encode
from taskgraph.protocol.messages import Encoded, EncodedOnDevice

HOST = np.arange(10_000.0)


@pytest.fixture
def soft(monkeypatch: pytest.MonkeyPatch) -> Iterator[SoftDevice]:
    soft = SoftDevice()
    monkeypatch.setitem(sys.modules, "cupy", stand_in(soft))
    cuda._first_device.cache_clear()
    yield soft
    cuda._first_device.cache_clear()


def put() -> Encoded:
    return encode(sys.modules["cupy"].asarray(HOST), stays=True)


@pytest.mark.parametrize("fault", ["kernel fails", "wrong digests"])
def test_arrays_go_by_the_host_if_the_trial_fails(
    fault: str, soft: SoftDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = launch_on(soft)

    def launch(data: Any, nbytes: int, block_bytes: int, digests: Any, stream: Any, copy: Any = 0) -> None:
        if fault == "kernel fails":
            raise RuntimeError("it does not compile")
        right(data, nbytes, block_bytes, digests, stream, copy)
        with stream:
            digests[-1, -1:] = 0

    monkeypatch.setattr(digest, "launch_kernel", launch)
    for _ in range(2):
        encoded = put()
        assert type(encoded) is Encoded and encoded.digest == encode(HOST).digest
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # one trial
    monkeypatch.setattr(digest, "launch_kernel", right)
    cuda._first_device.cache_clear()
    assert type(put()) is EncodedOnDevice


def test_error_of_the_device_in_the_trial_is_raised(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("OutOfMemoryError", (Exception,), {"__module__": "cupy.cuda.memory"})

    def launch(*_: Any) -> None:
        raise full("for now")

    monkeypatch.setattr(digest, "launch_kernel", launch)
    with pytest.raises(full):
        put()
    monkeypatch.setattr(digest, "launch_kernel", launch_on(soft))
    assert type(put()) is EncodedOnDevice  # the next array is the next trial
