"""Decode over a cache whose rows ranks hold in parts: each attends to its own, a gather merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forge._arrays import Array, as_bool, as_input, new_array
from forge._attention import attention_forward
from forge._dtypes import Element, as_stored, check_dtypes
from forge._options import MaskAndScale, Sizes, Window, compiled_options, head_counts
from forge._ring_handshake import Transport, agree, digest
from forge._ring_merge import MergedRows
from forge._ring_plan import as_positions, band_of, key_order, keys_at, visible_runs
from forge._ring_travel import VERDICT
from forge._scores import ScoreArrays, score_inputs

CALL = "decode_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """The options of decode, as the caller gave them."""

    causal: bool = False
    window: Window = None
    softcap: float | None = None
    scale: float | None = None
    sinks: object = None
    positions: object = None
    key_positions: object = None


@dataclass(frozen=True, slots=True)
class _Given:
    q: object
    k: object
    v: object
    sizes: Sizes
    element: Element
    options: DecodeOptions
    positions: Array | None
    key_positions: Array | None


def check_decode(q: object, k: object, v: object, options: DecodeOptions) -> _Given:
    """Check one rank's arguments.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values.
    """
    as_bool("causal", options.causal)
    taken = {name: as_input(name, value) for name, value in (("q", q), ("k", k), ("v", v))}
    for name, one in taken.items():
        if one.array.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, hd], got shape {one.array.shape}")
    names = {name: one.element.name for name, one in taken.items()}
    check_dtypes(names, "fused", {"q": q, "k": k, "v": v})
    sizes = head_counts(taken["q"].array, taken["k"].array, taken["v"].array, None, None)
    asked = MaskAndScale(
        causal=options.causal, window=options.window, softcap=options.softcap, scale=options.scale
    )
    compiled_options(asked, sizes, np.dtype(np.float32), "fused", "cpu")
    score_inputs(ScoreArrays(sinks=options.sinks), sizes, taken["q"].element)
    queries = keys = None
    if options.positions is not None:
        queries = as_positions(options.positions, sizes.B, sizes.Tq)
    if options.key_positions is not None:
        keys = as_positions(options.key_positions, sizes.B, sizes.Tk, "key_positions")
    if keys is not None and queries is None:
        raise ValueError("positions must be given with key_positions, got None")
    return _Given(q, k, v, sizes, taken["q"].element, options, queries, keys)


def decode(transport: Transport, build: Any) -> Array:
    """Return o of all queries, on every rank; ``build`` returns what check_decode does, or raises.

    Raises:
        ValueError: ranks that differ.
        RuntimeError: a rank could not compute its part.
        TransportError: a rank does not answer.
    """

    def checked() -> tuple[_Given, dict[str, Any], list[int]]:
        given = build()
        sizes, options = given.sizes, given.options
        sinks = options.sinks
        if sinks is not None:
            sinks = as_input("sinks", sinks, any_strides=True).array
        window = options.window
        same = {
            "call": CALL,
            "q": digest(as_input("q", given.q).array),
            "causal": bool(options.causal),
            "window": [int(end) for end in window]
            if isinstance(window, tuple)
            else window and int(window),
            "softcap": None if options.softcap is None else float(options.softcap),
            "scale": None if options.scale is None else float(options.scale),
            "sinks": digest(sinks),
            "positions": digest(given.positions),
            "key_positions": "None" if given.key_positions is None else "given",
            "Hkv": sizes.Hkv,
            "hv": sizes.hv,
        }
        return given, same, [sizes.Tk]

    given, of_ranks = agree(transport, checked)
    rows = [each[0] for each in of_ranks]
    if given.positions is None and sum(rows) < given.sizes.Tq:
        raise ValueError(
            f"positions must be given where there are fewer keys, {sum(rows)}, than queries, "
            f"{given.sizes.Tq}"
        )
    sizes, failure = given.sizes, None
    shape, sums = (sizes.B, sizes.Tq, sizes.H, sizes.hv), (sizes.B, sizes.H, sizes.Tq)
    o_bytes, sum_bytes = 4 * int(np.prod(shape)), 4 * int(np.prod(sums))
    record = np.zeros(o_bytes + 2 * sum_bytes + VERDICT, np.uint8)
    cuts = (0, o_bytes, o_bytes + sum_bytes, o_bytes + 2 * sum_bytes)

    def parts_of(of: Array) -> list[Array]:
        shapes = (shape, sums, sums)
        return [
            of[first:end].view(np.float32).reshape(extents)
            for first, end, extents in zip(cuts, cuts[1:], shapes, strict=False)
        ]

    try:
        out, row_max, row_sum = parts_of(record)
        _attend(transport.rank, given, rows, out, row_max, row_sum)
    except BaseException as error:  # raised once the others know
        failure = error
        record[-VERDICT:].view(np.int64)[0] = 1
    gathered = transport.gather(record)
    if failure is not None:
        raise failure
    merged = MergedRows()
    for rank, of in enumerate(gathered):
        if of[-VERDICT:].view(np.int64)[0]:
            raise RuntimeError(f"rank {rank} could not compute its part")
        merged.add(*parts_of(of))
    merged.finish()
    return given.element.show(as_stored(merged.out, given.element))


def _attend(
    rank: int, given: _Given, rows: list[int], out: Array, row_max: Array, row_sum: Array
) -> None:
    """Attention to this rank's part of the cache."""
    options, sizes = given.options, given.sizes
    k, v, positions, keys = given.k, given.v, given.positions, given.key_positions
    if positions is None:
        total = sum(rows)
        positions = np.broadcast_to(np.arange(total - sizes.Tq, total), (sizes.B, sizes.Tq))
    if keys is None:
        first = sum(rows[:rank])
        keys = np.broadcast_to(np.arange(first, first + sizes.Tk), (sizes.B, sizes.Tk))
    else:
        order = key_order(keys)
        keys = keys_at(keys, order)
        if order is not None:
            k, v = (
                x.element.show(np.take_along_axis(x.array, order[:, :, None, None], 1))
                for x in (as_input("k", k), as_input("v", v))
            )
    runs = visible_runs(positions, keys, band_of(options.causal, options.window))
    found: dict[str, Any] = {} if runs is None else {"key_start": runs[0], "key_end": runs[1]}
    result = new_array(out.shape, np.float32)
    _, part = attention_forward(
        given.q,
        k,
        v,
        softcap=options.softcap,
        scale=options.scale,
        sinks=options.sinks if rank == 0 else None,
        backend="cpu",
        out=result,
        **found,
    )
    out[...], row_max[...], row_sum[...] = result, part.row_max, part.row_sum
