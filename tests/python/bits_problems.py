"""The problems of test_bits.py: each option and each pair of options, sizes around every tile and
split, memory layouts, rows that see no key, NaN and infinity."""

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

EVERY = slice(None)
NAN, INF = np.float32(np.nan), np.float32(np.inf)


def floats(text, shape):
    """Float32 in [-2, 2) with 24 random bits each, the same on any machine and any NumPy: a hash
    (SplitMix64) of the position, started from `text`. Products and sums of them round."""
    start = np.uint64(zlib.crc32(text.encode()) << 32)
    count = int(np.prod(shape))
    x = (np.arange(1, count + 1, dtype=np.uint64) + start) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
    whole = x.astype(np.int64) - (1 << 23)
    return (whole.astype(np.float32) * np.float32(2.0**-22)).reshape(shape)


@dataclass(frozen=True)
class Problem:
    name: str
    B: int = 1
    Tq: int = 67
    Tk: int = 67
    H: int = 2
    Hkv: int = 1
    hd: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"  # a name in LAYOUTS
    spread: float = 1.0  # of q; a power of two
    planted: tuple = ()  # (array, index, value): written over what the hash gives
    dlse: bool = False
    accumulate: bool = False  # gradients are added to other numbers
    outputs: str = "new"  # or "strided": handed in, heads before rows

    @property
    def products(self):
        """Of a query element with a key element, if no pair is masked."""
        return self.B * self.H * self.Tq * self.Tk * self.hd

    def inputs(self):
        """Arrays as forge takes them, their layout included."""
        q_shape = (self.B, self.Tq, self.H, self.hd)
        k_shape = (self.B, self.Tk, self.Hkv, self.hd)
        shapes = {"q": q_shape, "k": k_shape, "v": k_shape, "dout": q_shape}
        if self.dlse:
            shapes["dlse"] = (self.B, self.H, self.Tq)
        arrays = {"dlse": None}
        arrays |= {name: floats(f"{self.name}: {name}", shape) for name, shape in shapes.items()}
        arrays["q"] *= np.float32(self.spread)
        for name, index, value in self.planted:
            arrays[name][index] = value
        lay_out = LAYOUTS[self.layout]
        for name in ("q", "k", "v", "dout"):
            arrays[name] = lay_out(arrays[name])
        return SimpleNamespace(**arrays)

    def call_options(self):
        options = {
            name: np.array(value) if isinstance(value, list) else value
            for name, value in self.options.items()
        }
        if self.layout == "flat":
            options |= {"num_heads": self.H, "num_kv_heads": self.Hkv}
        return options


def _between(x):
    """A slice of a wider array, as q, k and v of packed projections are."""
    wide = np.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), NAN)
    wide[:, :, 2:-1] = x
    return wide[:, :, 2:-1]


LAYOUTS = {
    "contiguous": lambda x: x,
    "between others": _between,
    "heads first": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "backwards": lambda x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "one sequence": lambda x: np.broadcast_to(x[:1], x.shape),
    "one row": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one head": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    "channels apart": lambda x: np.repeat(x, 2, axis=3)[..., ::2],
    "flat": lambda x: x.reshape(*x.shape[:2], -1),
}


def positions(options, Tq, Tk):
    """The options, with a query_offset where key_end makes one necessary."""
    if "key_end" in options and options.keys() & {"causal", "window"}:
        return {"query_offset": Tk - Tq, **options}
    return options


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": 19},
    "two-sided window": {"window": (11, 6)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.7},
    "offset": {"query_offset": 40},
    "offsets": {"query_offset": [13, 95]},
    "keys": {"key_start": 5, "key_end": 131},
    "keys of each": {"key_start": [0, 33], "key_end": [100, 150]},
}
ALL_OPTIONS = {
    "causal": True, "window": (70, 5), "softcap": 2.0, "scale": 0.3,
    **OPTIONS["offsets"], **OPTIONS["keys of each"],
}  # fmt: skip
TILES = {"B": 2, "Tq": 70, "Tk": 150, "H": 4, "Hkv": 2, "hd": 20}
DECODE = {"B": 2, "Tq": 3, "Tk": 300, "H": 4, "Hkv": 2, "hd": 40}


def option_problems():
    yield Problem("no options", **TILES)
    yield Problem("decode, no options", **DECODE)
    for name, options in OPTIONS.items():
        yield Problem(name, options=positions(options, 70, 150), **TILES)
        yield Problem(f"decode, {name}", options=positions(options, 3, 300), **DECODE)
    for (one, first), (other, second) in itertools.combinations(OPTIONS.items(), 2):
        if first.keys() & second.keys():
            continue
        options = positions({**first, **second}, 70, 150)
        yield Problem(f"{one}, {other}", options=options, **TILES)
    yield Problem("all options", options=ALL_OPTIONS, dlse=True, **TILES)
    yield Problem("decode, all options", options=ALL_OPTIONS, dlse=True, **DECODE)


