"""forge.mlx: attention on MLX arrays, forward and backward, in MLX's memory."""

import gc
import sys

import forge
import numpy as np
import pytest
from optional import need
from oracle import Problem, random_inputs
from scripts import run_script

mx = need("mlx.core")

import forge.mlx as fm  # noqa: E402

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "two-sided window": {"window": (2, 1)},
    "softcap and scale": {"softcap": 2.0, "scale": -0.7},
    "offset": {"causal": True, "query_offset": 1},
    "padded": {"causal": True, "query_offset": [2, 3], "key_start": [1, 0], "key_end": [6, 5]},
}


def mlx_arrays(rng, **sizes):
    return [mx.array(x) for x in random_inputs(rng, **sizes)]


def positions_in(make, options):
    return {n: make(np.array(x)) if isinstance(x, list) else x for n, x in options.items()}


def plain(q, k, v, *, causal=False, window=None, softcap=None):
    """The same attention in MLX's own operations, [B, T, heads, hd]."""
    k, v = (mx.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = mx.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    s = softcap * mx.tanh(s / softcap) if softcap else s
    i, j = mx.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], mx.arange(k.shape[1])
    seen = (j <= i) if causal else mx.ones((q.shape[1], k.shape[1]), dtype=mx.bool_)
    seen = seen & (j > i - window) if window else seen
    p = mx.softmax(mx.where(seen, s, -mx.inf), axis=-1)
    return mx.einsum("bhij,bjhd->bihd", p, v)


def gradients(function, q, k, v, dout):
    return mx.grad(lambda *x: (function(*x) * dout).sum(), argnums=(0, 1, 2))(q, k, v)


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_mask_and_sinks_with_their_gradients(rng, dtype, kernel, backend):
    if dtype != "float32" and kernel == "materialized":
        pytest.skip("the materialized kernels take no half precision")
    arrays = random_inputs(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2, hd=8, hv=6)
    q, k, v, dout = (mx.array(x).astype(getattr(mx, dtype)) for x in arrays)
    bias = mx.array(rng.standard_normal((1, 4, 1, 7)).astype(np.float32)).astype(q.dtype)
    sinks = mx.array(rng.standard_normal(4).astype(np.float32))
    mask = mx.array(rng.random((2, 1, 5, 7)) < 0.7)
    options = {"kernel": kernel, "backend": backend}
    wide = [np.asarray(x.astype(mx.float32)) for x in (q, k, v, bias, dout)]
    out, saved = forge.attention_forward(
        *wide[:3], bias=wide[3], mask=np.asarray(mask), sinks=np.asarray(sinks), **options
    )
    want = forge.attention_backward(wide[4], saved, dbias=True, dsinks=True)

    def weighed(q, k, v, bias, sinks):
        got = fm.attention(q, k, v, bias=bias, mask=mask, sinks=sinks, **options)
        return (got * dout).sum()

    got = fm.attention(q, k, v, bias=bias, mask=mask, sinks=sinks, **options)
    tolerance = 1e-6 if dtype == "float32" else 2.0**-7
    np.testing.assert_allclose(np.asarray(got.astype(mx.float32)), out, tolerance, tolerance)
    found = mx.grad(weighed, argnums=(0, 1, 2, 3, 4))(q, k, v, bias, sinks)
    for gradient, expected, like in zip(found, want, (q, k, v, bias, sinks), strict=True):
        assert gradient.dtype == like.dtype
        np.testing.assert_allclose(
            np.asarray(gradient.astype(mx.float32)), expected, tolerance, tolerance
        )


def test_a_mask_may_say_causal(rng, kernel, backend):
    q, k, v, _ = mlx_arrays(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2)
    options = {"kernel": kernel, "backend": backend}
    np.testing.assert_array_equal(
        fm.attention(q, k, v, mask="causal", **options),
        fm.attention(q, k, v, causal=True, **options),
    )


