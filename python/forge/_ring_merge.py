"""Attention over parts of the keys put together as they come, with maximum and sum kept apart."""

from __future__ import annotations

import numpy as np

from forge._arrays import Array


class MergedRows:
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
