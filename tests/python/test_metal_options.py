"""The fused Metal kernels with what shapes the scores beyond masks of positions.

Runs of keys per query, another head dim of v, bias, mask and sinks.
"""

import itertools

import forge
import numpy as np
import pytest
from oracle import Problem, random_inputs, sink_axes

pytestmark = pytest.mark.usefixtures("metal")

# Tq, Tk: forward, decode with three runs of 512 keys
SHAPES = [(70, 95), (5, 1100)]
shapes = pytest.mark.parametrize(("Tq", "Tk"), SHAPES)


def forward(*arrays, **options):
    out, saved = forge.attention_forward(*arrays, backend="metal", kernel="fused", **options)
    assert forge.last_run()["backend"] == "metal"
    return out, saved


def check(q, k, v, **options):
    """Against float64; returns the results."""
    out, saved = forward(q, k, v, **options)
    Problem(q, k, v, **options).check("fused", out=out, lse=saved.lse)
    return out, saved


def random_runs(rng, B, Tq, Tk):
    """Runs in no order, some of them empty."""
    start = rng.integers(0, Tk + 1, (B, Tq))
    end = np.minimum(start + rng.integers(0, Tk, (B, Tq)), Tk)
    return {"key_start": start, "key_end": end}


def assert_equal(got, want):
    for name in ("out", "row_max", "row_sum"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


@shapes
@pytest.mark.parametrize("hd", [24, 128, 250])
@pytest.mark.parametrize("rep", [1, 3])
def test_runs_in_any_order(rng, Tq, Tk, hd, rep):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 2 * rep, 2, hd=hd)
    check(q, k, v, **random_runs(rng, 2, Tq, Tk))


@shapes
@pytest.mark.parametrize(
    "more", [{"causal": True}, {"window": (40, 3)}, {"softcap": 2.0, "causal": True, "window": 30}]
)
def test_runs_beside_the_other_masks(rng, Tq, Tk, more):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=20)
    offsets = rng.integers(-5, Tk, (2, Tq))
    check(q, k, v, query_offset=offsets, **random_runs(rng, 2, Tq, Tk), **more)


@shapes
@pytest.mark.parametrize("causal", [False, True])
def test_runs_that_are_all_alike_give_the_bits_of_one(rng, Tq, Tk, causal):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=40)
    each = {"key_start": np.array([3, 0]), "key_end": np.array([Tk - 9, Tk])}
    each["query_offset"] = np.full(2, Tk - Tq)
    runs = {name: np.repeat(value[:, None], Tq, 1) for name, value in each.items()}
    assert_equal(
        forward(q, k, v, causal=causal, **runs)[1], forward(q, k, v, causal=causal, **each)[1]
    )


@shapes
def test_a_row_has_the_bits_of_its_run_alone(rng, Tq, Tk):
    """Whatever its neighbours see: keys are cut at the same places for all."""
    q, k, v, _ = random_inputs(rng, 1, Tq, Tk, 2, 1, hd=64)
    runs = random_runs(rng, 1, Tq, Tk)
    together = forward(q, k, v, **runs)[0]
    for i in range(0, Tq, 7):
        alone = {name: value[:, i] for name, value in runs.items()}
        np.testing.assert_array_equal(forward(q, k, v, **alone)[0][:, i], together[:, i])


@shapes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_no_run_holds_reaches_no_row(rng, Tq, Tk, bad):
    q, k, v, _ = random_inputs(rng, 1, Tq, Tk, 2, 1, hd=16)
    runs = random_runs(rng, 1, Tq, Tk)
    key = Tk // 2
    sees = (runs["key_start"] <= key) & (key < runs["key_end"])
    clean = forward(q, k, v, **runs)[0]
    k[0, key], v[0, key] = bad, bad
    dirty = forward(q, k, v, **runs)[0]
    assert sees.any()
    assert not sees.all()
    np.testing.assert_array_equal(dirty[~sees], clean[~sees])
    assert not np.isfinite(dirty[sees]).all(-1).any()


