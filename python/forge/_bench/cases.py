"""The problems that are timed, their inputs and their cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge._arrays import Array
from forge._check.halves import ITEM_BYTES, rounded
from forge._check.plain import GRADIENTS, Inputs, visible
from forge._merge import packed

# Products of each (query, key) pair over hd and over hv channels.
HD_PRODUCTS = {"forward": 1, "backward": 3}
HV_PRODUCTS = {"forward": 1, "backward": 2}


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
    hv: int | None = None  # head dim of v; hd where it is not given
    sinks: bool = False  # one logit a head
    bias: str | None = None  # "row": [1, H, 1, Tk], as ALiBi's; "pairs": [1, H, Tq, Tk], as T5's
    kept: float | None = None  # the share of pairs that a random mask [1, 1, Tq, Tk] leaves
    packed: int | None = None  # sequences of equal length laid end to end

    @property
    def scale(self) -> float:
        """The factor on every score."""
        return float(self.hd**-0.5)

    @property
    def value_dim(self) -> int:
        """The head dim of v and of the result."""
        return self.hv or self.hd

    @property
    def options(self) -> dict[str, Any]:
        """The options as forge takes them, but those that are arrays of random values."""
        options = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        if self.packed:
            ends = np.arange(self.packed + 1) * (self.Tk // self.packed)
            options |= packed(ends, causal=self.causal, window=self.window)
        return options

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients that the backward gives; a bias of pairs is learned."""
        return (*GRADIENTS, "dbias") if self.bias == "pairs" else GRADIENTS

    @property
    def is_shaped(self) -> bool:
        """Whether anything but causal, window and softcap shapes the scores."""
        return bool(self.hv or self.sinks or self.bias or self.kept or self.packed)

    @property
    def is_decode(self) -> bool:
        """Whether one query a head reads all keys: bound by memory, not by arithmetic."""
        return self.Tq == 1

    @property
    def label(self) -> str:
        """What the case is, in words."""
        heads = f"H {self.H}" if self.Hkv == self.H else f"H {self.H}/{self.Hkv}"
        length = f"T {self.Tq}" if self.Tq == self.Tk else f"Tq {self.Tq}, Tk {self.Tk}"
        dims = f"hd {self.hd}" + (f"/{self.hv}" if self.hv else "")
        parts = [f"B {self.B}, {length}, {heads}, {dims}"]
        if self.window:
            parts.append(f"window {self.window}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.bias:
            parts.append({"row": "bias [1, H, 1, T]", "pairs": "bias [1, H, T, T]"}[self.bias])
        if self.kept:
            parts.append(f"random mask, {100 * self.kept:g} % seen")
        if self.packed:
            parts.append(f"{self.packed} sequences in one row")
        return ", ".join(parts)

    def mask(self) -> Array | None:
        """Boolean [Tq, Tk], true where the query sees the key; None where it sees every key."""
        seen = visible(1, self.Tq, self.Tk, self.options)[0]
        if self.kept:
            seen = seen & self._random_mask()[0, 0]
        return None if seen.all() else seen

    def _random_mask(self) -> Array:
        mask = np.random.default_rng(17).random((1, 1, self.Tq, self.Tk)) < (self.kept or 0)
        mask[..., : self.Tq, 0] = True  # every query sees a key
        return mask

    def inputs(self, seed: int = 0) -> Inputs:
        """Normal values: q [B, Tq, H, hd], k [B, Tk, Hkv, hd], v and dout with hv, C-contiguous.

        In float32 arrays, whatever the dtype, which has these values. The options are the case's,
        with its bias, mask and sinks.
        """
        rng = np.random.default_rng(seed)
        q, k, v, dout = (
            rounded(rng.standard_normal((self.B, *axes), dtype=np.float32), self.dtype)
            for axes in (
                (self.Tq, self.H, self.hd),
                (self.Tk, self.Hkv, self.hd),
                (self.Tk, self.Hkv, self.value_dim),
                (self.Tq, self.H, self.value_dim),
            )
        )
        options = self.options
        if self.bias:
            rows = self.Tq if self.bias == "pairs" else 1
            options["bias"] = rng.standard_normal((1, self.H, rows, self.Tk), dtype=np.float32)
        if self.kept:
            options["mask"] = self._random_mask()
        if self.sinks:
            options["sinks"] = rng.standard_normal(self.H, dtype=np.float32)
        return Inputs(q, k, v, dout, options=options)

    def visible_pairs(self) -> int:
        """How many (query, key) pairs a head has to look at."""
        mask = self.mask()
        return self.Tq * self.Tk if mask is None else int(mask.sum())

    def gflop(self, mode: str) -> float:
        """Billions of operations over the visible pairs: what has to be done, whatever is done."""
        channels = self.hd * HD_PRODUCTS[mode] + self.value_dim * HV_PRODUCTS[mode]
        return 2 * channels * self.B * self.H * self.visible_pairs() / 1e9

    def kv_bytes(self) -> int:
        """Bytes of keys and values: what a decode step has to read."""
        channels = self.hd + self.value_dim
        return ITEM_BYTES[self.dtype] * self.B * self.Tk * self.Hkv * channels

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
            hv=24 if self.hv else None,
            window=min(self.window, 24) if self.window else None,
            softcap=2.0 if self.softcap else None,
            packed=3 if self.packed else None,
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
        Case("2kmla", 1, 2048, 2048, 8, 8, 192, hv=128),
        Case("2ksink", 1, 2048, 2048, 64, 8, 64, window=128, sinks=True),
        Case("2kalibi", 1, 2048, 2048, 8, 8, 64, bias="row"),
        Case("1kt5", 1, 1024, 1024, 8, 8, 64, causal=False, bias="pairs"),
        Case("2kmask", 1, 2048, 2048, 8, 8, 64, causal=False, kept=0.5),
        Case("8x512", 1, 4096, 4096, 8, 2, 64, packed=8),
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
    if case.is_decode or case.window or case.softcap or case.is_shaped:
        return [case] if causal in ("both", "on" if case.causal else "off") else []
    wanted = {"both": (True, False), "on": (True,), "off": (False,)}[causal]
    return [replace(case, causal=value) for value in wanted]
