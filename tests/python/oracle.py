"""Attention in plain NumPy, in float64 as the truth and in float32 as the measure of error.

Written from the formulas with whole matrices; it shares no code and no order of operations with the
kernels. Arrays are [B, T, heads, hd] or, with num_heads, [B, T, heads * hd].
"""

from functools import cached_property

import numpy as np

UNIT = 2.0**-24  # half an ulp of float32, relative
SMALLEST = 2.0**-126  # float32's smallest normal number; below it nothing is relative
OPTIONS = ("causal", "window", "softcap", "scale", "query_offset", "key_start", "key_end")
GRADIENTS = ("dq", "dk", "dv")


def per_sequence(value, B, default):
    value = default if value is None else value
    return [int(x) for x in np.broadcast_to(np.asarray(value, dtype=object), (B,))]


def visible(B, Tq, Tk, causal=False, window=None, query_offset=None, key_start=None, key_end=None):
    """Boolean [B, Tq, Tk]: which key each query sees. Python integers, so nothing overflows."""
    offsets = per_sequence(query_offset, B, Tk - Tq)
    starts, ends = per_sequence(key_start, B, 0), per_sequence(key_end, B, Tk)
    left, right = (
        (-1, -1) if window is None else (window if isinstance(window, tuple) else (window - 1, -1))
    )
    seen = np.zeros((B, Tq, Tk), bool)
    for b in range(B):
        for i in range(Tq):
            pos = i + offsets[b]
            lo, hi = max(0, starts[b]), min(Tk, ends[b]) - 1
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


class Solution:
    """out, lse, row_max, row_sum, probs and, given dout, dq, dk, dv and d_row; in one dtype."""

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
    ):
        q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
        B, Tq, H, hd = q.shape
        Tk, Hkv = k.shape[1:3]
        self.rep = H // Hkv
        self.scale = dtype(hd**-0.5 if scale is None else scale)
        cap = dtype(softcap or 0)
        self.mask = visible(B, Tq, Tk, causal, window, query_offset, key_start, key_end)[:, None]
        self.q, self.k, self.v = (
            x.transpose(0, 2, 1, 3) for x in (q, self.repeat(k), self.repeat(v))
        )
        x = (self.q @ self.k.swapaxes(-1, -2)) * self.scale
        self.tanh = np.tanh(x / cap) if cap else None
        self.scores = np.where(self.mask, cap * self.tanh if cap else x, dtype(-np.inf))
        self.row_max = self.scores.max(-1, initial=-np.inf)
        dead = ~self.mask.any(-1)
        safe = np.where(dead, 0, self.row_max)[..., None]
        e = np.exp(self.scores - safe)
        self.row_sum = e.sum(-1)
        total = np.where(dead, 1, self.row_sum)
        self.lse = np.where(dead, -np.inf, self.row_max + np.log(total))
        self.probs = e / total[..., None]
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
        if self.tanh is not None:
            ds = ds * (1 - self.tanh * self.tanh)
        ds = ds * self.scale
        self.dq = (ds @ self.k).transpose(0, 2, 1, 3)
        self.dk = self.fold(ds.swapaxes(-1, -2) @ self.q)
        self.dv = self.fold(self.probs.swapaxes(-1, -2) @ self.dout)

    def term_sums(self, scores_too):
        """For each array, the largest sum of the sizes of the terms added up to make it. With
        `scores_too`, the terms of the scores count too: an error of s is a relative error of p."""
        q, k, v, p = abs(self.q), abs(self.k), abs(self.v), self.probs
        live_max = np.where(np.isfinite(self.row_max), abs(self.row_max), 0)
        s = np.zeros_like(p)
        if scores_too:
            s = np.where(self.mask, abs(self.scale) * (q @ k.swapaxes(-1, -2)), 0)
            s = s + np.where(self.mask, abs(self.scores), 0)
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
        hd, Tk = self.exact.q.shape[-1], self.exact.k.shape[2]
        group_rows = self.exact.rep * self.exact.q.shape[2]
        return 2 * hd + Tk + (group_rows if name in ("dk", "dv") else 0) + 8

    def tolerance(self, name, family, unit=UNIT):
        # Each term may be off by the smallest normal number, times what it is multiplied with.
        largest = max(np.abs(x).max(initial=1) for x in self.inputs if x is not None)
        floor = self.terms(name) * SMALLEST * float(largest)
        if family == "materialized":  # a fixed order
            return floor + self.terms(name) * unit * self.exact.term_sums(scores_too=True)[name]
        factor = 3 if name in GRADIENTS else 2
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


def random_inputs(rng, B=1, Tq=5, Tk=None, H=2, Hkv=None, hd=4, spread=1.0, dtype=np.float32):
    """q, k, v, dout of normal values; `spread` multiplies q."""
    Tk, Hkv = Tq if Tk is None else Tk, H if Hkv is None else Hkv
    shapes = ((B, Tq, H, hd), (B, Tk, Hkv, hd), (B, Tk, Hkv, hd), (B, Tq, H, hd))
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q * dtype(spread), k, v, dout
