"""A job's checkpoints in their place: written, read, listed, and the old ones removed.

    {place}/{job}/{name}/task-000003.safetensors      one per task that has state, and task 0's
    {place}/{job}/{name}/manifest.staged.json         all of them are written
    {place}/{job}/{name}/manifest.json                and etcd's pointer says so: it is complete
    {place}/{job}/s0002-begun                         a series was begun over the checkpoints of those before it

The staged manifest is written before the pointer and the final one after it. A running job believes the pointer; one
that is resumed when its etcd is gone believes the final manifests. Every call blocks, and is made in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from taskgraph.checkpoint.files import FileInfo, pack, unpack
from taskgraph.checkpoint.manifest import Manifest, MissingFile, Name, Origin
from taskgraph.checkpoint.places import NoFile, Place, open_place, written_by
from taskgraph.errors import CheckpointError
from taskgraph.protocol.messages import Encoded

__all__ = ["Found", "Store"]

log = logging.getLogger("taskgraph.checkpoint")

_PAUSES_S = (0.1, 0.4, 1.0)
"""Between tries to read a file."""
_FOR_GOOD = (NoFile, PermissionError, IsADirectoryError, NotADirectoryError)
_MANIFEST_BYTES = 128 << 20
"""At most: some 100 for each task, of which no job has a million."""
_FINAL = "manifest.json"
_STAGED = "manifest.staged.json"
_BEGUN = re.compile(r"s(\d{4,9})-begun")
_TASK = re.compile(r"task-(\d{6,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that can be used.

    Attributes:
        refused: why those after it cannot, each by name; the newest first.
        kinds: of the errors that this was.
    """

    manifest: Manifest | None = None
    refused: tuple[str, ...] = ()
    kinds: frozenset[type[CheckpointError]] = frozenset()

    def refused_as(self, kind: type[CheckpointError]) -> bool:
        """True if a checkpoint was refused for an error of this kind."""
        return any(issubclass(each, kind) for each in self.kinds)


