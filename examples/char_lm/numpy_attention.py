"""The same attention in plain NumPy, and how long each takes.

Written to be a fair peer: every step is a batched matrix product or one pass over the scores,
the query heads of a key/value head are stacked into one product, and the mask is made once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import forge
import numpy as np


def mask_bias(T: int, window: int | None) -> np.ndarray:
    """[T, T]: 0 where query i sees key j, -inf elsewhere; causal, at most `window` keys."""
    i, j = np.arange(T)[:, None], np.arange(T)
    visible = (j <= i) & (j > i - (window or T))
    return np.where(visible, np.float32(0), np.float32(-np.inf))


def grouped(x: np.ndarray, Hkv: int) -> np.ndarray:
    """[B, T, H, hd] -> [B, Hkv, rep * T, hd], contiguous."""
    B, T, H, hd = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(B, Hkv, H // Hkv * T, hd)


def ungrouped(x: np.ndarray, H: int) -> np.ndarray:
    """The inverse of grouped."""
    B, _, rows, hd = x.shape
    T = rows * x.shape[1] // H
    return np.ascontiguousarray(x.reshape(B, H, T, hd).transpose(0, 2, 1, 3))


def numpy_forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, softcap: float | None
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Returns o and the backward's tape; q, o [B, T, H, hd], k and v [B, T, Hkv, hd]."""
    T, H, hd = q.shape[1:]
    Hkv = k.shape[2]
    scale = np.float32(hd**-0.5)
    q, k, v = grouped(q, Hkv) * scale, grouped(k, Hkv), grouped(v, Hkv)
    p = q @ k.swapaxes(-1, -2)  # [B, Hkv, rep * T, T], scores until they are probabilities
    slope = None
    if softcap:
        p /= np.float32(softcap)
        np.tanh(p, out=p)
        slope = 1 - p * p
        p *= np.float32(softcap)
    by_query = p.reshape(*p.shape[:2], -1, T, T)
    by_query += bias
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    o = p @ v
    return ungrouped(o, H), (q, k, v, p, slope, o, scale)


def numpy_backward(do: np.ndarray, tape: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    """Returns dq [B, T, H, hd], dk and dv [B, T, Hkv, hd]."""
    q, k, v, p, slope, o, scale = tape
    H, Hkv = do.shape[2], k.shape[1]
    do = grouped(do, Hkv)
    dv = p.swapaxes(-1, -2) @ do
    ds = do @ v.swapaxes(-1, -2)
    ds -= np.sum(do * o, axis=-1, keepdims=True)
    ds *= p
    if slope is not None:
        ds *= slope
    dq = ds @ k
    dq *= scale
    dk = ds.swapaxes(-1, -2) @ q  # q carries the scale
    return ungrouped(dq, H), ungrouped(dk, Hkv), ungrouped(dv, Hkv)


@dataclass(frozen=True)
class LayerTimes:
    """Median milliseconds of one layer's attention, (forward, backward)."""

    label: str
    forge: tuple[float, float]
    numpy: tuple[float, float]
    difference: float  # largest between the two, over o, dq, dk, dv, relative to the largest


def one_round(calls: list[Any]) -> tuple[float, float, tuple[np.ndarray, ...]]:
    """Milliseconds of a forward and a backward, and their results (o, dq, dk, dv)."""
    forward, backward = calls
    began = time.perf_counter()
    o, tape = forward()
    middle = time.perf_counter()
    grads = backward(tape)
    ended = time.perf_counter()
    return (middle - began) * 1e3, (ended - middle) * 1e3, (o, *grads)


def compare(
    label: str,
    qkv: tuple[np.ndarray, ...],
    do: np.ndarray,
    options: dict[str, Any],
    where: dict[str, Any],
    rounds: int,
) -> LayerTimes:
    """Times one layer's attention both ways, turn and turn about, after a round to warm up."""
    bias = mask_bias(do.shape[1], options.get("window"))
    softcap = options.get("softcap")
    ways = {
        "forge": [
            lambda: forge.attention_forward(*qkv, **options, **where),
            lambda saved: forge.attention_backward(do, saved),
        ],
        "numpy": [
            lambda: numpy_forward(*qkv, bias, softcap),
            lambda tape: numpy_backward(do, tape),
        ],
    }
    times: dict[str, list[tuple[float, float]]] = {"forge": [], "numpy": []}
    results = {}
    for _ in range(rounds + 1):
        for name, calls in ways.items():
            forward, backward, results[name] = one_round(calls)
            times[name].append((forward, backward))
    medians = {name: np.median(t[1:], axis=0).tolist() for name, t in times.items()}
    difference = max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(results["forge"], results["numpy"], strict=True)
    )
    return LayerTimes(label, tuple(medians["forge"]), tuple(medians["numpy"]), difference)
