"""Options of an attention call: checked once, in the words of the caller."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forge import _forge
from forge._arrays import Array, as_bool, as_int, unmasked
from forge._memory import check_memory

Window = int | tuple[int, int] | None
Positions = npt.ArrayLike | None

_INT64_MAX = 2**63 - 1
_INT64_MIN = -(2**63)
KERNELS = ("fused", "materialized")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a problem, by the symbols of the field."""

    B: int
    Tq: int
    Tk: int
    H: int
    Hkv: int
    hd: int
    """Of q and k."""
    hv: int
    """Head dim of v and o."""


def head_counts(
    q: Array,
    k: Array,
    v: Array,
    num_heads: int | None,
    num_kv_heads: int | None,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> Sizes:
    """Return the sizes that q, k and v agree on; ``names`` is what to call them in errors.

    Raises:
        TypeError: a head count that is no int.
        ValueError: ranks, widths, lengths or head counts that contradict one another.
    """
    q_name, k_name, v_name = names
    if q.ndim not in (3, 4):
        raise ValueError(
            f"{q_name} must be [B, T, heads, hd] or [B, T, heads * hd], got shape {q.shape}"
        )
    for name, array in ((k_name, k), (v_name, v)):
        if array.ndim != q.ndim:
            raise ValueError(
                f"{name} must have the rank of {q_name}, got shapes {array.shape} and {q.shape}"
            )
        if array.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must have the batch of {q_name}, got {array.shape[0]} and {q.shape[0]}"
            )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{v_name} must have the shape of {k_name} but for its last axis, got {v.shape} and "
            f"{k.shape}"
        )
    H = None if num_heads is None else as_int("num_heads", num_heads)
    Hkv = None if num_kv_heads is None else as_int("num_kv_heads", num_kv_heads)
    given = ((q_name, q), (k_name, k), (v_name, v))
    sizes = (_heads_of_4d if q.ndim == 4 else _heads_of_3d)(given, H, Hkv)
    if sizes.H % sizes.Hkv:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {sizes.H} and {sizes.Hkv}"
        )
    return sizes


NamedArrays = tuple[tuple[str, Array], tuple[str, Array], tuple[str, Array]]


def _heads_of_4d(given: NamedArrays, H: int | None, Hkv: int | None) -> Sizes:
    (q_name, q), (k_name, k), (_, v) = given
    for option, count, (name, array) in zip(
        ("num_heads", "num_kv_heads"), (H, Hkv), given[:2], strict=True
    ):
        if count is not None and count != array.shape[2]:
            raise ValueError(
                f"{option} must agree with {name}'s shape, got {count} and {array.shape}"
            )
    for name, array in given:
        if array.shape[2] < 1:
            raise ValueError(f"{name} must have at least one head, got shape {array.shape}")
        if array.shape[3] < 1:
            raise ValueError(f"{name} must have a head dim of at least 1, got shape {array.shape}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{k_name} must have the head dim of {q_name}, got {k.shape[3]} and {q.shape[3]}"
        )
    B, Tq, H, hd = q.shape
    return Sizes(B, Tq, k.shape[1], H, k.shape[2], hd, v.shape[3])


def _heads_of_3d(given: NamedArrays, H: int | None, Hkv: int | None) -> Sizes:
    (q_name, q), (k_name, k), (_, v) = given
    if H is None:
        raise ValueError(
            "num_heads must be given for 3-D arrays, which are read as [B, T, heads * hd], got "
            f"None with {q_name} of shape {tuple(q.shape)}; one sequence [T, heads, hd] without a "
            f"batch is {q_name}[None]"
        )
    if H < 1:
        raise ValueError(f"num_heads must be at least 1, got {H}")
    if Hkv is None:
        Hkv = H
    if Hkv < 1:
        raise ValueError(f"num_kv_heads must be at least 1, got {Hkv} with num_heads {H}")
    for (name, array), heads in zip(given, (H, Hkv, Hkv), strict=True):
        if array.shape[2] < 1 or array.shape[2] % heads:
            raise ValueError(
                f"{name} must have a last axis that is a positive multiple of its {heads} heads, "
                f"got shape {array.shape}"
            )
    hd = q.shape[2] // H
    if k.shape[2] // Hkv != hd:
        raise ValueError(
            f"{k_name} must have the head dim of {q_name}, got {k.shape[2]} / {Hkv} heads and "
            f"{q.shape[2]} / {H} heads"
        )
    return Sizes(q.shape[0], q.shape[1], k.shape[1], H, Hkv, hd, v.shape[2] // Hkv)


def as_real(name: str, value: object, dtype: np.dtype[Any]) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real):
        raise ValueError(f"{name} must be finite, got {value}")
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(dtype.type(real))
    if not math.isfinite(rounded) or (real != 0 and rounded == 0):
        raise ValueError(f"{name} must be within {dtype}'s range, got {value}")
    return real


def as_window(window: object) -> tuple[int, int]:
    """Return (left, right), -1 for no limit."""
    if window is None:
        return -1, -1
    if isinstance(window, tuple):
        if len(window) != 2:
            raise ValueError(f"window must be an int or (left, right), got {window}")
        left, right = (as_int("window", end) for end in window)
        if left < -1 or right < -1:
            raise ValueError(f"window must have ends of at least -1, got {window}")
        return _no_limit_beyond_int64(left), _no_limit_beyond_int64(right)
    width = as_int("window", window, "an int or a tuple (left, right)")
    if width < 1:
        raise ValueError(f"window must be at least 1, got {width}")
    return _no_limit_beyond_int64(width - 1), -1


