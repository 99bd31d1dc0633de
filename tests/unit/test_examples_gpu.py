"""The examples that run on CuPy and numpy alike: what they find is right, on numpy and in a strict array API.

`array_api_strict` has what the standard has and nothing else, and refuses numpy's arrays: what runs in it asks for no
more than CuPy gives. It computes with numpy, so that the results are those of numpy to the last bit.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import sys
import types
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest
from numpy.typing import NDArray
from softdevice import SoftArray, SoftDevice

import taskgraph as tg
from taskgraph.device.lookup import register_array_type
from taskgraph.driver.loading import load_driver
from taskgraph.launch import inprocess
from taskgraph.node import roles
from taskgraph.node.node import Node
from taskgraph.results import JobResult

EXAMPLES = Path(__file__).parents[2] / "examples"
GPU = ["gpu_kmeans", "gpu_regression"]
SIZES: dict[str, dict[str, Any]] = {"gpu_kmeans": {"points": 1500}, "gpu_regression": {"rows": 1500}}
Array = type(strict.asarray(0.0))


def job(example: str, **options: object) -> tg.Job:
    return load_driver(str(EXAMPLES / f"{example}.py"))(**{**SIZES[example], **options})


def module(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def nodes_have_a_strict_array_api(monkeypatch: pytest.MonkeyPatch) -> None:
    tg.arrays(strict)
    monkeypatch.setattr(roles, "array_module", lambda devices: (strict, None))


def on_host(value: Any) -> Any:
    """The same with arrays of numpy, as text and numbers that can be compared."""
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    return np.asarray(value).tolist() if isinstance(value, Array | np.ndarray) else value


def told(result: JobResult) -> tuple[Any, Any]:
    return on_host(result.value), result.reports


def test_kmeans_converges() -> None:
    result = tg.testing.run(job("gpu_kmeans", points=6000))
    shares = [module("gpu_kmeans").draw(6000, 8, 4, task, 7) for task in range(7)]
    points, around = (np.concatenate(parts) for parts in zip(*shares, strict=True))
    centroids = result.value
    distances = ((points[:, None, :] - centroids[None, :, :]) ** 2).sum(axis=2)
    nearest = distances.argmin(axis=1)
    means = np.stack([points[nearest == k].mean(axis=0) for k in range(8)])
    np.testing.assert_allclose(centroids, means, rtol=1e-12)
    assert result.reports[-1].numbers["mean_square"] == pytest.approx(distances.min(axis=1).mean())
    # Nearly all points of one center have one centroid, and it is close to their center.
    kept = [np.bincount(nearest[around == k], minlength=8).max() / (around == k).sum() for k in range(8)]
    assert min(kept) > 0.95
    squares = [report.numbers["mean_square"] for report in result.reports]
    assert squares == sorted(squares, reverse=True)
    assert 3 <= result.epochs < 100, "it ends when nothing moves"


def test_regression_finds_the_maximum() -> None:
    result = tg.testing.run(job("gpu_regression", rows=6000, columns=5))
    drawn = module("gpu_regression")
    shares = [drawn.draw(6000, 5, task, 7) for task in range(7)]
    x, y = (np.concatenate(parts) for parts in zip(*shares, strict=True))

    def gradient(weights: NDArray[Any]) -> NDArray[Any]:
        return x.T @ (1 / (1 + np.exp(-x @ weights)) - y) / len(y)

    # The likelihood has one maximum: where the gradient vanishes.
    found = result.value["coefficients"]
    assert np.abs(gradient(found)).max() < 1e-12
    assert np.abs(gradient(drawn.true_coefficients(5))).max() > 1e-3
    assert result.value["largest error, in standard errors"] < 4
    assert 4 <= result.epochs < 12, "Newton's method needs a handful"


@pytest.mark.parametrize("example", GPU)
def test_kills_change_no_bit(example: str) -> None:
    undisturbed = tg.testing.run(job(example))
    killed = tg.testing.run(job(example), kills={(0, 1): "sync", (5, 2): "processor", (1, 2): "done"}, order=2)
    assert killed.failovers >= 3
    assert told(killed) == told(undisturbed)


@pytest.mark.parametrize("example", GPU)
def test_array_api_is_enough(
    example: str, nodes_have_a_strict_array_api: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = tg.testing.run(job(example))
    killed = tg.testing.run(job(example), kills={(0, 2): "sync", (3, 1): "done"}, order=1)
    found = undisturbed.value["coefficients"] if example == "gpu_regression" else undisturbed.value
    assert type(found) is Array
    assert killed.failovers >= 2
    assert told(killed) == told(undisturbed)
    monkeypatch.undo()
    assert told(undisturbed) == told(tg.testing.run(job(example)))


class OnDevice(SoftArray):
    """An array of a device with the operators that the programs ask for."""

    def __matmul__(self, other: Any) -> Any:
        return there(self.soft, np.matmul)(self, other)

    def __rsub__(self, other: Any) -> Any:
        return there(self.soft, np.subtract)(other, self)

    def __rtruediv__(self, other: Any) -> Any:
        return there(self.soft, np.divide)(other, self)

    def __neg__(self) -> Any:
        return there(self.soft, np.negative)(self)

    def __eq__(self, other: object) -> Any:
        return there(self.soft, np.equal)(self, other)

    def __gt__(self, other: Any) -> Any:
        return there(self.soft, np.greater)(self, other)

    def __int__(self) -> int:
        return int(self.get())


register_array_type(OnDevice, lambda array: array.soft)


def there(soft: SoftDevice, function: Any) -> Any:
    """A function of numpy's as one of the device's array module, which refuses numpy's arrays."""

    def call(*args: Any, **options: Any) -> Any:
        for arg in args:
            if isinstance(arg, np.ndarray):
                raise TypeError(f"Unsupported type {type(arg)}")
        given = [
            arg.get() if isinstance(arg, SoftArray) else [part.get() for part in arg] if isinstance(arg, list) else arg
            for arg in args
        ]
        return soft.to_device(np.asarray(function(*given, **options)))

    return call


