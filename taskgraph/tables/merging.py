"""Ids and gradients of several pushes: checked, split by server, and added up in a fixed order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taskgraph.errors import TableError
from taskgraph.tables.rows import Ids, hash_ids

__all__ = ["as_gradients", "as_ids", "server_of", "sum_by_id"]


def as_ids(ids: Any, what: str, rows: int | None = None) -> Ids:
    """Checks the ids of a call, and returns them as an int64 array of shape (n,).

    Args:
        what: the table and the call, for messages.
        rows: the table has the ids 0 to rows - 1 only; None: all ids.

    Raises:
        TableError: no whole numbers, not one dimension, too large for int64, or no ids of the table.
    """
    if isinstance(ids, range):
        ids = np.arange(ids.start, ids.stop, ids.step, dtype=np.int64)
    if isinstance(ids, list | tuple):
        ids = _from_list(ids, what)
    try:
        given = np.asarray(ids)
    except (TypeError, ValueError):
        raise TableError(f"{what} takes int64 ids, not {type(ids).__name__}") from None
    if given.dtype.kind not in "iu":
        raise TableError(f"{what} takes int64 ids, not {given.dtype}: convert them, as by ids.astype(np.int64)")
    if given.ndim != 1:
        raise TableError(f"{what} takes ids of one dimension, not of shape {given.shape}: use ids.ravel()")
    if given.dtype == np.uint64 and len(given) and given.max() > np.iinfo(np.int64).max:
        raise TableError(f"{what} takes int64 ids, and {given.max()} is too large for one")
    found = given.astype(np.int64, copy=False)
    if rows is not None and len(found) and not (found.min() >= 0 and found.max() < rows):
        wrong = found[(found < 0) | (found >= rows)][0]
        raise TableError(f"{what}: the table has rows 0 to {rows - 1}, and no {wrong}")
    return found


def _from_list(ids: Sequence[Any], what: str) -> Any:
    """Makes an int64 array of a list of whole numbers; of an empty one, numpy would make floats."""
    try:
        return np.array([operator.index(one) for one in ids], np.int64)
    except TypeError:
        raise TableError(f"{what} takes int64 ids, and the list has others") from None
    except OverflowError:
        raise TableError(f"{what} takes int64 ids, and the list has a larger number") from None


def as_gradients(gradients: Any, ids: Ids, width: int, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Checks the gradients of a push, and returns them as an array of the table's dtype, of shape (n, width).

    Other floats are rounded to that dtype, since numpy's are float64 by default.

    Raises:
        TableError: another shape than (len(ids), width), or no floats.
    """
    given = np.asarray(gradients)
    if given.shape != (len(ids), width):
        raise TableError(
            f"{what}: {len(ids)} ids need gradients of shape {(len(ids), width)}, one row for each, not {given.shape}"
        )
    if given.dtype.kind != "f":
        raise TableError(f"{what}: gradients are floats, not {given.dtype}: give np.asarray(gradients, {str(dtype)!r})")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and then so does its row
        return given.astype(dtype, copy=False)


def server_of(ids: Ids, servers: int) -> Ids:
    """Returns which of the servers, counted from 0, has the row of each id: by a hash, so the shares are alike."""
    if servers == 1:
        return np.zeros(len(ids), np.int64)
    return (hash_ids(ids) % np.uint64(servers)).astype(np.int64)


def sum_by_id(ids: Ids, gradients: NDArray[Any]) -> tuple[Ids, NDArray[Any]]:
    """Adds up the gradients of each id, one after another in the order given, beginning with zero.

    Args:
        ids: of shape (n,), with duplicates.
        gradients: of shape (n, width).

    Returns:
        The ids, each once, ascending, of shape (m,); and their sums, of shape (m, width).
    """
    unique, first, place = np.unique(ids, return_index=True, return_inverse=True)
    sums = gradients[first] + gradients.dtype.type(0)  # -0.0 becomes 0.0, as in a sum
    if len(unique) < len(ids):
        again = np.ones(len(ids), np.bool_)
        again[first] = False
        np.add.at(sums, place[again], gradients[again])  # several times as slow for each row
    return unique, sums
