"""Records: round trips, older and newer writers, and what is no record."""

from __future__ import annotations

import json

import pytest
from protocol_kit import node_record

from taskgraph.errors import DecodeError
from taskgraph.protocol.keys import Keys, jobs_prefix
from taskgraph.protocol.records import (
    EpochRecord,
    GoneRecord,
    JobStatus,
    MemberRecord,
    PrimaryRecord,
    Record,
    RunningCode,
    StatusRecord,
    name_of,
)

RECORDS = [
    EpochRecord(epoch=3, attempt=7, writer="n:1"),
    StatusRecord(state=JobStatus.RUNNING, writer="n:2"),
    StatusRecord(
        state=JobStatus.FAILED, reason="ü\n", task=0, epoch=4, where="update", traceback='File "x"\n', writer="n:3"
    ),
    node_record("n1", draining=True),
    GoneRecord(reason="killed", writer="launcher"),
    PrimaryRecord(node="n1", term=2, stateful=False, failovers=1, writer="n:4"),
    MemberRecord(writer="n:5"),
    MemberRecord(until=0, writer="n:6"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_round_trip(record: Record) -> None:
    assert type(record).from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_unknown_fields_are_ignored(record: Record) -> None:
    raw = {**json.loads(record.to_bytes()), "of_a_later_version": [1, 2]}
    assert type(record).from_bytes(json.dumps(raw).encode()) == record


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff", b'{"epoch": 1}', b'{"epoch":1,"attempt":0}{}']
)
def test_invalid_record_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError, match="not a EpochRecord"):
        EpochRecord.from_bytes(data)


def test_half_surrogates_are_escaped_at_any_depth() -> None:
    record = GoneRecord(
        reason="no file \udcff", running_code=(RunningCode("step \ud800", 1, 2), RunningCode("ü", 3, 4))
    )
    escaped = GoneRecord(
        reason="no file \\udcff", running_code=(RunningCode("step \\ud800", 1, 2), RunningCode("ü", 3, 4))
    )
    assert GoneRecord.from_bytes(record.to_bytes()) == escaped


def test_person_can_put_a_record() -> None:
    assert EpochRecord.from_bytes(b' { "epoch": 3,\n"attempt": 1}\n') == EpochRecord(epoch=3, attempt=1)


def test_person_can_read_a_record() -> None:
    text = b'{"writer":"n:1","epoch":3,"attempt":1,"lineage":0,"base":0}'
    assert EpochRecord(epoch=3, attempt=1, writer="n:1").to_bytes() == text


def test_keys_of_a_job_are_all_below_its_root() -> None:
    keys = Keys("demo")
    assert keys.root == jobs_prefix + "demo/"
    found = [value for value in vars(keys).values() if value != "demo"]
    found += [keys.node("n"), keys.gone("n"), keys.primary(3), keys.members(3), keys.member(3, "n"), keys.event("e")]
    assert all(key.startswith(keys.root) for key in found)
    assert len(set(found)) == len(found)
    assert keys.member(3, "n") == keys.members(3) + "n"
    assert not keys.members(33).startswith(keys.members(3))


@pytest.mark.parametrize(("node", "name"), [("n1-0badcafe", "n1"), ("host-7-0badcafe", "host-7"), ("n1", "n1")])
def test_node_is_called_by_its_name(node: str, name: str) -> None:
    assert name_of(node) == name