def other_values():
    limit = 2**63 - 1
    values = {
        "window 1": {"window": 1},
        "window (0, 0)": {"window": (0, 0)},
        "window (-1, 3)": {"window": (-1, 3)},
        "window (30, -1)": {"window": (30, -1), "causal": True},
        "window of all": {"window": limit},
        "window (limit, limit)": {"window": (limit, limit), "query_offset": -limit - 1},
        "scale 0": {"scale": 0.0},
        "softcap 1e-30": {"softcap": 1e-30},
        "softcap 1e30": {"softcap": 1e30},
        "softcap 50, scale 4": {"softcap": 50.0, "scale": 4.0},
    }
    for name, options in values.items():
        yield Problem(name, Tq=80, Tk=80, Hkv=2, options=options)
        yield Problem(f"decode, {name}", Tq=4, Tk=260, Hkv=2, options=options)


def size_problems():
    causal = {"causal": True}
    for hd in (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129,
               160, 192, 224, 255, 256, 257, 300, 512):  # fmt: skip
        yield Problem(f"head size {hd}", Tq=101, Tk=131, options=causal, hd=hd)
        if hd in (1, 3, 8, 31, 40, 64, 65, 80, 96, 128, 129, 224, 256, 300):
            yield Problem(f"decode, head size {hd}", Tq=2, Tk=277, H=4, Hkv=2, hd=hd)
    for T in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 96, 97, 128, 129, 133,
              192, 193, 257, 385, 513, 600):  # fmt: skip
        yield Problem(f"T {T}", Tq=T, Tk=T, Hkv=2, options=causal if T % 2 else {})
    for Tq, Tk in ((1, 5), (5, 1), (17, 100), (100, 17), (33, 47), (40, 129), (130, 40), (300, 61)):
        yield Problem(f"{Tq} queries, {Tk} keys", B=2, Tq=Tq, Tk=Tk, H=3, Hkv=3, hd=24)
    for H, Hkv in ((1, 1), (3, 3), (4, 1), (6, 2), (8, 8), (7, 1), (16, 4)):
        yield Problem(f"{H} heads over {Hkv}", B=2, Tq=50, Tk=60, H=H, Hkv=Hkv, options=causal)
    yield Problem("T 600, window 130", Tq=600, Tk=600, hd=32, options={"window": (100, 30)})
    yield Problem("T 530, 4 heads over 1", Tq=530, Tk=530, H=4, hd=20, options=causal)
    yield Problem("T 1500", Tq=1500, Tk=1500, H=1, hd=40, options=causal)
    yield Problem("T 1500, all options", Tq=1500, Tk=1500, hd=64, dlse=True, options={
        "causal": True, "window": 400, "softcap": 3.0, "scale": 0.2, "query_offset": [-20],
        "key_start": [50], "key_end": [1400]})  # fmt: skip
    yield Problem("few rows, 3000 keys", Tq=25, Tk=3000, H=1, hd=48, options=causal)
    yield Problem("60 rows, 2100 keys", Tq=30, Tk=2100, hd=130, options={"window": 1500})


def decode_problems():
    causal = {"causal": True}
    for Tq in (*range(1, 10), 15, 16, 17):
        yield Problem(f"decode, {Tq} queries", Tq=Tq, Tk=700, H=1, hd=33, options=causal)
    for Tk in (63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000, 2049, 4000):
        yield Problem(f"decode, {Tk} keys", Tq=1, Tk=Tk, hd=64)
    for H, Hkv in ((1, 1), (8, 8), (8, 1), (12, 4), (32, 4), (40, 40), (16, 1), (17, 1)):
        yield Problem(f"decode, {H} heads over {Hkv}", Tq=1, Tk=400, H=H, Hkv=Hkv, hd=32)
    yield Problem("decode, caches of different lengths", B=5, Tq=2, Tk=640, H=8, Hkv=2, hd=64,
                  options={"causal": True, "query_offset": [10, 638, 300, -1, 63],
                           "key_end": [12, 640, 302, 1, 65]})  # fmt: skip
    yield Problem("decode, window 200 of 3000 keys", Tq=4, Tk=3000, hd=80,
                  options={"window": 200})  # fmt: skip
    yield Problem("decode, 17000 keys", Tq=1, Tk=17000, H=1, hd=8)
    # The unfinished rows of all sequences together take more than the forward sets aside.
    yield Problem("decode, 66 sequences", B=66, Tq=1, Tk=128, H=32, Hkv=2, hd=500,
                  layout="one sequence")  # fmt: skip


