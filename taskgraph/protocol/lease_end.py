"""Whether another node's lease has ended, from what etcd answers, before etcd itself looks and deletes its keys.

etcd looks for leases that have ended twice a second only, but tells whoever asks how many whole seconds one has left:
0 stands for less than one, and for one that has just ended. So a lease of which every answer was 0, for one second,
has ended: it had less than a second left at the first of these answers, and was not renewed since, for after a
renewal the answers are above 0 for all but the last second of its TTL, and one of them would have been seen.

Nothing is judged by silence: who does not answer, but renews its lease, is left alone, as before. And whoever asks may
have stood still meanwhile itself: then its answers lie too far apart to prove anything, and it begins anew.
"""

from __future__ import annotations

__all__ = ["LeaseEnd"]

_OFTEN_S = 0.05
"""How often is asked when it matters: what it costs is one answer out of etcd's memory."""
_SOON_S = 0.002


class LeaseEnd:
    """What is known of one lease of another node. Times are of the clock of whoever asks, which does not go back.

    Args:
        ttl_s: its TTL, at least.
    """

    def __init__(self, ttl_s: float) -> None:
        self._renewal_shows_s = ttl_s - 1.0  # for so long after a renewal answers are above 0, at least
        self._zero_since: float | None = None  # since this time it had less than a second, if it was not renewed
        self._asked_at = 0.0
        self.ended = False

    def heard(self, left_s: int | None, *, sent_at: float, received_at: float) -> float:
        """Takes in an answer to a question that was sent at `sent_at`; returns in how many seconds to ask again.

        Args:
            left_s: whole seconds, rounded down. None: there is no such lease any more, and its keys went with it:
                that is for who watches these.
        """
        if left_s is None:
            return _OFTEN_S
        before, self._asked_at = self._asked_at, sent_at
        if left_s > 0:  # also where it had ended: another leader of etcd gives every lease its TTL again
            self.ended, self._zero_since = False, None
            return max(left_s - 1.0, _OFTEN_S)
        if self._zero_since is None or received_at - before > self._renewal_shows_s:
            self._zero_since = received_at
        certain_at = self._zero_since + 1.0
        self.ended = self.ended or sent_at >= certain_at
        return _OFTEN_S if self.ended else min(_OFTEN_S, max(certain_at - received_at, _SOON_S))
