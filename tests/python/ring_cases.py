"""Problems that are split over ranks: what each rank is given, how near the truth it must be."""

import zlib
from dataclasses import dataclass, field

import numpy as np
from forge._ring_plan import layout_positions
from oracle import UNIT, Problem, distance, random_inputs

HALF_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
GRADIENTS = ("dq", "dk", "dv")


@dataclass
class Case:
    """A sequence of T rows, and how the ranks hold it."""

    T: int = 48
    layout: str | None = "zigzag"
    """None: by positions."""
    options: dict = field(default_factory=dict)
    sizes: dict = field(default_factory=dict)
    lengths: tuple = ()
    """Of the sequences of the batch, the rest being padding."""
    sinks: tuple = ()
    """Their axes."""
    dtypes: tuple = ("float32", "float32")
    """Of q, of k and v."""
    shuffled: bool = False

    @property
    def B(self):
        return self.sizes.get("B", 2)


CASES = {
    "whole": Case(),
    "causal zigzag": Case(options={"causal": True}),
    "causal contiguous": Case(layout="contiguous", options={"causal": True}),
    "window contiguous": Case(96, "contiguous", {"causal": True, "window": 9}),
    "window zigzag": Case(96, options={"causal": True, "window": 9}),
    "two-sided window": Case(96, "contiguous", {"window": (5, 3)}),
    "keys ahead only": Case(40, "contiguous", {"window": (0, 11)}),
    "grouped heads": Case(options={"causal": True}, sizes={"H": 6, "Hkv": 2, "hd": 8, "hv": 5}),
    "softcap and scale": Case(options={"causal": True, "softcap": 2.0, "scale": -0.7}),
    "sinks": Case(options={"causal": True, "window": 20}, sinks=("H",)),
    "sinks of sequences": Case(sinks=("B", "H")),
    "sinks of rows": Case(options={"causal": True}, sinks=("B", "H", "T")),
    "odd length": Case(53, options={"causal": True}),
    "odd contiguous": Case(37, "contiguous", {"causal": True}),
    "fewer rows than ranks": Case(5, options={"causal": True}),
    "padding": Case(32, None, {"causal": True}, lengths=(32, 19)),
    "padding and a window": Case(64, None, {"window": (6, 2)}, lengths=(41, 0)),
    "shuffled rows": Case(30, None, {"causal": True, "window": 8}, shuffled=True),
    "large logits": Case(options={"causal": True}, sizes={"spread": 2e4}),
    "float16": Case(options={"causal": True}, dtypes=("float16", "float16")),
    "bfloat16": Case(options={"causal": True}, dtypes=("bfloat16", "bfloat16")),
    "bfloat16 keys": Case(options={"causal": True}, dtypes=("float32", "bfloat16")),
}

FEW = [
    "causal zigzag", "causal contiguous", "window contiguous", "window zigzag", "grouped heads",
    "softcap and scale", "sinks", "odd length", "padding", "float16", "bfloat16",
]  # fmt: skip
"""What more processes than cores run; threads run all."""
EXCHANGED = ["causal zigzag", "window contiguous", "sinks", "bfloat16", "float16"]
"""Those that processes also run by an exchange of rows for heads."""

REPEATED = ["causal zigzag", "window zigzag", "padding", "sinks", "bfloat16"]
"""Those that processes run twice."""


def cases_of(size):
    """Those that so many processes run."""
    return FEW if size > 4 else list(CASES)


def rounded(x, dtype):
    """float32 elements, as they are after rounding to that dtype."""
    if dtype == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return x.astype(dtype).astype(np.float32)


def inputs_of(name):
    """q, k, v, dout of the whole, float32 but rounded, and the sinks or None."""
    case, rng = CASES[name], np.random.default_rng(zlib.crc32(name.encode()))
    sizes = {"B": 2, "H": 4, "Hkv": 2, "hd": 8, **case.sizes}
    q, k, v, dout = random_inputs(rng, Tq=case.T, **sizes)
    of_q, of_k = case.dtypes
    arrays = [rounded(x, dtype) for x, dtype in zip((q, k, v, dout), (of_q, of_k, of_k, of_q),
                                                    strict=True)]  # fmt: skip
    shape = [{"B": sizes["B"], "H": sizes["H"], "T": case.T}[axis] for axis in case.sinks]
    sinks = rng.standard_normal(shape).astype(np.float32) if shape else None
    return arrays, sinks


def rows_of(case, rank, size):
    """Which rows of the whole a rank holds, and its positions argument."""
    if case.layout is not None:
        return layout_positions(case.layout, case.T, size, rank), None
    order = np.random.default_rng(3).permutation(case.T) if case.shuffled else np.arange(case.T)
    rows = order[rank * case.T // size : (rank + 1) * case.T // size]
    if not case.lengths:
        return rows, rows
    return rows, np.stack([np.where(rows < length, rows, -1) for length in case.lengths])


def part_of(name, rank, size):
    """One rank's q, k, v, dout, sinks, and its keyword arguments but for sinks."""
    case, (arrays, sinks) = CASES[name], inputs_of(name)
    rows, positions = rows_of(case, rank, size)
    arrays = [x[:, rows] for x in arrays]
    if len(case.sinks) == 3:
        sinks = sinks[:, :, rows]
    options = dict(case.options)
    if case.layout is None:
        options["positions"] = positions
    else:
        options["layout"] = case.layout
    return arrays, sinks, options


def put_together(name, parts):
    """Results of all ranks as those of the whole. parts: a dict of arrays for each rank."""
    case, size, whole = CASES[name], len(parts), {}
    for result in parts[0]:
        if result == "dsinks" and len(case.sinks) < 3:
            whole[result] = sum(part[result] for part in parts)
            continue
        rows = np.concatenate([rows_of(case, rank, size)[0] for rank in range(size)])
        axis = 2 if result == "dsinks" else 1
        joined = np.concatenate([part[result] for part in parts], axis)
        whole[result] = np.take(joined, np.argsort(rows), axis)
    return whole


def problem_of(name):
    case, ((q, k, v, dout), sinks) = CASES[name], inputs_of(name)
    options = dict(case.options)
    if case.lengths:
        at = np.arange(case.T)
        ends = np.array([[length if row < length else 0 for row in at] for length in case.lengths])
        options |= {"key_end": ends, "query_offset": 0}
    if sinks is not None:
        options["sinks"] = sinks
    return Problem(q, k, v, dout, **options)


def check(name, parts):
    """Holds the results of n ranks to the bound of the merge (docs/distributed.md): that of the
    fused kernels, and 2 (n + 2) roundings of the largest sum of terms."""
    case, problem = CASES[name], problem_of(name)
    sums = problem.exact.term_sums(scores_too=False)
    for result, got in put_together(name, parts).items():
        want = getattr(problem.exact, result)
        bound = problem.tolerance(result, "fused") + 2 * (len(parts) + 2) * UNIT * sums[result]
        dtype = case.dtypes[result in ("dk", "dv")]
        if dtype in HALF_UNIT:  # rounded once more
            bound += HALF_UNIT[dtype] * np.abs(want).max(initial=0) + 2.0**-25
        error = distance(got, want)
        assert error <= bound, f"{name}, {result}: error {error:.3g} > {bound:.3g}"