def test_packed_sequences_cost_what_they_cost_alone(software, rng):
    """A tile of keys that no row of a tile of queries sees is neither read nor multiplied."""
    q, k, v, _ = random_inputs(rng, 1, 1024, 1024, 2, 1, hd=32)
    bounds = np.arange(0, 1025, 128)

    def cost():
        names = ("fmas", "device_bytes_loaded", "device_bytes_stored", "threadgroup_barriers")
        counted = [software.get(name) for name in names]
        software.reset()
        return np.array(counted)

    packed = forward(q, k, v, **forge.packed(bounds, causal=True))[0]
    together = cost()
    for begin, end in itertools.pairwise(bounds):
        part = slice(begin, end)
        alone = forward(q[:, part], k[:, part], v[:, part], causal=True)[0]
        np.testing.assert_array_equal(alone, packed[:, part])
    assert (together <= 1.05 * cost()).all()


@shapes
@pytest.mark.parametrize("hd", [1, 24, 96, 130])
@pytest.mark.parametrize("hv", [1, 13, 64, 256])
def test_values_of_another_head_dim(rng, Tq, Tk, hd, hv):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=hd, hv=hv)
    out, _ = check(q, k, v, causal=True)
    assert out.shape == (2, Tq, 4, hv)


def test_the_largest_head_dim_of_v(rng):
    q, k, v, _ = random_inputs(rng, 1, 3, 4, 1, 1, hd=8, hv=257)
    with pytest.raises(forge._forge.NotServedError, match="head dims 1 to 256, got 257"):
        forward(q, k, v)


@shapes
@pytest.mark.parametrize(("hd", "hv"), [(24, 24), (96, 64), (20, 70)])
def test_runs_and_values_in_half_precision(rng, Tq, Tk, hd, hv):
    arrays = [x.astype(np.float16) for x in random_inputs(rng, 2, Tq, Tk, 4, 2, hd=hd, hv=hv)[:3]]
    runs = random_runs(rng, 2, Tq, Tk)
    out, saved = forward(*arrays, **runs)
    assert out.dtype == np.float16
    exact = Problem(*(x.astype(np.float32) for x in arrays), **runs)
    exact.check("fused", out=saved.out, lse=saved.lse)
    np.testing.assert_array_equal(out, saved.out.astype(np.float16))


def random_bias(rng, shape, hidden=0.1):
    bias = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < hidden, np.float32(-np.inf), bias)


def broadcast_shapes(B, H, Tq, Tk):
    return [(B, H, Tq, Tk), (1, H, Tq, Tk), (B, 1, 1, Tk), (1, 1, Tq, 1), (1, H, 1, Tk), (1,) * 4]


@shapes
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("hd", [20, 130])
def test_bias_of_every_shape(rng, Tq, Tk, which, hd):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=hd)
    check(q, k, v, bias=random_bias(rng, broadcast_shapes(2, 4, Tq, Tk)[which]), causal=True)


@shapes
@pytest.mark.parametrize("which", range(6))
def test_mask_of_every_shape(rng, Tq, Tk, which):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=40)
    shape = broadcast_shapes(2, 4, Tq, Tk)[which]
    check(q, k, v, mask=rng.random(shape) < 0.6, window=60)


@shapes
def test_bias_and_mask_are_read_in_place(rng, Tq, Tk):
    """Backwards, transposed and with gaps."""
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=16)
    bias = random_bias(rng, (2, Tk, Tq, 8)).transpose(0, 3, 2, 1)[:, ::2, :, ::-1]
    mask = np.broadcast_to((rng.random((Tq, 2 * Tk)) < 0.7)[::-1, ::2], (2, 4, Tq, Tk))
    check(q, k, v, bias=bias, mask=mask)
    assert {"bias": "wrapped", "mask": "wrapped"}.items() <= forge.last_run()["arrays"].items()