def test_wrong_score_arrays_are_refused_in_words(rng):
    q, k, v, _ = mlx_arrays(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2)
    for error, pattern, options in (
        (ValueError, "^mask must be an mx.array or 'causal', got 'full'", {"mask": "full"}),
        (TypeError, "^mask must be an mx.array of bool.*float32; that is bias=mask",
         {"mask": mx.zeros((1, 1, 5, 7))}),
        (TypeError, "^bias .*that is mask=bias", {"bias": mx.ones((1, 1, 5, 7), mx.bool_)}),
        (ValueError, r"^bias must have shape .*bias\[None, None\]", {"bias": mx.zeros((5, 7))}),
    ):  # fmt: skip
        with pytest.raises(error, match=pattern):
            fm.attention(q, k, v, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_computes_what_forge_attention_computes(rng, options, kernel, backend):
    arrays = random_inputs(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2)
    out, saved = forge.attention_forward(
        *arrays[:3], kernel=kernel, backend=backend, **positions_in(np.array, options)
    )
    want = forge.attention_backward(arrays[3], saved)
    q, k, v, dout = (mx.array(x) for x in arrays)
    given = {"kernel": kernel, "backend": backend, **positions_in(mx.array, options)}
    np.testing.assert_array_equal(fm.attention(q, k, v, **given), out)
    got = gradients(lambda *x: fm.attention(*x, **given), q, k, v, dout)
    for gradient, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_mlx(rng, heads, causal):
    H, Hkv = heads
    q, k, v, dout = mlx_arrays(rng, B=2, Tq=33, H=H, Hkv=Hkv, hd=16)

    def theirs(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=0.25, mask="causal" if causal else None
        )
        return out.swapaxes(1, 2)

    def ours(*x):
        return fm.attention(*x, causal=causal)

    assert_close(ours(q, k, v), theirs(q, k, v))
    for got, want in zip(
        gradients(ours, q, k, v, dout), gradients(theirs, q, k, v, dout), strict=True
    ):
        assert_close(got, want)


@pytest.mark.parametrize(
    "options", [{"causal": True, "window": 5}, {"softcap": 1.5}, {"causal": True, "softcap": 0.5}]
)
def test_gradients_flow_through_what_stands_around_it(rng, options):
    """Through projections before and after, a key shared with a value, and a loss not linear."""
    q, k, v, w = mlx_arrays(rng, B=2, Tq=19, H=4, hd=8)

    def loss(attention, q, k, w):
        out = attention(mx.sin(q), k * 2, k + v, **options)
        return mx.log(1 + (out @ w[0, 0].T) ** 2).mean()

    every = (0, 1, 2)
    want = mx.value_and_grad(lambda *x: loss(plain, *x), argnums=every)(q, k, w)
    got = mx.value_and_grad(lambda *x: loss(fm.attention, *x), argnums=every)(q, k, w)
    assert_close(got[0], want[0])
    for gradient, expected in zip(got[1], want[1], strict=True):
        assert_close(gradient, expected)


def test_three_axes(rng):
    q, k, v, dout = mlx_arrays(rng, B=2, Tq=9, H=4, Hkv=2, hd=8)
    flat = [x.reshape(2, 9, -1) for x in (q, k, v, dout)]
    heads = {"num_heads": 4, "num_kv_heads": 2}
    out = fm.attention(*flat[:3], causal=True, **heads)
    np.testing.assert_array_equal(out, fm.attention(q, k, v, causal=True).reshape(2, 9, -1))
    got = gradients(lambda *x: fm.attention(*x, causal=True, **heads), *flat)
    want = gradients(lambda *x: fm.attention(*x, causal=True), q, k, v, dout)
    for gradient, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(gradient, expected.reshape(2, 9, -1))


def test_float64_by_the_materialized_kernel(cpu, rng):
    with mx.stream(mx.cpu):
        given = random_inputs(rng, dtype=np.float64)
        q, k, v, dout = (mx.array(x, dtype=mx.float64) for x in given)
        got = gradients(
            lambda *x: fm.attention(*x, kernel="materialized", backend=cpu), q, k, v, dout
        )
        names = dict(zip(("dq", "dk", "dv"), (np.array(x) for x in got), strict=True))
    Problem(*given).check("materialized", unit=2.0**-53, **names)


def test_inputs_are_read_and_results_written_where_mlx_keeps_them(rng):
    """Views too: transposed, sliced backwards, broadcast. MLX sees what forge wrote."""
    heads_first = mx.array(rng.standard_normal((2, 4, 9, 8), dtype=np.float32))
    q = heads_first.swapaxes(1, 2)
    k = mx.array(rng.standard_normal((2, 9, 4, 8), dtype=np.float32))[:, ::-1]
    v = mx.broadcast_to(k[:1], k.shape)
    out = fm.attention(q, k, v)
    used = forge.last_run()["arrays"]
    assert {used[name] for name in "qkv"} <= {"in place", "wrapped"}
    assert_close(out, plain(q, k, v))
    assert_close(out + 1, plain(q, k, v) + 1)


def test_an_input_that_is_reused_in_place_does_not_change_the_gradient(rng):
    """MLX writes results over arrays that nobody refers to any more; saved refers to them."""
    q, k, v, dout = mlx_arrays(rng, B=1, Tq=64, H=2, hd=16)

    def loss(q):
        hidden = mx.sin(q)
        out = fm.attention(hidden, k, v, causal=True)
        del hidden
        for _ in range(4):
            out = out * 1.5 + 1
        return (out * dout).sum()

    def expected(q):
        out = plain(mx.sin(q), k, v, causal=True)
        for _ in range(4):
            out = out * 1.5 + 1
        return (out * dout).sum()

    assert_close(mx.grad(loss)(q), mx.grad(expected)(q))


def test_what_is_saved_is_released(rng):
    q, k, v, dout = mlx_arrays(rng, B=1, Tq=256, H=4, hd=64)

    def step():
        mx.eval(fm.attention(q, k, v))
        mx.eval(gradients(fm.attention, q, k, v, dout))

    step()
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(5):
        step()
    gc.collect()
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4)])
def test_nothing_to_compute(shape):
    x = mx.zeros(shape)
    assert fm.attention(x, x, x).shape == shape
    assert [g.shape for g in gradients(fm.attention, x, x, x, x)] == [shape] * 3


