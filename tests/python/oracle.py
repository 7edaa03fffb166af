"""Attention in plain NumPy, in float64 as the truth and in float32 as the measure of error.

Written from the formulas with whole matrices; it shares no code and no order of operations with the
kernels. Arrays are [B, T, heads, hd] or, with num_heads, [B, T, heads * hd].
"""

from functools import cached_property

import numpy as np

UNIT = 2.0**-24  # half an ulp of float32, relative
SMALLEST = 2.0**-126  # float32's smallest normal number; below it nothing is relative
OPTIONS = ("causal", "window", "softcap", "scale", "query_offset", "key_start", "key_end")
ARRAYS = ("bias", "mask", "sinks")
GRADIENTS = ("dq", "dk", "dv")
MORE_GRADIENTS = ("dbias", "dsinks")  # where there is a bias, or sinks


def per_query(value, B, Tq, default):
    """[B][Tq] of Python integers, from one, [B] or [B, Tq]."""
    value = np.asarray(default if value is None else value, dtype=object)
    value = value[:, None] if value.ndim == 1 else value
    return [[int(x) for x in row] for row in np.broadcast_to(value, (B, Tq))]


def visible(B, Tq, Tk, causal=False, window=None, query_offset=None, key_start=None, key_end=None):
    """Boolean [B, Tq, Tk]: which key each query sees. Python integers, so nothing overflows."""
    offsets = per_query(query_offset, B, Tq, Tk - Tq)
    starts, ends = per_query(key_start, B, Tq, 0), per_query(key_end, B, Tq, Tk)
    left, right = (
        (-1, -1) if window is None else (window if isinstance(window, tuple) else (window - 1, -1))
    )
    seen = np.zeros((B, Tq, Tk), bool)
    for b in range(B):
        for i in range(Tq):
            pos = i + offsets[b][i]
            lo, hi = max(0, starts[b][i]), min(Tk, ends[b][i]) - 1
            if left >= 0:
                lo = max(lo, pos - left)
            if right >= 0:
                hi = min(hi, pos + right)
            if causal:
                hi = min(hi, pos)
            if lo <= hi:
                seen[b, i, lo : hi + 1] = True
    return seen


def split_heads(x, heads):
    return x if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


def summed_to(x, shape):
    """Summed over the axes that have 1 in `shape`, which is broadcast to x's."""
    return x.sum(tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True)


def sink_axes(sinks):
    """[H], [B, H] or [B, H, Tq] as three axes that broadcast."""
    sinks = sinks[None] if sinks.ndim == 1 else sinks
    return sinks[..., None] if sinks.ndim == 2 else sinks


