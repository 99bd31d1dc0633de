"""The fingerprint of a driver: two versions of a task must not compute one job.

It covers the driver's source and the modules in its directory that import statements name, wherever they stand; not
installed packages, data files, or modules that are imported by a computed name.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskgraph.version import PROTOCOL, VERSION

if TYPE_CHECKING:
    from taskgraph.jobs import JobFunction

__all__ = ["file_of", "fingerprint", "is_installed", "namespace_of", "parse_source"]

_INSTALLED = ("site-packages", "dist-packages")


def is_installed(path: Path) -> bool:
    """True if a source belongs to an installed package, which every host must install."""
    return any(part in _INSTALLED for part in path.parts)


def fingerprint(function: JobFunction[...]) -> str:
    """Hashes the driver's source, its imports from its own directory, and our protocol, to 16 hex digits."""
    file = file_of(function)
    digest = hashlib.sha256(f"taskgraph {VERSION} protocol {PROTOCOL}\n{function.__name__}\n".encode())
    if file is not None:
        root = file.parent
        for name, path in sorted(_local_sources(root, file).items()):
            digest.update(f"{name}\n".encode(errors="surrogateescape"))  # a name may be any bytes
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def namespace_of(function: JobFunction[...]) -> dict[str, Any]:
    """Returns the namespace of a job function's module.

    Takes the names from the function: with `python -m cProfile fit.py` the driver's name is `__main__`, and
    `sys.modules["__main__"]` is the profiler.
    """
    names: dict[str, Any] = inspect.unwrap(function.__wrapped__).__globals__
    return names


def file_of(function: JobFunction[...]) -> Path | None:
    """Returns the file of a job function; None: there is none, as it was defined at a prompt or is in an archive."""
    file = namespace_of(function).get("__file__")
    if not file and function.__module__ == "__main__":  # `python -i` takes it away once the script is through
        file = inspect.unwrap(function.__wrapped__).__code__.co_filename
    return Path(file).resolve() if file and Path(file).is_file() else None


def _local_sources(root: Path, driver: Path) -> dict[str, Path]:
    """Maps names to files, for the driver and its imports from its directory; names are relative to that directory.

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


def parse_source(path: Path) -> ast.Module:
    """Parses a source file to its syntax tree.

    Stops the garbage collector meanwhile: on Python 3.11 a finalizer that runs while a tree is built makes parsing fail
    ("AST constructor recursion depth mismatch").

    Raises:
        SyntaxError, ValueError, OSError: the file cannot be parsed or read.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_bytes())
    finally:
        if collects:
            gc.enable()


def _imported_files(path: Path, bases: list[Path]) -> list[Path]:
    """Returns the files below `bases` that the import statements of one source name."""
    try:
        tree = parse_source(path)
    except (SyntaxError, ValueError):
        return []  # its import fails, too, and reports the error
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
    ours = Path(__file__).resolve().parents[1]
    return sorted(file for file in found if ours not in file.parents)


def _files_of(parts: list[str], bases: list[Path]) -> list[Path]:
    """Returns the files that importing a dotted name runs: those of its packages, and the module."""
    return [
        file
        for base in bases
        for length in range(len(parts) + 1)
        for file in (base.joinpath(*parts[:length], "__init__.py"), base.joinpath(*parts[:length]).with_suffix(".py"))
        if (length or file.name == "__init__.py") and file.is_file()
    ]
