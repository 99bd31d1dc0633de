"""The folder of a map, by its name: what its workers share with the caller, and what a later call can go on from.

    {root}/{name}.lock              an empty file: one caller at a time
    {root}/{name}/manifest.json     the function, and a digest of the pieces
    {root}/{name}/pieces            the pieces as values; `offsets.npy` says where each begins
    {root}/{name}/todo-{run}.npy    numbers of the pieces that a job has to compute
    {root}/{name}/{run}-*.results   results and errors, a file for each worker
    {root}/{name}/{run}-*.at        the piece that each worker computes

A map that ends well leaves nothing. One that failed, was ended or was killed leaves its folder; of these the newest
`_KEPT` stay.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.errors import JobError, JobRunning, TaskGraphError
from taskgraph.launch.entries import lock_file
from taskgraph.maps.records import AtWorkFile, MapRecord, RecordReader, write_pieces
from taskgraph.system.files import write_whole

__all__ = ["Journal", "maps_root"]

_KEPT: Final = 16
_FORMAT: Final = 1


def maps_root() -> Path:
    """Returns the directory of all maps: `$TASKGRAPH_RUNTIME_DIR/taskgraph/maps`, else `taskgraph/maps` below
    `$XDG_STATE_HOME` or `~/.local/state`. Results may be large, and outlive a login, so it is no temporary directory.
    """
    if given := os.environ.get("TASKGRAPH_RUNTIME_DIR"):
        return Path(given).absolute() / "taskgraph" / "maps"
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "taskgraph" / "maps"


def _make_private(folder: Path) -> None:
    """Makes a directory, and those above it that are missing, for this user only."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


class Journal:
    """The folder of one call.

    Args:
        name: of the map.
        keep: the folder stays if the map does not end well; False: it is a temporary directory of this call.

    Attributes:
        folder: the directory.
        run: the name of the current job, in file names; "": none has begun.
    """

    def __init__(self, name: str, *, keep: bool) -> None:
        self.name = name
        self.keep = keep
        self.run = ""
        self._root = maps_root() if keep else Path(tempfile.gettempdir()) / f"taskgraph-map-{secrets.token_hex(8)}"
        self.folder = self._root / name
        self._stack = ExitStack()
        self._readers: dict[Path, RecordReader] = {}

    def __enter__(self) -> Journal:
        """Locks the map's name for this call.

        Raises:
            JobRunning: another call has it.
            TaskGraphError: the directory cannot be written.
        """
        try:
            _make_private(self._root)
            lock = self._stack.enter_context(lock_file(self._root / f"{self.name}.lock"))
        except OSError as error:
            why = f"{self._root} cannot be written ({error.strerror})"
            raise TaskGraphError(f"{why}: set TASKGRAPH_RUNTIME_DIR to a directory of your own") from error
        if not lock:
            self._stack.close()
            raise JobRunning(
                f"a map {self.name!r} is running on this host already: give this one another name, as in "
                f"tg.map(..., name='{self.name}2')"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.keep:
            shutil.rmtree(self._root, ignore_errors=True)
        elif kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self._remove_old()
        self._stack.close()

    def begin_anew(self, function: str, pieces: Sequence[Any]) -> None:
        """Deletes what an earlier call left, and writes the pieces and a manifest."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        self._write_manifest(function, len(pieces), write_pieces(self.folder, pieces))

    def check_same_or_begin(self, function: str, pieces: Sequence[Any]) -> None:
        """Checks that an earlier call left the same map, to go on with its results; begins anew if it left nothing.

        Raises:
            JobError: that was another function, or other pieces.
        """
        manifest = self.folder / "manifest.json"
        try:
            known = json.loads(manifest.read_bytes())
        except (FileNotFoundError, ValueError):  # none, or a caller that was killed before it had written one
            self.begin_anew(function, pieces)
            return
        scratch = self.folder / f"new-{secrets.token_hex(4)}"
        scratch.mkdir()
        try:
            digest = write_pieces(scratch, pieces)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        asked = self._manifest(function, len(pieces), digest)
        for what in ("format", "function", "pieces", "digest"):
            if known.get(what) != asked[what]:
                named = {"digest": "other pieces", "pieces": f"{known.get('pieces')} pieces, not {len(pieces)}"}
                raise JobError(
                    f"resume=True: the map {self.name!r} that was left has {named.get(what, f'another {what}')}: give "
                    f"the same function and pieces, or begin anew without resume=True"
                )

    def _write_manifest(self, function: str, pieces: int, digest: bytes) -> None:
        manifest = self._manifest(function, pieces, digest)
        write_whole(self.folder / "manifest.json", json.dumps(manifest).encode())

    @staticmethod
    def _manifest(function: str, pieces: int, digest: bytes) -> dict[str, Any]:
        """Returns the manifest; a call that resumes must have the same."""
        return {"format": _FORMAT, "function": function, "pieces": pieces, "digest": digest.hex()}

    def begin_job(self, numbers: NDArray[np.int64]) -> None:
        """Names a job, and writes the numbers of the pieces that it has to compute."""
        self.run = secrets.token_hex(4)
        np.save(self.folder / f"todo-{self.run}.npy", numbers)

    def read(self) -> Iterator[MapRecord]:
        """Yields the results and errors that workers have written since the last call."""
        for path in sorted(self.folder.glob("*.results")):
            yield from self._readers.setdefault(path, RecordReader(path)).read()

    def find_deaths(self) -> list[tuple[str, int]]:
        """Returns (worker, piece) for each worker of the current job that died while it computed a piece."""
        found = [(path.stem.partition("-")[2], AtWorkFile.read(path)) for path in self.folder.glob(f"{self.run}-*.at")]
        return [(worker, piece) for worker, piece in sorted(found) if piece >= 0]

    def _remove_old(self) -> None:
        """Deletes old folders of maps: all but the newest ones and those of maps that run."""
        folders = sorted((path for path in self._root.iterdir() if path.is_dir()), key=lambda p: -p.stat().st_mtime)
        for folder in folders[_KEPT:]:
            with lock_file(self._root / f"{folder.name}.lock") as ours:
                if ours:
                    shutil.rmtree(folder, ignore_errors=True)
