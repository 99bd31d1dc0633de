"""tools/fuzz.py: every target reads damaged input, and what none may do is found."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "fuzz.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = load()


@pytest.mark.parametrize("name", sorted(fuzz.TARGETS))
def test_damaged_input_is_read_or_refused(name: str) -> None:
    target, seeds = fuzz.TARGETS[name]()
    for seed in seeds:
        target(seed)
    assert fuzz.fuzz_plain(fuzz.checked(target), seeds, 1500, 3) == (1500, None)


def bomb(data: bytes) -> None:
    if len(data) > 3:
        bytearray(50 << 20)


def crash(data: bytes) -> None:
    if data[:1] == b"\0":
        raise KeyError("nobody expects this")


def hang(data: bytes) -> None:
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("bad", [bomb, crash, hang])
def test_what_none_may_do_is_found(bad: fuzz.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "_SLOW_S", 0.04)
    ran, found = fuzz.fuzz_plain(fuzz.checked(bad), [b"\x01abcd"], 2000, 1)
    assert found is not None and ran < 2000


def test_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "hello", "--inputs", "500", "--plain"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    figures = json.loads(ended.stdout)
    assert figures["target"] == "hello" and figures["inputs"] == 500 and figures["findings"] == 0
    assert list(tmp_path.iterdir()) == []
