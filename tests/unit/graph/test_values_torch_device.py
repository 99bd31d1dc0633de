"""Tensors on a device: CPU tensors in the place of CUDA's, whose memory a device in software reads through DLPack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from softdevice import SoftArray, SoftDevice  # noqa: E402

import taskgraph.torch as subject  # noqa: E402
from taskgraph.device import cuda, lookup  # noqa: E402
from taskgraph.device.lookup import register_array_type  # noqa: E402
from taskgraph.graph.values import decode, device_buffers, device_buffers_intact, encode  # noqa: E402
from taskgraph.protocol.messages import Encoded, EncodedOnDevice  # noqa: E402

NAMES = ["bool", "uint8", "int64", "float32", "float16", "bfloat16", "complex64", "complex128", "uint16", "float8_e5m2"]


class Exported:
    """Memory of an array, which keeps the array."""

    def __init__(self, array: SoftArray) -> None:
        self.array = array
        self.__array_interface__ = array.elements.__array_interface__


class Lent(SoftArray):
    """Speaks DLPack to who reads on the host: that follows the current stream, and nothing else."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **wanted: Any) -> Any:
        self.soft.wait(self.soft.record(self.soft.current_stream()))
        return np.asarray(Exported(self)).__dlpack__(**wanted)


register_array_type(Lent, lambda array: array.soft)


class There:
    """A device that has CPU tensors, and what it was asked to read."""

    def __init__(self, soft: SoftDevice) -> None:
        self.soft = soft
        self.read: list[torch.Tensor] = []
        self.meanwhile: Callable[[], object] = lambda: None
        soft.array_type = Lent

    def __call__(self, tensor: torch.Tensor) -> SoftArray:
        self.read.append(tensor)
        self.meanwhile()
        return Lent(self.soft, tensor, np.from_dlpack(tensor))


@pytest.fixture(params=[(None, False), (1, True)], ids=["late", "races"])
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[There]:
    found = There(SoftDevice(request.param[0], races=request.param[1]))
    monkeypatch.setattr(subject, "_on_host", lambda tensor: False)
    monkeypatch.setitem(lookup._readers, 1, found)
    with found.soft.on(found.soft.new_stream()):
        yield found


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy())


def tensor_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, name)
    size = int(np.prod(shape))
    if not size:
        return torch.zeros(shape, dtype=dtype)
    raw = torch.arange(size * dtype.itemsize, dtype=torch.int64).remainder(2 if name == "bool" else 251)
    return raw.to(torch.uint8).view(dtype)[:size].reshape(shape)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (300, 290)])
