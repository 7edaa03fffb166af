"""Rows that see no key, rows whose first tiles are masked, and arrays without elements."""

import forge
import numpy as np
import pytest
from calls import check, run
from oracle import GRADIENTS, random_inputs


def assert_dead(got, rows):
    """Zero results and empty-row statistics in `rows`."""
    assert not got.out[:, rows].any()
    assert np.isneginf(got.lse[:, :, rows]).all()
    assert np.isneginf(got.row_max[:, :, rows]).all()
    assert (got.row_sum[:, :, rows] == 0).all()
    if hasattr(got, "probs"):
        assert (got.probs[:, :, rows] == 0).all()
    if hasattr(got, "dq"):
        assert (got.dq[:, rows] == 0).all()


@pytest.mark.parametrize(
    ("T", "window"),
    [
        (640, 10),
        *((T, w) for T in (63, 64, 65, 127, 129, 513) for w in (1, 2, 31, 32, 33, 63, 64, 65)),
    ],
)
def test_leading_tiles_fully_masked(T, window, backend, kernel):
    """Each row is the mean of the last `window` indices, also where earlier tiles are hidden."""
    zeros = np.zeros((1, T, 1, 4), np.float32)
    v = zeros + np.arange(T, dtype=np.float32).reshape(1, T, 1, 1)
    got = run(zeros, zeros, v, causal=True, window=window, backend=backend, kernel=kernel)
    n = np.minimum(np.arange(T) + 1, window)
    np.testing.assert_allclose(got.out[0, :, 0, 0], np.arange(T) - (n - 1) / 2, rtol=1e-5)
    np.testing.assert_allclose(got.lse[0, 0], np.log(n), rtol=1e-6, atol=1e-7)


def test_leading_tiles_of_minus_infinity_scores(backend, kernel):
    """Visible scores of -inf followed by finite ones: the finite ones take all the weight."""
    T, hidden = 200, 150
    q = np.ones((1, 2, 1, 1), np.float32)
    k = np.zeros((1, T, 1, 1), np.float32)
    k[0, :hidden] = -np.inf
    v = np.arange(T, dtype=np.float32).reshape(1, T, 1, 1)
    got = run(q, k, v, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.out.ravel(), np.full(2, np.arange(hidden, T).mean()), rtol=1e-5)
    np.testing.assert_allclose(got.lse.ravel(), np.log(T - hidden), rtol=1e-6)


def test_a_row_whose_every_visible_score_is_minus_infinity_is_dead(backend, kernel):
    """As with a mask of -inf: nothing is read of it in the backward either."""
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.full((1, 3, 1, 1), -np.inf, np.float32)
    dout = np.full_like(q, np.nan)
    got = run(q, k, np.ones_like(k), dout, backend=backend, kernel=kernel)
    for name in ("out", "row_sum", *GRADIENTS):
        assert (getattr(got, name) == 0).all(), name
    assert np.isneginf(got.lse).all()
    assert np.isneginf(got.row_max).all()


def test_a_nan_among_scores_of_minus_infinity_is_a_nan(backend, kernel):
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array([-np.inf, np.nan, -np.inf], np.float32).reshape(1, 3, 1, 1)
    got = run(q, k, np.ones_like(k), backend=backend, kernel=kernel)
    assert np.isnan(got.out).all()
    assert np.isnan(got.lse).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 40)}], ids=str)
@pytest.mark.parametrize("hd", [16, 80, 128])
def test_dead_rows_among_live_ones_give_nothing_to_the_keys(hd, options, backend, kernel, rng):
    """Queries of infinity make scores of -inf: rows of zeros in their place give the same."""
    T = 70
    q, k, v, dout = random_inputs(rng, Tq=T, H=2, Hkv=1, hd=hd)
    k[..., 0] = -1 - np.abs(k[..., 0])
    dlse = rng.standard_normal((1, 2, T)).astype(np.float32)
    dead = np.zeros(T, bool)
    dead[[0, 3, 31, 40, T - 2]] = True
    cleared, no_dout, no_dlse = q.copy(), dout.copy(), dlse.copy()
    cleared[:, dead] = no_dout[:, dead] = no_dlse[:, :, dead] = 0
    expected = run(cleared, k, v, no_dout, no_dlse, backend=backend, kernel=kernel, **options)
    q[:, dead, :, 0] = np.inf
    dout[:, dead] = dlse[:, :, dead] = np.nan
    got = run(q, k, v, dout, dlse, backend=backend, kernel=kernel, **options)
    assert_dead(got, dead)
    for name in ("out", "dq"):
        alive = getattr(got, name)[:, ~dead]
        np.testing.assert_array_equal(alive, getattr(expected, name)[:, ~dead], err_msg=name)
    np.testing.assert_array_equal(got.dk, expected.dk)
    np.testing.assert_array_equal(got.dv, expected.dv)


