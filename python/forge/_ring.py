"""Ring attention: a sequence split over ranks, whose keys and values go around.

NumPy arrays in, NumPy arrays out; what carries bytes between ranks is a Transport.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forge._arrays import Array, as_input, new_array
from forge._attention import attention_backward, attention_forward
from forge._calls import restored
from forge._dtypes import FLOAT32, Element, as_stored
from forge._options import MaskAndScale
from forge._ring_call import Call
from forge._ring_handshake import Transport
from forge._ring_merge import MergedRows
from forge._ring_plan import visible_runs
from forge._ring_travel import Blocks, Travel
from forge._saved import Kept
from forge._scores import ScoreArrays


@dataclass(frozen=True, slots=True)
class RingSaved:
    """What the forward keeps for the backward: of the whole, this rank's rows."""

    call: Call
    out: Array
    row_max: Array
    row_sum: Array


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
    rows = MergedRows()
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
