"""What is measured against what, and the bars: data only.

A `Work` is a set of contenders that run in turns, so that whatever the machine does meanwhile, it does to all of them.
A `Row` of the table is a ratio of two of them, or of one and a bar in its own unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["WORKS", "Contender", "Row", "Work", "tree_of"]

_HEAP_KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc gives no memory back: fresh pages are what messages of megabytes cost most."""


@dataclass(frozen=True)
class Contender:
    """A script of ours, and how it is called.

    Attributes:
        needs: modules that its Python must be able to import; else it is named and skipped.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Row:
    """A line of the table: `subject` against `against`, or against nothing but the bar.

    Attributes:
        measure: which of the figures that they print.
        bar: of the ratio, or of the figure itself; None: it is only recorded.
    """

    subject: str
    against: str = ""
    bar: float | None = None
    sense: str = ">="
    measure: str = "rate"


@dataclass(frozen=True)
class Work:
    """Contenders that are run in turns, `repeats` times as often as asked for."""

    key: str
    title: str
    contenders: tuple[Contender, ...]
    rows: tuple[Row, ...]
    timeout_s: float = 120.0


def _ours(tasks: int, n: int, *more: str, name: str = "ours") -> Contender:
    return Contender(name, "ours.py", ("--tasks", str(tasks), "--n", str(n), *more))


def _peer(name: str, script: str, tasks: int, n: int, *more: str, needs: tuple[str, ...] = ()) -> Contender:
    return Contender(name, script, ("--tasks", str(tasks), "--n", str(n), *more), needs)


def _peers(tasks: int, n: int) -> tuple[Contender, ...]:
    """Everybody who can do the work."""
    ray, graphs = (("ray",), "peers/ray_graphs.py")
    called = _peer("grpc.aio, called", "peers/grpc_called.py", tasks, n, needs=("grpc",))
    if n > 1000:  # a heap that is not kept halves it; for small messages it changes nothing
        called = replace(called, name="grpc.aio, heap kept", env=tuple(_HEAP_KEPT.items()))
    return (
        called,
        _peer("grpc.aio, pulled", "peers/grpc_pulled.py", tasks, n, needs=("grpc",)),
        replace(_peer("grpc.aio, streamed", "peers/grpc_streamed.py", tasks, n, needs=("grpc",)), env=called.env),
        _peer("Ray graphs", graphs, tasks, n, needs=ray),
        _peer("Ray graphs, 2 in flight", graphs, tasks, n, "--in-flight", "2", needs=ray),
        _peer("Ray actors", "peers/ray_actors.py", tasks, n, needs=ray),
        _peer("Ray actors, 4 ahead", "peers/ray_actors.py", tasks, n, "--ahead", "4", needs=ray),
        _peer("Dask actors", "peers/dask_actors.py", tasks, n, needs=("distributed",)),
        _peer("Gloo", "peers/gloo.py", tasks, n, needs=("torch", "numpy")),
        _peer("Open MPI", "peers/mpi.py", tasks, n, needs=("mpi4py.MPI",)),
        _peer("stripped asyncio", "floors/stripped.py", tasks, n, needs=("uvloop",)),
    )


_IN_FLIGHT = "ours, 4 in flight"


def _in_flight(tasks: int, n: int) -> tuple[Contender, tuple[Row, ...]]:
    """Ours with several epochs under way at once: against itself, and against peers that do the same."""
    rows = (
        Row(_IN_FLIGHT, "ours", bar=1.0),
        Row(_IN_FLIGHT, "Ray graphs, 2 in flight"),
        Row(_IN_FLIGHT, "Ray actors, 4 ahead"),
    )
    return _ours(tasks, n, "--in-flight", "4", name=_IN_FLIGHT), rows


def _size(nbytes: int) -> str:
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


def tree_of(key: str) -> Work | None:
    """The work of a tree of any size, written TxN: T tasks, N numbers of 8 bytes. It has no bars.

    None: the key is not written so.
    """
    tasks, x, n = key.partition("x")
    if not (x and tasks.isdecimal() and n.isdecimal() and int(tasks) > 1 and int(n) > 0):
        return None
    return _tree(key, int(tasks), int(n), {})


def _tree(key: str, tasks: int, n: int, bars: dict[str, float], *extra: Contender, rows: tuple[Row, ...] = ()) -> Work:
    size = _size(8 * n)
    if n < 1_000_000:  # larger ones are not in flight together: memory is bounded
        several, more = _in_flight(tasks, n)
        extra, rows = (*extra, several), rows + more
    contenders = (_ours(tasks, n), *_peers(tasks, n), *extra)
    unknown = bars.keys() - {one.name for one in contenders}
    assert not unknown, unknown
    against = tuple(Row("ours", one.name, bar=bars.get(one.name)) for one in contenders[1:] if one not in extra)
    return Work(key, f"T={tasks}, {size}", contenders, against + rows)


WORKS = (
    _tree(
        "small",
        7,
        1,
        {
            "Ray graphs": 2.5,
            "Gloo": 3,
            "grpc.aio, called": 3.5,
            "grpc.aio, pulled": 4.5,
            "Dask actors": 8,
            "Ray actors": 9,
            "stripped asyncio": 0.3,
        },
        _ours(7, 1, "--backups", "1", name="ours, backups=1"),
        _ours(7, 1, "--threads", name="ours, def"),
        rows=(Row("ours, backups=1", "ours", bar=0.6), Row("ours, def", "ours", bar=0.5)),
    ),
    _tree("small-15", 15, 1, {"Ray graphs": 5, "Ray actors": 12, "Gloo": 6}),
    _tree("medium", 7, 131_072, {"Ray graphs": 3, "Gloo": 6, "grpc.aio, heap kept": 4, "Open MPI": 0.8}),
    _tree(
        "large",
        7,
        8_388_608,
        {"Ray actors": 3, "Ray graphs, 2 in flight": 1.3, "Gloo": 2.4, "Open MPI": 0.8},
        rows=(Row("ours", bar=1.0, sense="<=", measure="peak_of_bound"), Row("ours", measure="peak_mib")),
    ),
    Work(
        "shared",
        "several tasks a node",
        (
            _ours(7, 1_048_576, "--nodes", "2", name="T=7, 8 MiB, 2 nodes"),
            _ours(15, 131_072, "--nodes", "4", name="T=15, 1 MiB, 4 nodes"),
        ),
        (
            Row("T=7, 8 MiB, 2 nodes"),
            Row("T=7, 8 MiB, 2 nodes", bar=1.0, sense="<=", measure="peak_of_bound"),
            Row("T=15, 1 MiB, 4 nodes"),
            Row("T=15, 1 MiB, 4 nodes", bar=1.0, sense="<=", measure="peak_of_bound"),
        ),
    ),
    Work(
        "pull",
        "one pull of 8 B, unix socket",
        (Contender("pull", "pull.py"), Contender("ping-pong", "floors/ping_pong.py", needs=("uvloop",))),
        (Row("pull", "ping-pong", 5.0, "<=", "us"),),
    ),
    Work(
        "put",
        "64 MiB from put() to readable",
        (Contender("put", "put.py"), Contender("memcpy", "floors/memcpy.py")),
        (Row("put", "memcpy", 1.4, "<=", "ms"),),
    ),
    Work(
        "tcp",
        "64 MiB over TCP loopback",
        (
            Contender("pull", "pull.py", ("--over", "tcp", "--n", str(8_388_608))),
            Contender("raw socket", "floors/tcp.py"),
        ),
        (Row("pull", "raw socket", 0.8, ">=", "gb_per_s"),),
    ),
    Work(
        "many",
        "tree of 8 B on 4 nodes",
        (_ours(127, 1, "--nodes", "4", name="T=127"), _ours(15, 1, "--nodes", "4", name="T=15")),
        (Row("T=127", "T=15", 1.3, "<=", "us_per_task"), Row("T=127"), Row("T=15")),
    ),
    Work(
        "thousand",
        "tree of 8 B on 4 nodes",
        (_ours(1000, 1, "--nodes", "4", "--settle-s", "240", name="T=1000"),),
        (Row("T=1000"), Row("T=1000", measure="us_per_task"), Row("T=1000", measure="peak_mib")),
        timeout_s=420.0,
    ),
    Work(
        "start",
        "start-up",
        (
            Contender("import taskgraph", "starting.py", ("--what", "import")),
            Contender("taskgraph run", "starting.py", ("--what", "run")),
        ),
        (
            Row("import taskgraph", bar=0.1, sense="<=", measure="s"),
            Row("import taskgraph", measure="used_s"),
            Row("taskgraph run", bar=2.5, sense="<=", measure="s"),
        ),
    ),
)
