"""A job's checkpoints: complete only when they are, refused by name, the one before used, the old ones removed."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from taskgraph.checkpoint import CheckpointName, CheckpointStore, ExpectedJob, Manifest
from taskgraph.checkpoint.files import FileInfo
from taskgraph.checkpoint.manifest import ChangedDriver, ChangedJob
from taskgraph.checkpoint.places import Directory, check_url, open_place
from taskgraph.errors import CheckpointError, JobError
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded

EXPECTED = ExpectedJob(job="fit", fingerprint="f1", tasks=3)


def boundary(number: float) -> Encoded:
    return encode({"state": {"theta": np.full(2000, number)}, "numbers": {}, "log": {}})


def save(
    store: CheckpointStore, epoch: int, before: tuple[str, ...] = (), *, attempt: int = 1, series: int = 1
) -> Manifest:
    """A complete checkpoint of tasks 0 and 2; task 1 has no state."""
    name = CheckpointName(series, attempt, epoch, "r1")
    files = [store.write(name, task, boundary(epoch + task)) for task in (0, 2)]
    manifest = store.make_manifest(name, files, before)
    store.stage(manifest)
    store.finish(str(name))
    return manifest


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "file":
        yield CheckpointStore(f"file://{tmp_path}/check%20points", EXPECTED)
        return
    yield CheckpointStore(f"memory://bucket/{uuid.uuid4().hex}", EXPECTED)


def theta(value: Encoded | None) -> float:
    assert value is not None
    return float(decode(value)["state"]["theta"][0])


def test_what_is_written_is_read(store: CheckpointStore) -> None:
    save(store, 10)
    (name,) = store.complete_names()
    manifest = store.open(str(name))
    assert (manifest.parsed_name.epoch, manifest.parsed_name.attempt) == (10, 1)
    assert theta(store.read(manifest, 0)) == 10
    assert store.read(manifest, 1) is None
    assert theta(store.read(manifest, 2)) == 12
    store.verify(manifest)


def test_unseen_files(store: CheckpointStore) -> None:
    name = CheckpointName(1, 1, 10, "r1")
    written, missing = store.write(name, 0, boundary(1)), FileInfo(1, 100, "")
    assert store.find_damaged(store.make_manifest(name, [written])) == []
    longer = FileInfo(0, written.size + 1, written.digest)
    found = store.find_damaged(store.make_manifest(name, [longer, missing]))
    assert [info for info, _ in found] == [longer, missing]
    assert f"task-000000.safetensors has {written.size} bytes there, not {written.size + 1}" in found[0][1]
    assert "task-000001.safetensors is not there" in found[1][1]
    (info, _), *_ = store.find_damaged(store.make_manifest(CheckpointName(1, 1, 20, "r1"), [written]))
    assert info == written, "where not even the directory is there"


def test_nothing_is_there_at_first(store: CheckpointStore) -> None:
    assert store.complete_names() == []
    assert store.highest_series_and_attempt() == (0, 0)
    assert store.keep_only([], "s0001-a000001-e000000010-r1") == []


def test_complete_after_finish(store: CheckpointStore) -> None:
    name = CheckpointName(1, 1, 10, "r1")
    info = store.write(name, 0, boundary(1))
    assert store.complete_names() == []
    with pytest.raises(CheckpointError, match=r"manifest.staged.json is missing"):
        store.finish(str(name))
    store.stage(store.make_manifest(name, [info]))
    assert store.complete_names() == []
    assert theta(store.read(store.open(str(name)), 0)) == 1  # the pointer may name it already
    store.finish(str(name))
    store.finish(str(name))
    assert store.complete_names() == [name]


def test_order_of_names(store: CheckpointStore) -> None:
    for epoch, attempt, series in ((30, 1, 1), (20, 2, 1), (10, 1, 2), (20, 1, 1)):
        save(store, epoch, attempt=attempt, series=series)
    assert [(n.series, n.attempt, n.epoch) for n in store.complete_names()] == [
        (2, 1, 10),
        (1, 2, 20),
        (1, 1, 30),
        (1, 1, 20),
    ]
    assert store.highest_series_and_attempt() == (2, 2)


def test_begun_series(store: CheckpointStore) -> None:
    first = save(store, 30)
    store.note_series(2, "r2")
    assert store.highest_series_and_attempt() == (2, 1)
    assert store.complete_names() == [first.parsed_name], "what was there stays"
    store.keep_only([], first.name)
    assert store.highest_series_and_attempt() == (2, 1), "an earlier run that still writes does not undo it"
    second = save(store, 10, series=2)
    assert store.keep_only([], second.name) == [first.name]
    assert store.highest_series_and_attempt() == (2, 1)
    store.note_series(3, "r3")
    assert store.highest_series_and_attempt() == (3, 1)


def test_names_are_their_directories() -> None:
    name = CheckpointName(3, 12, 40, "ab12")
    assert CheckpointName.parse(str(name)) == name
    for text in ("", "x", "s1-a1-e1-r", "manifest.json", str(name) + "/..", "s0001-a000001-e000000001-"):
        assert CheckpointName.parse(text) is None


def test_older_checkpoint_is_used(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    names = [save(store, epoch).name for epoch in (10, 20, 30, 40)]
    (tmp_path / "fit" / names[3] / "task-000002.safetensors").unlink()
    torn = tmp_path / "fit" / names[2] / "task-000000.safetensors"
    torn.write_bytes(torn.read_bytes()[:5000])
    manifest = tmp_path / "fit" / names[1] / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"tasks": 3', b'"tasks": 4'))
    (tmp_path / "fit" / names[1] / "manifest.staged.json").unlink()
    found = store.find_newest(str(n) for n in store.complete_names())
    assert found.manifest is not None
    assert found.manifest.name == names[0]
    assert [reason.partition(" is ")[0].removeprefix(f"{tmp_path}/fit/") for reason in found.refused] == [
        f"{names[3]}/task-000002.safetensors",
        f"{names[2]}/task-000000.safetensors",
        f"{names[1]}/manifest.json",
    ]
    assert "missing" in found.refused[0]
    assert "torn" in found.refused[1]
    assert "corrupt" in found.refused[2]


@pytest.mark.parametrize(
    ("file", "became"),
    [("manifest.json", "huge"), ("task-000002.safetensors", "pipe"), ("task-000002.safetensors", "endless")],
)
def test_wrong_kinds_of_files(tmp_path: Path, file: str, became: str) -> None:
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    good, bad = (save(store, epoch) for epoch in (10, 20))
    path = tmp_path / "fit" / bad.name / file
    if became == "huge":
        os.truncate(path, 1 << 42)  # sparse
        told = rf"{path} cannot be read: it has {1 << 42} bytes, and the checkpoint's at most \d+"
    else:
        path.unlink()
        os.mkfifo(path) if became == "pipe" else path.symlink_to("/dev/zero")
        told = rf"{path} cannot be read: it is no regular file"
    path.with_name("manifest.staged.json").unlink()  # as good as the other
    found = store.find_newest([bad.name, good.name])
    assert found.manifest == good
    (refused,) = found.refused
    assert re.fullmatch(told, refused)


def test_fsspec_reads_within_limit() -> None:
    store = CheckpointStore(f"memory://bucket/{uuid.uuid4().hex}", EXPECTED)
    good, bad = (save(store, epoch) for epoch in (10, 20))
    place: Any = store._place
    with place._fs.open(place._path(f"fit/{bad.name}/task-000000.safetensors"), "ab") as file:
        file.write(b"more")
    found = store.find_newest([bad.name, good.name])
    assert found.manifest == good
    assert re.search(r"cannot be read: it has more than \d+ bytes", found.refused[0])


def test_no_memory_for_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    manifest = save(store, 10)

    def full(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr("taskgraph.checkpoint.store._PAUSES_S", ())
    monkeypatch.setattr(np, "fromfile", full)
    with pytest.raises(CheckpointError, match=r"task-000000.safetensors cannot be read: .*no memory for its \d+ bytes"):
        store.read(manifest, 0)


def test_unlistable_checkpoint(tmp_path: Path) -> None:
    """A directory of another user's, or on a bad block: no checkpoint could be used for it, whatever else was there."""
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    good = save(store, 10).name
    bad = str(CheckpointName(1, 1, 20, "r1"))
    (tmp_path / "fit" / bad).write_text("what cannot be listed, for root neither")
    names = [str(name) for name in store.complete_names()]
    assert names == [bad, good]
    found = store.find_newest(names)
    assert found.manifest is not None and found.manifest.name == good
    assert len(found.refused) == 1 and bad in found.refused[0]


