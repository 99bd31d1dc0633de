"""Tables as files that pandas reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.tables import saved

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


class Saver(tg.Task):
    def __init__(self, url: str) -> None:
        self.url = url

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("users")
        if epoch.last and self.task_id == 1:
            table.save(self.url)
        ids = np.arange(200) * 7 - 600 + self.task_id
        table.push(ids, np.full((200, 3), epoch.number + 1, np.float32))


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_saved_table_is_that_of_the_beginning(tmp_path: Path, servers: int) -> None:
    file = tmp_path / "users.parquet"
    for url in (str(file), file.as_uri()):
        table = tg.Table(3, init="zeros", lr=-1.0, servers=servers)
        saving = tg.Job(tasks=2, epochs=3, builder=lambda _, url=url: Saver(url), tables={"users": table})
        tg.testing.run(saving, kills={(2, 2): "processor"})
    frame = tg.read_table(str(file))
    assert frame.shape == (400, 3) and frame.index.is_monotonic_increasing and frame.index.name == "id"
    assert list(frame.columns) == [0, 1, 2] and frame.dtypes.unique().tolist() == [np.float32]
    assert (frame == 3).all().all(), "the pushes of the first two epochs"
    assert pandas.read_parquet(file).columns.tolist() == ["id", "0", "1", "2"]


@pytest.mark.slow
def test_large_tables_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.tables.client._ROWS_AT_A_TIME", 16)
    test_saved_table_is_that_of_the_beginning(tmp_path, 3)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(tg.TableError, match="cannot be read"):
        tg.read_table(str(tmp_path / "none.parquet"))
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(tg.TableError, match="cannot be read"):
        tg.read_table(str(tmp_path / "text.parquet"))
    pandas.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(tg.TableError, match="is no table that save"):
        tg.read_table(str(tmp_path / "other.parquet"))
    with pytest.raises(tg.TableError, match="of a file"):
        tg.read_table("/")
    with pytest.raises(tg.TableError, match=r"save\('nothing://x/y'\)"):
        saved.check_saving("nothing://x/y")
