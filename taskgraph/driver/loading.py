"""Loads drivers (the user's files with a job function), and makes references by which other processes find them."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from taskgraph.driver.sources import file_of, is_installed, namespace_of
from taskgraph.errors import JobError, TaskGraphError
from taskgraph.options import ARGPARSE

if TYPE_CHECKING:
    from taskgraph.jobs import Job, JobFunction

__all__ = [
    "DriverRef",
    "add_to_path",
    "check_no_loop",
    "check_not_importing",
    "check_not_in_piece",
    "load_driver",
    "load_file",
    "load_module",
    "make_job",
    "note_piece",
    "reference_of",
]

_NOT_USER_CODE = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")).resolve())
_MAX_FILES_NAMED = 10
"""Files of a directory that are named in a message."""
_importing: ContextVar[str] = ContextVar("_importing", default="")
_in_piece: ContextVar[bool] = ContextVar("_in_piece", default=False)


@dataclass(frozen=True, slots=True)
class DriverRef:
    """The place of a job function.

    Attributes:
        kind: "file" or "module".
        location: a file's absolute path, or a module's name.
        function: the function's name in it.
        root: of a module that is not installed, the directory it is imported from.
    """

    kind: str
    location: str
    function: str
    root: str = ""

    def load(self) -> JobFunction[...]:
        """Imports the driver and returns its job function. Raises JobError if that fails.

        If this host has no file at that path, uses a file of that name in the working directory: the fingerprint shows
        whether its code is the same.
        """
        if self.kind != "file":
            if self.root and Path(self.root).is_dir():
                add_to_path(self.root)
            return _find_job_function(load_module(self.location), self.function, self.location)
        path = Path(self.location)
        if not path.is_file():
            here = Path(path.name)
            if not here.is_file():
                where = _working_directory() or "the working directory, which was removed"
                raise JobError(f"there is no file {path} on this host, and no {path.name} in {where}")
            path = here.resolve()
        return _find_job_function(load_file(path), self.function, str(path))


def load_driver(text: str) -> JobFunction[...]:
    """Loads the job function that `module[:function]` or `path.py[:function]` names. Without a function: the only one.

    Raises:
        JobError: there is no such file, module or function, or importing it failed.
    """
    location, colon, function = text.rpartition(":")
    if not colon or not (function.isidentifier() or not function):
        location, function = text, ""
    if location.endswith(".py") or "/" in location or Path(location).is_file() or not location.strip("."):
        return _find_job_function(load_file(Path(location)), function, location)
    return _find_job_function(load_module(location), function, location)


def _find_job_function(module: ModuleType, name: str, location: str) -> JobFunction[...]:
    from taskgraph.jobs import JobFunction  # what a driver needs; most commands do without

    jobs: dict[str, JobFunction[...]] = {}
    for n, f in vars(module).items():
        if isinstance(f, JobFunction) and f.__module__ == module.__name__ and all(f is not j for j in jobs.values()):
            jobs[n] = f
    if name:
        found = getattr(module, name, None)
        if isinstance(found, JobFunction):
            return found
        known = ", ".join(jobs) or "none"
        raise JobError(f"{location} has no job function {name!r}; functions decorated with @tg.job there: {known}")
    if len(jobs) == 1:
        return next(iter(jobs.values()))
    imported = [n for n, f in vars(module).items() if isinstance(f, JobFunction)]
    if not jobs and imported:
        raise JobError(
            f"{location} has no job function of its own, but imports {', '.join(imported)}: name one, as "
            f"{location}:{imported[0]}"
        )
    if not jobs:
        python = location if location.endswith(".py") else f"-m {location}"
        raise JobError(
            f"{location} has no job function: decorate the function that returns the Job with @tg.job. A program that "
            f"calls tg.map or tg.run itself is run with `python {python}`"
        )
    raise JobError(
        f"{location} has several job functions ({', '.join(jobs)}): name one, as {location}:{next(iter(jobs))}"
    )


def load_module(name: str) -> ModuleType:
    """Imports a module of the driver's. Raises JobError, with the place, if that fails."""
    if "" not in sys.path and (here := _working_directory()) is not None:
        add_to_path(str(here))
    with _importing_driver(name):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and f"{name}.".startswith(f"{error.name}."):
                close = difflib.get_close_matches(name, [file.name for file in Path().glob("*.py")], 1)
                hint = f"did you mean {close[0]}?" if close else f"for a file write its path: {name}.py"
                raise JobError(f"there is no module {name!r} to import from here; {hint}") from error
            raise
    if getattr(module, "__file__", None) is None and (folders := list(getattr(module, "__path__", ()))):
        return load_file(Path(folders[0]))  # any directory can be imported, and has nothing in it then: this says so
    return module