def test_order_of_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host that loses its power just then, too, a checkpoint that is complete is whole."""
    steps: list[object] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        about = os.fstat(descriptor)
        steps.append("directory" if stat.S_ISDIR(about.st_mode) else about.st_size)
        fsync(descriptor)

    def renamed(before: Path, after: Path) -> None:
        steps.append(after.name)
        replace(before, after)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    Directory(tmp_path).write("fit/0", [b"state", b" of task 0"])
    assert steps == [15, "0", "directory"]


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"3", b'"a text"', b'{"format": ', b"[" * 100_000])
def test_file_that_is_no_manifest(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^where it is is torn or corrupt: "):
        Manifest.from_bytes(data, path="where it is")


def test_torn_final_manifest(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    name = save(store, 10).name
    (tmp_path / "fit" / name / "manifest.json").write_bytes(b"{")
    assert store.open(name).name == name
    (tmp_path / "fit" / name / "manifest.staged.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match=r"manifest.json is torn or corrupt"):
        store.open(name)


@pytest.mark.parametrize(
    ("expected", "kind", "text"),
    [
        (ExpectedJob(job="fit", fingerprint="f2", tasks=3), ChangedDriver, "or taskgraph was changed since)"),
        (
            ExpectedJob(job="fit", fingerprint="local", tasks=3),
            ChangedDriver,
            "(a job in one process, nodes=0, cannot use",
        ),
        (ExpectedJob(job="fit", fingerprint="f1", tasks=4), ChangedJob, "(the number of tasks was changed)"),
        (
            ExpectedJob(job="fit", fingerprint="f2", tasks=4),
            ChangedJob,
            "was changed since), and tasks is 3, here it is 4",
        ),
        (ExpectedJob(job="fit", fingerprint="f2", tasks=4, any_driver=True), ChangedJob, "foreign: tasks is 3"),
        (ExpectedJob(job="fit", fingerprint="f1", tasks=3, epochs=10), CheckpointError, "(epochs=11 would have)"),
    ],
)
def test_checkpoint_of_changed_job(
    tmp_path: Path, expected: ExpectedJob, kind: type[CheckpointError], text: str
) -> None:
    name = save(CheckpointStore(str(tmp_path), EXPECTED), 10).name
    found = CheckpointStore(str(tmp_path), expected).find_newest([name])
    assert found.manifest is None and found.kinds == {kind}
    assert text in found.refused[0]


@pytest.mark.parametrize(
    "expected",
    [
        ExpectedJob(job="fit", fingerprint="local", tasks=3, any_driver=True),
        ExpectedJob(job="fit", fingerprint="f1", tasks=3, epochs=11),
    ],
)
def test_checkpoint_of_accepted_job(tmp_path: Path, expected: ExpectedJob) -> None:
    name = save(CheckpointStore(str(tmp_path), EXPECTED), 10).name
    store = CheckpointStore(str(tmp_path), expected)
    found = store.find_newest([name])
    assert found.manifest is not None and found.manifest.fingerprint == "f1"
    assert store.read(found.manifest, 2) is not None


def test_checkpoint_of_an_earlier_format(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    manifest = save(store, 10)
    for file in (tmp_path / "fit" / manifest.name).glob("manifest*.json"):
        file.write_text(file.read_text().replace("taskgraph checkpoint 5", "taskgraph checkpoint 4"))
    with pytest.raises(
        CheckpointError, match=r"by another taskgraph, 0\..*: its format is '.* 4', and .* reads '.* 5'"
    ):
        store.open(manifest.name)


def test_renamed_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    name = save(store, 10).name
    other = name.replace("e000000010", "e000000020")
    os.rename(tmp_path / "fit" / name, tmp_path / "fit" / other)
    with pytest.raises(CheckpointError, match="foreign: its manifest is that of"):
        store.open(other)
    os.rename(tmp_path / "fit", tmp_path / "fat")
    with pytest.raises(CheckpointError, match="foreign: job is fit, here it is fat"):
        CheckpointStore(f"file://{tmp_path}", ExpectedJob(job="fat", fingerprint="f1", tasks=3)).open(other)


def test_old_checkpoints_are_removed(store: CheckpointStore) -> None:
    names = [save(store, epoch).name for epoch in (10, 20, 30)]
    unfinished = CheckpointName(1, 1, 25, "r0")
    store.write(unfinished, 0, boundary(0))
    being_written = CheckpointName(1, 1, 40, "r1")
    store.write(being_written, 0, boundary(0))
    assert store.keep_only(names[1:], names[2]) == [names[0], str(unfinished)]
    assert [str(n) for n in store.complete_names()] == [names[2], names[1]]
    assert store.highest_series_and_attempt() == (1, 1)
    assert being_written in store._names()


def test_manifest_is_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does that may be killed in between, and who goes on from what is left must not take it for whole."""
    store, real = CheckpointStore(f"file://{tmp_path}", EXPECTED), Directory.remove
    names = [save(store, epoch).name for epoch in (10, 20)]
    complete: list[list[CheckpointName]] = []

    def remove(self: Directory, path: str) -> None:
        if path.endswith(names[0]):
            complete.append(store.complete_names())
        real(self, path)

    monkeypatch.setattr(Directory, "remove", remove)
    assert store.keep_only(names[1:], names[1]) == names[:1]
    assert [[str(name) for name in at] for at in complete] == [names[1:]]