@pytest.mark.parametrize("Tq", [3, 90])
def test_keys_of_minus_infinity_that_some_rows_see_alone(Tq, backend, kernel, rng):
    """Rows dead for their keys, rows that see other keys too, rows that see others only."""
    q, k, v, dout = random_inputs(rng, Tq=Tq, Tk=600, H=2, Hkv=1, hd=24)
    q[..., 0] = 1 + np.abs(q[..., 0])
    k[:, : 600 - Tq + Tq // 3, :, 0] = -np.inf
    q[:, 0] = np.abs(q[:, 0])
    dout[:, 0] = np.nan
    got = run(q, k, v, dout, causal=True, window=10, backend=backend, kernel=kernel)
    assert_dead(got, slice(0, Tq // 3))
    assert np.isfinite(got.out).all()
    assert np.isfinite(got.dk).all()
    assert np.isfinite(got.dv).all()
    if Tq > 80:
        assert np.isfinite(got.dq[:, Tq // 3 + 9 :]).all()


def more_queries_than_keys():
    zeros = np.zeros((1, 5, 2, 4), np.float32)
    v = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    return zeros, np.zeros_like(v), v


def test_rows_before_the_first_key_are_dead(backend, kernel):
    q, k, v = more_queries_than_keys()
    got = run(q, k, v, causal=True, backend=backend, kernel=kernel)
    assert_dead(got, slice(0, 3))
    for head in range(2):
        np.testing.assert_allclose(got.out[0, 3, head], [0, 1, 2, 3], rtol=1e-6)
        np.testing.assert_allclose(got.out[0, 4, head], [2, 3, 4, 5], rtol=1e-6)
        np.testing.assert_allclose(got.lse[0, head, 3:], [0, 0.693147], atol=1e-6)


def test_a_dead_row_hands_no_gradient_on_not_even_nan(backend, kernel):
    q, k, v = more_queries_than_keys()
    q[0, :3] = np.nan
    dout = np.ones_like(q)
    dout[0, :3] = np.nan
    dlse = np.zeros((1, 2, 5), np.float32)
    dlse[:, :, :3] = np.nan
    got = run(q, k, v, dout, dlse, causal=True, backend=backend, kernel=kernel)
    assert_dead(got, slice(0, 3))
    np.testing.assert_allclose(got.dv[0, :, 0], np.array([[3.0], [1.0]]).repeat(4, 1), rtol=1e-6)
    assert np.isfinite(got.dq).all()
    assert np.isfinite(got.dk).all()


def test_one_live_row_among_many(backend, kernel, rng):
    """76 queries, one key: the last query gives all its weight to it, so dq and dk vanish."""
    q, k, v, dout = random_inputs(rng, Tq=76, Tk=1, H=2, spread=3)
    got = check(q, 3 * k, 3 * v, dout, causal=True, backend=backend, kernel=kernel)
    assert_dead(got, slice(0, 75))
    np.testing.assert_array_equal(got.out[0, 75], 3 * v[0, 0])
    np.testing.assert_allclose(got.dq, 0, atol=1e-4)
    np.testing.assert_allclose(got.dk, 0, atol=1e-4)
    np.testing.assert_allclose(got.dv[0, 0], dout[0, 75], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"key_end": 0},
        {"key_start": 7},
        {"key_start": 5, "key_end": 3},
        {"key_start": 5, "key_end": 5},
        {"causal": True, "query_offset": -5},
        {"window": 2, "query_offset": 20},
        {"window": (0, 0), "query_offset": -100},
        {"causal": True, "softcap": 1.0, "query_offset": 2, "key_end": 0},
    ],
    ids=str,
)
def test_every_row_dead(options, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, Tk=7)
    dlse = rng.standard_normal((2, 2, 5)).astype(np.float32)
    got = run(q, k, v, dout, dlse, backend=backend, kernel=kernel, **options)
    assert_dead(got, slice(None))
    assert (got.dk == 0).all()
    assert (got.dv == 0).all()


def test_dead_and_live_sequences_side_by_side(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=3, Tq=5, Tk=7, H=4, Hkv=2)
    got = check(q, k, v, dout, key_end=np.array([7, 0, 3]), backend=backend, kernel=kernel)
    assert (got.out[1] == 0).all()
    assert (got.dv[1] == 0).all()
    assert (got.dk[1] == 0).all()
    assert np.isneginf(got.lse[1]).all()
    assert (got.out[[0, 2]] != 0).all()


def test_dead_rows_and_outputs_handed_in(backend, kernel):
    q, k, v = more_queries_than_keys()
    out = np.full_like(q, np.nan)
    forge.attention(q, k, v, causal=True, out=out, backend=backend, kernel=kernel)
    assert (out[0, :3] == 0).all()


@pytest.mark.parametrize(
    ("B", "Tq", "Tk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (2, 0, 0), (0, 3, 0)]
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 2, "softcap": 1.0}], ids=str)
def test_arrays_without_elements(B, Tq, Tk, options, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=B, Tq=Tq, Tk=Tk, H=4, Hkv=2, hd=3)
    got = run(q, k, v, dout, backend=backend, kernel=kernel, **options)
    assert got.out.shape == got.dq.shape == (B, Tq, 4, 3)
    assert got.dk.shape == got.dv.shape == (B, Tk, 2, 3)
    assert got.lse.shape == got.row_max.shape == (B, 4, Tq)
    assert_dead(got, slice(None))
    assert (got.dk == 0).all()
    assert (got.dv == 0).all()
    if kernel == "materialized":
        assert got.probs.shape == (B, 4, Tq, Tk)


def test_arrays_without_elements_on_three_axes(backend, kernel):
    q, k = np.zeros((2, 0, 8), np.float32), np.zeros((2, 4, 4), np.float32)
    got = run(q, k, k, q, num_heads=4, num_kv_heads=2, backend=backend, kernel=kernel)
    assert got.out.shape == (2, 0, 8)
    assert got.dk.shape == (2, 4, 4)
    assert (got.dk == 0).all()
    assert (got.dv == 0).all()


def test_gradients_without_queries_overwrite_and_accumulate(backend, kernel):
    q, k = np.zeros((2, 0, 1, 2), np.float32), np.ones((2, 4, 1, 2), np.float32)
    _, saved = forge.attention_forward(q, k, k, backend=backend, kernel=kernel)
    dq, dk, dv = np.empty_like(q), np.full_like(k, 7), np.full_like(k, np.nan)
    forge.attention_backward(q, saved, dq=dq, dk=dk, dv=dv)
    assert (dk == 0).all()
    assert (dv == 0).all()
    dk[:], dv[:] = 7, 8
    forge.attention_backward(q, saved, dq=dq, dk=dk, dv=dv, accumulate=True)
    assert (dk == 7).all()
    assert (dv == 8).all()


@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (1, 2, 2, 0)])
def test_no_heads_and_no_head_dim_are_refused(shape):
    x = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match="0"):
        forge.attention(x, x, x)


