"""A job's keys on an in-memory etcd, without nodes: what a test of decisions and transactions starts from."""

from __future__ import annotations

from taskgraph.coordination.memory import MemoryStore
from taskgraph.protocol import transactions
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Delete, Put, Txn, TxnResult
from taskgraph.protocol.messages import Encoded, Report, Stamp
from taskgraph.protocol.records import EpochRecord, GoneRecord, JobStatus, NodeRecord, StatusRecord
from taskgraph.protocol.sums import encode_sum
from taskgraph.protocol.view import JobView

JOB = "demo"
RUN = "run-1"


def node_record(node: str, *, run: str = RUN, draining: bool = False, lease: int = 0) -> NodeRecord:
    return NodeRecord(
        name=node,
        run=run,
        host="h",
        pid=1,
        endpoints=("memory:x",),
        control="",
        fingerprint="f",
        lease=lease,
        draining=draining,
        writer=f"{node}:0",
    )


def boundary(epoch: int, attempt: int = 1, term: int = 1, content: bytes = b"") -> Boundary:
    return Boundary(Stamp(attempt, epoch), term, Encoded(content, (), content.ljust(16, b".")[:16]))


def report(task: int, stamp: Stamp, **fields: object) -> Report:
    given: dict[str, object] = {"term": 1, "done": True, "version": 0, "sent": 0, "received": 0, **fields}
    given.update({side: encode_sum(given[side]) for side in ("sent", "received")})  # type: ignore[arg-type]
    return Report(stamp, task, **given)  # type: ignore[arg-type]


class World:
    """One submitted job. Views are read fresh, or kept by a test to be behind."""

    def __init__(self, *nodes: str) -> None:
        self.store = MemoryStore()
        self.keys = Keys(JOB)
        self._writes = 0
        self.put(self.keys.spec, b"{}")
        self.put(self.keys.epoch, EpochRecord(epoch=0, attempt=1).to_bytes())
        self.put(self.keys.generation, b"")
        self.put(self.keys.status, StatusRecord(state=JobStatus.RUNNING).to_bytes())
        self.revisions: dict[str, int] = {}
        for node in nodes:
            self.register(node)

    # -- etcd ---------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> int:
        return self.store.execute(Txn(success=(Put(key, value),))).revision

    def delete(self, key: str) -> None:
        self.store.execute(Txn(success=(Delete(key),)))

    def view(self) -> JobView:
        view = JobView(JOB)
        view.reset(self.store.revision, self.store.select(self.keys.root, prefix=True))
        return view

    def writer(self) -> str:
        self._writes += 1
        return f"w:{self._writes}"

    def run(self, txn: Txn) -> TxnResult:
        return self.store.execute(txn)

    # -- what nodes do ------------------------------------------------------------------------

    def register(self, node: str) -> None:
        self.revisions[node] = self.run(transactions.register(self.view(), node, node_record(node))).revision

    def die(self, node: str) -> None:
        """The node's lease is revoked, and its launcher says so."""
        self.delete(self.keys.node(node))
        self.run(transactions.declare_gone(self.view(), node, GoneRecord(reason="killed")))

    def first(self, task: int, node: str, *, stateful: bool = True) -> int:
        """`node` becomes the first primary; returns the revision of its primary key."""
        txn = transactions.take_over_from_nothing(
            self.view(), task, node, self.revisions[node], stateful=stateful, writer=self.writer()
        )
        result = self.run(txn)
        assert result.succeeded
        return result.revision

    def take_over(self, task: int, node: str, *, view: JobView | None = None, failure: bool = True) -> TxnResult:
        txn = transactions.take_over(
            view or self.view(),
            task,
            node,
            self.revisions[node],
            stateful=True,
            failure=failure,
            writer=self.writer(),
        )
        return self.run(txn)

    def admit(self, task: int, primary: str, candidate: str, *, view: JobView | None = None) -> TxnResult:
        seen = view or self.view()
        txn = transactions.admit(
            seen,
            task,
            primary_revision=seen.primaries[task].mod_revision,
            node=primary,
            node_revision=self.revisions[primary],
            candidate=candidate,
            writer=self.writer(),
        )
        return self.run(txn)

    def evict(self, task: int, primary: str, member: str, *, view: JobView | None = None) -> TxnResult:
        seen = view or self.view()
        txn = transactions.evict(
            seen,
            task,
            primary_revision=seen.primaries[task].mod_revision,
            node=primary,
            node_revision=self.revisions[primary],
            member=member,
            writer=self.writer(),
        )
        return self.run(txn)

    def commit(self, *, view: JobView | None = None, finished: bool = False) -> TxnResult:
        seen = view or self.view()
        revision = seen.primaries[0].mod_revision
        return self.run(transactions.commit(seen, primary_revision=revision, finished=finished, writer=self.writer()))

    def restart(self, *, view: JobView | None = None) -> TxnResult:
        seen = view or self.view()
        revision = seen.primaries[0].mod_revision
        return self.run(transactions.restart(seen, primary_revision=revision, writer=self.writer()))


def two_tasks() -> World:
    """Two tasks on two nodes, in epoch 0; nobody was replaced since it began, but for the first takeovers."""
    world = World("a", "b")
    for task, node in ((0, "a"), (1, "b")):
        world.first(task, node)
        world.admit(task, node, "b" if node == "a" else "a")
    return world
