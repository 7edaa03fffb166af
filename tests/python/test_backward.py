"""The backward: gradients against the float64 oracle and against finite differences."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, check, run
from oracle import GRADIENTS, random_inputs

LENGTHS = [(1, 1), (1, 16), (5, 2), (7, 7), (33, 17), (17, 33), (65, 64)]

DIFFERENTIATED = [
    {},
    {"causal": True},
    {"window": 2},
    {"window": (1, 2)},
    {"softcap": 1.0, "scale": 2.0, "causal": True},
    {"softcap": 0.5, "window": (0, 1), "scale": -0.7},
    {"query_offset": 1, "causal": True},
    {"key_start": 1, "key_end": 3},
    {"scale": 0.0},
]


@pytest.mark.parametrize(("Tq", "Tk"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(Tq, Tk, causal, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=Tq, Tk=Tk, H=2, Hkv=1, hd=8)
    check(q, k, v, dout, backend=backend, kernel=kernel, causal=causal)


@pytest.mark.parametrize("hd", [1, 2, 3, 5, 16, 31, 64, 80, 128])
def test_head_dims(hd, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=9, hd=hd)
    check(q, k, v, dout, backend=backend, kernel=kernel, causal=True)


@pytest.mark.parametrize("scale", [1.0, 0.0, -1.5])
def test_scale(scale, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=9)
    check(q, k, v, dout, backend=backend, kernel=kernel, scale=scale, softcap=2.0)


def differences(f, x, step=1e-5):
    """df/dx by central differences, one element at a time."""
    slope = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            y = x.copy()
            y[at] += sign * step
            ends.append(f(y))
        slope[at] = (ends[0] - ends[1]) / (2 * step)
    return slope


@pytest.mark.parametrize("options", DIFFERENTIATED, ids=str)
def test_finite_differences_in_float64(options, cpu, rng):
    """The derivative of sum(out * dout) + sum(lse * dlse), lse over the rows that see a key."""
    q, k, v, dout = random_inputs(rng, Tq=2, Tk=4, H=4, Hkv=2, hd=3, dtype=np.float64)
    dlse = rng.standard_normal((1, 4, 2))
    options = options | {"backend": cpu, "kernel": "materialized"}

    def loss(q, k, v):
        out, saved = forge.attention_forward(q, k, v, **options)
        lse = np.where(np.isfinite(saved.lse), saved.lse, 0)
        return float((out * dout).sum() + (lse * dlse).sum())

    got = run(q, k, v, dout, dlse, **options)
    np.testing.assert_allclose(got.dq, differences(lambda x: loss(x, k, v), q), atol=1e-8)
    np.testing.assert_allclose(got.dk, differences(lambda x: loss(q, x, v), k), atol=1e-8)
    np.testing.assert_allclose(got.dv, differences(lambda x: loss(q, k, x), v), atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}, {"softcap": 2.0}], ids=str)
def test_the_gradient_of_lse_is_taken_in(options, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=9, Tk=11, H=4, Hkv=2)
    dlse = rng.standard_normal((2, 4, 9)).astype(np.float32)
    with_lse = check(q, k, v, dout, dlse, backend=backend, kernel=kernel, **options)
    without = check(q, k, v, dout, backend=backend, kernel=kernel, **options)
    assert np.abs(with_lse.dq - without.dq).max() > 0.01
    assert np.abs(with_lse.dk - without.dk).max() > 0.01
    np.testing.assert_array_equal(with_lse.dv, without.dv)


def test_the_gradient_of_lse_alone(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=5)
    dlse = np.ones((1, 2, 5), np.float32)
    got = check(q, k, v, np.zeros_like(dout), dlse, backend=backend, kernel=kernel, scale=1.0)
    assert not got.dv.any()
    probs = run(q, k, v, backend=backend, kernel="materialized", scale=1.0).probs
    np.testing.assert_allclose(got.dq, np.einsum("bhij,bjhd->bihd", probs, k), rtol=1e-5, atol=1e-6)


def test_zero_dlse_is_no_dlse(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng)
    zero = np.zeros((1, 2, 5), np.float32)
    assert_same_bits(
        run(q, k, v, dout, zero, backend=backend, kernel=kernel),
        run(q, k, v, dout, backend=backend, kernel=kernel),
    )


def test_a_saved_forward_serves_any_number_of_backwards(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v, causal=True, backend=backend, kernel=kernel)
    first = forge.attention_backward(dout, saved)
    forge.attention_backward(2 * dout, saved)
    for x, y in zip(forge.attention_backward(dout, saved), first, strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_backward_runs_where_the_forward_ran(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel)
    forward = forge.last_run()
    forge.attention_backward(dout, saved)
    assert forge.last_run()["backend"] == forward["backend"] == backend
    assert forge.last_run()["kernel"] == forward["kernel"]
    assert forge.last_run()["requested_kernel"] == kernel


def test_gradients_are_linear_in_dout(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=9)
    _, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel)
    once, twice = (forge.attention_backward(x, saved) for x in (dout, 2 * dout))
    for x, y in zip(once, twice, strict=True):
        np.testing.assert_array_equal(2 * x, y)  # powers of two are exact


def given_gradients(rng, q, k, v):
    return [rng.standard_normal(x.shape).astype(np.float32) for x in (q, k, v)]


def test_outputs_handed_in_are_overwritten(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v, causal=True, backend=backend, kernel=kernel)
    want = forge.attention_backward(dout, saved)
    given = [np.full_like(x, np.nan) for x in (q, k, v)]
    got = forge.attention_backward(dout, saved, dq=given[0], dk=given[1], dv=given[2])
    for returned, handed, expected in zip(got, given, want, strict=True):
        assert returned is handed
        np.testing.assert_array_equal(handed, expected)


@pytest.mark.parametrize("name", GRADIENTS)
def test_one_output_may_be_handed_in_alone(name, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel)
    at = GRADIENTS.index(name)
    handed = np.full_like((q, k, v)[at], 7)
    got = forge.attention_backward(dout, saved, **{name: handed})
    assert got[at] is handed
    np.testing.assert_array_equal(handed, forge.attention_backward(dout, saved)[at])


def test_accumulate_adds_to_what_the_outputs_hold(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=9, Tk=7, H=4, Hkv=2)
    _, saved = forge.attention_forward(q, k, v, causal=True, backend=backend, kernel=kernel)
    want = forge.attention_backward(dout, saved)
    given = given_gradients(rng, q, k, v)
    before = [x.copy() for x in given]
    got = forge.attention_backward(
        dout, saved, dq=given[0], dk=given[1], dv=given[2], accumulate=True
    )
    for returned, handed, start, gradient in zip(got, given, before, want, strict=True):
        assert returned is handed
        np.testing.assert_allclose(handed, start + gradient, rtol=1e-5, atol=1e-5)


def test_accumulate_leaves_rows_without_gradient_as_they_are(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=5, Tk=3)
    _, saved = forge.attention_forward(
        q, k, v, causal=True, query_offset=-2, key_end=2, backend=backend, kernel=kernel
    )
    dq, dk, dv = given_gradients(rng, q, k, v)
    before = dq.copy(), dk.copy(), dv.copy()
    forge.attention_backward(dout, saved, dq=dq, dk=dk, dv=dv, accumulate=True)
    np.testing.assert_array_equal(dq[:, :2], before[0][:, :2])  # they see no key
    np.testing.assert_array_equal(dk[:, 2:], before[1][:, 2:])  # nobody sees them
    np.testing.assert_array_equal(dv[:, 2:], before[2][:, 2:])
    assert (dq[:, 2:] != before[0][:, 2:]).any()


def test_float64_accumulates_too(cpu, rng):
    q, k, v, dout = random_inputs(rng, dtype=np.float64)
    _, saved = forge.attention_forward(q, k, v, kernel="materialized", backend=cpu)
    want = forge.attention_backward(dout, saved)
    given = [np.ones_like(x) for x in (q, k, v)]
    forge.attention_backward(dout, saved, dq=given[0], dk=given[1], dv=given[2], accumulate=True)
    for handed, gradient in zip(given, want, strict=True):
        np.testing.assert_allclose(handed, 1 + gradient, rtol=1e-13, atol=1e-13)