@shapes
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_sinks(rng, Tq, Tk, axes):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=24)
    shape = {1: (4,), 2: (2, 4), 3: (2, 4, Tq)}[axes]
    sinks = rng.standard_normal(shape).astype(np.float32) * 4
    sinks.flat[0] = -np.inf
    out, saved = check(q, k, v, sinks=sinks, causal=True, query_offset=-2)
    assert not out[:, :2].any()  # dead: they see no key
    rows = np.broadcast_to(sink_axes(sinks), (2, 4, Tq))
    np.testing.assert_array_equal(saved.lse[..., :2], rows[..., :2])


@shapes
def test_a_sink_far_above_and_far_below(rng, Tq, Tk):
    q, k, v, _ = random_inputs(rng, 1, Tq, Tk, 3, 1, hd=24)
    none = forward(q, k, v)[1]
    out, saved = forward(q, k, v, sinks=np.float32([-np.inf, 1e4, -1e4]))
    np.testing.assert_array_equal(out[:, :, 0], none.out[:, :, 0])
    np.testing.assert_array_equal(saved.row_sum[:, 0], none.row_sum[:, 0])
    assert not out[:, :, 1].any()
    assert (saved.row_max[:, 1] == 1e4).all()
    np.testing.assert_array_equal(out[:, :, 2], none.out[:, :, 2])


@shapes
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_whose_every_score_is_hidden_are_dead(rng, Tq, Tk, with_sinks):
    q, k, v, _ = random_inputs(rng, 1, Tq, Tk, 2, 1, hd=24)
    bias = np.zeros((1, 1, Tq, Tk), np.float32)
    mask = np.ones((1, 1, Tq, Tk), bool)
    bias[:, :, 1] = -np.inf
    mask[:, :, 3] = False
    bias[:, :, 4, ::2], mask[:, :, 4, 1::2] = -np.inf, False
    sinks = np.float32([0.5, -2]) if with_sinks else None
    v[0, 7] = np.nan
    out, saved = forward(q, k, v, bias=bias, mask=mask, sinks=sinks)
    for i in (1, 3, 4):
        assert not out[0, i].any()
        want = sinks if with_sinks else np.full(2, -np.inf)
        np.testing.assert_array_equal(saved.row_max[0, :, i], want)
        np.testing.assert_array_equal(saved.row_sum[0, :, i], float(with_sinks))
    assert np.isnan(out[0, 0]).all()


@shapes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hide", ["bias", "mask"])
@pytest.mark.parametrize("hd", [20, 130])
def test_hidden_keys_reach_no_row(rng, Tq, Tk, bad, hide, hd):
    """NaN and infinity in k and v of pairs that are hidden, beside rows that see the same key."""
    q, k, v, _ = random_inputs(rng, 1, Tq, Tk, 2, 1, hd=hd)
    key = Tk // 2
    sees = np.arange(Tq) % 3 == 0
    shown = np.ones((1, 1, Tq, Tk), bool)
    shown[..., ~sees, key] = False
    option = shown if hide == "mask" else np.where(shown, np.float32(0.25), np.float32(-np.inf))
    clean = forward(q, k, v, **{hide: option})[1]
    k[0, key], v[0, key] = bad, bad
    dirty = forward(q, k, v, **{hide: option})[1]
    np.testing.assert_array_equal(dirty.out[:, ~sees], clean.out[:, ~sees])
    np.testing.assert_array_equal(dirty.lse[..., ~sees], clean.lse[..., ~sees])
    assert not np.isfinite(dirty.out[:, sees]).all(-1).any()
    k[0, key] = clean_k = rng.standard_normal(k[0, key].shape).astype(np.float32)
    assert np.isfinite(clean_k).all()
    dirty = forward(q, k, v, **{hide: option})[1]
    assert not np.isfinite(dirty.out[:, sees]).any()


