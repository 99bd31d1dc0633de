"""`tg.map` and `tg.imap` in this process: results, errors, names, what a later call goes on from."""

from __future__ import annotations

import functools
import io
import math
import random
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.graph.values import decode, encode
from taskgraph.maps.functions import find_function, make_reference
from taskgraph.maps.journal import Journal
from taskgraph.maps.records import AtWorkFile, MapRecord, RecordKind, RecordReader, RecordWriter, pack_record
from taskgraph.maps.showing import MapProgress, progress_text


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "taskgraph" / "maps").glob("*") if path.is_dir())


def test_results_are_in_order(tmp_path: Path) -> None:
    assert tg.map(lambda x: x * x, range(20), nodes=0) == [x * x for x in range(20)]
    assert tg.map(str, [], nodes=0) == []
    assert sorted(tg.imap(lambda x: -x, [3, 4], nodes=0)) == [(0, -3), (1, -4)]
    assert left(tmp_path) == []


def test_arrays_travel_and_may_be_changed() -> None:
    (found,) = tg.map(lambda x: x + 1, [np.zeros(100_000)], nodes=0)
    found += 1
    assert (found == 2).all()


def drawn(_: Any) -> tuple[float, float]:
    return random.random(), float(np.random.random())


def test_pieces_are_seeded_by_their_number() -> None:
    first, again = (tg.map(drawn, [None] * 5, nodes=0) for _ in range(2))
    assert first == again and len(set(first)) == 5


def odd(x: int) -> int:
    if x % 2 == 0:
        raise ValueError(f"{x} is even")
    return x


def test_a_piece_that_raises_is_named() -> None:
    with pytest.raises(tg.PieceFailed, match="piece 2 raised on n1, in 2 attempts") as failed:
        tg.map(odd, [1, 3, 4], nodes=0, attempts=2)
    assert (failed.value.piece, failed.value.node) == (2, "n1")
    assert "ValueError: 4 is even" in failed.value.traceback and "in odd" in failed.value.traceback


def test_pieces_are_set_aside() -> None:
    one, failed, three = tg.map(odd, [1, 2, 3], nodes=0, on_error="set aside")
    assert (one, three) == (1, 3)
    assert isinstance(failed, tg.Failed) and failed.piece == 1 and "2 is even" in failed.traceback


def test_a_piece_that_is_set_aside_comes_in_its_turn() -> None:
    came = threading.Event()

    def waits(x: int) -> int:
        if x == 0:
            raise ValueError
        assert came.wait(30)
        return x

    results = tg.imap(waits, [0, 1], nodes=0, attempts=1, on_error="set aside")
    number, failed = next(results)
    assert number == 0 and isinstance(failed, tg.Failed)
    came.set()
    assert list(results) == [(1, 1)]


def test_sys_exit_in_a_piece_is_an_error_of_the_piece() -> None:
    with pytest.raises(tg.PieceFailed, match="piece 1 raised on n1, in 1 attempts") as failed:
        tg.map(lambda x: sys.exit("no") if x == 1 else x, range(3), nodes=0, attempts=1)
    assert "SystemExit: no" in failed.value.traceback


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (tg.lines("some.txt"), r"Lines is a source: give its pieces\(\)"),
        ("*.txt", r"several pieces, not '\*\.txt'"),
        ({"a", "b"}, "no fixed order"),
        (5, "a list of pieces, not 5"),
    ],
)
def test_pieces_are_checked(pieces: Any, message: str) -> None:
    with pytest.raises(tg.JobError, match=message):
        tg.map(str, pieces, nodes=0)


def test_values_that_do_not_travel_are_named() -> None:
    with pytest.raises(tg.ValueNotEncodable, match="piece 1 of the map"):
        tg.map(str, [1, object()], nodes=0)
    with pytest.raises(tg.PieceFailed, match="the result of piece 0 of the map"):
        tg.map(lambda _: object(), [1], nodes=0)


def test_a_map_goes_on_from_what_failed(tmp_path: Path) -> None:
    broken = ["not ready"]
    computed: list[int] = []

    def fragile(x: int) -> int:
        if x == 5 and broken:
            raise OSError(broken[0])
        computed.append(x)
        return 10 * x

    with pytest.raises(tg.PieceFailed, match="not ready") as failed:
        tg.map(fragile, range(8), nodes=0, attempts=1, name="again")
    assert left(tmp_path) == ["again"] and "resume=True" in str(failed.value.__notes__)
    assert len(computed) < 8
    with pytest.raises(tg.JobError, match="other pieces"):
        tg.map(fragile, range(1, 9), nodes=0, name="again", resume=True)
    broken[0] = "no disk"
    with pytest.raises(tg.PieceFailed, match="no disk"):
        tg.map(fragile, range(8), nodes=0, attempts=1, name="again", resume=True)
    broken.clear()
    assert tg.map(fragile, range(8), nodes=0, name="again", resume=True) == [10 * x for x in range(8)]
    assert sorted(computed) == list(range(8)) and left(tmp_path) == []


def test_a_loop_that_is_left_early_ends_the_map(tmp_path: Path) -> None:
    for number, _ in tg.imap(lambda x: x, range(50), nodes=0, name="early"):
        assert number == 0
        break
    assert left(tmp_path) == ["early"]
    assert tg.map(lambda x: x, range(50), nodes=0, name="early", resume=True) == list(range(50))


