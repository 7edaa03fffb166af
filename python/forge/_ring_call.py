"""A call that ranks make together: the arguments of each, checked, and compared with the others'.

Of ring attention, and of the exchange of heads for rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge._arrays import Array, as_bool, as_input
from forge._dtypes import Element, check_dtypes
from forge._options import MaskAndScale, Sizes, Window, compiled_options, head_counts
from forge._ring_handshake import Transport, agree, digest
from forge._ring_plan import (
    Plan,
    Shard,
    as_positions,
    band_of,
    check_distinct,
    key_order,
    layout_name,
    layout_plan,
    layout_positions,
    layout_runs,
    shard_of,
)
from forge._scores import ScoreArrays, score_inputs

RING = "ring_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """The options of ring attention, as the caller gave them."""

    layout: str = "zigzag"
    causal: bool = False
    window: Window = None
    softcap: float | None = None
    scale: float | None = None
    sinks: object = None
    positions: object = None


@dataclass(frozen=True, slots=True)
class Given:
    """One rank's part of a call, checked."""

    q: object
    k: object
    v: object
    sizes: Sizes
    element: Element
    kv_element: Element
    options: RingOptions
    positions: Array | None


@dataclass(frozen=True, slots=True)
class Call:
    """A call that all ranks agree on."""

    given: Given
    plan: Plan
    positions: Array
    """Of the queries, ``[sequences, T]``."""
    order: Array | None
    """Of the rows by position; None: they lie so."""
    number: int
    """The same on all ranks, another for each call."""


def check_given(q: object, k: object, v: object, options: RingOptions) -> Given:
    """Check one rank's arguments.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values.
    """
    layout_name(options.layout)
    as_bool("causal", options.causal)
    taken = {name: as_input(name, value) for name, value in (("q", q), ("k", k), ("v", v))}
    arrays = {name: one.array for name, one in taken.items()}
    for name, array in arrays.items():
        if array.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, hd], got shape {array.shape}")
    check_dtypes(
        {name: one.element.name for name, one in taken.items()}, "fused", {"q": q, "k": k, "v": v}
    )
    sizes = head_counts(arrays["q"], arrays["k"], arrays["v"], None, None)
    if sizes.Tk != sizes.Tq:
        raise ValueError(f"k must have the rows of q, got {sizes.Tk} and {sizes.Tq}")
    element = taken["q"].element
    asked = MaskAndScale(
        causal=options.causal, window=options.window, softcap=options.softcap, scale=options.scale
    )
    compiled_options(asked, sizes, np.dtype(np.float32), "fused", "cpu")
    score_inputs(ScoreArrays(sinks=options.sinks), sizes, element)
    positions = options.positions
    if positions is not None:
        positions = as_positions(positions, sizes.B, sizes.Tq)
    return Given(q, k, v, sizes, element, taken["k"].element, options, positions)


def _same(call: str, given: Given, gradients: bool) -> dict[str, Any]:
    """What must be equal on all ranks."""
    sizes, options = given.sizes, given.options
    window = options.window
    sinks = None if options.sinks is None else as_input("sinks", options.sinks, any_strides=True)
    each_row = sinks is not None and sinks.array.ndim == 3
    return {
        "call": call,
        "layout": options.layout,
        "causal": bool(options.causal),
        "window": [int(end) for end in window]
        if isinstance(window, tuple)
        else window and int(window),
        "softcap": None if options.softcap is None else float(options.softcap),
        "scale": None if options.scale is None else float(options.scale),
        "sinks": "[B, H, T]" if each_row else digest(None if sinks is None else sinks.array),
        "positions": "None" if given.positions is None else "given",
        "dtypes of q and k": [given.element.name, given.kv_element.name],
        "B": sizes.B,
        "H": sizes.H,
        "Hkv": sizes.Hkv,
        "hd": sizes.hd,
        "hv": sizes.hv,
        "a gradient": "wanted" if gradients else "not wanted",
    }


def begin(transport: Transport, build: Any, *, gradients: bool = False, call: str = RING) -> Call:
    """Check a call on all ranks; ``build`` returns this rank's part, or raises.

    Raises:
        ValueError: ranks that differ, or rows that the layout does not give them.
        TransportError: a rank does not answer.
    """

    def checked() -> tuple[Given, dict[str, Any], list[int]]:
        given = build()
        shard = None if given.positions is None else shard_of(given.positions)
        runs = 0 if shard is None else sum(map(len, shard.runs))
        number = int.from_bytes(os.urandom(7), "little")
        return given, _same(call, given, gradients), [given.sizes.Tq, runs, number]

    given, of_ranks = agree(transport, checked)
    rows, number = [each[0] for each in of_ranks], of_ranks[0][2]
    band = band_of(given.options.causal, given.options.window)
    if given.positions is not None:
        shards = _exchanged(transport, given, max(each[1] for each in of_ranks))
        check_distinct(shards)
        order = key_order(given.positions)
        return Call(given, Plan(shards, band), given.positions, order, number)
    layout, total, size = given.options.layout, sum(rows), transport.size
    for rank, got in enumerate(rows):
        runs = layout_runs(layout, total, size, rank)
        expected = int((runs[:, 1] - runs[:, 0]).sum())
        if got != expected:
            raise ValueError(
                f"q must have {expected} of the {total} rows on rank {rank} for layout "
                f"{layout!r}, got {got}; ring_positions says which, or pass positions"
            )
    positions = layout_positions(layout, total, size, transport.rank)[None]
    return Call(given, layout_plan(layout, total, size, band), positions, None, number)


def _exchanged(transport: Transport, given: Given, longest: int) -> tuple[Shard, ...]:
    """Every rank's positions, as runs."""
    assert given.positions is not None
    record = np.full((longest, 3), -1, np.int64)
    at = 0
    for sequence, runs in enumerate(shard_of(given.positions).runs):
        record[at : at + len(runs)] = [(sequence, *run) for run in runs] or np.empty((0, 3))
        at += len(runs)
    of_ranks = transport.gather(record.view(np.uint8).ravel()).view(np.int64)
    shards = []
    for each in of_ranks.reshape(transport.size, longest, 3):
        shards.append(Shard([each[each[:, 0] == b, 1:] for b in range(given.sizes.B)]))
    return tuple(shards)


def agree_on_backward(transport: Transport, build: Any, number: int, call: str = RING) -> Any:
    """Check that all ranks are in the backward of one call; returns what ``build`` does."""

    def checked() -> tuple[Any, dict[str, Any], list[int]]:
        return build(), {"call": f"the backward of {call}", "of call": number}, []

    return agree(transport, checked)[0]
