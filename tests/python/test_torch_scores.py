"""bias, mask, sinks, runs and packed sequences on PyTorch's tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import forge.torch as ft  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def reference(q, k, v, bias=None, mask=None, sinks=None):
    """In float64, whole matrices, differentiated by torch; layout [B, T, heads, hd]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias.double()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)
        return (torch.cat([s, sink], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    return (s.softmax(-1) @ v).transpose(1, 2)


def compare(function, want, tensors, tolerance=2e-5):
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    got = function()
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad((got.double() * weights).sum(), tensors)
    expected = torch.autograd.grad((want * weights).sum(), tensors)
    for x, gradient, right in zip(tensors, gradients, expected, strict=True):
        assert gradient.dtype == x.dtype
        torch.testing.assert_close(gradient, right.to(x.dtype), rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("shape", [(2, 4, 17, 23), (1, 4, 17, 23), (1, 4, 1, 23), (2, 1, 17, 1)])
def test_bias_and_sinks_have_gradients(shape, kernel):
    tensors = leaves((2, 17, 4, 8), (2, 23, 2, 8), (2, 23, 2, 12), shape, (4,))
    q, k, v, bias, sinks = tensors
    mask = torch.rand(1, 1, 17, 23, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"bias": bias, "mask": mask, "sinks": sinks}
    compare(lambda: ft.attention(q, k, v, kernel=kernel, **options),
            reference(q, k, v, **options), tensors)  # fmt: skip


def test_a_bias_without_a_gradient_gets_none(kernel):
    q, k, v, bias = leaves((1, 5, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), (1, 1, 5, 6))
    ft.attention(q, k, v, bias=bias.detach(), kernel=kernel).sum().backward()
    assert bias.grad is None
    assert q.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_its_own_or_a_float32_bias(dtype):
    q, k, v, bias = leaves((1, 9, 2, 8), (1, 20, 2, 8), (1, 20, 2, 8), (1, 2, 1, 20), dtype=dtype)
    for given in (bias, bias.detach().float().requires_grad_()):
        out = ft.attention(q, k, v, bias=given)
        gradient = torch.autograd.grad(out.float().sum(), given)[0]
        assert out.dtype == dtype
        assert gradient.dtype == given.dtype


def test_one_graph_of_torch_compile():
    q, k, v, bias, sinks = leaves((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (1, 4, 1, 9), (4,))

    def function(*tensors):
        q, k, v, bias, sinks = tensors
        return ft.attention(q, k, v, bias=bias, sinks=sinks, causal=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(function(q, k, v, bias, sinks).sum(), (q, bias, sinks))
    got = torch.autograd.grad(compiled(q, k, v, bias, sinks).sum(), (q, bias, sinks))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6, 9), (4, 6, 9), (2, 1, 6, 9), (1, 1, 1, 9), (1, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_the_drop_in_takes_masks(shape, kind):
    q, k, v, mask = leaves((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 5), shape)
    if kind == "bool":
        given = mask.detach() > -1
        tensors = (q, k, v)
    else:
        given, tensors = mask, (q, k, v, mask)
    want = scaled_dot_product_attention(q, k, v, attn_mask=given)
    got = ft.scaled_dot_product_attention(q, k, v, attn_mask=given)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    for a, b in zip(
        torch.autograd.grad((got * weights).sum(), tensors),
        torch.autograd.grad((want * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_drop_in_takes_masks_of_five_axes():
    q, k, v = leaves((2, 3, 4, 6, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8))
    mask = torch.rand(3, 1, 6, 9, generator=torch.Generator().manual_seed(1)) < 0.8
    want = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    got = ft.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_as_separate_ones(causal, kernel):
    q, k, v, sinks = leaves((41, 4, 8), (60, 2, 8), (60, 2, 12), (4,))
    cu_q, cu_k = torch.tensor([0, 7, 40, 41]), torch.tensor([0, 12, 45, 60])
    options = {"causal": causal, "softcap": 5.0, "sinks": sinks, "kernel": kernel}
    lists = (cu_q.int(), cu_k.int(), 33, 33)
    out, lse = ft.varlen_attention(q, k, v, *lists, return_lse=True, **options)
    assert out.shape == (41, 4, 12)
    assert lse.shape == (4, 41)
    parts = []
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        parts.append(ft.attention(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0])
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-5, atol=1e-5)
    tensors = (q, k, v, sinks)
    got = torch.autograd.grad(out.sum(), tensors)
    want = torch.autograd.grad(torch.cat(parts).sum(), tensors)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_packed_sequences_in_one_graph():
    q, k, v = leaves((20, 2, 8), (20, 2, 8), (20, 2, 8))
    cu = torch.tensor([0, 8, 20])
    compiled = torch.compile(ft.varlen_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(q, k, v, cu, cu, 12, 12, causal=True),
        ft.varlen_attention(q, k, v, cu, cu, 12, 12, causal=True), rtol=0, atol=0,
    )  # fmt: skip


def test_wrong_tensors_are_refused_in_words():
    q, k, v = (x.detach() for x in leaves((1, 5, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8)))
    for error, pattern, options in (
        (TypeError, "^mask must be a torch.Tensor of bool, got torch.float32; that is bias=mask",
         {"mask": torch.zeros(1, 1, 5, 6)}),
        (TypeError, "^bias must be of floating-point.*that is mask=bias",
         {"bias": torch.ones(1, 1, 5, 6, dtype=torch.bool)}),
        (TypeError, "^bias must be a torch.Tensor, got ndarray", {"bias": np.zeros((1, 1, 5, 6))}),
        (ValueError, r"^bias must have shape .*bias\[None, None\]", {"bias": torch.zeros(5, 6)}),
        (ValueError, "^sinks must have shape", {"sinks": torch.zeros(3)}),
    ):  # fmt: skip
        with pytest.raises(error, match=pattern):
            ft.attention(q, k, v, **options)
    q, k, v = q[0], k[0], v[0]
    cu_q, cu_k = torch.tensor([0, 5]), torch.tensor([0, 6])
    for error, pattern, lists in (
        (TypeError, "^cu_seqlens_q must be a torch.Tensor of ints, got list", ([0, 5], cu_k)),
        (ValueError, "^cu_seqlens_q must begin with 0 and end with 5", (cu_k, cu_k)),
        (ValueError, "^cu_seqlens_k must not descend", (cu_q, torch.tensor([0, 7, 6]))),
        (ValueError, "^cu_seqlens_k must have 2 entries", (cu_q, torch.tensor([0, 3, 6]))),
        (ValueError, "^max_seqlen_q must be at least 5", (cu_q, cu_k, 4, 6)),
    ):
        with pytest.raises(error, match=pattern):
            ft.varlen_attention(q, k, v, *lists)
