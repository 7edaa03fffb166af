"""The materialized kernels in NumPy: the same operations in the same order, rounded once each.

fma is computed exactly in float64 and rounded once to float32. exp is not emulated: the forward's
probabilities come from the kernel. tanh is read off the kernel too, see test_kernels.py.
"""

import numpy as np

F32 = np.float32


def fma(a, b, c):
    """float32 fma(a, b, c), rounded once; finite arguments."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # 48 bits: exact
    c = np.asarray(c, np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    # Round to odd where the float64 sum is inexact; rounding that to float32 rounds only once.
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, toward), total).astype(F32)


def chain(a, b):
    """fma chain from 0 over the last axis."""
    total = np.zeros(np.broadcast_shapes(a.shape[:-1], b.shape[:-1]), F32)
    for d in range(a.shape[-1]):
        total = fma(a[..., d], b[..., d], total)
    return total


def scores(q, k, scale):
    """x, [B, H, Tq, Tk], before any softcap."""
    return chain(by_head(q)[:, :, :, None], for_query_heads(k, q)[:, :, None]) * F32(scale)


def by_head(x):
    return x.transpose(0, 2, 1, 3)


def for_query_heads(x, q):
    return by_head(x.repeat(q.shape[2] // x.shape[2], axis=2))


def output(probs, v, q, mask):
    """o from p: fma over the visible keys, ascending."""
    v = for_query_heads(v, q)
    o = np.zeros((*probs.shape[:3], v.shape[-1]), F32)
    for j in range(probs.shape[3]):
        step = fma(probs[..., j, None], v[:, :, None, j], o)
        o = np.where(mask[..., j, None], step, o)
    return by_head(o)


def row_gradient(o, dout, dlse=None):
    d = chain(by_head(dout), by_head(o))
    return d if dlse is None else d - dlse


def score_gradient(probs, v, dout, d_row, scale, tanh=None):
    """ds, [B, H, Tq, Tk]; tanh of x / softcap where there is a softcap."""
    dp = chain(by_head(dout)[:, :, :, None], for_query_heads(v, dout)[:, :, None])
    ds = (probs * (dp - d_row[..., None])) * F32(scale)
    return ds if tanh is None else ds * fma(-tanh, tanh, F32(1))


def query_gradient(ds, k, dq, mask):
    """Added to dq, visible keys ascending."""
    k = for_query_heads(k, dq)
    total = by_head(dq)
    for j in range(ds.shape[3]):
        step = fma(ds[..., j, None], k[:, :, None, j], total)
        total = np.where(mask[..., j, None], step, total)
    return by_head(total)


def key_gradient(weights, x, start, mask):
    """Added to start (dk with ds and q, dv with p and dout): heads of a group outside, queries
    inside."""
    rep = x.shape[2] // start.shape[2]
    total, x = by_head(start), by_head(x)
    for r in range(rep):
        for i in range(x.shape[2]):
            step = fma(weights[:, r::rep, i, :, None], x[:, r::rep, None, i], total)
            total = np.where(mask[:, :, i, :, None], step, total)
    return by_head(total)
