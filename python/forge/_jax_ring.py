"""Ring attention inside jax.shard_map: JAX moves the blocks, the host computes each part."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from forge._arrays import Array
from forge._attention import attention_backward, attention_forward
from forge._calls import restored
from forge._dtypes import check_dtypes
from forge._jax_axes import OnHost, check_array, varying, varying_axes
from forge._options import MaskAndScale, Window, compiled_options, head_counts
from forge._ring_plan import Plan, band_of, layout_name, layout_plan, layout_positions, visible_runs
from forge._saved import Kept
from forge._scores import ScoreArrays, check_extents, check_precision


class Ring(NamedTuple):
    """What is known when JAX traces a call: hashable."""

    axis_name: Any
    size: int
    total: int
    layout: str
    causal: bool
    window: Any
    softcap: float | None
    scale: float | None

    def plan(self) -> Plan:
        band = band_of(self.causal, self.window)
        return layout_plan(self.layout, self.total, self.size, band)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: Any,
    layout: str = "zigzag",
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention over a sequence split along an axis of a mesh, inside ``jax.shard_map``.

    Keys and values go around the devices by ``jax.lax.ppermute``, past those where no query sees
    them, and each device computes its part on the host. Differentiable once.

    Args:
        q: this device's queries, ``[B, T, H, hd]``, float32, float16 or bfloat16.
        k: its keys, ``[B, T, Hkv, hd]``, of q's dtype, or of half precision under a float32 q.
        v: its values, ``[B, T, Hkv, hv]``.
        axis_name: the axis of the mesh along which the sequence is split.
        layout: which rows a device of ``n`` holds. ``"zigzag"``: of ``2 n`` equal parts number
            ``i``, then number ``2 n - 1 - i``. ``"contiguous"``: number ``i`` of ``n``, as
            ``shard_map`` cuts a sequence that lies in order.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``, as :func:`attention` takes it.
        softcap: ``s = softcap * tanh(x / softcap)``; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        sinks: one more logit for each row: ``[H]`` or ``[B, H]``, the same on all devices, or
            ``[B, H, T]`` for this device's rows.

    Returns:
        ``[B, T, H, hv]``, q's dtype.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values.
        NameError: from JAX, outside of an axis of that name.
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, value in arrays.items():
        check_array(name, value)
        if value.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, hd], got shape {value.shape}")
    check_dtypes({name: x.dtype.name for name, x in arrays.items()}, "fused", arrays)
    sizes = head_counts(q, k, v, None, None)
    if sizes.Tk != sizes.Tq:
        raise ValueError(f"k must have the rows of q, got {sizes.Tk} and {sizes.Tq}")
    asked = MaskAndScale(causal=causal, window=window, softcap=softcap, scale=scale)
    compiled_options(asked, sizes, np.dtype(np.float32), "fused", "cpu")
    if sinks is not None:
        check_array("sinks", sinks)
        check_extents("sinks", tuple(sinks.shape), sizes)
        check_precision("sinks", sinks.dtype.name, q.dtype.name, sinks)
    layout_name(layout)
    size = int(jax.lax.psum(1, axis_name))
    ring = Ring(axis_name, size, size * sizes.Tq, layout, causal, window, softcap, scale)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    given = (q, k, v, () if sinks is None else (sinks,))
    # What all devices share has the sum of their gradients, by way of this mark.
    axes = varying_axes(*jax.tree.leaves(given)) | frozenset(names)
    out: jax.Array = _differentiable(ring, *varying(given, axes))
    return out


class _Part(NamedTuple):
    """The part of one hop: hashable."""

    ring: Ring
    distance: int

    def owner(self, rank: int) -> int:
        return (rank - self.distance) % self.ring.size

    def is_seen(self, rank: int) -> bool:
        return not self.distance or self.ring.plan().sees(rank, self.owner(rank))

    def options(self, rank: int, B: int) -> dict[str, Any]:
        ring, plan = self.ring, self.ring.plan()
        found: dict[str, Any] = {"softcap": ring.softcap, "scale": ring.scale}
        at = layout_positions(ring.layout, ring.total, ring.size, rank)[None]
        runs = visible_runs(at, plan.shards[self.owner(rank)].keys(), plan.band)
        if runs is not None:
            shape = B, at.shape[1]
            found["key_start"], found["key_end"] = (np.broadcast_to(x, shape) for x in runs)
        return found


def _forward_part(part: _Part, index: Any, *given: Any) -> list[Array]:
    rank = int(np.asarray(index))
    q, k, v, *sinks = (np.asarray(x) for x in given)
    B, T, H, _ = q.shape
    out = np.zeros((B, T, H, v.shape[3]), np.float32)
    if not part.is_seen(rank):
        return [out, np.full((B, H, T), -np.inf, np.float32), np.zeros((B, H, T), np.float32)]
    of_sinks = sinks[0] if sinks else None
    _, saved = attention_forward(
        q, k, v, sinks=of_sinks, backend="cpu", out=out, **part.options(rank, B)
    )
    return [out, saved.row_max, saved.row_sum]


def _backward_part(part: _Part, index: Any, *given: Any) -> list[Array]:
    rank = int(np.asarray(index))
    q, k, v, out, row_max, row_sum, dout, *sinks = (np.asarray(x) for x in given)
    made = {
        f"d{name}": np.zeros(x.shape, np.float32) for name, x in zip("qkv", (q, k, v), strict=True)
    }
    if not part.is_seen(rank):
        return list(made.values())
    if sinks:
        made["dsinks"] = np.zeros(sinks[0].shape, np.float32)
    saved = restored(
        {"q": q, "k": k, "v": v},
        Kept(out, row_max, row_sum),
        MaskAndScale(**part.options(rank, q.shape[0])),
        heads=(None, None),
        kernel="fused",
        backend="cpu",
        shaping=ScoreArrays(sinks=sinks[0] if sinks else None),
    )
    return list(attention_backward(dout, saved, accumulate=True, **made))  # type: ignore[arg-type]


def _on_host(function: Any, part: _Part, like: list[Any], *given: Any) -> Any:
    found = jax.pure_callback(
        OnHost(function, part),
        like,
        jax.lax.axis_index(part.ring.axis_name),
        *given,
        vmap_method="sequential",
    )
    return varying(found, varying_axes(*given))


def _moved(ring: Ring, held: dict[int, Any], hop: dict[int, list[tuple[int, int]]]) -> Any:
    """What a device gets of blocks that others hold, by the distances at which they got them."""
    found = None
    for before, pairs in hop.items():
        came = jax.tree.map(lambda x, p=pairs: jax.lax.ppermute(x, ring.axis_name, p), held[before])
        if found is None:
            found = came
            continue
        mine = np.zeros(ring.size, bool)
        mine[[target for _, target in pairs]] = True
        is_mine = jnp.asarray(mine)[jax.lax.axis_index(ring.axis_name)]
        found = jax.tree.map(lambda x, y, m=is_mine: jnp.where(m, y, x), found, came)
    return found


def _of_heads(rows: Any) -> Any:
    return rows.swapaxes(1, 2)[..., None]


def _forward(ring: Ring, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    """O in float32, and each row's maximum and sum over all blocks."""
    B, T, H, _ = q.shape
    shapes = ((B, T, H, v.shape[3]), (B, H, T), (B, H, T))
    like = [jax.ShapeDtypeStruct(shape, np.dtype(np.float32)) for shape in shapes]
    held = {0: (k, v)}
    o, top, total = _on_host(_forward_part, _Part(ring, 0), like, q, k, v, *sinks)
    merged = False
    for distance, hop in list(enumerate(ring.plan().hops()))[1:]:
        if not hop:
            continue
        held[distance] = _moved(ring, held, hop)
        part = _on_host(_forward_part, _Part(ring, distance), like, q, *held[distance])
        o = o if merged else o * _of_heads(total)
        merged = True
        higher = jnp.maximum(top, part[1])
        base = jnp.where(jnp.isneginf(higher), jnp.float32(0), higher)
        before, now = jnp.exp(top - base), jnp.exp(part[1] - base) * part[2]
        o = o * _of_heads(before) + part[0] * _of_heads(now)
        top, total = higher, total * before + now
    if merged:
        o = o / _of_heads(jnp.where(total == 0, jnp.float32(1), total))
    return o, top, total


