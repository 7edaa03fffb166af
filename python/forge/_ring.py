"""Ring attention: a sequence split over ranks, whose keys and values go around.

NumPy arrays in, NumPy arrays out; what carries bytes between ranks is a Transport.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge._arrays import Array, as_bool, as_input, new_array
from forge._attention import attention_backward, attention_forward
from forge._calls import restored
from forge._dtypes import FLOAT32, Element, as_stored, check_dtypes
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
    visible_runs,
)
from forge._ring_travel import Blocks, Travel
from forge._saved import Kept
from forge._scores import ScoreArrays, score_inputs


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


@dataclass(frozen=True, slots=True)
class RingSaved:
    """What the forward keeps for the backward: of the whole, this rank's rows."""

    call: Call
    out: Array
    row_max: Array
    row_sum: Array


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


def _same(given: Given, gradients: bool) -> dict[str, Any]:
    """What must be equal on all ranks."""
    sizes, options = given.sizes, given.options
    sinks = None if options.sinks is None else as_input("sinks", options.sinks, any_strides=True)
    each_row = sinks is not None and sinks.array.ndim == 3
    return {
        "call": "ring_attention",
        "layout": options.layout,
        "causal": options.causal,
        "window": options.window,
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


def begin(transport: Transport, build: Any, *, gradients: bool = False) -> Call:
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
        return given, _same(given, gradients), [given.sizes.Tq, runs, number]

    given, of_ranks = agree(transport, checked)
    rows, number = [each[0] for each in of_ranks], of_ranks[0][2]
    band = band_of(given.options.causal, given.options.window)
    if given.positions is not None:
        shards = _exchanged(transport, given, max(each[1] for each in of_ranks))
        check_distinct(shards)
        order = key_order(given.positions)
        in_order = (order == np.arange(order.shape[1])).all()
        return Call(given, Plan(shards, band), given.positions, None if in_order else order, number)
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


class _Rows:
    """Attention over the blocks so far: sums of each row, relative to its largest score so far."""

    def __init__(self) -> None:
        self.parts = 0
        self.out: Array
        self.row_max: Array
        self.row_sum: Array

    def add(self, out: Array, row_max: Array, row_sum: Array) -> None:
        self.parts += 1
        if self.parts == 1:
            self.out, self.row_max, self.row_sum = out, row_max, row_sum
            return
        with np.errstate(all="ignore"):
            if self.parts == 2:
                self.out *= _of_heads(self.row_sum)
            top = np.maximum(self.row_max, row_max)
            base = np.where(np.isneginf(top), np.float32(0), top)
            before, now = np.exp(self.row_max - base), np.exp(row_max - base) * row_sum
            self.out *= _of_heads(before)
            out *= _of_heads(now)
            self.out += out
            self.row_sum = self.row_sum * before + now
        self.row_max = top

    def finish(self) -> None:
        if self.parts > 1:
            with np.errstate(all="ignore"):
                self.out /= _of_heads(np.where(self.row_sum == 0, np.float32(1), self.row_sum))


def _of_heads(rows: Array) -> Array:
    """[B, H, T] beside [B, T, H, hv]."""
    beside: Array = rows.swapaxes(1, 2)[..., None]
    return beside


def _blocks(call: Call, element: Element) -> Blocks:
    sizes = call.given.sizes
    rows = tuple(shard.rows for shard in call.plan.shards)
    return Blocks(sizes.B, sizes.Hkv, sizes.hd, sizes.hv, rows, element)


def _packed(call: Call, blocks: Blocks, rank: int) -> Array:
    """The block that this rank owns, by position, without padding."""
    buffer = new_array((blocks.nbytes(rank),), np.uint8)
    pairs = (("k", call.given.k), ("v", call.given.v))
    for (name, value), view in zip(pairs, blocks.views(buffer, rank), strict=True):
        array = as_input(name, value).array
        if call.order is not None:
            array = np.take_along_axis(array, call.order[:, :, None, None], 1)
        view[...] = array[:, : view.shape[1]]
    return buffer


def _unpacked(call: Call, blocks: Blocks, buffer: Array, rank: int) -> list[Array]:
    """The gradients of k and v, row by row as those lie."""
    found, element = [], call.given.kv_element
    for view in blocks.views(buffer, rank):
        sums = np.zeros((view.shape[0], call.given.sizes.Tk, *view.shape[2:]), np.float32)
        sums[:, : view.shape[1]] = view
        if call.order is not None:
            inverse = np.argsort(call.order, 1, kind="stable")
            sums = np.take_along_axis(sums, inverse[:, :, None, None], 1)
        found.append(element.show(as_stored(sums, element)))
    return found


def _options(call: Call, owner: int) -> dict[str, Any]:
    """Options of attention between this rank's queries and one block."""
    options, sizes = call.given.options, call.given.sizes
    found: dict[str, Any] = {"softcap": options.softcap, "scale": options.scale}
    runs = visible_runs(call.positions, call.plan.shards[owner].keys(), call.plan.band)
    if runs is not None:
        shape = sizes.B, sizes.Tq
        found["key_start"], found["key_end"] = (np.broadcast_to(x, shape) for x in runs)
    return found


def ring_forward(transport: Transport, call: Call) -> tuple[Array, RingSaved]:
    """Return this rank's rows of o, and what the backward needs."""
    given, rank = call.given, transport.rank
    blocks = _blocks(call, given.kv_element)
    rows = _Rows()
    sizes = given.sizes
    shape = sizes.B, sizes.Tq, sizes.H, sizes.hv

    def visit(owner: int, block: Array, _: Array | None) -> None:
        k, v = map(given.kv_element.show, blocks.views(block, owner))
        out = new_array(shape, np.float32)
        sinks = given.options.sinks if owner == rank else None
        _, part = attention_forward(
            given.q, k, v, sinks=sinks, backend="cpu", out=out, **_options(call, owner)
        )
        rows.add(out, part.row_max, part.row_sum)

    Travel(transport, call.plan, blocks).run(_packed(call, blocks, rank), visit)
    rows.finish()
    out = rows.out
    if given.element.is_half:
        out = given.element.show(as_stored(out, given.element))
    return out, RingSaved(call, rows.out, rows.row_max, rows.row_sum)


def ring_backward(
    transport: Transport, saved: RingSaved, dout: object, dsinks: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv of this rank's rows; adds to ``dsinks``, float32, where it is given."""
    call, rank = saved.call, transport.rank
    given = call.given
    blocks, sums = _blocks(call, given.kv_element), _blocks(call, FLOAT32)
    sizes = given.sizes
    dq = np.zeros((sizes.B, sizes.Tq, sizes.H, sizes.hd), np.float32)

    def visit(owner: int, block: Array, made: Array | None) -> None:
        assert made is not None
        k, v = map(given.kv_element.show, blocks.views(block, owner))
        dk, dv = sums.views(made, owner)
        sinks = given.options.sinks if owner == rank else None
        part = restored(
            {"q": given.q, "k": k, "v": v},
            Kept(saved.out, saved.row_max, saved.row_sum),
            MaskAndScale(**_options(call, owner)),
            heads=(None, None),
            kernel="fused",
            backend="cpu",
            shaping=ScoreArrays(sinks=sinks),
        )
        wanted = None if sinks is None else dsinks
        attention_backward(dout, part, dq=dq, dk=dk, dv=dv, dsinks=wanted, accumulate=True)

    home = Travel(transport, call.plan, blocks).run(_packed(call, blocks, rank), visit, sums)
    assert home is not None
    dk, dv = _unpacked(call, sums, home, rank)
    return given.element.show(as_stored(dq, given.element)), dk, dv


def agree_on_backward(transport: Transport, build: Any, number: int) -> Any:
    """Check that all ranks are in the backward of one call; returns what ``build`` does."""

    def checked() -> tuple[Any, dict[str, Any], list[int]]:
        return build(), {"call": "the backward of ring_attention", "of call": number}, []

    return agree(transport, checked)[0]
