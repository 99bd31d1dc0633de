"""What a node thinks of others, on a job's keys in an in-memory etcd and a clock of the test's own."""

from __future__ import annotations

from protocol_kit import World, node_record

from taskgraph.protocol.failure_detector import FailureDetector, NodeState

TTL_S = 3.0
ALL = frozenset({"a", "b", "c"})


def detector(world: World) -> FailureDetector:
    found = FailureDetector(TTL_S)
    found.read_view(world.view(), ALL, 0.0)
    return found


def states(found: FailureDetector) -> list[NodeState]:
    return [found.state(node) for node in sorted(ALL)]


def test_registered_nodes_are_alive() -> None:
    found = detector(World(*ALL))
    assert states(found) == [NodeState.ALIVE] * 3
    assert not found.suspects


def test_absent_node_is_suspected_and_overdue_after_a_time() -> None:
    world = World(*ALL)
    found = detector(world)
    world.delete(world.keys.node("b"))
    found.read_view(world.view(), ALL, 1.0)
    assert found.suspects == {"b"} and found.state("b") == NodeState.ABSENT
    assert found.overdue(world.view(), 5.9, 5.0) == []
    assert found.overdue(world.view(), 6.0, 5.0) == ["b"]
    world.register("b")
    found.read_view(world.view(), ALL, 7.0)
    assert found.state("b") == NodeState.ALIVE


def test_node_without_tasks_may_be_absent() -> None:
    world = World("a")
    found = FailureDetector(TTL_S)
    found.read_view(world.view(), frozenset({"a"}), 0.0)
    assert not found.suspects and not found.absent


def test_no_node_becomes_absent_during_a_pause() -> None:
    world = World(*ALL)
    found = detector(world)
    world.delete(world.keys.node("a"))
    found.read_view(world.view(), ALL, 1.0)
    found.pause()
    world.delete(world.keys.node("b"))
    found.read_view(world.view(), ALL, 2.0)
    assert found.suspects == {"a"}, "it was absent before"
    found.restart_times(9.0)
    found.resume()
    found.read_view(world.view(), ALL, 9.5)
    assert found.suspects == {"a", "b"}
    assert found.overdue(world.view(), 13.9, 5.0) == [], "the pause does not count"
    assert found.overdue(world.view(), 14.0, 5.0) == ["a", "b"]


def test_refusing_node_is_suspected_until_it_answers() -> None:
    world = World(*ALL)
    found = detector(world)
    found.port_refused("b", 1.0)
    found.read_view(world.view(), ALL, 1.0)
    assert found.suspects == {"b"} and found.state("b") == NodeState.REFUSING
    assert not found.is_refusal_news("b")
    assert found.proved_alive("b", trusted=False)
    found.read_view(world.view(), ALL, 1.1)
    assert not found.suspects and found.is_refusal_news("b")


def test_renewed_lease_proves_that_a_refusing_node_lives() -> None:
    """Its port counts again once a connection to it breaks."""
    world = World(*ALL)
    found = detector(world)
    found.port_refused("b", 1.0)
    assert found.split_refusing(world.view(), 1.0 + TTL_S) == (["b"], [])
    assert found.split_refusing(world.view(), 1.0 + TTL_S + 2.1) == ([], ["b"])
    assert found.proved_alive("b", trusted=True)
    assert not found.is_refusal_news("b")
    found.connection_lost("b")
    assert found.is_refusal_news("b")


def test_task_taken_back_proves_that_a_refusing_node_lives() -> None:
    world = World(*ALL)
    for task in (0, 1):
        world.first(task, "b")
    world.commit()
    for task in (0, 1):
        for node in ("a", "c"):
            assert world.admit(task, "b", node).succeeded
    found = detector(world)
    found.port_refused("b", 1.0)
    port = found.refusing_port("b")
    assert port is not None and found.refusing_port("c") is None
    for task in (0, 1):
        world.take_over(task, "a")
        port.taken[task] = world.view().primaries[task].mod_revision
    assert found.nodes_that_took_back(world.view()) == {}, "the tasks are still taken"
    world.take_over(1, "c")
    assert found.nodes_that_took_back(world.view()) == {}, "another node took it"
    world.take_over(0, "b")
    assert found.nodes_that_took_back(world.view()) == {"b": 0}


def test_expired_lease_counts_while_its_key_is_there() -> None:
    world = World(*ALL)
    found = detector(world)
    lease = world.view().nodes["b"].record.lease
    found.lease_changed("b", lease, ended=True)
    found.read_view(world.view(), ALL, 1.0)
    assert found.suspects == {"b"} and found.state("b") == NodeState.EXPIRED
    world.put(world.keys.node("b"), node_record("b", lease=lease + 1).to_bytes())
    found.read_view(world.view(), ALL, 2.0)
    assert found.state("b") == NodeState.ALIVE, "it has another lease now"
    found.lease_changed("b", lease + 1, ended=True)
    found.lease_changed("b", lease + 1, ended=False)
    found.read_view(world.view(), ALL, 3.0)
    assert not found.suspects


def test_gone_node_stays_suspected_whatever_it_does() -> None:
    world = World(*ALL)
    found = detector(world)
    world.die("b")
    assert found.read_view(world.view(), ALL, 1.0)
    assert found.gone == {"b"} and found.state("b") == NodeState.GONE and "b" in found.suspects
    found.proved_alive("b", trusted=True)
    assert not found.read_view(world.view(), ALL, 2.0), "nothing changed"
    assert "b" in found.suspects


def test_worker_that_does_not_answer_is_silent_after_a_ttl() -> None:
    world = World(*ALL)
    found = detector(world)
    found.expect_answers(["b", "c"], 0.0)
    found.heard("c", 2.5)
    assert found.find_newly_silent(2.9, 0.6) == []
    assert found.find_newly_silent(3.0, 0.6) == ["b"]
    found.read_view(world.view(), ALL, 3.0)
    assert found.suspects == {"b"} and found.state("b") == NodeState.SILENT
    assert found.find_newly_silent(3.05, 0.6) == [], "it is known"
    found.heard("b", 3.1)
    found.find_newly_silent(3.1, 0.6)
    found.read_view(world.view(), ALL, 3.1)
    assert not found.suspects


def test_worker_that_hears_fewer_others_waits_longer() -> None:
    found = detector(World(*ALL))
    found.expect_answers(["b", "c"], 0.0)
    assert found.find_newly_silent(3.9, 0.6) == []
    assert found.find_newly_silent(4.0, 0.6) == ["b", "c"]


def test_progress_ends_all_silences() -> None:
    found = detector(World(*ALL))
    found.expect_answers(["b"], 0.0)
    assert found.find_newly_silent(3.0, 0.6) == ["b"]
    found.expect_answers(["b"], 3.1)
    assert found.silent == frozenset()
    found.expect_answers([], 3.2)
    assert found.find_newly_silent(99.0, 0.6) == [], "no worker is asked"
