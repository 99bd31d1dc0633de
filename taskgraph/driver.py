"""Drivers: the user's files with a job function in them; how another process finds the same one.

A job travels as a reference (file or module, function, arguments) and a fingerprint of the code behind it. A node
whose code has another fingerprint is refused: two versions of a task must not compute one job.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from taskgraph.errors import DecodeError, FingerprintMismatch, JobError
from taskgraph.jobs import Job, JobFunction
from taskgraph.settings import Settings
from taskgraph.version import PROTOCOL, VERSION

__all__ = ["DriverRef", "JobSpec", "fingerprint", "load_driver", "reference_of"]


@dataclass(frozen=True, slots=True)
class DriverRef:
    """Where a job function is: a file's absolute path or a module's name, and the function's name."""

    kind: str
    location: str
    function: str

    def load(self) -> JobFunction:
        """Imports the driver; raises JobError where that fails."""
        module = _load_file(Path(self.location)) if self.kind == "file" else _load_module(self.location)
        return _find(module, self.function, self.location)


def load_driver(text: str) -> JobFunction:
    """The job function that `module[:function]` or `path.py[:function]` names (default: the only one in it).

    Raises:
        JobError: no such file, module or function, or an error while importing it.
    """
    location, _, function = text.partition(":") if not (len(text) > 2 and text[1] == ":") else (text, "", "")
    if location.endswith(".py") or "/" in location or Path(location).is_file():
        return _find(_load_file(Path(location)), function, location)
    return _find(_load_module(location), function, location)


def _find(module: ModuleType, name: str, location: str) -> JobFunction:
    jobs = {n: f for n, f in vars(module).items() if isinstance(f, JobFunction) and f.__module__ == module.__name__}
    if name:
        found = getattr(module, name, None)
        if isinstance(found, JobFunction):
            return found
        known = ", ".join(jobs) or "none"
        raise JobError(f"{location} has no job function {name!r}; functions decorated with @tg.job there: {known}")
    if len(jobs) == 1:
        return next(iter(jobs.values()))
    if not jobs:
        raise JobError(f"{location} has no job function: decorate the function that returns the Job with @tg.job")
    raise JobError(
        f"{location} has several job functions ({', '.join(jobs)}): name one, as {location}:{next(iter(jobs))}"
    )


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name or (error.name and name.startswith(error.name + ".")):
            raise JobError(
                f"there is no module {name!r} to import from here; for a file write its path: {name}.py"
            ) from error
        raise JobError(f"importing {name} failed: {error}") from error
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"importing {name} failed: {type(error).__name__}: {error}{_place(error)}") from error


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise JobError(f"there is no file {path}")
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == path:
        return main
    # A stable name of its own: what the driver declares is called the same in every process, and a file named like
    # a module of the standard library does not hide it.
    name = f"{path.stem}__driver" if path.stem in sys.stdlib_module_names or path.stem in sys.modules else path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) and Path(str(known.__file__)).resolve() == path:
        return known
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except JobError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise JobError(f"importing {path} failed: {type(error).__name__}: {error}{_place(error)}") from error
    return module


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    last = ""
    while trace is not None:
        last = f" (at {trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return last


def reference_of(function: JobFunction) -> DriverRef:
    """How other processes find a job function.

    Raises:
        JobError: it was defined interactively.
    """
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if function.__module__ == "__main__" or (file and getattr(module, "__spec__", None) is None):
        if not file:
            raise JobError(
                f"{function.__name__} was defined interactively, so other processes cannot import it: put it into a "
                f"file, or run it in this process with nodes=0"
            )
        return DriverRef("file", str(Path(file).resolve()), function.__name__)
    if file and "." not in function.__module__ and not _installed(Path(file)):
        return DriverRef("file", str(Path(file).resolve()), function.__name__)
    return DriverRef("module", function.__module__, function.__name__)


_INSTALLED = ("site-packages", "dist-packages")


def _installed(path: Path) -> bool:
    return any(part in _INSTALLED for part in path.parts)


