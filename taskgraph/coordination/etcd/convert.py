"""Converts transactions, keys and events to etcd's messages and back. Keys are UTF-8 text here, and bytes in etcd.

Another program may put a key that is not UTF-8 under a job's prefix: such bytes survive both conversions.
"""

from __future__ import annotations

from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.errors import CoordinationError
from taskgraph.protocol.kv import Delete, Get, KeyEvent, KeyValue, Put, Txn, TxnResult

__all__ = ["event", "has_writes", "key_value", "range_of", "range_request", "txn_request", "txn_result"]


_KEY_ERRORS = "surrogateescape"
_DELETE = v3.Event.DELETE
_EQUAL, _MOD, _CREATE = v3.Compare.EQUAL, v3.Compare.MOD, v3.Compare.CREATE


def range_of(key: str, *, prefix: bool) -> tuple[bytes, bytes]:
    """Returns etcd's `key` and `range_end` for a key or prefix. The end of a single key is empty."""
    raw = key.encode(errors=_KEY_ERRORS)
    if not prefix:
        if not raw:
            raise CoordinationError("a key cannot be empty")
        return raw, b""
    # The end of a prefix is the prefix with its last byte plus one; UTF-8 has no byte 0xff.
    # b"\0" means "no end".
    return (raw, raw[:-1] + bytes([raw[-1] + 1])) if raw else (b"\0", b"\0")


def range_request(key: str, *, prefix: bool) -> v3.RangeRequest:
    """Makes the request that reads a key or a prefix."""
    start, end = range_of(key, prefix=prefix)
    return v3.RangeRequest(key=start, range_end=end)  # in key order: etcd's default


def key_value(kv: v3.KeyValue) -> KeyValue:
    """Converts etcd's key and value to ours."""
    return KeyValue(kv.key.decode(errors=_KEY_ERRORS), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def event(message: v3.Event) -> KeyEvent:
    """Converts an event of etcd to ours."""
    kv = message.kv
    found = KeyValue(kv.key.decode(errors=_KEY_ERRORS), kv.value, kv.create_revision, kv.mod_revision, kv.lease)
    return KeyEvent("delete" if message.type == _DELETE else "put", found)


def has_writes(txn: Txn) -> bool:
    """True if a branch of the transaction puts or deletes keys."""
    for branch in (txn.success, txn.failure):
        for op in branch:
            if not isinstance(op, Get):
                return True
    return False


def txn_request(txn: Txn) -> v3.TxnRequest:
    """Converts a transaction to etcd's request."""
    request = v3.TxnRequest()
    for compare in txn.compares:
        key, _ = range_of(compare.key, prefix=False)
        if compare.target == "mod":
            request.compare.add(result=_EQUAL, target=_MOD, key=key, mod_revision=compare.revision)
        else:
            request.compare.add(result=_EQUAL, target=_CREATE, key=key, create_revision=compare.revision)
    for op in txn.success:
        _add_operation(request.success.add(), op)
    for op in txn.failure:
        _add_operation(request.failure.add(), op)
    return request


def txn_result(answer: v3.TxnResponse) -> TxnResult:
    """Converts etcd's answer to the result of a transaction."""
    reads = tuple(
        tuple(key_value(kv) for kv in response.response_range.kvs)
        for response in answer.responses
        if response.WhichOneof("response") == "response_range"
    )
    return TxnResult(answer.succeeded, answer.header.revision, reads)


def _add_operation(to: v3.RequestOp, op: Put | Delete | Get) -> None:
    match op:
        case Put():
            key, _ = range_of(op.key, prefix=False)
            put = to.request_put
            put.key, put.value, put.lease = key, op.value, op.lease
        case Delete():
            key, end = range_of(op.key, prefix=op.prefix)
            to.request_delete_range.CopyFrom(v3.DeleteRangeRequest(key=key, range_end=end))
        case Get():
            to.request_range.CopyFrom(range_request(op.key, prefix=op.prefix))
