"""Reads the lines of files that may still grow, and of files to come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

__all__ = ["follow_files"]

_LOOK_S = 0.2
_CHUNK = 1 << 20


async def follow_files(files: Callable[[], Sequence[Path]], *, ended: Callable[[], bool]) -> AsyncIterator[str]:
    """Yields the lines of files, without line ends. If there are several files, each line begins with its file's name.

    Ends when `ended`. A file that is moved to another folder counts as the same file.

    Args:
        files: returns the files that are there now; called again and again, since nodes come and go.
        ended: returns True once nothing more will be written.
    """
    read: dict[str, tuple[int, bytes]] = {}  # by the file's name: how much of it, and the line that has no end yet
    while True:
        last, there = ended(), files()
        for path in there:
            named = f"{path.stem}  " if len(there) > 1 else ""
            at, partial = read.get(path.name, (0, b""))
            try:
                with path.open("rb") as file:
                    file.seek(at)
                    while chunk := file.read(_CHUNK):
                        at += len(chunk)
                        *lines, partial = (partial + chunk).split(b"\n")
                        for line in lines:
                            yield f"{named}{line.decode(errors='replace')}"
            except FileNotFoundError:  # the oldest logs are removed, and those of a job that ends are moved
                continue
            if last and partial:
                yield f"{named}{partial.decode(errors='replace')}"
                partial = b""
            read[path.name] = (at, partial)
        if last:
            return
        await asyncio.sleep(_LOOK_S)
