"""The bits of a row in the fused Metal forward do not depend on the other rows of the call, on how
many of them there are (decode is another kernel), nor on how the arrays lie."""

import forge
import numpy as np
import pytest
from calls import run, same_bits
from oracle import random_inputs

# Around the runs of 512 keys that decode deals out, and the sizes of tiles.
CASES = {
    "causal": ({"Tq": 40, "Tk": 1100, "H": 4, "Hkv": 1, "hd": 64}, {"causal": True}),
    "window": ({"Tq": 24, "Tk": 1500, "H": 2, "hd": 128}, {"causal": True, "window": 700}),
    "softcap": ({"Tq": 20, "Tk": 513, "H": 6, "Hkv": 2, "hd": 80}, {"softcap": 3.0}),
    "no mask": ({"Tq": 16, "Tk": 1025, "H": 2, "hd": 30}, {}),
    "large heads": ({"Tq": 9, "Tk": 700, "H": 2, "hd": 256}, {"causal": True}),
}


def forward(q, k, v, **options):
    out, saved = forge.attention_forward(q, k, v, backend="metal", kernel="fused", **options)
    return out, saved.row_max, saved.row_sum


@pytest.mark.parametrize("size", [1, 3, 8], ids="{} queries".format)
@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_decode_has_the_bits_of_the_whole(size, sizes, options, metal, rng):
    q, k, v, _ = random_inputs(rng, B=2, **sizes)
    Tq, Tk = sizes["Tq"], sizes["Tk"]
    out, row_max, row_sum = forward(q, k, v, **options)
    for begin in (0, Tq // 2, Tq - size):
        rows = slice(begin, begin + size)
        few = forward(q[:, rows], k, v, query_offset=Tk - Tq + begin, **options)
        same_bits(few[0], out[:, rows], "out")
        same_bits(few[1], row_max[..., rows], "row_max")
        same_bits(few[2], row_sum[..., rows], "row_sum")


@pytest.mark.parametrize("planted", [np.nan, np.inf], ids=str)
def test_decode_has_them_where_a_value_is_not_finite(planted, metal, rng):
    q, k, v, _ = random_inputs(rng, Tq=30, Tk=1100, H=2, hd=64)
    v[0, 1090, 0, 5], k[0, 1080, 1, 3] = planted, planted  # some queries see them
    out, _, _ = forward(q, k, v, causal=True)
    assert not np.isfinite(out).all()
    assert np.isfinite(out).any()
    for i in range(30):
        few, _, _ = forward(q[:, i : i + 1], k, v, causal=True, query_offset=1070 + i)
        same_bits(few, out[:, i : i + 1], f"query {i}")


@pytest.mark.parametrize("Tq", [2, 70], ids=["decode", "prefill"])
def test_rows_that_lie_askew_have_the_bits_of_aligned_ones(Tq, metal, rng):
    arrays = random_inputs(rng, Tq=Tq, Tk=600, H=2, hd=64)
    askew = []
    for x in arrays:
        room = np.empty((*x.shape[:3], x.shape[3] + 3), np.float32)
        room[..., 1:-2] = x
        askew.append(room[..., 1:-2])
    options = {"causal": True, "window": 100, "backend": "metal", "kernel": "fused"}
    aligned, other = run(*arrays, **options), run(*askew, **options)
    for name in ("out", "row_max", "row_sum", "dq", "dk", "dv"):
        same_bits(getattr(other, name), getattr(aligned, name), name)