def fingerprint(function: JobFunction) -> str:
    """16 hex digits of the driver's source, of what it imports from its own directory, and of our protocol."""
    module = sys.modules[function.__module__]
    file = getattr(module, "__file__", None)
    digest = hashlib.sha256(f"taskgraph {VERSION} protocol {PROTOCOL}\n{function.__name__}\n".encode())
    if file:
        root = Path(file).resolve().parent
        for name, path in sorted(_local_sources(root, Path(file).resolve()).items()):
            digest.update(f"{name}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _local_sources(root: Path, driver: Path) -> dict[str, Path]:
    """Name relative to the driver's directory -> file, of the driver and of what it imports from beside it.

    Read from the sources, not from what happens to be imported: the submitter may have run other code before, and
    must find what a node finds.
    """
    package = root  # absolute imports within a package start where the package does
    while (package / "__init__.py").is_file():
        package = package.parent
    bases = [base for base in dict.fromkeys((root, package)) if base.name not in _INSTALLED]
    sources: dict[str, Path] = {}
    queue = [driver]
    while queue:
        path = queue.pop()
        name = os.path.relpath(path, root)
        if name not in sources:
            sources[name] = path
            queue.extend(_imported_files(path, bases))
    return sources


def _imported_files(path: Path, bases: list[Path]) -> list[Path]:
    """Files below `bases` that the import statements of one source name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # importing it failed, too, or will: the error is told there
    found: set[Path] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.update(_files_of(alias.name.split("."), bases))
        elif isinstance(node, ast.ImportFrom):
            above = [path.parents[min(node.level, len(path.parents)) - 1]] if node.level else bases
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                found.update(_files_of([*parts, alias.name], above))
    ours = Path(__file__).resolve().parent
    return sorted(file for file in found if ours not in file.parents)


def _files_of(parts: list[str], bases: list[Path]) -> list[Path]:
    """The files that importing a dotted name would run: of its packages and of the module."""
    return [
        file
        for base in bases
        for length in range(len(parts) + 1)
        for file in (base.joinpath(*parts[:length], "__init__.py"), base.joinpath(*parts[:length]).with_suffix(".py"))
        if (length or file.name == "__init__.py") and file.is_file()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What etcd holds of a submitted job: all that a node needs to take part.

    Attributes:
        name: the job's.
        run: a uuid of this submission, so that an earlier job of the same name is told from it.
        kwargs: the job function's arguments.
        expected_nodes: how many the launcher started: the job begins when they are there.
        submitted_at: unix time, seconds.
    """

    name: str
    run: str
    driver: DriverRef | None
    kwargs: dict[str, Any]
    fingerprint: str
    tasks: int
    epochs: int | None
    backups: int
    min_nodes: int
    seed: int
    settings: dict[str, Any]
    expected_nodes: int = 0
    submitted_at: float = 0.0
    version: str = VERSION

    @classmethod
    def of(cls, job: Job, *, name: str = "", expected_nodes: int = 0) -> JobSpec:
        """The spec of a job made by a job function; raises JobError where other processes cannot make it."""
        function, kwargs = job.origin()
        return cls._make(job, reference_of(function), kwargs, fingerprint(function), name, expected_nodes)

    @classmethod
    def local(cls, job: Job) -> JobSpec:
        """The spec of a job that stays in this process."""
        return cls._make(job, None, {}, "local", "", 0)

    @classmethod
    def _make(
        cls, job: Job, driver: DriverRef | None, kwargs: dict[str, Any], print_: str, name: str, nodes: int
    ) -> JobSpec:
        return cls(
            name=name or job.name or "job",
            run=uuid.uuid4().hex,
            driver=driver,
            kwargs=kwargs,
            fingerprint=print_,
            tasks=job.tasks,
            epochs=job.epochs,
            backups=job.backups,
            min_nodes=job.min_nodes,
            seed=job.seed,
            settings=dataclasses.asdict(job.settings),
            expected_nodes=nodes,
            submitted_at=time.time(),
        )

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobSpec:
        try:
            raw = json.loads(data)
            names = {f.name for f in dataclasses.fields(cls)}
            driver = raw.get("driver")
            known = {k: v for k, v in raw.items() if k in names}
            return cls(**{**known, "driver": DriverRef(**driver) if driver else None})
        except (ValueError, TypeError, AttributeError) as error:
            raise DecodeError(f"not a job's spec: {data[:200]!r} ({error})") from error

    def load_job(self) -> Job:
        """Imports the driver and makes the job, as the submitter did.

        Raises:
            JobError: the driver cannot be imported here.
            FingerprintMismatch: it is another one, or another version.
        """
        if self.driver is None:
            raise JobError(f"job {self.name!r} lives in the process that made it")
        function = self.driver.load()
        mine = fingerprint(function)
        if mine != self.fingerprint:
            raise FingerprintMismatch(
                f"job {self.name!r} was submitted with driver {self.driver.location} of fingerprint "
                f"{self.fingerprint} (taskgraph {self.version}); here it has {mine} (taskgraph {VERSION}). Bring both "
                f"to the same version, or submit the job again"
            )
        settings = {k: v for k, v in self.settings.items() if k in {f.name for f in dataclasses.fields(Settings)}}
        return dataclasses.replace(function(**self.kwargs), name=self.name, settings=Settings(**settings))
