"""Arrays at the door: what is taken in place, what is copied, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from forge._memory import check_memory

Array = np.ndarray[Any, np.dtype[Any]]

IN_PLACE = "in place"


def as_input(name: str, value: object) -> tuple[Array, str]:
    """Return ``value`` as an array that the kernels can read, and how it got there.

    The second item is ``"in place"`` or ``"copied: <reason>"``. Nothing is cast: the dtype must be
    float32 or float64 already.

    Raises:
        TypeError: ``value`` is no array, has masked elements, or has another dtype.
    """
    array = _as_ndarray(name, value)
    dtype = array.dtype
    if dtype.kind != "f" or dtype.itemsize not in (4, 8):
        raise TypeError(
            f"{name} must be float32 (or float64 with kernel='materialized'), got {dtype}"
        )
    reason = _why_copy(array)
    if reason is None:
        return array, IN_PLACE
    return np.array(array, dtype=dtype.newbyteorder("="), order="C"), f"copied: {reason}"


def _as_ndarray(name: str, value: object) -> Array:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise TypeError(f"{name} must not have masked elements, got a masked array with some")
        return np.asarray(value.data)
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if hasattr(value, "__array__") and not isinstance(value, (np.generic, type)):
        return np.asarray(value)
    raise TypeError(f"{name} must be a NumPy array, got {type(value).__name__}")


def _why_copy(array: Array) -> str | None:
    if not array.dtype.isnative:
        return "byte-swapped"
    if not array.flags.aligned:
        return "misaligned"
    if array.size and array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return "last axis not of unit stride"
    return None


def as_output(name: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Check an array that a result is to be written into.

    Raises:
        TypeError: no ndarray, or of another dtype.
        ValueError: another shape, read-only, misaligned, byte-swapped, a last axis that has no unit
            stride, or a zero stride on an axis longer than 1.
    """
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a NumPy array to write into, got {type(value).__name__}")
    if value.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
    if not value.flags.writeable:
        raise ValueError(f"{name} must be writeable, got a read-only array")
    reason = _why_copy(value)
    if reason is not None:
        raise ValueError(f"{name} must be written in place, got an array that is {reason}")
    for axis, (extent, stride) in enumerate(zip(value.shape, value.strides, strict=True)):
        if value.size and extent > 1 and stride == 0:
            raise ValueError(f"{name} must have no zero stride, got one on axis {axis}")
    return value.view(np.ndarray)


def check_overlap(outputs: dict[str, Array], inputs: dict[str, Array]) -> None:
    """Refuse outputs that share memory with an input or with one another.

    Raises:
        ValueError: naming the two.
    """
    names = list(outputs)
    for position, name in enumerate(names):
        others = {other: outputs[other] for other in names[position + 1 :]}
        for other, array in {**inputs, **others}.items():
            if np.shares_memory(outputs[name], array):
                raise ValueError(f"{name} must not overlap {other}, got arrays that share memory")


def new_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Allocate an output, after asking whether it fits.

    Raises:
        MemoryError: it does not.
    """
    check_memory(name, shape, dtype)
    return np.empty(shape, dtype)


def split_heads(array: Array, heads: int) -> Array:
    """View ``[B, T, heads * hd]`` as ``[B, T, heads, hd]``; 4-D arrays as they are."""
    if array.ndim == 4:
        return array
    B, T, width = array.shape
    return array.reshape(B, T, heads, width // heads)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Return an uninitialized C-contiguous array on whole memory pages of its own.

    Such arrays can be handed to a GPU without a copy: they start at a page's edge, and no other
    array lives on their pages.

    Args:
        shape: the shape, an int or a tuple of ints.
        dtype: any dtype without Python objects.

    Raises:
        MemoryError: more bytes than the process can get.
        TypeError: a dtype that holds Python objects.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype must hold no Python objects, got {kind}")
    extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape must not be negative, got {shape}")
    nbytes = check_memory("the array", extents, kind)
    page = _page_size()
    whole = max(1, -(-nbytes // page)) * page
    block = np.empty(whole + page, np.uint8)
    start = -block.ctypes.data % page
    array: Array = block[start : start + nbytes].view(kind).reshape(extents)
    return array


def _page_size() -> int:
    import mmap

    return mmap.PAGESIZE
