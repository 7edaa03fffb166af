"""Whole-model gradients against float64: forge's own float64 kernels, and finite differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from char_lm.model import CharLM, Tensors

FLOAT64_LIMIT = 1e-4  # float32 gradients; 1e-6 is usual, a lost softcap factor is 1e-2
DIFFERENCE_LIMIT = 1e-5  # float64 gradients; 1e-8 is usual
NUDGE = 1e-5


@dataclass(frozen=True)
class GradientCheck:
    """Worst errors, each relative to the largest gradient of its tensor."""

    float64_error: float
    difference_error: float
    tensors: int
    differences: int

    @property
    def ok(self) -> bool:
        """Both within their limits; a NaN is not."""
        return self.float64_error <= FLOAT64_LIMIT and self.difference_error <= DIFFERENCE_LIMIT

    def __str__(self) -> str:
        return (
            f"gradients: worst relative error {self.float64_error:.1e} against float64 "
            f"({self.tensors} tensors, limit {FLOAT64_LIMIT:.0e}), {self.difference_error:.1e} "
            f"against {self.differences} central differences (limit {DIFFERENCE_LIMIT:.0e}): "
            + ("ok" if self.ok else "OFF")
        )


def parts(model: CharLM, tensors: Tensors) -> Iterator[np.ndarray]:
    """Every tensor as a view; the packed q, k, v weights as three, for their scales differ."""
    for name, array in tensors.views.items():
        if name.endswith(".qkv"):
            yield from (part[0] for part in model.split_heads(array[None]))
        else:
            yield array


def check_gradients(
    model: CharLM, tokens: np.ndarray, targets: np.ndarray, rng: np.random.Generator
) -> GradientCheck:
    """Gradients of the loss on tokens, [B, T]: the model's own, in float64, and by differences.

    Of each tensor two entries are nudged: the one with the largest gradient and a random one.
    """
    model.loss_and_grads(tokens, targets)
    exact = CharLM(model.config, model.weights.astype(np.float64), "materialized", "cpu")
    exact.loss_and_grads(tokens, targets)

    float64_errors, difference_errors = [], []
    gots, wants, weights = (
        parts(m, t) for m, t in [(model, model.grads), (exact, exact.grads), (exact, exact.weights)]
    )
    for got, want, w in zip(gots, wants, weights, strict=True):
        largest = np.abs(want).max()
        float64_errors.append(np.abs(got - want).max() / largest)
        for flat_index in (np.abs(want).argmax(), rng.integers(w.size)):
            at = np.unravel_index(flat_index, w.shape)
            here = w[at]
            losses = []
            for nudged in (here + NUDGE, here - NUDGE):
                w[at] = nudged
                losses.append(exact.loss(tokens, targets))
            w[at] = here
            slope = (losses[0] - losses[1]) / (2 * NUDGE)
            difference_errors.append(abs(slope - want[at]) / largest)
    return GradientCheck(
        float(np.max(float64_errors)),
        float(np.max(difference_errors)),
        len(float64_errors),
        len(difference_errors),
    )