@pytest.fixture
def every_second_node_has_a_device(monkeypatch: pytest.MonkeyPatch) -> SoftDevice:
    soft = SoftDevice()
    soft.array_type = OnDevice
    xp: Any = soft.xp
    for name in ("sum", "min", "max", "abs", "exp", "log1p", "sqrt", "maximum", "argmin", "argmax", "where", "stack"):
        setattr(xp, name, there(soft, getattr(np, name)))
    xp.eye = there(soft, np.eye)
    xp.linalg = types.SimpleNamespace(solve=there(soft, np.linalg.solve), inv=there(soft, np.linalg.inv))
    number = itertools.count()

    def node(*args: Any, **options: Any) -> Node:
        return Node(*args, **{**options, "devices": next(number) % 2})

    monkeypatch.setattr(inprocess, "Node", node)
    monkeypatch.setattr(roles, "array_module", lambda devices: (xp, soft) if devices else (np, None))
    return soft


@pytest.mark.parametrize("example", GPU)
@pytest.mark.parametrize("killed", [0, 1])
def test_mixed_nodes_run_one_job(example: str, killed: int, every_second_node_has_a_device: SoftDevice) -> None:
    """What came from a node without a device, or was kept there, was numpy's, and the device's arrays refused it."""
    kills: Any = {(killed, 1): "sync", (0, 2): "done"}
    result = tg.testing.run(job(example), kills=kills, strict=False)
    expected = tg.run(job(example), nodes=0)
    assert result.failovers >= 2 and every_second_node_has_a_device.streams[1:]
    assert result.epochs == expected.epochs
    found, wanted = (value if isinstance(value, dict) else {"": value} for value in (result.value, expected.value))
    for name, array in wanted.items():
        np.testing.assert_allclose(np.asarray(on_host(found[name])), np.asarray(on_host(array)), rtol=1e-6)


def test_page_program_on_mixed_nodes(every_second_node_has_a_device: SoftDevice) -> None:
    mean = program_of_the_page()["Mean"]
    job = tg.Job(tasks=4, epochs=5, builder=mean, topology=tg.ring())
    result = tg.testing.run(job, kills={(0, 1): "sync", (1, 3): "done"}, strict=False)
    assert result.failovers >= 2 and result.epochs == 5


class Forgets(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.mix, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.xp.arange(10.0))

    def mix(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.xp.zeros(10) + ins["row"]


def test_missing_asarray_is_named(every_second_node_has_a_device: SoftDevice) -> None:
    with pytest.raises(
        tg.JobFailed, match=r"a value that a node without a device put.* self.xp.asarray\(ins\['tag'\]\)"
    ):
        tg.testing.run(tg.Job(tasks=4, epochs=1, builder=Forgets, topology=tg.ring()), strict=False)


@pytest.mark.parametrize("example", GPU)
def test_cupy_has_every_name(example: str) -> None:
    cupy = pytest.importorskip("cupy")  # it can be imported without a device
    names = {
        ast.unparse(found).removeprefix("self.").removeprefix("xp.")
        for found in ast.walk(ast.parse((EXAMPLES / f"{example}.py").read_text()))
        if isinstance(found, ast.Attribute) and ast.unparse(found).startswith(("xp.", "self.xp."))
    }
    assert names >= {"asarray", "sum"}
    for name in names:
        assert callable(attrgetter(name)(cupy)) or name == "linalg"


def program_of_the_page() -> dict[str, Any]:
    page = types.ModuleType("gpu_page")
    blocks = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "docs" / "gpu.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    sys.modules["gpu_page"] = page  # whoever defines a class looks for its module
    try:
        for block in blocks:
            exec(compile(block, "docs/gpu.md", "exec"), vars(page))
    finally:
        del sys.modules["gpu_page"]
    return vars(page)


def test_page_programs_run() -> None:
    assert program_of_the_page()["Mean"]
