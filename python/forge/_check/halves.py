"""Half precision in plain NumPy, which has no bfloat16: its bits in uint16."""

from __future__ import annotations

import numpy as np

from forge._arrays import Array
from forge._dtypes import BFLOAT16_BITS, BFloat16Bits, as_float32, as_stored

DTYPES = ("float32", "bfloat16", "float16")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Half an ulp, relative, and the smallest number.
UNITS = {"float16": (2.0**-11, 2.0**-24), "bfloat16": (2.0**-8, 2.0**-133)}


def to_bfloat16(x: Array) -> Array:
    """Return the bits of float32 values as bfloat16, rounded to nearest, ties to even."""
    return as_stored(np.asarray(x, np.float32), BFLOAT16_BITS)


def from_bfloat16(bits: Array) -> Array:
    """Return the float32 values of bits of bfloat16."""
    return as_float32(np.asarray(bits, np.uint16), BFLOAT16_BITS)


def stored(x: Array, dtype: str) -> Array:
    """Return float32 values rounded to ``dtype``, C-contiguous; bfloat16 as bits in uint16."""
    return np.ascontiguousarray(to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype))


def rounded(x: Array, dtype: str) -> Array:
    """Return float32 values that ``dtype`` has: the nearest ones."""
    return x if dtype == "float32" else widened(stored(x, dtype), dtype)


def for_call(x: Array) -> Array:
    """Return what ``stored`` gave as the public functions take it."""
    return x.view(BFloat16Bits) if x.dtype == np.uint16 else x


def widened(x: Array, dtype: str) -> Array:
    """Return the float32 values of an array that ``stored`` or a call gave.

    Raises:
        TypeError: the array is of another dtype.
    """
    if x.dtype != ("uint16" if dtype == "bfloat16" else dtype):
        raise TypeError(f"a result must be {dtype}, got {x.dtype}")
    plain: Array = np.ndarray.view(x, np.ndarray)
    return from_bfloat16(plain) if dtype == "bfloat16" else plain.astype(np.float32, copy=False)


def share_of(errors: Array, want: Array, bound: float, dtype: str) -> tuple[Array, Array]:
    """Return each error as a share of its bound, and these bounds.

    A result in half precision is float32's, which has ``bound``, rounded once: each element may be
    off by half an ulp of its own besides, and by half the smallest number of the type.
    """
    unit, smallest = UNITS.get(dtype, (0.0, 0.0))
    bounds = bound + unit * np.abs(np.where(np.isfinite(want), want, 0)) + smallest / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0, errors / bounds), bounds
