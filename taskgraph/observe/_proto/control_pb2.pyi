# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Replica(_message.Message):
    __slots__ = ("task", "role", "term", "boundary", "processor", "running_s", "waits", "in_sync")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    task: int
    role: str
    term: int
    boundary: int
    processor: str
    running_s: float
    waits: _containers.RepeatedScalarFieldContainer[str]
    in_sync: int
    def __init__(self, task: _Optional[int] = ..., role: _Optional[str] = ..., term: _Optional[int] = ..., boundary: _Optional[int] = ..., processor: _Optional[str] = ..., running_s: _Optional[float] = ..., waits: _Optional[_Iterable[str]] = ..., in_sync: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "name", "host", "pid", "paused", "draining", "attempt", "epoch", "revision", "leader", "replicas", "waits", "memory_bytes", "files", "threads", "coroutines", "queues")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    COROUTINES_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    node: str
    name: str
    host: str
    pid: int
    paused: bool
    draining: bool
    attempt: int
    epoch: int
    revision: int
    leader: bool
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    waits: _containers.RepeatedScalarFieldContainer[str]
    memory_bytes: int
    files: int
    threads: int
    coroutines: int
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    def __init__(self, node: _Optional[str] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., paused: bool = ..., draining: bool = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., leader: bool = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., waits: _Optional[_Iterable[str]] = ..., memory_bytes: _Optional[int] = ..., files: _Optional[int] = ..., threads: _Optional[int] = ..., coroutines: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[Queue, _Mapping]]] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("name", "kind", "pieces", "passes", "left", "set_aside", "counts", "slow", "rows_per_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    pieces: int
    passes: int
    left: int
    set_aside: int
    counts: _containers.RepeatedCompositeFieldContainer[Pass]
    slow: _containers.RepeatedCompositeFieldContainer[SlowPiece]
    rows_per_s: float
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., pieces: _Optional[int] = ..., passes: _Optional[int] = ..., left: _Optional[int] = ..., set_aside: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[Pass, _Mapping]]] = ..., slow: _Optional[_Iterable[_Union[SlowPiece, _Mapping]]] = ..., rows_per_s: _Optional[float] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("pass_number", "done", "dealt", "open", "set_aside", "rows")
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    pass_number: int
    done: int
    dealt: int
    open: int
    set_aside: int
    rows: int
    def __init__(self, pass_number: _Optional[int] = ..., done: _Optional[int] = ..., dealt: _Optional[int] = ..., open: _Optional[int] = ..., set_aside: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class SlowPiece(_message.Message):
    __slots__ = ("pass_number", "piece", "holder", "seconds")
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    pass_number: int
    piece: int
    holder: str
    seconds: float
    def __init__(self, pass_number: _Optional[int] = ..., piece: _Optional[int] = ..., holder: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class KillRequest(_message.Message):
    __slots__ = ("signal",)
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    signal: int
    def __init__(self, signal: _Optional[int] = ...) -> None: ...

class KillReply(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("follow", "last")
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    last: int
    def __init__(self, follow: bool = ..., last: _Optional[int] = ...) -> None: ...

class EventReply(_message.Message):
    __slots__ = ("json", "lost", "more")
    JSON_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    json: str
    lost: int
    more: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, json: _Optional[str] = ..., lost: _Optional[int] = ..., more: _Optional[_Iterable[str]] = ...) -> None: ...

class ResultsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRow(_message.Message):
    __slots__ = ("epoch", "task", "names", "numbers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    task: int
    names: _containers.RepeatedScalarFieldContainer[str]
    numbers: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, epoch: _Optional[int] = ..., task: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., numbers: _Optional[_Iterable[float]] = ...) -> None: ...

class ResultChunk(_message.Message):
    __slots__ = ("head", "data", "reports", "digest")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    head: ResultHead
    data: bytes
    reports: _containers.RepeatedCompositeFieldContainer[ReportRow]
    digest: bytes
    def __init__(self, head: _Optional[_Union[ResultHead, _Mapping]] = ..., data: _Optional[bytes] = ..., reports: _Optional[_Iterable[_Union[ReportRow, _Mapping]]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ResultHead(_message.Message):
    __slots__ = ("task", "epoch", "attempt", "has_value", "digest", "meta_bytes", "buffer_bytes", "log_bytes", "lasted_s")
    TASK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HAS_VALUE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    META_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LASTED_S_FIELD_NUMBER: _ClassVar[int]
    task: int
    epoch: int
    attempt: int
    has_value: bool
    digest: bytes
    meta_bytes: int
    buffer_bytes: _containers.RepeatedScalarFieldContainer[int]
    log_bytes: _containers.RepeatedScalarFieldContainer[int]
    lasted_s: float
    def __init__(self, task: _Optional[int] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., has_value: bool = ..., digest: _Optional[bytes] = ..., meta_bytes: _Optional[int] = ..., buffer_bytes: _Optional[_Iterable[int]] = ..., log_bytes: _Optional[_Iterable[int]] = ..., lasted_s: _Optional[float] = ...) -> None: ...

class ClockRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClockReply(_message.Message):
    __slots__ = ("at_ns", "host_key")
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    HOST_KEY_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    host_key: str
    def __init__(self, at_ns: _Optional[int] = ..., host_key: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("every",)
    EVERY_FIELD_NUMBER: _ClassVar[int]
    every: int
    def __init__(self, every: _Optional[int] = ...) -> None: ...

class TraceChunk(_message.Message):
    __slots__ = ("epoch", "lost", "over", "spans")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lost: int
    over: bool
    spans: bytes
    def __init__(self, epoch: _Optional[int] = ..., lost: _Optional[int] = ..., over: bool = ..., spans: _Optional[bytes] = ...) -> None: ...
