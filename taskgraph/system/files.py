"""Files that appear whole or not at all, and folders that go with the process that made them, or after it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "OF_THE_HOST",
    "ROOT",
    "HeldFolder",
    "chosen_file",
    "may_hold_sockets",
    "put_back",
    "remove_file",
    "whole_file",
    "why_unwritable",
    "write_whole",
]

log = logging.getLogger("taskgraph.system.files")

_NO_ROOM, _NO_RIGHT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS), (errno.EACCES, errno.EPERM)
OF_THE_HOST = (*_NO_ROOM, *_NO_RIGHT, errno.EMFILE, errno.ENFILE, errno.EIO)
"""No fault of ours, and nothing that a traceback would tell more of: no room, no right, no more files, no terminal."""
ROOT = 0
"""The user to whom directories belong that are everybody's."""
_NOT_IN_ADDRESS = frozenset("#?%,|")
"""gRPC takes a socket's address for a URI, or several; and endpoints are written one after another."""


def may_hold_sockets(folder: Path, most_bytes: int) -> bool:
    """Whether sockets in a folder can be addressed: its path has at most so many bytes, and means nothing else.

    An address is text in UTF-8, which a path need not be, nor is by every locale.
    """
    path = os.fsencode(folder)
    if str(folder).encode(errors="replace") != path:
        return False
    return len(path) <= most_bytes and _NOT_IN_ADDRESS.isdisjoint(str(folder))


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file to write, piece by piece, that appears when the block ends, and not at all where it raises.

    With the default mode it is readable by its owner only, and never by others between.

    Raises:
        OSError: it could not be written; what was there before still is.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        scratch.rename(path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write that fails, as on a full disk, does not say where
        raise


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file atomically, as `whole_file` does."""
    with whole_file(path, mode) as file:
        file.write(data)


@contextlib.contextmanager
def chosen_file(path: Path) -> Iterator[BinaryIO]:
    """The same at a path that a user chose, with the mode of what is there, or what the umask gives.

    A link is followed. What is no regular file (a pipe, a device) stays, and gets all of it when the block ends.

    Raises:
        OSError: it could not be written.
    """
    found = _mode(path)
    if found is not None and not stat.S_ISREG(found):
        with tempfile.TemporaryFile() as spool:
            yield spool
            spool.seek(0)
            try:
                with open(path, "wb") as file:
                    shutil.copyfileobj(spool, file)
            except OSError as error:
                error.filename = str(path)
                raise
        return
    with whole_file(_target(path), 0o666 if found is None else 0o600) as file:
        if found is not None:
            os.fchmod(file.fileno(), stat.S_IMODE(found))
        yield file


def remove_file(path: Path) -> None:
    """Removes a file that nobody needs any more. Where it cannot be, as once a file system is read-only, that is told,
    and costs nothing else: what is under way is worth more."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if os.path.lexists(path):  # a file system that is read-only refuses before it looks
            log.warning("%s cannot be removed: %s", path, error.strerror)


def why_unwritable(path: Path) -> str:
    """Why `chosen_file` will not be able to write there, as far as that can be seen before; "" otherwise."""
    found = _mode(path)
    if found is not None and stat.S_ISDIR(found):
        return "it is a directory"
    if found is not None and not stat.S_ISREG(found):
        return "" if os.access(path, os.W_OK) else "it may not be written to"
    folder = _target(path).parent
    if not folder.is_dir():
        return f"there is no directory {folder if path.is_symlink() else path.parent}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"no file can be made in {folder}"


def _mode(path: Path) -> int | None:
    """Of what is there, behind links; None where nothing is."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))


class HeldFolder:
    """A new folder of mode 0700. Who made it removes it.

    Its process holds a lock on it. A folder that nobody holds is of a process that was killed: the next one that makes
    one there removes it.

    Args:
        base: where it is made.
        prefix: of its name. What begins so is made in this way alone, and by no version in another one.
    """

    def __init__(self, base: Path, prefix: str) -> None:
        for left in base.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid == os.getuid() and (held := _held(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(held)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            try:
                self._held = _held(self.path)
            except FileNotFoundError:  # another one took it for one that was left, before we held it
                continue
            except OSError as error:  # nobody can hold a folder on this file system, and so nobody removes it
                log.debug("%s cannot be locked: %s", self.path, error)
                self._held = None
                return
            if self._held is not None:
                if self.path.exists():
                    return
                os.close(self._held)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        held, self._held = self._held, None
        if held is not None:
            os.close(held)


def put_back(folder: Path) -> int | None:
    """Makes a private folder in a `HeldFolder` anew, with those above it that are gone, too.

    Nobody holds the new one above it: it is held from now on, by the descriptor that is returned; None: it was there.

    Raises:
        OSError: a folder cannot be made, or is another user's, who may have taken its name meanwhile.
    """
    gone = [part for part in (folder, *folder.parents) if not part.exists()]
    if gone:
        _check_owner(gone[-1].parent, os.getuid(), ROOT)
    for part in reversed(gone):
        with contextlib.suppress(FileExistsError):  # another process makes it, too
            part.mkdir(mode=0o700)
        _check_owner(part, os.getuid())
    if folder.parent not in gone:
        return None
    file = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # nobody can hold a folder on this file system, and so nobody removes it
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _check_owner(folder: Path, *users: int) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in users:
        raise PermissionError(errno.EPERM, "it must be a directory of your own", str(folder))


def _held(folder: Path) -> int | None:
    """A folder that is locked by us now, until we close it or end; None: another process has it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file