def test_no_numpy_warning_on_dead_rows(backend, kernel):
    q, k, v = more_queries_than_keys()
    with np.errstate(all="raise"):
        got = run(q, k, v, np.ones_like(q), causal=True, backend=backend, kernel=kernel)
        assert np.isneginf(got.saved.lse[0, :, :3]).all()


@pytest.mark.parametrize("Tq", [1, 3, 40])
@pytest.mark.parametrize("offset", [-(2**63), -(2**63) + 3, 2**63 - 1, 2**63 - 4])
@pytest.mark.parametrize("key_start", [0, 5, 299])
def test_offsets_at_the_ends_of_int64(Tq, offset, key_start, fused_backend):
    """Both kernels agree where positions lie so far out that sums with them would overflow."""
    q, k = np.ones((1, Tq, 2, 8), np.float32), np.ones((1, 300, 1, 8), np.float32)
    for options in (
        {"causal": True},
        {"window": (3, 2)},
        {"window": 5},
        {"causal": True, "window": 7},
    ):
        results = []
        for kernel in ("fused", "materialized"):
            out, saved = forge.attention_forward(
                q,
                k,
                k,
                query_offset=offset,
                key_start=key_start,
                kernel=kernel,
                backend=fused_backend,
                **options,
            )
            results.append((out, saved.lse, *forge.attention_backward(out, saved)))
        for fused, materialized in zip(*results, strict=True):
            np.testing.assert_allclose(fused, materialized, atol=1e-4)
