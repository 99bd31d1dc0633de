"""Certificates that are about to end: one event each."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
import trustme

from taskgraph.network.tls import CA, CERT, KEY, Tls
from taskgraph.node.certificate_expiry import CertificateExpiryWatch
from taskgraph.observe.events import EventLog

BEGIN = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
DAY_S = 86_400.0
LAST_S = (datetime.datetime(3000, 1, 1, tzinfo=datetime.UTC) - BEGIN).total_seconds()
"""The end of trustme's authorities."""
LATE_DAYS = LAST_S / DAY_S + 100


class Told:
    """A node's certificates and events, with a clock of our own."""

    def __init__(self, tls: Tls) -> None:
        self.events = EventLog("n1")
        self.at_s = 0.0
        self._expiring = CertificateExpiryWatch(tls, self.events, "n1", "host1", lambda: BEGIN.timestamp() + self.at_s)

    def check(self, at_s: float) -> list[str]:
        """The events at that time, in seconds after the certificate became valid."""
        before, self.at_s = len(self.events.recent()), at_s
        self.next_s = self._expiring.warn_if_due()
        found = self.events.recent()[before:]
        assert {event.kind for event in found} <= {"certificate"}
        return [event.text for event in found]


def certified(folder: Path, authority: trustme.CA, days: float, *, begin: datetime.datetime = BEGIN) -> Tls:
    folder.mkdir(exist_ok=True)
    issued = authority.issue_cert("host1", not_before=begin, not_after=begin + datetime.timedelta(days=days))
    authority.cert_pem.write_to_path(str(folder / CA))
    issued.private_key_and_cert_chain_pem.write_to_path(str(folder / KEY))
    for pem in issued.cert_chain_pems:
        pem.write_to_path(str(folder / CERT), append=pem is not issued.cert_chain_pems[0])
    return Tls(folder / CA, folder / CERT, folder / KEY)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize(("days", "left_s"), [(90.0, DAY_S), (2.0, 0.2 * DAY_S)])
def test_warns_before_and_after_the_end(tmp_path: Path, authority: trustme.CA, days: float, left_s: float) -> None:
    told = Told(certified(tmp_path / "tls", authority, days))
    end_s = days * DAY_S
    assert told.check(0.0) == told.check(end_s - left_s - 1.0) == []
    assert told.next_s == pytest.approx(1.0)
    (text,) = told.check(end_s - left_s)
    end = f"{BEGIN + datetime.timedelta(days=days):%Y-%m-%d %H:%M:%S} UTC"
    assert f"n1 on host1: the certificate in {tmp_path / 'tls' / CERT} ends at {end}" in text
    assert str(tmp_path / "tls" / KEY) in text and "no restart is needed" in text
    assert told.check(end_s - 1.0) == []
    assert told.next_s == pytest.approx(1.0)
    (text,) = told.check(end_s)
    assert f"the certificate in {tmp_path / 'tls' / CERT} has ended, at {end}" in text
    assert told.check(end_s + 1.0) == []
    assert told.next_s > 10.0


def test_renewed_certificate_is_watched(tmp_path: Path, authority: trustme.CA) -> None:
    told = Told(certified(tmp_path / "tls", authority, 10.0))
    assert len(told.check(9.5 * DAY_S)) == 1
    certified(tmp_path / "new", authority, 20.0)
    (tmp_path / "new" / CERT).replace(tmp_path / "tls" / CERT)  # without its key it is not used yet
    assert len(told.check(10.0 * DAY_S)) == 1
    (tmp_path / "new" / KEY).replace(tmp_path / "tls" / KEY)
    assert told.check(11.0 * DAY_S) == []
    assert len(told.check(19.5 * DAY_S)) == 1


def test_earliest_end_of_chain_counts(tmp_path: Path, authority: trustme.CA) -> None:
    below = authority.create_child_ca()
    told = Told(certified(tmp_path / "tls", below, LATE_DAYS))
    authority.cert_pem.write_to_path(str(tmp_path / "tls" / CA))
    assert told.check(LAST_S - 2 * DAY_S) == []
    first, second = told.check(LAST_S + DAY_S)
    assert f"the authority in {tmp_path / 'tls' / CA} has ended, at 3000-01-01" in first
    assert f"the certificate in {tmp_path / 'tls' / CERT} has ended, at 3000-01-01" in second


def test_foreign_authorities_are_ignored(tmp_path: Path, authority: trustme.CA) -> None:
    told = Told(certified(tmp_path / "tls", authority, LATE_DAYS))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "tls" / CA), append=True)
    assert len(told.check(LAST_S + DAY_S)) == 1


def test_missing_files_cause_no_event(tmp_path: Path, authority: trustme.CA) -> None:
    told = Told(certified(tmp_path / "tls", authority, 10.0))
    shutil.rmtree(tmp_path / "tls")
    assert told.check(9.5 * DAY_S) == []
    assert told.next_s > 10.0
