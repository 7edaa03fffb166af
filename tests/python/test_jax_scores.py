"""bias, mask and sinks on JAX's arrays, with their gradients."""

import forge
import numpy as np
import pytest
from optional import need
from oracle import random_inputs

jax = need("jax")

import forge.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402


def jax_arrays(rng, **sizes):
    return [jnp.asarray(x) for x in random_inputs(rng, **sizes)]


def assert_close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6)


def assert_equal(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def shaping_of(rng, B=2, Tq=5, Tk=7, H=4):
    return {
        "bias": rng.standard_normal((1, H, 1, Tk)).astype(np.float32),
        "mask": rng.random((B, 1, Tq, Tk)) < 0.7,
        "sinks": rng.standard_normal(H).astype(np.float32),
    }


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_bias_mask_and_sinks_with_their_gradients(rng, jit, kernel, backend):
    arrays = random_inputs(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2, hd=8, hv=6)
    shaping = shaping_of(rng)
    runs = {"key_start": rng.integers(0, 3, (2, 5)), "key_end": rng.integers(4, 8, (2, 5))}
    options = {"kernel": kernel, "backend": backend, **runs}
    out, saved = forge.attention_forward(*arrays[:3], **shaping, **options)
    want = forge.attention_backward(arrays[3], saved, dbias=True, dsinks=True)
    q, k, v, dout = (jnp.asarray(x) for x in arrays)
    bias, sinks = jnp.asarray(shaping["bias"]), jnp.asarray(shaping["sinks"])
    mask = jnp.asarray(shaping["mask"])

    def attention(q, k, v, bias, sinks):
        return fj.attention(q, k, v, bias=bias, mask=mask, sinks=sinks, **options)

    def weighed(*x):
        return (attention(*x) * dout).sum()

    assert_equal(jit(attention)(q, k, v, bias, sinks), out)
    got = jit(jax.grad(weighed, argnums=range(5)))(q, k, v, bias, sinks)
    assert_equal(got, want)


def test_bias_and_sinks_under_vmap(rng, kernel, backend):
    """One bias for all of a batch, some of the batch axes mapped: gradients add up."""
    q, k, v, dout = (jnp.asarray(x) for x in random_inputs(rng, B=6, Tq=5, Tk=7, H=4, Hkv=2))
    shaping = shaping_of(rng, B=1)
    bias, sinks, mask = (jnp.asarray(shaping[name]) for name in ("bias", "sinks", "mask"))

    def weighed(q, k, v, bias, sinks, dout):
        options = {"bias": bias, "sinks": sinks, "mask": mask}
        out = fj.attention(q, k, v, kernel=kernel, backend=backend, **options)
        return (out * dout).sum()

    def mapped(q, k, v, bias, sinks):
        split = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v)]
        each = jax.vmap(weighed, in_axes=(0, 0, 0, None, None, 0))
        return each(*split, bias, sinks, dout.reshape(3, 2, *dout.shape[1:])).sum()

    got = jax.grad(mapped, argnums=range(5))(q, k, v, bias, sinks)
    want = jax.grad(lambda *x: weighed(*x, dout), argnums=range(5))(q, k, v, bias, sinks)
    assert_close(got, want)


def test_wrong_score_arrays_are_refused_in_words(rng):
    q, k, v, _ = jax_arrays(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2)
    for error, pattern, options in (
        (TypeError, "^mask must be a jax.Array of bool, got float32; that is bias=mask",
         {"mask": jnp.zeros((1, 1, 5, 7))}),
        (TypeError, "^bias .*that is mask=bias", {"bias": jnp.ones((1, 1, 5, 7), bool)}),
        (TypeError, "^bias must be a jax.Array, got ndarray", {"bias": np.zeros((1, 1, 5, 7))}),
        (ValueError, r"^bias must have shape .*bias\[None, None\]", {"bias": jnp.zeros((5, 7))}),
        (ValueError, r"^sinks must have shape \(4,\)", {"sinks": jnp.zeros(3)}),
        (TypeError, "^bias must be float32 where q is float32, got bfloat16",
         {"bias": jnp.zeros((1, 1, 5, 7), jnp.bfloat16)}),
    ):  # fmt: skip
        with pytest.raises(error, match=pattern):
            fj.attention(q, k, v, **options)