def load_file(path: Path) -> ModuleType:
    """Imports a driver's file, unless it is imported already. Raises JobError, with the place, if that fails."""
    path = path.resolve()
    if not path.is_file():
        sources = [file.name for file in sorted(path.glob("*.py") if path.is_dir() else path.parent.glob("*.py"))]
        if path.is_dir():
            there = f"there is {', '.join(sources[:_MAX_FILES_NAMED])}" if sources else "no Python file is there"
            raise JobError(f"{path} is a directory: name a file in it; {there}")
        close = difflib.get_close_matches(path.name, sources, 1)
        raise JobError(f"there is no file {path}" + (f" (did you mean {close[0]}?)" if close else ""))
    if _is_loaded_from(sys.modules.get("__main__"), path):
        return sys.modules["__main__"]
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec, loader = _import_spec(name, path)
    add_to_path(str(path.parent))  # as `python path.py` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing_driver(str(path)):
            loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if hint := _package_hint(path, error.__cause__):
            raise JobError(f"{error}; {hint}") from error.__cause__
        raise
    return module


def _import_spec(name: str, path: Path) -> tuple[ModuleSpec, Loader]:
    """Returns the spec and the loader to import a file with. Raises JobError if it is no Python source."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is no Python source: a driver is a file whose name ends in .py, or a module")
    return spec, spec.loader


def _package_hint(path: Path, error: BaseException | None) -> str:
    """Returns how to name a driver whose import failed because it is in a package; "": it failed for another reason."""
    if not isinstance(error, ImportError):
        return ""
    relative = "attempted relative import" in str(error)
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file() or (relative and len(parts) == 1):
        folder, parts = folder.parent, [folder.name, *parts]
    if len(parts) == 1 or not (relative or (error.name or "").partition(".")[0] == parts[0]):
        return ""
    return f"what is in a package is named as a module: `taskgraph run {'.'.join(parts)}`, in {folder}"


def _module_name(path: Path) -> str:
    """Returns a name for a driver's module: the file's stem, so that files beside it import the same module.

    Changes a stem that is a name of the standard library or of another driver, and dots, which would mean a package.
    """
    stem = path.stem.replace(".", "_")
    tries = [] if stem in sys.stdlib_module_names else [stem]
    tries += [f"{stem}__driver{number or ''}" for number in range(len(sys.modules))]
    return next(name for name in tries if name not in sys.modules or _is_loaded_from(sys.modules[name], path))


def _is_loaded_from(module: ModuleType | None, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and Path(str(file)).resolve() == path


def _working_directory() -> Path | None:
    """Returns the working directory; None: it was removed, as batch systems do with scratch directories."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def add_to_path(folder: str) -> None:
    """Lets modules be imported from a folder."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


@contextlib.contextmanager
def _importing_driver(what: str) -> Iterator[None]:
    """A `with` block that imports a driver: errors of its code become JobError with the place. It must start no job."""
    token = _importing.set(what)
    try:
        yield
    except SystemExit as error:
        advice = "nodes import it, too, so put tg.main(...) and the like under `if __name__ == '__main__':`"
        if error.code == 2:
            advice = ARGPARSE
        raise JobError(f"importing {what} ended with sys.exit({error.code!r}){place_of(error)}: {advice}") from error
    except Exception as error:
        raise _job_error(f"importing {what}", error, _loop_hint(error)) from error
    finally:
        _importing.reset(token)


def _loop_hint(error: Exception) -> str:
    """Returns what to do about a driver that runs an event loop while it is imported; "": the error is another one."""
    if not isinstance(error, RuntimeError) or "event loop" not in str(error):
        return ""
    return (
        ": every node imports it, where an event loop runs, so put asyncio.run(...) and the like under "
        "`if __name__ == '__main__':`"
    )


def make_job(function: JobFunction[...], arguments: Mapping[str, Any]) -> Job:
    """Calls a driver's job function for the command line or a node, and returns the job.

    Raises:
        JobError: the function raised, or called sys.exit; the message has the place.
    """
    file = file_of(function)
    what = f"{function.__name__}(...) of {file.name if file is not None else function.__module__}"
    try:
        return function(**arguments)
    except SystemExit as error:  # with code 0 the command would end well, and have done nothing
        raise JobError(
            f"{what} ended with sys.exit({error.code!r}){place_of(error)}: nodes call it, too, so let it return a "
            f"tg.Job, or raise an error"
        ) from error
    except Exception as error:
        raise _job_error(what, error) from error


def _job_error(what: str, error: Exception, hint: str = "") -> JobError:
    """Makes a JobError from an error of a driver's own code, with the place."""
    if isinstance(error, TaskGraphError):
        return JobError(f"{error}{place_of(error)}")
    kind = traceback.format_exception_only(error)[-1].strip()
    return JobError(f"{what} failed: {kind}{place_of(error)}{hint}")


