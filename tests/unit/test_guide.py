"""docs/guide.md makes examples/heat.py, and what it says of it is so."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.driver.loading import load_driver

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "examples" / "heat.py").read_text("utf-8")
PAGE = (ROOT / "docs" / "guide.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
TESTS = [block for block in BLOCKS if "tg.testing.run" in block]
TOLD = [re.sub(r"\s+", " ", text.strip()) for text in re.findall(r"\n\n((?:    .+\n)+)", PAGE)]


HEAT = load_driver(str(ROOT / "examples" / "heat.py"))
ALONE = HEAT.__wrapped__.__globals__["alone"]


def lines(text: str) -> list[str]:
    """Methods are shown without their class, so without its indentation."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_it_shows_all_of_the_example() -> None:
    shown = "".join(block for block in BLOCKS if block not in TESTS)
    assert lines(shown) == lines(EXAMPLE[EXAMPLE.index("import numpy") :])


def test_its_tests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert len(TESTS) == 2
    namespace = ModuleType("guide").__dict__
    for block in TESTS:
        exec(compile(block, "docs/guide.md", "exec"), namespace)


def no_task(text: str) -> str:
    return re.sub(r"task \d", "task N", text)


@pytest.mark.parametrize(("right", "wrong"), [
    ('state=["cells", "change"]', 'state=["cells"]'),
    ('edges = {"up": "south"', 'edges = {"up": "north"'),
])  # fmt: skip
def test_its_mistakes_are_told_in_the_words_it_shows(right: str, wrong: str, tmp_path: Path) -> None:
    driver = tmp_path / "heat.py"
    driver.write_text(EXAMPLE.replace(right, wrong), "utf-8")
    with pytest.raises(tg.JobFailed) as failed:
        tg.testing.run(load_driver(str(driver))(rows=2, cols=3, size=20, tolerance=0.5))
    # Of several tasks that make it in an epoch one is told of.
    assert no_task(f"JobFailed: {failed.value}") in [no_task(text) for text in TOLD]


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 3), (3, 2)])
def test_any_grid_of_blocks_has_the_plate_of_the_loop(rows: int, cols: int) -> None:
    result = tg.testing.run(HEAT(rows=rows, cols=cols, size=11, tolerance=1.0))
    blocks = [[result.values[row * cols + col] for col in range(cols)] for row in range(rows)]
    assert (np.block(blocks) == ALONE(11, sweeps=result.epochs)).all()
    assert result.reports[-1].numbers["change"] <= 1.0 < result.reports[-2].numbers["change"]
