"""NaN and infinity: they reach the rows that see them, as IEEE says, and nothing else."""

import numpy as np
import pytest
from calls import assert_same_bits, run, unchanged
from oracle import random_inputs

RESULTS = ("out", "lse", "dq", "dk", "dv")


def nan_rows(x):
    """Boolean [B, T] of a [B, T, heads, hd] array: rows with NaN in every element, or in none."""
    every, some = np.isnan(x).all((2, 3)), np.isnan(x).any((2, 3))
    np.testing.assert_array_equal(every, some)
    return every


def test_nan_behind_the_keys_of_a_view_is_not_read(backend, kernel, rng):
    """33 keys of a buffer of 128 whose rest is NaN: bit for bit as with a compact copy."""
    q, k, v, dout = random_inputs(rng, Tq=9, Tk=33, H=2, hd=32)
    buffers = [np.full((1, 128, 2, 32), np.nan, np.float32) for _ in range(2)]
    views = [buffer[:, :33] for buffer in buffers]
    views[0][...], views[1][...] = k, v
    got = run(q, *views, dout, backend=backend, kernel=kernel)
    assert all(np.isfinite(getattr(got, name)).all() for name in RESULTS)
    assert_same_bits(got, run(q, k, v, dout, backend=backend, kernel=kernel))


def test_nan_values_behind_the_causal_diagonal(backend, kernel):
    ones = np.ones((1, 2, 1, 4), np.float32)
    v = np.array([[1, 2, 3, 4], [np.nan] * 4], np.float32).reshape(1, 2, 1, 4)
    got = run(ones, ones, v, ones, causal=True, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.out[0, 0, 0], [1, 2, 3, 4], rtol=1e-6)
    assert np.isnan(got.out[0, 1]).all()
    assert not got.dq[0, 0].any()
    np.testing.assert_allclose(got.dv[0, :, 0], [[1.5] * 4, [0.5] * 4], rtol=1e-6)


