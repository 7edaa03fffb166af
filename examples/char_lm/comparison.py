"""How long a layer's attention takes, beside the plain NumPy that `forge bench` times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import forge
import numpy as np
from forge._bench.cases import Case, Inputs
from forge._bench.peers import numpy_peer


@dataclass(frozen=True)
class LayerTimes:
    """Median milliseconds of one layer's attention, (forward, backward)."""

    label: str
    forge: tuple[float, float]
    numpy: tuple[float, float]
    difference: float  # largest between the two, over o, dq, dk, dv, relative to the largest


def one_round(forward: Any, backward: Any) -> tuple[float, float, tuple[np.ndarray, ...]]:
    """Milliseconds of a forward and a backward, and their results (o, dq, dk, dv)."""
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
    B, T, H, hd = do.shape
    shaping = {name: options.get(name) for name in ("window", "softcap")}
    case = Case(label, B, T, T, H, qkv[1].shape[2], hd, **shaping)
    plain = numpy_peer.prepare(case, Inputs(*qkv, do))
    ways = {
        "forge": (
            lambda: forge.attention_forward(*qkv, **options, **where),
            lambda saved: forge.attention_backward(do, saved),
        ),
        "numpy": (lambda: (plain.forward(), None), lambda _: plain.backward()),
    }
    times: dict[str, list[tuple[float, float]]] = {"forge": [], "numpy": []}
    results = {}
    for _ in range(rounds + 1):
        for name, (forward, backward) in ways.items():
            *took, results[name] = one_round(forward, backward)
            times[name].append(tuple(took))
    medians = {name: np.median(t[1:], axis=0).tolist() for name, t in times.items()}
    o, *gradients = results["numpy"]
    results["numpy"] = (plain.as_output(o), *plain.as_gradients(gradients))
    difference = max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(results["forge"], results["numpy"], strict=True)
    )
    return LayerTimes(label, tuple(medians["forge"]), tuple(medians["numpy"]), difference)
