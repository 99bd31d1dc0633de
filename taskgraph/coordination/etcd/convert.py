"""Between our transactions and etcd's messages. Keys are UTF-8 text with us, bytes with etcd."""

from __future__ import annotations

from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.errors import CoordinationError
from taskgraph.protocol.kv import Compare, Delete, Get, KeyEvent, KeyValue, Put, Txn, TxnResult

__all__ = ["event", "key_value", "range_of", "range_request", "txn_request", "txn_result", "writes"]


def range_of(key: str, *, prefix: bool) -> tuple[bytes, bytes]:
    """etcd's `key` and `range_end`: a single key has an empty end, a prefix ends before its successor."""
    raw = key.encode()
    if not prefix:
        if not raw:
            raise CoordinationError("a key cannot be empty")
        return raw, b""
    # The successor of a prefix: its last byte that is not 0xff, plus one. UTF-8 has no 0xff. b"\0" means "no end".
    return (raw, raw[:-1] + bytes([raw[-1] + 1])) if raw else (b"\0", b"\0")


def range_request(key: str, *, prefix: bool) -> v3.RangeRequest:
    start, end = range_of(key, prefix=prefix)
    return v3.RangeRequest(key=start, range_end=end)  # in key order: etcd's default


def key_value(kv: v3.KeyValue) -> KeyValue:
    return KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def event(told: v3.Event) -> KeyEvent:
    return KeyEvent("delete" if told.type == v3.Event.DELETE else "put", key_value(told.kv))


def writes(txn: Txn) -> bool:
    """Whether either branch changes anything."""
    for branch in (txn.success, txn.failure):
        for op in branch:
            if not isinstance(op, Get):
                return True
    return False


def txn_request(txn: Txn) -> v3.TxnRequest:
    return v3.TxnRequest(
        compare=[_compare(compare) for compare in txn.compares],
        success=[_op(op) for op in txn.success],
        failure=[_op(op) for op in txn.failure],
    )


def txn_result(answer: v3.TxnResponse) -> TxnResult:
    reads = tuple(
        tuple(key_value(kv) for kv in response.response_range.kvs)
        for response in answer.responses
        if response.WhichOneof("response") == "response_range"
    )
    return TxnResult(answer.succeeded, answer.header.revision, reads)


def _compare(compare: Compare) -> v3.Compare:
    key, _ = range_of(compare.key, prefix=False)
    if compare.target == "mod":
        return v3.Compare(result=v3.Compare.EQUAL, target=v3.Compare.MOD, key=key, mod_revision=compare.revision)
    return v3.Compare(result=v3.Compare.EQUAL, target=v3.Compare.CREATE, key=key, create_revision=compare.revision)


def _op(op: Put | Delete | Get) -> v3.RequestOp:
    match op:
        case Put():
            key, _ = range_of(op.key, prefix=False)
            return v3.RequestOp(request_put=v3.PutRequest(key=key, value=op.value, lease=op.lease))
        case Delete():
            key, end = range_of(op.key, prefix=op.prefix)
            return v3.RequestOp(request_delete_range=v3.DeleteRangeRequest(key=key, range_end=end))
        case Get():
            return v3.RequestOp(request_range=range_request(op.key, prefix=op.prefix))
