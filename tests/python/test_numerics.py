"""Numbers: logits of any size, the error rule, the meaning of lse, odd head dims and lengths."""

import forge
import numpy as np
import pytest
from calls import check, run
from oracle import GRADIENTS, Problem, random_inputs


def column(*values):
    """[1, len(values), 1, 1]."""
    return np.array(values, np.float32).reshape(1, -1, 1, 1)


@pytest.mark.parametrize("options", [{}, {"causal": True, "query_offset": 2, "window": 3}], ids=str)
def test_real_scores_below_any_sentinel_still_count(options, backend, kernel):
    """Three equal scores of -8e6 are a mean; a stand-in for -inf such as -5e4 swallows them."""
    q = np.full((1, 1, 1, 64), 1000, np.float32)
    k = np.full((1, 3, 1, 64), -1000, np.float32)
    v = np.array([0, 3, 6], np.float32).reshape(1, 3, 1, 1).repeat(64, -1)
    got = run(q, k, v, q, backend=backend, kernel=kernel, **options)
    np.testing.assert_allclose(got.out, 3, rtol=1e-6)
    np.testing.assert_allclose(got.lse.item(), -7999999, rtol=1e-6)
    np.testing.assert_allclose(got.dv, 1000 / 3, rtol=1e-6)


def test_scores_at_the_end_of_float32(backend, kernel):
    """Scores of -2e38: multiplied early by log2(e) they would overflow."""
    k, v = column(-2e19, -2e19), column(2, 4)
    got = run(column(1e19), k, v, scale=1.0, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.out.item(), 3, rtol=1e-6)


@pytest.mark.parametrize("score", [1e9, -1e9, 2.0**30, -3e8, 0.0])
def test_equal_huge_scores_share_the_weight_exactly(score, backend, kernel):
    k, v = column(*[score] * 4), column(1, 2, 3, 6)
    got = run(column(1), k, v, column(1), scale=1.0, backend=backend, kernel=kernel)
    assert got.out.item() == 3
    np.testing.assert_array_equal(got.dv.ravel(), 0.25)
    np.testing.assert_array_equal(got.row_max.ravel(), np.float32(score))
    assert got.row_sum.item() == 4


@pytest.mark.parametrize("top", [1e9, 2.0**26, -(2.0**28)])
def test_huge_scores_that_differ_by_what_float32_holds(top, backend, kernel):
    """Neighbouring floats near 1e9 are 64 apart: the larger takes all the weight."""
    top = np.float32(top)
    below = np.nextafter(top, np.float32(-np.inf))
    got = run(
        column(1),
        column(below, top, below),
        column(5, 7, 9),
        scale=1.0,
        backend=backend,
        kernel=kernel,
    )
    want = Problem(column(1), column(below, top, below), column(5, 7, 9), scale=1.0).exact
    np.testing.assert_allclose(got.out.item(), want.out.item(), rtol=1e-6)
    assert got.row_max.item() == top


def test_underflow_of_far_scores_is_zero_not_nan(backend, kernel):
    got = run(
        column(1),
        column(0, -87, -88, -104, -1e30),
        column(1, 1, 1, 1, 1),
        column(1),
        scale=1.0,
        backend=backend,
        kernel=kernel,
    )
    assert got.out.item() == 1
    assert np.isfinite(got.dk).all()
    assert got.dv.ravel()[-1] == 0


SPREADS = [20.0, 1e4]
ERROR_SHAPES = [
    {"Tq": 65, "Tk": 65, "H": 2, "Hkv": 1, "hd": 16},
    {"Tq": 33, "Tk": 130, "H": 4, "Hkv": 2, "hd": 64},
    {"B": 2, "Tq": 129, "Tk": 97, "H": 24, "Hkv": 12, "hd": 5},  # rows enough that none decides
]
ERROR_OPTIONS = [{}, {"causal": True}, {"causal": True, "window": 33}, {"softcap": 30.0}]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    "shape", ERROR_SHAPES, ids=lambda shape: f"{shape['Tq']}x{shape['Tk']}x{shape['hd']}"
)
@pytest.mark.parametrize("options", ERROR_OPTIONS, ids=str)
def test_errors_stay_near_those_of_plain_float32(spread, shape, options, backend, kernel, rng):
    """The largest |score| is `spread`: softmax far from flat. The oracle's rule sets the bound."""
    q, k, v, dout = random_inputs(rng, **shape)
    rep = q.shape[2] // k.shape[2]
    scores = np.einsum("bihd,bjhd->bhij", q, k.repeat(rep, 2)) / np.sqrt(shape["hd"])
    q = (q * (spread / np.abs(scores).max())).astype(np.float32)
    check(q, k, v, dout, backend=backend, kernel=kernel, **options)


@pytest.mark.parametrize(
    ("hd", "T", "spread", "seed"),
    [(160, 8, 8, 43), (224, 24, 4, 3), (224, 8, 8, 59), (512, 8, 4, 26), (512, 24, 8, 11)],
)
def test_errors_of_long_dot_products_stay_near_those_of_plain_float32(hd, T, spread, seed, cpu):
    """Drawn from a thousand; in a single chain each had more than twice the error allowed."""
    inputs = random_inputs(np.random.default_rng(seed), Tq=T, hd=hd, spread=spread)
    check(*inputs, backend=cpu, kernel="fused", causal=True, softcap=15.0)


