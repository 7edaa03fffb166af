"""forge.jax: attention on JAX arrays under jit, grad, vmap, scan and checkpoint."""

import sys

import forge
import numpy as np
import pytest
from optional import need
from oracle import Problem, random_inputs
from scripts import run_script

jax = need("jax")

import forge.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "two-sided window": {"window": (2, 1)},
    "softcap and scale": {"softcap": 2.0, "scale": -0.7},
    "offset": {"causal": True, "query_offset": 1},
    "padded": {"causal": True, "query_offset": [2, 3], "key_start": [1, 0], "key_end": [6, 5]},
}


def jax_arrays(rng, **sizes):
    return [jnp.asarray(x) for x in random_inputs(rng, **sizes)]


def positions_in(make, options):
    return {n: make(np.array(x)) if isinstance(x, list) else x for n, x in options.items()}


def plain(q, k, v, *, causal=False, window=None, softcap=None):
    """The same attention in JAX's own operations, [B, T, heads, hd]."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    s = softcap * jnp.tanh(s / softcap) if softcap else s
    i, j = jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], jnp.arange(k.shape[1])
    seen = (j <= i) if causal else jnp.ones((q.shape[1], k.shape[1]), bool)
    seen = seen & (j > i - window) if window else seen
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", p, v)


def gradients(function, q, k, v, dout):
    return jax.grad(lambda *x: (function(*x) * dout).sum(), argnums=(0, 1, 2))(q, k, v)


def assert_close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6)


def assert_equal(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_it_computes_what_forge_attention_computes(rng, options, jit, kernel, backend):
    arrays = random_inputs(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2)
    out, saved = forge.attention_forward(
        *arrays[:3], kernel=kernel, backend=backend, **positions_in(np.array, options)
    )
    want = forge.attention_backward(arrays[3], saved)
    q, k, v, dout = (jnp.asarray(x) for x in arrays)
    for make in (np.array, jnp.asarray):  # known when traced, and an operand

        def attention(q, k, v, make=make):
            return fj.attention(
                q, k, v, kernel=kernel, backend=backend, **positions_in(make, options)
            )

        assert_equal(jit(attention)(q, k, v), out)
        assert_equal(jit(lambda *x, f=attention: gradients(f, *x))(q, k, v, dout), want)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_jax(rng, heads, causal):
    H, Hkv = heads
    given = jax_arrays(rng, B=2, Tq=33, H=H, Hkv=Hkv, hd=16)

    def theirs(*x):
        return jax.nn.dot_product_attention(*x, is_causal=causal)

    def ours(*x):
        return fj.attention(*x, causal=causal)

    for function in (lambda f, *x: f(*x[:3]), gradients):
        got, want = (jax.jit(lambda *x, f=f, g=function: g(f, *x))(*given) for f in (ours, theirs))
        assert_close(got, want)


@pytest.mark.parametrize(
    "options", [{"causal": True, "window": 5}, {"softcap": 1.5}, {"causal": True, "softcap": 0.5}]
)
def test_gradients_flow_through_what_stands_around_it(rng, options):
    """Through projections before and after, a key shared with a value, and a loss not linear."""
    q, k, v, w = jax_arrays(rng, B=2, Tq=19, H=4, hd=8)

    def loss(attention, q, k, w):
        out = attention(jnp.sin(q), k * 2, k + v, **options)
        return jnp.log(1 + (out @ w[0, 0].T) ** 2).mean()

    def step(attention):
        return jax.jit(
            jax.value_and_grad(lambda *x: loss(attention, *x), argnums=(0, 1, 2))
        )(q, k, w)  # fmt: skip

    assert_close(step(fj.attention), step(plain))


def test_three_axes(rng):
    q, k, v, dout = jax_arrays(rng, B=2, Tq=9, H=4, Hkv=2, hd=8)
    flat = [x.reshape(2, 9, -1) for x in (q, k, v, dout)]

    def three(*x):
        return fj.attention(*x, causal=True, num_heads=4, num_kv_heads=2)

    def four(*x):
        return fj.attention(*x, causal=True)

    assert_equal(three(*flat[:3]), four(q, k, v).reshape(2, 9, -1))
    want = [x.reshape(2, 9, -1) for x in gradients(four, q, k, v, dout)]
    assert_equal(list(gradients(three, *flat)), want)


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("x64")
def test_float64_by_the_materialized_kernel(cpu, rng):
    given = random_inputs(rng, dtype=np.float64)
    q, k, v, dout = (jnp.asarray(x) for x in given)
    with pytest.raises(TypeError, match="materialized"):
        fj.attention(q, k, v)
    got = gradients(lambda *x: fj.attention(*x, kernel="materialized", backend=cpu), q, k, v, dout)
    names = dict(zip(("dq", "dk", "dv"), got, strict=True))
    Problem(*given).check("materialized", unit=2.0**-53, **names)


VMAPPED = {
    "all": (0, 0, 0),
    "queries only": (0, None, None),
    "keys and values on other axes": (None, 1, 2),
    "the last axes": (4, 4, None),
}


@pytest.mark.parametrize("axes", VMAPPED.values(), ids=VMAPPED)
@pytest.mark.parametrize("kernel", ["fused", "materialized"])
def test_vmap(rng, axes, kernel):
    many = [jax_arrays(rng, B=2, Tq=7, H=2, hd=4) for _ in range(3)]
    q, k, v, dout = (jnp.stack(x) for x in zip(*many, strict=True))
    given = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip((q, k, v), axes, strict=True)
    ]

    def attention(*x):
        return fj.attention(*x, causal=True, window=4, kernel=kernel)

    def step(q, k, v, dout):
        return attention(q, k, v), gradients(attention, q, k, v, dout)

    got = jax.jit(jax.vmap(step, in_axes=(*axes, 0)))(*given, dout)
    one = [
        step(*(x if a is None else jnp.take(x, n, a) for x, a in zip(given, axes, strict=True)),
             dout[n])
        for n in range(3)
    ]  # fmt: skip
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *one))


def test_vmap_of_positions(rng):
    """Mapped with the arrays or without them, twice over, one int or an int a sequence."""
    q, k, v, _ = jax_arrays(rng, B=2, Tq=3, Tk=7, H=2, hd=4)
    ends = jnp.array([[3, 5], [7, 1], [0, 2]])
    offsets = jnp.array([0, 4])

    def attention(end, offset):
        return fj.attention(
            q, k, v, causal=True, key_start=np.array([0, 1]), key_end=end, query_offset=offset
        )

    got = jax.vmap(jax.vmap(attention, (None, 0)), (0, None))(ends, offsets)
    want = jnp.stack([jnp.stack([attention(end, x) for x in offsets]) for end in ends])
    assert_close(got, want)


def test_scan_over_layers(rng):
    x, *_ = jax_arrays(rng, B=2, Tq=9, H=2, hd=4)
    weights = 0.3 * jnp.asarray(rng.standard_normal((3, 3, 4, 4), dtype=np.float32))

    def loss(attention, weights):
        def layer(x, w):
            q, k, v = (x @ w[i] for i in range(3))
            return x + attention(q, k, v, causal=True), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).mean()

    got, want = (
        jax.jit(jax.value_and_grad(lambda w, f=f: loss(f, w)))(weights)
        for f in (fj.attention, plain)
    )
    assert_close(got, want)


def test_scan_over_a_cache(rng):
    """Decoding with a cache of fixed size, whose fill is traced."""
    q, k, v, _ = jax_arrays(rng, B=2, Tq=8, H=4, Hkv=2, hd=4)

    def step(carry, t):
        keys, values = carry
        keys = jax.lax.dynamic_update_slice_in_dim(
            keys, jax.lax.dynamic_slice_in_dim(k, t, 1, 1), t, 1
        )
        values = jax.lax.dynamic_update_slice_in_dim(
            values, jax.lax.dynamic_slice_in_dim(v, t, 1, 1), t, 1
        )
        query = jax.lax.dynamic_slice_in_dim(q, t, 1, 1)
        out = fj.attention(query, keys, values, causal=True, query_offset=t, key_end=t + 1)
        return (keys, values), out[:, 0]

    empty = jnp.full_like(k, jnp.nan)
    _, outs = jax.jit(lambda: jax.lax.scan(step, (empty, empty), jnp.arange(8)))()
    assert_close(outs.swapaxes(0, 1), fj.attention(q, k, v, causal=True))


def test_one_compiled_program_serves_all_traced_positions(rng):
    q, k, v, _ = jax_arrays(rng)
    traces = []

    @jax.jit
    def attention(end):
        traces.append(end)
        return fj.attention(q, k, v, key_end=end)

    for end in range(5):
        assert_equal(attention(end), fj.attention(q, k, v, key_end=end))
    assert len(traces) == 1


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4)])
def test_nothing_to_compute(shape):
    x = jnp.zeros(shape)
    assert fj.attention(x, x, x, key_start=np.zeros(shape[0], int)).shape == shape
    assert [g.shape for g in gradients(fj.attention, x, x, x, x)] == [shape] * 3
    many = jnp.zeros((2, *shape))
    assert jax.vmap(fj.attention)(many, many, many).shape == (2, *shape)


def test_large_arrays_do_not_lock_up():
    """On one thread of XLA's, inside a program with work before and after the callback."""
    run_script(
        """
        import forge.jax, jax, jax.numpy as jnp
        x = jnp.ones((1, 1024, 16, 64))
        f = jax.jit(jax.grad(lambda x: (forge.jax.attention(x * 2, x + 1, x) ** 2).sum()))
        for _ in range(3):
            assert jnp.isfinite(f(x)).all()
        """,
        XLA_FLAGS="--xla_cpu_multi_thread_eigen=false",
    )


