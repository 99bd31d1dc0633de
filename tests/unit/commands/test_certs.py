"""`taskgraph certs`, and how the files are found again."""

from __future__ import annotations

import datetime
import ssl
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from taskgraph.cli import main
from taskgraph.commands.certifying import CA_KEY, make_certs
from taskgraph.errors import JobError, TransportError
from taskgraph.launch.access import insecure_listen, node_access
from taskgraph.network.tls import CA, CERT, KEY, Tls

DRIVER = "import taskgraph as tg\n@tg.job\ndef j():\n    return tg.Job(tasks=1, epochs=1, builder=tg.Task)\n"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "INSECURE_LISTEN"):
        monkeypatch.delenv(f"TASKGRAPH_{name}", raising=False)


def tls_in(folder: Path) -> Tls:
    return Tls(folder / CA, folder / CERT, folder / KEY)


def test_set_can_be_used_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "here"
    assert main(["certs", str(folder), "--host", "10.1.2.3", "--host", "node7.example"]) == 0
    said = capsys.readouterr().out
    assert f"--tls {folder}" in said and "10.1.2.3, node7.example" in said
    assert "to the hosts they are for" in said and f"certs DIR --ca {folder} --host HOST" in said
    other = folder.parent / "other"
    assert main(["certs", str(other), "--ca", str(folder), "--host", "node8.example"]) == 0
    said = capsys.readouterr().out
    assert "node8.example" in said and "every host" not in said and f"certs DIR --ca {folder} --host HOST" in said
    for host in ("10.1.2.3", "node7.example", "localhost", "127.0.0.1", "::1"):
        tls_in(folder).check(host)
    with pytest.raises(TransportError, match="mismatch"):
        tls_in(folder).check("elsewhere.example")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes.keys() == {CA, CA_KEY, CERT, KEY}
    assert modes[CA_KEY] == modes[KEY] == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_files_are_overwritten_with_force_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_certs(tmp_path / "c", force=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    assert main(["certs", str(tmp_path / "c")]) == 2
    assert "has ca.pem, ca-key.pem, cert.pem, key.pem already" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before
    assert main(["certs", str(tmp_path / "c"), "--force"]) == 0
    assert not set(before.values()) & {path.read_bytes() for path in (tmp_path / "c").iterdir()}
    tls_in(tmp_path / "c").check("localhost")


def test_second_set_of_the_same_authority(tmp_path: Path) -> None:
    make_certs(tmp_path / "a", force=False)
    make_certs(tmp_path / "b", ["far.example"], authority=tmp_path / "a", force=False)
    make_certs(tmp_path / "c", force=False)
    assert not (tmp_path / "b" / CA_KEY).exists()
    assert (tmp_path / "a" / CA).read_bytes() == (tmp_path / "b" / CA).read_bytes()
    Tls(tmp_path / "a" / CA, tmp_path / "b" / CERT, tmp_path / "b" / KEY).check("far.example")
    with pytest.raises(TransportError, match="certificate"):
        Tls(tmp_path / "c" / CA, tmp_path / "b" / CERT, tmp_path / "b" / KEY).check("far.example")
    (tmp_path / "c" / CA_KEY).write_bytes((tmp_path / "a" / CA_KEY).read_bytes())
    with pytest.raises(JobError, match=r"ca-key\.pem is not the key of ca\.pem"):
        make_certs(tmp_path / "d", authority=tmp_path / "c", force=False)
    assert not any((tmp_path / "d").iterdir())


def validity(path: Path) -> tuple[datetime.datetime, datetime.timedelta]:
    """Returns the end of a certificate, and the time until then."""
    end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return end, end - datetime.datetime.now(datetime.UTC)


def test_authority_outlives_its_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, *more in (("a",), ("b", "--ca", "a", "--days", "400")):
        assert main(["certs", folder, *more]) == 0
        end, left = validity(tmp_path / folder / CERT)
        assert round(left / datetime.timedelta(days=1)) == (400 if more else 90)
        said = capsys.readouterr().out
        assert f"valid until {end:%Y-%m-%d}, for" in said and "authority ends" not in said
    assert validity(tmp_path / "a" / CA)[0].year == 3000


def authority_that_ends(folder: Path, days: float) -> datetime.datetime:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=5000))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir()
    (folder / CA).write_bytes(built.public_bytes(serialization.Encoding.PEM))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / CA_KEY).write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    return built.not_valid_after_utc


def test_certificate_ends_with_its_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = authority_that_ends(tmp_path / "a", 30)
    assert main(["certs", "b", "--ca", "a"]) == 0
    assert validity(tmp_path / "b" / CERT)[0] == end
    said = capsys.readouterr().out
    assert f"valid until {end:%Y-%m-%d}" in said and "when the authority ends, before --days 90" in said
    authority_that_ends(tmp_path / "old", -1)
    assert main(["certs", "c", "--ca", "old"]) == 2
    assert "that authority ended on " in capsys.readouterr().err
    assert not (tmp_path / "c" / CERT).exists()


