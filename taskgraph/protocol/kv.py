"""Transactions on the coordinator's keys, as data.

The protocol decides what to compare and to write; `taskgraph.coordination` executes it, on etcd or in memory. It
compares mod and create revisions only: a value may come back, a revision cannot.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from taskgraph.protocol.frozen import frozen

__all__ = ["Compare", "Delete", "Get", "KeyEvent", "KeyValue", "Put", "Txn", "TxnResult"]


@frozen
class KeyValue:
    """A key with its value.

    Attributes:
        create_revision: the revision of the store when the key was created; never 0.
        mod_revision: the revision of its last put.
        lease: its lease, or 0.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@frozen
class KeyEvent:
    """A put or a delete, from a watch. A delete has an empty value and the revision of the delete."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@frozen
class Compare:
    """True if the mod (or create) revision of `key` equals `revision`. Revision 0: the key is absent."""

    key: str
    revision: int
    target: Literal["mod", "create"] = "mod"


@frozen
class Put:
    key: str
    value: bytes
    lease: int = 0


@frozen
class Delete:
    """Deletes `key`, or with `prefix` all keys that start with it."""

    key: str
    prefix: bool = False


@frozen
class Get:
    """Reads `key`, or with `prefix` all keys that start with it, in order."""

    key: str
    prefix: bool = False


Op = Put | Delete | Get


@frozen
class Txn:
    """Executes `success` if all `compares` are true, else `failure`, at one revision."""

    compares: tuple[Compare, ...] = ()
    success: tuple[Op, ...] = ()
    failure: tuple[Op, ...] = ()


@frozen
class TxnResult:
    """The outcome of a transaction.

    Attributes:
        succeeded: all comparisons were true, so `success` was executed.
        revision: the revision of the store after the transaction; of a read, the revision that was read.
        reads: the key-values of each `Get` of the executed branch, in order.
    """

    succeeded: bool
    revision: int
    reads: tuple[tuple[KeyValue, ...], ...] = field(default=())