def test_exponentials_are_good_to_a_few_ulp(backend):
    """Each row has a key of score 0 and one of score x, whose p is exp(x) / (1 + exp(x))."""
    x = -np.linspace(0, 87.3, 2001, dtype=np.float32).reshape(1, -1, 1, 1)
    k = column(0, 1)
    probs = run(x, k, k, scale=1.0, backend=backend, kernel="materialized").probs[0, 0, :, 1]
    e = np.exp(x.ravel().astype(np.float64))
    np.testing.assert_allclose(probs, e / (1 + e), rtol=5 * 2.0**-23)


def test_the_lse_is_a_natural_logarithm(backend, kernel):
    zeros = np.zeros((1, 4, 1, 2), np.float32)
    got = run(zeros[:, :1], zeros, zeros, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.lse.item(), 1.386294, rtol=1e-6)  # not 2, not 0


def test_the_lse_includes_the_scale_and_the_maximum(backend, kernel):
    k = column(1000, 1000, 1000, 1000)
    got = run(column(1, 1, 1, 1), k, k, scale=1.0, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.lse.ravel(), 1001.386, rtol=1e-6)
    got = run(column(1), k, k, scale=-0.5, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.lse.item(), -498.613706, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_two_halves_merge_by_their_lse(softcap, backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, Tq=5, Tk=7)
    options = {"softcap": softcap, "backend": backend, "kernel": kernel}
    whole = run(q, k, v, **options)
    one, other = run(q, k[:, :3], v[:, :3], **options), run(q, k[:, 3:], v[:, 3:], **options)
    lse = np.logaddexp(one.lse, other.lse)
    merged = sum(
        half.out * np.exp(half.lse - lse).transpose(0, 2, 1)[..., None] for half in (one, other)
    )
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(merged, whole.out, rtol=1e-5, atol=1e-6)


ODD_HEAD_DIMS = [1, 3, 5, 7, 33, 65, 80, 96, 127, 129, 257]


def between_canaries(T, hd, H=3):
    """Array [1, T, 1, hd] in a block of NaN: its neighbours are other heads and rows."""
    block = np.full((1, T + 2, H, hd + 2), np.nan, np.float32)
    view = block[:, 1:-1, 1:2, 1:-1]
    view[...] = 0
    return block, view


@pytest.mark.parametrize("hd", ODD_HEAD_DIMS)
def test_the_last_channel_of_odd_head_dims(hd, backend, kernel):
    """Only the last channel carries signal, so a dropped or doubled tail shows."""
    if backend == "metal" and kernel == "fused" and hd > 256:
        pytest.skip("the fused Metal kernels take head dims up to 256")
    (_, q), (_, k), (_, v) = (between_canaries(T, hd) for T in (1, 3, 3))
    q[..., -1] = 1
    k[0, :, 0, -1], v[0, :, 0, -1] = [0, 1, 2], [1, 2, 3]
    canary, out = between_canaries(1, hd)
    got = run(q, k, v, q, scale=1.0, out=out, backend=backend, kernel=kernel)
    np.testing.assert_allclose(out[..., -1].item(), 2.575210, rtol=1e-6)
    np.testing.assert_allclose(got.lse.item(), 2.407606, rtol=1e-6)
    assert not out[..., :-1].any()
    assert np.isnan(canary).sum() == canary.size - hd
    exact = Problem(q, k, v, q, scale=1.0).exact
    for name in GRADIENTS:
        np.testing.assert_allclose(getattr(got, name), getattr(exact, name), rtol=1e-5, atol=1e-7)
        assert not getattr(got, name)[..., :-1].any()


@pytest.mark.parametrize("T", [1, 31, 33, 63, 65, 127, 129, 193])
def test_lengths_off_the_tile_add_no_zero_keys(T, backend, kernel):
    """Every score is -64: one key of zeros past the end would take all the weight."""
    q = np.ones((1, T, 1, 64), np.float32)
    got = run(q, -q, q, q, scale=1.0, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.out, 1, rtol=1e-5)
    np.testing.assert_allclose(got.lse, -64 + np.log(T), rtol=1e-6)
    np.testing.assert_allclose(got.dv, 1, rtol=1e-5)
    np.testing.assert_allclose(got.dq, 0, atol=1e-3)


@pytest.mark.parametrize(("Tq", "Tk"), [(1, 129), (31, 65), (65, 31), (127, 129), (193, 63)])
def test_both_lengths_off_the_tile(Tq, Tk, backend, kernel, rng):
    check(*random_inputs(rng, Tq=Tq, Tk=Tk, H=2, Hkv=1, hd=64), backend=backend, kernel=kernel)


@pytest.mark.parametrize("tiny", [1e-40, -1e-40, 1.4e-45])
def test_denormal_values_survive_on_the_cpu(tiny, cpu, kernel):
    out = forge.attention(column(1), column(1), column(tiny), backend=cpu, kernel=kernel)
    assert out.item() == np.float32(tiny) != 0


def test_gradients_of_large_dout(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, Tq=21)
    check(q, k, v, dout * np.float32(1e6), backend=backend, kernel=kernel, causal=True)
