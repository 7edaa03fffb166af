"""Which keys a query sees. With q = 0 every score is 0: exp(lse) counts the visible keys."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, run
from oracle import random_inputs, visible

INT64 = np.iinfo(np.int64)


def zeros(B, T, H=1, hd=2):
    return np.zeros((B, T, H, hd), np.float32)


def counts(Tq, Tk, B=1, **options):
    """Visible keys of each query, [B, Tq]."""
    _, saved = forge.attention_forward(zeros(B, Tq), zeros(B, Tk), zeros(B, Tk), **options)
    return np.rint(np.exp(saved.lse[:, 0])).astype(int)


def seen_by(Tq, Tk, B=1, **options):
    """Boolean [B, Tq, Tk] read off dv: dout of query i alone reaches dv at the keys it sees."""
    seen = np.zeros((B, Tq, Tk), bool)
    _, saved = forge.attention_forward(zeros(B, Tq), zeros(B, Tk), zeros(B, Tk), **options)
    for i in range(Tq):
        dout = zeros(B, Tq)
        dout[:, i] = 1
        _, _, dv = forge.attention_backward(dout, saved)
        seen[:, i] = dv[:, :, 0, 0] != 0
    return seen


CAUSAL = (False, True)
WINDOWS = (None, 1, 2, 5, (0, 0), (2, 1), (1, -1), (-1, 0), (-1, 1), (0, 3))
SIZES = ((6, 6), (3, 7), (7, 3))


@pytest.mark.parametrize(("Tq", "Tk"), SIZES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_the_very_keys_of_every_band(Tq, Tk, causal, window, backend, kernel):
    for offset in (None, 0, 2, -3, 9):
        options = {"causal": causal, "window": window, "query_offset": offset}
        got = seen_by(Tq, Tk, backend=backend, kernel=kernel, **options)
        want = visible(1, Tq, Tk, **options)
        np.testing.assert_array_equal(got, want, err_msg=str(options))
        found = counts(Tq, Tk, backend=backend, kernel=kernel, **options)
        np.testing.assert_array_equal(found, want.sum(-1), err_msg=str(options))


@pytest.mark.parametrize("window", [None, 3, (1, 1)], ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_the_very_keys_of_every_sequence_of_a_batch(causal, window, backend, kernel):
    options = {
        "causal": causal,
        "window": window,
        "query_offset": np.array([0, 4, -2, 3, 1]),
        "key_start": np.array([0, 2, 0, 7, 5]),
        "key_end": np.array([7, 6, 0, 7, 3]),
    }
    got = seen_by(5, 7, B=5, backend=backend, kernel=kernel, **options)
    np.testing.assert_array_equal(got, visible(5, 5, 7, **options))


def test_window_of_one_is_the_query_itself(backend, kernel, rng):
    v = rng.standard_normal((1, 3, 8)).astype(np.float32)
    q = np.zeros_like(v)
    out = forge.attention(
        q, q, v, num_heads=2, causal=True, window=1, backend=backend, kernel=kernel
    )
    np.testing.assert_array_equal(out, v)


def test_window_of_two_is_the_query_and_one_before(backend, kernel, rng):
    v = rng.standard_normal((1, 3, 8)).astype(np.float32)
    q = np.zeros_like(v)
    out = forge.attention(
        q, q, v, num_heads=2, causal=True, window=2, backend=backend, kernel=kernel
    )
    np.testing.assert_array_equal(out[:, 0], v[:, 0])
    np.testing.assert_allclose(out[:, 1:], (v[:, 1:] + v[:, :-1]) / 2, rtol=1e-6, atol=1e-7)


def test_an_int_window_counts_itself_a_pair_does_not(backend, kernel):
    want = np.minimum(np.arange(257) + 1, 64)
    for window in (64, (63, -1)):
        got = counts(257, 257, causal=True, window=window, backend=backend, kernel=kernel)
        np.testing.assert_array_equal(got[0], want)


def test_an_int_window_limits_the_left_side_only(backend, kernel):
    got = counts(257, 257, window=64, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(got[0], np.minimum(np.arange(257) + 1, 64) + 256 - np.arange(257))


@pytest.mark.parametrize(
    "window", [4, 8, 2**31 - 1, 2**63 - 1, (2**63 - 1, 2**63 - 1), (-1, -1)], ids=str
)
def test_a_window_as_long_as_the_sequence_keeps_causal(window, backend, kernel, rng):
    arrays = random_inputs(rng, Tq=4)
    options = {"causal": True, "backend": backend, "kernel": kernel}
    assert_same_bits(run(*arrays, window=window, **options), run(*arrays, **options))
    np.testing.assert_array_equal(counts(4, 4, window=window, **options)[0], [1, 2, 3, 4])


def test_the_last_query_stands_at_the_last_key(backend, kernel):
    options = {"causal": True, "backend": backend, "kernel": kernel}
    v = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    got = run(np.zeros((1, 1, 1, 1), np.float32), np.zeros_like(v), v, **options)
    np.testing.assert_allclose(got.out.item(), 7.5, rtol=1e-6)  # a top-left corner gives 0
    np.testing.assert_allclose(got.lse.item(), 2.772589, rtol=1e-6)
    np.testing.assert_array_equal(counts(3, 5, **options)[0], [3, 4, 5])


def test_windows_follow_the_alignment(backend, kernel):
    options = {"causal": True, "window": 2, "backend": backend, "kernel": kernel}
    np.testing.assert_array_equal(counts(3, 5, **options)[0], [2, 2, 2])
    np.testing.assert_array_equal(counts(1, 16, **options)[0], [2])


@pytest.mark.parametrize("t", [1, 5, 11])
def test_later_queries_give_the_last_rows_of_the_whole_call(t, backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=12)
    options = {"causal": True, "window": 4, "backend": backend, "kernel": kernel}
    np.testing.assert_allclose(
        forge.attention(q[:, t:], k, v, **options),
        forge.attention(q, k, v, **options)[:, t:],
        rtol=1e-5,
        atol=1e-6,
    )


def test_offset_zero_is_the_top_left_corner(backend, kernel):
    options = {"causal": True, "query_offset": 0, "backend": backend, "kernel": kernel}
    np.testing.assert_array_equal(counts(3, 5, **options)[0], [1, 2, 3])
    np.testing.assert_array_equal(counts(5, 3, **options)[0], [1, 2, 3, 3, 3])


def test_caches_of_different_lengths_in_one_call(backend, kernel, rng):
    """Decoding with 3, 8 and 5 keys in a cache of 8 equals three calls on what is filled."""
    q, k, v, _ = random_inputs(rng, B=3, Tq=1, Tk=8)
    fills = np.array([3, 8, 5])
    options = {"causal": True, "backend": backend, "kernel": kernel}
    got = forge.attention(q, k, v, query_offset=fills - 1, **options)
    for b, fill in enumerate(fills):
        alone = forge.attention(q[b : b + 1], k[b : b + 1, :fill], v[b : b + 1, :fill], **options)
        np.testing.assert_allclose(got[b], alone[0], rtol=1e-5, atol=1e-6)


def test_key_limits_do_not_move_the_queries(backend, kernel):
    options = {"causal": True, "window": 3, "backend": backend, "kernel": kernel}
    got = counts(6, 6, key_start=2, key_end=4, **options)
    np.testing.assert_array_equal(got[0], [0, 0, 1, 2, 2, 1])


@pytest.mark.parametrize(
    "offset", [INT64.min, INT64.min + 1, -(2**40), 2**40, INT64.max - 1, INT64.max]
)
@pytest.mark.parametrize("window", [None, 3, 2**63 - 1, (2**63 - 1, 2**63 - 1), (0, 0)], ids=str)
def test_huge_offsets_saturate(offset, window, backend, kernel):
    for causal in CAUSAL:
        options = {"causal": causal, "window": window, "query_offset": offset}
        got = counts(3, 4, backend=backend, kernel=kernel, **options)
        np.testing.assert_array_equal(
            got, visible(1, 3, 4, **options).sum(-1), err_msg=str(options)
        )


def test_huge_offsets_as_an_array(backend, kernel):
    offsets = np.array([INT64.min, 0, INT64.max])
    got = counts(3, 4, B=3, causal=True, query_offset=offsets, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(got, [[0, 0, 0], [1, 2, 3], [4, 4, 4]])


@pytest.mark.parametrize("T", [31, 32, 33, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("window", [31, 32, 33, 64, 65, 128])
def test_window_edges_around_powers_of_two(T, window, backend, kernel):
    got = counts(T, T, causal=True, window=window, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(got[0], np.minimum(np.arange(T) + 1, window))


@pytest.mark.parametrize("key_end", [0, 1, 31, 64, 65, 130])
def test_key_end_at_tile_edges(key_end, backend, kernel):
    got = counts(5, 130, key_end=key_end, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(got, np.full((1, 5), key_end))


def test_hidden_keys_have_no_influence(backend, kernel, rng):
    """Whatever stands in keys outside the limits, NaN too, no bit of any result knows it."""
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, Tk=9)
    options = {
        "key_start": np.array([0, 3]),
        "key_end": np.array([4, 9]),
        "backend": backend,
        "kernel": kernel,
    }
    want = run(q, k, v, dout, **options)
    k[0, 4:], v[0, 4:], k[1, :3], v[1, :3] = np.nan, np.nan, np.inf, -np.inf
    got = run(q, k, v, dout, **options)
    assert_same_bits(got, want)
    assert not got.dk[0, 4:].any()
    assert not got.dv[1, :3].any()


@pytest.mark.parametrize("width", [2**63 + 1, 2**65, 2**200])
def test_a_window_beyond_int64_is_no_limit(width, backend, kernel):
    q, v = np.zeros((1, 3, 1, 1), np.float32), np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    for window in (width, (width, -1), (-1, width)):
        options = {"window": window, "query_offset": 2**63 - 1}
        out = forge.attention(q, q, v, backend=backend, kernel=kernel, **options)
        np.testing.assert_array_equal(out.ravel(), 1)
