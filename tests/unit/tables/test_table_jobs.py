"""Tables of a job: pulls, pushes, the learning rate, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import taskgraph as tg
from taskgraph.tables.rows import table_seed
from taskgraph.tables.store import RowStore

Array = NDArray[Any]
ROWS = 40


def ids_of(task: int, epoch: int) -> Array:
    return np.random.default_rng([task, epoch]).integers(0, ROWS, 15)


def gradients_of(rows: Array, task: int) -> Array:
    return (rows * np.float32(0.3) + np.float32(0.1 * task)).astype(np.float32)


class Worker(tg.Task, state=["digest"]):
    """Pulls rows, and pushes gradients that depend on them, in two pushes."""

    def setup(self) -> None:
        self.digest = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.work, outbound={"sum": self.task_id})
        epoch.processor(self.keep, inbound={"sum": self.task_id})

    def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        table, ids = epoch.table("users"), ids_of(self.task_id, epoch.number)
        rows = table.pull(ids)
        gradients = gradients_of(rows, self.task_id)
        table.push(ids[:9], gradients[:9])
        table.push(ids[9:], gradients[9:])
        outs.put("sum", float(rows.sum()))

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.digest += ins["sum"]

    def result(self) -> float:
        return self.digest


class AsyncWorker(Worker):
    async def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        table, ids = epoch.table("users"), ids_of(self.task_id, epoch.number)
        rows = await table.apull(ids)
        table.push(ids, gradients_of(rows, self.task_id))
        outs.put("sum", float(rows.sum()))


def job(
    optimizer: Any = "adagrad", servers: int = 2, epochs: int = 5, worker: type[tg.Task] = Worker, **options: Any
) -> tg.Job:
    table = tg.Table(3, optimizer=optimizer, servers=servers, **options)
    return tg.Job(tasks=3, epochs=epochs, seed=4, builder=worker, tables={"users": table})


def alone(optimizer: Any = "adagrad", epochs: int = 5) -> dict[int, float]:
    store, digests = RowStore(tg.Table(3, optimizer=optimizer), table_seed(4, "users")), dict.fromkeys(range(3), 0.0)
    for epoch in range(epochs):
        ids = [ids_of(task, epoch) for task in range(3)]
        rows = [store.pull(one) for one in ids]
        for task in range(3):
            digests[task] += float(rows[task].sum())
        gradients = [gradients_of(rows[task], task) for task in range(3)]
        store.push(np.concatenate(ids), np.concatenate(gradients), 0.1)
    return digests


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_job_has_the_bits_of_a_loop(optimizer: str) -> None:
    assert tg.testing.run(job(optimizer)).values == alone(optimizer)


@pytest.mark.parametrize("servers", [1, 3])
def test_bits_do_not_depend_on_the_number_of_servers(servers: int) -> None:
    assert tg.testing.run(job(servers=servers), order=servers).values == alone()


def test_coroutines_have_the_same_bits() -> None:
    assert tg.testing.run(job(worker=AsyncWorker)).values == alone()


@pytest.mark.parametrize(
    "kills",
    [
        {(3, 2): "processor"},
        {(4, 1): "sync", (0, 3): "processor"},
        pytest.param({(3, 1): "snapshot", (4, 2): "done", (1, 3): "done"}, marks=pytest.mark.slow),
        pytest.param({(3, 3): "compose", (0, 3): "committed"}, marks=pytest.mark.slow),
    ],
)
def test_every_push_counts_once_whatever_dies(kills: dict[tuple[int, int], str]) -> None:
    assert tg.testing.run(job("adam"), kills=kills).values == alone("adam")


class Counts(tg.Task):
    """Each task adds 1 to rows, so that the rows count the pushes."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("counts")
        if epoch.last:
            epoch.report(total=float(table.pull(None).sum()))
        else:
            table.push(ids_of(self.task_id, epoch.number), np.ones((15, 1), np.float32))


def counting(staleness: int = 0) -> tg.Job:
    table = tg.Table(1, init="zeros", lr=-1.0, servers=2, rows=ROWS, staleness=staleness)
    return tg.Job(tasks=3, epochs=6, builder=Counts, tables={"counts": table})


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("kills", [{}, {(3, 2): "processor", (4, 4): "done"}])
def test_rows_count_all_pushes(staleness: int, kills: dict[tuple[int, int], str]) -> None:
    reports = tg.testing.run(counting(staleness), kills=kills).reports
    assert reports[-1].numbers["total"] == 3 * 5 * 15


