"""Sources: pieces that every node finds alike, and rows that it reads alone."""

from __future__ import annotations

import csv
import gzip
import io
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.graph.values import decode, encode
from taskgraph.sources import Source, as_source, content_of, pass_order, rows_of
from taskgraph.sources.reading import pieces_digest, pieces_of


def rows(source: Source) -> list[Any]:
    """All rows, from pieces that have travelled."""
    pieces = decode(encode(list(source.pieces())))
    return [row for piece in pieces for row in source.read(piece)]


def test_values_are_pieces_of_one_row() -> None:
    for values in (range(3), [0, 1, 2], (0, 1, 2), np.arange(3), iter([0, 1, 2])):
        source = as_source(values)
        assert list(source.pieces()) == [0, 1, 2] == rows(source)
        assert content_of(source, source.pieces()[1]) == 1


def test_an_object_with_pieces_and_read_is_a_source() -> None:
    class Squares:
        def pieces(self) -> range:
            return range(3)

        def read(self, piece: int) -> list[int]:
            return [piece, piece**2]

    source = Squares()
    assert as_source(source) is source
    assert rows(source) == [0, 0, 1, 1, 2, 4] and content_of(source, 2) == [2, 4]
    with pytest.raises(tg.JobError, match=r"not the class Squares: write Squares\(\)"):
        as_source(Squares)  # type: ignore[arg-type]


class Forgotten:
    """Its methods lack a return."""

    def pieces(self) -> Any: ...
    def read(self, piece: int) -> Any: ...


def test_a_source_without_return_is_named() -> None:
    with pytest.raises(tg.JobError, match=r"Forgotten\.pieces\(\) returned None: it has to return a list"):
        pieces_of(Forgotten())
    with pytest.raises(tg.JobError, match=r"Forgotten\.read\(piece\) returned None: it has to return or yield"):
        content_of(Forgotten(), 0)


def test_pieces_have_a_digest() -> None:
    assert pieces_digest([("a", 1), ("b", 2)]) == pieces_digest((("a", 1), ("b", 2)))
    assert pieces_digest([("a", 1), ("b", 2)]) != pieces_digest([("a", 1), ("b", 3)])
    assert pieces_digest([Path("a")]) != pieces_digest([Path("a"), Path("b")]), "what cannot travel is counted"


@pytest.mark.parametrize(
    ("wrong", "advice"), [("a.txt", r"tg\.files"), ({1, 2}, "sorted"), ({}, "fixed order"), (3, "int")]
)
def test_what_has_no_order_is_no_source(wrong: Any, advice: str) -> None:
    with pytest.raises(tg.JobError, match=advice):
        as_source(wrong)


def test_order_is_drawn_from_seed_and_pass() -> None:
    first = pass_order(100, 0, 7, True).tolist()
    assert sorted(first) == list(range(100)) == pass_order(100, 3, 7, False).tolist()
    assert first == pass_order(100, 0, 7, True).tolist()
    assert first != pass_order(100, 1, 7, True).tolist() and first != pass_order(100, 0, 8, True).tolist()
    assert pass_order(0, 0, -1, True).tolist() == []


def test_rows_are_shuffled_within_a_buffer() -> None:
    class Numbers:
        def pieces(self) -> range:
            return range(1)

        def read(self, piece: int) -> range:
            return range(100)

    plain, drawn = list(rows_of(Numbers(), 0)), list(rows_of(Numbers(), 0, buffer=10, seed=1))
    assert plain == list(range(100)) == sorted(drawn) != drawn
    assert drawn == list(rows_of(Numbers(), 0, buffer=10, seed=1)) != list(rows_of(Numbers(), 0, buffer=10, seed=2))
    assert all(row <= place + 10 for place, row in enumerate(drawn)), "a row comes at most a buffer too early"


