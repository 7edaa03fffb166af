"""Attention over parts of the keys, put together."""

import itertools

import forge
import numpy as np
import pytest
from oracle import Problem, distance, random_inputs

CUTS = {"halves": (0, 40, 80), "uneven": (0, 1, 3, 50, 80), "an empty part": (0, 0, 80)}


def parts_of(k, v, cuts):
    return [(k[:, a:b], v[:, a:b], a) for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_parts_make_the_whole(cuts, causal, backend, rng):
    q, k, v, dout = random_inputs(rng, 2, 30, 80, 4, 2, hd=8)
    options = {"causal": causal, "softcap": 9.0}
    saved = [
        forge.attention_forward(q, kn, vn, query_offset=50 - at, backend=backend, **options)[1]
        for kn, vn, at in parts_of(k, v, cuts)
    ]
    o, lse = forge.merge([(s.out, s.lse) for s in saved])
    problem = Problem(q, k, v, dout, query_offset=50, **options)
    problem.check("materialized", out=o, lse=lse)
    shares = [forge.attention_backward(dout, s, whole=(o, lse)) for s in saved]
    problem.check(
        "materialized",
        dq=sum(share[0] for share in shares),
        dk=np.concatenate([share[1] for share in shares], 1),
        dv=np.concatenate([share[2] for share in shares], 1),
    )


def test_one_part_is_itself(backend, rng):
    q, k, v, _ = random_inputs(rng, 1, 9, 20, 2, 1, hd=8)
    o, saved = forge.attention_forward(q, k, v, backend=backend)
    merged, lse = forge.merge([(o, saved.lse)])
    np.testing.assert_allclose(merged, o, rtol=1e-6)
    np.testing.assert_allclose(lse, saved.lse, rtol=1e-6)


def test_rows_that_no_part_saw_stay_dead():
    o = np.zeros((1, 3, 2, 4), np.float32)
    lse = np.full((1, 2, 3), -np.inf, np.float32)
    merged, all_lse = forge.merge([(o, lse), (o, lse)])
    assert (merged == 0).all()
    assert np.isneginf(all_lse).all()


def test_a_part_that_saw_nothing_adds_nothing():
    o = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    lse = np.array([[[0.5], [-3]]], np.float32)
    merged, all_lse = forge.merge([(0 * o, lse * 0 - np.inf), (o, lse)])
    np.testing.assert_array_equal(merged, o)
    np.testing.assert_array_equal(all_lse, lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_rounded_once(dtype, rng):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    parts = [
        (rng.standard_normal((1, 5, 2, 8)).astype(dtype),
         rng.standard_normal((1, 2, 5)).astype(np.float32))
        for _ in range(3)
    ]  # fmt: skip
    got, lse = forge.merge(parts)
    want, same = forge.merge([(o.astype(np.float32), lse) for o, lse in parts])
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want.astype(dtype))
    np.testing.assert_array_equal(lse, same)


def test_three_axes_and_double_precision(rng):
    q, k, v, _ = (x.astype(np.float64) for x in random_inputs(rng, 2, 6, 20, 4, 2, hd=8))
    saved = [
        forge.attention_forward(q, k[:, a:b], v[:, a:b], kernel="materialized")[1]
        for a, b in ((0, 7), (7, 20))
    ]
    o, lse = forge.merge([(s.out.reshape(2, 6, -1), s.lse) for s in saved])
    assert o.shape == (2, 6, 32)
    exact = Problem(q, k, v).exact
    assert distance(o.reshape(2, 6, 4, 8), exact.out) < 1e-14
    assert distance(lse, exact.lse) < 1e-14


def test_wrong_parts_are_refused_in_words():
    o, lse = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    for error, pattern, parts in (
        (ValueError, "^parts must hold at least one", []),
        (TypeError, r"^parts\[0\] must be \(o, lse\), got ndarray", [o]),
        (TypeError, r"^parts\[1\]\[0\] must be float32", [(o, lse), (o.astype(np.float16), lse)]),
        (TypeError, r"^parts\[0\]\[1\] must be float32", [(o, lse.astype(np.float64))]),
        (ValueError, r"^parts\[1\]\[0\] must have shape", [(o, lse), (o[:, :2], lse)]),
        (ValueError, r"^parts\[0\] must be o, .*\(1, 3, 2\)", [(o, lse.swapaxes(1, 2))]),
    ):
        with pytest.raises(error, match=pattern):
            forge.merge(parts)


def test_wrong_wholes_are_refused_in_words(rng):
    q, k, v, dout = random_inputs(rng, 1, 3, 5, 2, 1, hd=4)
    o, saved = forge.attention_forward(q, k, v, kernel="materialized")
    with pytest.raises(ValueError, match=r"^whole must be None with kernel='materialized'"):
        forge.attention_backward(dout, saved, whole=(o, saved.lse))
    o, saved = forge.attention_forward(q, k, v)
    with pytest.raises(TypeError, match=r"^whole must be a tuple \(o, lse\), got ndarray"):
        forge.attention_backward(dout, saved, whole=o)
    with pytest.raises(ValueError, match=r"^whole\[1\] must have shape \(1, 2, 3\)"):
        forge.attention_backward(dout, saved, whole=(o, saved.lse[:, :1]))
    with pytest.raises(TypeError, match=r"^whole\[0\] must be float32, got float64"):
        forge.attention_backward(dout, saved, whole=(o.astype(float), saved.lse))


def test_packed_says_where_each_sequence_stands():
    options = forge.packed([0, 2, 2, 5], [0, 4, 6, 7], causal=True, window=3)
    assert options["causal"] is True
    assert options["window"] == 3
    np.testing.assert_array_equal(options["key_start"], [[0, 0, 6, 6, 6]])
    np.testing.assert_array_equal(options["key_end"], [[4, 4, 7, 7, 7]])
    np.testing.assert_array_equal(options["query_offset"], [[2, 2, 2, 2, 2]])


def test_wrong_lists_are_refused_in_words():
    for error, pattern, lists in (
        (ValueError, "^cu_q must begin with 0, got 1", ([1, 2],)),
        (ValueError, "^cu_q must not descend", ([0, 3, 2],)),
        (ValueError, "^cu_k must have 2 entries as cu_q has, got 3", ([0, 3], [0, 1, 2])),
        (ValueError, r"^cu_q must be ints \[n \+ 1\]", (3,)),
        (TypeError, r"^cu_q must be an int array \[n \+ 1\]", ([0.0, 3.0],)),
    ):
        with pytest.raises(error, match=pattern):
            forge.packed(*lists)
