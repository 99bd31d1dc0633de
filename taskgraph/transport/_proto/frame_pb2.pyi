# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ("pull", "flag", "request", "offer", "report", "seal", "request_restart", "hand_over", "audit", "waits", "release", "reports", "offers", "written_files", "item", "answer", "accepted", "ledger_page", "waits_page", "refusal")
    PULL_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_RESTART_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FILES_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_PAGE_FIELD_NUMBER: _ClassVar[int]
    WAITS_PAGE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    pull: Pull
    flag: Flag
    request: Request
    offer: Offer
    report: Report
    seal: Seal
    request_restart: RequestRestart
    hand_over: HandOver
    audit: Audit
    waits: Waits
    release: Release
    reports: Reports
    offers: Offers
    written_files: WrittenFiles
    item: Item
    answer: Answer
    accepted: Accepted
    ledger_page: LedgerPage
    waits_page: WaitsPage
    refusal: Refusal
    def __init__(self, pull: _Optional[_Union[Pull, _Mapping]] = ..., flag: _Optional[_Union[Flag, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., request_restart: _Optional[_Union[RequestRestart, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ..., audit: _Optional[_Union[Audit, _Mapping]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., reports: _Optional[_Union[Reports, _Mapping]] = ..., offers: _Optional[_Union[Offers, _Mapping]] = ..., written_files: _Optional[_Union[WrittenFiles, _Mapping]] = ..., item: _Optional[_Union[Item, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., ledger_page: _Optional[_Union[LedgerPage, _Mapping]] = ..., waits_page: _Optional[_Union[WaitsPage, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Stamp(_message.Message):
    __slots__ = ("attempt", "epoch")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    epoch: int
    def __init__(self, attempt: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Encoded(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "text")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    text: str
    def __init__(self, reason: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("stamp", "sender", "sender_term", "task", "tag", "count")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SENDER_TERM_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    tag: str
    count: int
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., sender: _Optional[int] = ..., sender_term: _Optional[int] = ..., task: _Optional[int] = ..., tag: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("stamp", "term", "tag", "value")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    term: int
    tag: str
    value: Encoded
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., term: _Optional[int] = ..., tag: _Optional[str] = ..., value: _Optional[_Union[Encoded, _Mapping]] = ...) -> None: ...

class Flag(_message.Message):
    __slots__ = ("stamp", "sender", "sender_term", "task", "value")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SENDER_TERM_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    value: Encoded
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., sender: _Optional[int] = ..., sender_term: _Optional[int] = ..., task: _Optional[int] = ..., value: _Optional[_Union[Encoded, _Mapping]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("stamp", "sender", "sender_term", "task", "method", "number", "value")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SENDER_TERM_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    method: str
    number: int
    value: Encoded
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., sender: _Optional[int] = ..., sender_term: _Optional[int] = ..., task: _Optional[int] = ..., method: _Optional[str] = ..., number: _Optional[int] = ..., value: _Optional[_Union[Encoded, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("stamp", "term", "pure", "value")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PURE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    term: int
    pure: bool
    value: Encoded
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., term: _Optional[int] = ..., pure: bool = ..., value: _Optional[_Union[Encoded, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("stamp", "term", "task", "committed", "candidate", "value", "invitation")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    term: int
    task: int
    committed: bool
    candidate: bool
    value: Encoded
    invitation: int
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., term: _Optional[int] = ..., task: _Optional[int] = ..., committed: bool = ..., candidate: bool = ..., value: _Optional[_Union[Encoded, _Mapping]] = ..., invitation: _Optional[int] = ...) -> None: ...

class Offers(_message.Message):
    __slots__ = ("stamp", "term", "task", "invitation", "parts", "value")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    term: int
    task: int
    invitation: int
    parts: _containers.RepeatedCompositeFieldContainer[OffersPart]
    value: Encoded
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., term: _Optional[int] = ..., task: _Optional[int] = ..., invitation: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[OffersPart, _Mapping]]] = ..., value: _Optional[_Union[Encoded, _Mapping]] = ...) -> None: ...

class OffersPart(_message.Message):
    __slots__ = ("epoch", "size", "digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    size: int
    digest: bytes
    def __init__(self, epoch: _Optional[int] = ..., size: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("task", "term", "invitation", "revision")
    TASK_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    task: int
    term: int
    invitation: int
    revision: int
    def __init__(self, task: _Optional[int] = ..., term: _Optional[int] = ..., invitation: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("stamp", "task", "term", "done", "version", "sent", "received", "finish", "numbers", "previous", "ahead")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    task: int
    term: int
    done: bool
    version: int
    sent: bytes
    received: bytes
    finish: bool
    numbers: Numbers
    previous: Numbers
    ahead: bool
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., task: _Optional[int] = ..., term: _Optional[int] = ..., done: bool = ..., version: _Optional[int] = ..., sent: _Optional[bytes] = ..., received: _Optional[bytes] = ..., finish: bool = ..., numbers: _Optional[_Union[Numbers, _Mapping]] = ..., previous: _Optional[_Union[Numbers, _Mapping]] = ..., ahead: bool = ...) -> None: ...

class Reports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    def __init__(self, reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Number]
    def __init__(self, entries: _Optional[_Iterable[_Union[Number, _Mapping]]] = ...) -> None: ...

class Number(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("stamp", "task", "version")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    task: int
    version: int
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., task: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class RequestRestart(_message.Message):
    __slots__ = ("stamp", "task", "why")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    task: int
    why: str
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., task: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("stamp", "task", "term")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    task: int
    term: int
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., task: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("stamp", "task", "size", "digest")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    task: int
    size: int
    digest: str
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., task: _Optional[int] = ..., size: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class WrittenFiles(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[Written]
    def __init__(self, files: _Optional[_Iterable[_Union[Written, _Mapping]]] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("stamp", "task")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    task: int
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., task: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("sent", "kind", "sender", "receiver", "name", "digest")
    SENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    sent: bool
    kind: str
    sender: int
    receiver: int
    name: str
    digest: bytes
    def __init__(self, sent: bool = ..., kind: _Optional[str] = ..., sender: _Optional[int] = ..., receiver: _Optional[int] = ..., name: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class LedgerPage(_message.Message):
    __slots__ = ("term", "entries")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    term: int
    entries: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    def __init__(self, term: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ...) -> None: ...

class Waits(_message.Message):
    __slots__ = ("stamp", "task")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    task: int
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., task: _Optional[int] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("processor", "kind", "task", "name", "since_s", "provides")
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    PROVIDES_FIELD_NUMBER: _ClassVar[int]
    processor: str
    kind: str
    task: int
    name: str
    since_s: float
    provides: _containers.RepeatedCompositeFieldContainer[Provision]
    def __init__(self, processor: _Optional[str] = ..., kind: _Optional[str] = ..., task: _Optional[int] = ..., name: _Optional[str] = ..., since_s: _Optional[float] = ..., provides: _Optional[_Iterable[_Union[Provision, _Mapping]]] = ...) -> None: ...

class Provision(_message.Message):
    __slots__ = ("tag", "consumer")
    TAG_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    tag: str
    consumer: int
    def __init__(self, tag: _Optional[str] = ..., consumer: _Optional[int] = ...) -> None: ...

class WaitsPage(_message.Message):
    __slots__ = ("term", "waits")
    TERM_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    term: int
    waits: _containers.RepeatedCompositeFieldContainer[Wait]
    def __init__(self, term: _Optional[int] = ..., waits: _Optional[_Iterable[_Union[Wait, _Mapping]]] = ...) -> None: ...

class HelloOpen(_message.Message):
    __slots__ = ("job", "node", "nonce", "probe")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    nonce: bytes
    probe: bool
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., nonce: _Optional[bytes] = ..., probe: bool = ...) -> None: ...

class HelloChallenge(_message.Message):
    __slots__ = ("node", "nonce")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    node: str
    nonce: bytes
    def __init__(self, node: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class HelloProof(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class HelloWelcome(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class HelloRefuse(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...
