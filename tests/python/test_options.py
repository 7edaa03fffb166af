"""Every option and every pair of options, forward and backward: each is right, and each matters."""

from itertools import combinations

import forge
import numpy as np
import pytest
from calls import assert_same_bits, check, run
from oracle import GRADIENTS, random_inputs

# One value of each option that changes the result of the random problem below.
VALUES = {
    "causal": True,
    "window": 3,
    "softcap": 0.8,
    "scale": -0.9,
    "query_offset": np.array([1, 3]),
    "key_start": np.array([2, 0]),
    "key_end": np.array([5, 7]),
}
OTHER_WINDOWS = [(2, 1), (0, 0), (-1, 2), (3, -1)]


def with_offset(options):
    """Where it must be given with key_end: the default's value."""
    counted = options.get("causal") or options.get("window")
    return {"query_offset": 2, **options} if "key_end" in options and counted else options


@pytest.fixture
def inputs(rng):
    return random_inputs(rng, B=2, Tq=6, Tk=8, H=4, Hkv=2, hd=5, spread=1.5)


def changed(got, want, names=("out", *GRADIENTS)):
    return {name: bool((getattr(got, name) != getattr(want, name)).any()) for name in names}


@pytest.mark.parametrize("name", [name for name in VALUES if name != "query_offset"])
def test_each_option_changes_forward_and_backward(name, inputs, backend, kernel):
    plain = run(*inputs, backend=backend, kernel=kernel)
    with_option = check(*inputs, backend=backend, kernel=kernel, **{name: VALUES[name]})
    assert all(changed(with_option, plain).values())


def test_the_offset_matters_once_there_is_a_causal_mask(inputs, backend, kernel):
    plain = run(*inputs, backend=backend, kernel=kernel)
    offset = run(*inputs, backend=backend, kernel=kernel, query_offset=VALUES["query_offset"])
    assert_same_bits(offset, plain)
    causal = run(*inputs, backend=backend, kernel=kernel, causal=True)
    both = check(
        *inputs, backend=backend, kernel=kernel, causal=True, query_offset=VALUES["query_offset"]
    )
    assert all(changed(both, causal).values())


@pytest.mark.parametrize(("one", "other"), list(combinations(VALUES, 2)))
def test_each_pair_of_options(one, other, inputs, backend, kernel):
    pair = with_offset({name: VALUES[name] for name in (one, other)})
    check(*inputs, backend=backend, kernel=kernel, **pair)


@pytest.mark.parametrize("window", OTHER_WINDOWS)
@pytest.mark.parametrize("other", [name for name in VALUES if name != "window"])
def test_two_sided_windows_with_each_option(window, other, inputs, backend, kernel):
    pair = with_offset({"window": window, other: VALUES[other]})
    check(*inputs, backend=backend, kernel=kernel, **pair)


@pytest.mark.parametrize("name", [*VALUES, None])
def test_each_option_with_the_gradient_of_lse(name, inputs, backend, kernel, rng):
    options = {} if name is None else {name: VALUES[name]}
    dlse = rng.standard_normal((2, 4, 6)).astype(np.float32)
    check(*inputs, dlse, backend=backend, kernel=kernel, **options)


def test_all_options_at_once(inputs, backend, kernel, rng):
    dlse = rng.standard_normal((2, 4, 6)).astype(np.float32)
    check(*inputs, dlse, backend=backend, kernel=kernel, **VALUES)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_the_backward_knows_every_forward_option(causal, window, softcap, inputs, backend, kernel):
    check(*inputs, backend=backend, kernel=kernel, causal=causal, window=window, softcap=softcap)


def test_the_backward_obeys_causal_by_hand(backend, kernel):
    """Equal scores: query i spreads dout[i] evenly over the keys that it sees."""
    zeros = np.zeros((1, 3, 1, 4), np.float32)
    dout = np.array([1, 10, 100], np.float32).reshape(1, 3, 1, 1).repeat(4, -1)
    causal = run(zeros, zeros, zeros, dout, backend=backend, kernel=kernel, causal=True)
    np.testing.assert_allclose(causal.dv[0, :, 0, 0], [39.33333, 38.33333, 33.33333], rtol=1e-6)
    full = run(zeros, zeros, zeros, dout, backend=backend, kernel=kernel)
    np.testing.assert_allclose(full.dv[0, :, 0, 0], [37, 37, 37], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("causal", False),
        ("window", None),
        ("window", (-1, -1)),
        ("softcap", None),
        ("softcap", 0),
        ("softcap", 0.0),
        ("scale", None),
        ("query_offset", None),
        ("key_start", None),
        ("key_end", None),
        ("query_offset", 2),
        ("key_start", 0),
        ("key_end", 8),
        ("window", 100),
        ("window", (100, 100)),
    ],
)
def test_values_that_switch_an_option_off(name, off, inputs, backend, kernel):
    assert_same_bits(
        run(*inputs, backend=backend, kernel=kernel, **{name: off}),
        run(*inputs, backend=backend, kernel=kernel),
    )


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("causal", True, np.True_),
        ("window", 3, np.int32(3)),
        ("window", 3, (2, -1)),
        ("window", (2, 1), (np.int64(2), np.uint8(1))),
        ("softcap", 2.0, 2),
        ("softcap", 2.0, np.float32(2)),
        ("scale", -1.0, -1),
        ("scale", 0.5, np.float64(0.5)),
        ("query_offset", 1, np.array([1, 1])),
        ("query_offset", 1, np.array([1, 1], np.int8)),
        ("query_offset", 1, np.int16(1)),
        ("key_start", 2, np.array([2, 2], np.uint16)),
        ("key_end", 5, np.array([9, 5, 5, 9])[1:3]),
        ("key_end", 5, [5, np.uint8(5)]),
        ("key_start", 2, (2, 2)),
        ("query_offset", 1, [1, 1]),
    ],
)
def test_two_ways_to_say_the_same(name, one, other, inputs, backend, kernel):
    options = {"backend": backend, "kernel": kernel, "causal": True, "query_offset": 2}
    assert_same_bits(
        run(*inputs, **(options | {name: one})), run(*inputs, **(options | {name: other}))
    )


def test_options_are_fixed_when_the_forward_returns(inputs, backend, kernel):
    """The backward uses what the forward was given, not what has become of it since."""
    q, k, v, dout = inputs
    offsets = np.array([1, 3])
    options = {"causal": True, "backend": backend, "kernel": kernel}
    want = run(q, k, v, dout, query_offset=offsets, **options)
    _, saved = forge.attention_forward(q, k, v, query_offset=offsets, **options)
    offsets[:] = -50
    for got, name in zip(forge.attention_backward(dout, saved), GRADIENTS, strict=True):
        np.testing.assert_array_equal(got, getattr(want, name))


def test_the_defaults_are_the_fused_kernel(rng):
    q, k, v, _ = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v)
    assert saved.kernel == "fused"
    assert forge.last_run()["requested_kernel"] in ("fused", None)


def test_options_are_keyword_only(rng):
    q, k, v, dout = random_inputs(rng)
    with pytest.raises(TypeError):
        forge.attention(q, k, v, True)
    _, saved = forge.attention_forward(q, k, v)
    with pytest.raises(TypeError):
        forge.attention_backward(dout, saved, None)