def test_unremovable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old one of another user's, say: all that came after it stayed, too, until the disk was full."""
    real = Directory.remove

    def remove(self: Directory, path: str) -> None:
        if "-e000000010-" in path:
            raise PermissionError(13, "Permission denied", path)
        real(self, path)

    monkeypatch.setattr(Directory, "remove", remove)
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    names = [save(store, epoch).name for epoch in (10, 20, 30, 40)]
    with pytest.raises(PermissionError, match="-e000000010-"):
        store.keep_only(names[3:], names[3])
    assert [str(n) for n in store.complete_names()] == [names[3], names[0]]


def test_other_files_stay(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    name = save(store, 10).name
    (tmp_path / "fit" / "notes.txt").write_text("mine")
    (tmp_path / "fit" / "s1").mkdir()
    store.keep_only([], "s9999-a000001-e000000010-r1")
    assert sorted(os.listdir(tmp_path / "fit")) == ["notes.txt", "s1"]
    assert name


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """A real ENOSPC or EFBIG: the file's size is limited by the kernel."""
    script = f"""
        import resource, signal, sys
        from tests.unit.checkpoint.test_store import EXPECTED, CheckpointName, CheckpointStore, encode, np, save
        store = CheckpointStore("file://{tmp_path}", EXPECTED)
        save(store, 10)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        big = encode({{"state": np.zeros(1_000_000), "numbers": {{}}, "log": {{}}}})
        try:
            store.write(CheckpointName(1, 1, 20, "r1"), 0, big)
        except OSError as error:
            print(error)
    """
    done = python(script)
    assert "File too large" in done.stdout
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    assert [n.epoch for n in store.complete_names()] == [10]
    assert os.listdir(tmp_path / "fit" / "s0001-a000001-e000000020-r1") == []


def test_discard(store: CheckpointStore) -> None:
    whole, failed = save(store, 10), CheckpointName(1, 1, 20, "r1")
    store.discard(failed)  # nothing was
    store.write(failed, 0, boundary(0))
    store.discard(failed)
    assert store.names_of_other_runs("", ()) == [whole.parsed_name]
    assert store.find_newest([whole.name]).refused == ()


@pytest.mark.parametrize("finished", [True, False])
def test_discard_keeps_complete_checkpoint(store: CheckpointStore, finished: bool) -> None:
    """One that had stood still gave it up, and removed the newest checkpoint of the job."""
    name = CheckpointName(1, 1, 20, "r1")
    store.stage(store.make_manifest(name, [store.write(name, 0, boundary(0))]))
    if finished:
        store.finish(str(name))
    store.discard(name)
    assert store.find_newest([str(name)]).refused == ()


def test_discard_stops_at_completion(store: CheckpointStore) -> None:
    """It is looked at before each file, as is whether whoever removes it still may."""
    name, asked = CheckpointName(1, 1, 20, "r1"), []
    for task in range(3):
        store.write(name, task, boundary(task))

    def still() -> bool:
        asked.append(name)
        if len(asked) == 2:
            store.stage(store.make_manifest(name, [store.write(name, task, boundary(task)) for task in (1, 2)]))
        return True

    store.discard(name, still)
    assert len(asked) == 2
    assert store.find_newest([str(name)]).refused == ()


def test_what_is_removed_is_listed_once(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store was asked for a listing before each file: of 500 tasks 500, of up to 500 files."""
    name, place, listed = CheckpointName(1, 1, 20, "r1"), store._place, []
    for task in range(20):
        store.write(name, task, boundary(task))
    names = place.names

    def listing(path: str) -> list[str]:
        listed.append(path)
        return names(path)

    monkeypatch.setattr(place, "names", listing)
    store.discard(name)
    assert names(f"fit/{name}") == []
    assert len(listed) <= 2  # an object store's folder is looked at once more, whether it is empty


def test_discard_stops_without_right(tmp_path: Path) -> None:
    store, name = CheckpointStore(f"file://{tmp_path}", EXPECTED), CheckpointName(1, 1, 20, "r1")
    store.write(name, 0, boundary(0))
    store.discard(name, lambda: False)
    assert os.listdir(tmp_path / "fit" / str(name)) == ["task-000000.safetensors"]


def test_discard_keeps_files_being_written(tmp_path: Path) -> None:
    store, name = CheckpointStore(f"file://{tmp_path}", EXPECTED), CheckpointName(1, 1, 20, "r1")
    store.write(name, 0, boundary(0))
    beside = tmp_path / "fit" / str(name) / ".task-000002.safetensors.abc.tmp"
    beside.touch()
    store.discard(name)
    assert os.listdir(beside.parent) == [beside.name]


def test_sweep(tmp_path: Path) -> None:
    """What a writer that was killed left in it stayed, and so its directory did."""
    store, name = CheckpointStore(f"file://{tmp_path}", EXPECTED, by="a1"), CheckpointName(1, 1, 20, "r1")
    folder, asked = tmp_path / "fit" / str(name), []

    def writes(task: int, by: str) -> bool:
        asked.append((task, by))
        return by == "a1"

    def parts() -> Iterator[bytes]:
        """One is killed half way, one is at it."""
        yield b"x"
        (beside,) = folder.glob(".task-000000.*.tmp")
        (folder / ".task-000001.safetensors.b2.0123456789ab.tmp").touch()
        (folder / ".manifest.staged.json.b2.0123456789ab.tmp").touch()
        (folder / ".nfs0001").touch()
        store.stage(store.make_manifest(name, [store.write(name, 2, boundary(0))]))
        store.remove_unfinished(name, writes, lambda: False)
        assert len(list(folder.iterdir())) == 6
        store.remove_unfinished(name, writes)
        assert sorted(folder.iterdir()) == sorted([beside, folder / ".nfs0001"])

    store._place.write(f"fit/{name}/task-000000.safetensors", parts())
    assert set(asked) == {(0, "a1"), (1, "b2")}
    (folder / ".nfs0001").unlink()
    store.remove_unfinished(name, writes)
    assert not folder.exists()


def test_sweep_keeps_complete_checkpoint(store: CheckpointStore) -> None:
    whole = save(store, 10)
    store.remove_unfinished(whole.parsed_name, lambda task, by: False)
    assert store.find_newest([whole.name]).refused == ()
    assert (
        store.names_of_run(1, "r1") == [whole.parsed_name]
        and store.names_of_run(2, "r1") == store.names_of_run(1, "r2") == []
    )


def test_directory_removed_before_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, name, real = CheckpointStore(f"file://{tmp_path}", EXPECTED), CheckpointName(1, 1, 20, "r1"), Path.mkdir
    made: list[Path] = []

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        real(path, *arguments, **options)
        if not made:
            made.append(path)
            store.discard(name)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    store.write(name, 0, boundary(0))
    assert store.names_of_other_runs("", ()) == [name]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_full_file_system(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", mounted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr}")
    try:
        store = CheckpointStore(f"file://{mounted}", EXPECTED)
        name = save(store, 10).name
        big = encode({"state": np.zeros(100_000), "numbers": {}, "log": {}})
        with pytest.raises(OSError, match="No space left"):
            store.write(CheckpointName(1, 1, 20, "r1"), 0, big)
        assert store.find_newest([name]).refused == ()
        store.write(CheckpointName(1, 1, 20, "r1"), 0, boundary(0))  # what it had written of the big one is gone again
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_writer_that_was_killed_half_way(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from tests.unit.checkpoint.test_store import EXPECTED, CheckpointName, CheckpointStore, Directory, save
        store = CheckpointStore("file://{tmp_path}", EXPECTED)
        save(store, 10)
        def parts():
            yield b"x" * 5000
            os.kill(os.getpid(), signal.SIGKILL)
        store._place.write("fit/s0001-a000001-e000000020-r1/task-000000.safetensors", parts())
    """
    done = python(script, check=False)
    assert done.returncode == -signal.SIGKILL
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED)
    assert [n.epoch for n in store.complete_names()] == [10]
    (left,) = os.listdir(tmp_path / "fit" / "s0001-a000001-e000000020-r1")
    assert left.endswith(".tmp")
    save(store, 30)
    newest = save(store, 30).name
    store.keep_only([newest], newest)
    assert os.listdir(tmp_path / "fit") == [newest]


def python(script: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=check,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    place = Directory(tmp_path)

    def slow() -> Iterator[bytes]:
        yield b"a" * 1000
        place.write("f", [b"b" * 3000])
        yield b"a" * 1000

    place.write("f", slow())
    assert bytes(place.read("f", 2000)) == b"a" * 2000
    assert os.listdir(tmp_path) == ["f"]


def test_directory_removed_during_write(tmp_path: Path) -> None:
    place = Directory(tmp_path)

    def removed() -> Iterator[bytes]:
        yield b"a" * 1000
        place.remove("name")

    with pytest.raises(OSError, match=rf"^{tmp_path}/name was removed while f was written there"):
        place.write("name/f", removed())
    place.write("name/f", [b"x"])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc, where nobody makes a directory")
def test_directory_that_cannot_be_made() -> None:
    with pytest.raises(OSError, match="No such file or directory: '/proc/no-place'"):
        Directory(Path("/proc/no-place")).write("name/f", [b"x"])


def test_what_other_runs_wrote_is_found(store: CheckpointStore) -> None:
    mine, *others = (
        CheckpointName(2, 1, 10, "mine"),
        CheckpointName(1, 1, 40, "early"),
        CheckpointName(1, 1, 50, "early"),
        CheckpointName(3, 1, 5, "late"),
    )
    assert store.names_of_other_runs("mine", ()) == []
    for name in (*others, mine):
        store.write(name, 0, boundary(1))
    assert store.names_of_other_runs("mine", ()) == others
    assert store.names_of_other_runs("mine", [str(others[0])]) == others[1:]


def test_url_of_fsspec() -> None:
    check_url("memory://x")


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("file://", "ck#1?a"),
        ("FILE://", "ck?"),
        ("file://localhost", "#?"),
        ("local://", "a b"),
        ("", "x;y=1"),
        ("", "ü"),
        ("", "~"),
    ],
)
def test_path_of_url(prefix: str, name: str, tmp_path: Path) -> None:
    """Paths were cut at a # or a ?, so different places were the same."""
    open_place(f"{prefix}{tmp_path}/{name}").write("f", [b"x"])
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("url", "suggested"),
    [
        ("check points", "file:///w/check%20points"),
        ("./ck/../x", "file:///w/x"),
        ("file:ck", "file:///w/ck"),
        ("file://scratch/x", "file:///w/scratch/x"),
        ("file://localhosts/x", "file:///w/localhosts/x"),
        ("~/ck", "file:///home/me/ck"),
        ("file://~/ck", "file:///home/me/ck"),
        ("file:///~/ck", "file:///home/me/ck"),
        ("/~", "file:///home/me"),
        ("file:///a%00b", "file:///scratch/checkpoints"),
        ("/a\ud800b", "file:///scratch/checkpoints"),
    ],
)
def test_wrong_paths(url: str, suggested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(os, "getcwd", lambda: "/w")
    with pytest.raises(JobError, match=rf"not the whole path of a directory, as in '{suggested}'\."):
        check_url(url)


@pytest.mark.parametrize(("url", "text"), [("", "must be a URL"), ("nosuch://x", "nosuch")])
def test_wrong_urls(url: str, text: str) -> None:
    with pytest.raises(JobError, match=rf"Job\(checkpoint=.*{text}"):
        check_url(url)


def test_places_that_need_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(JobError, match=r"pip install 'taskgraph-aio\[checkpoint\]'"):
        check_url("s3://bucket/x")
    check_url("file:///scratch/x")


def test_unreachable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ftp:// and sftp:// connect when they are made: the error of their socket was all that was said."""

    def refused(url: str) -> Any:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refused)
    with pytest.raises(JobError, match=r"checkpoint='ftp://store/x'\): ConnectionRefusedError: .*Connection refused"):
        check_url("ftp://store/x")


