"""Injects the faults of a seed: waits for each fault's moment, chooses its node, and ends it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial

from taskgraph.protocol.kv import Delete, Txn
from taskgraph.testing.simulate.drawing import Fault, draw_chain
from taskgraph.testing.simulate.loop import outside
from taskgraph.testing.simulate.world import SimNode, World, discard

__all__ = ["FaultInjector"]


class FaultInjector:
    """Injects faults into a world.

    Each kind of fault has a method of its name, as `_etcd_pause(fault, target)`; `target` is the node that is hit.
    """

    def __init__(self, world: World, faults: list[Fault], rng: random.Random, *, ruthless: bool) -> None:
        self._world = world
        self.ruthless = ruthless  # True: crashes may end all replicas of a task
        self._rng = rng
        if ruthless:
            faults = [*faults, dataclasses.replace(draw_chain(rng, follows=False), kind="massacre")]
        self._waiting: list[Fault] = []
        self._stopped = False
        self._peer = ""  # the other node of the current moment
        self._held_back: list[tuple[str, Callable[[], None]]] = []  # (moment, function to call at that moment)
        self.bold = False  # True: ruthless once there is a checkpoint
        self.add(faults)
        world.moment = self._on_moment

    def add_around_checkpoints(self, faults: list[Fault]) -> None:
        """Adds faults of a job with checkpoints. Faults that end all replicas of a task wait for one."""
        self.bold = any(f.kind == "massacre" or (f.then is not None and f.then.kind == "massacre") for f in faults)
        self.add(faults)

    def add(self, faults: list[Fault]) -> None:
        """Adds faults: each waits for its moment or time."""
        for fault in faults:
            if fault.moment:
                self._waiting.append(fault)
            else:
                self._world.etcd.later(fault.at_s, self._inject, fault, "")

    def _on_moment(self, name: str, node: str, peer: str = "") -> None:
        """Called at each moment: injects the faults that wait for it, and resumes what is held back until it."""
        if self._held_back:
            due = [resume for moment, resume in self._held_back if moment == name]
            self._held_back = [held for held in self._held_back if held[0] != name]
            for resume in due:
                outside(resume)
        if self._stopped:
            return
        for fault in [fault for fault in self._waiting if fault.moment == name]:
            fault.count -= 1
            if fault.count <= 0:
                self._waiting.remove(fault)
                outside(self._inject, fault, node, peer)

    # -- targets ----------------------------------------------------------------------------------

    def _choose_target(self, fault: Fault, who: str) -> SimNode | None:
        """Chooses the node that `fault.target` describes; if it does not exist, any node; None: no node exists.

        `who` is the node of the fault's moment.
        """
        world = self._world
        view = world.invariants.view
        nodes = world.existing()
        if not nodes:
            return None
        name = ""
        task = self._rng.randrange(world.workload.tasks)
        if fault.target == "who":
            name = who
        elif fault.target == "peer":
            name = self._peer
        elif fault.target == "leader":
            name = view.primary_node(0) or ""
        elif fault.target == "talker":
            name = view.primary_node(world.workload.moody or 0) or ""
        elif fault.target == "primary":
            name = view.primary_node(task) or ""
        elif fault.target == "member":
            members = [n for n in view.in_sync(task) if n != view.primary_node(task)]
            name = self._rng.choice(members) if members else ""
        known = world.nodes.get(name)
        return known if known is not None and known.exists else self._rng.choice(nodes)

    def _pick_peer(self, node: SimNode, *, certain: bool = False) -> SimNode | None:
        """Picks another node than `node`, mostly the peer of the current moment.

        Args:
            certain: always pick the peer, if there is one.
        """
        peer = self._world.nodes.get(self._peer)
        if peer is not None and peer is not node and peer.exists and (certain or self._rng.random() < 0.7):
            return peer
        others = [n for n in self._world.existing() if n is not node]
        return self._rng.choice(others) if others else None

    def _is_survivable(self, *victims: SimNode) -> bool:
        """True if tasks may be lost, or each task of the victims has a replica in sync on another node that stays."""
        world = self._world
        view = world.invariants.view
        if self.ruthless or (self.bold and view.checkpoint is not None):
            return True
        living = {n.id for n in world.existing() if n not in victims and not (n.draining or n.declared_gone)}
        held = (task for task in range(world.workload.tasks) if any(v.id in view.in_sync(task) for v in victims))
        return all(any(n in living and n not in view.gone for n in world.active_members(task)) for task in held)

    # -- what -------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, who: str, peer: str = "") -> None:
        """Makes a fault happen now, and the one that follows it later. Puts it off if it must wait for a checkpoint."""
        if self._stopped:
            return
        saved = fault.saved or (fault.kind == "massacre" and self.bold and not self.ruthless)
        if saved and self._world.invariants.view.checkpoint is None:
            moment = self._rng.choice(("after checkpoint", "after commit", "after register", "point done"))
            count = self._rng.choice((1, 1, 2))
            if fault.saved:  # the job may end soon
                moment, count = "after checkpoint", 1
            self._waiting.append(dataclasses.replace(fault, moment=moment, count=count))
            return
        if fault.then is not None:
            self._later(fault.then.at_s, self._inject, fault.then, who, peer)
        self._peer = peer
        target = self._choose_target(fault, who)
        if target is None:
            return
        getattr(self, "_" + fault.kind.replace(" ", "_").replace("-", "_"))(fault, target)

    def _later(self, delay_s: float, function: object, *args: object) -> None:
        """Calls a function after a delay, outside of all processes."""
        self._world.etcd.later(delay_s, function, *args)  # type: ignore[arg-type]

    def _record_fault(self, fault: Fault, detail: str) -> None:
        """Logs and counts a fault that takes effect."""
        when = f" ({fault.moment})" if fault.moment else ""
        self._world.transcript.add_fault(fault.kind, detail + when)

    def _crash(self, fault: Fault, target: SimNode, *, host: bool = False) -> None:
        """Kills a node, unless a task would be lost. Then its launcher may report the death, and start it again."""
        if not self._is_survivable(target):
            self._world.transcript.add("fault", "spared", f"{target.id}: no other node holds its tasks")
            return
        self._record_fault(fault, target.id)
        self.kill(target, host=host)
        if fault.gone_s is not None:
            self._later(fault.gone_s, self._world.declare_gone, target.id, "killed")
        if fault.again:
            self._later(self._rng.uniform(0.0, 0.5), self._start_node, target.name)
        elif len(self._world.existing()) < 2:
            self._later(0.1, self._start_node, "")

    def kill(self, target: SimNode, *, host: bool) -> None:
        """Kills a node like `kill -9`; with `host`, like a host that loses power."""
        target.dead = True
        target.coordinator.crash()
        self._world.network.crash(target.id, host=host)
        target.run.cancel()
        target.process.thaw(self._world.loop)
        target.threads.thaw(self._world.loop)

    def _massacre(self, fault: Fault, target: SimNode) -> None:
        """Kills all nodes with a replica in sync of a task."""
        task = self._rng.randrange(self._world.workload.tasks)
        holders = [self._world.nodes[name] for name in self._world.invariants.view.in_sync(task)]
        for holder in holders:
            if holder.exists:
                self._crash(fault, holder)

    def _host_crash(self, fault: Fault, target: SimNode) -> None:
        self._crash(fault, target, host=True)

    def _power_loss(self, fault: Fault, target: SimNode) -> None:
        """Kills all nodes of a host at once, if the job survives that; next writes of some other nodes to etcd have
        unknown outcomes.
        """
        nodes = self._world.existing()
        together = [node for node in nodes if node.node.host == target.node.host]
        if not self._is_survivable(*together):
            self._world.transcript.add("fault", "spared", f"{target.node.host}: no other node holds its tasks")
            return
        for node in nodes:
            if node not in together:
                node.coordinator.lose_next += self._rng.choice((0, 1, 2))
        for node in together:
            self._crash(fault, node, host=True)

    def _called_gone(self, fault: Fault, target: SimNode) -> None:
        """Makes a launcher declare a living node gone, and mostly revoke its lease."""
        if not self._is_survivable(target):
            return
        self._record_fault(fault, target.id)
        target.declared_gone = True
        self._world.declare_gone(target.id, "killed")
        registered = self._world.invariants.view.nodes.get(target.id)
        if registered is not None and self._rng.random() < 0.7:
            self._world.etcd.arrive(lambda: self._world.etcd.store.revoke(registered.record.lease))
        self._later(self._rng.uniform(0.0, 0.5), self._start_node, target.name if fault.again else "")

    def _shut_down(self, fault: Fault, target: SimNode) -> None:
        """Cancels the job as a user's command does."""
        self._record_fault(fault, "")
        self._world.cancel_job()

    def _start_node(self, name: str) -> None:
        """Starts a node, unless one of this name exists, or faults have ended."""
        if not self._stopped and not any(n.name == name for n in self._world.existing()):
            node = self._world.add(name)
            self._world.transcript.add("world", "start", node.id)

    def _freeze(self, fault: Fault, target: SimNode) -> None:
        """Freezes a node's whole process, with the lease's thread."""
        wakes = f", or until just {fault.wakes}" if fault.wakes else ""
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s{wakes}")
        target.process.frozen = target.threads.frozen = True
        self._later(fault.lasts_s, self._thaw, target)
        if fault.wakes:
            self._held_back.append((fault.wakes, partial(self._later, 0.0, self._thaw, target)))

    def _thaw(self, target: SimNode) -> None:
        """Ends the freeze of a node's main loop and lease thread."""
        if target.process.frozen:
            self._world.transcript.add("fault", "thaw", target.id)
        target.process.thaw(self._world.loop)
        target.threads.thaw(self._world.loop)

    def _stuck_loop(self, fault: Fault, target: SimNode) -> None:
        """Freezes the main loop of a node, but not the lease's thread."""
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.process.frozen = True
        self._later(fault.lasts_s, self._thaw, target)

    def _slow_node(self, fault: Fault, target: SimNode) -> None:
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        self._run_briefly(target, self._world.loop.at + fault.lasts_s)

    def _run_briefly(self, target: SimNode, until: float) -> None:
        """Runs the node for a moment, then pauses it, and repeats that until a time."""
        self._thaw_quietly(target)
        if not self._stopped and target.exists and self._world.loop.at < until:
            self._later(0.0005, self._pause_briefly, target, until)

    def _pause_briefly(self, target: SimNode, until: float) -> None:
        target.process.frozen = True
        self._later(self._rng.uniform(0.005, 0.05), self._run_briefly, target, until)

    def _thaw_quietly(self, target: SimNode) -> None:
        """Thaws a node's main loop, unless another fault has frozen the whole process."""
        if not target.threads.frozen:
            target.process.thaw(self._world.loop)

    def _etcd_pause(self, fault: Fault, target: SimNode) -> None:
        etcd = self._world.etcd
        if etcd.serving:
            self._record_fault(fault, f"{fault.lasts_s:.3f} s")
            etcd.pause()
            self._later(fault.lasts_s, etcd.resume)

    def _etcd_restart(self, fault: Fault, target: SimNode) -> None:
        etcd = self._world.etcd
        if etcd.serving:
            self._record_fault(fault, f"{fault.lasts_s:.3f} s")
            etcd.stop()
            self._later(fault.lasts_s, etcd.start)

    def _etcd_leader_loss(self, fault: Fault, target: SimNode) -> None:
        etcd = self._world.etcd
        if etcd.serving:
            self._record_fault(fault, "")
            for node in self._world.existing():
                node.coordinator.lose_next += self._rng.randrange(2)
            etcd.change_leader()

    def _etcd_unknown_outcome(self, fault: Fault, target: SimNode) -> None:
        count = self._rng.choice((1, 1, 2, 3))
        self._record_fault(fault, f"{target.id}, the next {count}")
        target.coordinator.lose_next += count

    def _etcd_slow_request(self, fault: Fault, target: SimNode) -> None:
        """Delays the write that the node is sending."""
        self._record_fault(
            fault, f"{target.id}, {fault.lasts_s:.3f} s" + (f", or until just {fault.until}" if fault.until else "")
        )

        def hold(arrive: Callable[[], None]) -> None:
            arrived: list[bool] = []

            def arrive_once() -> None:
                if not arrived:
                    arrived.append(True)
                    arrive()

            self._later(fault.lasts_s, arrive_once)
            if fault.until:
                self._held_back.append((fault.until, arrive_once))

        target.coordinator.hold_next = hold

    def _etcd_slow_answers(self, fault: Fault, target: SimNode) -> None:
        """Delays etcd's answers to the node for a while, but not its requests."""
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.coordinator.answer_s = fault.lasts_s
        self._later(fault.lasts_s, self._end_slow_answers, target)

    @staticmethod
    def _end_slow_answers(target: SimNode) -> None:
        target.coordinator.answer_s = 0.0

    def _etcd_cut(self, fault: Fault, target: SimNode) -> None:
        """Cuts a node off from etcd for a while, in one direction or both."""
        can_send, can_receive = self._rng.choice(((False, False), (True, False), (False, True)))
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s: speaks {can_send}, hears {can_receive}")
        target.coordinator.cut(can_send=can_send, can_receive=can_receive)
        self._later(fault.lasts_s, self._reconnect, target)

    def _reconnect(self, target: SimNode) -> None:
        """Ends a cut between a node and etcd."""
        target.coordinator.cut(can_send=True, can_receive=True)

    def _etcd_compaction(self, fault: Fault, target: SimNode) -> None:
        self._record_fault(fault, "")
        self._world.etcd.compact()

    def _watch_break(self, fault: Fault, target: SimNode) -> None:
        self._record_fault(fault, target.id)
        target.coordinator.break_streams()

    def _watch_stall(self, fault: Fault, target: SimNode) -> None:
        """Stops the events of a node's watches for a while; calls work."""
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.coordinator.stall(True)
        self._later(fault.lasts_s, target.coordinator.stall, False)

    def _cut_one_way(self, fault: Fault, target: SimNode) -> None:
        other = self._pick_peer(target, certain=fault.to_peer)
        if other is not None:
            one, two = (target, other) if fault.to_peer or self._rng.random() < 0.5 else (other, target)
            self._record_fault(fault, f"{one.id} to {two.id} for {fault.lasts_s:.3f} s")
            self._cut_link(one, two, fault.lasts_s)

    def _cut_link(self, one: SimNode, other: SimNode, lasts_s: float) -> None:
        """Cuts the link from one node to another for a time."""
        network = self._world.network
        self._later(lasts_s, network.heal, one.id, other.id, network.cut(one.id, other.id))

    def _cut_both_ways(self, fault: Fault, target: SimNode) -> None:
        other = self._pick_peer(target)
        if other is not None:
            self._record_fault(fault, f"{target.id} and {other.id} for {fault.lasts_s:.3f} s")
            self._cut_link(target, other, fault.lasts_s)
            self._cut_link(other, target, fault.lasts_s)

    def _isolation(self, fault: Fault, target: SimNode) -> None:
        """Cuts a node off from all others, and perhaps from etcd."""
        also = self._rng.random() < 0.5
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s{', also from etcd' if also else ''}")
        for other in self._world.existing():
            if other is not target:
                self._cut_link(target, other, fault.lasts_s)
                self._cut_link(other, target, fault.lasts_s)
        if also:
            target.coordinator.cut(can_send=False, can_receive=False)
            self._later(fault.lasts_s, self._reconnect, target)

    def _reset(self, fault: Fault, target: SimNode) -> None:
        other = self._pick_peer(target)
        if other is not None:
            self._record_fault(fault, f"{target.id} and {other.id}")
            self._world.network.reset(target.id, other.id)

    def _half_open(self, fault: Fault, target: SimNode) -> None:
        other = self._pick_peer(target)
        if other is not None:
            self._record_fault(fault, f"{target.id} and {other.id}")
            self._world.network.half_open(target.id, other.id)

    def _join(self, fault: Fault, target: SimNode) -> None:
        if len(self._world.existing()) < 6:
            self._record_fault(fault, self._world.add().id)

    def _drain(self, fault: Fault, target: SimNode) -> None:
        if self._is_survivable(target) and len(self._world.existing()) > 1:
            self._record_fault(fault, target.id)
            target.draining = True
            self._world.loop.call_soon(target.node.drain, "asked to", context=target.process.new_context())
            if fault.again:
                self._later(self._rng.uniform(0.0, 1.0), self._start_node, "")

    def _place_slow(self, fault: Fault, target: SimNode) -> None:
        """Slows the checkpoint disk down, for one node or for all."""
        whose = "all nodes" if fault.again else target.id
        self._record_fault(fault, f"{whose}, up to {fault.lasts_s:.3f} s for {2 * fault.lasts_s:.3f} s")
        disk = self._world.disk if fault.again else target.disk
        disk.extra_s = fault.lasts_s
        self._later(2 * fault.lasts_s, disk.mend)

    def _place_full(self, fault: Fault, target: SimNode) -> None:
        """Fails a node's writes to the checkpoint disk for `fault.lasts_s`: no space left."""
        self._record_fault(fault, f"{target.id} for {fault.lasts_s:.3f} s")
        target.disk.full = True
        self._later(fault.lasts_s, target.disk.mend)

    def _place_forgets(self, fault: Fault, target: SimNode) -> None:
        """Makes the disk lose or damage the next files."""
        count = self._rng.choice((1, 1, 2))
        self._record_fault(fault, f"the next {count}")
        self._world.disk.lose_next += count

    def _place_loses(self, fault: Fault, target: SimNode) -> None:
        """Loses or damages a file of the newest checkpoint."""
        view, disk = self._world.invariants.view, self._world.disk
        assert view.checkpoint is not None and view.epoch is not None
        name, at = view.checkpoint.record.name, view.epoch.record
        path = disk.damage_checkpoint(name)
        self._record_fault(fault, path)
        going_back = any(known.node.takeovers.any_under_way for known in self._world.existing())
        if path and (going_back or (at.lineage and at.epoch == at.base)):  # no commit since the roll-back
            disk.lost_in_use.add(name)

    def _keys_deleted(self, fault: Fault, target: SimNode) -> None:
        """Deletes the keys of one node, or of all, as a user might by mistake."""
        world = self._world
        self._record_fault(fault, "of all nodes" if fault.again else target.id)
        key = Delete(world.keys.nodes, prefix=True) if fault.again else Delete(world.keys.node(target.id))
        txn = Txn(success=(key,))
        self._later(0.0, world.etcd.arrive, lambda: discard(world.etcd.store.execute(txn)))

    # -- the end ----------------------------------------------------------------------------------

    def resume(self, faults: list[Fault]) -> None:
        """Injects faults again after `end`, and adds new ones."""
        self._stopped = False
        self.add(faults)

    def end(self) -> None:
        """Injects no more faults, and ends those that last."""
        self._stopped = True
        world = self._world
        world.pace.end()
        for node in [node for node in world.nodes.values() if node.exists]:
            node.process.thaw(world.loop)
            node.threads.thaw(world.loop)
            node.coordinator.cut(can_send=True, can_receive=True)
            node.coordinator.stall(False)
            node.coordinator.lose_next = 0
            node.coordinator.answer_s = 0.0
            node.disk.mend()
        world.disk.mend()
        world.disk.lose_next = 0
        world.disk.set_lag(None)
        world.network.heal_all()
        if world.etcd.paused:
            world.etcd.resume()
        if world.etcd.down:
            world.etcd.start()
