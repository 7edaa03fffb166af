"""Random problems of every option, shape, layout, dtype and kind of value, for tests/fuzz.py."""

import os

import forge
import ml_dtypes
import numpy as np
import oracle
from oracle import GRADIENTS, MORE_GRADIENTS, Problem

FAR = 2**62
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# One rounding to a half type: its unit, and half of its smallest number.
UNITS = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
LARGEST = {"float16": 65504.0, "bfloat16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)}


def visible(B, Tq, Tk, causal=False, window=None, query_offset=None, key_start=None, key_end=None):
    """As oracle.visible, without its loops; positions need not be exact beyond 2^40."""

    def each(value, default):
        value = np.asarray(default if value is None else value)
        value = value[:, None] if value.ndim == 1 else value
        return np.broadcast_to(np.clip(value, -(2**40), 2**40), (B, Tq))[..., None]

    left, right = (
        (-1, -1) if window is None else window if isinstance(window, tuple) else (window - 1, -1)
    )
    key, pos = np.arange(Tk), np.arange(Tq)[:, None] + each(query_offset, Tk - Tq)
    seen = (key >= each(key_start, 0)) & (key < each(key_end, Tk))
    if left >= 0:
        seen &= key >= pos - left
    if right >= 0:
        seen &= key <= pos + right
    return seen & (key <= pos) if causal else seen


class Drawn:
    """The problem of a number: `arrays` q, k, v, dout, `dlse`, `options` and how it is run."""

    def __init__(self, number, backend):
        self.rng = np.random.default_rng([20261204, number])
        self.backend = backend
        targets = forge.build_config()["cpu_targets"]
        self.target = targets[number % len(targets)] if backend == "cpu" else ""
        self.kernel = "materialized" if self.one_in(4) else "fused"
        self.draw_dtypes()
        self.draw_shape()
        self.draw_positions()
        self.draw_arrays()
        self.draw_scores()
        self.draw_values()

    def one_in(self, n):
        return self.rng.integers(n) == 0

    def pick(self, *values):
        return values[self.rng.integers(len(values))]

    def draw_dtypes(self):
        self.half = None
        self.dtype = np.dtype(np.float32)
        if self.kernel == "fused" and self.one_in(3):
            self.half = self.pick("float16", "bfloat16")
        elif self.kernel == "materialized" and self.backend == "cpu" and self.one_in(3):
            self.dtype = np.dtype(np.float64)
        self.q_dtype = self.kv_dtype = HALVES[self.half] if self.half else self.dtype
        if self.half and self.one_in(4):  # a cache of halves
            self.q_dtype = np.dtype(np.float32)

    def draw_shape(self):
        longest = self.pick(4, 12, 12, 40, 40, 40, 150) if not self.one_in(40) else 700
        widest = self.pick(4, 9, 20, 20, 70) if not self.one_in(40) else 256
        self.B, self.Hkv = (int(self.rng.integers(1, 3)) for _ in range(2))
        self.B = 0 if self.one_in(100) else self.B
        self.H = self.Hkv * int(self.rng.integers(1, 5))
        self.Tq, self.Tk = (
            int(self.rng.integers(0 if self.one_in(20) else 1, longest + 1)) for _ in range(2)
        )
        if self.one_in(4):
            self.Tq = min(self.Tq, self.pick(1, 2, 8))
        if longest == 700:
            self.H = self.Hkv = self.B = 1
        self.hd = self.hv = int(self.rng.integers(1, widest + 1))
        if self.one_in(3):
            self.hv = int(self.rng.integers(1, widest + 1))

    def positions(self, low, high):
        """One integer, one a sequence or one a query."""
        return self.rng.integers(low, high + 1, self.pick((), (self.B,), (self.B, self.Tq)))

    def draw_positions(self):
        rng, Tq, Tk = self.rng, self.Tq, self.Tk
        options = {"causal": bool(self.one_in(2))}
        if self.one_in(2):
            sizes = [int(x) for x in rng.integers(-1, Tk + 3, 2)]
            options["window"] = tuple(sizes) if self.one_in(2) else max(1, sizes[0])
        if self.one_in(2):
            options["query_offset"] = self.positions(-Tq - 3, Tk + 3)
            if self.one_in(20):
                options["query_offset"] = self.pick(-FAR, FAR)
        for name in ("key_start", "key_end"):
            if self.one_in(3):
                options[name] = self.positions(0, Tk)
        limited = options.get("window") not in (None, (-1, -1)) or (options["causal"] and Tq > 1)
        if "key_end" in options and limited and Tq != Tk:  # then it must be given
            options.setdefault("query_offset", self.positions(-Tq, Tk))
        if self.one_in(3):
            options["softcap"] = float(self.pick(0.5, 3.0, 30.0))
        if self.one_in(3):
            options["scale"] = float(np.float32(rng.uniform(-2, 2)))
        self.options = options

    def laid_out(self, x):
        """The same values: axes in another order, gaps, reversed, not aligned."""
        if self.one_in(3):
            return x
        order = self.rng.permutation(3)
        gaps = self.rng.integers(1, 3, 3)
        memory = [x.shape[axis] * gap for axis, gap in zip(order, gaps, strict=True)]
        room = np.zeros([*memory, x.shape[3] + self.rng.integers(3)], x.dtype)
        view = room.transpose([*np.argsort(order), 3])
        steps = [slice(None, None, gaps[list(order).index(axis)]) for axis in range(3)]
        view = view[(*steps, slice(0, x.shape[3]))]
        for axis in range(3):
            if self.one_in(4):
                view = np.flip(view, axis)
        view[...] = x
        return view

    def draw_arrays(self):
        B, Tq, Tk, H, Hkv = self.B, self.Tq, self.Tk, self.H, self.Hkv
        shapes = (
            (B, Tq, H, self.hd),
            (B, Tk, Hkv, self.hd),
            (B, Tk, Hkv, self.hv),
            (B, Tq, H, self.hv),
        )
        dtypes = (self.q_dtype, self.kv_dtype, self.kv_dtype, self.q_dtype)
        sizes = [self.pick(1, 1, 1, 1, 0.01, 8, 1e-39 if self.one_in(9) else 1) for _ in shapes]
        self.arrays = [
            (size * self.rng.standard_normal(shape)).astype(dtype)
            for size, shape, dtype in zip(sizes, shapes, dtypes, strict=True)
        ]
        self.dlse = None
        if self.one_in(3):
            self.dlse = self.rng.standard_normal((B, H, Tq)).astype(self.dtype)

    def some_pairs(self):
        whole = (self.B, self.H, self.Tq, self.Tk)
        return [extent if self.one_in(2) else 1 for extent in whole]

    def draw_scores(self):
        rng, options = self.rng, self.options
        if self.one_in(4):
            bias = rng.standard_normal(self.some_pairs()).astype(self.score_dtype())
            options["bias"] = np.where(
                rng.random(bias.shape) < self.pick(0, 0.1), bias.dtype.type(-np.inf), bias
            )
        if self.one_in(4):
            options["mask"] = rng.random(self.some_pairs()) < self.pick(0.0, 0.2, 0.8, 1.0)
        if self.one_in(4):
            axes = self.pick((self.H,), (self.B, self.H), (self.B, self.H, self.Tq))
            sinks = (3 * rng.standard_normal(axes)).astype(self.score_dtype())
            options["sinks"] = np.where(rng.random(axes) < 0.1, sinks.dtype.type(-np.inf), sinks)
        for name in ("bias", "mask"):
            if name in options and self.one_in(3):
                options[name] = np.asfortranarray(options[name])

    def score_dtype(self):
        return self.q_dtype if self.one_in(2) else self.dtype

    def draw_values(self):
        """Puts NaN or infinity where no row sees it, in one problem of four, and a NaN where some
        rows may see it, in one of eight. `clean` has zeros there; `tainted` is where the latter is.
        """
        seen = self.seen()
        self.clean = [x.copy() for x in self.arrays]
        self.tainted = [np.zeros(x.shape, bool) for x in self.arrays]
        if self.one_in(4):
            grouped = seen.reshape(self.B, self.Hkv, self.H // self.Hkv, self.Tq, self.Tk)
            keys = ~grouped.any((2, 3)).transpose(0, 2, 1)  # [B, Tk, Hkv]
            rows = ~seen.any(3).transpose(0, 2, 1)  # [B, Tq, H]
            for x, clean, hidden in zip(
                self.arrays, self.clean, (rows, keys, keys, rows), strict=True
            ):
                x[hidden] = self.pick(np.nan, np.inf, -np.inf, np.nan)
                clean[hidden] = 0
        if self.one_in(8):
            which = self.rng.integers(4)
            x, clean, tainted = self.arrays[which], self.clean[which], self.tainted[which]
            if x.size:
                at = tuple(int(self.rng.integers(n)) for n in x.shape)
                x[at], clean[at], tainted[at] = np.nan, 0, True
        self.arrays = [self.laid_out(x) for x in self.arrays]

    def where_nan(self):
        """For each result whether an element depends on a NaN among the inputs, by the formulas."""
        rep = self.H // self.Hkv
        q, k, v, dout = (
            np.repeat(x, rep if i in (1, 2) else 1, 2).transpose(0, 2, 1, 3)
            for i, x in enumerate(self.tainted)
        )
        seen = self.seen()
        p = seen & (seen & (q.any(3)[..., None] | k.any(3)[:, :, None])).any(3, keepdims=True)
        out = p.any(3, keepdims=True) | (seen.astype(np.float32) @ v.astype(np.float32) > 0)
        live = seen.any(3)
        d = live & (dout | out).any(3)
        ds = seen & (p | dout.any(3)[..., None] | v.any(3)[:, :, None] | d[..., None])

        def fold(x):
            return x.reshape(self.B, self.Hkv, rep, *x.shape[2:]).any(2).transpose(0, 2, 1, 3)

        by_key = p.any(2)[..., None] | (
            seen.swapaxes(2, 3).astype(np.float32) @ dout.astype(np.float32) > 0
        )
        found = {"out": out.transpose(0, 2, 1, 3), "lse": p.any(3), "dv": fold(by_key)}
        found["dq"] = np.broadcast_to(ds.any(3)[..., None], q.shape).transpose(0, 2, 1, 3)
        found["dk"] = fold(np.broadcast_to(ds.any(2)[..., None], k.shape))
        if "bias" in self.options:
            found["dbias"] = oracle.summed_to(ds, self.options["bias"].shape) > 0
        if "sinks" in self.options:
            axes = oracle.sink_axes(self.options["sinks"])
            some = oracle.summed_to((d | p.any(3)) & (axes != -np.inf), axes.shape) > 0
            found["dsinks"] = some.reshape(self.options["sinks"].shape)
        return found

    def seen(self):
        names = ("causal", "window", "query_offset", "key_start", "key_end")
        where = {name: self.options[name] for name in names if name in self.options}
        seen = visible(self.B, self.Tq, self.Tk, **where)[:, None]
        if "mask" in self.options:
            seen = seen & self.options["mask"]
        if "bias" in self.options:
            seen = seen & ~np.isneginf(self.options["bias"].astype(np.float64))
        return np.broadcast_to(seen, (self.B, self.H, self.Tq, self.Tk))

    def __str__(self):
        names = ("B", "Tq", "Tk", "H", "Hkv", "hd", "hv")
        axes = " ".join(f"{name}={getattr(self, name)}" for name in names)
        options = {name: getattr(x, "shape", x) for name, x in self.options.items()}
        where = self.target or self.backend
        return f"{where} {self.kernel} q {self.q_dtype} kv {self.kv_dtype} {axes} {options}"

    def run(self):
        """The results by name, with accumulation into float32 arrays in one problem of six."""
        os.environ["FORGE_CPU_TARGET"] = self.target
        q, k, v, dout = self.arrays
        out, saved = forge.attention_forward(
            q, k, v, backend=self.backend, kernel=self.kernel, **self.options
        )
        more = [name for name in MORE_GRADIENTS if name[1:] in self.options]
        wanted = dict.fromkeys(more, True)
        self.start = np.float32(self.pick(1, -3)) if self.one_in(6) else None
        if self.start is None:
            wanted = dict.fromkeys(more, True)
        else:
            like = dict(
                zip(
                    (*GRADIENTS, *more),
                    (q, k, v, *(self.options[name[1:]] for name in more)),
                    strict=True,
                )
            )
            kind = np.promote_types(self.dtype, np.float32)
            wanted = {name: np.full(x.shape, self.start, kind) for name, x in like.items()} | {
                "accumulate": True
            }
        gradients = forge.attention_backward(dout, saved, dlse=self.dlse, **wanted)
        results = dict(zip((*GRADIENTS, *more), gradients, strict=True))
        return {"out": out, "lse": saved.lse} | results

    def check(self):
        """Raises AssertionError where a result is farther from float64's than the bound."""
        wide = [
            x.astype(np.float64 if self.dtype == np.float64 else np.float32) for x in self.clean
        ]
        # Positions and masks as one mask; the kernels get them as they are.
        options = {name: self.options.get(name) for name in ("softcap", "scale")}
        for name in {"bias", "sinks"} & self.options.keys():
            options[name] = self.options[name].astype(self.dtype)
        problem = Problem(*wide, self.dlse, mask=self.seen(), **options)
        unit = 2.0**-53 if self.dtype == np.float64 else oracle.UNIT
        where_nan = self.where_nan()
        # Whether a sink stands so far above the keys of a row that these left nothing.
        smallest = np.finfo(self.dtype).smallest_subnormal
        largest = problem.exact.probs.max(-1, initial=0)
        leaves_nothing = (largest < smallest)[self.seen().any(-1)].any()
        for name, got in self.run().items():
            want = getattr(problem.exact, name).reshape(got.shape)
            bound = problem.tolerance(name, "materialized", unit)
            assert np.isfinite(bound), f"{name}: no bound"
            if self.start is not None and name in GRADIENTS + MORE_GRADIENTS:
                want = want + self.start
                roundings = problem.terms(name) if self.kernel == "materialized" else 4
                bound = bound + roundings * unit * (np.abs(want) + 3)
            if got.dtype.name in UNITS:
                relative, absolute = UNITS[got.dtype.name]
                bound = bound + relative * np.abs(want) + absolute
                over = np.abs(want) + bound > LARGEST[got.dtype.name]
                want = np.where(over, got.astype(np.float64), want)
            got = got.astype(np.float64)
            nan = where_nan[name].reshape(got.shape)
            if leaves_nothing:  # that row's NaN may have been left out with it
                assert not (np.isnan(got) & ~nan).any(), f"{name}: NaN elsewhere"
            else:
                assert (np.isnan(got) == nan).all(), f"{name}: NaN elsewhere"
            odd = ~np.isfinite(want) & ~nan
            assert (got[odd] == want[odd]).all(), f"{name}: infinite elsewhere"
            error = np.where(odd | nan, 0, np.abs(got - want))
            worst = (error - bound).max(initial=-1)
            assert worst <= 0, f"{name}: beyond the bound by {worst:.3g}, error {error.max():.3g}"
