"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["whole_file", "write_whole"]


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
