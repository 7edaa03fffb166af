"""The four materialized kernels one by one, bit for bit against the exact order of operations."""

import emulate
import forge
import numpy as np
import pytest
from calls import IN_PLACE, run, same_bits
from forge import kernels
from oracle import Problem, random_inputs, visible

SHAPES = [
    {"B": 2, "Tq": 7, "Tk": 9, "H": 6, "Hkv": 2, "hd": 5},
    {"B": 1, "Tq": 33, "Tk": 20, "H": 2, "Hkv": 1, "hd": 16},
    {"B": 1, "Tq": 4, "Tk": 4, "H": 1, "Hkv": 1, "hd": 1},
]
MASKS = [
    {},
    {"causal": True},
    {"window": 3},
    {"causal": True, "window": (2, 1), "query_offset": 1, "key_start": 1, "key_end": 4},
]
SCALES = [None, -0.7]


def empty_results(q, k):
    rows = (q.shape[0], q.shape[2], q.shape[1])
    nan = np.float32(np.nan)
    return {"o": np.full(q.shape, nan), "p": np.full((*rows, k.shape[1]), nan),
            "row_max": np.full(rows, nan), "row_sum": np.full(rows, nan)}  # fmt: skip


def forward(q, k, v, backend, **options):
    results = empty_results(q, k)
    assert kernels.attention_fwd_f32(q, k, v, *results.values(), **options, backend=backend) is None
    return results


def mask_of(q, k, **options):
    names = ("causal", "window", "query_offset", "key_start", "key_end")
    mask = {name: options[name] for name in names if name in options}
    return visible(q.shape[0], q.shape[1], k.shape[1], **mask)[:, None]


def scale_of(q, options):
    return np.float32(q.shape[3] ** -0.5 if options.get("scale") is None else options["scale"])


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(str(n) for n in shape.values()))
def inputs(request, rng):
    return random_inputs(rng, **request.param, spread=2)


@pytest.fixture(params=MASKS, ids=str)
def mask_options(request):
    return request.param


@pytest.mark.parametrize("scale", SCALES)
def test_forward_scores_and_outputs(inputs, mask_options, scale, backend):
    q, k, v, _ = inputs
    options = mask_options | {"scale": scale}
    got = forward(q, k, v, backend, **options)
    mask = mask_of(q, k, **options)
    x = np.where(mask, emulate.scores(q, k, scale_of(q, options)), np.float32(-np.inf))
    same_bits(got["row_max"], x.max(-1))
    same_bits(got["o"], emulate.output(got["p"], v, q, mask))
    assert not got["p"][~np.broadcast_to(mask, got["p"].shape)].any()


def test_forward_exponentials(inputs, mask_options, backend):
    """Scores are known to the bit, so p and row_sum are held to a few ulp of exp and of the sum."""
    q, k, v, _ = inputs
    got = forward(q, k, v, backend, **mask_options)
    mask = mask_of(q, k, **mask_options)
    x = np.where(mask, emulate.scores(q, k, scale_of(q, {})), np.float32(-np.inf))
    live = np.isfinite(got["row_max"])
    top = np.where(live, got["row_max"], 0)[..., None]
    e = np.exp(np.where(mask, x - top, -np.inf).astype(np.float64))
    total = e.sum(-1)
    ulp = 2.0**-23
    np.testing.assert_allclose(got["row_sum"], total, rtol=(2 + k.shape[1] / 2) * ulp)
    p = e / np.where(live, total, 1)[..., None]
    np.testing.assert_allclose(got["p"], p, rtol=(5 + k.shape[1] / 2) * ulp, atol=1e-37)


def test_equal_scores_give_an_exact_sum_and_one_reciprocal(backend):
    q, k = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 7, 1, 2), np.float32)
    got = forward(q, k, k, backend)
    assert got["row_sum"].item() == 7
    same_bits(got["p"].ravel(), np.full(7, np.float32(1) / np.float32(7)))


def test_exponentials_below_the_smallest_normal_float_are_zero(backend):
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array([0, -87.3, -87.34, -100], np.float32).reshape(1, 4, 1, 1)
    p = forward(q, k, k, backend, scale=1.0)["p"].ravel()
    assert p[1] > 0
    np.testing.assert_array_equal(p[2:], 0)


def test_row_gradient(inputs, backend, rng):
    q, k, v, dout = inputs
    o = forward(q, k, v, backend)["o"]
    d_row = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)
    assert kernels.attention_bwd_d_f32(o, dout, d_row, backend=backend) is None
    same_bits(d_row, emulate.row_gradient(o, dout))
    dlse = rng.standard_normal(d_row.shape).astype(np.float32)
    kernels.attention_bwd_d_f32(o, dout, d_row, dlse=dlse, backend=backend)
    same_bits(d_row, emulate.row_gradient(o, dout, dlse))


