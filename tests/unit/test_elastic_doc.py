"""docs/elastic.md: its programs run, and the messages that it names are those of the code."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

import taskgraph as tg

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "elastic.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    module = types.ModuleType("elastic_page")
    monkeypatch.setitem(sys.modules, "elastic_page", module)
    for block in BLOCKS:
        exec(compile(block, "docs/elastic.md", "exec"), module.__dict__)
    module.plain()
    assert module.line and tg.run(module.line(), nodes=0).value == pytest.approx([1, 2, 3])
    assert tg.run(module.evaluated(), nodes=0).value > 0.3
    assert tg.run(module.fitted(), nodes=0).value < 0.8
    for job in (module.drawn(), module.chunks(), module.gan()):
        tg.testing.run(job)
    tg.run(module.typed(), nodes=0)


def test_messages_are_those_of_the_code() -> None:
    files = (file.read_text("utf-8") for file in (ROOT / "taskgraph").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(files))
    table = PAGE.split("## Errors and what to do")[1].split("\n## ")[0]
    named = [text for row in re.findall(r"^\| (.+?) \|", table, re.M)[2:] for text in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 12
    for text in named:
        words = max(re.split(r"\.\.\.|[\d()'=]+| n\d|: \w+$", text), key=len).strip(" .,")
        assert words in source, f"the code does not say {words!r}"
