"""The forward: outputs, row statistics and probabilities against the float64 oracle."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, check, run
from oracle import Problem, random_inputs

LENGTHS = [(1, 1), (1, 16), (2, 3), (7, 7), (33, 17), (17, 33), (64, 65), (113, 203)]
HEAD_DIMS = [1, 2, 3, 5, 8, 16, 31, 64, 80, 128]


@pytest.mark.parametrize(("Tq", "Tk"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(Tq, Tk, causal, backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, B=2, Tq=Tq, Tk=Tk, H=2, Hkv=1, hd=8)
    check(q, k, v, backend=backend, kernel=kernel, causal=causal)


@pytest.mark.parametrize("hd", HEAD_DIMS)
def test_head_dims(hd, backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=9, H=2, hd=hd)
    check(q, k, v, backend=backend, kernel=kernel)


def test_the_largest_fused_head_dim_of_the_cpu(cpu, rng):
    q, k, v, dout = random_inputs(rng, Tq=3, H=1, hd=512)
    check(q, k, v, dout, backend=cpu, kernel="fused")


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0, -1.5, 1e-20])
def test_scale(scale, backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=9)
    check(q, k, v, backend=backend, kernel=kernel, scale=scale)


def test_the_default_scale_is_one_over_the_root_of_the_head_dim(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=9, hd=7)
    assert_same_bits(
        run(q, k, v, backend=backend, kernel=kernel),
        run(q, k, v, backend=backend, kernel=kernel, scale=7**-0.5),
    )


def test_row_statistics_are_the_maximum_and_the_sum_below_it(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, B=2, Tq=13, H=4, Hkv=2, hd=8, spread=3)
    got = run(q, k, v, backend=backend, kernel=kernel, causal=True)
    exact = Problem(q, k, v, causal=True).exact
    assert got.row_max.shape == got.row_sum.shape == got.lse.shape == (2, 4, 13)
    np.testing.assert_allclose(got.row_max, exact.row_max, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.row_sum, exact.row_sum, rtol=1e-4)
    np.testing.assert_allclose(got.lse, got.row_max + np.log(got.row_sum), rtol=1e-6, atol=1e-6)


def test_probabilities_sum_to_one_and_are_zero_where_nobody_looks(backend, rng):
    q, k, v, _ = random_inputs(rng, Tq=6, Tk=9)
    probs = run(q, k, v, backend=backend, kernel="materialized", causal=True, window=3).probs
    mask = Problem(q, k, v, causal=True, window=3).exact.mask
    assert probs.shape == (1, 2, 6, 9)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    assert (probs[np.broadcast_to(~mask, probs.shape)] == 0).all()
    assert (probs[np.broadcast_to(mask, probs.shape)] > 0).all()


def test_attention_is_the_first_result_of_attention_forward(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=9)
    out = forge.attention(q, k, v, causal=True, backend=backend, kernel=kernel)
    np.testing.assert_array_equal(
        out, run(q, k, v, causal=True, backend=backend, kernel=kernel).out
    )


def test_one_query_at_a_time_gives_the_rows_of_the_whole_call(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, B=2, Tq=12, H=4, Hkv=2, hd=8)
    whole = forge.attention(q, k, v, causal=True, backend=backend, kernel=kernel)
    for t in range(12):
        row = forge.attention(
            q[:, t : t + 1],
            k[:, : t + 1],
            v[:, : t + 1],
            causal=True,
            backend=backend,
            kernel=kernel,
        )
        np.testing.assert_allclose(row[:, 0], whole[:, t], rtol=1e-5, atol=1e-6)


def test_the_inputs_are_left_as_they_were(backend, kernel, rng):
    arrays = random_inputs(rng, Tq=9)
    before = [x.copy() for x in arrays]
    run(*arrays, backend=backend, kernel=kernel, causal=True)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 4, "softcap": 3.0}])
def test_repeats_give_the_same_bits(options, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=70, H=4, Hkv=2, hd=16)
    first = run(q, k, v, dout, backend=backend, kernel=kernel, **options)
    for _ in range(3):
        assert_same_bits(run(q, k, v, dout, backend=backend, kernel=kernel, **options), first)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 16, 40])
def test_the_number_of_threads_changes_no_bit(threads, kernel, cpu, rng, restore_threads):
    q, k, v, dout = random_inputs(rng, B=2, Tq=67, Tk=90, H=6, Hkv=2, hd=16)
    options = {"causal": True, "window": 40, "backend": cpu, "kernel": kernel}
    forge.set_num_threads(1)
    alone = run(q, k, v, dout, **options)
    forge.set_num_threads(threads)
    assert_same_bits(run(q, k, v, dout, **options), alone)


def test_float64_to_its_own_precision(cpu, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=9, Tk=11, H=4, Hkv=2, hd=8, dtype=np.float64)
    options = {"causal": True, "softcap": 2.0}
    got = run(q, k, v, dout, backend=cpu, kernel="materialized", **options)
    assert got.out.dtype == got.lse.dtype == got.probs.dtype == got.dq.dtype == np.float64
    Problem(q, k, v, dout, **options).check(
        "materialized",
        unit=2.0**-53,
        out=got.out,
        lse=got.lse,
        probs=got.probs,
        dq=got.dq,
        dk=got.dk,
        dv=got.dv,
    )


def test_saved_holds_the_inputs_themselves_and_says_what_ran(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng)
    out, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel)
    for given, kept in ((q, saved.q), (k, saved.k), (v, saved.v), (out, saved.out)):
        assert kept.ctypes.data == given.ctypes.data
        assert kept.shape == given.shape
    assert (saved.backend, saved.kernel) == (backend, kernel)


def test_saved_is_read_only(rng):
    q, k, v, _ = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v)
    for name in ("out", "row_max", "row_sum", "lse", "q", "k", "v", "backend", "kernel"):
        with pytest.raises(AttributeError):
            setattr(saved, name, None)


def test_only_the_materialized_kernel_keeps_probabilities(rng):
    q, k, v, _ = random_inputs(rng)
    for kernel in (None, "fused"):
        _, saved = forge.attention_forward(q, k, v, kernel=kernel)
        with pytest.raises(ValueError, match="materialized"):
            saved.probs  # noqa: B018
