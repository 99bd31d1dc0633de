"""Files at paths that a user chose: nothing else that is there is destroyed."""

from __future__ import annotations

import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from taskgraph import cli
from taskgraph.system.files import chosen_file, write_whole


def put(path: Path, data: bytes = b"new") -> None:
    with chosen_file(path) as file:
        file.write(data)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        put(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_bytes() == b"new" and mode_of(tmp_path / "new") == 0o640


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "old").chmod(0o664)
    put(tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"new" and mode_of(tmp_path / "old") == 0o664


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path: Path, there: bool) -> None:
    (tmp_path / "big").mkdir()
    if there:
        (tmp_path / "big" / "real").write_text("old")
    (tmp_path / "link").symlink_to("big/real")
    put(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "big" / "real").read_bytes() == b"new"
    assert os.listdir(tmp_path / "big") == ["real"]


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_gets_it_and_stays(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    put(tmp_path / name, b"x" * 200_000)
    reader.join(10)
    assert got == [b"x" * 200_000] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_is_given_up_leaves_all_as_it_was(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody reads it: to open it would hang
    (tmp_path / "old").write_text("old")
    for name in ("pipe", "old", "new"):
        with pytest.raises(ArithmeticError), chosen_file(tmp_path / name) as file:
            file.write(b"half")
            raise ArithmeticError
    assert sorted(os.listdir(tmp_path)) == ["old", "pipe"] and (tmp_path / "old").read_text() == "old"


def test_where_no_trace_can_be_written_is_told_before_anything_is_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("no/where")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")

    def said(name: str) -> str:
        assert cli.main(["trace", "nobody", "-o", str(tmp_path / name)]) == 2
        return capsys.readouterr().err

    assert f"--output {tmp_path}: it is a directory" in said("")
    assert f"there is no directory {tmp_path / 'no'}" in said("no/t.json")
    assert f"there is no directory {tmp_path / 'no'}" in said("link")
    assert f"--output {tmp_path / 'loop'}: " in said("loop")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever is root may do anything
    assert f"no file can be made in {tmp_path}" in said("t.json")
    assert "it may not be written to" in said("pipe")


def test_full_disk_leaves_the_earlier_file(tmp_path: Path) -> None:
    path, limits = tmp_path / "job.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_whole(path, b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            write_whole(path, b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["job.json"]
