"""The first values of rows: a pure function of the table's seed and the row's id.

So it does not matter who asks for a row first, in which epoch, or on which node. The random bits are those of a
counter-based generator: each number is a hash of (seed, id, column), as in J. Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011). The hash is the finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014).

Normal numbers are the inverse of the distribution function, by M. Giles, "Approximating the erfinv function" (GPU
Computing Gems, 2011), whose relative error is below 1e-6. All of it is additions, multiplications, divisions and square
roots of float64, which IEEE 754 defines to the last bit: numpy's own `log` differs between kinds of processors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["INITS", "first_rows", "hash_ids", "table_seed"]

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

INITS = ("normal", "uniform", "zeros")

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, and odd: the step of SplitMix64."""
_CHUNK = 1 << 14
"""Numbers made at a time: their intermediate arrays (128 KiB each) stay in the processor's cache."""
_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
_SQRT_2 = 1.4142135623730951
_LOG_TERMS = 9
"""Terms of the series for the logarithm: s**2 < 0.03, so the next one is below 1e-15."""
_NEAR = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_FAR = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def table_seed(seed: int, name: str) -> int:
    """Returns the seed of a table, of 64 bits, from the job's seed and the table's name."""
    return xxhash.xxh3_64_intdigest(f"{seed}/table/{name}".encode())


def hash_ids(ids: Ids, seed: int = 0) -> Words:
    """Returns 64 bits for each id, of shape (n,), which depend on the seed and the id alone."""
    return _mix(_mix(ids.astype(np.uint64) + np.uint64(_GOLDEN)) ^ np.uint64(seed % (1 << 64)))


def first_rows(ids: Ids, width: int, *, seed: int, init: str, scale: float, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Makes the first values of rows.

    Args:
        ids: int64, of shape (n,); an id may be there more than once.
        width: numbers in a row.
        seed: the table's, see `table_seed`.
        init: "normal" (mean 0, standard deviation `scale`), "uniform" (from -scale to scale), or "zeros".
        scale: see `init`.
        dtype: float32 or float64; the numbers are made in float64, and then rounded.

    Returns:
        An array of shape (n, width).
    """
    made = np.zeros((len(ids), width), dtype)
    if init == "zeros":
        return made
    keys = hash_ids(ids, seed)
    columns = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    at_a_time = max(1, _CHUNK // max(1, width))
    for begin in range(0, len(ids), at_a_time):
        some = slice(begin, begin + at_a_time)
        drawn = _uniform(_mix(keys[some, None] + columns))
        made[some] = (_normal(drawn) if init == "normal" else drawn) * scale
    return made


def _mix(words: Words) -> Words:
    """Hashes 64 bits to 64 bits, one to one (SplitMix64's finalizer, David Stafford's variant 13)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _uniform(words: Words) -> Floats:
    """Turns random bits into numbers evenly spread over -1 to 1, neither included: odd multiples of 2**-52."""
    odd = (words >> np.uint64(11)) | np.uint64(1)
    return odd.astype(np.float64) * 2.0**-52 - 1.0


def _normal(drawn: Floats) -> Floats:
    """Turns numbers spread over -1 to 1 into normal ones, of mean 0 and variance 1."""
    depth = -_log((1.0 - drawn) * (1.0 + drawn))
    found = _polynomial(_NEAR, depth - 2.5)
    far = np.flatnonzero(depth.ravel() >= 5.0)
    found.ravel()[far] = _polynomial(_FAR, np.sqrt(depth.ravel()[far]) - 3.0)
    return found * drawn * _SQRT_2


def _log(x: Floats) -> Floats:
    """Returns the natural logarithm of positive numbers, the same bits on every processor."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([1.0 / (2 * k + 1) for k in reversed(range(_LOG_TERMS))], s * s)
    return (exponent - low) * _LN_2 + 2.0 * s * series


def _polynomial(coefficients: tuple[float, ...] | list[float], x: Floats) -> Floats:
    """Evaluates a polynomial, the highest power first, by Horner's rule."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += coefficient
    return value