def test_two_calls_of_a_name_exclude_each_other() -> None:
    first = tg.imap(lambda x: x, range(3), nodes=0, name="taken")
    next(first)
    with pytest.raises(tg.JobRunning, match="give this one another name"):
        tg.map(lambda x: x, range(3), nodes=0, name="taken")
    assert len(list(first)) == 2


def job_in_a_piece(x: int) -> Any:
    return tg.map(math.factorial, range(x), nodes=0)


def test_a_map_in_a_piece() -> None:
    assert tg.map(job_in_a_piece, [2, 3], nodes=0) == [[1, 1], [1, 1, 2]]


def job_on_nodes_in_a_piece(x: int) -> Any:
    return tg.map(math.factorial, range(x), nodes=2)


def test_no_nodes_in_a_piece() -> None:
    with pytest.raises(tg.PieceFailed, match="is started in a piece"):
        tg.map(job_on_nodes_in_a_piece, [2], nodes=0, attempts=1)


class Named:
    @staticmethod
    def method(x: int) -> int:
        return x

    def bound(self, x: int) -> int:
        return x


async def waits(x: int) -> int:
    return x


@pytest.mark.parametrize("function", [odd, math.sqrt, Named.method, tg.shard, np.linalg.norm, Path.exists])
def test_functions_are_found_by_their_names(function: Any) -> None:
    found = find_function(make_reference(function))
    assert found.__qualname__ == function.__qualname__ and found.__module__ == function.__module__


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "it is a lambda"),
        (Named().bound, "it is a method of one Named object"),
        (functools.partial(odd, 1), "a partial has no name in a module"),
        (waits, "is async"),
        (7, "takes a function"),
    ],
)
def test_functions_that_nodes_cannot_import(function: Any, message: str) -> None:
    with pytest.raises(tg.JobError, match=message):
        tg.map(function, [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": -1}, "nodes=-1"),
        ({"attempts": 0}, "attempts=0"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"nodes": 0, "resume": True}, "give it the name"),
    ],
)
def test_arguments_are_checked(options: Any, message: str) -> None:
    with pytest.raises(tg.JobError, match=message):
        tg.map(odd, [1], **options)


def record(number: int, value: Any) -> MapRecord:
    return MapRecord(RecordKind.RESULT, number, 0, encode(value))


def test_records_are_read_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "found"
    data = [pack_record(record(number, value)) for number, value in enumerate([1, "two", np.arange(2_000_000), None])]
    whole = b"".join(data)
    path.touch()
    reader, found, at = RecordReader(path), list[MapRecord](), 0
    for end in (10, len(data[0]), len(data[0]) + 30, len(whole) - 60, len(whole) - 1, len(whole)):
        with path.open("ab") as file:
            file.write(whole[at:end])
        at = end
        found += reader.read()
    assert [each.piece for each in found] == [0, 1, 2, 3] and not list(reader.read())
    assert (decode(found[2].value) == np.arange(2_000_000)).all() and decode(found[3].value) is None


def test_small_records_are_written_together(tmp_path: Path) -> None:
    writer, reader = RecordWriter(tmp_path / "found"), RecordReader(tmp_path / "found")
    writer.write(record(0, 1))
    assert not list(reader.read())
    writer.flush()
    assert len(list(reader.read())) == 1
    writer.write(record(1, 2))
    writer.write(record(2, np.zeros(100_000)))
    assert [each.piece for each in reader.read()] == [1, 2]
    writer.close()


def test_one_line_of_progress() -> None:
    text = progress_text("squares", 1200, 10_000, 530.0, 4, Counter({"ValueError": 2}), 80)
    assert text == "squares  1200/10000  12%  530 pieces/s  0:17 left  4 nodes  2 failed: 2 ValueErr"
    assert progress_text("a", 3, 3, 0.5, 0, Counter(), 80) == "a  3/3  100%  0.5 pieces/s"
    assert progress_text("a", 0, 9000, 0.5, 1, Counter(), 80) == "a  0/9000  0%  0.5 pieces/s  5:00:00 left  1 node"
    long = progress_text("name_of_a_function" * 5, 300, 600, 10.0, 2, Counter({"OSError": 1}), 80)
    assert long == "name_of_a_fu  300/600  50%  10 pieces/s  0:30 left  2 nodes  1 failed: 1 OSError"


def test_progress_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    tg.map(odd, [1, 2, 3], nodes=0, on_error="set aside", progress=True, name="odd")
    line = capsys.readouterr().err
    assert line.startswith("odd  2/3  66%") and line.endswith("1 failed: 1 ValueError\n")


def test_the_rate_leaves_out_the_start_of_nodes() -> None:
    out, now = io.StringIO(), [0.0]
    shown = MapProgress("squares", 100, 0, True, out=out, clock=lambda: now[0])
    for second in range(30):
        now[0] = float(second)
        for _ in range(10 * (second > 20)):
            shown.count_done()
        shown.tick([])
    assert out.getvalue().splitlines()[-1].startswith("squares  50/100  50%  10 pieces/s  0:05 left")


def test_worker_that_died_at_the_first_piece_is_named() -> None:
    with Journal("deaths", keep=False) as journal:
        journal.begin_anew("fn", [1, 2])
        journal.begin_job(np.arange(2))
        for worker, piece in (("n1", 0), ("n2", 1), ("n3", -1)):
            AtWorkFile(journal.folder / f"{journal.run}-{worker}.at").note(piece)
        assert journal.find_deaths() == [("n1", 0), ("n2", 1)]