def test_host_name_with_an_underscore_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "my_host")
    assert make_certs(tmp_path / "c", force=False).hosts == ["localhost", "127.0.0.1", "::1"]


@pytest.mark.parametrize("host", ["", "a b", "http://x", "x:80", "a..b", "x_y"])
def test_no_host_name_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(JobError, match="neither a name nor an address"):
        make_certs(tmp_path / "c", [host], force=False)
    assert not (tmp_path / "c").exists()


def test_missing_trustme_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    monkeypatch.delitem(sys.modules, "taskgraph.commands.certifying")
    assert main(["certs", str(tmp_path / "c")]) == 2
    assert "pip install 'taskgraph-aio[tls]'" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_directory_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["certs", str(tmp_path / "file" / "c")]) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_tls_1_3_is_the_oldest(tmp_path: Path) -> None:
    make_certs(tmp_path, force=False)
    for server in (True, False):
        context = tls_in(tmp_path).context(server=server)
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED


def paths(folder: Path) -> dict[str, str]:
    return {"ca": str(folder / CA), "cert": str(folder / CERT), "key": str(folder / KEY)}


def test_files_from_options_environment_and_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        make_certs(tmp_path / name, force=False)
    assert node_access() == {}
    (tmp_path / "taskgraph.toml").write_text('tls = "a"\n')
    assert node_access() == paths(tmp_path / "a")
    monkeypatch.setenv("TASKGRAPH_TLS", str(tmp_path / "b"))
    assert node_access() == paths(tmp_path / "b")
    assert node_access({"tls": "c", "tls_ca": None}) == paths(tmp_path / "c")
    one_by_one = {"tls_ca": "a/ca.pem", "tls_cert": "b/cert.pem", "tls_key": "b/key.pem"}
    assert node_access(one_by_one) == {**paths(tmp_path / "b"), "ca": str(tmp_path / "a" / CA)}
    monkeypatch.setenv("TASKGRAPH_TLS_CA", str(tmp_path / "a" / CA))
    assert node_access()["ca"] == str(tmp_path / "a" / CA)


def test_fixed_name_of_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_certs(tmp_path / "a", force=False)
    (tmp_path / "taskgraph.toml").write_text('tls_name = "fit"\n')
    with pytest.raises(JobError, match="--tls-name fit goes with the files of TLS between nodes: give --tls DIR"):
        node_access()
    assert node_access({"tls": "a"}) == {**paths(tmp_path / "a"), "name": "fit"}
    monkeypatch.setenv("TASKGRAPH_TLS_NAME", "job")
    assert node_access({"tls": "a"})["name"] == "job"
    assert node_access({"tls": "a", "tls_name": "mine"})["name"] == "mine"


def test_part_of_a_set_is_refused(tmp_path: Path) -> None:
    make_certs(tmp_path / "a", force=False)
    with pytest.raises(JobError, match="give --tls-cert and --tls-key"):
        node_access({"tls_ca": "a/ca.pem"})
    with pytest.raises(JobError, match=r"there is no file .*nowhere/ca\.pem; `taskgraph certs DIR`"):
        node_access({"tls": "nowhere"})


def test_insecure_listen_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not insecure_listen(False) and insecure_listen(True)
    (tmp_path / "taskgraph.toml").write_text("insecure_listen = true\n")
    assert insecure_listen()
    monkeypatch.setenv("TASKGRAPH_INSECURE_LISTEN", "no")
    assert not insecure_listen()
    for said in ("maybe", "2"):
        monkeypatch.setenv("TASKGRAPH_INSECURE_LISTEN", said)
        assert insecure_listen(True)
        with pytest.raises(JobError, match=f"insecure_listen is '{said}'.*: must be true or false"):
            insecure_listen()


@pytest.mark.parametrize("command", [["run", "d.py"], ["launch", "d.py"], ["node", "--job", "j", "--etcd", "h:1"]])
def test_other_hosts_need_tls(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.py").write_text(DRIVER)
    (tmp_path / "token").write_text("ab" * 32)
    assert main([*command, "--listen", "0.0.0.0", "--token-file", "token"]) == 2
    said = capsys.readouterr().err
    assert "refusing to listen on 0.0.0.0 without TLS" in said and "--insecure-listen" in said and "--tls DIR" in said


@pytest.mark.parametrize("command", [["run", "d.py"], ["launch", "d.py"], ["node", "--job", "j", "--etcd", "h:1"]])
def test_unusable_files_are_refused_at_start(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.py").write_text(DRIVER)
    (tmp_path / "token").write_text("ab" * 32)
    make_certs(tmp_path / "tls", force=False)
    make_certs(tmp_path / "other", force=False)
    (tmp_path / "tls" / KEY).write_bytes((tmp_path / "other" / KEY).read_bytes())
    assert main([*command, "--listen", "0.0.0.0", "--tls", "tls", "--token-file", "token"]) == 2
    assert "tls/key.pem cannot be used: key values mismatch" in capsys.readouterr().err
