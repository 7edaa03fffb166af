"""forge.torch in half precision: gradients, torch.compile, autocast."""

import pytest
from optional import need
from oracle import random_inputs

torch = need("torch")

import forge.torch as ft  # noqa: E402


def tensors(rng, **sizes):
    return [torch.from_numpy(x) for x in random_inputs(rng, **sizes)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_half_precision_is_the_float32_kernels_rounded_once(rng, dtype, compiled, fused_backend):
    *inputs, dout = (x.to(dtype) for x in tensors(rng, B=2, Tq=9, H=4, Hkv=2, hd=8))

    def call(*given):
        return ft.attention(*given, causal=True, window=5, backend=fused_backend)

    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    given = [x.clone().requires_grad_() for x in inputs]
    out = function(*given)
    out.backward(dout)
    wide = [x.float().requires_grad_() for x in inputs]
    exact = call(*wide)
    exact.backward(dout.float())
    assert out.dtype == dtype
    torch.testing.assert_close(out, exact.to(dtype), rtol=0, atol=0)
    for x, want in zip(given, wide, strict=True):
        torch.testing.assert_close(x.grad, want.grad.to(dtype), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs), out, rtol=0, atol=0)


def test_a_cache_of_halves_is_read_under_a_float32_query(rng, fused_backend):
    q, k, v, dout = tensors(rng, B=1, Tq=4, Tk=9, H=2, hd=8)
    q, k, v = (x.requires_grad_() for x in (q, k.bfloat16(), v.bfloat16()))
    out = ft.attention(q, k, v, backend=fused_backend)
    out.backward(dout)
    assert out.dtype == q.grad.dtype == torch.float32
    assert k.grad.dtype == v.grad.dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"k must be float16 as q is, got float32; pass k\.to"):
        ft.attention(q.half(), k.float(), v.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_decides_the_dtype(rng, dtype, fused_backend):
    q, k, v, dout = (x.requires_grad_() for x in tensors(rng, B=1, Tq=4, H=2, hd=8))
    with torch.autocast("cpu", dtype=dtype):
        out = ft.attention(q, k, v, backend=fused_backend)
        assert ft.scaled_dot_product_attention(q, k, v).dtype == dtype
        exact = ft.attention(q, k, v, kernel="materialized")
    assert out.dtype == dtype
    assert exact.dtype == torch.float32
    torch.testing.assert_close(
        out, ft.attention(*(x.to(dtype) for x in (q, k, v)), backend=fused_backend)
    )
    out.backward(dout.to(dtype))
    assert q.grad.dtype == torch.float32
