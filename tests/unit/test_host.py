"""What the host says of itself, from files like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskgraph.system import host


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


@pytest.mark.parametrize(
    ("own", "limits"),
    [
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": "65536", "memory.max": "131072"}),
        ("0::/elsewhere", {"memory.max": "65536"}),  # in a container it is mounted as the root
        ("4:hugetlb,memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "65536"}),
        (
            "4:memory:/job",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/job/memory.limit_in_bytes": "65536"},
        ),
    ],
)
def test_memory_is_what_the_control_group_allows(tmp_path: Path, own: str, limits: dict[str, str]) -> None:
    """What is a small part of a large host is all that a container has: the kernel killed nodes for what they kept."""
    (tmp_path / "own").write_text(f"{own}\n")
    there = host.memory_bytes(tmp_path / "own", tmp_path / "mounted")
    assert there == host.memory_bytes(tmp_path / "nowhere") > 65536
    for file, limit in limits.items():
        path = tmp_path / "mounted" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    assert host.memory_bytes(tmp_path / "own", tmp_path / "mounted") == 65536


def test_memory_is_the_hosts_where_the_control_group_allows_more(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{1 << 60}\n")
    assert host.memory_bytes(tmp_path / "own", tmp_path) == host.memory_bytes(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/cpu.max": "200000 100000"}, 2),
        ("0::/job/step", {"job/step/cpu.max": "400000 100000", "cpu.max": "300000 100000"}, 3),
        ("0::/elsewhere", {"cpu.max": "150000 100000"}, 2),  # in a container it is mounted as the root
        ("0::/job", {"job/cpu.max": "5000 100000"}, 1),
        ("0::/job", {"job/cpu.max": "max 100000"}, 64),
        ("0::/job", {"job/cpu.max": "10000000 100000"}, 64),
        ("0::/job", {"job/cpu.max": "200000 0"}, 64),
        ("5:cpu,cpuacct:/job\n0::/", {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "50000"}, 5),
        ("5:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 64),
        ("5:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "200000"}, 64),
        ("0::/", {}, 64),
    ],
)
def test_cores_are_as_many_as_the_quota_of_the_control_group_suffices_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], expected: int
) -> None:
    """Of a large machine a container has two cores' time, say, on whichever of its cores: no affinity says so."""
    monkeypatch.setattr(host, "cores", lambda: 64)
    (tmp_path / "own").write_text(f"{own}\n")
    for file, said in files.items():
        path = tmp_path / "mounted" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{said}\n")
    assert host.allowed_cores(tmp_path / "own", tmp_path / "mounted") == expected
