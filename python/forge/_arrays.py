"""Arrays at the door: what is taken in place, what is copied, what is refused."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge import _forge
from forge._dtypes import (
    BFLOAT16_BITS,
    BOOL,
    BFloat16Bits,
    Element,
    bfloat16_of_numpy,
    element_of,
    is_of,
    read_as_stored,
    wrong_dtype,
)
from forge._memory import check_memory

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]

IN_PLACE = "in place"

# Whether two arrays of any strides meet is NP-hard; steps of a search that takes at most this long:
# below 0.1 s.
_OVERLAP_WORK = 1_000_000

# DLDeviceType of dlpack.h: the CPU's own memory, and that which it pins for a GPU.
_HOST_DEVICES = (1, 3, 11)
_DLPACK_DEVICES = {2: "CUDA", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA", 14: "oneAPI"}


class Input(NamedTuple):
    """An input: what the kernels read, the caller's own array, and how one became the other."""

    array: Array
    """Of the element type's ``stored`` dtype."""
    given: Array
    how: str
    """``"in place"`` or ``"copied: <reason>"``."""
    element: Element


def as_input(name: str, value: object, *, any_strides: bool = False) -> Input:
    """Return ``value`` as an array that the kernels can read.

    Nothing is cast: the dtype must be one that attention is computed in. ``any_strides``: the last
    axis need not have unit stride.

    Raises:
        TypeError: ``value`` is no array, is not in the CPU's memory, has masked elements, or has
            another dtype.
        ImportError: ``value`` is bfloat16 of another library, and ml_dtypes is not there.
    """
    given, element = _as_elements(name, value)
    return _taken(name, read_as_stored(given, element), element, any_strides)


def as_mask(name: str, value: object) -> Input:
    """Return a boolean array of any strides as the kernels can read it.

    Raises:
        TypeError: ``value`` is no array, is not in the CPU's memory, or is no array of bools.
    """
    array = _as_ndarray(name, value)
    if array.dtype != np.bool_:
        way_out = f"; that is bias={name}" if element_of(array.dtype) is not None else ""
        raise TypeError(f"{name} must be bool, got {array.dtype}{way_out}")
    return _taken(name, array, BOOL, any_strides=True)


def _taken(name: str, array: Array, element: Element, any_strides: bool) -> Input:
    reason = _why_copy(array, any_strides)
    if reason is None:
        return Input(array, array, IN_PLACE, element)
    check_memory({f"a copy of {name}": array.shape}, element.stored)
    copy = np.array(array, dtype=element.stored, order="C")
    return Input(copy, array, f"copied: {reason}", element)


def _as_elements(name: str, value: object) -> tuple[Array, Element]:
    if type(value) is BFloat16Bits:
        return plain(value), BFLOAT16_BITS
    array = _as_ndarray(name, value)
    if type(array) is BFloat16Bits:  # another library's
        return plain(array), bfloat16_of_numpy(name)
    element = element_of(array.dtype)
    if element is None:
        raise TypeError(wrong_dtype(name, array.dtype, value))
    return array, element


def _as_ndarray(name: str, value: object) -> Array:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        return unmasked(name, value)
    _refuse_to_lose_a_gradient(name, value)
    if isinstance(value, (np.generic, type)):
        raise TypeError(f"{name} must be an array, got {_kind(value)}")
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _exported(name, value)
    if hasattr(value, "__array__"):
        return unmasked(name, _read(name, value, np.asanyarray))
    raise TypeError(
        f"{name} must be a NumPy array or a DLPack exporter on the CPU, got {_kind(value)}"
    )


def _kind(value: object) -> str:
    return type(value).__name__


def _refuse_to_lose_a_gradient(name: str, value: object) -> None:
    if is_of(value, "torch") and getattr(value, "requires_grad", False):
        raise TypeError(
            f"{name} must be without a gradient here, got a tensor that requires one; use "
            f"forge.torch.attention, which is differentiable, or pass {name}.detach() where no "
            "gradient is wanted"
        )
    if is_of(value, "jax") and _kind(value).endswith("Tracer"):
        raise TypeError(
            f"{name} must have values here, got a {_kind(value)}; use forge.jax.attention inside "
            "jax.jit, jax.grad, jax.vmap and the like"
        )


def _exported(name: str, value: Any) -> Array:
    """Return the memory of a DLPack exporter as an array, without a copy."""
    try:
        device, number = (operator.index(part) for part in value.__dlpack_device__())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must say its DLPack device as two ints, got {_kind(value)}: {error}"
        ) from error
    if device in _HOST_DEVICES:
        return _read(name, value, _bfloat16_bits if _is_bfloat16(value) else np.from_dlpack)
    if _has_buffer(value):  # MLX on a Mac: the GPU's memory is the CPU's, and it says so this way
        return _read(name, value, np.asarray)
    where = _DLPACK_DEVICES.get(device, f"DLPack device type {device}")
    raise TypeError(
        f"{name} must be in the CPU's memory, got {_kind(value)} on {where}, number {number}; "
        "copy it to the CPU first"
    )


def _is_bfloat16(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).rpartition(".")[2] == "bfloat16"


def _bfloat16_bits(value: Any) -> Array:
    return _forge.bfloat16_bits(value.__dlpack__()).view(BFloat16Bits)


