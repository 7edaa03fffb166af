"""Attention in plain NumPy, a head at a time, and the error that each kernel family may have.

What ``python -m forge check`` holds the kernels against, and ``bench`` every implementation before
it is timed. Written from the formulas; it shares no code with the compiled module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from forge._arrays import Array
from forge._check.halves import share_of

UNIT = 2.0**-24  # half an ulp of float32, relative
GRADIENTS = ("dq", "dk", "dv")
OF_SCORES = ("dbias", "dsinks")  # with a bias, with sinks


@dataclass(frozen=True)
class Inputs:
    """One problem: float32 arrays ``[B, T, heads, hd]`` (dlse ``[B, H, Tq]``) and the options."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> Array:
        """Return which keys each query sees: bool ``[B, H, Tq, Tk]``."""
        B, Tq, H = self.q.shape[:3]
        seen = visible(B, Tq, self.k.shape[1], self.options)[:, None]
        if self.options.get("mask") is not None:
            seen = seen & self.options["mask"]
        if self.options.get("bias") is not None:
            seen = seen & (self.options["bias"] != -np.inf)
        return np.broadcast_to(seen, (B, H, *seen.shape[2:]))

    @property
    def sinks(self) -> Array | None:
        """Return the sinks as three axes that broadcast to ``[B, H, Tq]``."""
        sinks = self.options.get("sinks")
        if sinks is None:
            return None
        rows: Array = sinks[None, :, None] if sinks.ndim == 1 else sinks
        return rows if rows.ndim == 3 else rows[..., None]


def visible(B: int, Tq: int, Tk: int, options: Mapping[str, Any]) -> Array:
    """Return which keys positions, causal and window leave visible: bool ``[B, Tq, Tk]``."""
    window = options.get("window")
    left, right = window if isinstance(window, tuple) else ((window or 0) - 1, -1)

    def each(name: str, default: int) -> Array:
        value = options.get(name)
        array = np.asarray(default if value is None else value)
        return np.broadcast_to(array[:, None] if array.ndim == 1 else array, (B, Tq))[..., None]

    key = np.arange(Tk)
    pos = np.arange(Tq)[:, None] + each("query_offset", Tk - Tq)
    seen: Array = (key >= each("key_start", 0)) & (key < each("key_end", Tk))
    seen = seen & np.ones((Tq, 1), bool)
    if left >= 0:
        seen &= key >= pos - left
    if right >= 0:
        seen &= key <= pos + right
    if options.get("causal"):
        seen &= key <= pos
    return seen


@dataclass(frozen=True)
class _Head:
    """One query head, with its key/value head, in one dtype: ``[T, hd]``, mask ``[Tq, Tk]``."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    seen: Array
    bias: Array | None
    sink: Array
    """``[Tq]``; -inf for none."""
    scale: Any
    softcap: Any

    @property
    def live(self) -> Array:
        return np.asarray(self.seen.any(1))

    @cached_property
    def capped(self) -> Array:
        """``tanh(x / softcap)``."""
        return np.asarray(np.tanh(self.q @ self.k.T * self.scale / self.softcap))

    @cached_property
    def scores(self) -> Array:
        s = self.softcap * self.capped if self.softcap else self.q @ self.k.T * self.scale
        if self.bias is not None:
            s = s + self.bias
        return np.asarray(np.where(self.seen, s, self.q.dtype.type(-np.inf)))

    def solve(self) -> dict[str, Array]:
        zero, one = self.q.dtype.type(0), self.q.dtype.type(1)
        m = np.maximum(self.scores.max(1, initial=-np.inf), self.sink)
        base = np.where(np.isneginf(m), zero, m)
        e, of_sink = np.exp(self.scores - base[:, None]), np.exp(self.sink - base)
        total = e.sum(1) + of_sink
        total = np.where(total == 0, one, total)
        p = e / total[:, None]
        out = p @ self.v
        d_row = (self.dout * out).sum(1) - self.dlse
        dbias = p * (self.dout @ self.v.T - d_row[:, None])
        ds = dbias * (one - self.capped * self.capped) if self.softcap else dbias
        ds = ds * self.scale
        lse = m + np.log(total)
        return {
            "dbias": dbias,
            "dsinks": -of_sink / total * d_row,
            "p": p,
            "out": out,
            "lse": lse,
            "d_row": d_row,
            "dq": ds @ self.k,
            "dk": ds.T @ self.q,
            "dv": p.T @ self.dout,
        }

    def term_sums(self, p: Array) -> dict[str, Array]:
        """Return the sums of the sizes of the terms that make each result."""
        q, k, v, dout = (np.abs(x) for x in (self.q, self.k, self.v, self.dout))
        out = p @ v
        d_row = (dout * out).sum(1) + np.abs(self.dlse)
        ds = abs(self.scale) * p * (dout @ v.T + d_row[:, None])
        largest = np.where(self.seen, np.abs(self.scores), 0).max(1, initial=0)
        return {
            "dbias": p * (dout @ v.T + d_row[:, None]),
            "dsinks": d_row,
            "p": p,
            "out": out,
            "lse": 1 + largest,
            "d_row": d_row,
            "dq": ds @ k,
            "dk": ds.T @ q,
            "dv": p.T @ dout,
        }


def _heads(given: Inputs, dtype: type[np.floating[Any]]) -> list[list[_Head]]:
    """Cut a problem into ``[B][H]`` heads.

    What nobody sees is zeroed, so that a NaN there does not come in as 0 * NaN.
    """
    B, Tq, H, hd = given.q.shape
    rep = H // given.k.shape[2]
    dlse = np.zeros((B, H, Tq)) if given.dlse is None else given.dlse
    scale = given.options.get("scale")
    rows: list[list[_Head]] = []
    sinks = np.float64(-np.inf) if given.sinks is None else given.sinks
    sinks = np.broadcast_to(sinks, (B, H, Tq)).astype(dtype)
    bias = given.options.get("bias")
    if bias is not None:
        bias = np.where(given.seen, bias, 0).astype(dtype)
    for b, seen_by_heads in enumerate(given.seen):
        row = []
        for h, seen in enumerate(seen_by_heads):
            key, live = seen.any(0)[:, None], seen.any(1)
            row.append(
                _Head(
                    q=np.where(live[:, None], given.q[b, :, h], 0).astype(dtype),
                    k=np.where(key, given.k[b, :, h // rep], 0).astype(dtype),
                    v=np.where(key, given.v[b, :, h // rep], 0).astype(dtype),
                    dout=np.where(live[:, None], given.dout[b, :, h], 0).astype(dtype),
                    dlse=np.where(live | (sinks[b, h] > -np.inf), dlse[b, h], 0).astype(dtype),
                    seen=seen,
                    bias=None if bias is None else bias[b, h],
                    sink=sinks[b, h],
                    scale=dtype(hd**-0.5 if scale is None else scale),
                    softcap=dtype(given.options.get("softcap") or 0),
                )
            )
        rows.append(row)
    return rows


def _summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that have 1 in ``shape``."""
    axes = tuple(axis for axis, extent in enumerate(shape) if extent == 1)
    return np.asarray(x.sum(axes, keepdims=True))


