"""Results over parts of the keys put together, and sequences laid end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from forge._arrays import Array, as_bool, as_input
from forge._dtypes import as_float32, as_stored
from forge._options import Window, as_int_array, as_window

if TYPE_CHECKING:
    from collections.abc import Iterable


def merge(parts: Iterable[tuple[object, object]]) -> tuple[Array, Array]:
    """Put attention over disjoint keys together: the result over all of them.

    ``lse = log(sum(exp(lse_n)))`` and ``o = sum(exp(lse_n - lse) * o_n)`` (FlashAttention-2, Dao
    2023, section 3.1.1), one part after the other, in float32 inside. Parts that saw no key of a
    row add nothing to it; rows that none saw stay 0 with an lse of -inf. Sinks belong to one part
    alone.

    Args:
        parts: ``(o, lse)`` of each, ``[B, Tq, H, hv]`` or ``[B, Tq, H * hv]`` and ``[B, H, Tq]``,
            as :func:`attention_forward` gives them. float32 parts round the result least.

    Returns:
        ``(o, lse)``, ``o`` in the dtype and shape of the parts.

    Raises:
        TypeError: no pairs of arrays, or of differing dtypes.
        ValueError: no parts, or differing shapes.
    """
    given = list(parts)
    if not given:
        raise ValueError("parts must hold at least one (o, lse), got none")
    outs, sums = [], []
    for at, part in enumerate(given):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise TypeError(f"parts[{at}] must be (o, lse), got {type(part).__name__}")
        outs.append(as_input(f"parts[{at}][0]", part[0]))
        sums.append(as_input(f"parts[{at}][1]", part[1]))
    element, first = outs[0].element, outs[0].array
    for at, (out, taken) in enumerate(zip(outs, sums, strict=True)):
        if out.element.name != element.name:
            raise TypeError(
                f"parts[{at}][0] must be {element.name} as the first is, got {out.element.name}"
            )
        if taken.element.name != element.sums.name:
            raise TypeError(f"parts[{at}][1] must be {element.sums.name}, got {taken.element.name}")
        if out.array.shape != first.shape:
            raise ValueError(
                f"parts[{at}][0] must have shape {first.shape} as the first has, got "
                f"{out.array.shape}"
            )
        _require_rows(at, taken.array, first, sums[0].array)
    lse = np.stack([taken.array for taken in sums])
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = lse.max(0)
        base = np.where(np.isinf(top), top.dtype.type(0), top)
        weights = np.exp(lse - base)
        total = weights.sum(0)
        merged = base + np.log(total)
        weights = np.where(total > 0, weights / total, weights)
        B, H, Tq = top.shape
        o = np.zeros((B, Tq, H, first.size // max(1, B * Tq * H)), top.dtype)
        for out, weight in zip(outs, weights, strict=True):
            part = as_float32(out.array, out.element).reshape(o.shape)
            factor = weight.swapaxes(1, 2)[..., None]
            o += np.where(factor == 0, top.dtype.type(0), factor * part)
    result = as_stored(o, element).reshape(first.shape)
    return element.show(result), merged


def _require_rows(at: int, lse: Array, o: Array, first: Array) -> None:
    fits = lse.ndim == 3 and (lse.shape[0], lse.shape[2]) == o.shape[:2] and lse.shape[1] > 0
    heads = o.shape[2] == lse.shape[1] if o.ndim == 4 else o.shape[-1] % max(1, lse.shape[1]) == 0
    if o.ndim not in (3, 4) or not fits or not heads or lse.shape != first.shape:
        raise ValueError(
            f"parts[{at}] must be o, [B, Tq, H, hv] or [B, Tq, H * hv], and lse, [B, H, Tq], got "
            f"shapes {o.shape} and {lse.shape}"
        )


def packed(
    cu_q: object,
    cu_k: object = None,
    *,
    causal: bool = False,
    window: Window = None,
) -> dict[str, Any]:
    """Options under which sequences laid end to end do not see one another.

    ``attention(q, k, v, **packed(cu_q, cu_k, causal=True))`` on one row of sequences,
    ``[1, Tq, H, hd]`` and ``[1, Tk, Hkv, hd]``, gives what a call for each of them gives; the last
    query of a sequence stands at its last key.

    Args:
        cu_q: where the sequences' queries begin, and the last end: ints ``[n + 1]``, from 0 to Tq,
            none smaller than the one before (``cu_seqlens`` elsewhere).
        cu_k: likewise for keys; ``cu_q`` by default.
        causal: as in :func:`attention`; here, since it is among the options returned.
        window: likewise.

    Returns:
        ``causal``, ``window``, and ``query_offset``, ``key_start``, ``key_end`` as ``[1, Tq]``.

    Raises:
        TypeError: no ints.
        ValueError: lists that do not begin at 0, or descend, or differ in length.
    """
    causal = as_bool("causal", causal)
    as_window(window)
    of_queries = _boundaries("cu_q", cu_q)
    of_keys = of_queries if cu_k is None else _boundaries("cu_k", cu_k)
    if len(of_keys) != len(of_queries):
        raise ValueError(
            f"cu_k must have {len(of_queries)} entries as cu_q has, got {len(of_keys)}"
        )
    lengths = np.diff(of_queries)

    def each(values: Array) -> Array:
        return np.repeat(values, lengths)[None]

    return {
        "causal": causal,
        "window": window,
        "query_offset": each(of_keys[1:] - of_queries[1:]),
        "key_start": each(of_keys[:-1]),
        "key_end": each(of_keys[1:]),
    }


def _boundaries(name: str, value: object) -> Array:
    array = as_int_array(name, value, "an int array [n + 1]")
    if isinstance(array, int) or array.ndim != 1 or not array.size:
        shape = () if isinstance(array, int) else array.shape
        raise ValueError(f"{name} must be ints [n + 1], got shape {shape}")
    boundaries: Array = array.astype(np.int64)
    if boundaries[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {boundaries[0]}")
    if (np.diff(boundaries) < 0).any():
        raise ValueError(f"{name} must not descend, got {boundaries.tolist()}")
    return boundaries