def test_files_are_found_sorted_and_each_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.csv", "deep/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    at = str(tmp_path)
    assert rows(tg.files(f"{at}/*.txt")) == [f"{at}/a.txt", f"{at}/b.txt"]
    assert rows(tg.files(f"file://{at}/*.txt")) == [f"{at}/a.txt", f"{at}/b.txt"]
    assert rows(tg.files(tmp_path / "**" / "*.txt"))[-1] == f"{at}/deep/d.txt"
    assert rows(tg.files([f"{at}/c.csv", f"{at}/*"])) == [f"{at}/{name}" for name in ("a.txt", "b.txt", "c.csv")]
    source = tg.files(f"{at}/c.csv")
    assert content_of(source, source.pieces()[0]) == f"{at}/c.csv"


def test_file_names_may_have_signs_of_patterns(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert rows(tg.lines(tmp_path / "a[1].txt")) == ["x"]


def test_what_names_no_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tg.JobError, match=r"tg\.files\('/nowhere/\*'\): no file matches$"):
        tg.files("/nowhere/*").pieces()
    with pytest.raises(tg.JobError, match=f"no file matches in {tmp_path}, where this node runs: give the whole path"):
        tg.lines("data/*.txt").pieces()
    with pytest.raises(tg.JobError, match="~ is not expanded"):
        tg.csv("~/x.csv").pieces()
    with pytest.raises(tg.JobError, match=r"is a directory: name its files, as in '.*/\*'"):
        tg.lines(tmp_path).pieces()
    with pytest.raises(tg.JobError, match="must be a path or a URL"):
        tg.files([]).pieces()


def test_a_file_that_differs_between_nodes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for make in (tg.files, tg.lines, tg.csv):
        path.write_text("one\ntwo\n")
        source: Source = make(str(path))
        (piece,) = source.pieces()
        path.write_text("one\ntwo\nthree\n")
        with pytest.raises(
            tg.JobError, match=r"a\.txt has 14 bytes on this node, and had 8 where the pieces were made"
        ):
            list(source.read(piece))
        path.unlink()
        with pytest.raises(tg.JobError, match=r"cannot read .*a\.txt on this node: .*\n.*the same paths"):
            list(source.read(piece))