def _gather(inputs: Inputs, solved: list[list[dict[str, Array]]]) -> dict[str, Array]:
    """Put the heads together again.

    dk and dv are summed over each group of query heads, dbias and dsinks to their arrays' shapes.
    """
    H, Hkv = inputs.q.shape[2], inputs.k.shape[2]
    together: dict[str, Array] = {}
    for name in solved[0][0]:
        like: Array | None = inputs.options.get(name.removeprefix("d"))
        if name in OF_SCORES and like is None:
            continue
        x = np.array([[head[name] for head in row] for row in solved])
        if name in ("dk", "dv"):
            x = x.reshape(x.shape[0], Hkv, H // Hkv, *x.shape[2:]).sum(2)
        if name == "dbias" and like is not None:
            x = _summed_to(x, like.shape)
        if name == "dsinks" and like is not None and inputs.sinks is not None:
            x = _summed_to(x, inputs.sinks.shape).reshape(like.shape)
        together[name] = x.swapaxes(1, 2) if name in ("out", *GRADIENTS) else x
    return together


def evaluate(inputs: Inputs, dtype: type[np.floating[Any]] = np.float64) -> dict[str, Array]:
    """Return out, p, lse, d_row and the gradients, all computed in ``dtype``."""
    return _gather(inputs, [[head.solve() for head in row] for row in _heads(inputs, dtype)])


class Answer:
    """The float64 answer to a problem, and how far from it each family may end."""

    def __init__(self, inputs: Inputs):
        self.seen = inputs.seen
        self.results = evaluate(inputs)
        plain = evaluate(inputs, np.float32)
        self._plain_errors = {name: self.error(name, plain[name]) for name in plain}
        sums = [
            [head.term_sums(p) for head, p in zip(*row, strict=True)]
            for row in zip(_heads(inputs, np.float64), self.results["p"], strict=True)
        ]
        self._sums = _gather(inputs, sums)

    def errors(self, name: str, got: Array) -> Array:
        """Return ``|got - want|`` of each element; NaN or infinity in a wrong place is infinite."""
        want = self.results[name]
        got = np.asarray(got, np.float64).reshape(want.shape)
        right = got == want  # infinities too
        with np.errstate(invalid="ignore"):
            errors = np.where(right, 0, np.abs(got - want))
        return np.where(np.isnan(errors), np.inf, errors)

    def error(self, name: str, got: Array) -> float:
        """Return the largest of the errors."""
        return float(self.errors(name, got).max(initial=0))

    def worst(self, name: str, got: Array, kernel: str, dtype: str) -> tuple[float, float]:
        """Return the error and the bound of the element that has most of its bound as error.

        float32's bound, and one rounding of a result in half precision.
        """
        errors = self.errors(name, got)
        if not errors.size:
            return 0.0, 0.0
        bound = self.bound(name, kernel)
        shares, bounds = share_of(errors, self.results[name], bound, dtype)
        at = np.unravel_index(shares.argmax(), shares.shape)
        return float(errors[at]), float(bounds[at])

    def bound(self, name: str, kernel: str) -> float:
        """Return the largest error that the kernel family may have in a result.

        Fused: twice (gradients: three times) that of plain float32 NumPy, plus ``4 * UNIT`` of the
        largest sum of terms. Materialized, which adds up one term after the other: double that.
        """
        factor = 3 if name in GRADIENTS + OF_SCORES else 2
        sums = float(self._sums[name].max(initial=0))
        bound = factor * self._plain_errors[name] + 4 * UNIT * sums
        return 2 * bound if kernel == "materialized" else bound
