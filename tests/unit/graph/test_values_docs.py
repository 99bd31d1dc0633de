"""The page for users says what is so."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "values.md"


def test_the_examples_run_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert len(blocks) == 4
    for block in blocks:
        module = types.ModuleType("values_page")
        monkeypatch.setitem(sys.modules, "values_page", module)
        namespace: dict[str, Any] = module.__dict__
        exec(compile(block, str(PAGE), "exec"), namespace)