def backward_inputs(q, k, v, dout, backend, **options):
    got = forward(q, k, v, backend, **options)
    d_row = np.empty_like(got["row_max"])
    kernels.attention_bwd_d_f32(got["o"], dout, d_row, backend=backend)
    return got["p"], d_row


def tanh_of_scores(q, k, softcap, backend, **options):
    """tanh(x / softcap) to the bit: a row that sees one key has row_max = softcap * tanh(...), and
    with a softcap that is a power of two the product is exact."""
    columns = []
    for j in range(k.shape[1]):
        key = np.ascontiguousarray(k[:, j : j + 1])
        columns.append(forward(q, key, key, backend, softcap=softcap, **options)["row_max"])
    return np.stack(columns, -1) / np.float32(softcap)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", SCALES)
def test_query_gradient(inputs, mask_options, softcap, scale, backend, rng):
    q, k, v, dout = inputs
    options = mask_options | {"softcap": softcap, "scale": scale}
    p, d_row = backward_inputs(q, k, v, dout, backend, **options)
    tanh = softcap and tanh_of_scores(q, k, softcap, backend, scale=scale)
    ds = emulate.score_gradient(p, v, dout, d_row, scale_of(q, options), tanh)
    start = rng.standard_normal(q.shape).astype(np.float32)
    for begin in (np.zeros_like(q), start):  # kernels add to what is there
        dq = begin.copy()
        kernels.attention_bwd_dq_f32(q, k, v, p, dout, d_row, dq, **options, backend=backend)
        same_bits(dq, emulate.query_gradient(ds, k, begin, mask_of(q, k, **options)))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", SCALES)
def test_key_and_value_gradients(inputs, mask_options, softcap, scale, backend, rng):
    q, k, v, dout = inputs
    options = mask_options | {"softcap": softcap, "scale": scale}
    p, d_row = backward_inputs(q, k, v, dout, backend, **options)
    tanh = softcap and tanh_of_scores(q, k, softcap, backend, scale=scale)
    ds = emulate.score_gradient(p, v, dout, d_row, scale_of(q, options), tanh)
    mask = mask_of(q, k, **options)
    starts = [rng.standard_normal(k.shape).astype(np.float32) for _ in range(2)]
    for dk_begin, dv_begin in ((np.zeros_like(k), np.zeros_like(k)), starts):
        dk, dv = dk_begin.copy(), dv_begin.copy()
        kernels.attention_bwd_dkv_f32(q, k, v, p, dout, d_row, dk, dv, **options, backend=backend)
        same_bits(dk, emulate.key_gradient(ds, q, dk_begin, mask))
        same_bits(dv, emulate.key_gradient(p, dout, dv_begin, mask))


def test_capped_scores(inputs, backend):
    q, k, v, _ = inputs
    got = forward(q, k, v, backend, softcap=2.0)
    x = emulate.scores(q, k, scale_of(q, {}))
    tanh = tanh_of_scores(q, k, 2.0, backend)
    same_bits(got["row_max"], (np.float32(2) * tanh).max(-1))
    exact = np.tanh(x.astype(np.float64) / 2)
    np.testing.assert_allclose(tanh, exact, rtol=2 * 2.0**-23)


def test_the_four_kernels_make_up_the_whole(inputs, mask_options, backend):
    """forge.attention_forward and attention_backward are these kernels and nothing more."""
    q, k, v, dout = inputs
    options = mask_options | {"softcap": 5.0}
    whole = run(q, k, v, dout, kernel="materialized", backend=backend, **options)
    parts = forward(q, k, v, backend, **options)
    d_row = np.empty_like(parts["row_max"])
    kernels.attention_bwd_d_f32(parts["o"], dout, d_row, backend=backend)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    given = (q, k, v, parts["p"], dout, d_row)
    kernels.attention_bwd_dq_f32(*given, dq, **options, backend=backend)
    kernels.attention_bwd_dkv_f32(*given, dk, dv, **options, backend=backend)
    for got, want in [(parts["o"], whole.out), (parts["p"], whole.probs), (dq, whole.dq),
                      (parts["row_max"], whole.row_max), (parts["row_sum"], whole.row_sum),
                      (dk, whole.dk), (dv, whole.dv)]:  # fmt: skip
        same_bits(got, want)


