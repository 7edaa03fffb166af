"""Element types: what NumPy calls them, and what the compiled module reads.

NumPy has no bfloat16 of its own. An array of it is told by the name of its dtype (ml_dtypes', which
is not imported for it), and is read as the uint16 of its bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class BFloat16Bits(np.ndarray):
    """The bits of bfloat16 elements, for libraries that have the type where NumPy has not."""


class Element(NamedTuple):
    """An element type."""

    name: str
    stored: np.dtype[Any]
    """What the compiled module takes."""
    shown: np.dtype[Any] | None
    """What callers see; None: BFloat16Bits."""

    @property
    def is_half(self) -> bool:
        return self.stored.itemsize == 2

    @property
    def sums(self) -> Element:
        """What row statistics have."""
        return FLOAT32 if self.is_half else self

    def show(self, array: Array) -> Array:
        """View an array of ``stored`` as callers know the type."""
        if self.shown is None:
            return array.view(BFloat16Bits)
        return array if self.shown == array.dtype else array.view(self.shown)


def _of_numpy(name: str) -> Element:
    return Element(name, np.dtype(name), np.dtype(name))


HALF = ("float16", "bfloat16")
FLOAT32 = _of_numpy("float32")
_OF_NUMPY = {kind.name: kind for kind in (FLOAT32, _of_numpy("float64"), _of_numpy("float16"))}
BOOL = _of_numpy("bool")
BFLOAT16_BITS = Element("bfloat16", np.dtype(np.uint16), None)


def element_of(dtype: np.dtype[Any]) -> Element | None:
    """Return the element type of that dtype, None where attention is not computed in it."""
    if dtype.kind == "f":
        return _OF_NUMPY.get(dtype.newbyteorder("=").name)
    if dtype.name == "bfloat16" and dtype.itemsize == 2:
        return BFLOAT16_BITS._replace(shown=dtype)
    return None


def bfloat16_of_numpy(name: str) -> Element:
    """Return bfloat16 as NumPy arrays have it.

    Raises:
        ImportError: ml_dtypes is not there, without which NumPy has no bfloat16.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"{name} is bfloat16, which NumPy can hold only with the package ml_dtypes; use "
            "forge.torch, forge.jax or forge.mlx, or pip install ml_dtypes"
        ) from error
    return BFLOAT16_BITS._replace(shown=np.dtype(ml_dtypes.bfloat16))


def read_as_stored(array: Array, element: Element) -> Array:
    """View an array as the compiled module takes it."""
    if array.dtype.name == "bfloat16":
        return array.view(element.stored)
    return array


def as_float32(array: Array, element: Element) -> Array:
    """Return elements as the compiled module takes them in float32; halves are widened, exactly."""
    if element.name == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if element.is_half else array


def as_stored(array: Array, element: Element) -> Array:
    """Return float32 elements as the compiled module takes ``element``: rounded to nearest even."""
    if element.name != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(element.stored)
    bits = array.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    nan: Array = bits >> 16 | 0x40
    return np.where(np.isnan(array), nan, rounded).astype(np.uint16)


def check_dtypes(dtypes: dict[str, str], kernel: str, values: dict[str, object]) -> None:
    """Check the element types of q, k and v against each other and against the kernel.

    k and v are of one type: q's, or half precision under a float32 q.

    Args:
        dtypes: the name of each one's type.
        kernel: the family.
        values: the caller's own, in whose library's words the way out is named.

    Raises:
        TypeError: naming both types, and what would be taken.
    """
    q, k, v = (dtypes[name] for name in ("q", "k", "v"))
    if q == "float64" and kernel == "fused":
        raise TypeError(float64_for_fused(values["q"]))
    if kernel == "materialized":
        for name, dtype in dtypes.items():
            if dtype in HALF:
                raise TypeError(half_for_materialized(name, dtype, values[name]))
    if k != q and not (q == "float32" and k in HALF):
        raise TypeError(wrong_precision("k", k, q, values["k"], "q"))
    if v != k:
        raise TypeError(wrong_precision("v", v, k, values["v"], "q" if k == q else "k"))


def wrong_dtype(name: str, dtype: object, value: object) -> str:
    said = (
        f"{name} must be float32, float16 or bfloat16 (or float64 with kernel='materialized'), "
        f"got {dtype}"
    )
    kind = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if kind in ("uint16", "void16"):
        return f"{said}; where its elements are bfloat16, pass {name}.view(ml_dtypes.bfloat16)"
    if not kind.startswith(("float", "bfloat", "int", "uint")):
        return said
    return f"{said}; pass {as_float(name, value)}, a copy"


def wrong_precision(name: str, dtype: str, expected: str, value: object, like: str) -> str:
    """Say that an array is of another dtype than the array ``like``."""
    said = f"{name} must be {expected} as {like} is, got {dtype}"
    return f"{said}; pass {as_float(name, value, expected)}, a copy"


def half_for_materialized(name: str, dtype: object, value: object) -> str:
    return (
        f"{name} must be float32 or float64 for kernel='materialized', got {dtype}; pass "
        f"{as_float(name, value)}, a copy, or kernel='fused', which takes {dtype}"
    )


def float64_for_fused(q: object) -> str:
    return (
        "q must be float32 for kernel='fused', got float64; pass "
        f"{as_float('q', q)}, a copy in single precision, and k and v likewise, or "
        "kernel='materialized', which computes in float64, but ten times slower or more and in "
        "O(T^2) memory"
    )


def as_float(name: str, value: object, dtype: str = "float32") -> str:
    """Return how to write the argument in another precision, in the words of its own library."""
    if is_of(value, "torch"):
        return f"{name}.to(torch.{dtype})"
    if is_of(value, "jax", "jaxlib"):
        return f"{name}.astype(jax.numpy.{dtype})"
    if is_of(value, "mlx"):
        return f"{name}.astype(mlx.core.{dtype})"
    if not hasattr(value, "astype"):
        return f"{name} as {dtype}"
    return f"{name}.astype({'ml_dtypes' if dtype == 'bfloat16' else 'np'}.{dtype})"


def is_of(value: object, *packages: str) -> bool:
    """Whether the value's type, or one that it is derived from, is one of these packages'."""
    return any(base.__module__.partition(".")[0] in packages for base in type(value).__mro__)
