"""Detects that the lease of another node ended, before etcd deletes its keys.

etcd looks for ended leases twice a second only, but answers at once how many whole seconds a lease has left; 0 means
less than one, or ended. A lease with answers of 0 for one second has ended: it had less than a second left at the first
answer, and after a renewal an answer above 0 would have been seen (for all but the last second of the TTL).

    state       answer        next
    alive       above 0       alive
    alive       0             expiring: since this answer
    expiring    above 0       alive
    expiring    0             ended, if the question was sent a second after the first 0
    expiring    0, but late   expiring again: the asking node was stopped, and may have missed a renewal

The caller asks etcd again after the time that `on_answer` returns. Missing answers prove nothing.
"""

from __future__ import annotations

__all__ = ["LeaseEnd"]

_INTERVAL_S = 0.05
"""Interval of questions for a lease that may end."""
_MIN_INTERVAL_S = 0.002


class LeaseEnd:
    """Tells from etcd's answers, which the caller passes, when the lease of another node has ended.

    All times are from the asking node's monotonic clock. A later answer above 0 takes `ended` back.

    Args:
        ttl_s: at most the TTL of the lease: with more, a renewal could be missed.
    """

    def __init__(self, ttl_s: float) -> None:
        self._renewal_shows_s = ttl_s - 1.0  # answers are above 0 for this time after a renewal
        self._zero_since: float | None = None  # less than a second was left at this time, unless renewed
        self._asked_at = 0.0
        self.ended = False

    def on_answer(self, left_s: int | None, *, sent_at: float, received_at: float) -> float:
        """Handles an answer to a question that was sent at `sent_at`. Returns the seconds until the next question.

        Args:
            left_s: whole seconds, rounded down; None: etcd deleted the lease and its keys, which a watch reports.
        """
        if left_s is None:
            return _INTERVAL_S
        before, self._asked_at = self._asked_at, sent_at
        if left_s > 0:  # also after the end: a new leader of etcd gives each lease its TTL again
            self.ended, self._zero_since = False, None
            return max(left_s - 1.0, _INTERVAL_S)
        if self._zero_since is None or received_at - before > self._renewal_shows_s:
            self._zero_since = received_at
        certain_at = self._zero_since + 1.0
        self.ended = self.ended or sent_at >= certain_at
        return _INTERVAL_S if self.ended else min(_INTERVAL_S, max(certain_at - received_at, _MIN_INTERVAL_S))
