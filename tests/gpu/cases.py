"""The problems that run.py checks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpu import HEAD_DIMS, Call, Gpu, stored, widened
from oracle import Problem, distance, random_inputs, visible

GUARD = np.float32(7.25)  # stands around outputs
UNITS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # that a result is rounded by
SMALLEST = {"float32": 0.0, "float16": 2.0**-24, "bfloat16": 2.0**-133}


@dataclass
class Case:
    """Sizes and options of one attention problem."""

    name: str
    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    family: str = "fused"  # "materialized", "decode"
    layout: str = "plain"  # "packed", "reversed", "broadcast"
    element: str = "float32"  # "float16", "bfloat16": the type of the arrays,
    cache: bool = False  # or of k and v alone
    spread: float = 1.0
    dlse: bool = False
    accumulate: bool = False
    poison: tuple[str, int] | None = None  # an array and a row of it that holds NaN
    minus_inf: slice | None = None  # keys whose scores are -inf
    repeated: bool = False  # also compared over many runs

    def inputs(self, poisoned: bool = True) -> tuple[np.ndarray, ...]:
        """Return q, k, v, dout and dlse."""
        rng = np.random.default_rng(abs(hash_of(self.name)))
        q, k, v, dout = random_inputs(rng, spread=self.spread, **self.sizes)
        if self.minus_inf and poisoned:
            q[..., 0], k[:, self.minus_inf, :, 0] = 1, -np.inf
        if self.poison and poisoned:
            array, row = self.poison
            {"q": q, "k": k, "v": v, "dout": dout}[array][:, row, :, ::3] = np.nan
        q, dout = (stored(x, self.element_of("q")) for x in (q, dout))
        k, v = (stored(x, self.element) for x in (k, v))
        if self.layout == "packed" and q.shape == k.shape:
            packed = np.stack([q, k, v, dout], axis=2).copy()
            q, k, v, dout = (packed[:, :, n] for n in range(4))
        elif self.layout == "reversed":
            q, k, v, dout = (x[:, ::-1].copy()[:, ::-1] for x in (q, k, v, dout))
        elif self.layout == "broadcast":
            k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
        B, Tq, H, _ = q.shape
        dlse = rng.standard_normal((B, H, Tq)).astype(np.float32) if self.dlse else None
        return q, k, v, dout, dlse

    def element_of(self, name: str) -> str:
        """Return the element type of an array or a result."""
        if name in ("lse", "kept") or (self.cache and name in ("q", "out", "dq")):
            return "float32"
        return self.element

    def run(self, gpu: Gpu, inputs: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
        """Return out, lse and the gradients in float32, and o as the backward reads it."""
        q, k, v, dout, dlse = inputs
        materialized = self.family == "materialized"
        room = 4 if self.layout == "plain" else 3
        out = surrounded(q.shape, room)
        rounded = surrounded(q.shape, room, q.dtype) if q.itemsize == 2 else None
        dq, dk, dv = (surrounded(x.shape, room, x.dtype) for x in (q, k, v))
        if self.accumulate or materialized:
            for x in (dq, dk, dv):
                x[...] = held(1 if self.accumulate else 0, x.dtype)
        with Call(gpu, q, k, v, **self.options) as call:
            if materialized:
                call.materialized_forward(out)
            else:
                call.fused_forward(out, rounded, decode=self.family == "decode")
            call.gradients(dout, dlse, dq=dq, dk=dk, dv=dv)
            if materialized:
                call.materialized_backward()
            else:
                call.fused_backward(self.accumulate)
            row_max = call.fetch_raw("RowMax", call.rows)
            row_sum = call.fetch_raw("RowSum", call.rows)
            results = {"out": call.fetch(call.out)}
            if call.rounded is not None:
                results |= {"kept": results["out"], "out": call.fetch(call.rounded)}
            results |= {name: call.fetch(bound) for name, bound in call.results.items()}
        for name, x in results.items():
            guards = (x.base == held(GUARD, x.dtype)).sum()
            assert guards >= x.base.size - x.size, f"{name}: wrote beside its rows"
        results = {name: widened(x) for name, x in results.items()}
        with np.errstate(divide="ignore"):
            results["lse"] = row_max + np.log(row_sum)
        return {
            name: x - 1 if name[0] == "d" and self.accumulate else x for name, x in results.items()
        }

    def check(self, gpu: Gpu) -> str:
        """Compare with float64; the largest error as a part of its bound, array by array."""
        inputs = self.inputs()
        results = self.run(gpu, inputs)
        with np.errstate(all="ignore"):
            wide = [x if x is None else widened(x) for x in inputs]
            plain = [x if x is None else widened(x) for x in self.inputs(poisoned=False)]
            problem = Problem(*plain, **self.options)
            family = "materialized" if self.family == "materialized" else "fused"
            if self.accumulate:  # 1 + x - 1 rounds
                results = {n: x for n, x in results.items() if n in ("dq", "dk", "dv")}
            odd = self.poison or self.minus_inf
            truth = row_by_row(*wide, **self.options) if odd else {}
            shares = {}
            for name, got in results.items():
                exact = "out" if name == "kept" else name
                want = truth[exact] if truth else getattr(problem.exact, exact)
                bound = problem.tolerance(exact, family) + (2.0**-22 if self.accumulate else 0)
                shares[name] = self.share_of(name, got, want, bound)
        return ", ".join(f"{name} {share:.2f}" for name, share in shares.items())

    def share_of(self, name: str, got: np.ndarray, want: np.ndarray, bound: float) -> float:
        """Return the largest error as a part of what an element may be off by: the bound, and in
        half precision what rounding it once adds."""
        element = self.element_of(name)
        if element == "float32":
            error, allowed = distance(got, want), bound
            share = error / bound if bound else float(error > 0)
        else:
            whole = np.where(np.isfinite(want), np.abs(want + (1 if self.accumulate else 0)), 0)
            allowed = UNITS[element] * whole + SMALLEST[element] / 2 + bound
            assert (np.isnan(got) == np.isnan(want)).all(), f"{name}: NaN in other places"
            share = float(
                np.nanmax(np.where(got == want, 0, np.abs(got - want)) / allowed, initial=0)
            )
        assert share <= 1, f"{name}: error is {share:.3g} of its bound"
        return share

    def repeat(self, gpu: Gpu, runs: int) -> str:
        """Compare the bits of all results over many runs."""
        inputs = self.inputs()
        first = self.run(gpu, inputs)
        for number in range(1, runs):
            for name, x in self.run(gpu, inputs).items():
                same = np.array_equal(x.view(np.uint32), first[name].view(np.uint32))
                assert same, f"{name} differs in run {number + 1}"
        return f"{', '.join(first)}: equal"


def row_by_row(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, dlse: None, **options: Any
) -> dict[str, np.ndarray]:
    """Return the float64 answer where each row touches the keys that it sees and no others, so that
    NaN goes where it should. One query head a key head, no GQA."""
    softcap = options.get("softcap")
    B, T, H, hd = q.shape
    mask = {n: x for n, x in options.items() if n not in ("softcap", "scale")}
    seen = visible(B, T, k.shape[1], **mask)
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    out, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
    lse = np.full((B, H, T), -np.inf)
    for b, i, h in np.ndindex(B, T, H):
        keys = np.flatnonzero(seen[b, i])
        if not len(keys):
            continue
        at = (b, keys, h)
        x = k[at] @ q[b, i, h] / np.sqrt(hd)
        s = softcap * np.tanh(x / softcap) if softcap else x
        if np.isneginf(s).all():  # dead, as a row that sees no key
            continue
        e = np.exp(s - s.max())
        p = e / e.sum()
        lse[b, h, i] = s.max() + np.log(e.sum())
        out[b, i, h] = p @ v[at]
        ds = p * (v[at] @ dout[b, i, h] - out[b, i, h] @ dout[b, i, h])
        ds = ds * (1 - (s / softcap) ** 2 if softcap else 1) / np.sqrt(hd)
        dq[b, i, h] = ds @ k[at]
        dk[at] += ds[:, None] * q[b, i, h]
        dv[at] += p[:, None] * dout[b, i, h]
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def hash_of(name: str) -> int:
    """Return a seed that is the same in every process."""
    return sum((n + 1) * ord(letter) for n, letter in enumerate(name))


def held(number: float, dtype: Any) -> np.generic:
    """Return a number as an array of the type has it; uint16 is bfloat16."""
    return stored(np.float32([number]), "bfloat16" if dtype == np.uint16 else np.dtype(dtype).name)[
        0
    ]


def surrounded(shape: tuple[int, ...], room: int, dtype: Any = np.float32) -> np.ndarray:
    """Return an output of NaN that lies among guards: rows and heads with room between them.

    With a room of 4 rows are aligned as those of an array of its own; with 3 they are not.
    """
    B, T, heads, hd = shape
    whole = np.full((B, T, 2 * heads, hd + 2 * room), held(GUARD, dtype))
    inner = whole[:, :, ::2, room : room + hd]
    inner[...] = held(np.nan, dtype)
    return inner


def grid(T: int, hd: int, **more: Any) -> dict[str, int]:
    """Return sizes with two heads."""
    return {"B": 1, "Tq": T, "H": 2, "hd": hd} | more


def option_cases(T: int, hd: int) -> Iterator[Case]:
    """Every option at one size."""
    size = f"hd {hd}, T {T}"
    yield Case(f"{size}", grid(T, hd))
    yield Case(f"{size}, causal", grid(T, hd), {"causal": True}, repeated=True)
    yield Case(f"{size}, causal, window 256, GQA 4", grid(T, hd, H=4, Hkv=1),
               {"causal": True, "window": 256}, repeated=T <= 1024)  # fmt: skip
    yield Case(f"{size}, softcap 20, window (100, 30)", grid(T, hd),
               {"softcap": 20.0, "window": (100, 30)}, spread=3.0)  # fmt: skip


def odd_cases(hd: int) -> Iterator[Case]:
    """Sizes that fill no tile, other alignments, layouts, options that rarely meet."""
    yield Case(f"hd {hd}, Tq 77, Tk 333, causal", grid(77, hd, Tk=333), {"causal": True}, dlse=True)
    yield Case(f"hd {hd}, Tq 333, Tk 77, causal: dead rows", grid(333, hd, Tk=77), {"causal": True})
    yield Case(f"hd {hd}, T 129, GQA 8, softcap, offset", grid(129, hd, H=8, Hkv=1, B=2),
               {"causal": True, "softcap": 5.0, "query_offset": [3, -40], "key_start": [5, 0],
                "key_end": [101, 97]}, dlse=True)  # fmt: skip
    yield Case(f"hd {hd}, T 65, packed, accumulate", grid(65, hd), {"window": 9}, layout="packed",
               accumulate=True)  # fmt: skip
    yield Case(
        f"hd {hd}, T 97, reversed rows", grid(97, hd, B=2), {"causal": True}, layout="reversed"
    )
    yield Case(f"hd {hd}, T 70, k and v broadcast", grid(70, hd, B=3), layout="broadcast")
    yield Case(f"hd {hd}, T 50, scale 0", grid(50, hd), {"scale": 0.0})
    yield Case(f"hd {hd}, T 50, scale -0.3", grid(50, hd), {"scale": -0.3, "causal": True})
    for array in ("q", "k", "v", "dout"):
        yield Case(f"hd {hd}, T 90, NaN in a row of {array}", grid(90, hd),
                   {"causal": True, "window": 20}, poison=(array, 44))  # fmt: skip
    yield Case(f"hd {hd}, T 120, scores of -inf first", grid(120, hd), minus_inf=slice(0, 70))
    yield Case(f"hd {hd}, T 120, scores of -inf, whole rows", grid(120, hd), {"causal": True},
               minus_inf=slice(0, 70))  # fmt: skip
    yield Case(f"hd {hd}, T 90, logits to 1e4", grid(90, hd), {"causal": True}, spread=3e3)
    yield Case(f"hd {hd}, T 1", grid(1, hd, Tk=1), {"causal": True})


def decode_cases(hd: int) -> Iterator[Case]:
    """Few queries."""
    for Tq, Tk, H in ((1, 4000, 8), (3, 700, 2), (8, 20000, 4), (1, 1, 1)):
        sizes = grid(Tq, hd, Tk=Tk, H=H, Hkv=1, B=2)
        yield Case(f"decode hd {hd}, Tq {Tq}, Tk {Tk}, GQA {H}", sizes, {"causal": True},
                   family="decode", repeated=Tk == 4000)  # fmt: skip
    yield Case(f"decode hd {hd}, window, softcap, dead row", grid(4, hd, Tk=3000, H=2),
               {"causal": True, "window": 300, "softcap": 30.0, "query_offset": -2},
               family="decode")  # fmt: skip
    yield Case(f"decode hd {hd}, NaN in a key", grid(4, hd, Tk=900), {"causal": True},
               family="decode", poison=("k", 898))  # fmt: skip


def half_cases(hd: int, element: str) -> Iterator[Case]:
    """Half precision: odd sizes, options, layouts, NaN, decode, several runs of keys."""
    name = f"{element} hd {hd}"
    half: dict[str, Any] = {"element": element}
    yield Case(f"{name}, Tq 77, Tk 333, GQA 2", grid(77, hd, Tk=333, H=4, Hkv=2),
               {"causal": True}, dlse=True, **half)  # fmt: skip
    yield Case(f"{name}, Tq 333, Tk 77: dead rows", grid(333, hd, Tk=77), {"causal": True}, **half)
    yield Case(f"{name}, T 129, softcap, window", grid(129, hd, B=2),
               {"softcap": 5.0, "window": (40, 9)}, spread=3.0, **half)  # fmt: skip
    yield Case(f"{name}, T 65, packed, accumulate", grid(65, hd), {"window": 9}, layout="packed",
               accumulate=True, **half)  # fmt: skip
    yield Case(f"{name}, T 97, reversed rows", grid(97, hd, B=2), layout="reversed", **half)
    yield Case(f"{name}, T 90, NaN in a row of v", grid(90, hd), {"causal": True, "window": 20},
               poison=("v", 44), **half)  # fmt: skip
    yield Case(
        f"{name}, T 200 under a float32 q", grid(200, hd), {"causal": True}, cache=True, **half
    )
    yield Case(f"{name}, T 1024", grid(1024, hd), {"causal": True}, repeated=hd == 64, **half)
    for cache in (False, True):
        yield Case(f"{name}, decode, Tk 4000, GQA 8" + ", under a float32 q" * cache,
                   grid(1, hd, Tk=4000, H=8, Hkv=1, B=2), {"causal": True}, family="decode",
                   cache=cache, repeated=hd == 128, **half)  # fmt: skip


HALVES = ("float16", "bfloat16")


def materialized_cases() -> Iterator[Case]:
    """The other family."""
    for hd in (16, 64, 128):
        yield Case(f"materialized hd {hd}, T 200, causal, GQA 2", grid(200, hd, Hkv=1),
                   {"causal": True}, family="materialized", dlse=True,
                   repeated=hd == 64)  # fmt: skip
    yield Case("materialized hd 40, softcap, window, Tq 61, Tk 150", grid(61, 40, Tk=150),
               {"softcap": 8.0, "window": (30, 4)}, family="materialized")  # fmt: skip


def parity_cases(longest: int) -> Iterator[Case]:
    """Everything, the long ones last."""
    for hd in HEAD_DIMS:
        yield from odd_cases(hd)
        yield from decode_cases(hd)
        yield from option_cases(1024, hd)
    for hd in (1, 8, 33, 72, 100, 130, 200, 255):
        yield Case(f"hd {hd}, T 150, causal", grid(150, hd), {"causal": True})
    yield Case(
        "hd 64, T 300, GQA 8, B 3", grid(300, 64, H=16, Hkv=2, B=3), {"causal": True}, dlse=True
    )
    yield from materialized_cases()
    for element in HALVES:
        for hd in (*HEAD_DIMS, 33):
            yield from half_cases(hd, element)
    if longest > 1024:
        yield from option_cases(longest, 64)
        for hd in (128, 256):
            yield from (case for case in option_cases(longest, hd) if case.options.get("causal"))
        for element in HALVES:
            for hd in (64, 128):
                yield Case(f"{element} hd {hd}, T {longest}, causal", grid(longest, hd),
                           {"causal": True}, element=element, repeated=True)  # fmt: skip


def small_cases() -> Iterator[Case]:
    """What the sanitizers can run in time: every kernel, edges, several tiles."""
    for hd in HEAD_DIMS:
        yield Case(
            f"hd {hd}, Tq 75, Tk 109", grid(75, hd, Tk=109, H=2, Hkv=1), {"causal": True}, dlse=True
        )
        yield Case(
            f"decode hd {hd}, Tk 600", grid(2, hd, Tk=600), {"causal": True}, family="decode"
        )
    yield Case("hd 64, T 70, NaN in a value", grid(70, 64), {"window": (8, 3)}, poison=("v", 40))
    yield Case("hd 128, T 70, NaN in dout", grid(70, 128), {"window": (8, 3), "softcap": 4.0},
               poison=("dout", 40), accumulate=False)  # fmt: skip
    yield Case(
        "hd 96, T 45, reversed, accumulate", grid(45, 96), layout="reversed", accumulate=True
    )
    for element in HALVES:
        for hd in (64, 128):
            yield Case(f"{element} hd {hd}, Tq 75, Tk 109", grid(75, hd, Tk=109, H=2, Hkv=1),
                       {"causal": True}, dlse=True, element=element)  # fmt: skip
        yield Case(f"{element} decode hd 64, Tk 600", grid(2, 64, Tk=600), {"causal": True},
                   family="decode", element=element)  # fmt: skip
        yield Case(f"{element} hd 33, T 45, under a float32 q", grid(45, 33),
                   element=element, cache=True)  # fmt: skip
    yield Case(
        "materialized hd 24, T 40", grid(40, 24, Hkv=1), {"softcap": 3.0}, family="materialized"
    )
