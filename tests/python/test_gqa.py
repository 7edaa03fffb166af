"""Grouped heads: query head h reads key/value head h // (num_heads / num_kv_heads)."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, check, run
from oracle import random_inputs

HEADS = [(1, 1), (2, 1), (6, 2), (6, 3), (4, 4), (8, 2), (9, 3)]


@pytest.mark.parametrize(("H", "Hkv"), HEADS)
def test_head_counts(H, Hkv, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, Tk=7, H=H, Hkv=Hkv, hd=4)
    check(q, k, v, dout, backend=backend, kernel=kernel, causal=True)


def test_neighbouring_query_heads_share_a_key_head(backend, kernel):
    q = np.zeros((1, 1, 4 * 2), np.float32)
    k = np.zeros((1, 1, 2 * 2), np.float32)
    v = np.array([0, 0, 1, 1], np.float32).reshape(1, 1, 4)
    out = forge.attention(q, k, v, num_heads=4, num_kv_heads=2, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(out.ravel(), [0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("H", "Hkv", "want"),
    [
        (6, 2, [0, 0, 0, 1, 1, 1]),
        (6, 3, [0, 0, 1, 1, 2, 2]),
        (4, 2, [0, 0, 1, 1]),
    ],
)
def test_the_head_map_is_repeat_not_tile(H, Hkv, want, backend, kernel):
    q = np.zeros((1, 1, H, 1), np.float32)
    k = np.zeros((1, 1, Hkv, 1), np.float32)
    v = np.arange(Hkv, dtype=np.float32).reshape(1, 1, Hkv, 1)
    out = forge.attention(q, k, v, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(out.ravel(), want)


def test_dv_sums_the_query_heads_of_its_group(backend, kernel):
    """dout of head h is h + 1: heads 0..2 give 6, heads 3..5 give 15; a tile map gives 9 and 12."""
    q = np.zeros((1, 1, 6, 2), np.float32)
    k = np.zeros((1, 1, 2, 2), np.float32)
    dout = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6, 1).repeat(2, -1)
    got = run(q, k, k, dout, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(got.dv.ravel(), [6, 6, 15, 15])


def test_groups_equal_repeated_heads(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=9, H=6, Hkv=2, hd=4)
    options = {"backend": backend, "kernel": kernel, "causal": True, "softcap": 3.0}
    grouped = run(q, k, v, dout, **options)
    repeated = run(q, k.repeat(3, 2), v.repeat(3, 2), dout, **options)
    np.testing.assert_allclose(grouped.out, repeated.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grouped.dq, repeated.dq, rtol=1e-5, atol=1e-5)
    for name in ("dk", "dv"):
        folded = getattr(repeated, name).reshape(2, 9, 2, 3, 4).sum(3)
        np.testing.assert_allclose(getattr(grouped, name), folded, rtol=1e-5, atol=1e-5)


def test_heads_do_not_see_each_other(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=9, H=6, Hkv=3)
    options = {"backend": backend, "kernel": kernel, "causal": True}
    whole = run(q, k, v, dout, **options)
    q, k, v, dout = (x.copy() for x in (q, k, v, dout))
    q[:, :, 2:4], k[:, :, 1], v[:, :, 1], dout[:, :, 2:4] = np.nan, np.nan, np.nan, np.nan
    broken = run(q, k, v, dout, **options)
    keep = [0, 1, 4, 5]
    np.testing.assert_array_equal(broken.out[:, :, keep], whole.out[:, :, keep])
    np.testing.assert_array_equal(broken.dq[:, :, keep], whole.dq[:, :, keep])
    np.testing.assert_array_equal(broken.dk[:, :, [0, 2]], whole.dk[:, :, [0, 2]])
    np.testing.assert_array_equal(broken.dv[:, :, [0, 2]], whole.dv[:, :, [0, 2]])


@pytest.mark.parametrize("b", [0, 1, 2])
def test_sequences_do_not_see_each_other(b, backend, kernel, rng):
    arrays = random_inputs(rng, B=3, Tq=9)
    options = {"backend": backend, "kernel": kernel}
    whole = run(*arrays, **options)
    for x in arrays:
        x[b] = np.nan
    broken = run(*arrays, **options)
    keep = [other for other in range(3) if other != b]
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert np.isnan(getattr(broken, name)[b]).all()
        np.testing.assert_array_equal(getattr(broken, name)[keep], getattr(whole, name)[keep])


def test_a_batch_is_its_sequences_one_by_one(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=3, Tq=9)
    whole = run(q, k, v, dout, backend=backend, kernel=kernel)
    for b in range(3):
        alone = run(*(x[b : b + 1] for x in (q, k, v, dout)), backend=backend, kernel=kernel)
        for name in ("out", "lse", "dq", "dk", "dv"):
            np.testing.assert_allclose(
                getattr(alone, name)[0], getattr(whole, name)[b], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("Hkv", [None, 4])
def test_three_axes_without_kv_heads_means_one_each(Hkv, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, H=4, hd=4)
    flat = [x.reshape(2, 5, 16) for x in (q, k, v, dout)]
    got = run(*flat, num_heads=4, num_kv_heads=Hkv, backend=backend, kernel=kernel)
    want = run(q, k, v, dout, backend=backend, kernel=kernel)
    for name in ("out", "dq", "dk", "dv"):
        assert getattr(got, name).shape == (2, 5, 16)
        np.testing.assert_array_equal(getattr(got, name).reshape(2, 5, 4, 4), getattr(want, name))
    assert_same_bits(got, want, names=("lse", "row_max", "row_sum"))


def test_three_axes_with_groups(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, Tk=6, H=6, Hkv=2, hd=4)
    flat = q.reshape(2, 5, 24), k.reshape(2, 6, 8), v.reshape(2, 6, 8), dout.reshape(2, 5, 24)
    got = run(*flat, num_heads=6, num_kv_heads=2, causal=True, backend=backend, kernel=kernel)
    want = run(q, k, v, dout, causal=True, backend=backend, kernel=kernel)
    assert got.dq.shape == (2, 5, 24)
    assert got.dk.shape == got.dv.shape == (2, 6, 8)
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name).ravel(), getattr(want, name).ravel())


def test_four_axes_may_repeat_their_head_counts(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, H=6, Hkv=2)
    options = {"backend": backend, "kernel": kernel}
    np.testing.assert_array_equal(
        forge.attention(q, k, v, num_heads=6, num_kv_heads=2, **options),
        forge.attention(q, k, v, **options),
    )


@pytest.mark.parametrize(("H", "Hkv"), [(3, 2), (2, 4), (6, 4)])
def test_heads_that_do_not_divide_are_refused_with_both_numbers(H, Hkv):
    q, k = np.zeros((1, 1, H, 2), np.float32), np.zeros((1, 1, Hkv, 2), np.float32)
    with pytest.raises(
        ValueError, match=f"num_heads must be a multiple of num_kv_heads, got {H} and {Hkv}"
    ):
        forge.attention(q, k, k)
    with pytest.raises(
        ValueError, match=f"num_heads must be a multiple of num_kv_heads, got {H} and {Hkv}"
    ):
        forge.attention(
            q.reshape(1, 1, -1),
            k.reshape(1, 1, -1),
            k.reshape(1, 1, -1),
            num_heads=H,
            num_kv_heads=Hkv,
        )
