"""Draws the failures of a seed as data: kind, target and moment.

Most happen at a moment of the protocol (just before or after a write of some kind, when a message of some kind arrives,
at a stage of an epoch), since mistakes hide there; the others happen at a drawn time.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "KINDS",
    "CallFaults",
    "Fault",
    "Resubmission",
    "choose_race",
    "draw",
    "draw_absences",
    "draw_between_steps",
    "draw_called_gone",
    "draw_chain",
    "draw_checkpoint_faults",
    "draw_deletions",
    "draw_for_epochs_in_flight",
    "draw_last_epoch_faults",
    "draw_power_losses",
    "draw_race_faults",
    "draw_report_crashes",
    "draw_resubmission",
]

KINDS = (
    "crash",
    "host crash",
    "freeze",
    "stuck loop",
    "slow node",
    "etcd pause",
    "etcd restart",
    "etcd leader loss",
    "etcd unknown outcome",
    "etcd slow request",
    "etcd slow answers",
    "etcd cut",
    "etcd compaction",
    "watch break",
    "watch stall",
    "cut one way",
    "cut both ways",
    "isolation",
    "reset",
    "half-open",
    "join",
    "drain",
    "massacre",
    "place slow",
    "place full",
    "place forgets",
    "place loses",
    "keys deleted",
    "called gone",
    "power loss",
    "shut down",
)
_KIND_WEIGHTS = (12, 3, 7, 2, 2, 3, 2, 2, 6, 7, 3, 4, 2, 2, 5, 3, 3, 3, 4, 2, 4, 4, *(0,) * 9)

_MOMENTS = (
    "sending commit", "sending takeover", "sending admit", "sending evict", "sending restart", "sending register",
    "before commit", "after commit", "before takeover", "after takeover", "before admit", "after admit",
    "before evict", "after evict", "before restart", "after restart", "before register", "after register", "after end",
    "message Pull", "message Item", "message Offer", "message Report", "message Seal", "message Accepted",
    "message Release", "message HandOver", "message Request", "message Answer", "message Flag",
    "answer Flag", "answer Request", "answer Offer", "answer Report", "answer Accepted", "answer Item",
    "point compose", "point processor", "point sync", "point snapshot", "point done", "point commit",
    "point committed",
)  # fmt: skip
"""A moment is: "sending" a write of a kind (`invariants.kind_of`) or a message; just "before" or "after" a write; the
arrival of a message, whose receiver ("message") or sender ("answer") is the moment's node; the "point" where a node has
reached a stage of an epoch."""
_OVERTAKEN_BY = {
    "sending commit": ("takeover", "takeover", "restart", "register"),
    "sending takeover": ("commit", "takeover", "admit", "evict", "restart"),
    "sending admit": ("takeover", "takeover", "commit", "evict"),
    "sending evict": ("takeover", "takeover", "commit", "admit"),
    "sending restart": ("takeover", "commit", "restart"),
    "sending register": ("takeover", "gone", "register"),
}
"""Maps a write to other writes that must make it fail if they come right before it."""
_MESSAGE_KINDS = (
    "Pull", "Item", "Offer", "Report", "Seal", "Accepted", "Refusal", "Release", "HandOver", "Request", "Answer",
    "Flag", "RequestRestart", "WrittenFile", "Audit", "LedgerPage", "Waits", "WaitsPage",
)  # fmt: skip
_CHECKPOINT_MOMENTS = (
    "after commit", "after commit", "before commit", "point commit", "sending commit", "point snapshot",
    "point checkpoint", "message WrittenFile", "point checkpointed", "sending checkpoint", "before checkpoint",
    "after checkpoint", "after checkpoint", "sending rollback", "before rollback", "after rollback",
    "after rollback", "after takeover", "after restart", "point takeover", "point taken",
)  # fmt: skip
_OVERTAKEN_BY_ROLLBACKS = {
    "sending checkpoint": ("rollback", "rollback", "takeover", "commit"),
    "sending commit": ("rollback", "checkpoint"),
    "sending takeover": ("rollback",),
    "sending rollback": ("commit", "takeover", "checkpoint", "rollback"),
    "sending restart": ("rollback",),
    "sending admit": ("rollback",),
    "sending evict": ("rollback",),
}
"""Like `_OVERTAKEN_BY`, for jobs with checkpoints."""
_MOMENT_WEIGHTS = {"before commit": 3, "after commit": 3, "after takeover": 4, "before takeover": 2, "message Offer": 3}


@dataclass
class Fault:
    """One failure: its kind, moment and target."""

    kind: str
    moment: str  # "": the fault happens at the time `at_s`
    count: int  # 1: the first such moment, 2: the second one
    at_s: float
    lasts_s: float
    target: str  # "who" (the node of the moment), "peer", "leader", "talker", "primary", "member", "any"
    again: bool  # a crash: the node is restarted under its name; faults of disk and keys: all nodes are hit
    gone_s: float | None  # when a launcher reports the node as gone; None: never
    until: str = ""  # a slow request: the moment at which it arrives, if that is before `lasts_s`
    then: Fault | None = None  # a fault that follows right after this one
    to_peer: bool = False  # a cut: always from the target to the other node of the moment
    wakes: str = ""  # a freeze: the moment at which it ends, if that is before `lasts_s`
    saved: bool = False  # the fault waits for the first checkpoint


class CallFaults:
    """Draws faults of single calls: lost or late reads of etcd, slow probes, lost transactions and reports.

    They lengthen short moments, for instance the time between a node's registration and its work. Reads and probes use
    one random generator, transactions and reports another, so that other seeds do not depend on them.
    """

    def __init__(self, rng: random.Random, *, share: float, writes: random.Random, writes_share: float) -> None:
        self._read_rng = rng
        drawn = rng.random() < share
        self._read_failure_share = rng.choice((0.0, 0.03, 0.1)) if drawn else 0.0
        self._slow_probes = drawn and rng.random() < 0.7
        self._write_rng, drawn = writes, writes.random() < writes_share
        self._write_failure_share = writes.choice((0.01, 0.03, 0.1)) if drawn else 0.0
        self._report_loss_share = writes.choice((0.0, 0.02, 0.1)) if drawn else 0.0

    @property
    def active(self) -> bool:
        """True if reads may fail or be late, or probes be slow."""
        return self._read_failure_share > 0 or self._slow_probes

    @property
    def loses_writes(self) -> bool:
        """True if transactions may fail."""
        return self._write_failure_share > 0

    def end(self) -> None:
        """Ends all of these faults."""
        self._read_failure_share, self._slow_probes = 0.0, False
        self._write_failure_share = self._report_loss_share = 0.0

    def draw_write(self) -> str:
        """Draws how a transaction fails: "" (it succeeds), "request", "answer" (is lost), "refused" or "late"."""
        if not self._write_failure_share or self._write_rng.random() >= self._write_failure_share:
            return ""
        return self._write_rng.choice(("answer", "answer", "request", "refused", "late"))

    def draw_report_loss(self) -> bool:
        """Draws whether a report is lost."""
        return self._report_loss_share > 0 and self._write_rng.random() < self._report_loss_share

    def draw_read(self) -> str:
        """Draws how a read fails: "" (it succeeds), "request" or "answer" (is lost), or "late"."""
        if not self._read_failure_share or self._read_rng.random() >= self._read_failure_share:
            return ""
        return self._read_rng.choice(("answer", "request", "late"))

    def late_read_s(self) -> float:
        """Draws the delay of a late read, mostly less than the timeout of a call."""
        return _LATE_READ_S * self._read_rng.random() ** 2

    def probe_s(self, limit_s: float) -> float:
        """Draws the extra duration of a probe, less than `limit_s`; 0.0 in seeds without slow probes."""
        return 0.9 * limit_s * self._read_rng.random() if self._slow_probes else 0.0


_LATE_READ_S = 2.0

_KILLING_KINDS = ("crash", "crash", "host crash", "freeze", "isolation")
_DISCONNECTING_KINDS = ("reset", "cut one way", "cut one way", "cut one way", "half-open", "freeze", "crash")


def draw(rng: random.Random, *, talks: bool, erratic: bool) -> list[Fault]:
    """Draws the failures of one seed.

    Args:
        talks: the tasks send flags and requests.
        erratic: some tasks compute other values each time.
    """
    faults = [draw_chain(rng, follows=False) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 7)))]
    if rng.random() < 0.6:
        recipes = [*_SEQUENCES, *([_lost_acknowledgement] * (2 * talks)), *([_lost_producer] * (3 * erratic))]
        faults += rng.choice(recipes)(rng)
    return faults


def draw_chain(rng: random.Random, *, follows: bool) -> Fault:
    """Draws a failure of any kind, and perhaps others that follow it (`then`).

    Args:
        follows: the failure itself follows another one, so it has no moment.
    """
    weights = [_MOMENT_WEIGHTS.get(m, 1) for m in _MOMENTS]
    fault = Fault(
        kind=rng.choices(KINDS, _KIND_WEIGHTS)[0],
        moment=rng.choices(_MOMENTS, weights)[0] if not follows and rng.random() < 0.8 else "",
        count=rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 9)),
        at_s=rng.choice((0.02, 0.1, 0.5, 3.0)) * rng.random(),
        lasts_s=rng.choice((0.002, 0.02, 0.2, 1.0, 2.0, 3.0, 4.5)) * rng.uniform(0.5, 1.0),
        target=rng.choice(("who", "who", "who", "leader", "primary", "member", "any")),
        again=rng.random() < 0.7,
        gone_s=rng.choice((0.0, 0.005, 0.05, 0.3, 1.0, None)),
    )
    if rng.random() < 0.3:
        # Two faults at one moment: the second may hit the same node, or one that reacts.
        fault.then = draw_chain(rng, follows=True)
        fault.then.at_s = rng.choice((0.0, 0.001, 0.01, 0.1, 1.0)) * rng.random()
    if fault.kind == "etcd slow request":
        _make_late(fault, rng, rng.choice(list(_OVERTAKEN_BY)))
    return fault


def _make_late(
    fault: Fault, rng: random.Random, moment: str, overtaken_by: Mapping[str, tuple[str, ...]] = _OVERTAKEN_BY
) -> None:
    """Changes the fault to a late write, sent at `moment`: it arrives after a time, or just after another write."""
    fault.kind, fault.target, fault.moment = "etcd slow request", "who", moment
    if rng.random() < 0.6:
        fault.until = "after " + rng.choice(overtaken_by[moment])
        fault.lasts_s = max(fault.lasts_s, 0.5)


# -- failures that meet: each is a race that a rule of the protocol prevents -----------------------------


def _overtaken_write(rng: random.Random) -> list[Fault]:
    """Draws a late write to etcd, while a node that the write depends on dies and is replaced."""
    first, then = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    first.lasts_s = rng.choice((0.1, 0.5, 2.0)) * rng.uniform(0.5, 1.0)
    _make_late(first, rng, rng.choice(("sending commit", "sending commit", "sending admit", "sending takeover")))
    then.kind, then.at_s = rng.choice(_KILLING_KINDS), rng.choice((0.0, 0.01, 0.1)) * rng.random()
    then.target = rng.choice(
        ("primary", "leader", "member") if first.moment == "sending commit" else ("who", "primary")
    )
    then.gone_s, then.lasts_s = rng.choice((0.0, 0.005)), 3.0
    first.then, then.then = then, None
    return [first]


def _late_member_change(rng: random.Random) -> list[Fault]:
    """Draws a member that dies, freezes or moves, and a late write that evicts it or admits another member. The writer
    may have been replaced by then."""
    cause, late = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    cause.kind = rng.choice(("freeze", "freeze", "isolation", "crash", "join", "drain"))
    cause.target, cause.count, cause.then = "member", rng.choice((1, 1, 2, 4)), None
    cause.moment = rng.choice(("point compose", "after admit", "message Offer", "after commit"))
    cause.lasts_s, cause.gone_s = rng.choice((2.2, 3.0, 4.0)), rng.choice((0.0, 0.005))
    late.lasts_s, late.then = rng.choice((0.3, 1.0, 2.0)), None
    _make_late(late, rng, rng.choice(("sending evict", "sending evict", "sending admit")))
    late.count = rng.choice((1, 1, 2, 3))
    if rng.random() < 0.6:
        late.then = draw_chain(rng, follows=True)
        late.then.kind, late.then.target, late.then.gone_s = rng.choice(("crash", "crash", "freeze")), "who", 0.0
        late.then.at_s, late.then.then = rng.choice((0.0, 0.01, 0.1)) * rng.random(), None
        late.then.lasts_s = 3.0
    return [cause, late]


def _successor_with_stale_watch(rng: random.Random) -> list[Fault]:
    """Draws a primary that dies around a commit, and a successor whose watch has not shown that commit."""
    first, then = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    first.kind, first.target = "watch stall", rng.choice(("member", "member", "leader", "any"))
    first.moment = rng.choice(("point done", "point snapshot", "before commit", "sending commit", "message Report"))
    first.lasts_s = rng.choice((0.05, 0.3, 1.0))
    then.kind, then.target = "crash", rng.choice(("primary", "primary", "who"))
    then.at_s, then.gone_s = rng.choice((0.0, 0.01, 0.05)) * rng.random(), rng.choice((0.0, None))
    first.then, then.then = then, None
    return [first]


def _late_answers(rng: random.Random) -> list[Fault]:
    """Draws late answers of etcd, followed by lost requests."""
    late, then = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    late.kind, late.moment, late.lasts_s = "etcd slow answers", rng.choice(("after register", "point compose", "")), 1.0
    then.kind, then.at_s, then.lasts_s, then.then = rng.choice(("etcd cut", "isolation", "freeze")), 0.9, 4.5, None
    then.target = late.target = "who"
    late.then = then
    return [late]


def _lost_acknowledgement(rng: random.Random) -> list[Fault]:
    """Draws a flag, request or answer that arrives without an acknowledgement to its sender."""
    fault = draw_chain(rng, follows=True)
    fault.kind, fault.target, fault.lasts_s = rng.choice(_DISCONNECTING_KINDS), "who", rng.choice((0.6, 2.2, 4.5))
    fault.moment = rng.choice(("message Request", "message Answer", "message Flag", "message Flag", "answer Flag"))
    return [fault]


def _lost_producer(rng: random.Random) -> list[Fault]:
    """Draws a producer that dies when consumers have pulled some of its items."""
    fault = draw_chain(rng, follows=True)
    fault.kind, fault.target, fault.gone_s = (
        rng.choice(("crash", "crash", "freeze")),
        "who",
        rng.choice((0.0, 0.05)),
    )
    fault.moment = rng.choice(("answer Item", "answer Item", "message Pull", "point snapshot", "answer Report"))
    fault.lasts_s, fault.count = 3.0, rng.choice((1, 1, 2, 3, 5))
    return [fault]


def draw_for_epochs_in_flight(rng: random.Random, *, erratic: bool) -> list[Fault]:
    """Draws faults of a seed whose tasks may be in several epochs at a time.

    These seeds have no flags and no requests. So an epoch restarts only if an erratic task's successor puts other items
    than consumers have pulled. If the task dies after its first epoch, later epochs are under way then.
    """
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 2, 2)) if erratic else 0):
        faults += _lost_producer(rng)
        faults[-1].count = rng.choice((3, 6, 10, 16, 25))
    return faults


def draw_absences(rng: random.Random) -> list[Fault]:
    """Draws nodes that end, and one node that freezes for so long that it counts as gone, or whose write is as late."""
    faults = [draw_chain(rng, follows=True) for _ in range(rng.choice((2, 3, 4)))]
    for number, fault in enumerate(faults[1:]):
        fault.kind, fault.target, fault.gone_s, fault.then = (
            rng.choice(("crash", "crash", "drain")),
            "any",
            0.0,
            None,
        )
        fault.moment, fault.again, fault.at_s = "", True, (number + 1) * rng.choice((0.2, 1.0, 2.0)) * rng.random()
    late = faults[0]
    late.target, late.again, late.then, late.gone_s = "who", True, None, 0.0
    late.moment = rng.choice(("after admit", "message Offer", "point compose", "after commit", "after register"))
    late.count = rng.choice((1, 1, 2, 4))
    if rng.random() < 0.7:
        late.kind, late.target = "freeze", rng.choice(("who", "member", "member"))
        late.lasts_s = rng.uniform(3.5, 8.0)
    else:
        _make_late(late, rng, rng.choice(("sending register", "sending admit", "sending evict", "sending takeover")))
        late.lasts_s, late.until = rng.uniform(1.0, 6.0), rng.choice(("after gone", ""))
        late.then = draw_chain(rng, follows=True)
        late.then.kind, late.then.target, late.then.then = "crash", rng.choice(("who", "member")), None
        late.then.at_s, late.then.gone_s, late.then.again = 0.1 * rng.random(), rng.choice((0.0, 0.05)), True
    return faults


def draw_report_crashes(rng: random.Random) -> list[Fault]:
    """Draws crashes of primaries whose report has just arrived, for jobs whose replicas disagree about the end."""
    faults = [draw_chain(rng, follows=True) for _ in range(rng.choice((1, 2)))]
    for fault in faults:
        fault.kind, fault.target, fault.gone_s, fault.then = "crash", "who", rng.choice((0.0, 0.005)), None
        fault.moment, fault.count = "answer Report", rng.choice((1, 2, 3, 5, 8, 12))
    return faults


def draw_between_steps(rng: random.Random) -> list[Fault]:
    """Draws faults between steps of a node's loop, or at a message of any kind."""
    faults = [draw_chain(rng, follows=True) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    for fault in faults:
        fault.kind = rng.choice(("crash", "crash", "freeze", "reset", "watch break", "cut one way", fault.kind))
        fault.until = ""
        if rng.random() < 0.6:
            fault.moment, fault.count = "step", int(10 ** rng.uniform(1.0, 4.0))
        else:
            fault.moment = f"{rng.choice(('sending', 'message', 'answer'))} {rng.choice(_MESSAGE_KINDS)}"
            fault.count = int(10 ** rng.uniform(0.0, 1.7))
    return faults


def draw_last_epoch_faults(rng: random.Random) -> list[Fault]:
    """Draws faults in the last epoch: only then a job ends while a node is replaced."""
    faults = [draw_chain(rng, follows=True) for _ in range(rng.choice((1, 1, 2)))]
    for fault in faults:
        fault.kind = rng.choice((fault.kind, fault.kind, "crash", "keys deleted"))
        fault.moment = f"last {rng.choice(('compose', 'processor', 'sync', 'snapshot', 'done', 'commit'))}"
        fault.count, fault.until = rng.choice((1, 1, 2, 3)), ""
        if fault.kind == "keys deleted":
            fault.again = False
    return faults


def draw_deletions(rng: random.Random) -> list[Fault]:
    """Draws deletions of the keys of one living node, or of all nodes."""
    faults = [draw_chain(rng, follows=False) for _ in range(rng.choice((1, 1, 2, 3)))]
    for fault in faults:
        fault.kind, fault.again = "keys deleted", rng.random() < 0.5
        if fault.until:  # it was drawn as a write that is late
            fault.until, fault.target = "", "any"
    return faults


def draw_called_gone(rng: random.Random) -> list[Fault]:
    """Draws launchers that declare a running or frozen node gone."""
    faults = [draw_chain(rng, follows=False) for _ in range(rng.choice((1, 1, 2, 3)))]
    for fault in faults:
        fault.kind, fault.until = "called gone", ""
        if rng.random() < 0.4:  # the node freezes until the others have reacted
            stands = draw_chain(rng, follows=True)
            stands.kind, stands.at_s, stands.then = (
                rng.choice(("freeze", "isolation", "etcd cut", "stuck loop")),
                0.0,
                None,
            )
            stands.target, stands.lasts_s, fault.then = "who", rng.choice((0.2, 1.5, 4.5)), stands
    return faults


def draw_power_losses(rng: random.Random) -> list[Fault]:
    """Draws the death of all nodes of a host at once, with etcd's answers to other nodes lost."""
    faults = [draw_chain(rng, follows=False) for _ in range(rng.choice((1, 1, 2)))]
    for fault in faults:
        fault.kind, fault.until, fault.target = "power loss", "", rng.choice(("leader", "leader", "primary", "who"))
        fault.gone_s = rng.choice((None, None, 1.0, 0.05))  # mostly its launcher went with it
    return faults


@dataclass
class Resubmission:
    """A second submission of the job's name.

    Attributes:
        shut: failures that end the first run; empty if it ends by itself.
        collected: a launcher collects the results of the first run before.
        after_s: time between the end of the first run and the submission.
        resume: the second run resumes from the newest checkpoint, if there is one.
        lost: how many writes of the submission have an unknown outcome.
        faults: failures of the second run.
    """

    shut: list[Fault]
    collected: bool
    after_s: float
    resume: bool
    lost: int
    faults: list[Fault]


def draw_resubmission(rng: random.Random, *, has_checkpoints: bool) -> Resubmission:
    """Draws a second submission of the job's name.

    Args:
        has_checkpoints: the job has checkpoints.
    """
    shut: list[Fault] = []
    if rng.random() < 0.7:
        shut = [draw_chain(rng, follows=False)]
        shut[0].kind, shut[0].until, shut[0].count = "shut down", "", rng.choice((1, 1, 2, 3, 5, 9))
        if has_checkpoints and rng.random() < 0.8:  # right after the first checkpoint: the job may end soon
            shut[0].moment, shut[0].count = rng.choice(("after checkpoint", *_CHECKPOINT_MOMENTS[:9])), 1
            shut[0].saved = True
        if rng.random() < 0.5:  # a node does not learn about it
            deaf = draw_chain(rng, follows=True)
            deaf.kind = rng.choice(("freeze", "freeze", "watch stall", "isolation", "etcd cut", "etcd slow request"))
            deaf.target, deaf.at_s, deaf.until = rng.choice(("who", "leader", "primary", "member")), 0.0, ""
            deaf.lasts_s, deaf.then, shut[0].then = rng.choice((0.2, 1.0, 3.0)), None, deaf
        if shut[0].saved and rng.random() < 0.2:
            shut = [_after_lost_file(shut[0])]
    return Resubmission(
        shut=shut,
        collected=rng.random() < 0.6,
        after_s=rng.choice((0.0, 0.0, 0.01, 0.1, 1.0)) * rng.random(),
        resume=rng.random() < (0.85 if has_checkpoints else 0.7),
        lost=rng.choice((0, 0, 0, 1, 2)),
        faults=[draw_chain(rng, follows=False) for _ in range(rng.choice((0, 1, 1, 2, 3)))],
    )


def draw_checkpoint_faults(rng: random.Random) -> list[Fault]:
    """Draws faults of a seed whose job has checkpoints."""
    kinds = ["massacre"] * rng.choice((0, 1, 1, 1, 2, 2, 3))
    kinds += [rng.choice(("place slow", "place full", "place forgets")) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    faults = [_checkpoint_fault(rng, kind) for kind in kinds]
    if rng.random() < 0.3:
        faults += rng.choice((_late_write_during_roll_back, _frozen_during_roll_back))(rng)
    if rng.random() < 0.15:
        faults.append(_after_lost_file(_checkpoint_fault(rng, "massacre")))
    return faults


def _after_lost_file(fault: Fault) -> Fault:
    """Returns a fault that loses a file of the newest checkpoint, followed by `fault`, which needs that checkpoint."""
    lost = dataclasses.replace(fault, kind="place loses", saved=True, then=fault)
    fault.moment, fault.at_s = "", 0.0
    return lost


def _checkpoint_fault(rng: random.Random, kind: str) -> Fault:
    """Draws a fault of this kind, mostly at a moment of a checkpoint or a roll-back."""
    fault = draw_chain(rng, follows=False)
    fault.kind, fault.until = kind, ""
    if rng.random() < 0.8:
        fault.moment, fault.count = rng.choice(_CHECKPOINT_MOMENTS), rng.choice((1, 1, 1, 2, 2, 3, 4))
    if kind == "massacre":
        fault.gone_s = rng.choice((0.0, 0.0, 0.005, 0.05, 0.3, 1.0, None))
    return fault


def _late_write_during_roll_back(rng: random.Random) -> list[Fault]:
    """Draws a write that arrives late, while the job is rolled back."""
    late, massacre = draw_chain(rng, follows=True), _checkpoint_fault(rng, "massacre")
    _make_late(late, rng, rng.choice(list(_OVERTAKEN_BY_ROLLBACKS)), _OVERTAKEN_BY_ROLLBACKS)
    late.lasts_s, late.count = rng.choice((0.1, 0.5, 2.0)) * rng.uniform(0.5, 1.0), rng.choice((1, 1, 2, 3))
    massacre.moment, massacre.at_s = "", rng.choice((0.0, 0.01, 0.1)) * rng.random()
    massacre.gone_s, massacre.then, late.then = rng.choice((0.0, 0.005)), None, massacre
    return [late]


def _frozen_during_roll_back(rng: random.Random) -> list[Fault]:
    """Draws a node that is frozen or cut off while the job is rolled back, and resumes after that."""
    freeze, massacre = _checkpoint_fault(rng, "freeze"), _checkpoint_fault(rng, "massacre")
    freeze.kind = rng.choice(("freeze", "freeze", "stuck loop", "isolation", "watch stall", "etcd cut"))
    freeze.target, freeze.lasts_s = rng.choice(("leader", "primary", "member", "who")), rng.choice((0.2, 1.5, 3.0, 4.5))
    massacre.moment, massacre.at_s = "", rng.choice((0.0, 0.01, 0.1)) * rng.random()
    massacre.gone_s, massacre.then, freeze.then = rng.choice((0.0, 0.005)), None, massacre
    return [freeze]


# -- races that need several failures: in some of the seeds ----------------------------


def choose_race(rng: random.Random, *, talks: bool, has_checkpoints: bool) -> str:
    """Draws which race a seed has, and returns its name; "" for none.

    Args:
        talks: tasks send flags and requests, also tasks that are not the leader's.
        has_checkpoints: the job has checkpoints.
    """
    if rng.random() >= _RACE_SHARE or not (talks or has_checkpoints):
        return ""
    of_checkpoints = ("late pointer", "newer checkpoint", "newer checkpoint")
    return rng.choice((*(("late seal",) * talks), *(of_checkpoints * has_checkpoints)))


def draw_race_faults(rng: random.Random, race: str) -> list[Fault]:
    """Draws the failures that may cause a race, by its name."""
    return _RACES[race](rng)


def _late_seal(rng: random.Random) -> list[Fault]:
    """Draws a late seal to a task, and the crash of another idle task, whose successor sends more messages."""
    faults = []
    crash = draw_chain(rng, follows=True)
    crash.kind, crash.target, crash.gone_s, crash.then = "crash", "talker", 0.0, None
    crash.at_s = rng.choice((0.0, 0.0, 0.001, 0.01)) * rng.random()
    first, last = rng.choice((1, 1, 2, 3, 5)), rng.choice((1, 2, 3))
    for count in range(first, first + 4):
        cut = draw_chain(rng, follows=True)
        cut.kind, cut.target, cut.to_peer, cut.moment, cut.count = "cut one way", "who", True, "sending Seal", count
        cut.lasts_s, cut.then = rng.choice((0.1, 0.3)) * rng.uniform(0.5, 1.0), crash if count == first + last else None
        faults.append(cut)
    return faults


def _late_pointer(rng: random.Random) -> list[Fault]:
    """Draws a leader that freezes between finding a checkpoint complete and writing its pointer. Another leader, which
    lacks a file, abandons the checkpoint; then the first leader resumes."""
    slow, frozen = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    slow.kind, slow.target, slow.moment, slow.then = "place slow", "leader", "message WrittenFile", None
    slow.again = False
    slow.count, slow.lasts_s = rng.choice((1, 1, 1, 2)), rng.choice((0.2, 1.0, 2.0)) * rng.uniform(0.5, 1.0)
    frozen.kind, frozen.target, frozen.moment, frozen.count = "freeze", "who", "place listed", rng.choice((1, 1, 1, 2))
    frozen.lasts_s, frozen.wakes, frozen.then = 4.5, "place cleared", None
    return [slow, frozen]


def _newer_checkpoint(rng: random.Random) -> list[Fault]:
    """Draws a late pointer to a checkpoint, while a node reads the previous checkpoint for a roll-back."""
    late, slow = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    massacre = _checkpoint_fault(rng, "massacre")
    _make_late(late, rng, "sending checkpoint", _OVERTAKEN_BY_ROLLBACKS)
    # The job goes back only after the leases of dead nodes have ended.
    late.until, late.count, late.lasts_s = "", rng.choice((2, 2, 3)), rng.uniform(2.0, 3.0)
    slow.kind, slow.again, slow.lasts_s, slow.at_s = "place slow", True, rng.choice((1.0, 3.0)), 0.0
    massacre.moment, massacre.at_s, massacre.gone_s, massacre.then = "", 0.0, 0.0, None
    late.then, slow.then = slow, massacre
    return [late]


def draw_member_changes(rng: random.Random) -> list[Fault]:
    """Draws changes of members while a write that depends on them is late."""
    return rng.choice((_late_takeover, _gone_candidate))(rng)


def _late_takeover(rng: random.Random) -> list[Fault]:
    """Draws a primary that is frozen until a member decides to take over, then resumes and evicts that member, since
    others join, before the takeover arrives."""
    frozen, late = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    frozen.kind, frozen.target, frozen.lasts_s, frozen.wakes = "freeze", "primary", 4.5, "sending takeover"
    frozen.moment, frozen.count, frozen.then = rng.choice(("after commit", "after admit", "point compose")), 1, None
    _make_late(late, rng, "sending takeover")
    late.until, late.count, late.lasts_s = "", 1, rng.uniform(1.0, 4.0)
    joins = [draw_chain(rng, follows=True) for _ in range(rng.choice((1, 2, 3)))]
    for join, before in zip(joins, (late, *joins), strict=False):
        join.kind, join.until, join.at_s, join.then, before.then = "join", "", 0.01 * rng.random(), None, join
    return [frozen, late]


def _gone_candidate(rng: random.Random) -> list[Fault]:
    """Draws a candidate that dies, and its admission that arrives after the candidate was declared gone."""
    late, crash = draw_chain(rng, follows=True), draw_chain(rng, follows=True)
    _make_late(late, rng, "sending admit")
    late.until, late.count, late.lasts_s = "after gone", rng.choice((1, 1, 2, 3)), 1.5
    crash.kind, crash.target, crash.at_s, crash.gone_s = "crash", "peer", 0.0, rng.choice((0.0, 0.05))
    crash.then, late.then = None, crash
    return [late]


_RACE_SHARE = 0.5
"""Share of the possible seeds that have one of these races."""
_RACES = {
    "late seal": _late_seal,
    "late pointer": _late_pointer,
    "newer checkpoint": _newer_checkpoint,
}
_SEQUENCES = (
    _overtaken_write,
    _late_member_change,
    _late_member_change,
    _successor_with_stale_watch,
    _late_answers,
)
