"""Finds the certificates, user and password for an etcd and for nodes.

From options, the environment or taskgraph.toml.

A password is in a file or in the environment, never on a command line, which all users of the host can read.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from taskgraph.errors import CoordinationError, JobError
from taskgraph.network.listening import NOWHERE, Listening
from taskgraph.network.tls import CA, CERT, KEY
from taskgraph.system.files import ROOT

__all__ = ["AccessOptions", "advice", "configured", "etcd_access", "insecure_listen", "node_access"]

_FILES = {"ca": "etcd_ca", "cert": "etcd_cert", "key": "etcd_key"}
_NODE_FILES = {"ca": ("tls_ca", CA), "cert": ("tls_cert", CERT), "key": ("tls_key", KEY)}
_NAME = "tls_name"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_TOML = "taskgraph.toml"
_TEXTS = (
    "etcd",
    *_FILES.values(),
    "etcd_user",
    "etcd_password_file",
    "token_file",
    "tls",
    "listen",
    "ports",
    "advertise",
    *(name for name, _ in _NODE_FILES.values()),
    _NAME,
)
_FLAGS = ("insecure_listen",)
"""The words of `taskgraph.toml`; `etcd` may also be a list of texts."""


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """The options to reach a job's etcd and its nodes, as on the command line.

    Attributes:
        etcd: what `EtcdCoordinator.connect` takes beside endpoints; None: as `etcd_access` finds it.
        nodes: the files of TLS between nodes; None: as `node_access` finds them.
        listening: where nodes listen for those of other hosts.
        token: the job's token, hex; None: a new one.
    """

    etcd: dict[str, str] | None = None
    nodes: dict[str, str] | None = None
    listening: Listening = NOWHERE
    token: str | None = field(default=None, repr=False)


def configured(name: str) -> str | None:
    """Returns a value from the environment (`TASKGRAPH_ETCD`), else from `taskgraph.toml` in the working directory;
    None: neither has it.

    Raises:
        JobError: the file cannot be read, says something wrong, or may be another user's.
    """
    given = os.environ.get(f"TASKGRAPH_{name.upper()}")
    if given:
        return given
    path = Path(_TOML)
    if not _is_own_file(path):
        return None
    try:
        found = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise JobError(f"{path.resolve()} cannot be read: {error}") from error
    for key, value in found.items():
        if wrong := _find_error(key, value):
            raise JobError(f"{path.resolve()}: {wrong}")
    value = found.get(name)
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else value


def _is_own_file(path: Path) -> bool:
    """True if the file is there. Checks its owner, since the file names the etcd, which decides what code nodes run.

    Raises:
        JobError: the file cannot be looked at; or any user may have put it there, as into /tmp.
    """
    try:
        folder = os.stat(".")
        for look in (os.lstat, os.stat):  # the owner of a link counts, too: the link may point to another file of ours
            found = look(path)
            if found.st_uid not in (os.getuid(), folder.st_uid, ROOT) and folder.st_mode & stat.S_IWOTH:
                raise JobError(
                    f"{path.absolute()} is another user's (id {found.st_uid}), in a directory where everybody may "
                    f"write: go to one of your own"
                )
        return stat.S_ISREG(found.st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if not os.access(".", os.X_OK):  # after `su` this may be another user's home: its files are not for us
            return False
        raise JobError(f"{path.absolute()} cannot be read: {error.strerror}") from error


def _find_error(key: str, value: object) -> str:
    """Says what is wrong with a line of `taskgraph.toml`; "": nothing. An unknown word is an error: it does nothing."""
    if key not in (*_TEXTS, *_FLAGS):
        table = ", outside of any table" if isinstance(value, dict) else ""
        return f"nothing here is called {key!r}; it may say {', '.join((*_TEXTS, *_FLAGS))}{table}"
    if key in _FLAGS:
        return "" if isinstance(value, bool) or _is_text(value) else f"{key} = {value!r}: must be true or false"
    if key == "etcd":
        fits = _is_text(value) or (isinstance(value, list) and value and all(map(_is_text, value)))
        return "" if fits else f'{key} = {value!r}: must be "HOST:PORT,...", or a list of such texts'
    return "" if _is_text(value) else f"{key} = {value!r}: must be a text, and not empty"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def etcd_access(given: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Returns the arguments of `EtcdCoordinator.connect` beside endpoints.

    Args:
        given: options by their names: etcd_ca, etcd_cert, etcd_key, etcd_user, etcd_password_file. What is not given is
            looked for in the environment, then in `taskgraph.toml`.

    Raises:
        JobError: a user without a password or the reverse; a password file that cannot be read.
    """
    options = dict(given or {})

    def given_or_configured(name: str) -> str | None:
        return options.get(name) or configured(name)

    # Absolute: others read them from another working directory.
    access = {ours: str(Path(path).absolute()) for ours, name in _FILES.items() if (path := given_or_configured(name))}
    user = given_or_configured("etcd_user")
    password, file = _password(options.get("etcd_password_file"))
    if user and password is None:
        raise JobError(
            f"the password of etcd's user {user!r} is missing: name a file with --etcd-password-file (or "
            f"TASKGRAPH_ETCD_PASSWORD_FILE), or set TASKGRAPH_ETCD_PASSWORD"
        )
    if password is not None and not user:
        raise JobError("whose is the password for etcd? Give --etcd-user (or TASKGRAPH_ETCD_USER)")
    if user and password is not None:
        access |= {"username": user, "password": password}
        if file is not None:
            access["password_file"] = str(file.absolute())
    return access


