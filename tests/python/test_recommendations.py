"""What an error recommends in forge's place does what forge refused."""

import re

import numpy as np
import pytest
from optional import need
from oracle import random_inputs


def refused(error, function, *arguments, **options):
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


def recommended(message, names):
    """Return the function that the message says to use, within the context that it names."""
    found = re.search(
        r"\b((?:F|jax\.nn|mx\.fast)\.\w+)(?: within (torch\.\S+\([\w.]+\)))?", message
    )
    assert found, message
    function = eval(found[1], names)

    def call(*arguments, **options):
        if found[2] is None:
            return function(*arguments, **options)
        with eval(found[2], names):
            return function(*arguments, **options)

    return call


@pytest.fixture
def libraries():
    torch = need("torch")
    need("torch.nn.attention")
    return {"torch": torch, "F": torch.nn.functional}


@pytest.fixture
def qkv(libraries, rng):
    """Tensors in the layout of F.scaled_dot_product_attention, ``[B, heads, T, hd]``."""
    tensors = map(libraries["torch"].from_numpy, random_inputs(rng)[:3])
    return [x.transpose(1, 2) for x in tensors]


def drop_in(*tensors, **options):
    import forge.torch

    return forge.torch.scaled_dot_product_attention(*tensors, **options)


def test_torch_second_derivatives(libraries, qkv):
    torch = libraries["torch"]

    def twice(attention):
        x = qkv[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(attention(x, *qkv[1:]).sum(), x, create_graph=True)
        return torch.autograd.grad((gradient**2).sum(), x)[0]

    message = refused(NotImplementedError, twice, drop_in)
    assert float(twice(recommended(message, libraries)).abs().max()) > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_torch_forward_mode(libraries, qkv):
    torch = libraries["torch"]

    def forward(attention):
        return torch.func.jvp(lambda x: attention(x, *qkv[1:]).sum(), (qkv[0],), (qkv[0],))[1]

    message = refused(NotImplementedError, forward, drop_in)
    tangent = forward(recommended(message, libraries))
    assert "reverse mode (backward, torch.autograd.grad)" in message
    x = qkv[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(drop_in(x, *qkv[1:]).sum(), x)
    torch.testing.assert_close((gradient * qkv[0]).sum(), tangent, rtol=1e-4, atol=1e-4)


def test_torch_tensors_elsewhere(libraries, qkv):
    elsewhere = [x.to("meta") for x in qkv]
    message = refused(ValueError, drop_in, *elsewhere)
    assert recommended(message, libraries)(*elsewhere).shape == qkv[0].shape


def test_torch_masks(libraries, qkv):
    """Each kind of mask by what the message names for it, against the mask itself."""
    import forge.torch

    torch, F = libraries["torch"], libraries["F"]
    T = qkv[0].shape[2]
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    message = refused(ValueError, drop_in, *qkv, attn_mask=j <= i)
    assert "causal mask give is_causal=True" in message
    got, want = drop_in(*qkv, is_causal=True), F.scaled_dot_product_attention(*qkv, j <= i)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    named = re.search(r"use forge\.torch\.attention with (.*?); for any other", message)[1]
    options = {"key_start": 1, "key_end": T - 1, "window": (2, 1), "query_offset": 1}
    assert set(re.findall(r"\w+", named)) - {"and"} == set(options)
    got = forge.torch.attention(*(x.transpose(1, 2) for x in qkv), **options)
    mask = (j >= 1) & (j < T - 1) & (j - (i + 1) <= 1) & (i + 1 - j <= 2)
    want = F.scaled_dot_product_attention(*qkv, mask).transpose(1, 2)
    seen = mask.any(1)
    torch.testing.assert_close(got[:, seen], want[:, seen], rtol=1e-5, atol=1e-6)
    other = (i + j) % 3 == 0
    out = recommended(message, libraries)(*qkv, other | (i == j))
    assert bool(torch.isfinite(out).all())


def test_torch_dropout_and_values_of_another_head_size(libraries, qkv):
    torch, F = libraries["torch"], libraries["F"]
    q, k, v = qkv
    message = refused(ValueError, drop_in, *qkv, dropout_p=0.5)
    assert recommended(message, libraries)(*qkv, dropout_p=0.5).shape == q.shape
    assert drop_in(*qkv, dropout_p=0).shape == q.shape
    message = refused(ValueError, drop_in, q, k, v[..., :3])
    want = recommended(message, libraries)(q, k, v[..., :3])
    assert "or pad value with zeros and cut the result" in message
    padded = drop_in(q, k, F.pad(v[..., :3], (0, v.shape[-1] - 3)))[..., :3]
    torch.testing.assert_close(padded, want, rtol=1e-5, atol=1e-6)


def test_jax_second_derivatives(rng):
    jax = need("jax")
    import forge.jax

    q, k, v = (jax.numpy.asarray(x) for x in random_inputs(rng)[:3])

    def twice(attention):
        def slope(x):
            return (jax.grad(lambda y: attention(y, k, v).sum())(x) ** 2).sum()

        return jax.grad(slope)(q)

    message = refused(NotImplementedError, twice, forge.jax.attention)
    assert np.isfinite(twice(recommended(message, {"jax": jax}))).all()


def test_mlx_derivatives(rng):
    mx = need("mlx.core")
    import forge.mlx

    q, k, v = (mx.array(x) for x in random_inputs(rng)[:3])

    def twice(attention):
        def slope(x):
            return (mx.grad(lambda y: attention(y, k, v).sum())(x) ** 2).sum()

        return mx.grad(slope)(q)

    message = refused(NotImplementedError, twice, forge.mlx.attention)
    theirs = recommended(message, {"mx": mx})
    assert np.isfinite(np.asarray(twice(lambda *x: theirs(*x, scale=1.0)))).all()
    message = refused(NotImplementedError, mx.jvp, forge.mlx.attention, [q, k, v], [q, k, v])
    assert message.endswith("use mx.vjp or mx.grad")
    _, gradients = mx.vjp(forge.mlx.attention, [q, k, v], [q])
    assert len(gradients) == 3
    assert mx.grad(lambda x: forge.mlx.attention(x, k, v).sum())(q).shape == q.shape
