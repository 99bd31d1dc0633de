"""The failure detector of a node: what it knows of each other node, and which state follows.

    state       evidence                                                       ended by
    alive       none of those below
    silent      no answer for a TTL or longer, while work stands still         an answer, or progress
    refusing    its port refuses connections: its process has died             an answer, or another proof of life
    expired     its lease has ended, its key is there: frozen, or cut off      the renewal of its lease
    absent      its key is not there                                           its key
    gone        its launcher saw it end, or it was absent for `lost_after_s`   nothing

A node in any state but "alive" is suspected: others may take over from it, evict it, or leave it out. Only "gone"
changes placement. Of several states the last one in this table counts.

- A refusing port shows within milliseconds that a process was killed. A node that proves alive after all (a firewall
  was reloaded) is trusted: its port no longer counts, until a connection to it breaks.
- While this node is paused (it cannot prove its own lease: etcd is away, or this host stood still) no other node
  becomes absent. Absences count anew from the end of the pause: the others get a moment to come back.

The caller calls a method for each event, with its monotonic clock in seconds, and `read_view` after each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import IntEnum

from taskgraph.protocol.view import JobView

__all__ = ["FailureDetector", "NodeState", "RefusingPort"]

_EXPIRY_S = 2.0
"""Time after the TTL in which etcd deletes the keys of an ended lease, and all nodes read that."""


class NodeState(IntEnum):
    ALIVE = 0
    SILENT = 1
    REFUSING = 2
    EXPIRED = 3
    ABSENT = 4
    GONE = 5


@dataclass(eq=False, slots=True)
class RefusingPort:
    """The record of a node whose port refuses connections.

    Attributes:
        since: when the port first refused, counted anew by `restart_times`.
        taken: task -> the revision of this node's takeover that rests on this refusal.
    """

    since: float
    taken: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Evidence:
    """What is known of one other node.

    Attributes:
        refusing: its port refuses connections; None: that is not known.
        trusted: it proved alive although its port refused: the port does not count until a connection breaks.
        ended_lease: a lease of it that has ended; None: none.
        absent_since: when its key was first absent; None: its key is there.
        absent_before: its key was absent before the pause of this node.
        heard_at: when it answered last, or `expect_answers` was called; None: no answer is expected.
        silent: it has not answered for too long.
    """

    refusing: RefusingPort | None = None
    trusted: bool = False
    ended_lease: int | None = None
    absent_since: float | None = None
    absent_before: bool = False
    heard_at: float | None = None
    silent: bool = False


class FailureDetector:
    """The states of all other nodes of a job, as one node sees them.

    Args:
        ttl_s: the TTL of the nodes' leases.

    Attributes:
        suspects: the nodes in any state but "alive", as of the last `read_view`.
        gone: the nodes that are gone.
        paused: this node is paused, or others still get a moment to come back.
    """

    def __init__(self, ttl_s: float) -> None:
        self.suspects: frozenset[str] = frozenset()
        self.gone: frozenset[str] = frozenset()
        self.paused = False
        self._ttl_s = ttl_s
        self._known: dict[str, _Evidence] = {}
        self._view: JobView | None = None
        self._gone_revision = -1  # of the view's `gone` that was read last

    def _evidence_of(self, node: str) -> _Evidence:
        """Returns the evidence on a node; makes an empty one if there is none."""
        return self._known.setdefault(node, _Evidence())

    def state(self, node: str) -> NodeState:
        """Returns the state of a node by the evidence so far; ALIVE without any."""
        known = self._known.get(node)
        if node in self.gone:
            return NodeState.GONE
        if known is None:
            return NodeState.ALIVE
        if known.absent_since is not None and (known.absent_before or not self.paused):
            return NodeState.ABSENT
        if self._has_lease(node, known.ended_lease):
            return NodeState.EXPIRED
        if known.refusing is not None:
            return NodeState.REFUSING
        return NodeState.SILENT if known.silent else NodeState.ALIVE

    def _has_lease(self, node: str, lease: int | None) -> bool:
        """True if the node's key is there with this lease."""
        registered = None if self._view is None else self._view.nodes.get(node)
        return registered is not None and registered.record.lease == lease

    # -- keys -------------------------------------------------------------------------------------

    @property
    def absent(self) -> set[str]:
        """The nodes whose key is absent, also during a pause, and that are not gone."""
        return {n for n, known in self._known.items() if known.absent_since is not None and n not in self.gone}

    def read_view(self, view: JobView, named: Set[str], now: float) -> bool:
        """Notes which keys are absent; updates `suspects` and `gone`. Returns True if the view's `gone` has changed.

        Args:
            named: the other nodes that have tasks. When `gone` changes, nodes without tasks and key are forgotten.
        """
        self._view = view
        for node in named:
            if node not in view.nodes and self._evidence_of(node).absent_since is None:
                self._known[node].absent_since = now
        for node, known in self._known.items():
            if node not in named or node in view.nodes:
                known.absent_since = None
        changed = self._gone_revision != view.gone_revision
        if changed:
            self._gone_revision = view.gone_revision
            self.gone = frozenset(view.gone)
            self._known = {n: known for n, known in self._known.items() if n in named or n in view.nodes}
        suspects = (node for node in self._known if self.state(node) != NodeState.ALIVE)
        self.suspects = frozenset(suspects) | (self.gone & named)
        return changed

    def overdue(self, view: JobView, now: float, limit_s: float) -> list[str]:
        """Returns the nodes whose key has been absent for `limit_s`, sorted: the caller declares them gone.

        Args:
            view: the newest one, also if `read_view` has not read it yet.
        """
        since = {n: known.absent_since for n, known in self._known.items() if known.absent_since is not None}
        return sorted(n for n, at in since.items() if now - at >= limit_s and n not in view.gone)

    def lease_changed(self, node: str, lease: int, ended: bool) -> None:
        """Notes that a lease of the node has ended, or lives after all (`ended` is False; see `LeaseEnd`)."""
        self._evidence_of(node).ended_lease = lease if ended else None

    # -- ports ------------------------------------------------------------------------------------

    def refusing_port(self, node: str | None) -> RefusingPort | None:
        """Returns the record of a node's refusing port; None: the port is not known to refuse, or there is no node."""
        known = None if node is None else self._known.get(node)
        return None if known is None else known.refusing

    def is_refusal_news(self, node: str) -> bool:
        """True if a refusal by the node's port would be news: none is known, and the node is not `trusted`."""
        known = self._known.get(node)
        return known is None or (known.refusing is None and not known.trusted)

    def port_refused(self, node: str, now: float) -> None:
        """Notes that all endpoints of a node refused a probe's connections. Only if `is_refusal_news`."""
        self._evidence_of(node).refusing = RefusingPort(now)

    def connection_lost(self, node: str) -> None:
        """Notes that a connection to the node broke: from now on its port counts again."""
        if node in self._known:
            self._known[node].trusted = False

    def proved_alive(self, node: str, *, trusted: bool) -> bool:
        """Notes that the node is alive: its port no longer counts as refusing. Returns True if it did.

        Args:
            trusted: later refusals do not count, either, until a connection to it breaks.
        """
        known = self._evidence_of(node)
        was, known.refusing, known.trusted = known.refusing, None, trusted
        return was is not None

    def split_refusing(self, view: JobView, now: float) -> tuple[list[str], list[str]]:
        """Returns the registered nodes whose port refuses, in two lists: those to probe again, and living ones.

        A node is alive if its key is there a TTL after the refusal: a lease that was not renewed would have expired.

        Args:
            view: the newest one, also if `read_view` has not read it yet.
        """
        probed: list[str] = []
        alive: list[str] = []
        for node, known in self._known.items():
            if known.refusing is not None and node in view.nodes and node not in view.gone:
                renewed = known.refusing.since < now - self._ttl_s - _EXPIRY_S
                (alive if renewed else probed).append(node)
        return probed, alive

    def nodes_that_took_back(self, view: JobView) -> dict[str, int]:
        """Returns the nodes whose port refuses and that live: node -> a task that it took back from this node.

        The caller then trusts them. Otherwise two such nodes would take over from each other as fast as etcd answers.
        """
        found: dict[str, int] = {}
        for node, known in self._known.items():
            for task, revision in known.refusing.taken.items() if known.refusing is not None else ():
                primary = view.primaries.get(task)
                if primary is not None and primary.record.node == node and primary.mod_revision > revision:
                    found.setdefault(node, task)
        return found

    # -- answers ----------------------------------------------------------------------------------

    def expect_answers(self, nodes: Iterable[str], now: float) -> None:
        """Expects answers of these nodes, and of no others. No node is silent now: silences count from now on."""
        expected = {*nodes}
        for node in expected:
            self._evidence_of(node)
        for node, known in self._known.items():
            known.heard_at, known.silent = (now if node in expected else None), False

    def heard(self, node: str, now: float) -> None:
        """Notes that the node answered; the next `find_newly_silent` counts that."""
        known = self._known.get(node)
        if known is not None and known.heard_at is not None:
            known.heard_at = now

    def find_newly_silent(self, now: float, least_s: float) -> list[str]:
        """Decides anew which nodes are silent, and returns those that were not before.

        A node is silent after a TTL without an answer. A node that hears fewer others waits longer, up to two TTLs: of
        two sides of a cut, the larger one goes on.

        Args:
            least_s: a node that has not answered for this time counts as not heard.
        """
        silences = {n: now - known.heard_at for n, known in self._known.items() if known.heard_at is not None}
        unheard = sum(silence_s > least_s for silence_s in silences.values())
        limit_s = self._ttl_s * (1 + max(0, unheard - 1) / (len(silences) + 1))
        before = self.silent
        for node, silence_s in silences.items():
            self._known[node].silent = silence_s > least_s and silence_s >= limit_s
        return sorted(self.silent - before)

    @property
    def silent(self) -> frozenset[str]:
        return frozenset(node for node, known in self._known.items() if known.silent)

    # -- pauses of this node ----------------------------------------------------------------------

    def pause(self) -> None:
        """Begins a pause: this node cannot prove its own lease. No other node becomes absent before its end."""
        if not self.paused:
            self.paused = True
            for known in self._known.values():
                known.absent_before = known.absent_since is not None

    def restart_times(self, now: float) -> None:
        """Counts absences and refusals from now on: this node was frozen or cut off, and did not see the others."""
        for known in self._known.values():
            known.absent_since = None if known.absent_since is None else now
            if known.refusing is not None:
                known.refusing.since = now

    def resume(self) -> None:
        """Ends the pause: absent nodes count again. Called once the others have had a moment to come back."""
        self.paused = False
        for known in self._known.values():
            known.absent_before = False
