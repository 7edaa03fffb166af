"""bias, mask, sinks, a run of keys for each query, and values of another head size."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, check, run
from oracle import GRADIENTS, random_inputs

INF = np.float32(np.inf)
HIDING = {
    "bias": lambda seen: np.where(seen, np.float32(0), -INF),
    "mask": lambda seen: seen,
}
# Axes that bias, mask and dbias may have, by whether each is whole.
BROADCASTS = [(b, h, i, j) for b in (0, 1) for h in (0, 1) for i in (0, 1) for j in (0, 1)]


def some_axes(whole, B, H, Tq, Tk):
    return tuple(n if there else 1 for there, n in zip(whole, (B, H, Tq, Tk), strict=True))


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("name", HIDING)
def test_a_hidden_key_is_not_counted(name, backend, kernel, rng):
    """With q = 0 every score is 0: exp(lse) counts the visible keys."""
    seen = rng.random((2, 4, 37, 150)) < 0.3
    q, k = zeros(2, 37, 4, 8), zeros(2, 150, 2, 8)
    got = run(q, k, k, backend=backend, kernel=kernel, causal=True, **{name: HIDING[name](seen)})
    causal = np.arange(150) <= np.arange(37)[:, None] + 113
    np.testing.assert_array_equal(got.row_sum, (seen & causal).sum(-1))


@pytest.mark.parametrize("whole", BROADCASTS, ids=str)
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_every_broadcast(name, whole, backend, kernel, rng):
    B, Tq, Tk, H, Hkv = 2, 21, 34, 4, 2
    inputs = random_inputs(rng, B, Tq, Tk, H, Hkv, hd=12)
    shape = some_axes(whole, B, H, Tq, Tk)
    value = (
        rng.standard_normal(shape).astype(np.float32)
        if name == "bias"
        else (rng.random(shape) < 0.8)
    )
    options = {name: value, "softcap": 5.0, "backend": backend, "kernel": kernel}
    got = check(*inputs, **options)
    whole_value = np.ascontiguousarray(np.broadcast_to(value, (B, H, Tq, Tk)))
    want = run(*inputs, **{**options, name: whole_value})
    assert_same_bits(got, want, ("out", "lse", *GRADIENTS))


@pytest.mark.parametrize("whole", BROADCASTS, ids=str)
def test_dbias_has_the_same_bits_at_any_number_of_threads(whole, cpu, kernel, rng):
    B, Tq, Tk, H, Hkv = 3, 200, 131, 4, 2
    q, k, v, dout = random_inputs(rng, B, Tq, Tk, H, Hkv, hd=16)
    bias = rng.standard_normal(some_axes(whole, B, H, Tq, Tk)).astype(np.float32)
    _, saved = forge.attention_forward(q, k, v, bias=bias, causal=True, backend=cpu, kernel=kernel)
    before, results = forge._forge.num_threads(), []
    for threads in (1, 2, 5):
        forge.set_num_threads(threads)
        results.append(forge.attention_backward(dout, saved, dbias=True))
    forge.set_num_threads(before)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("heads", [1, 4])
def test_many_threads_add_to_one_dbias_in_turns(heads, cpu, rng):
    """More threads than heads, small tiles, many runs: a turn left out shows as other bits."""
    q, k, v, dout = random_inputs(rng, 6, 200, 400, 4, 2, hd=16)
    bias = rng.standard_normal((1, heads, 200, 400)).astype(np.float32)
    _, saved = forge.attention_forward(q, k, v, bias=bias, backend=cpu)
    before = forge._forge.num_threads()
    forge.set_num_threads(1)
    want = forge.attention_backward(dout, saved, dbias=True)[3]
    forge.set_num_threads(8)
    results = [forge.attention_backward(dout, saved, dbias=True)[3] for _ in range(40)]
    forge.set_num_threads(before)
    for got in results:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_sinks_take_part_in_every_row(axes, backend, kernel, rng):
    inputs = random_inputs(rng, 2, 40, 70, 4, 2, hd=8)
    sinks = 2 * rng.standard_normal((2, 4, 40)).astype(np.float32)
    sinks = {1: sinks[0, :, 0], 2: sinks[:, :, 0], 3: sinks}[axes]
    got = check(*inputs, sinks=sinks, causal=True, window=9, backend=backend, kernel=kernel)
    assert got.dsinks.shape == sinks.shape


def test_a_sink_of_minus_infinity_is_none(backend, kernel, rng):
    inputs = random_inputs(rng, 1, 30, 30, 2, 1, hd=8)
    options = {"causal": True, "backend": backend, "kernel": kernel}
    got = run(*inputs, sinks=np.full(2, -INF), **options)
    assert_same_bits(got, run(*inputs, **options), ("out", "lse", *GRADIENTS))
    assert (got.dsinks == 0).all()


def test_a_sink_of_minus_infinity_has_no_gradient_beside_nan(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, 1, 30, 30, 2, 1, hd=8)
    q[0, 11] = np.nan
    sinks = np.array([-INF, 0.5], np.float32)
    got = run(q, k, v, dout, sinks=sinks, causal=True, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(np.isnan(got.dsinks), [False, True])
    assert got.dsinks[0] == 0


def test_a_row_that_sees_no_key_gives_its_sink(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, 1, 5, 9, 2, 1, hd=8)
    dout[0, 2] = np.nan  # not read
    mask = np.ones((1, 1, 5, 9), bool)
    mask[0, 0, 2] = False
    sinks = np.array([0.25, -3], np.float32)
    dlse = rng.standard_normal((1, 2, 5)).astype(np.float32)
    got = run(q, k, v, dout, dlse, mask=mask, sinks=sinks, backend=backend, kernel=kernel)
    assert (got.out[0, 2] == 0).all()
    np.testing.assert_array_equal(got.row_max[0, :, 2], sinks)
    np.testing.assert_array_equal(got.row_sum[0, :, 2], 1)
    np.testing.assert_array_equal(got.lse[0, :, 2], sinks)
    assert (got.dq[0, 2] == 0).all()
    for name in ("dk", "dv", "dsinks"):
        assert np.isfinite(getattr(got, name)).all(), name
    dout[0, 2] = 0
    same = run(q, k, v, dout, dlse, mask=mask, sinks=sinks, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(got.dsinks, same.dsinks)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", HIDING)
def test_what_is_hidden_reaches_nothing(name, bad, backend, kernel, rng):
    Tq, Tk = 67, 90
    q, k, v, dout = random_inputs(rng, 1, Tq, Tk, 2, 1, hd=8)
    seen = rng.random((1, 1, Tq, Tk)) < 0.7
    seen[..., 5] = seen[..., 70] = False
    seen[:, :, 11] = False
    options = {name: HIDING[name](seen), "backend": backend, "kernel": kernel}
    want = run(q, k, v, dout, **options)
    k[:, [5, 70]] = v[:, [5, 70]] = bad
    q[:, 11] = dout[:, 11] = bad
    got = run(q, k, v, dout, **options)
    assert_same_bits(got, want, ("out", "lse", *GRADIENTS))


def test_a_nan_in_a_bias_is_visible(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, 1, 4, 20, 1, 1, hd=8)
    bias = zeros(1, 1, 4, 20)
    bias[0, 0, 1, 7] = np.nan
    got = run(q, k, v, bias=bias, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(np.isnan(got.out).all((0, 2, 3)), [False, True, False, False])
    bias[0, 0, 1, 7] = np.nan
    mask = np.ones((1, 1, 1, 20), bool)
    mask[..., 7] = False
    hidden = run(q, k, v, bias=bias, mask=mask, backend=backend, kernel=kernel)
    assert np.isfinite(hidden.out).all()


@pytest.mark.parametrize("hv", [1, 5, 16, 40])
@pytest.mark.parametrize("Tq", [1, 4, 75])
def test_values_of_another_head_size(Tq, hv, backend, kernel, rng):
    inputs = random_inputs(rng, 2, Tq, 150, 4, 2, hd=24, hv=hv)
    got = check(*inputs, causal=True, softcap=9.0, backend=backend, kernel=kernel)
    assert got.out.shape == (2, Tq, 4, hv)
    flat = [x.reshape(*x.shape[:2], -1) for x in inputs]
    of_three_axes = run(*flat, causal=True, softcap=9.0, num_heads=4, num_kv_heads=2,
                        backend=backend, kernel=kernel)  # fmt: skip
    assert_same_bits(
        of_three_axes, run(*inputs, causal=True, softcap=9.0, backend=backend, kernel=kernel),
        ("lse", "row_max"),
    )  # fmt: skip
    np.testing.assert_array_equal(of_three_axes.out.reshape(got.out.shape), got.out)
    np.testing.assert_array_equal(of_three_axes.dv.reshape(got.dv.shape), got.dv)


def test_values_may_be_a_view_of_the_keys(backend, kernel, rng):
    q, k, _, dout = random_inputs(rng, 1, 9, 33, 2, 2, hd=24, hv=16)
    got = check(q, k, k[..., :16], dout, backend=backend, kernel=kernel)
    assert forge.last_run()["arrays"]["v"] != "copied"
    assert got.dv.shape == (1, 33, 2, 16)


RUNS = {
    "packed": ([0, 0, 0, 3, 3, 5, 5, 5], [3, 3, 3, 5, 5, 9, 9, 9]),
    "chunks": ([0, 0, 0, 0, 4, 4, 4, 4], [1, 2, 3, 4, 5, 6, 7, 8]),
    "a prefix": ([0] * 8, [3, 3, 3, 4, 5, 6, 7, 8]),
    "in any order": ([7, 0, 2, 8, 4, 1, 0, 6], [9, 4, 3, 9, 9, 8, 1, 9]),
    "empty ones": ([7, 0, 5, 8, 9, 1, 0, 6], [3, 0, 5, 9, 9, 8, 1, 2]),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stretch", [1, 17])
def test_a_run_of_keys_for_each_query(name, stretch, backend, kernel, rng):
    start, end = (np.repeat(np.array(x) * stretch, stretch) for x in RUNS[name])
    Tq, Tk = 8 * stretch, 9 * stretch
    inputs = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=8)
    both = {"key_start": np.stack([start, start[::-1]]), "key_end": np.stack([end, end[::-1]])}
    check(*inputs, **both, backend=backend, kernel=kernel)
    options = {"causal": True, "window": stretch + 3, "backend": backend, "kernel": kernel}
    check(*inputs, **both, query_offset=start - 2 + np.zeros((2, 1), int), **options)


def test_one_record_for_all_queries_is_one_for_each(backend, kernel, rng):
    inputs = random_inputs(rng, 2, 50, 60, 4, 2, hd=8)
    one = {"key_start": [3, 0], "key_end": [60, 41], "query_offset": [10, -2]}
    each = {key: np.repeat(np.array(value)[:, None], 50, 1) for key, value in one.items()}
    options = {"causal": True, "window": 20, "backend": backend, "kernel": kernel}
    assert_same_bits(run(*inputs, **each, **options), run(*inputs, **one, **options))


def test_packed_sequences_are_as_separate_ones(backend, kernel, rng):
    """Bit for bit in each row of o, as in any company."""
    cu_q, cu_k = [0, 7, 7, 40, 41], [0, 9, 12, 45, 60]
    q, k, v, dout = random_inputs(rng, 1, 41, 60, 4, 2, hd=8)
    options = forge.packed(cu_q, cu_k, causal=True, window=30)
    got = check(q, k, v, dout, **options, backend=backend, kernel=kernel)
    for n in range(4):
        queries, keys = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
        alone = run(q[:, queries], k[:, keys], v[:, keys], causal=True, window=30,
                    backend=backend, kernel=kernel)  # fmt: skip
        np.testing.assert_allclose(got.out[:, queries], alone.out, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(got.lse[:, :, queries], alone.lse, rtol=2e-5, atol=2e-6)


def test_arrays_of_any_strides_are_read_in_place(backend, kernel, rng):
    inputs = random_inputs(rng, 2, 11, 13, 4, 2, hd=8)
    wide = rng.standard_normal((13, 4, 22, 4)).astype(np.float32)
    bias = wide.transpose(3, 1, 2, 0)[::-2, :, ::-2]
    mask = (rng.random((13, 22, 2, 4)) < 0.6).transpose(2, 3, 1, 0)[:, :, ::2]
    options = {"backend": backend, "kernel": kernel}
    got = run(*inputs, bias=bias, mask=mask, **options)
    how = forge.last_run()["arrays"]
    assert "copied" not in how["bias"] + how["mask"]
    compact = {"bias": np.ascontiguousarray(bias), "mask": np.ascontiguousarray(mask)}
    assert_same_bits(got, run(*inputs, **compact, **options))


def test_gradients_are_written_where_they_are_asked_for(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, 2, 11, 13, 4, 2, hd=8)
    bias, sinks = rng.standard_normal((1, 4, 11, 13)).astype(np.float32), zeros(4)
    _, saved = forge.attention_forward(
        q, k, v, bias=bias, sinks=sinks, backend=backend, kernel=kernel
    )
    dq, _, _, dbias, dsinks = forge.attention_backward(dout, saved, dbias=True, dsinks=True)
    assert len(forge.attention_backward(dout, saved)) == 3
    own = {"dbias": np.empty_like(bias), "dsinks": np.empty_like(sinks)}
    got = forge.attention_backward(dout, saved, **own)
    assert got[3] is own["dbias"]
    assert got[4] is own["dsinks"]
    np.testing.assert_array_equal(own["dbias"], dbias)
    np.testing.assert_array_equal(own["dsinks"], dsinks)
    np.testing.assert_array_equal(got[0], dq)
    only = forge.attention_backward(dout, saved, dsinks=True)
    assert len(only) == 4
    np.testing.assert_array_equal(only[3], dsinks)


def refused(error, pattern, **options):
    q, k, v, _ = random_inputs(np.random.default_rng(0), 2, 3, 5, 4, 2, hd=4)
    with pytest.raises(error, match=pattern):
        forge.attention(q, k, v, **options)


def test_wrong_arrays_are_refused_in_words():
    pairs = r"\(2, 4, 3, 5\)"
    refused(ValueError, rf"^mask must have shape {pairs}.*mask\[None, None\]",
            mask=np.ones((3, 5), bool))  # fmt: skip
    refused(ValueError, r"^mask .*mask\[:, None\]", mask=np.ones((2, 3, 5), bool))
    refused(ValueError, rf"^bias must have shape {pairs}.*\(2, 3, 3, 5\)", bias=zeros(2, 3, 3, 5))
    refused(TypeError, "^bias .*that is mask=bias", bias=np.ones((1, 1, 3, 5), bool))
    refused(TypeError, "^mask must be bool, got float32; that is bias=mask", mask=zeros(1, 1, 3, 5))
    refused(TypeError, "^mask must be bool, got int64", mask=np.ones((1, 1, 3, 5), int))
    refused(TypeError, "^bias must be float32 where q is float32, got float64",
            bias=np.zeros((1, 1, 3, 5)))  # fmt: skip
    refused(ValueError, r"^sinks must have shape \(4,\) or \(2, 4\) or \(2, 4, 3\), got \(2,\)",
            sinks=zeros(2))  # fmt: skip
    refused(ValueError, r"^key_start must have shape \(2,\) or \(2, 3\), got \(3,\)",
            key_start=np.zeros(3, int))  # fmt: skip
    refused(ValueError, r"^key_end must be within \[0, 5\], got 6", key_end=np.full((2, 3), 6))


def test_gradients_of_what_was_not_given_are_refused(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, 1, 3, 5, 2, 1, hd=4)
    _, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel)
    for name in ("bias", "sinks"):
        with pytest.raises(ValueError, match=rf"^d{name} must be left out .* no {name}"):
            forge.attention_backward(dout, saved, **{f"d{name}": True})
    _, saved = forge.attention_forward(q, k, v, sinks=zeros(2), backend=backend, kernel=kernel)
    with pytest.raises(ValueError, match=r"^dsinks must be True or an array"):
        forge.attention_backward(dout, saved, dsinks=False)
    with pytest.raises(ValueError, match=r"^dsinks must have shape \(2,\), got \(1, 2\)"):
        forge.attention_backward(dout, saved, dsinks=zeros(1, 2))
    with pytest.raises(ValueError, match=r"^dsinks must be given to accumulate into"):
        forge.attention_backward(
            dout, saved, dsinks=True, accumulate=True,
            dq=zeros(*q.shape), dk=zeros(*k.shape), dv=zeros(*v.shape),
        )  # fmt: skip
