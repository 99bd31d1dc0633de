"""The threads of the OpenBLAS libraries in this process: their number decides the last bits of products."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OpenBlas", "openblas_here"]

_PREFIXES, _SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "_64", "")
"""Of its functions: the wheels of numpy and scipy rename them, with and without ints of 64 bits. Those with the suffix
`_` alone are Fortran's, which take a pointer."""


@dataclass(frozen=True)
class OpenBlas:
    """One OpenBLAS library of this process.

    Attributes:
        threads: returns how many threads it computes with.
        set_threads: changes that.
    """

    threads: Callable[[], int]
    set_threads: Callable[[int], object]


def openblas_here() -> list[OpenBlas]:
    """Returns the OpenBLAS libraries that this process has loaded; none where they cannot be found."""
    return [known for path in _loaded_paths() if (known := _open_library(path)) is not None]


def _loaded_paths() -> Iterator[str]:
    """Yields the paths of the OpenBLAS libraries that are loaded; on systems without /proc, of those in numpy's
    wheel.
    """
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    except OSError:
        numpy = Path(sys.modules["numpy"].__file__ or "").parent
        paths = {
            str(p) for folder in (numpy / ".dylibs", numpy.parent / "numpy.libs") for p in folder.glob("*openblas*")
        }
    yield from sorted(path for path in paths if path.startswith("/"))


@functools.cache
def _open_library(path: str) -> OpenBlas | None:
    """Returns a loaded library by its path; None: it has none of OpenBLAS's functions."""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(path)
        for prefix, suffix in itertools.product(_PREFIXES, _SUFFIXES):
            with contextlib.suppress(AttributeError):
                get = getattr(library, f"{prefix}_get_num_threads{suffix}")
                return OpenBlas(get, getattr(library, f"{prefix}_set_num_threads{suffix}"))
    return None
