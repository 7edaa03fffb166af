"""Shapes, strides and options drawn at random, held against the float64 oracle."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, check, run
from hypothesis import given
from hypothesis import strategies as st
from oracle import GRADIENTS, MORE_GRADIENTS, visible

INT64 = np.iinfo(np.int64)
lengths = st.integers(0, 20)
offsets = st.one_of(st.integers(-25, 25), st.integers(INT64.min, INT64.max))


@st.composite
def shapes(draw):
    """(B, Tq, Tk, H, Hkv, hd, hv)."""
    Hkv = draw(st.integers(1, 3))
    return (
        draw(st.integers(0, 3)),
        draw(lengths),
        draw(lengths),
        Hkv * draw(st.integers(1, 3)),
        Hkv,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
    )


@st.composite
def windows(draw):
    if draw(st.booleans()):
        return draw(st.integers(1, 25))
    return draw(st.integers(-1, 12)), draw(st.integers(-1, 12))


def positions(draw, B, Tq, values, runs):
    """One int, one int a sequence or, with `runs`, one a query."""
    shape = draw(st.sampled_from([(), (B,), (B, Tq)][: 3 if runs else 2]))
    if not shape:
        return draw(values)
    size = int(np.prod(shape))
    return np.array(draw(st.lists(values, min_size=size, max_size=size)), np.int64).reshape(shape)


@st.composite
def option_sets(draw, B, Tq, Tk, runs=False):
    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window"] = draw(windows())
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2, width=32))
    if draw(st.booleans()):
        options["query_offset"] = positions(draw, B, Tq, offsets, runs)
    for name in ("key_start", "key_end"):
        if draw(st.booleans()):
            options[name] = positions(draw, B, Tq, st.integers(0, Tk), runs)
    limited = options.get("window") not in (None, (-1, -1)) or (options["causal"] and Tq > 1)
    if "key_end" in options and limited and Tq != Tk:  # then it must be given
        options.setdefault("query_offset", positions(draw, B, Tq, offsets, runs))
    return options


@st.composite
def score_arrays(draw, B, Tq, Tk, H):
    """bias, mask and sinks, each there or not, broadcast along some axes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = {}

    def some_pairs():
        return [extent if draw(st.booleans()) else 1 for extent in (B, H, Tq, Tk)]

    if draw(st.integers(0, 2)) == 0:
        bias = rng.standard_normal(some_pairs()).astype(np.float32)
        arrays["bias"] = np.where(rng.random(bias.shape) < 0.1, np.float32(-np.inf), bias)
    if draw(st.integers(0, 2)) == 0:
        arrays["mask"] = rng.random(some_pairs()) < draw(st.sampled_from([0.0, 0.2, 0.8, 1.0]))
    if draw(st.integers(0, 2)) == 0:
        axes = draw(st.sampled_from([(H,), (B, H), (B, H, Tq)]))
        sinks = 3 * rng.standard_normal(axes).astype(np.float32)
        arrays["sinks"] = np.where(rng.random(axes) < 0.2, np.float32(-np.inf), sinks)
    for name in ("bias", "mask"):
        if name in arrays and draw(st.booleans()):
            arrays[name] = np.asfortranarray(arrays[name])
    return arrays