def layout_problems():
    for layout in LAYOUTS:
        if layout == "contiguous":
            continue
        yield Problem(layout, B=2, Tq=60, Tk=75, H=6, Hkv=3, hd=33, layout=layout, dlse=True,
                      options={"causal": True, "window": 40})  # fmt: skip
        yield Problem(f"decode, {layout}", B=2, Tq=3, Tk=200, H=6, Hkv=3, hd=32, layout=layout)
    sizes = {"B": 2, "Tq": 70, "Tk": 70, "H": 4, "Hkv": 2, "options": {"causal": True}}
    few = {**DECODE, "Tk": 900}
    yield Problem("dlse", dlse=True, **sizes)
    yield Problem("accumulate", accumulate=True, **sizes)
    yield Problem("strided outputs", outputs="strided", **sizes)
    yield Problem("accumulate, strided outputs", accumulate=True, outputs="strided", **sizes)
    yield Problem("decode, dlse, accumulate", dlse=True, accumulate=True, **few)
    yield Problem("decode, strided outputs", outputs="strided", hd=33, Tq=2, Tk=300)


def dead_row_problems():
    values = {
        "queries before the keys": {"causal": True, "query_offset": -30},
        "queries past the keys": {"window": 10, "query_offset": 55},
        "no keys for one": {"key_start": [20, 0], "key_end": [20, 75]},
        "no query sees a key": {"causal": True, "query_offset": -200},
        "gap between": {"causal": True, "window": 5, "query_offset": [-8, 70], "key_start": 3,
                        "key_end": 68},
    }  # fmt: skip
    planted = (("v", (1, 5), NAN), ("k", (0, 73), INF), ("dout", (0, 3), NAN), ("q", (0, 2), INF))
    for name, options in values.items():
        few = {**options, "key_end": [20, 130]} if name == "no keys for one" else options
        yield Problem(name, B=2, Tq=60, Tk=75, Hkv=2, options=options, dlse=True, accumulate=True)
        yield Problem(f"{name}, NaN", B=2, Tq=60, Tk=75, H=4, options=options,
                      planted=planted)  # fmt: skip
        yield Problem(f"decode, {name}", B=2, Tq=5, Tk=130, Hkv=2, options=few, hd=24)
    yield Problem("more queries than keys", Tq=90, Tk=30, options={"causal": True})
    yield Problem("no keys", Tq=20, Tk=0, accumulate=True)
    yield Problem("no queries", Tq=0, Tk=20)


def value_problems():
    """NaN, infinity, huge, tiny and equal scores. Row i sees keys i - 24 to i + 10 of 90."""
    sizes = {"B": 2, "Tq": 90, "Tk": 90, "H": 4, "Hkv": 2, "options": {"window": (24, 10)}}
    few = {"B": 2, "Tq": 4, "Tk": 260, "H": 4, "Hkv": 2, "options": {"window": 150}}
    planted = {
        "NaN in q": ("q", (0, 2, 1, 3), NAN),
        "NaN in k": ("k", (0, 70, 1, 3), NAN),
        "NaN in v": ("v", (1, 70, 0, 5), NAN),
        "infinity in q": ("q", (1, 3, 2, 0), INF),
        "infinity in k": ("k", (0, 50, 0, 7), INF),
        "-infinity in k": ("k", (0, 51, 0, 7), -INF),
        "infinity in v": ("v", (0, EVERY, 1, 2), INF),
        "NaN in dout": ("dout", (0, 1, 1, 3), NAN),
        "infinity in dout": ("dout", (1, 0, 1, 3), INF),
        "infinity in dlse": ("dlse", (0, 1, 2), INF),
    }
    for name, plant in planted.items():
        yield Problem(name, planted=(plant,), dlse=True, **sizes)
        yield Problem(f"decode, {name}", planted=(plant,), dlse=True, **few)
    # Scores of -infinity for some keys: the first tiles, or all of them.
    for name, keys in (("scores of -infinity first", slice(0, 140)), ("all -infinity", EVERY)):
        minus = (("q", (..., 0), 1), ("k", (EVERY, keys, EVERY, 0), -INF))
        yield Problem(name, Tq=40, Tk=300, planted=minus)
        yield Problem(f"decode, {name}", Tq=2, Tk=300, planted=minus)
    for name, spread in (("scores to 1e4", 2.0**12), ("scores to 1e9", 2.0**28),
                         ("scores to 1e38", 2.0**124), ("tiny scores", 2.0**-130)):  # fmt: skip
        yield Problem(name, spread=spread, options={"causal": True}, Tq=140, Tk=140)
        yield Problem(f"decode, {name}", spread=spread, Tq=2, Tk=260)
    equal = (("q", EVERY, 1024), ("k", EVERY, 1024))
    yield Problem("equal scores", planted=equal, Tq=140, Tk=140, options={"causal": True})
    yield Problem("decode, equal scores", planted=equal, Tq=2, Tk=260)
    zeros = (("k", EVERY, -0.0), ("v", EVERY, -0.0), ("dout", EVERY, -0.0))
    yield Problem("negative zeros", planted=zeros, Tq=60)
    yield Problem("decode, negative zeros", planted=zeros, Tq=2, Tk=260)


PROBLEMS = (
    *option_problems(),
    *other_values(),
    *size_problems(),
    *decode_problems(),
    *layout_problems(),
    *dead_row_problems(),
    *value_problems(),
)
