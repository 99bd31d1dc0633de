"""A job's checkpoints in their place: writes, reads and lists them, and removes old ones.

    {place}/{job}/{name}/task-000003.safetensors      one for each task with state, and one for task 0
    {place}/{job}/{name}/manifest.staged.json         all these files are written
    {place}/{job}/{name}/manifest.json                the pointer in etcd names this checkpoint: it is complete
    {place}/{job}/s0002-begun                         series 2 began at epoch 0, beside older checkpoints

The states of a checkpoint, and what makes each step durable:

    files ──► staged manifest ──► pointer in etcd ──► final manifest

A running job trusts the pointer. A resumed job whose etcd is gone trusts the final manifests; so none is written before
the pointer. Every call blocks; callers make it in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from taskgraph.checkpoint.files import FileInfo, pack_file, unpack_file
from taskgraph.checkpoint.manifest import CheckpointName, ExpectedJob, Manifest, MissingFile
from taskgraph.checkpoint.places import Place, UnusableFile, open_place, split_temporary_name
from taskgraph.errors import CheckpointError
from taskgraph.protocol.messages import Encoded

__all__ = ["CheckpointStore", "NewestCheckpoint"]

log = logging.getLogger("taskgraph.checkpoint")

_PAUSES_S = (0.1, 0.4, 1.0)
"""Pauses between attempts to read a file."""
_LASTING_ERRORS = (UnusableFile, PermissionError, IsADirectoryError, NotADirectoryError)
_MANIFEST_BYTES = 128 << 20
"""The most bytes of a manifest: about 100 for each task, and no job has more than a million tasks."""
_FINAL = "manifest.json"
_STAGED = "manifest.staged.json"
_SERIES_NOTE = re.compile(r"s(\d{4,9})-begun")
_TASK = re.compile(r"task-(\d{6,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest usable checkpoint.

    Attributes:
        manifest: its manifest; None: no checkpoint is usable.
        refused: why each newer checkpoint cannot be used; the newest first.
        kinds: the types of these errors.
    """

    manifest: Manifest | None = None
    refused: tuple[str, ...] = ()
    kinds: frozenset[type[CheckpointError]] = frozenset()

    def was_refused_for(self, kind: type[CheckpointError]) -> bool:
        """True if a checkpoint was refused by an error of type `kind`."""
        return any(issubclass(each, kind) for each in self.kinds)