def test_every_dtype_stays_bit_for_bit(there: There, name: str, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(name, shape)
    stayed = encode({"w": tensor}, stays=True)
    assert type(stayed) is (EncodedOnDevice if tensor.nbytes >= 64 << 10 else Encoded)
    for device in (there.soft, None):
        back = decode(stayed, device=device)["w"]
        assert type(back) is torch.Tensor
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        if back.numel():
            assert bits(back) == bits(tensor)


@pytest.mark.parametrize("name", [*NAMES, "complex32"])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_it_has_the_digest_that_it_has_on_the_host(there: There, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tensor = tensor_of(name, (600, 290))
    stayed = encode([tensor, tensor[::2].t()], stays=True)
    assert len(device_buffers(stayed)) == 2
    monkeypatch.undo()
    on_host = encode([tensor, tensor[::2].t()])
    assert stayed.digest == on_host.digest
    assert [one.device.type for one in decode(on_host)] == ["cpu", "cpu"]


def test_layouts_and_lazy_bits(there: There) -> None:
    whole = torch.arange(7200.0).reshape(80, 90)
    complex_ = torch.complex(whole, whole)
    for tensor in (
        *(whole.t(), whole[:, ::2], whole[0].expand(50, 90), complex_.conj(), complex_.conj().imag),
        *(whole[3, 4], whole[:0], whole.to(torch.bfloat16).t(), torch.view_as_real(complex_)[..., 1]),
    ):
        back = decode(encode(tensor, stays=True), device=there.soft)
        assert back.shape == tensor.shape and torch.equal(back, tensor)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64"])
def test_a_state_comes_back_as_it_lay(there: There, name: str) -> None:
    tensor = tensor_of(name, (300, 290))
    for sent in (tensor.t(), tensor.reshape(30, 10, 290).permute(2, 0, 1), tensor_of(name, (2, 3)).t()):
        encoded = encode([sent], stays=True, ordered=True)
        for device in (there.soft, None):
            (back,) = decode(encoded, device=device, writable=True)
            assert back.stride() == sent.stride() and bits(back) == bits(sent)


def test_later_writes_do_not_reach_it(there: There) -> None:
    tensor = torch.zeros(10_000)
    encoded = encode(tensor, stays=True)
    tensor += 7
    assert not decode(encoded, device=there.soft).any()


def test_what_arrives_is_ones_own(there: There) -> None:
    encoded = encode(torch.zeros(20_000), stays=True)
    for writable in (False, True):
        back = decode(encoded, device=there.soft, writable=writable)
        assert not back.any()
        back += 5
    assert device_buffers_intact(encoded)


def test_the_memory_it_came_in_goes_back_behind_the_copy(there: There) -> None:
    """PyTorch copies on a stream of its own: the task's has to follow that while the view is still there."""
    encoded = encode(torch.zeros(20_000), stays=True)
    (buffer,) = device_buffers(encoded)
    there.read.clear()
    viewed = []
    there.meanwhile = lambda: viewed.append(buffer.is_viewed)
    back = decode(encoded, device=there.soft)
    assert [tensor.data_ptr() for tensor in there.read] == [back.data_ptr()]
    assert viewed == [True]
    assert not buffer.is_viewed


@pytest.mark.parametrize("refusal", [BufferError("per-thread"), RuntimeError("other"), TypeError("x"), ValueError("x")])
def test_what_cannot_be_read_there_goes_by_the_host(there: There, refusal: Exception) -> None:
    def refuse() -> None:
        raise refusal

    tensor = tensor_of("bfloat16", (300, 290))
    there.meanwhile = refuse
    encoded = encode(tensor, stays=True)
    assert type(encoded) is Encoded
    there.meanwhile = lambda: None
    there.read.clear()
    assert torch.equal(decode(encoded, device=there.soft).view(torch.int16), tensor.view(torch.int16))
    assert there.read, "it arrived on the device"


def test_and_without_cupy_too(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lookup._readers, 1, cuda.from_dlpack)
    monkeypatch.setitem(cuda.sys.modules, "cupy", None)
    tensor = torch.arange(10_000)
    encoded = encode(tensor, stays=True)
    assert type(encoded) is Encoded
    assert torch.equal(decode(encoded), tensor)


def test_an_error_of_the_device_is_none_of_those(there: There) -> None:
    class AcceleratorError(RuntimeError):
        __module__ = "torch"

    def fail() -> None:
        raise AcceleratorError("an illegal memory access")

    there.meanwhile = fail
    with pytest.raises(AcceleratorError):
        encode(torch.zeros(20_000), stays=True)


def test_pytorch_is_asked_for_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subject._free_unused_memory in cuda.reclaimers
    assert not subject._free_unused_memory(1), "it did not come to CUDA yet"
    reserved = [10]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.__setitem__(0, 4))
    assert subject._free_unused_memory(1)
    assert not subject._free_unused_memory(1), "nothing is left"


def test_several_threads_may_put_at_once(there: There) -> None:
    tensors = [torch.full((10_000,), float(number)) for number in range(4)]
    found: list[Encoded] = []

    def put(tensor: torch.Tensor) -> None:
        with there.soft.on(there.soft.new_stream()):
            found.append(encode(tensor, stays=True))

    threads = [threading.Thread(target=put, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrived = sorted(float(decode(one, device=there.soft).max()) for one in found)
    assert arrived == [0, 1, 2, 3]