def _has_buffer(value: Any) -> bool:
    try:
        memoryview(value).release()
    except (BufferError, TypeError):
        return False
    except RuntimeError:  # it has one, but not now: reading it says why
        return True
    return True


def _read(name: str, value: object, reader: Callable[[Any], Any]) -> Array:
    try:
        array: Array = reader(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        dtype = str(getattr(value, "dtype", "float32"))
        if dtype.rpartition(".")[2] not in ("float32", "float64"):
            raise TypeError(wrong_dtype(name, dtype, value)) from error
        raise TypeError(
            f"{name} must be readable as a NumPy array, got {_kind(value)}: {error}"
        ) from error
    return array


def unmasked(name: str, array: Array) -> Array:
    """Return the plain ndarray behind a subclass; masked elements are a TypeError."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise TypeError(f"{name} must not have masked elements, got a masked array with some")
    return plain(array)


def plain(array: Array) -> Array:
    """Return the array itself behind a subclass, whatever that has overridden."""
    view: Array = np.ndarray.view(array, np.ndarray)
    return view


def _why_copy(array: Array, any_strides: bool = False) -> str | None:
    if not array.dtype.isnative:
        return "byte-swapped"
    if not array.flags.aligned:
        return "misaligned"
    if any_strides:
        return None
    if array.size and array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return "last axis not of unit stride"
    return None


def as_output(name: str, value: object, shape: tuple[int, ...], element: Element) -> Array:
    """Check an array that a result is to be written into; return it as the kernels take it.

    Results of half precision may go to float32 arrays.

    Raises:
        TypeError: no ndarray, or of another dtype.
        ValueError: another shape, read-only, misaligned, byte-swapped, a last axis that has no unit
            stride, or elements that overlap (a zero stride on an axis longer than 1, say).
    """
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a NumPy array to write into, got {type(value).__name__}")
    value = plain(value)
    own = element_of(value.dtype)
    if own is None or own.name not in (element.name, element.sums.name):
        other = f" or {element.sums.name}" if element.is_half else ""
        raise TypeError(f"{name} must be {element.name}{other}, got {value.dtype}")
    value = read_as_stored(value, own)
    if value.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
    if not value.flags.writeable:
        raise ValueError(f"{name} must be writeable, got a read-only array")
    reason = _why_copy(value)
    if reason is not None:
        raise ValueError(f"{name} must be written in place, got an array that is {reason}")
    _refuse_self_overlap(name, value)
    return value


def _refuse_self_overlap(name: str, array: Array) -> None:
    """Refuse arrays where two indices may mean one address: each stride must step over the smaller.

    That is sufficient, not necessary: an exotic interleaving without overlap is refused as well.
    """
    if not array.size:
        return
    span = array.itemsize
    axes = zip(array.shape, array.strides, range(array.ndim), strict=True)
    for extent, stride, axis in sorted(axes, key=lambda item: abs(item[1])):
        if extent < 2:
            continue
        if stride == 0:
            raise ValueError(f"{name} must have no zero stride, got one on axis {axis}")
        if abs(stride) < span:
            raise ValueError(f"{name} must not overlap itself, got strides {array.strides}")
        span += (extent - 1) * abs(stride)


def check_overlap(outputs: dict[str, Array], inputs: dict[str, Array]) -> None:
    """Refuse outputs that share memory with an input or with one another.

    Raises:
        ValueError: naming the two.
    """
    names = list(outputs)
    for position, name in enumerate(names):
        others = {other: outputs[other] for other in names[position + 1 :]}
        for other, array in {**inputs, **others}.items():
            try:
                shared = np.shares_memory(
                    outputs[name],
                    array,
                    max_work=_OVERLAP_WORK,  # type: ignore[arg-type]  # any int, as documented
                )
            except RuntimeError:  # TooHardError, which has moved between NumPy 1 and 2
                raise ValueError(
                    f"{name} must not overlap {other}, got strides too intricate to tell"
                ) from None
            if shared:
                raise ValueError(f"{name} must not overlap {other}, got arrays that share memory")


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
        TypeError: a shape that is no int or tuple of ints, or a dtype that holds Python objects.
        ValueError: a negative extent.
    """
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be a NumPy dtype, got {dtype!r}") from error
    if kind.hasobject or kind.subdtype is not None or kind.itemsize == 0:
        raise TypeError(f"dtype must have a fixed size and hold no Python objects, got {kind}")
    given = shape if isinstance(shape, (tuple, list)) else (shape,)
    extents = tuple(as_int("shape", extent) for extent in given)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape must not be negative, got {shape}")
    check_memory({"the array": extents}, kind)
    nbytes = math.prod(extents) * kind.itemsize
    page = _page_size()
    whole = max(1, -(-nbytes // page)) * page
    block = np.empty(whole + page, np.uint8)
    start = -block.ctypes.data % page
    array: Array = block[start : start + nbytes].view(kind).reshape(extents)
    return array


# A GPU works on arrays of whole pages without a copy; the CPU has no use for them.
new_array = np.empty if _forge.build_config()["metal"] == "off" else empty


def as_bool(name: str, value: object) -> bool:
    """Return a bool; only Python's and NumPy's scalars are any."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def as_int(name: str, value: object, expected: str = "an int") -> int:
    """Return an int; bools and floats are TypeError."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}") from error


def _page_size() -> int:
    import mmap

    return mmap.PAGESIZE