def test_checkpoint_computes_it_again(rng):
    q, k, v, dout = mlx_arrays(rng, Tq=9)
    again = mx.checkpoint(lambda *x: fm.attention(*x, window=2))
    want = gradients(lambda *x: fm.attention(*x, window=2), q, k, v, dout)
    for got, expected in zip(gradients(again, q, k, v, dout), want, strict=True):
        np.testing.assert_array_equal(got, expected)


TRACED = {
    "compile": lambda f: mx.compile(f),
    "compile of grad": lambda f: mx.compile(mx.grad(lambda *x: f(*x).sum())),
    "vmap": lambda f: mx.vmap(f),
}


@pytest.mark.parametrize("transform", TRACED.values(), ids=TRACED)
def test_what_mlx_traces_is_refused(rng, transform):
    q, k, v, _ = mlx_arrays(rng)
    given = [mx.stack([x, x]) for x in (q, k, v)] if transform is TRACED["vmap"] else [q, k, v]
    with pytest.raises(ValueError, match=r"outside mx\.compile and mx\.vmap"):
        transform(fm.attention)(*given)
    np.testing.assert_array_equal(fm.attention(q, k, v), fm.attention(q, k, v))


def test_a_gradient_through_a_compiled_function_is_right_or_refused(rng):
    """mx.compile steps aside where a gradient is being taken around it."""
    q, k, v, dout = mlx_arrays(rng, Tq=9)
    compiled = mx.compile(fm.attention)
    try:
        got = gradients(compiled, q, k, v, dout)
    except ValueError as error:
        assert "outside mx.compile" in str(error)  # noqa: PT017
        return
    for gradient, want in zip(got, gradients(fm.attention, q, k, v, dout), strict=True):
        np.testing.assert_array_equal(gradient, want)


def test_second_derivatives_are_refused(rng):
    q, k, v, _ = mlx_arrays(rng)
    for loss in (lambda x: fm.attention(x, k, v).sum(), lambda x: fm.attention(q, x, v).sum()):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            mx.grad(lambda x, loss=loss: (mx.grad(loss)(x) ** 2).sum())(q)


def test_forward_mode_is_refused(rng):
    q, k, v, _ = mlx_arrays(rng)
    with pytest.raises(NotImplementedError, match=r"mx\.jvp"):
        mx.jvp(fm.attention, [q, k, v], [q, k, v])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_wrong_inputs(rng, position):
    given = mlx_arrays(rng)[:3]
    name = "qkv"[position]
    for error, message, value in [
        (TypeError, "must be an mx.array, got ndarray", np.zeros((1, 5, 2, 4), np.float32)),
        (TypeError, r"float32.*int8; .*astype\(mlx.core.float32\)", given[0].astype(mx.int8)),
        (TypeError, "float32.*int32", given[0].astype(mx.int32)),
        (ValueError, "rank|shape|hd", mx.zeros((5, 4))),
    ]:
        wrong = [*given[:position], value, *given[position + 1 :]]
        with pytest.raises(error, match=rf"^[{name}kv] .*{message}"):
            fm.attention(*wrong)


def test_options_are_checked_as_everywhere(rng):
    q, k, v, _ = mlx_arrays(rng)
    for error, name, value in [
        (ValueError, "window", 0),
        (ValueError, "softcap", -1.0),
        (ValueError, "key_end", mx.array([9])),
        (TypeError, "key_end", mx.array([1.0])),
        (TypeError, "causal", 1),
        (ValueError, "kernel", "flash"),
    ]:
        with pytest.raises(error, match=rf"^{name} "):
            fm.attention(q, k, v, **{name: value})


def test_forge_alone_does_not_import_mlx():
    run_script("import sys, forge; assert not any(m.split('.')[0] == 'mlx' for m in sys.modules)")


def test_without_mlx_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delitem(sys.modules, "forge.mlx")
    with pytest.raises(ImportError, match=r"'mlx\[cpu\]', or pip install '\.\[mlx\]'"):
        import forge.mlx  # noqa: F401