class Late(tg.Task):
    """The second push of an epoch is answered by what the first one made."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("counts")
        before = table.pull([7])[0, 0]
        table.push([7], np.ones((1, 1), np.float32))
        epoch.report(seen=float(table.pull([7])[0, 0] - before))


@pytest.mark.parametrize(("staleness", "seen"), [(0, 0.0), (1, 1.0)])
def test_pull_sees_pushes_of_its_epoch_with_staleness_only(staleness: int, seen: float) -> None:
    table = tg.Table(1, init="zeros", lr=-1.0, staleness=staleness)
    found = tg.testing.run(tg.Job(tasks=1, epochs=3, builder=Late, tables={"counts": table}))
    assert [report.numbers["seen"] for report in found.reports] == [seen] * 3


class Told(tg.Task):
    """Task 0 pushes, and then asks the others what they pull."""

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.flag(0)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("counts")
        for _ in range(5):
            table.push(np.arange(20), np.ones((20, 1), np.float32))
            seen = [epoch.request(task, "look", None).wait() for task in (1, 2)]
            assert seen == [table.pull([7])[0, 0]] * 2
        epoch.report(seen=seen[0])

    @tg.handles("look")
    def look(self, epoch: tg.Epoch, sender: int, payload: None) -> float:
        rows = epoch.table("counts").pull(np.arange(20))
        assert (rows == rows[0]).all()
        return float(rows[0, 0])


@pytest.mark.parametrize("kills", [{}, pytest.param({(4, 1): "processor", (0, 1): "done"}, marks=pytest.mark.slow)])
def test_with_staleness_a_pull_has_every_push_that_has_returned(kills: dict[tuple[int, int], str]) -> None:
    table = tg.Table(1, init="zeros", lr=-1.0, servers=2, staleness=1)
    found = tg.testing.run(tg.Job(tasks=3, epochs=3, builder=Told, tables={"counts": table}), kills=kills)
    assert [report.numbers["seen"] for report in found.reports] == [5, 10, 15]


class Rated(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("rows")
        if epoch.number == 1:
            table.lr = 0.25
        table.push([3], np.ones((1, 1), np.float32))
        epoch.report(lr=table.lr, row=float(table.pull([3])[0, 0]))


def test_rate_counts_from_the_epoch_that_sets_it() -> None:
    rated = tg.Job(tasks=1, epochs=4, builder=Rated, tables={"rows": tg.Table(1, init="zeros", lr=1.0, servers=2)})
    reports = tg.testing.run(rated, kills={(2, 2): "processor"}).reports
    assert [report.numbers["lr"] for report in reports] == [1, 1, 0.25, 0.25]
    assert [report.numbers["row"] for report in reports] == [0, -1, -1.25, -1.5]


class Call(tg.Task):
    """Does one thing with tables in `on_flag`, a sync point, or compose."""

    what: Callable[[tg.Epoch], Any]
    where = "on_flag"

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)
        epoch.processor(self.sync)
        if self.where == "compose":
            type(self).what(epoch)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        if self.where == "on_flag":
            type(self).what(epoch)

    def sync(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.where == "sync":
            type(self).what(epoch)


def push(ids: Any, gradients: Any) -> Callable[[tg.Epoch], Any]:
    return lambda epoch: epoch.table("users").push(ids, gradients)


def differing_rates(epoch: tg.Epoch) -> None:
    epoch.table("users").lr = 0.1
    epoch.table("users").lr = 0.2


@pytest.mark.parametrize(
    ("where", "what", "text"),
    [
        ("on_flag", lambda epoch: epoch.table("items"), "the job's tables are: 'users'"),
        ("on_flag", lambda epoch: epoch.table("users").pull(np.zeros(2)), "int64 ids, not float64"),
        ("on_flag", lambda epoch: epoch.table("users").pull(), "needs ids"),
        ("on_flag", push([1, 2], np.ones((1, 3), np.float32)), r"gradients of shape \(2, 3\)"),
        ("on_flag", push([1], np.ones((1, 3), int)), r"give np.asarray\(gradients, 'float32'\)"),
        ("on_flag", differing_rates, r"lr is set to 0.\d and to 0.\d"),
        ("sync", push([1], np.ones((1, 3), np.float32)), "a sync point runs when the epoch is quiet"),
        ("compose", lambda epoch: epoch.table("users").pull([1]), "cannot wait for an answer"),
    ],
)
def test_mistakes_fail_the_job_by_name(where: str, what: Callable[[tg.Epoch], Any], text: str) -> None:
    class Wrong(Call):
        pass

    Wrong.what, Wrong.where = staticmethod(what), where  # type: ignore[assignment, method-assign]
    wrong = tg.Job(tasks=1, epochs=1, builder=Wrong, tables={"users": tg.Table(3)})
    with pytest.raises(tg.JobFailed, match=text):
        tg.testing.run(wrong)


def test_pull_in_a_coroutine_says_what_to_write() -> None:
    class Waits(AsyncWorker):
        async def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            epoch.table("users").pull([1])

    with pytest.raises(tg.JobFailed, match="write `await table"):
        tg.testing.run(job(worker=Waits))


def test_job_has_the_backups_of_its_tables() -> None:
    for table, backups in ((None, 1), (0, 1), (3, 3)):
        assert tg.Job(tasks=1, builder=Worker, tables={"users": tg.Table(1, backups=table)}).backups == backups
    assert tg.Job(tasks=1, builder=Worker, backups=0, tables={"users": tg.Table(1)}).backups == 0


def test_other_tasks_do_not_see_servers() -> None:
    class Sees(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(lambda epoch, ins, outs: epoch.report(tasks=self.tasks, peers=len(epoch.neighbors("all"))))

    seen = tg.Job(tasks=2, epochs=1, builder=Sees, topology=tg.full(), tables={"users": tg.Table(1, servers=3)})
    assert tg.testing.run(seen).reports[0].numbers == {"tasks": 2, "peers": 2}