def check_not_importing(job: str) -> None:
    """Raises JobError if a driver is being imported. It must not start the job: every node would start it again."""
    if _importing.get():
        raise JobError(
            f"{_importing.get()} starts job {job!r} while it is imported, and every node imports it: put that under "
            f"`if __name__ == '__main__':`"
        )


def note_piece(at_work: bool) -> None:
    """Notes that this thread begins to compute a piece of a map or of `run.shards` (True), or has ended it (False)."""
    _in_piece.set(at_work)


def check_not_in_piece(job: str) -> None:
    """Raises JobError if this thread computes a piece: nodes that start nodes would be many."""
    if _in_piece.get():
        raise JobError(f"job {job!r} is started in a piece, where it can run in that process only: give it nodes=0")


def check_no_loop(what: str, instead: str) -> None:
    """Raises JobError if an event loop runs in this thread: a second one cannot run there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise JobError(f"{what} cannot be called where an event loop runs (a notebook, an async def): {instead}")


def place_of(error: BaseException) -> str:
    """Returns ` (at FILE, line N)`: the last place of an error's traceback that is in the user's code; "": none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (at {error.filename}, line {error.lineno})"
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if not file.is_file() or is_installed(file):  # the import system's own frames are of no file
            continue
        if not any(folder in file.resolve().parents for folder in _NOT_USER_CODE):
            place = f" (at {file}, line {line})"
    return place


def reference_of(function: JobFunction[...]) -> DriverRef:
    """Returns a reference by which other processes find a job function.

    Raises:
        JobError: it was defined interactively, in a zip archive, or in a file that can be run and not imported; or its
            module does not have it.
    """
    path, module = file_of(function), namespace_of(function)
    if path is None:
        file = module.get("__file__") or "<stdin>"
        how = "was defined interactively" if file.startswith("<") else f"is in {file}, which is no plain file"
        raise JobError(
            f"{function.__name__} {how}, so other processes cannot import it: put it into a "
            f"file, or run it in this process with nodes=0"
        )
    names = [name for name, value in module.items() if value is function]
    if not names:
        raise JobError(f"{path} has no {function.__name__} that is this job function: was it replaced there?")
    attribute = function.__name__ if function.__name__ in names else names[0]
    spec = module.get("__spec__")  # with `python -m proj.fit` it has the name; with `python fit.py` it is None
    name = spec.name if spec is not None else ""
    if is_installed(path):
        return DriverRef("module", name or function.__module__, attribute)
    if "." not in name:
        _import_spec(path.stem, path)  # Python runs a script of any name
        return DriverRef("file", str(path), attribute)
    parts = len(name.split(".")) + (path.name == "__init__.py")
    return DriverRef("module", name, attribute, root=str(path.parents[parts - 1]))
