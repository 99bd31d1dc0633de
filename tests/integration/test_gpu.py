"""cupy inside processors. Runs where a CUDA device is; the same logic runs on numpy everywhere else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_kit import Cli, Done

import taskgraph as tg
from taskgraph.device.cuda import array_module, device_count
from taskgraph.driver.loading import load_driver
from taskgraph.graph.values import copy_to_host, decode, device_buffers, device_buffers_intact, encode, verify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


DRIVER = Path(__file__).parent / "drivers" / "relax.py"


def test_device_arrays_travel_and_survive_a_kill() -> None:
    job = load_driver(f"{DRIVER}:relax")()
    calm = tg.testing.run(job)
    killed = tg.testing.run(job, kills={(0, 2): "sync", (2, 4): "done"})
    assert killed.failovers > 0
    for task, row in calm.values.items():
        assert type(row) is np.ndarray, "results are read on the host"
        assert np.array_equal(row, killed.values[task])


def test_a_state_keeps_its_order_on_the_device() -> None:
    job = load_driver(f"{DRIVER}:turned")()
    calm = tg.testing.run(job)
    killed = tg.testing.run(job, kills={(0, 2): "sync", (2, 4): "done"})
    assert killed.failovers > 0
    for task, x in calm.values.items():
        assert np.array_equal(x, killed.values[task])


def test_the_digest_does_not_depend_on_where_an_array_lives() -> None:
    import cupy

    host = np.arange(12, dtype="f4").reshape(3, 4)
    for one in (host, host.T, host[:, ::2], np.array(7.0)):
        on_host, on_device = encode(one), encode(cupy.asarray(one))
        assert on_host.digest == on_device.digest
        assert np.array_equal(decode(on_device), one)
        back = decode(on_device, device=array_module(1)[1])
        assert type(back) is cupy.ndarray
        assert np.array_equal(back.get(), one)


def test_later_changes_on_the_device_do_not_reach_what_was_put() -> None:
    import cupy

    array = cupy.ones(100_000)
    encoded = encode(array)
    array[:] = 7
    assert decode(encoded).max() == 1


@pytest.mark.parametrize("size", [1000, 300_000], ids=["by the host", "on the device"])
def test_node_processes_share_a_device(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    job = load_driver(f"{DRIVER}:relax")
    alone = tg.run(job(size=size), nodes=0)
    across = tg.run(job(size=size), nodes=2, timeout_s=100, name=f"relax-{size}")
    assert across.epochs == 6
    assert "go by the host" not in capfd.readouterr().err
    for task, row in alone.values.items():
        assert np.array_equal(row, across.values[task])


class OnStreams(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.plain)
        epoch.processor(self.coroutine)

    def plain(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.streams = [self.xp.cuda.get_current_stream().ptr]

    async def coroutine(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.streams.append(self.xp.cuda.get_current_stream().ptr)

    def result(self) -> list[int]:
        return self.streams


def test_tasks_compute_on_streams_of_their_own() -> None:
    result = tg.run(tg.Job(tasks=3, epochs=2, builder=OnStreams), nodes=0)
    one_each = [set(streams) for streams in result.values.values()]
    assert all(len(streams) == 1 for streams in one_each)
    assert len(set().union(*one_each)) == 3
    assert not {0, 2} & set().union(*one_each), "the default stream, and that of a thread"


def test_items_are_views_within_a_process_and_bytes_beyond_it() -> None:
    xp, device = array_module(1)
    array = xp.arange(100_000.0)
    encoded = encode({"a": array}, stays=True)
    array += 1
    one, other = (decode(encoded, device=device)["a"] for _ in range(2))
    assert one.data.ptr == other.data.ptr != array.data.ptr
    assert np.array_equal(one.get(), np.arange(100_000.0))
    assert encoded.digest == encode({"a": np.arange(100_000.0)}).digest
    away = copy_to_host(encoded)
    assert verify(away)
    assert np.array_equal(decode(away)["a"], np.arange(100_000.0))
    assert device_buffers_intact(encoded)
    one += 1
    assert not device_buffers_intact(encoded)


def test_memory_that_another_stream_still_reads_is_not_given_away() -> None:
    xp, device = array_module(1)
    assert device is not None
    owner, reader = device.new_stream(), device.new_stream()
    for _ in range(20):
        with device.on(owner):
            encoded = encode(xp.ones((2000, 2000)), stays=True)
        with device.on(reader):
            read = decode(encoded, device=device)
            for _ in range(10):  # long enough that it is still at work below
                result = read @ read
            del read
        with device.on(owner):
            del encoded
            xp.full((2000, 2000), 7.0)  # takes the memory, where it may
        with device.on(reader):
            assert float(result.max()) == 2000


class Captures(tg.Task, state=["row"]):
    """Computes are graphs, captured on the task's stream; what was read the epoch before goes meanwhile."""

    def __init__(self, size: int, mode: str) -> None:
        self.size, self.mode = size, mode

    def setup(self) -> None:
        self.row = self.xp.arange(float(self.size)) + self.task_id
        self.graphs: list[Any] = []
        self.seen: Any = None
        spare = self.xp.zeros(self.size)
        self.xp.add(spare, spare, out=spare)  # kernels are loaded before anything is captured
        self.xp.multiply(spare, 0.5, out=spare)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.mix, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.row)

    def mix(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        other, stream = ins["row"], self.xp.cuda.get_current_stream()
        stream.begin_capture(getattr(self.xp.cuda.runtime, self.mode))
        self.xp.add(self.row, other, out=self.row)
        time.sleep(0.005)
        self.seen = None
        self.xp.multiply(self.row, 0.5, out=self.row)
        self.graphs.append(stream.end_capture())
        self.graphs[-1].launch(stream)
        self.seen = other

    def result(self) -> Any:
        return self.row


@pytest.mark.parametrize("size", [20_000, 300_000])
@pytest.mark.parametrize("mode", ["streamCaptureModeRelaxed", "streamCaptureModeThreadLocal"])
def test_graphs_are_captured_on_streams_that_nobody_else_touches(size: int, mode: str) -> None:
    job = tg.Job(tasks=3, epochs=20, builder=lambda _: Captures(size, mode), topology=tg.ring(), backups=0)
    result = tg.run(job, nodes=0)
    rows = [np.arange(float(size)) + task for task in range(3)]
    for _ in range(20):
        rows = [(rows[t] + rows[t - 1]) * 0.5 for t in range(3)]
    assert all(np.array_equal(result.values[t], row) for t, row in enumerate(rows))


SPIN = r"""
extern "C" __global__ void spin(long long ns, double* x) {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    const long long end = now + ns;
    while (now < end) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    x[0] += 1;
}
"""


async def test_to_let_go_on_an_event_loop_waits_for_no_compute() -> None:
    """While one waits for the device in `float`, CUDA holds up whoever makes an event, or destroys one."""
    xp, device = array_module(1)
    assert device is not None
    owner, computing = device.new_stream(), device.new_stream()
    spin = xp.RawKernel(SPIN, "spin")
    with device.on(computing):
        mine = xp.zeros(1)
        spin((1,), (1,), (np.int64(0), mine))
        float(mine[0])
    with device.on(owner):
        values = [encode(xp.ones(100_000), stays=True) for _ in range(20)]
    with device.on(computing):
        views = [decode(value, device=device) for value in values]

    def compute() -> float:
        with device.on(computing):
            spin((1,), (1,), (np.int64(400_000_000), mine))
            return float(mine[0])

    work = asyncio.ensure_future(asyncio.to_thread(compute))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    views.clear()
    values.clear()
    took = time.monotonic() - began
    assert not work.done(), "it was to compute still"
    assert await work == 2.0
    assert took < 0.1


class Writes(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.take, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.xp.ones(10_000))

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1:
            row = ins["row"]
            row += 1


def test_strict_mode_finds_who_writes_to_what_it_was_given() -> None:
    with pytest.raises(tg.JobFailed, match="task 1, epoch 0: 'take' wrote to what 'row' of task 0 brought"):
        tg.testing.run(tg.Job(tasks=3, epochs=1, builder=Writes, topology=tg.ring()))


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    import taskgraph.torch  # noqa: F401

    return found


@pytest.mark.parametrize("name", ["float32", "bool", "int64", "uint16", "bfloat16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (300, 290)])
def test_tensors_stay_and_arrive_in_memory_of_pytorch(torch: Any, name: str, shape: tuple[int, ...]) -> None:
    dtype, size = getattr(torch, name), int(np.prod(shape))
    raw = torch.arange(size * dtype.itemsize, dtype=torch.int64).remainder(2 if name == "bool" else 251)
    host = raw.to(torch.uint8).view(dtype)[:size].reshape(shape) if size else torch.zeros(shape, dtype=dtype)
    tensor = host.cuda()
    device = array_module(1)[1]
    assert device is not None
    with device.on(device.new_stream()):
        encoded = encode([tensor, tensor.t() if len(shape) == 2 else tensor], stays=True)
        assert encoded.digest == encode([host, host.t() if len(shape) == 2 else host]).digest
        assert len(device_buffers(encoded)) == (2 if tensor.nbytes >= 64 << 10 else 0)
        tensor.zero_()
        back, turned = decode(encoded, device=device)
        free = torch.cuda.memory_allocated()
        assert back.is_cuda and back.dtype is dtype and back.shape == host.shape
        if size:
            one, wanted = (found.contiguous().reshape(-1).view(torch.uint8) for found in (back.cpu(), host))
            assert torch.equal(one, wanted)
        del back, turned
        assert torch.cuda.memory_allocated() < free or not size, "it was PyTorch's"


def test_tensors_of_streams_that_wait_for_no_other(torch: Any) -> None:
    """PyTorch's own streams are in no order with those of tasks, but for what is put and what arrives."""
    device = array_module(1)[1]
    assert device is not None
    size = 1 << 24
    with device.on(device.new_stream()), torch.cuda.stream(torch.cuda.Stream()):
        for number in range(30):
            tensor = torch.full((size,), float(number), device="cuda")
            for _ in range(10):
                tensor = tensor + 0.0
            encoded = encode(
                torch.complex(tensor, tensor).conj(), stays=True
            )  # conj: made for the occasion, by PyTorch
            tensor.fill_(-1.0)
            back = decode(encoded, device=device)
            del encoded
            array_module(1)[0].full((2 * size,), 7.0)  # takes the memory, where it may
            assert float(back.real.min()) == float(back.real.max()) == number
            assert float(back.imag.min()) == float(back.imag.max()) == -number


BOUNDED = """
import cupy, numpy
from taskgraph.device import cuda

cuda.bound_memory(1, 0.5, 100)
pool, (_, total) = cupy.get_default_memory_pool(), cupy.cuda.runtime.memGetInfo()
part = pool.get_limit()
assert abs(part - total // 200) < total // 1000, (part, total)
for nbytes in range(part // 4, part * 15 // 16, part // 8):
    cupy.empty(nbytes, "u1")
    assert pool.total_bytes() <= part == pool.get_limit()
held = cupy.empty(2 * part, "u1")
assert 2 * part <= pool.get_limit() <= 3 * part
asked = []
cuda.reclaimers.append(lambda nbytes: bool(asked.append(nbytes)))
try:
    cupy.empty(total, "u1")
except cupy.cuda.memory.OutOfMemoryError:
    assert asked == [total], asked
else:
    raise AssertionError("it is more than there is")
host = numpy.random.default_rng(1).random(1 << 20)
assert (cupy.asarray(host).get() == host).all()
assert cupy.get_default_pinned_memory_pool().n_free_blocks() == 0, "another one is in its place"
"""


def test_a_process_holds_its_part_of_a_device_and_more_where_it_is_free() -> None:
    done = subprocess.run([sys.executable, "-c", BOUNDED], capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr


async def test_a_device_computes_with_what_comes_over_the_network(cli: Cli) -> None:
    """Through page-locked memory, and in parts that are sent while the rest is still copied."""
    options = {"size": 3_000_000, "hashed": True}
    alone = await tg.arun(load_driver(f"{DRIVER}:relax")(**options), nodes=0)
    given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    around = ("--nodes", "3", "--listen", "127.0.0.1", "--json", *given)
    done = await cli("run", f"{DRIVER}:relax", *around, RELAX_REMOTE="1")
    assert done.code == 0, done.err
    across = json.loads(done.out.splitlines()[-1])["values"]
    assert {int(task): value for task, value in across.items()} == alone.values
    assert "CUDA copies through its own" not in done.err
    await cli.nothing_left()


async def ring(cli: Cli, nodes: int, kind: str, times: int) -> Done:
    marks = cli.root / f"marks-{kind}-{times}"
    marks.mkdir()
    driver, given = str(DRIVER.with_name("device_errors.py")), (f"marks={marks}", f"kind={kind}", f"times={times}")
    options = [part for option in given for part in ("-o", option)]
    return await cli("run", driver, "--nodes", str(nodes), "--json", "--name", f"{kind}{times}", *options)


@pytest.mark.parametrize(
    ("kind", "error"), [("memory", "OutOfMemoryError"), ("address", "cudaErrorIllegalAddress"), ("lent", "")]
)
async def test_an_error_of_the_device_ends_the_process_and_the_task_goes_on(cli: Cli, kind: str, error: str) -> None:
    """Also a write to an item of another process, whose memory is mapped to be read."""
    calm = await ring(cli, 3, kind, 0)
    assert calm.code == 0, calm.err
    wrong = await ring(cli, 4, kind, 1)
    assert wrong.code == 0, wrong.err
    one, other = (json.loads(done.out.splitlines()[-1]) for done in (calm, wrong))
    assert one["values"] == other["values"]
    assert "task 1 met an error of its device in 'mix', epoch 2: " in wrong.err and error in wrong.err
    await cli.nothing_left()


async def test_a_task_that_always_meets_one_fails_the_job_with_the_reason(cli: Cli) -> None:
    done = await ring(cli, 5, "memory", 100)
    assert done.code == 1
    assert "task 1, epoch 2, 'mix': OutOfMemoryError: Out of memory allocating 1,125,899,906,842,624 bytes" in done.err
    assert "(device_failures=2)" in done.err and "cupy.empty(1 << 50" in done.err
    await cli.nothing_left()