def test_nan_values_behind_the_window(backend, kernel):
    ones = np.ones((1, 2, 1, 4), np.float32)
    v = np.array([[np.nan] * 4, [5, 6, 7, 8]], np.float32).reshape(1, 2, 1, 4)
    got = run(ones, ones, v, ones, causal=True, window=1, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.out[0, 1, 0], [5, 6, 7, 8], rtol=1e-6)
    assert not got.dq[0, 1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_hidden_key_of_any_value_changes_nothing(bad, backend, kernel, rng):
    """Key 7 is behind the causal diagonal of every query of the first half of the rows."""
    q, k, v, dout = random_inputs(rng, Tq=16, H=2, hd=8)
    dout[:, 7:] = 0
    options = {"causal": True, "backend": backend, "kernel": kernel}
    want = run(q, k, v, dout, **options)
    k[0, 7], v[0, 7] = bad, bad
    got = run(q, k, v, dout, **options)
    for name in ("out", "dq"):
        unchanged(got, getattr(got, name)[:, :7], getattr(want, name)[:, :7])
    unchanged(got, got.lse[..., :7], want.lse[..., :7])


@pytest.mark.parametrize("T", [16, 70])
def test_a_nan_query_makes_its_own_row_nan(T, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=T, H=2, hd=8)
    want = run(q, k, v, dout, backend=backend, kernel=kernel)
    q[0, 5] = np.nan
    got = run(q, k, v, dout, backend=backend, kernel=kernel)
    rows = np.arange(T) == 5
    np.testing.assert_array_equal(nan_rows(got.out)[0], rows)
    np.testing.assert_array_equal(nan_rows(got.dq)[0], rows)
    np.testing.assert_array_equal(np.isnan(got.lse[0, 0]), rows)
    assert np.isnan(got.dk).all()
    assert np.isnan(got.dv).all()
    unchanged(got, got.out[:, ~rows], want.out[:, ~rows])
    unchanged(got, got.dq[:, ~rows], want.dq[:, ~rows])


@pytest.mark.parametrize("window", [None, 3])
def test_a_nan_query_reaches_only_the_keys_it_sees(window, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=16, H=2, hd=8)
    options = {"causal": True, "window": window, "backend": backend, "kernel": kernel}
    want = run(q, k, v, dout, **options)
    q[0, 5] = np.nan
    got = run(q, k, v, dout, **options)
    seen = np.arange(16) <= 5
    if window:
        seen &= np.arange(16) > 5 - window
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(nan_rows(getattr(got, name))[0], seen)
        unchanged(got, getattr(got, name)[:, ~seen], getattr(want, name)[:, ~seen])


@pytest.mark.parametrize("T", [16, 70])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_a_visible_nan_key_makes_exactly_the_rows_that_see_it_nan(
    T, position, backend, kernel, rng
):
    """Whether the NaN comes before, among or after finite scores: a maximum must not lose it."""
    j = {"first": 0, "middle": T // 2, "last": T - 1}[position]
    q, k, v, dout = random_inputs(rng, Tq=T, H=2, hd=8)
    options = {"causal": True, "backend": backend, "kernel": kernel}
    want = run(q, k, v, dout, **options)
    k[0, j, :, 0] = np.nan
    got = run(q, k, v, dout, **options)
    rows = np.arange(T) >= j
    np.testing.assert_array_equal(nan_rows(got.out)[0], rows)
    np.testing.assert_array_equal(np.isnan(got.lse[0, 0]), rows)
    unchanged(got, got.out[:, ~rows], want.out[:, ~rows])
    unchanged(got, got.dq[:, ~rows], want.dq[:, ~rows])


def test_a_nan_key_in_a_row_without_weight_is_not_lost(backend, kernel):
    """The other score is 1e4 above anything: still NaN."""
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array([1e4, np.nan], np.float32).reshape(1, 2, 1, 1)
    assert np.isnan(run(q, k, k, scale=1.0, backend=backend, kernel=kernel).out).all()
    assert np.isnan(
        run(q, k[:, ::-1], k, scale=1.0, softcap=2.0, backend=backend, kernel=kernel).out
    ).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_visible_value_gives_infinity(value, backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=9, H=1, hd=4)
    v[0, 3] = value
    got = run(q, k, v, causal=True, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(got.out[0, 3:], np.full((6, 1, 4), value, np.float32))
    assert np.isfinite(got.out[0, :3]).all()


def test_a_visible_value_of_nan_is_not_hidden_by_a_weight_of_zero(backend, kernel):
    """The second key has p = 0 to the last bit, but it is seen: 0 * NaN is NaN."""
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array([0, -1e4], np.float32).reshape(1, 2, 1, 1)
    v = np.array([1, np.nan], np.float32).reshape(1, 2, 1, 1)
    assert np.isnan(run(q, k, v, scale=1.0, backend=backend, kernel=kernel).out).all()


def test_an_infinite_score_is_nan_as_ieee_says(backend, kernel):
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array([np.inf, 0], np.float32).reshape(1, 2, 1, 1)
    assert np.isnan(run(q, k, np.ones_like(k), scale=1.0, backend=backend, kernel=kernel).out).all()


@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_nan_in_a_gradient_reaches_its_row_and_the_keys_it_sees(name, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=16, H=2, hd=8)
    dlse = np.zeros((1, 2, 16), np.float32)
    options = {"causal": True, "window": 3, "backend": backend, "kernel": kernel}
    want = run(q, k, v, dout, dlse, **options)
    if name == "dout":
        dout[0, 9] = np.nan
    else:
        dlse[0, :, 9] = np.nan
    got = run(q, k, v, dout, dlse, **options)
    np.testing.assert_array_equal(nan_rows(got.dq)[0], np.arange(16) == 9)
    seen = (np.arange(16) <= 9) & (np.arange(16) > 6)
    np.testing.assert_array_equal(nan_rows(got.dk)[0], seen)
    if name == "dlse":
        unchanged(got, got.dv, want.dv)
    else:
        np.testing.assert_array_equal(nan_rows(got.dv)[0], seen)
    unchanged(got, got.dk[:, ~seen], want.dk[:, ~seen])
