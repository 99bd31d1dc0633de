"""What every coordinator refuses, as etcd does: a job that runs on one of them runs on all."""

from __future__ import annotations

from typing import Final

from taskgraph.errors import CoordinationError
from taskgraph.protocol.kv import Delete, Put, Txn

__all__ = ["MAX_REQUEST_BYTES", "MAX_TXN_OPS", "check_key", "check_txn"]

MAX_TXN_OPS: Final = 128
MAX_REQUEST_BYTES: Final = 3 * 512 * 1024
"""As etcd's defaults for `--max-txn-ops` and `--max-request-bytes`."""


def check_key(key: str) -> None:
    """Raises CoordinationError for the empty key."""
    if not key:
        raise CoordinationError("a key cannot be empty")


def check_txn(txn: Txn) -> None:
    """Raises CoordinationError for transactions that etcd refuses: too large, or with a key written twice."""
    if max(len(txn.compares), len(txn.success), len(txn.failure)) > MAX_TXN_OPS:
        raise CoordinationError(f"etcd refuses more than {MAX_TXN_OPS} operations in a transaction")
    for compare in txn.compares:
        check_key(compare.key)
    size = 0
    for branch in (txn.success, txn.failure):
        put: set[str] = set()
        deletes: list[Delete] = []
        for op in branch:
            if isinstance(op, Put):
                check_key(op.key)
                if op.key in put:
                    raise CoordinationError(f"duplicate key given in txn request: {op.key!r} is put twice")
                put.add(op.key)
                size += len(op.key.encode()) + len(op.value)
            elif isinstance(op, Delete):
                if not op.prefix:
                    check_key(op.key)
                deletes.append(op)
        for delete in deletes:
            for key in put:
                if key == delete.key or (delete.prefix and key.startswith(delete.key)):
                    raise CoordinationError(f"duplicate key given in txn request: {key!r} is put and deleted")
    if size > MAX_REQUEST_BYTES:
        raise CoordinationError(f"etcd refuses a request of more than {MAX_REQUEST_BYTES} bytes")