def test_a_visible_weight_too_small_for_a_float_is_not_hidden(rng):
    """0 times infinity is NaN for a pair that the row sees, whatever the others hide."""
    q, k, v, _ = random_inputs(rng, 1, 40, 40, 1, 1, hd=16)
    bias = np.zeros((1, 1, 1, 40), np.float32)
    bias[..., 5], bias[..., 6] = -1e4, -np.inf
    v[0, 6] = np.inf
    assert np.isfinite(forward(q, k, v, bias=bias)[0]).all()
    v[0, 5] = np.inf
    assert np.isnan(forward(q, k, v, bias=bias)[0]).all()


def every_option(rng, B, H, Tq, Tk):
    options = {
        "causal": True,
        "window": (max(30, Tk // 2), 5),
        "softcap": 3.0,
        "bias": random_bias(rng, (1, H, Tq, Tk)),
        "mask": rng.random((B, 1, Tq, Tk)) < 0.8,
        "sinks": rng.standard_normal((B, H)).astype(np.float32),
        "query_offset": rng.integers(0, Tk, (B, Tq)),
    }
    return options | random_runs(rng, B, Tq, Tk)


PAIRS = [
    (one, other)
    for n, one in enumerate(("bias", "mask", "sinks", "key_start", "softcap", "window"))
    for other in ("bias", "mask", "sinks", "key_start", "softcap", "window")[n + 1 :]
]


@shapes
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(("hd", "hv"), [(40, 96), (96, 40)])
def test_every_pair_of_options(rng, Tq, Tk, pair, hd, hv):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 4, 2, hd=hd, hv=hv)
    options = every_option(rng, 2, 4, Tq, Tk)
    check(q, k, v, **{name: options[name] for name in {*pair, "query_offset"}})


@shapes
@pytest.mark.parametrize(("hd", "hv"), [(30, 30), (192, 128), (128, 192), (256, 64), (64, 256)])
def test_all_options_at_once(rng, Tq, Tk, hd, hv):
    q, k, v, _ = random_inputs(rng, 2, Tq, Tk, 6, 2, hd=hd, hv=hv)
    check(q, k, v, **every_option(rng, 2, 6, Tq, Tk))


@pytest.mark.parametrize("hd", [40, 192])
def test_decode_has_the_bits_of_a_longer_call(rng, hd):
    """The last 5 queries of 40, with all options: runs of keys are added in one order."""
    q, k, v, _ = random_inputs(rng, 2, 40, 1100, 4, 2, hd=hd)
    options = every_option(rng, 2, 4, 40, 1100)
    longer = forward(q, k, v, **options)[1]
    # Query i of the part is query 35 + i of the whole.
    options["query_offset"] = options["query_offset"] + 35
    part = dict(options.items())
    for name in ("query_offset", "key_start", "key_end"):
        part[name] = options[name][:, 35:]
    for name in ("bias", "mask"):
        part[name] = options[name][:, :, 35:]
    got = forward(q[:, 35:], k, v, **part)[1]
    np.testing.assert_array_equal(got.out, longer.out[:, 35:])
    np.testing.assert_array_equal(got.lse, longer.lse[:, :, 35:])


@shapes
@pytest.mark.parametrize("in_half", [False, True], ids=["float32", "float16"])
def test_bias_and_sinks_of_both_types_in_half_precision(rng, Tq, Tk, in_half):
    arrays = [x.astype(np.float16) for x in random_inputs(rng, 2, Tq, Tk, 4, 2, hd=24, hv=40)[:3]]
    options = every_option(rng, 2, 4, Tq, Tk)
    dtype = np.float16 if in_half else np.float32
    given = options | {name: options[name].astype(dtype) for name in ("bias", "sinks")}
    out, saved = forward(*arrays, **given)
    exact = {name: given[name].astype(np.float32) for name in ("bias", "sinks")}
    problem = Problem(*(x.astype(np.float32) for x in arrays), **(options | exact))
    problem.check("fused", out=saved.out, lse=saved.lse)
    np.testing.assert_array_equal(out, saved.out.astype(np.float16))