def test_second_derivatives_are_refused(rng):
    q, k, v, _ = jax_arrays(rng)
    for loss in (lambda x: fj.attention(x, k, v).sum(), lambda x: fj.attention(q, x, v).sum()):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.grad(lambda x, loss=loss: (jax.grad(loss)(x) ** 2).sum())(q)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.hessian(loss)(q)


def test_forward_mode_is_refused(rng):
    q, k, v, _ = jax_arrays(rng)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(fj.attention, (q, k, v), (q, k, v))


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_wrong_inputs(rng, position, jit):
    given = jax_arrays(rng)[:3]
    name = "qkv"[position]
    for error, message, value in [
        (TypeError, r"float32.*int8; .*astype", given[0].astype(jnp.int8)),
        (TypeError, "float32.*int32", given[0].astype(jnp.int32)),
        (ValueError, "rank|shape|hd", jnp.zeros((5, 4))),
    ]:
        wrong = [*given[:position], value, *given[position + 1 :]]
        with pytest.raises(error, match=rf"^[{name}kv] .*{message}"):
            jit(fj.attention)(*wrong)
    given[position] = np.asarray(given[position])
    with pytest.raises(TypeError, match=f"^{name} must be a jax.Array, got ndarray"):
        fj.attention(*given)


def test_options_are_checked_when_traced(rng):
    q, k, v, _ = jax_arrays(rng)
    for error, name, value in [
        (ValueError, "window", 0),
        (TypeError, "window", [1, 2]),
        (ValueError, "softcap", -1.0),
        (TypeError, "softcap", jnp.float32(1.0)),
        (ValueError, "key_end", 9),
        (ValueError, "key_end", np.array([9])),
        (TypeError, "key_end", jnp.array([1.0])),
        (ValueError, "key_end", jnp.array([1, 2, 3])),
        (TypeError, "causal", 1),
        (ValueError, "kernel", "flash"),
        (ValueError, "backend", "gpu"),
    ]:
        with pytest.raises(error, match=rf"^{name} "):
            jax.jit(lambda *x, o={name: value}: fj.attention(*x, **o))(q, k, v)


def test_a_traced_position_out_of_range_says_so(rng, caplog):
    q, k, v, _ = jax_arrays(rng)
    attention = jax.jit(lambda end: fj.attention(q, k, v, key_end=end))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"key_end must be within \[0, 5\], got 6"):
        attention(6).block_until_ready()
    assert attention(5).shape == q.shape


def test_forge_alone_does_not_import_jax():
    run_script("import sys, forge; assert 'jax' not in sys.modules")


def test_without_jax_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "forge.jax")
    with pytest.raises(ImportError, match=r"pip install jax, or pip install '\.\[jax\]'"):
        import forge.jax  # noqa: F401
