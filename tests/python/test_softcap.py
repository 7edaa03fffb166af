"""softcap: s = softcap * tanh(x / softcap), before the mask, with its factor in the gradient."""

import forge
import numpy as np
import pytest
from calls import check, run
from oracle import Problem, random_inputs


def column(*values):
    return np.array(values, np.float32).reshape(1, -1, 1, 1)


def two_keys(backend, kernel, dout=None):
    return run(
        column(1),
        column(1, 3),
        column(0, 1),
        dout,
        scale=1.0,
        softcap=2.0,
        backend=backend,
        kernel=kernel,
    )


def test_the_formula(backend, kernel):
    """2 tanh(1/2) and 2 tanh(3/2); s * tanh(s / cap), a cap of 1 and no cap give other numbers."""
    got = two_keys(backend, kernel)
    np.testing.assert_allclose(got.out.item(), 0.708077, rtol=2e-6)
    np.testing.assert_allclose(got.lse.item(), 2.155499, rtol=2e-6)


def test_the_gradient(backend, kernel):
    """Without the factor 1 - tanh^2, dq is +0.413408."""
    got = two_keys(backend, kernel, dout=column(1))
    np.testing.assert_allclose(got.dq.item(), -0.050504, atol=1e-6)
    np.testing.assert_allclose(got.dk.ravel(), [-0.162562, 0.037353], atol=1e-6)
    np.testing.assert_allclose(got.dv.ravel(), [0.291923, 0.708077], atol=1e-6)


def test_the_mask_comes_after_the_cap(backend, kernel):
    """A mask put in before the cap leaks: -inf would become -cap."""
    zeros = np.zeros((1, 2, 1, 1), np.float32)
    got = run(zeros, zeros, column(0, 1), softcap=1.0, causal=True, backend=backend, kernel=kernel)
    assert got.out[0, 0].item() == 0
    np.testing.assert_allclose(got.out[0, 1].item(), 0.5, rtol=1e-6)


def test_the_lse_is_of_the_capped_scores(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=9, spread=4)
    capped = run(q, k, v, softcap=0.5, backend=backend, kernel=kernel)
    assert (capped.row_max <= 0.5).all()
    assert (capped.row_max >= -0.5).all()
    np.testing.assert_allclose(capped.lse, Problem(q, k, v, softcap=0.5).exact.lse, rtol=1e-5)


@pytest.mark.parametrize("softcap", [1e-3, 0.1, 1.0, 20.0, 50.0, 1e4, 1e9])
def test_caps_of_every_size(softcap, backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=13, H=4, Hkv=2, hd=8, spread=5)
    check(q, k, v, dout, softcap=softcap, causal=True, backend=backend, kernel=kernel)


def test_saturated_scores_have_no_gradient(backend, kernel):
    """tanh is 1 to the last bit: q and k get exactly nothing, v still gets its share."""
    got = run(
        column(1),
        column(1e6, 2e6),
        column(0, 1),
        column(1),
        softcap=1.0,
        scale=1.0,
        backend=backend,
        kernel=kernel,
    )
    np.testing.assert_allclose(got.out.item(), 0.5, rtol=1e-6)
    assert got.dq.item() == 0
    assert not got.dk.any()
    np.testing.assert_allclose(got.dv.ravel(), 0.5, rtol=1e-6)


def test_infinite_scores_are_capped(backend, kernel):
    """An infinite key has a finite capped score: tanh(+-inf) = +-1."""
    got = run(
        column(1),
        column(np.inf, -np.inf, 0),
        column(1, 2, 3),
        softcap=2.0,
        scale=1.0,
        backend=backend,
        kernel=kernel,
    )
    weights = np.exp([2.0, -2.0, 0.0])
    np.testing.assert_allclose(got.out.item(), weights @ [1, 2, 3] / weights.sum(), rtol=1e-6)


def test_a_cap_below_the_smallest_normal_float(cpu, kernel):
    """x / softcap overflows to infinity; the score is then +-softcap, which is next to nothing."""
    out = forge.attention(
        column(1), column(5, -5), column(0, 1), softcap=1e-40, backend=cpu, kernel=kernel
    )
    np.testing.assert_allclose(out.item(), 0.5, rtol=1e-6)


@pytest.mark.parametrize("softcap", [-1.0, -1e-30, np.nan, np.inf, -np.inf, 1e39, 1e-50])
def test_impossible_caps_are_refused(softcap):
    x = np.zeros((1, 1, 1, 1), np.float32)
    with pytest.raises(ValueError, match=r"^softcap"):
        forge.attention(x, x, x, softcap=softcap)


def test_float64_takes_caps_that_float32_cannot_hold(cpu):
    x = np.full((1, 1, 1, 1), 3.0)
    for softcap in (1e39, 1e-50):
        out = forge.attention(x, x, x, softcap=softcap, kernel="materialized", backend=cpu)
        assert out.item() == 3