class Store:
    """The checkpoints of one job.

    Args:
        place: what `url` names, where that is known already.
        by: who writes; see `checkpoint.places.Directory`.

    Raises:
        JobError: the URL is none, or needs a package that is not installed.
    """

    def __init__(self, url: str, origin: Origin, *, place: Place | None = None, by: str = "") -> None:
        self._place: Place = open_place(url, by) if place is None else place
        self._origin = origin

    def __str__(self) -> str:
        return f"{self._place}/{self._origin.job}"

    def _path(self, name: str, *more: str) -> str:
        return "/".join((self._origin.job, name, *more))

    def _file(self, name: str, task: int) -> str:
        return self._path(name, f"task-{task:06d}.safetensors")

    # -- writing ------------------------------------------------------------------------------------------------------

    def manifest(self, name: Name, files: Iterable[FileInfo] = (), before: Iterable[str] = ()) -> Manifest:
        """A manifest of this job, not written yet."""
        return Manifest(
            name=str(name),
            job=self._origin.job,
            fingerprint=self._origin.fingerprint,
            tasks=self._origin.tasks,
            files=tuple(sorted(files, key=lambda info: info.task)),
            before=tuple(before),
        )

    def write(self, name: Name, task: int, value: Encoded) -> FileInfo:
        """Writes one task's boundary.

        Raises:
            CheckpointError: it makes no file that could be read again.
            OSError: it cannot be written.
        """
        info, parts = pack(value, self.manifest(name).label(task))
        self._place.write(self._file(str(name), task), parts)
        return info

    def unseen(self, manifest: Manifest) -> list[tuple[FileInfo, str]]:
        """Lists once. Returns the missing or damaged files of a manifest, and what is wrong with each.

        Raises:
            OSError: the place cannot be listed.
        """
        sizes = self._place.sizes(self._path(manifest.name))
        found = []
        for info in manifest.files:
            path = self._file(manifest.name, info.task)
            name = path.rpartition("/")[2]
            if name not in sizes:
                found.append((info, f"{self._place}/{path} is not there"))
            elif sizes[name] not in (info.size, None):
                found.append((info, f"{self._place}/{path} has {sizes[name]} bytes there, not {info.size}"))
        return found

    def stage(self, manifest: Manifest) -> None:
        """Writes the manifest as staged, after all its files. Raises OSError."""
        self._place.write(self._path(manifest.name, _STAGED), [manifest.to_bytes()])

    def finish(self, name: str) -> None:
        """Marks a checkpoint complete in its place, after the pointer in etcd named it. May be repeated.

        Raises:
            CheckpointError: it was not staged.
            OSError: it cannot be written.
        """
        if _FINAL in self._place.names(self._path(name)):
            return
        manifest = self._read_manifest(name, _STAGED)
        self._place.write(self._path(name, _FINAL), [manifest.to_bytes()])

    def discard(self, name: Name, still: Callable[[], bool] = lambda: True) -> None:
        """Removes what was written of one that will not become complete. What is still being written stays.

        All of it stays if there is a manifest: the caller may be behind, while another leader makes the checkpoint
        complete. So that is looked at before each file: by the staged manifest, which is written
        before the final one. A listing each time would be as many as there are files, of all that are left.

        Args:
            still: whether the caller still knows that it will not become complete; asked before each file is removed.

        Raises:
            OSError: it cannot be removed.
        """
        folder = self._path(str(name))
        files = self._place.names(folder)
        if _FINAL in files:
            return
        for file in files:
            if file.startswith("."):  # by that name a directory's files are written
                continue
            if not still() or self._is_staged(str(name)):
                return
            self._place.remove(f"{folder}/{file}")
        self._place.remove_empty(folder)

    def remove_unfinished(
        self, name: Name, writes: Callable[[int, str], bool], still: Callable[[], bool] = lambda: True
    ) -> None:
        """Removes what there is of one that becomes complete under no leader, this one or a later one.

        Unlike `discard`, also a manifest that was only staged, and what was left half written. What is complete stays.

        Args:
            writes: whether somebody may still write a task's file, of whom is told what `Store` was told by `by`.
            still: whether the caller is still the one to do this; asked before each file is removed.

        Raises:
            OSError: it cannot be removed.
        """
        folder = self._path(str(name))
        files = self._place.names(folder)
        if _FINAL in files:
            return
        for file in files:
            if file.startswith("."):
                writer = written_by(file)
                if writer is None or ((of := _TASK.fullmatch(writer[0])) and writes(int(of[1]), writer[1])):
                    continue
            if not still():
                return
            self._place.remove(f"{folder}/{file}")
        self._place.remove_empty(folder)

    def _is_staged(self, name: str) -> bool:
        try:
            self._place.read(self._path(name, _STAGED), _MANIFEST_BYTES)
        except FileNotFoundError:
            return False
        except NoFile:
            pass
        return True

    def begin(self, series: int, run: str) -> None:
        """A series is begun over the checkpoints of earlier ones: who resumes the job must not go back to those.

        Raises:
            OSError: it cannot be written.
        """
        text = f"run {run} began at epoch 0; this is removed with its first checkpoint\n"
        self._place.write(self._path(f"s{series:04d}-begun"), [text.encode()])

    def keep_only(self, names: Iterable[str], current: str) -> list[str]:
        """Removes what is older than `current` and not among `names`: old checkpoints, and what never was completed.

        Returns the names of those removed. That its series was begun is seen by `current` from now on. What comes after
        `current` may be being written.

        Raises:
            OSError: some cannot be removed; all others were.
        """
        kept, newest = set(names), Name.parse(current)
        removed, stays = [], None
        for name in self._names():
            if newest is not None and name < newest and str(name) not in kept:
                try:
                    # Its manifest goes first: without one the rest of it does not pass for a checkpoint.
                    self._place.remove(self._path(str(name), _FINAL))
                    self._place.remove(self._path(str(name)))
                    removed.append(str(name))
                except OSError as error:  # it must not make the place full of those after it
                    stays = stays or error
        for series in self._begun():
            if newest is not None and series <= newest.series:
                try:
                    self._place.remove(self._path(f"s{series:04d}-begun"))
                except OSError as error:
                    stays = stays or error
        if stays is not None:
            raise stays
        return removed

    # -- reading ------------------------------------------------------------------------------------------------------

    def _names(self) -> list[Name]:
        """Returns the names of all checkpoints, complete or not; oldest first."""
        return sorted(n for text in self._place.names(self._origin.job) if (n := Name.parse(text)) is not None)

    def _begun(self) -> list[int]:
        """Series that were begun over earlier ones."""
        return [int(found[1]) for text in self._place.names(self._origin.job) if (found := _BEGUN.fullmatch(text))]

    def of_run(self, series: int, run: str) -> list[Name]:
        """Returns the names of one run's checkpoints, complete or not; oldest first. Raises OSError."""
        return [name for name in self._names() if (name.series, name.run) == (series, run)]

    def of_others(self, run: str, known: Iterable[str]) -> list[Name]:
        """Returns names of other runs' checkpoints, complete or not, except `known`; oldest first. Raises OSError."""
        known = set(known)
        return [name for name in self._names() if name.run != run and str(name) not in known]

    def complete(self) -> list[Name]:
        """Returns the complete checkpoints, newest first, readable or not. Raises OSError.

        A checkpoint that cannot be listed counts as complete: reading it raises an error with its name.
        """

        def seems_complete(name: Name) -> bool:
            try:
                return _FINAL in self._place.names(self._path(str(name)))
            except OSError:
                return True

        return [name for name in reversed(self._names()) if seems_complete(name)]

    def highest(self) -> tuple[int, int]:
        """The highest series ever begun here, and the highest attempt of all; (0, 0) where there is none."""
        found = self._names()
        series = max((*(n.series for n in found), *self._begun()), default=0)
        return series, max((n.attempt for n in found), default=0)

    def open(self, name: str) -> Manifest:
        """The manifest of one that is complete, or that the pointer names.

        Raises:
            CheckpointError: it is missing, torn, corrupt or foreign.
        """
        try:
            manifest = self._read_manifest(name, _FINAL)
        except CheckpointError:
            with contextlib.suppress(CheckpointError):
                return self._checked(self._read_manifest(name, _STAGED), name)
            raise
        return self._checked(manifest, name)

    def _checked(self, manifest: Manifest, name: str) -> Manifest:
        path = f"{self._place}/{self._path(name)}"
        manifest.check_origin(self._origin, path)
        if manifest.name != name:
            raise CheckpointError(f"{path} is foreign: its manifest is that of {manifest.name}")
        return manifest

    def _read_manifest(self, name: str, which: str) -> Manifest:
        path = self._path(name, which)
        return Manifest.from_bytes(bytes(self._read(path, _MANIFEST_BYTES)), path=f"{self._place}/{path}")

    def _read(self, path: str, limit_bytes: int) -> memoryview:
        """Tries again where it may be the network: a refused checkpoint costs all epochs since the one before."""
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._place.read(path, limit_bytes)
            except FileNotFoundError as error:
                raise MissingFile(f"{self._place}/{path} is missing") from error
            except OSError as error:
                if pause_s is None or isinstance(error, _FOR_GOOD):
                    raise CheckpointError(f"{self._place}/{path} cannot be read: {error}") from error
                log.info("%s/%s cannot be read, trying again: %s", self._place, path, error)
                time.sleep(pause_s)
        raise AssertionError

    def read(self, manifest: Manifest, task: int) -> Encoded | None:
        """A task's boundary, verified; None where the checkpoint has none of this task.

        Raises:
            CheckpointError: the file is missing, torn, corrupt or foreign.
        """
        info = manifest.file_of(task)
        if info is None:
            return None
        path = self._file(manifest.name, task)
        return unpack(self._read(path, info.size), info, path=f"{self._place}/{path}")

    def verify(self, manifest: Manifest) -> None:
        """Reads every file; raises CheckpointError for the first that cannot be used."""
        for info in manifest.files:
            self.read(manifest, info.task)

    def newest(self, names: Iterable[str]) -> Found:
        """The first of these that can be used, every file of it read, and why those before it cannot."""
        refused: list[str] = []
        kinds: set[type[CheckpointError]] = set()
        for name in names:
            try:
                manifest = self.open(name)
                self.verify(manifest)
                return Found(manifest, tuple(refused), frozenset(kinds))
            except CheckpointError as error:
                refused.append(str(error))
                kinds.add(type(error))
        return Found(None, tuple(refused), frozenset(kinds))
