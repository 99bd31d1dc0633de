"""Files that appear whole or not at all, and folders that are removed with or after the process that made them."""

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
    "LockedFolder",
    "chosen_file",
    "may_hold_sockets",
    "remove_file",
    "restore_folder",
    "whole_file",
    "why_unwritable",
    "write_whole",
]

log = logging.getLogger("taskgraph.system.files")

_NO_ROOM, _NO_RIGHT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS), (errno.EACCES, errno.EPERM)
OF_THE_HOST = (*_NO_ROOM, *_NO_RIGHT, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Errors of the host, for which a traceback says nothing more: no room, no right, too many files, no terminal."""
ROOT = 0
"""The owner of directories that all users share."""
_NOT_IN_ADDRESS = frozenset("#?%,|")
"""gRPC reads a socket's address as a URI, or several; and lists of endpoints have commas."""


def may_hold_sockets(folder: Path, most_bytes: int) -> bool:
    """True if sockets in a folder can be addressed: its path is UTF-8, of at most `most_bytes`, and has no characters
    that are special in a URI.
    """
    path = os.fsencode(folder)
    if str(folder).encode(errors="replace") != path:
        return False
    return len(path) <= most_bytes and _NOT_IN_ADDRESS.isdisjoint(str(folder))


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Opens a file that appears when the block ends, and not at all if it raises.

    With the default mode only the owner can read it, at every moment.

    Raises:
        OSError: the file could not be written; an earlier one is unchanged.
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
            error.filename = str(path)  # a failed write, as on a full disk, does not name the file
        raise


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes all of a file at once, as `whole_file` does."""
    with whole_file(path, mode) as file:
        file.write(data)


@contextlib.contextmanager
def chosen_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file at a path that a user chose, as `whole_file` does, with the mode of the file that is there, or by
    the umask.

    Links are followed. A pipe or a device stays, and gets all of the text when the block ends.

    Raises:
        OSError: the file could not be written.
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
    with whole_file(_real_path(path), 0o666 if found is None else 0o600) as file:
        if found is not None:
            os.fchmod(file.fileno(), stat.S_IMODE(found))
        yield file


def remove_file(path: Path) -> None:
    """Removes a file, or logs why it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if os.path.lexists(path):  # a read-only file system refuses even absent files
            log.warning("%s cannot be removed: %s", path, error.strerror)


def why_unwritable(path: Path) -> str:
    """Says why `chosen_file` will fail at this path; "" if no reason is visible."""
    try:
        found = _mode(path)
    except OSError as error:
        return error.strerror or str(error)
    if found is not None and stat.S_ISDIR(found):
        return "it is a directory"
    if found is not None and not stat.S_ISREG(found):
        return "" if os.access(path, os.W_OK) else "it may not be written to"
    folder = _real_path(path).parent
    if not folder.is_dir():
        return f"there is no directory {folder if path.is_symlink() else path.parent}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"no file can be made in {folder}"


def _mode(path: Path) -> int | None:
    """Returns the mode of the file behind links; None: there is no file."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _real_path(path: Path) -> Path:
    """Returns the path behind links."""
    return Path(os.path.realpath(path))


class LockedFolder:
    """A new folder of mode 0700, to be removed by its maker.

    The process keeps the folder locked. A folder that is not locked belongs to a process that was killed, and is
    removed when the next one is made.

    Args:
        base: the folder above.
        prefix: of the name. All folders there whose names begin so must be made by this class.
    """

    def __init__(self, base: Path, prefix: str) -> None:
        for left in base.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid == os.getuid() and (held := _lock_folder(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(held)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            try:
                self._held = _lock_folder(self.path)
            except FileNotFoundError:  # another process removed it before it was locked
                continue
            except OSError as error:  # a file system without locks: the folder is never removed by others
                log.debug("%s cannot be locked: %s", self.path, error)
                self._held = None
                return
            if self._held is not None:
                if self.path.exists():
                    return
                os.close(self._held)

    def remove(self) -> None:
        """Removes the folder with all that is in it, and unlocks it."""
        shutil.rmtree(self.path, ignore_errors=True)
        held, self._held = self._held, None
        if held is not None:
            os.close(held)


def restore_folder(folder: Path) -> int | None:
    """Makes a private folder in a `LockedFolder` again after both were removed.

    Returns:
        A descriptor that keeps the new folder above locked; None: that folder was there.

    Raises:
        OSError: a folder cannot be made, or another user has taken its name.
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
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _check_owner(folder: Path, *users: int) -> None:
    """Raises PermissionError unless this is a folder of one of these users."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in users:
        raise PermissionError(errno.EPERM, "it must be a directory of your own", str(folder))


def _lock_folder(folder: Path) -> int | None:
    """Locks a folder, and returns its descriptor; None: another process has locked it."""
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