@st.composite
def laid_out(draw, shape):
    """Normal values of `shape`: axes in another order, reversed, with gaps or broadcast."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = draw(st.permutations(range(3)))
    gaps = [draw(st.integers(1, 2)) for _ in range(3)]
    memory = [shape[axis] * gaps[axis] for axis in order] + [shape[3] + draw(st.integers(0, 2))]
    x = rng.standard_normal(memory).astype(np.float32)
    x = x.transpose([*np.argsort(order), 3])[:: gaps[0], :: gaps[1], :: gaps[2], : shape[3]]
    for axis in range(3):
        if draw(st.booleans()):
            x = np.flip(x, axis)
    if draw(st.integers(0, 4)) == 0 and shape[axis]:
        x = np.broadcast_to(x.take([0], axis), shape)
    assert x.shape == tuple(shape)
    return x


@st.composite
def problems(draw, shaped=False):
    """`shaped`: with bias, mask, sinks, a run of keys for each query and another head dim of v."""
    B, Tq, Tk, H, Hkv, hd, hv = draw(shapes())
    hv = hv if shaped else hd
    axes = ((B, Tq, H, hd), (B, Tk, Hkv, hd), (B, Tk, Hkv, hv), (B, Tq, H, hv))
    arrays = [draw(laid_out(shape)) for shape in axes]
    dlse = None
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        dlse = rng.standard_normal((B, H, Tq)).astype(np.float32)
    options = draw(option_sets(B, Tq, Tk, runs=shaped))
    return arrays, dlse, options | (draw(score_arrays(B, Tq, Tk, H)) if shaped else {})


# Fixtures stay as they are while a test draws its examples, which is what they are for here.
@given(problem=problems())
def test_any_problem_against_float64(backend, kernel, problem):
    arrays, dlse, options = problem
    # Broadcast inputs add one term over and over, and its rounding with it: the bound for
    # any order of summation, not that against a plain version which happens to be exact.
    got = check(*arrays, dlse, bound="materialized", backend=backend, kernel=kernel, **options)
    compact = [np.ascontiguousarray(x) for x in arrays]
    assert_same_bits(run(*compact, dlse, backend=backend, kernel=kernel, **options), got)


@given(problem=problems(shaped=True))
def test_any_problem_of_all_options_against_float64(backend, kernel, problem):
    arrays, dlse, options = problem
    got = check(*arrays, dlse, bound="materialized", backend=backend, kernel=kernel, **options)
    compact = [np.ascontiguousarray(x) for x in arrays]
    assert_same_bits(run(*compact, dlse, backend=backend, kernel=kernel, **options), got)


@given(problem=problems(shaped=True), data=st.data())
def test_accumulating_equals_adding(backend, kernel, problem, data):
    (q, k, v, dout), dlse, options = problem
    _, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel, **options)
    more = [name for name in MORE_GRADIENTS if name[1:] in options]
    want = forge.attention_backward(dout, saved, dlse=dlse, **dict.fromkeys(more, True))
    start = data.draw(st.floats(-3, 3, width=32))
    given_arrays = {
        name: np.full(x.shape, start, np.float32)
        for name, x in zip((*GRADIENTS, *more), want, strict=True)
    }
    forge.attention_backward(dout, saved, dlse=dlse, accumulate=True, **given_arrays)
    for got, gradient in zip(given_arrays.values(), want, strict=True):
        np.testing.assert_allclose(got, start + gradient, rtol=2e-4, atol=2e-4)


@given(data=st.data())
def test_counts_of_visible_keys(backend, kernel, data):
    B, Tq, Tk, H, Hkv, hd, _ = data.draw(shapes())
    options = data.draw(option_sets(B, Tq, Tk))
    for name in ("softcap", "scale"):
        options.pop(name, None)
    q, k = np.zeros((B, Tq, H, hd), np.float32), np.ones((B, Tk, Hkv, hd), np.float32)
    got = run(q, k, k, backend=backend, kernel=kernel, **options)
    counts = visible(B, Tq, Tk, **options).sum(-1)
    want = np.broadcast_to(counts[:, None], (B, H, Tq))
    np.testing.assert_array_equal(np.rint(np.exp(got.lse)), want)
    np.testing.assert_array_equal(got.row_sum, want)
    np.testing.assert_allclose(got.out[..., 0].transpose(0, 2, 1), want > 0, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(problem=problems(shaped=True))
def test_materialized_forwards_repeat_to_the_bit(cpu, dtype, problem):
    (q, k, v, dout), _, options = problem
    arrays = [x.astype(dtype) for x in (q, k, v, dout)]
    for name in {"bias", "sinks"} & options.keys():
        options[name] = options[name].astype(dtype)
    one, other = (run(*arrays, backend=cpu, kernel="materialized", **options) for _ in range(2))
    assert_same_bits(one, other)