class Solution:
    """out, lse, row_max, row_sum, probs and, given dout, dq, dk, dv, d_row, with a bias dbias and
    with sinks dsinks; in one dtype."""

    def __init__(
        self,
        q,
        k,
        v,
        dout,
        dlse,
        dtype,
        *,
        causal=False,
        window=None,
        softcap=None,
        scale=None,
        query_offset=None,
        key_start=None,
        key_end=None,
        bias=None,
        mask=None,
        sinks=None,
    ):
        q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
        B, Tq, H, hd = q.shape
        Tk, Hkv = k.shape[1:3]
        self.rep = H // Hkv
        self.scale = dtype(hd**-0.5 if scale is None else scale)
        cap = dtype(softcap or 0)
        self.mask = visible(B, Tq, Tk, causal, window, query_offset, key_start, key_end)[:, None]
        self.mask = np.broadcast_to(self.mask, (B, H, Tq, Tk))
        self.bias = None if bias is None else np.asarray(bias).astype(dtype)
        if mask is not None:
            self.mask = self.mask & mask
        if bias is not None:
            self.mask = self.mask & ~np.isneginf(self.bias)
        self.sinks = None if sinks is None else np.asarray(sinks).astype(dtype)
        self.q, self.k, self.v = (
            x.transpose(0, 2, 1, 3) for x in (q, self.repeat(k), self.repeat(v))
        )
        x = (self.q @ self.k.swapaxes(-1, -2)) * self.scale
        self.tanh = np.tanh(x / cap) if cap else None
        x = cap * self.tanh if cap else x
        if bias is not None:
            x = x + np.where(self.mask, self.bias, 0)
        self.scores = np.where(self.mask, x, dtype(-np.inf))
        self.row_max = self.scores.max(-1, initial=-np.inf)
        if sinks is not None:
            sink = sink_axes(self.sinks)
            self.row_max = np.maximum(self.row_max, sink)
        safe = np.where(np.isneginf(self.row_max), 0, self.row_max)
        e = np.exp(self.scores - safe[..., None])
        self.row_sum = e.sum(-1)
        if sinks is not None:
            sink_weight = np.exp(sink - safe)
            self.row_sum = self.row_sum + sink_weight
        total = np.where(self.row_sum == 0, dtype(1), self.row_sum)
        self.lse = self.row_max + np.log(total)
        self.probs = e / total[..., None]
        self.sink_probs = None if sinks is None else sink_weight / total
        self.o = self.probs @ self.v
        self.out = self.o.transpose(0, 2, 1, 3)
        if dout is not None:
            self.backward(np.asarray(dout).astype(dtype), dlse, dtype)

    def repeat(self, x):
        return np.repeat(x, self.rep, axis=2)

    def fold(self, x):
        """[B, H, Tk, hd] -> [B, Tk, Hkv, hd], summed over the query heads of each kv head."""
        B, H, T, hd = x.shape
        return x.reshape(B, H // self.rep, self.rep, T, hd).sum(2).transpose(0, 2, 1, 3)

    def backward(self, dout, dlse, dtype):
        self.dout = dout.transpose(0, 2, 1, 3)
        self.dlse = (
            np.zeros(self.lse.shape, dtype) if dlse is None else np.asarray(dlse).astype(dtype)
        )
        self.d_row = (self.dout * self.o).sum(-1) - self.dlse
        self.dp = self.dout @ self.v.swapaxes(-1, -2)
        ds = self.probs * (self.dp - self.d_row[..., None])
        if self.bias is not None:
            self.dbias = summed_to(ds, self.bias.shape)
        if self.sinks is not None:
            self.dsinks = self.of_sinks(-self.sink_probs * self.d_row)
        if self.tanh is not None:
            ds = ds * (1 - self.tanh * self.tanh)
        ds = ds * self.scale
        self.dq = (ds @ self.k).transpose(0, 2, 1, 3)
        self.dk = self.fold(ds.swapaxes(-1, -2) @ self.q)
        self.dv = self.fold(self.probs.swapaxes(-1, -2) @ self.dout)

    def of_sinks(self, x):
        """[B, H, Tq] summed to the shape of the sinks."""
        return summed_to(x, sink_axes(self.sinks).shape).reshape(self.sinks.shape)

    def term_sums(self, scores_too):
        """For each array, the largest sum of the sizes of the terms added up to make it. With
        `scores_too`, the terms of the scores count too: an error of s is a relative error of p."""
        q, k, v, p = abs(self.q), abs(self.k), abs(self.v), self.probs
        live_max = np.where(np.isfinite(self.row_max), abs(self.row_max), 0)
        s = np.zeros_like(p)
        if scores_too:
            s = np.where(self.mask, abs(self.scale) * (q @ k.swapaxes(-1, -2)), 0)
            s = s + np.where(self.mask, abs(self.scores), 0)
            if self.bias is not None:
                s = s + np.where(self.mask, abs(self.bias), 0)
        mean_s = (p * s).sum(-1, keepdims=True)
        p = p * (1 + s + mean_s)
        o = p @ v
        sums = {"out": o, "lse": 1 + live_max + s.max(-1, initial=0), "probs": p}
        if hasattr(self, "dout"):
            dout = abs(self.dout)
            dp = dout @ v.swapaxes(-1, -2)
            d_row = (dout * o).sum(-1, keepdims=True) + abs(self.dlse)[..., None]
            ds = abs(self.scale) * p * (dp + d_row)
            sums |= {
                "dq": ds @ k,
                "dk": self.fold(ds.swapaxes(-1, -2) @ q),
                "dv": self.fold(p.swapaxes(-1, -2) @ dout),
                "d_row": d_row,
            }
            if self.bias is not None:
                sums["dbias"] = summed_to(p * (dp + d_row), self.bias.shape)
            if self.sinks is not None:
                finite = np.where(np.isfinite(self.sinks), abs(self.sinks), 0)
                grow = 1 + s.max(-1, initial=0) + sink_axes(finite) * scores_too
                sums["dsinks"] = self.of_sinks(self.sink_probs * grow * d_row[..., 0])
        return {name: float(x.max(initial=0)) for name, x in sums.items()}


class Problem:
    """Inputs and options, and how far a result may be from the float64 answer."""

    def __init__(
        self, q, k, v, dout=None, dlse=None, *, num_heads=None, num_kv_heads=None, **options
    ):
        kv_heads = num_kv_heads or num_heads
        self.inputs = (
            split_heads(q, num_heads),
            split_heads(k, kv_heads),
            split_heads(v, kv_heads),
            None if dout is None else split_heads(dout, num_heads),
            dlse,
        )
        self.options = options

    @cached_property
    def exact(self):
        return Solution(*self.inputs, np.float64, **self.options)

    @cached_property
    def plain(self):
        return Solution(*self.inputs, np.float32, **self.options)

    def terms(self, name):
        """How many terms are added up, one sum after another, on the way to an element."""
        exact = self.exact
        Tk, rows = exact.k.shape[2], exact.row_sum.size
        more = {"dk": exact.rep * exact.q.shape[2]}
        more["dv"] = more["dk"]
        if exact.bias is not None:
            more["dbias"] = rows * Tk // max(1, exact.bias.size)
        if exact.sinks is not None:
            more["dsinks"] = rows // max(1, exact.sinks.size)
        return 2 * max(exact.q.shape[-1], exact.v.shape[-1]) + Tk + more.get(name, 0) + 8

    def tolerance(self, name, family, unit=UNIT):
        # Each term may be off by the smallest normal number, times what it is multiplied with.
        largest = max(np.abs(x).max(initial=1) for x in self.inputs if x is not None)
        floor = self.terms(name) * SMALLEST * float(largest)
        if family == "materialized":  # a fixed order
            return floor + self.terms(name) * unit * self.exact.term_sums(scores_too=True)[name]
        factor = 3 if name in GRADIENTS + MORE_GRADIENTS else 2
        plain_error = distance(getattr(self.plain, name), getattr(self.exact, name))
        sizes = self.exact.term_sums(scores_too=False)[name]
        return floor + factor * plain_error + 4 * unit * sizes

    def check(self, family, unit=UNIT, **results):
        """Asserts that each result (out, lse, probs, dq, dk, dv) is as near the truth as promised.

        family: what ran, "materialized" or "fused".
        """
        for name, got in results.items():
            want = getattr(self.exact, name)
            got = np.asarray(got).reshape(want.shape)
            error, bound = distance(got, want), self.tolerance(name, family, unit)
            assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g} ({family})"


def distance(got, want):
    """The largest |got - want|; infinities and NaN must stand in the same places."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    odd = ~np.isfinite(want)
    np.testing.assert_array_equal(got[odd], want[odd])
    return float(np.abs(got[~odd] - want[~odd]).max(initial=0))


def random_inputs(
    rng, B=1, Tq=5, Tk=None, H=2, Hkv=None, hd=4, hv=None, spread=1.0, dtype=np.float32
):
    """q, k, v, dout of normal values; `spread` multiplies q."""
    Tk, Hkv, hv = Tq if Tk is None else Tk, H if Hkv is None else Hkv, hd if hv is None else hv
    shapes = ((B, Tq, H, hd), (B, Tk, Hkv, hd), (B, Tk, Hkv, hv), (B, Tq, H, hv))
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q * dtype(spread), k, v, dout