def test_files_of_a_store(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe({"/sources/a.txt": b"1\n2\n3\n", "/sources/b.txt": b"4\n"})
    try:
        url = "memory://sources/*.txt"
        assert rows(tg.files(url)) == ["memory:///sources/a.txt", "memory:///sources/b.txt"]
        assert rows(tg.lines(url, size=2)) == ["1", "2", "3", "4"]
        assert len(tg.lines(url, size=2).pieces()) == 3
        assert rows(tg.csv("memory://sources/a.txt")) == [{"1": "2"}, {"1": "3"}]
        for wrong, why in (
            ("memory://sources", "is a directory"),
            ("memory://none.txt", "no file matches"),
            ("s4://x", "s4"),
        ):
            with pytest.raises(tg.JobError, match=why):
                tg.files(wrong).pieces()
    finally:
        store.rm("/sources", recursive=True)


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_read_as_python_reads_them(tmp_path: Path, size: int, end: str) -> None:
    texts = ["one", "", "zwei ä€", "x" * 50, "last"]
    path = tmp_path / "a.txt"
    path.write_bytes("\r\n".join(texts).encode() + end.encode())
    source = tg.lines(str(path), size=size)
    assert rows(source) == texts
    assert [len(list(source.read(piece))) for piece in source.pieces()][:-1] == [size] * (-(-5 // size) - 1)


def test_pieces_of_lines_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    texts = [str(number) * (number % 97) for number in range(40_000)]  # three blocks
    path.write_text("\n".join(texts))
    assert path.stat().st_size > 8 << 20
    source = tg.lines(str(path), size=999)
    assert rows(source) == texts and len(source.pieces()) == 41


def test_compressed_file_is_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n3,4\n"))
    assert rows(tg.lines(path)) == ["a,b", "1,2", "3,4"]
    assert rows(tg.csv(path, size=1)) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert len(tg.csv(path, size=1).pieces()) == 1
    path.write_bytes(gzip.compress(b"a,b\n" * 1000)[:-20])
    with pytest.raises(tg.JobError, match=r"cannot read .*a\.csv\.gz on this node"):
        rows(tg.lines(path))


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("fine\nschön\n".encode("latin-1"))
    with pytest.raises(tg.JobError, match=r"a\.txt has a line that is not UTF-8: b'sch\\xf6n\\n' .*convert the file"):
        rows(tg.lines(tmp_path / "a.txt"))


def test_a_mark_before_the_text_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"a",b\n1,2\n')
    assert rows(tg.csv(tmp_path / "a.csv")) == [{"a": "1", "b": "2"}]
    assert rows(tg.lines(tmp_path / "a.csv", size=1)) == ['"a",b', "1,2"]


def random_table(draws: random.Random, count: int) -> list[list[str]]:
    signs = ["x", "é", ",", "\n", "\r\n", '"', '""', " ", "7"]
    return [["".join(draws.choices(signs, k=draws.randrange(6))) for _ in range(3)] for _ in range(count)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [1, 3])
def test_quoted_fields_are_never_torn(tmp_path: Path, seed: int, size: int) -> None:
    table = [["a", "b\n", 'c"'], *random_table(random.Random(seed), 40)]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL if seed % 2 else csv.QUOTE_MINIMAL).writerows(table)
    path = tmp_path / "a.csv"
    path.write_bytes(text.getvalue().encode())
    source = tg.csv(str(path), size=size)
    assert rows(source) == [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    assert len(source.pieces()) == -(-40 // size)


def test_quotes_within_plain_fields(tmp_path: Path) -> None:
    text = 'size,what\n5" disk,"a\nb"\n3" disk,"c"\n1,d\n'
    (tmp_path / "a.csv").write_text(text)
    source = tg.csv(tmp_path / "a.csv", size=1)
    assert rows(source) == list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(source.pieces()) == 3


def test_records_and_header_have_to_fit(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a;b\n1;2\n\n3;4;5\n")
    with pytest.raises(tg.JobError, match="a record with 3 fields, and 2 names in its header: '3;4;5'"):
        rows(tg.csv(path, delimiter=";"))
    path.write_text("a,a\n1,2\n")
    with pytest.raises(tg.JobError, match="two columns 'a'"):
        tg.csv(path).pieces()
    with pytest.raises(tg.JobError, match="one ASCII character"):
        tg.csv(path, delimiter="::")
    with pytest.raises(tg.JobError, match=r"tg\.lines\(size=0\)"):
        tg.lines(path, size=0)
    path.write_text("a,b\n")
    assert tg.csv(path).pieces() == []


def test_row_groups_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, first in (("b", 100), ("a", 0)):
        table = pyarrow.table({"n": list(range(first, first + 25)), "text": [f"t{i}" for i in range(25)]})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=10)
    source = tg.parquet(f"{tmp_path}/*.parquet")
    assert [len(list(source.read(piece))) for piece in source.pieces()] == [10, 10, 5] * 2
    assert rows(source)[24:26] == [{"n": 24, "text": "t24"}, {"n": 100, "text": "t0"}]
    assert rows(tg.parquet(f"{tmp_path}/a.parquet", columns=["n"]))[:2] == [{"n": 0}, {"n": 1}]
    with pytest.raises(tg.JobError, match=r"a\.parquet has no column 'm', only 'n', 'text'"):
        rows(tg.parquet(f"{tmp_path}/a.parquet", columns=["m"]))
    (tmp_path / "c.parquet").write_text("text")
    with pytest.raises(tg.JobError, match=r"cannot read .*c\.parquet on this node: .*Parquet"):
        tg.parquet(f"{tmp_path}/c.parquet").pieces()


@pytest.mark.parametrize(
    ("package", "source", "extra"),
    [("fsspec", tg.files("memory://x/*"), "checkpoint"), ("pyarrow.parquet", tg.parquet("/x/*"), "parquet")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, source: Source, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(tg.JobError, match=rf"pip install 'taskgraph-aio\[{extra}\]'"):
        source.pieces()


def test_words_of_a_file_counted_by_pieces(tmp_path: Path) -> None:
    words = [f"w{number % 7}" for number in range(1000)]
    (tmp_path / "a.txt").write_text("\n".join(words))
    source = tg.lines(tmp_path / "a.txt", size=64)
    counts = [Counter(content_of(source, piece)) for piece in source.pieces()]
    assert sum(counts, Counter()) == Counter(words) and len(counts) == 16
