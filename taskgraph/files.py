"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file atomically; with the default mode it is readable by its owner only, and never by others between.

    Raises:
        OSError: it could not be written; what was there before still is.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        scratch.rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        raise
