"""What the host says of itself, from files like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskgraph import host


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/job", "job/memory.events"),
        ("0::/job", "memory.events"),  # in a container it is mounted as the root
        ("5:cpu,cpuacct:/other\n4:memory:/job\n0::/", "memory/job/memory.oom_control"),
        ("4:hugetlb,memory:/job", "memory/memory.oom_control"),
    ],
)
def test_processes_that_the_kernel_killed_for_their_memory_are_counted(tmp_path: Path, own: str, file: str) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    assert host.oom_kills(tmp_path / "own", tmp_path / "mounted") is None
    path = tmp_path / "mounted" / file
    path.parent.mkdir(parents=True)
    path.write_text("oom 7\nunder_oom 0\n")  # of a kernel that does not count them
    assert host.oom_kills(tmp_path / "own", tmp_path / "mounted") is None
    path.write_text("oom 7\noom_kill 3\nunder_oom 0\n")
    assert host.oom_kills(tmp_path / "own", tmp_path / "mounted") == 3


def test_a_host_without_control_groups_counts_none(tmp_path: Path) -> None:
    assert host.oom_kills(tmp_path / "nowhere") is None
