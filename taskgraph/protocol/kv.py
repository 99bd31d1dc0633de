"""Transactions on the coordinator's keys, as data.

The protocol decides *what* must be compared and written; `taskgraph.coordination` executes it, on etcd or in
memory. Comparisons are by mod or create revision only, never by value: a value may return, a revision cannot.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from taskgraph.protocol.frozen import frozen

__all__ = ["Compare", "Delete", "Get", "KeyEvent", "KeyValue", "Put", "Txn", "TxnResult"]


@frozen
class KeyValue:
    """One key as the coordinator holds it.

    Attributes:
        create_revision: the store's revision when the key was created; 0 never occurs for a present key.
        mod_revision: the store's revision of its last put.
        lease: the lease it hangs on, or 0.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@frozen
class KeyEvent:
    """A put or a delete, as a watch tells it. A delete has an empty value and the delete's mod revision."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@frozen
class Compare:
    """`key`'s mod (or create) revision equals `revision`. Revision 0 means: the key is absent."""

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
    """Deletes `key`, or everything that starts with it where `prefix` is set."""

    key: str
    prefix: bool = False


@frozen
class Get:
    """Reads `key`, or everything that starts with it where `prefix` is set, in key order."""

    key: str
    prefix: bool = False


Op = Put | Delete | Get


@frozen
class Txn:
    """If all `compares` hold, `success` happens, else `failure`; in either case at one revision."""

    compares: tuple[Compare, ...] = ()
    success: tuple[Op, ...] = ()
    failure: tuple[Op, ...] = ()


@frozen
class TxnResult:
    """What a transaction did.

    Attributes:
        succeeded: whether the comparisons held, so that `success` was executed.
        revision: the store's revision after it; for a read, the revision it was read at.
        reads: one tuple of key-values per `Get` of the branch taken, in the order of the ops.
    """

    succeeded: bool
    revision: int
    reads: tuple[tuple[KeyValue, ...], ...] = field(default=())