def _no_limit_beyond_int64(end: int) -> int:
    return end if end <= _INT64_MAX else -1


def as_int_array(
    name: str, value: object, expected: str = "an int or an int array, [B] or [B, Tq]"
) -> Array | int:
    """Return an int, or the integer array that NumPy makes of a list, a tensor, a Series, ...

    Raises:
        TypeError: floats, bools and whatever else is no integers; masked elements.
    """
    # Not by __index__: tensors of one element, and those of bools, have it.
    if isinstance(value, (int, np.integer)):
        return as_int(name, value, expected)
    try:
        array = np.asanyarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be {expected}, got {type(value).__name__}: {error}"
        ) from error
    array = unmasked(name, array)
    if array.dtype.kind in "iu":
        return array if array.ndim else int(array)
    if array.ndim or array.dtype.kind in "bfc":
        raise TypeError(f"{name} must be {expected}, got {array.dtype}")
    return as_int(name, value, expected)


def as_positions(name: str, value: object, shape: tuple[int, int], lo: int, hi: int) -> Array | int:
    """Return an int, or an int array: one for each sequence, or ``shape``, [B, Tq]."""
    position = as_int_array(name, value)
    if isinstance(position, int):
        ends = [position]
    elif position.shape not in (shape[:1], shape):
        raise ValueError(f"{name} must have shape {shape[:1]} or {shape}, got {position.shape}")
    else:
        ends = [int(position.min()), int(position.max())] if position.size else []
    for end in ends:
        if not lo <= end <= hi:
            raise ValueError(f"{name} must be within [{lo}, {hi}], got {end}")
    return position


def _ranges(
    heads: Sizes, query_offset: Positions, key_start: Positions, key_end: Positions
) -> Array | None:
    """Return int64 records of (query_offset, key_start, key_end), None where all are default.

    ``[B, 3]``, or ``[B, Tq, 3]`` where one of them is given for each query.
    """
    if query_offset is None and key_start is None and key_end is None:
        return None
    Tq, Tk = heads.Tq, heads.Tk
    rows = (heads.B, Tq)
    columns = [
        Tk - Tq
        if query_offset is None
        else as_positions("query_offset", query_offset, rows, _INT64_MIN, _INT64_MAX),
        0 if key_start is None else as_positions("key_start", key_start, rows, 0, Tk),
        Tk if key_end is None else as_positions("key_end", key_end, rows, 0, Tk),
    ]
    runs = any(isinstance(column, np.ndarray) and column.ndim == 2 for column in columns)
    shape = (*rows, 3) if runs else (heads.B, 3)
    check_memory({"the key ranges": shape}, np.dtype(np.int64))
    ranges = np.empty(shape, np.int64)
    for at, column in enumerate(columns):
        per_sequence = runs and isinstance(column, np.ndarray) and column.ndim == 1
        ranges[..., at] = column[:, None] if per_sequence else column  # type: ignore[index]
    return ranges


def kernel_name(kernel: object) -> str:
    """Return the kernel family asked for; None means fused."""
    if kernel is None:
        return "fused"
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be a string, got {type(kernel).__name__}")
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be 'fused' or 'materialized', got {kernel!r}")
    return kernel


def backend_name(backend: object) -> str:
    """Return the backend asked for by argument or FORGE_BACKEND; empty: the first that serves."""
    source = "backend"
    if backend is None:
        backend = os.environ.get("FORGE_BACKEND") or None
        source = "FORGE_BACKEND"
    if backend is None:
        return ""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    known = list(_forge.backends())
    if backend not in known:
        raise ValueError(f"{source} must be one of {known}, got {backend!r}")
    return backend


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAndScale:
    """The options that shape the scores, as the caller gave them."""

    causal: bool = False
    window: Window = None
    softcap: float | None = None
    scale: float | None = None
    query_offset: Positions = None
    key_start: Positions = None
    key_end: Positions = None


def _require_offset(given: MaskAndScale, heads: Sizes, window: tuple[int, int]) -> None:
    """Refuse to guess where the queries stand in keys that key_end cuts.

    By shapes and options alone, never by values: a call is refused at every length or at none.
    """
    if given.key_end is None or given.query_offset is not None or heads.Tq == heads.Tk:
        return
    if window != (-1, -1) or (given.causal and heads.Tq > 1):
        raise ValueError(
            "query_offset must be given with key_end where a window, or causal with more than one "
            f"query, counts positions and Tq != Tk, got None with Tq={heads.Tq} and Tk={heads.Tk}; "
            "write query_offset = key_end - Tq where the last query stands at the last filled row "
            f"of a cache, or Tk - Tq ({heads.Tk - heads.Tq}) where key_end cuts off padding"
        )


def compiled_options(
    given: MaskAndScale, heads: Sizes, dtype: np.dtype[Any], kernel: str, backend: str
) -> _forge.Options:
    """Check the options and put them into the record that the compiled module takes.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option out of its range.
    """
    causal = as_bool("causal", given.causal)
    window = as_window(given.window)
    softcap = 0.0 if given.softcap is None else as_real("softcap", given.softcap, dtype)
    if softcap < 0:
        raise ValueError(f"softcap must not be negative, got {given.softcap}")
    _require_offset(given, heads, window)
    return {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": (
            1 / math.sqrt(heads.hd) if given.scale is None else as_real("scale", given.scale, dtype)
        ),
        "ranges": _ranges(heads, given.query_offset, given.key_start, given.key_end),
        "kernel": kernel,
        "backend": backend,
        "cpu_target": os.environ.get("FORGE_CPU_TARGET", ""),
    }
