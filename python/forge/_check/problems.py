"""The problems of ``python -m forge check``: each option alone, odd sizes, and all together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forge._arrays import Array
from forge._check.halves import for_call, rounded, stored
from forge._check.plain import Inputs, visible

KERNELS = ("fused", "materialized")


@dataclass(frozen=True)
class Problem:
    """Sizes, options, and how the arrays lie in memory."""

    name: str
    B: int = 2
    Tq: int = 67
    Tk: int = 67
    H: int = 4
    Hkv: int = 4
    hd: int = 32
    hv: int | None = None
    """Head dim of v; hd by default."""
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"
    """``"packed"``: q, k, v sliced from one array; ``"strided"``: heads before rows, rows from last
    to first; ``"flat"``: 3-D, heads side by side."""
    spread: float = 1.0
    """What q is multiplied by."""
    dlse: bool = False
    hidden_nan: bool = False
    """Keys that nobody sees, and queries that see none, hold NaN: it may reach nothing."""
    dtype: str = "float32"
    float32_query: bool = False
    """q and dout are float32 over k and v of ``dtype``."""

    @property
    def call_options(self) -> dict[str, Any]:
        """Return the options as forge.attention takes them."""
        heads = {"num_heads": self.H, "num_kv_heads": self.Hkv} if self.layout == "flat" else {}
        return {**self.options, **heads}

    @property
    def in_half(self) -> bool:
        return self.dtype != "float32"

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the families that take it."""
        return KERNELS[:1] if self.in_half else KERNELS

    def dtype_of(self, name: str) -> str:
        """Return the element type of an input or a result."""
        if name in ("k", "v", "dk", "dv"):
            return self.dtype
        if name in ("q", "dout", "out", "dq"):
            return "float32" if self.float32_query else self.dtype
        return "float32"

    def inputs(self) -> Inputs:
        """Return float32 arrays, the same ones each time; 4-D whatever the layout.

        Of a problem in half precision they hold values that it has.
        """
        rng = np.random.default_rng([ord(letter) for letter in self.name])

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape, dtype=np.float32)

        hv = self.hd if self.hv is None else self.hv
        q, dout = (normal(self.B, self.Tq, self.H, width) for width in (self.hd, hv))
        k, v = (normal(self.B, self.Tk, self.Hkv, width) for width in (self.hd, hv))
        q *= np.float32(self.spread)
        dlse = normal(self.B, self.H, self.Tq) if self.dlse else None
        if self.hidden_nan:
            seen = visible(self.B, self.Tq, self.Tk, self.options)
            q[~seen.any(2)] = dout[~seen.any(2)] = np.nan
            k[~seen.any(1)] = v[~seen.any(1)] = np.nan
        given = {"q": q, "k": k, "v": v, "dout": dout}
        q, k, v, dout = (rounded(x, self.dtype_of(name)) for name, x in given.items())
        q, k, v = self._laid_out(q, k, v)
        return Inputs(q, k, v, dout, dlse, self.options)

    def call_arrays(self, inputs: Inputs) -> list[Array]:
        """Return q, k, v and dout as the public functions take them."""
        arrays = [inputs.q, inputs.k, inputs.v, inputs.dout]
        if self.in_half:
            q, k, v, dout = (
                stored(x, self.dtype_of(name))
                for name, x in zip(("q", "k", "v", "dout"), arrays, strict=True)
            )
            arrays = [*self._laid_out(q, k, v), dout]
        if self.layout == "flat":
            arrays = [x.reshape(*x.shape[:2], -1) for x in arrays]
        return [for_call(x) for x in arrays]

    def _laid_out(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        if self.layout == "packed":
            packed = np.concatenate([q, k, v], axis=2)
            q, k, v = np.split(packed, (self.H, self.H + self.Hkv), axis=2)
        elif self.layout == "strided":
            backwards = (np.ascontiguousarray(x.swapaxes(1, 2)[:, :, ::-1]) for x in (q, k, v))
            q, k, v = (x[:, :, ::-1].swapaxes(1, 2) for x in backwards)
        return q, k, v


_RNG = np.random.default_rng(15)


def _bias(*axes: int) -> Array:
    bias = _RNG.standard_normal(axes, dtype=np.float32)
    return np.where(_RNG.random(axes) < 0.05, np.float32(-np.inf), bias)


def _mask(*axes: int) -> Array:
    return _RNG.random(axes) < 0.7


def _sinks(*axes: int) -> Array:
    return 2 * _RNG.standard_normal(axes, dtype=np.float32)


# Three sequences end to end, and for the second row of the batch runs in any order.
_RUNS = {
    "key_start": np.stack([np.repeat([0, 20, 31], [20, 11, 36]), _RNG.integers(0, 40, 67)]),
    "key_end": np.stack([np.repeat([20, 31, 67], [20, 11, 36]), _RNG.integers(30, 68, 67)]),
}

_ALL = {
    "causal": True,
    "window": 40,
    "softcap": 8.0,
    "scale": 0.3,
    "query_offset": np.array([60, 11]),
    "key_start": np.array([0, 7]),
    "key_end": np.array([100, 131]),
}

PROBLEMS = (
    Problem("no options"),
    Problem("causal", options={"causal": True}),
    Problem("causal, window 17", options={"causal": True, "window": 17}),
    Problem("window (9, 3)", options={"window": (9, 3)}),
    Problem("softcap 5", options={"softcap": 5.0}, spread=4),
    Problem("scale -0.3", options={"scale": -0.3}),
    Problem("8 heads over 2", H=8, Hkv=2, options={"causal": True}),
    Problem("4 heads over 1", H=4, Hkv=1),
    Problem(
        "query_offset",
        Tk=131,
        options={"causal": True, "window": 30, "query_offset": np.array([64, 0])},
    ),
    Problem(
        "key_start, key_end; NaN in the padding",
        Tk=90,
        options={"key_start": np.array([0, 33]), "key_end": np.array([50, 90])},
        hidden_nan=True,
    ),
    Problem(
        "rows that see no key; NaN in them",
        options={"causal": True, "window": 20, "query_offset": np.array([-5, 40])},
        hidden_nan=True,
    ),
    Problem("dlse", options={"causal": True}, dlse=True),
    Problem("slices of packed QKV", Hkv=2, options={"causal": True}, layout="packed"),
    Problem("negative strides", options={"causal": True}, layout="strided"),
    Problem("3-D arrays", Hkv=2, options={"causal": True}, layout="flat"),
    Problem("logits to 1e4", spread=2e3, options={"causal": True}),
    Problem("1 query, 300 keys", Tq=1, Tk=300, Hkv=2, hd=64, options={"causal": True}),
    Problem("5 queries, 65 keys", Tq=5, Tk=65, Hkv=2, hd=64, options={"causal": True}),
    Problem("head dim 1", Tq=33, Tk=130, hd=1),
    Problem("head dim 5", Tq=33, Tk=130, hd=5),
    Problem("head dim 80", Tq=129, Tk=97, H=2, Hkv=1, hd=80),
    Problem("head dim 128", B=1, Tq=64, Tk=128, H=2, Hkv=2, hd=128),
    Problem("head dim 256", B=1, Tq=31, Tk=50, H=2, Hkv=2, hd=256),
    Problem(
        "T 513, window 200",
        B=1,
        Tq=513,
        Tk=513,
        H=2,
        Hkv=1,
        options={"causal": True, "window": 200},
    ),
    Problem("all together", Tk=131, H=6, Hkv=2, hd=48, options=_ALL, layout="strided", dlse=True),
    Problem("bias", Hkv=2, options={"causal": True, "bias": _bias(2, 4, 67, 67)}),
    Problem("bias for every query alike", options={"softcap": 5.0, "bias": _bias(1, 4, 1, 67)}),
    Problem("mask", Hkv=1, options={"mask": _mask(1, 1, 67, 67)}),
    Problem("sinks", Hkv=2, options={"causal": True, "window": 20, "sinks": _sinks(4)}, dlse=True),
    Problem("a run of keys for each query", options=_RUNS),
    Problem("head dims 48 and 20", Hkv=2, hd=48, hv=20, options={"causal": True}),
    Problem(
        "bias, mask and sinks for 3 queries, 300 keys",
        Tq=3,
        Tk=300,
        Hkv=2,
        hv=64,
        options={"bias": _bias(2, 1, 3, 300), "mask": _mask(2, 4, 1, 300), "sinks": _sinks(2, 4)},
    ),
    Problem(
        "runs, bias, mask, sinks and head dims 80 and 48",
        H=6,
        Hkv=3,
        hd=80,
        hv=48,
        options={
            **_RUNS,
            "softcap": 8.0,
            "bias": _bias(1, 6, 67, 67),
            "mask": _mask(2, 1, 67, 67),
            "sinks": _sinks(2, 6, 67),
        },
        dlse=True,
    ),
)

_IN_HALF = (
    "causal",
    "window (9, 3)",
    "8 heads over 2",
    "key_start, key_end; NaN in the padding",
    "slices of packed QKV",
    "1 query, 300 keys",
    "head dim 80",
    "T 513, window 200",
    "runs, bias, mask, sinks and head dims 80 and 48",
    "all together",
)
_OVER_HALF = ("causal", "1 query, 300 keys", "all together")


def _in_half(dtype: str) -> list[Problem]:
    return [
        *(
            replace(p, name=f"{dtype}: {p.name}", dtype=dtype)
            for p in PROBLEMS
            if p.name in _IN_HALF
        ),
        *(
            replace(p, name=f"float32 over {dtype}: {p.name}", dtype=dtype, float32_query=True)
            for p in PROBLEMS
            if p.name in _OVER_HALF
        ),
    ]


# The fused family's alone.
HALF_PROBLEMS = (*_in_half("float16"), *_in_half("bfloat16"))

# On these the four materialized kernels run one by one. None has NaN: d_row is not masked.
SINGLE_KERNEL_PROBLEMS = tuple(
    problem
    for problem in PROBLEMS
    if problem.name
    in (
        "no options",
        "softcap 5",
        "slices of packed QKV",
        "head dim 80",
        "runs, bias, mask, sinks and head dims 80 and 48",
        "all together",
    )
)