def _value(ring: Ring, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    return _forward(ring, q, k, v, sinks)[0].astype(q.dtype)


def _value_and_residuals(ring: Ring, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    kept = _forward(ring, q, k, v, sinks)
    return kept[0].astype(q.dtype), (q, k, v, sinks, kept)


def _gradients(ring: Ring, residuals: Any, dout: Any) -> Any:
    q, k, v, sinks, kept = residuals
    hops = ring.plan().hops()
    held = {0: (k, v)}
    like = [jax.ShapeDtypeStruct(x.shape, np.dtype(np.float32)) for x in (q, k, v, *sinks)]
    dq, dk, dv, *dsinks = _on_host(
        _backward_part, _Part(ring, 0), like, q, k, v, *kept, dout, *sinks
    )
    sums = {0: (dk, dv)}
    for distance, hop in list(enumerate(hops))[1:]:
        if not hop:
            continue
        held[distance] = _moved(ring, held, hop)
        more, *made = _on_host(
            _backward_part, _Part(ring, distance), like[:3], q, *held[distance], *kept, dout
        )
        dq, sums[distance] = dq + more, tuple(made)
        on_their_way = {before: pairs for before, pairs in hop.items() if before}
        if on_their_way:
            came = _moved(ring, sums, on_their_way)
            sums[distance] = jax.tree.map(jnp.add, sums[distance], came)
    if hops[0]:
        dk, dv = jax.tree.map(jnp.add, sums[0], _moved(ring, sums, hops[0]))
    of_sinks = tuple(x.astype(of.dtype) for x, of in zip(dsinks, sinks, strict=True))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), of_sinks


_differentiable = jax.custom_vjp(_value, nondiff_argnums=(0,))
_differentiable.defvjp(_value_and_residuals, _gradients)
