"""After an error of a CUDA device: which errors count, and whether the process ends, waits, or the job fails."""

from __future__ import annotations

import msgspec
import pytest
from protocol_kit import RUN, World, node_record

from taskgraph.protocol import transactions
from taskgraph.protocol.deviceloss import Decision, decide, device_error, illegal_access_hint
from taskgraph.protocol.records import CheckpointRecord, EpochRecord, GoneRecord


def class_of(module: str, name: str, *bases: type) -> type[Exception]:
    return type(name, bases or (Exception,), {"__module__": module})


OutOfMemoryError = class_of("cupy.cuda.memory", "OutOfMemoryError", MemoryError)
CUDARuntimeError = class_of("cupy_backends.cuda.api.runtime", "CUDARuntimeError", RuntimeError)


@pytest.mark.parametrize(
    ("said", "hinted"),
    [
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", True),
        ("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", True),
        ("cuMemUnmap: CUDA error 700", True),
        ("cudaErrorMemoryAllocation: out of memory", False),
        ("cuMemCreate: CUDA error 7001", False),
    ],
)
def test_illegal_access_gets_a_hint(said: str, hinted: bool) -> None:
    assert ("`ins` gave" in illegal_access_hint(CUDARuntimeError(said))) is hinted


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("too much"),
        CUDARuntimeError("cudaErrorIllegalAddress"),
        class_of("cupy_backends.cuda.api.driver", "CUDADriverError")(),
        class_of("cupy_backends.cuda.libs.cublas", "CUBLASError")(),
        class_of("cupy.cuda.cufft", "CuFFTError")(),
        class_of("torch", "OutOfMemoryError")(),
        class_of("driver", "Mine", CUDARuntimeError)(),
    ],
)
def test_errors_of_a_device_are_known_by_name(error: Exception) -> None:
    assert device_error(error) is error


@pytest.mark.parametrize(
    "error",
    [
        None,
        MemoryError("the host's"),
        RuntimeError("CUDA"),
        class_of("driver", "OutOfMemoryError")(),
        class_of("cupy_backends.cuda.libs.nvrtc", "NVRTCError")(),  # a kernel that does not compile
        class_of("cupy.cuda.compiler", "CompileException")(),
    ],
)
def test_other_errors_are_not_of_a_device(error: Exception | None) -> None:
    assert device_error(error) is None


def test_chained_device_error_counts() -> None:
    for chained in (True, False):
        try:
            try:
                raise CUDARuntimeError("illegal address")
            except RuntimeError as first:
                if chained:
                    raise ValueError("the fit failed") from first
                raise KeyError("cleaning up")  # noqa: B904
        except (ValueError, KeyError) as error:
            assert type(device_error(error)) is CUDARuntimeError


def test_circular_chain_of_errors_ends() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert device_error(one) is None


def follows(world: World, me: str = "a", task: int = 0, epoch: int = 3, **fields: object) -> Decision:
    given: dict[str, object] = {"limit": 2, "backups": 1, "needs_device": lambda task: False, **fields}
    return decide(world.view(), me, RUN, task, epoch, **given)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    """Task 0 is led by a and backed by b, task 1 the other way round; c holds nothing. They work on epoch 3."""
    world = World("a", "b", "c")
    for task, (primary, backup) in enumerate((("a", "b"), ("b", "a"))):
        world.first(task, primary)
        assert world.admit(task, primary, backup).succeeded
    world.put(world.keys.epoch, EpochRecord(epoch=3, attempt=1).to_bytes())
    return world


def end(world: World, node: str, task: int, epoch: int) -> None:
    """The node left, and said why."""
    record = GoneRecord(reason="ended its process", task=task, epoch=epoch)
    assert world.run(transactions.declare_gone(world.view(), node, record)).succeeded
    world.delete(world.keys.node(node))


def test_process_ends_if_others_have_its_tasks(world: World) -> None:
    assert follows(world) == Decision()


def test_process_first_gives_its_state_away(world: World) -> None:
    world.die("b")
    assert follows(world) == Decision(wait="another node to hold the state of task 0")
    assert world.admit(0, "a", "c").succeeded
    assert follows(world) == Decision()


def test_other_tasks_of_the_node_are_kept(world: World) -> None:
    """b met an error in task 1, and a is gone: then b leads both, alone."""
    world.die("a")
    assert world.take_over(0, "b").succeeded
    assert follows(world, "b", 1) == Decision(wait="another node to hold the state of task 0, 1")


@pytest.mark.parametrize("why", ["without state", "epoch 0", "checkpoint"])
def test_recomputable_state_needs_no_backup(why: str) -> None:
    world = World("a", "c")
    world.first(0, "a", stateful=why != "without state")
    if why == "checkpoint":
        world.put(world.keys.checkpoint, CheckpointRecord(epoch=2, attempt=1, name="x").to_bytes())
    assert follows(world, epoch=0 if why == "epoch 0" else 3, backups=0) == Decision()


def test_without_backups_the_state_would_be_lost_so_the_job_fails() -> None:
    world = World("a", "c")
    world.first(0, "a")
    assert "with backups the job would go on" in follows(world, backups=0).fail


def test_device_failures_per_epoch_are_bounded(world: World) -> None:
    world.register("d")
    world.register("e")
    end(world, "d", 0, 3)
    assert follows(world) == Decision()
    end(world, "e", 0, 3)
    assert follows(world).fail == "the same ended d and e in this epoch before (device_failures=2)"
    assert follows(world, limit=3) == Decision()
    assert follows(world, task=1) == Decision(), "of another task"
    assert follows(world, epoch=4) == Decision(), "the job came further"


def test_another_node_with_a_device_is_needed(world: World) -> None:
    assert "no other node may hold task 0" in follows(world, needs_device=lambda task: task == 0).fail
    record = msgspec.structs.replace(node_record("g"), devices=1)
    world.revisions["g"] = world.run(transactions.register(world.view(), "g", record)).revision
    assert follows(world, needs_device=lambda task: task == 0) == Decision()
    alone = World("a")
    alone.first(0, "a")
    assert follows(alone, epoch=0).fail == "no other node is there to go on"


def test_leaving_node_gets_no_task(world: World) -> None:
    world.die("b")
    record = msgspec.structs.replace(node_record("c"), draining=True)
    world.put(world.keys.node("c"), record.to_bytes())
    assert follows(world).fail == "no other node is there to go on"


def test_reason_of_the_end_is_recorded() -> None:
    record = GoneRecord(reason="ended its process, since ...", task=3, epoch=7)
    assert GoneRecord.from_bytes(record.to_bytes()) == record
    assert record.how_it_ended == "ended its process, since ..."
    assert GoneRecord.from_bytes(b'{"writer":"","reason":"killed"}').task is None, "of an older node"
