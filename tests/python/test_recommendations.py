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


def test_torch_dropout(libraries, qkv):
    message = refused(ValueError, drop_in, *qkv, dropout_p=0.5)
    assert recommended(message, libraries)(*qkv, dropout_p=0.5).shape == qkv[0].shape
    assert drop_in(*qkv, dropout_p=0).shape == qkv[0].shape


def test_torch_causal_with_a_mask(libraries, qkv):
    """Both ways that the message names: causal in the mask, and forge.torch.attention."""
    import forge.torch

    torch = libraries["torch"]
    T = qkv[0].shape[2]
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    mask = (i + j) % 3 != 0
    message = refused(ValueError, drop_in, *qkv, attn_mask=mask, is_causal=True)
    assert "use forge.torch.attention with causal=True and mask= or bias=" in message
    got = drop_in(*qkv, attn_mask=mask & (j <= i))
    turned = (x.transpose(1, 2) for x in qkv)
    want = forge.torch.attention(*turned, causal=True, mask=mask[None, None]).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_masks_of_the_wrong_rank_say_how_to_write_them(rng):
    import forge

    q, k, v, _ = random_inputs(rng, B=2, Tq=5, Tk=6, H=4, Hkv=2)
    for shape, way in (
        ((5, 6), "mask[None, None]"),
        ((4, 5, 6), "mask[None]"),
        ((2, 5, 6), "mask[:, None]"),
    ):
        mask = rng.random(shape) < 0.8
        message = refused(ValueError, forge.attention, q, k, v, mask=mask)
        assert way in message
        assert forge.attention(q, k, v, mask=eval(way, {"mask": mask})).shape == q.shape


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