def node_access(given: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Returns the files of TLS between nodes, and the fixed name, as `Tls.of` takes them; {}: without TLS.

    Args:
        given: options by their names: tls (a directory with ca.pem, cert.pem, key.pem), and tls_ca, tls_cert, tls_key,
            which go before it; tls_name. Where no file is given, they are looked for in the environment and in
            `taskgraph.toml`; likewise the name.

    Raises:
        JobError: some of the three files are named and others are not, or one is not there; a name without files.
    """
    names = ("tls", *(name for name, _ in _NODE_FILES.values()))
    options = {name: path for name, path in (given or {}).items() if path and name != _NAME}
    if not options:  # files of two places are not mixed: a certificate goes with its key
        options = {name: path for name in names if (path := configured(name))}
    folder = options.get("tls")
    found, missing = {}, []
    for ours, (name, file) in _NODE_FILES.items():
        path = options.get(name) or (str(Path(folder) / file) if folder else None)
        if path is None:
            missing.append(f"--{name.replace('_', '-')}")
        elif not Path(path).is_file():
            raise JobError(f"TLS: there is no file {path}; `taskgraph certs DIR` makes a set for a test")
        else:
            found[ours] = str(Path(path).absolute())
    if found and missing:
        raise JobError(f"TLS needs an authority, a certificate and its key: give {' and '.join(missing)}, or --tls DIR")
    if fixed := (given or {}).get(_NAME) or configured(_NAME):
        if not found:
            raise JobError(f"--tls-name {fixed} goes with the files of TLS between nodes: give --tls DIR")
        found["name"] = fixed
    return found


def insecure_listen(given: bool | None = None) -> bool:
    """True if nodes may listen beyond loopback without TLS.

    Args:
        given: True: an option says so; else the environment, then `taskgraph.toml` decide.

    Raises:
        JobError: the configured word is neither yes nor no.
    """
    if given:
        return True
    said = configured("insecure_listen") or "no"
    if said.lower() not in (*_YES, *_NO):
        raise JobError(f"insecure_listen is {said!r}, in the environment or in {_TOML}: must be true or false")
    return said.lower() in _YES


def _password(path: str | None) -> tuple[str | None, Path | None]:
    """Reads the password: from the file at `path`, the environment, or the file that the environment or toml names;
    None: none is given.

    Also returns the file, if it can be read again.
    """
    if not path and (given := os.environ.get("TASKGRAPH_ETCD_PASSWORD")):
        return given, None
    path = path or configured("etcd_password_file")
    if not path:
        return None, None
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise JobError(f"--etcd-password-file {path}: {why}") from error
    if not lines or not lines[0]:
        raise JobError(f"--etcd-password-file {path}: its first line, the password, is empty")
    return lines[0], Path(path) if Path(path).is_file() else None


def advice(error: CoordinationError) -> str:
    """Returns what to do if etcd refuses the user, the password or TLS; "": nothing is known about this error."""
    from taskgraph.coordination.etcd.failures import PermissionRefused

    said = str(error)
    if isinstance(error, PermissionRefused):
        return (
            "etcd's user needs to read and write what is under /taskgraph/: "
            "`etcdctl role grant-permission ROLE --prefix=true readwrite /taskgraph/`"
        )
    if "user name is empty" in said:
        return "This etcd has authentication enabled: give --etcd-user and --etcd-password-file"
    if "authentication is not enabled" in said:
        return "This etcd has authentication disabled: leave --etcd-user out"
    # Of TLS 1.3, where the refusal comes after the handshake, some builds of gRPC say only that data is corrupted.
    if any(sign in said for sign in ("BAD_CERTIFICATE", "CERTIFICATE_REQUIRED", "TSI_DATA_CORRUPTED")):
        return "This etcd wants to see a client certificate: give --etcd-cert and --etcd-key (or others)"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return "Its certificate was not signed by an authority that is known here: give that with --etcd-ca"
    cut_off = any(sign in said for sign in ("Socket closed", "Connection reset", "connection closed"))
    if "WRONG_VERSION_NUMBER" in said or ("Handshake read failed" in said and cut_off):
        return "It does not speak TLS: write http://HOST:PORT, or leave --etcd-ca and --etcd-cert out"
    if "Handshake read failed" in said or "before receiving SETTINGS frame" in said:
        return "It takes connections and does not answer in time: it stands, or the link to it is too slow"
    if cut_off and "https://" in said:  # older gRPC does not say that it was the handshake
        return "Perhaps it does not speak TLS: write http://HOST:PORT, or leave --etcd-ca and --etcd-cert out"
    if cut_off:
        return "Perhaps it speaks TLS only: write https://HOST:PORT, with --etcd-ca if its authority is not known"
    return ""