class CheckpointStore:
    """The checkpoints of one job, in their place.

    Args:
        place: the place to use instead of the one that `url` names.
        by: the writer; see `checkpoint.places.Directory`.

    Raises:
        JobError: as `checkpoint.places.check_url`.
    """

    def __init__(self, url: str, expected: ExpectedJob, *, place: Place | None = None, by: str = "") -> None:
        self._place: Place = open_place(url, by) if place is None else place
        self._expected = expected

    def __str__(self) -> str:
        return f"{self._place}/{self._expected.job}"

    def _path(self, name: str, *more: str) -> str:
        return "/".join((self._expected.job, name, *more))

    def _file_path(self, name: str, task: int) -> str:
        return self._path(name, f"task-{task:06d}.safetensors")

    # -- writing ------------------------------------------------------------------------------------------------------

    def make_manifest(
        self, name: CheckpointName, files: Iterable[FileInfo] = (), before: Iterable[str] = ()
    ) -> Manifest:
        """Makes a manifest of this job; writes nothing."""
        return Manifest(
            name=str(name),
            job=self._expected.job,
            fingerprint=self._expected.fingerprint,
            tasks=self._expected.tasks,
            services=self._expected.services,
            files=tuple(sorted(files, key=lambda info: info.task)),
            before=tuple(before),
        )

    def write(self, name: CheckpointName, task: int, value: Encoded) -> FileInfo:
        """Writes one task's boundary.

        Raises:
            CheckpointError: the boundary does not fit into a file that can be read again.
            OSError: the file cannot be written.
        """
        info, parts = pack_file(value, self.make_manifest(name).label(task))
        self._place.write(self._file_path(str(name), task), parts)
        return info

    def find_damaged(self, manifest: Manifest) -> list[tuple[FileInfo, str]]:
        """Compares a manifest with the sizes in one listing. Returns missing and damaged files, each with a sentence.

        Raises:
            OSError: the place cannot be listed.
        """
        sizes = self._place.file_sizes(self._path(manifest.name))
        found = []
        for info in manifest.files:
            path = self._file_path(manifest.name, info.task)
            name = path.rpartition("/")[2]
            if name not in sizes:
                found.append((info, f"{self._place}/{path} is not there"))
            elif sizes[name] not in (info.size, None):
                found.append((info, f"{self._place}/{path} has {sizes[name]} bytes there, not {info.size}"))
        return found

    def stage(self, manifest: Manifest) -> None:
        """Writes the staged manifest; all its files must have been written. Raises OSError."""
        self._place.write(self._path(manifest.name, _STAGED), [manifest.to_bytes()])

    def finish(self, name: str) -> None:
        """Writes the final manifest; the pointer in etcd must name the checkpoint. May be repeated.

        Raises:
            CheckpointError: there is no staged manifest.
            OSError: the manifest cannot be written.
        """
        if _FINAL in self._place.names(self._path(name)):
            return
        manifest = self._read_manifest(name, _STAGED)
        self._place.write(self._path(name, _FINAL), [manifest.to_bytes()])

    def discard(self, name: CheckpointName, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Removes the files of a checkpoint that will not become complete, except those that are being written.

        Removes nothing once a manifest is staged: the caller may be slow, and another leader may have completed the
        checkpoint meanwhile. So it looks for the staged manifest before each file. (Listing the directory before each
        file would cost the square of their number.)

        Args:
            may_go_on: true while the caller knows that the checkpoint will not become complete; called for each file.

        Raises:
            OSError: a file cannot be removed.
        """

        def may_remove() -> bool:
            return may_go_on() and not self._is_staged(str(name))

        self._remove_files(name, lambda file: not file.startswith("."), may_remove)

    def remove_unfinished(
        self, name: CheckpointName, writes: Callable[[int, str], bool], may_go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Removes all files of a checkpoint that no leader, present or future, will complete.

        Unlike `discard` it removes staged manifests and files that their writers left half written.

        Args:
            writes: given a task and a writer (`by` of a `CheckpointStore`), true if it may still be writing it.
            may_go_on: true while the caller may do this; called before each file.

        Raises:
            OSError: a file cannot be removed.
        """

        def useless(file: str) -> bool:
            if not file.startswith("."):
                return True
            writer = split_temporary_name(file)
            if writer is None:
                return False
            task = _TASK.fullmatch(writer[0])
            return task is None or not writes(int(task[1]), writer[1])

        self._remove_files(name, useless, may_go_on)

    def _remove_files(self, name: CheckpointName, useless: Callable[[str], bool], may: Callable[[], bool]) -> None:
        """Removes the `useless` files of an incomplete checkpoint while `may()`; then its directory if it is empty."""
        folder = self._path(str(name))
        files = self._place.names(folder)
        if _FINAL in files:
            return
        for file in filter(useless, files):
            if not may():
                return
            self._place.remove(f"{folder}/{file}")
        self._place.remove_empty(folder)

    def _is_staged(self, name: str) -> bool:
        try:
            self._place.read(self._path(name, _STAGED), _MANIFEST_BYTES)
        except FileNotFoundError:
            return False
        except UnusableFile:
            pass
        return True

    def note_series(self, series: int, run: str) -> None:
        """Writes a note that a series began at epoch 0, so that `--resume` does not go back to earlier series.

        Raises:
            OSError: the note cannot be written.
        """
        text = f"run {run} began at epoch 0; this is removed with its first checkpoint\n"
        self._place.write(self._path(f"s{series:04d}-begun"), [text.encode()])

    def keep_only(self, names: Iterable[str], current: str) -> list[str]:
        """Removes checkpoints older than `current`, complete or not, except `names`. Returns the removed names.

        Removes notes of `note_series`, too: `current` shows its series. Newer checkpoints may be in progress, and stay.

        Raises:
            OSError: some checkpoints could not be removed; all others were.
        """
        kept, newest = set(names), CheckpointName.parse(current)
        removed, failure = [], None
        for name in self._names():
            if newest is not None and name < newest and str(name) not in kept:
                try:
                    # The manifest goes first: a checkpoint of which only a part is left must not look complete.
                    self._place.remove(self._path(str(name), _FINAL))
                    self._place.remove(self._path(str(name)))
                    removed.append(str(name))
                except OSError as error:  # remove the others all the same, or the place fills up
                    failure = failure or error
        for series in self._noted_series():
            if newest is not None and series <= newest.series:
                try:
                    self._place.remove(self._path(f"s{series:04d}-begun"))
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        return removed

    # -- reading ------------------------------------------------------------------------------------------------------

    def list_folder(self) -> list[str]:
        """Returns the names of all files and folders in the job's folder. Raises OSError."""
        return self._place.names(self._expected.job)

    def _names(self) -> list[CheckpointName]:
        """Returns the names of all checkpoints, complete or not; oldest first."""
        return sorted(n for text in self.list_folder() if (n := CheckpointName.parse(text)) is not None)

    def _noted_series(self) -> list[int]:
        """Returns the series that `note_series` noted."""
        return [int(found[1]) for text in self.list_folder() if (found := _SERIES_NOTE.fullmatch(text))]

    def names_of_run(self, series: int, run: str) -> list[CheckpointName]:
        """Returns the names of one run's checkpoints, complete or not; oldest first. Raises OSError."""
        return [name for name in self._names() if (name.series, name.run) == (series, run)]

    def names_of_other_runs(self, run: str, known: Iterable[str]) -> list[CheckpointName]:
        """Returns names of other runs' checkpoints, complete or not, except `known`; oldest first. Raises OSError."""
        known = set(known)
        return [name for name in self._names() if name.run != run and str(name) not in known]

    def complete_names(self) -> list[CheckpointName]:
        """Returns the names of complete checkpoints, newest first, readable or not. Raises OSError.

        A checkpoint that cannot be listed counts as complete: reading it raises an error with its name.
        """

        def seems_complete(name: CheckpointName) -> bool:
            try:
                return _FINAL in self._place.names(self._path(str(name)))
            except OSError:
                return True

        return [name for name in reversed(self._names()) if seems_complete(name)]

    def highest_series_and_attempt(self) -> tuple[int, int]:
        """Returns the highest series, also of noted ones, and the highest attempt of all checkpoints; 0: none."""
        found = self._names()
        series = max((*(n.series for n in found), *self._noted_series()), default=0)
        return series, max((n.attempt for n in found), default=0)

    def open(self, name: str) -> Manifest:
        """Returns the manifest of a checkpoint: the final one, or else the staged one.

        Raises:
            CheckpointError: both are missing, torn, corrupt or of another job.
        """
        try:
            manifest = self._read_manifest(name, _FINAL)
        except CheckpointError:
            with contextlib.suppress(CheckpointError):
                return self._check_manifest(self._read_manifest(name, _STAGED), name)
            raise
        return self._check_manifest(manifest, name)

    def open_any(self, name: str) -> Manifest:
        """Returns the manifest of a complete checkpoint, whichever driver wrote it; to read its files alone.

        Raises:
            MissingFile: it is not there, or not complete.
            CheckpointError: it is torn, corrupt, of another format, or another checkpoint's.
        """
        try:
            manifest = self._read_manifest(name, _FINAL)
        except MissingFile:
            raise MissingFile(
                f"{self._place}/{self._path(name)} is no complete checkpoint: it has no {_FINAL}"
            ) from None
        self._check_name(manifest, name)
        return manifest

    def _check_manifest(self, manifest: Manifest, name: str) -> Manifest:
        manifest.check_job(self._expected, f"{self._place}/{self._path(name)}")
        self._check_name(manifest, name)
        return manifest

    def _check_name(self, manifest: Manifest, name: str) -> None:
        if manifest.name != name:
            path = f"{self._place}/{self._path(name)}"
            raise CheckpointError(f"{path} is foreign: its manifest is that of {manifest.name}")

    def _read_manifest(self, name: str, which: str) -> Manifest:
        path = self._path(name, which)
        return Manifest.from_bytes(bytes(self._read_file(path, _MANIFEST_BYTES)), path=f"{self._place}/{path}")

    def _read_file(self, path: str, limit_bytes: int) -> memoryview:
        """Reads a file of the place. Retries errors that may pass, since a refused checkpoint costs many epochs."""
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._place.read(path, limit_bytes)
            except FileNotFoundError as error:
                raise MissingFile(f"{self._place}/{path} is missing") from error
            except OSError as error:
                if pause_s is None or isinstance(error, _LASTING_ERRORS):
                    raise CheckpointError(f"{self._place}/{path} cannot be read: {error}") from error
                log.info("%s/%s cannot be read, trying again: %s", self._place, path, error)
                time.sleep(pause_s)
        raise AssertionError

    def read(self, manifest: Manifest, task: int) -> Encoded | None:
        """Returns a task's boundary, verified; None if the checkpoint has no file of the task.

        Raises:
            CheckpointError: the file is missing, torn, corrupt or of another job.
        """
        info = manifest.file_of(task)
        if info is None:
            return None
        path = self._file_path(manifest.name, task)
        return unpack_file(self._read_file(path, info.size), info, path=f"{self._place}/{path}")

    def verify(self, manifest: Manifest) -> None:
        """Reads every file. Raises CheckpointError for the first that cannot be used."""
        for info in manifest.files:
            self.read(manifest, info.task)

    def find_newest(self, names: Iterable[str]) -> NewestCheckpoint:
        """Finds the first usable checkpoint of `names`, which are sorted, the newest first; verifies all its files."""
        refused: list[str] = []
        kinds: set[type[CheckpointError]] = set()
        for name in names:
            try:
                manifest = self.open(name)
                self.verify(manifest)
                return NewestCheckpoint(manifest, tuple(refused), frozenset(kinds))
            except CheckpointError as error:
                refused.append(str(error))
                kinds.add(type(error))
        return NewestCheckpoint(None, tuple(refused), frozenset(kinds))
