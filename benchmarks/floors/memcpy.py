"""The floor of any way through memory: one copy between two arrays that were touched before. Milliseconds."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import arguments, tell


def main(n: int, seconds: float) -> None:
    source, target = np.arange(n, dtype=np.float64), np.ones(n)
    took: list[float] = []
    created = time.monotonic()
    while time.monotonic() - created < seconds or len(took) < 6:
        began = time.perf_counter()
        np.copyto(target, source)
        took.append(time.perf_counter() - began)
    if target[-1] != n - 1:
        raise SystemExit("it was not copied")
    median = statistics.median(took[1:])
    tell({"ms": median * 1e3, "gb_per_s": 8 * n / median / 1e9})


if __name__ == "__main__":
    given = arguments(__doc__, lambda parser: parser.set_defaults(n=8_388_608))
    main(given.n, given.seconds)