def test_errors_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore("memory://bucket/broken", EXPECTED)
    place: Any = store._place

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("503")

    monkeypatch.setattr(place._fs, "open", refuse)
    with pytest.raises(OSError, match="RuntimeError: 503"):
        store.write(CheckpointName(1, 1, 10, "r1"), 0, boundary(1))


class Flaky(Directory):
    """A directory that cannot be read for a while."""

    failing = 0
    error: type[OSError] = TimeoutError

    def read(self, path: str, limit_bytes: int) -> memoryview:
        if self.failing:
            self.failing -= 1
            raise self.error(f"{path}: not now")
        return super().read(path, limit_bytes)


def test_transient_read_error(tmp_path: Path) -> None:
    place = Flaky(tmp_path)
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED, place=place)
    save(store, 10)
    (name,) = store.complete_names()
    place.failing = 2
    found = store.find_newest([str(name)])
    assert found.manifest is not None and found.refused == ()
    assert theta(store.read(found.manifest, 0)) == 10


def test_lasting_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.checkpoint.store._PAUSES_S", (0.001, 0.001))
    place = Flaky(tmp_path)
    store = CheckpointStore(f"file://{tmp_path}", EXPECTED, place=place)
    manifest = save(store, 10)
    place.failing = 3
    with pytest.raises(CheckpointError, match=r"task-000000.safetensors cannot be read: .*not now"):
        store.read(manifest, 0)
    assert place.failing == 0
    place.failing, place.error = 3, PermissionError
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.read(manifest, 0)
    assert place.failing == 2  # that will not change by itself