def test_three_axes_and_strided_outputs(backend, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, Tk=6, H=4, Hkv=2, hd=3)
    heads = {"num_heads": 4, "num_kv_heads": 2, "backend": backend}
    want = forward(q, k, v, backend, causal=True)
    flat = q.reshape(2, 5, 12), k.reshape(2, 6, 6), v.reshape(2, 6, 6), dout.reshape(2, 5, 12)
    got = empty_results(q, k)
    packed = np.full((2, 5, 36), np.nan, np.float32)
    got["o"] = packed[..., 12:24]
    kernels.attention_fwd_f32(*flat[:3], *got.values(), causal=True, **heads)
    same_bits(got["o"].reshape(q.shape), want["o"])
    same_bits(got["p"], want["p"])
    assert np.isnan(packed[..., :12]).all()
    d_row, d_flat = np.empty_like(want["row_max"]), np.empty_like(want["row_max"])
    kernels.attention_bwd_d_f32(want["o"], dout, d_row, backend=backend)
    kernels.attention_bwd_d_f32(got["o"], flat[3], d_flat, num_heads=4, backend=backend)
    same_bits(d_flat, d_row)


def test_dead_rows_are_written_and_hidden_gradients_left(backend, rng):
    q, k, v, dout = random_inputs(rng, Tq=5, Tk=3)
    got = forward(q, k, v, backend, causal=True)
    assert not got["o"][:, :2].any()
    assert np.isneginf(got["row_max"][..., :2]).all()
    assert not got["row_sum"][..., :2].any()
    assert not got["p"][..., :2, :].any()
    d_row = np.full_like(got["row_max"], np.nan)
    dq = np.full_like(q, 7)
    kernels.attention_bwd_dq_f32(q, k, v, got["p"], dout, d_row, dq, causal=True, backend=backend)
    assert (dq[:, :2] == 7).all()


def test_the_kernels_take_float32_in_place_or_not_at_all(rng):
    q, k, v, _ = random_inputs(rng)
    results = empty_results(q, k)

    def call(**given):
        arrays = {"q": q, "k": k, "v": v} | results | given
        kernels.attention_fwd_f32(*arrays.values())

    for name in ("q", "k", "v", "o", "p", "row_max", "row_sum"):
        good = ({"q": q, "k": k, "v": v} | results)[name]
        wrong = [
            (TypeError, good.astype(np.float64)),
            (TypeError, good.tolist()),
            (TypeError, None),
            (ValueError, good.repeat(2, -1)[..., ::2]),
            ((TypeError, ValueError), good.astype(">f4")),
        ]
        for error, bad in wrong:
            with pytest.raises(error, match=rf"^{name} "):
                call(**{name: bad})
        with pytest.raises(ValueError, match="must have"):
            call(**{name: good[..., :1].copy()})
    for name in ("p", "row_max", "row_sum"):
        with pytest.raises(ValueError, match=f"^{name} "):
            call(**{name: np.asfortranarray(np.ones((*results[name].shape[:-1], 5), np.float32))})
    for name in ("o", "p", "row_max", "row_sum"):
        assert np.isnan(results[name]).all()  # refused calls write nothing


def test_kernel_outputs_do_not_overlap(rng):
    q, k, v, dout = random_inputs(rng)
    got = forward(q, k, v, None)
    d_row = np.zeros_like(got["row_max"])
    both = np.zeros_like(k)
    with pytest.raises(ValueError, match="overlap"):
        kernels.attention_bwd_dkv_f32(q, k, v, got["p"], dout, d_row, both, both)
    with pytest.raises(ValueError, match="overlap"):
        kernels.attention_bwd_dq_f32(q, k, v, got["p"], dout, d_row, q)
    with pytest.raises(ValueError, match="overlap"):
        kernels.attention_fwd_f32(q, k, v, got["o"], got["p"], d_row, d_row)
    assert not both.any()


def test_the_last_run_of_a_kernel(backend, rng):
    q, k, v, _ = random_inputs(rng)
    forward(q, k, v, backend)
    last = forge.last_run()
    assert (last["backend"], last["kernel"]) == (backend, "materialized")
    assert {name: last["arrays"][name] for name in "qkv"} == dict.fromkeys("qkv", IN_PLACE[backend])


def test_emulated_fma_rounds_once():
    """Cases where rounding the float64 sum a second time would give another float32."""
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)  # product 1 + 2^-11 + 2^-24
    assert emulate.fma(a, b, np.float32(0)) == np.float32(1 + 2.0**-11)  # a tie goes to even
    assert emulate.fma(a, b, np.float32(2.0**-90)) == np.nextafter(
        np.float32(1 + 2.0**-11), np.float32(2)
    )
    assert emulate.fma(a, b, np.float32(-(2.0**-90))) == np.float32(1 + 2.0**-11)


def test_probabilities_against_float64(inputs, mask_options, backend):
    q, k, v, _ = inputs
    got = forward(q, k, v, backend, **mask_options)
    Problem(q, k, v, **mask_options).check("materialized", out=got["o"], probs=got["p"])
