"""The problems that are timed, their inputs and their cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge._arrays import Array
from forge._check.halves import ITEM_BYTES, rounded
from forge._check.plain import Inputs, visible

FLOPS_PER_PAIR = {"forward": 4, "backward": 10}  # times head dim: 2 and 5 products, 2 flops a term


@dataclass(frozen=True)
class Case:
    """One attention problem; queries stand at the end of the keys."""

    name: str
    B: int
    Tq: int
    Tk: int
    H: int
    Hkv: int
    hd: int
    causal: bool = True
    window: int | None = None  # keys a query sees, itself included; causal only
    softcap: float | None = None
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        """The factor on every score."""
        return float(self.hd**-0.5)

    @property
    def options(self) -> dict[str, Any]:
        """The options as forge takes them."""
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    @property
    def is_decode(self) -> bool:
        """Whether one query a head reads all keys: bound by memory, not by arithmetic."""
        return self.Tq == 1

    @property
    def label(self) -> str:
        """What the case is, in words."""
        heads = f"H {self.H}" if self.Hkv == self.H else f"H {self.H}/{self.Hkv}"
        length = f"T {self.Tq}" if self.Tq == self.Tk else f"Tq {self.Tq}, Tk {self.Tk}"
        parts = [f"B {self.B}, {length}, {heads}, hd {self.hd}"]
        if self.window:
            parts.append(f"window {self.window}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        return ", ".join(parts)

    def mask(self) -> Array | None:
        """Boolean [Tq, Tk], true where the query sees the key; None where it sees every key."""
        seen = visible(1, self.Tq, self.Tk, self.options)[0]
        return None if seen.all() else seen

    def inputs(self, seed: int = 0) -> Inputs:
        """Normal values: q, dout [B, Tq, H, hd] and k, v [B, Tk, Hkv, hd], C-contiguous.

        In float32 arrays, whatever the dtype, which has these values.
        """
        rng = np.random.default_rng(seed)
        query = (self.B, self.Tq, self.H, self.hd)
        key = (self.B, self.Tk, self.Hkv, self.hd)
        q, k, v, dout = (
            rounded(rng.standard_normal(shape, dtype=np.float32), self.dtype)
            for shape in (query, key, key, query)
        )
        return Inputs(q, k, v, dout, options=self.options)

    def visible_pairs(self) -> int:
        """How many (query, key) pairs a head has to look at."""
        if not self.causal:
            return self.Tq * self.Tk
        most = self.window or self.Tk
        return sum(min(position + 1, most) for position in range(self.Tk - self.Tq, self.Tk))

    def gflop(self, mode: str) -> float:
        """Billions of operations over the visible pairs: what has to be done, whatever is done."""
        return FLOPS_PER_PAIR[mode] * self.B * self.H * self.hd * self.visible_pairs() / 1e9

    def kv_bytes(self) -> int:
        """Bytes of keys and values: what a decode step has to read."""
        return 2 * ITEM_BYTES[self.dtype] * self.B * self.Tk * self.Hkv * self.hd

    def modes(self, wanted: list[str]) -> list[str]:
        """Of the wanted modes, those that make sense: nobody trains on one query."""
        return [mode for mode in wanted if mode == "forward" or not self.is_decode]

    def miniature(self) -> Case:
        """A case small enough for float64 that has every feature of this one."""
        return replace(
            self,
            B=min(self.B, 2),
            Tq=1 if self.is_decode else 144,
            Tk=144,
            H=4,
            Hkv=max(1, 4 * self.Hkv // self.H),
            hd=min(self.hd, 32),
            window=min(self.window, 24) if self.window else None,
            softcap=2.0 if self.softcap else None,
        )


CASES = {
    case.name: case
    for case in (
        Case("128", 1, 128, 128, 8, 8, 64),
        Case("512g", 1, 512, 512, 8, 2, 64),
        Case("gpt2", 4, 512, 512, 12, 12, 64),
        Case("1k", 1, 1024, 1024, 8, 8, 64),
        Case("2k", 1, 2048, 2048, 8, 2, 64),
        Case("2k128", 1, 2048, 2048, 8, 2, 128),
        Case("4k128", 1, 4096, 4096, 4, 1, 128),
        Case("2kwin", 1, 2048, 2048, 8, 2, 64, window=256),
        Case("2kcap", 1, 2048, 2048, 8, 2, 64, softcap=50.0),
        Case("dec", 1, 1, 4096, 8, 8, 64),
        Case("decg", 1, 1, 4096, 32, 8, 128),
        Case("call", 1, 1, 16, 8, 8, 64),  # next to nothing to compute: what a call costs
        Case("call1", 1, 1, 1, 1, 1, 8),
    )
}
QUICK = ("128", "512g", "dec")


def parse_shape(text: str) -> Case:
    """A case by name, or as BxTxHxHkvxhd."""
    if text in CASES:
        return CASES[text]
    try:
        B, T, H, Hkv, hd = (int(part) for part in text.split("x"))
        if min(B, T, H, Hkv, hd) < 1 or H % Hkv:
            raise ValueError
    except ValueError:
        names = ", ".join(CASES)
        raise ValueError(f"shape must be BxTxHxHkvxhd or one of {names}, got {text!r}") from None
    return Case(text, B, T, T, H, Hkv, hd)


def variants(case: Case, causal: str) -> list[Case]:
    """The case with and without its causal mask, as --causal asks ("both", "on", "off")."""
    if case.is_decode or case.window or case.softcap:
        return [case] if causal != "off" else []
    wanted = {"both": (True, False), "on": (True,), "off": (False,)}[causal]
    return [replace(case, causal=value) for value in wanted]
