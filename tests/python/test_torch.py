"""forge.torch: attention on torch tensors, forward and backward, eager and compiled."""

import sys

import forge
import numpy as np
import pytest
from optional import need
from oracle import Problem, random_inputs
from scripts import run_script

torch = need("torch")

import forge.torch as ft  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "two-sided window": {"window": (2, 1)},
    "softcap and scale": {"softcap": 2.0, "scale": -0.7},
    "offset": {"causal": True, "query_offset": 1},
    "padded": {"causal": True, "query_offset": [2, 3], "key_start": [1, 0], "key_end": [6, 5]},
}


def tensors(rng, dtype=np.float32, **sizes):
    return [torch.from_numpy(x) for x in random_inputs(rng, dtype=dtype, **sizes)]


def as_tensors(options):
    return {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in options.items()
    }


def grads_of(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_computes_what_forge_attention_computes(rng, options, kernel, backend):
    q, k, v, dout = tensors(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2)
    arrays = [x.numpy() for x in (q, k, v)]
    out, saved = forge.attention_forward(
        *arrays, kernel=kernel, backend=backend,
        **{n: np.array(x) if isinstance(x, list) else x for n, x in options.items()},
    )  # fmt: skip
    dlse = torch.from_numpy(rng.standard_normal(saved.lse.shape).astype(np.float32))
    want = forge.attention_backward(dout.numpy(), saved, dlse=dlse.numpy())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    got, lse = ft.attention(
        *inputs, return_lse=True, kernel=kernel, backend=backend, **as_tensors(options)
    )
    gradients = grads_of((got * dout).sum() + (lse * dlse).sum(), *inputs)
    np.testing.assert_array_equal(got.detach(), out)
    np.testing.assert_array_equal(lse.detach(), saved.lse)
    for gradient, expected in zip(gradients, want, strict=True):
        np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_float64_differences(rng, options, cpu):
    """Of out and of lse, by finite differences of the forward."""
    inputs = tensors(rng, np.float64, B=2, Tq=3, Tk=7, H=4, Hkv=2, hd=3)[:3]

    def function(q, k, v):
        return ft.attention(
            q, k, v, return_lse=True, kernel="materialized", backend=cpu, **as_tensors(options)
        )

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])


def test_the_fused_gradients_keep_forges_error_rule(rng, fused_backend):
    arrays = random_inputs(rng, B=2, Tq=70, H=4, Hkv=2, hd=24)
    q, k, v, dout = (torch.from_numpy(x) for x in arrays)
    options = {"causal": True, "window": 33, "softcap": 5.0}
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = ft.attention(*inputs, backend=fused_backend, **options)
    dq, dk, dv = grads_of((out * dout).sum(), *inputs)
    problem = Problem(*(x.detach().numpy() for x in inputs), dout.numpy(), **options)
    problem.check("fused", out=out.detach(), dq=dq, dk=dk, dv=dv)


def test_three_axes_with_num_heads(rng):
    q, k, v, dout = tensors(rng, B=2, Tq=5, H=4, Hkv=2, hd=6)
    want = ft.attention(q, k, v, causal=True)
    flat = [x.flatten(2).requires_grad_() for x in (q, k, v)]
    out = ft.attention(*flat, causal=True, num_heads=4, num_kv_heads=2)
    torch.testing.assert_close(out, want.flatten(2), rtol=0, atol=0)
    for gradient, x in zip(grads_of((out * dout.flatten(2)).sum(), *flat), flat, strict=True):
        assert gradient.shape == x.shape


def test_memory_is_shared_both_ways(rng, cpu):
    """Slices of one packed tensor are read where they lie, gradients are forge's own arrays."""
    packed = torch.from_numpy(rng.standard_normal((1, 9, 3, 2, 8)).astype(np.float32))
    q, k, v = packed.unbind(2)
    ft.attention(q, k, v, causal=True, backend=cpu)
    assert set(forge.last_run()["arrays"].values()) == {"in place"}
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = ft.attention(q, k, v, causal=True, backend=cpu)
    out.backward(torch.ones_like(out))
    assert set(forge.last_run()["arrays"].values()) == {"in place"}


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # torch's own order in memory
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # last axis strided
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: x[:1].expand(2, -1, -1, -1),
    ],
)
def test_inputs_of_any_strides(rng, view):
    q, k, v, dout = (view(x) for x in tensors(rng, B=2, Tq=6, H=4, Hkv=4, hd=5))
    results = []
    for inputs in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = ft.attention(*inputs, causal=True)
        results.append((out, *grads_of((out * dout).sum(), *inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_gradient_that_is_expanded(rng):
    """sum() sends back one number for all elements, with strides of 0."""
    inputs = [x.requires_grad_() for x in tensors(rng, B=1, Tq=6)[:3]]
    got = grads_of(ft.attention(*inputs, causal=True).sum(), *inputs)
    out = ft.attention(*inputs, causal=True)
    want = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for gradient, expected in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_inputs_only(rng, wanted):
    inputs = tensors(rng, B=1, Tq=6)[:3]
    every = [x.clone().requires_grad_() for x in inputs]
    want = grads_of(ft.attention(*every, causal=True).square().sum(), *every)
    for index in wanted:
        inputs[index].requires_grad_()
    ft.attention(*inputs, causal=True).square().sum().backward()
    for index, (x, expected) in enumerate(zip(inputs, want, strict=True)):
        assert (x.grad is not None) == (index in wanted)
        if index in wanted:
            torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_gradients_through_lse_alone(rng):
    inputs = [x.double().requires_grad_() for x in tensors(rng, B=1, Tq=5)[:3]]
    _, lse = ft.attention(*inputs, causal=True, kernel="materialized", return_lse=True)
    q, k, _ = (x.transpose(1, 2) for x in inputs)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(
        torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf
    )
    got = grads_of(lse.sum(), *inputs[:2])
    for gradient, expected in zip(
        got, grads_of(scores.logsumexp(-1).sum(), *inputs[:2]), strict=True
    ):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(rng, mode):
    q, k, v, _ = tensors(rng, B=1, Tq=6)
    want = ft.attention(q, k, v, causal=True)
    with mode():
        out = ft.attention(q.requires_grad_(), k, v, causal=True)
    assert not out.requires_grad
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["fused", "materialized"])
def test_the_operator_is_registered_as_torch_wants_it(rng, name):
    """Schema, fake kernels, autograd and ahead-of-time graphs, as torch's own checker has it."""
    from forge._torch_ops import Options, forward_op

    q, k, v, _ = (x.requires_grad_() for x in tensors(rng, B=2, Tq=5, Tk=7, H=4, Hkv=2))
    bias, sinks = torch.randn(1, 4, 1, 7, requires_grad=True), torch.randn(4, requires_grad=True)
    options = Options(
        torch.tensor(2), torch.tensor(1), torch.tensor([6, 7]),
        bias, torch.ones(1, 1, 5, 7, dtype=torch.bool), sinks,
        True, (3, -1), 2.0, None, None, None, name, None,
    )  # fmt: skip
    assert set(torch.library.opcheck(forward_op, (q, k, v, *options)).values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(rng, dynamic):
    def loss(q, k, v, key_start):
        out, lse = ft.attention(
            2 * q, k, v, causal=True, window=4, softcap=2.0,
            key_start=key_start, query_offset=2, return_lse=True,
        )  # fmt: skip
        return out.square().sum() + lse.logsumexp(-1).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    key_start = torch.tensor([0, 1])
    for length in (5, 6, 7):
        inputs = [x.requires_grad_() for x in tensors(rng, B=2, Tq=length, Tk=9, H=4, Hkv=2)[:3]]
        want = grads_of(loss(*inputs, key_start), *inputs)
        for got, expected in zip(
            grads_of(compiled(*inputs, key_start), *inputs), want, strict=True
        ):
            torch.testing.assert_close(got, expected)


def test_a_second_derivative_is_refused(rng):
    q, k, v, _ = (x.requires_grad_() for x in tensors(rng, B=1, Tq=4))
    (dq,) = torch.autograd.grad(ft.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        dq.sum().backward()


def test_float64_wants_the_materialized_kernel(rng):
    q, k, v, _ = tensors(rng, np.float64, B=1, Tq=4)
    with pytest.raises(TypeError, match=r"q\.to\(torch\.float32\), .* or kernel='materialized'"):
        ft.attention(q, k, v)


def test_tensors_of_other_devices_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(1, 4, 2, 8, device="cuda")
        with pytest.raises(ValueError, match=r"q must be a CPU tensor, or an MPS .* on cuda.*cpu"):
            ft.attention(x, x, x)
        x, y = (torch.empty(1, 4, 2, 8, device=device) for device in ("mps", "cpu"))
        with pytest.raises(ValueError, match="v must be on the device of q, mps:0, got cpu"):
            ft.attention(x, x, y)
        with pytest.raises(ValueError, match=r"k must be on the device of q, cpu, got mps:0"):
            ft.attention(y, x, x)
        at = torch.empty(1, dtype=torch.int64, device="mps")
        with pytest.raises(ValueError, match="key_end must be a CPU tensor, got one on mps:0"):
            ft.attention(x, x, x, key_end=at)


def test_results_of_mps_tensors_are_on_mps():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(1, 4, 2, 8, device="mps")
        out, lse = ft.attention(x, x, x, return_lse=True)
        assert (out.device.type, out.shape, lse.shape) == ("mps", x.shape, (1, 2, 4))


WRONG = {
    "array": ({"q": np.zeros((1, 2, 1, 4), np.float32)}, TypeError, "q must be a torch.Tensor"),
    "sparse": ({"k": torch.eye(4).to_sparse()}, TypeError, "k must be a dense tensor"),
    "shape": ({"v": torch.zeros(1, 3, 2, 4)}, ValueError, "v must have the shape of k"),
    "rank": ({"q": torch.zeros(4)}, ValueError, "q must be "),
    "causal": ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    "window": ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    "window type": ({"window": True}, TypeError, "window must be an int"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must not be negative"),
    "softcap type": ({"softcap": "1"}, TypeError, "softcap must be a real number, got str"),
    "scale": ({"scale": float("nan")}, ValueError, "scale must be finite"),
    "huge scale": ({"scale": 10**400}, ValueError, "scale must be finite"),
    "offset": ({"query_offset": 1.0}, TypeError, "query_offset must be an int"),
    "huge offset": ({"query_offset": 2**63}, ValueError, "query_offset must be within int64"),
    "float start": ({"key_start": torch.zeros(1)}, TypeError, "key_start must be an int"),
    "start": ({"key_start": torch.tensor([9])}, ValueError, r"key_start must be within \[0, 5\]"),
    "end's shape": ({"key_end": torch.tensor([1, 2])}, ValueError, "key_end must have shape"),
    "heads": ({"num_heads": 3}, ValueError, "num_heads must agree"),
    "heads' type": ({"num_heads": 2.0}, TypeError, "num_heads must be an int"),
    "kernel": ({"kernel": "flash"}, ValueError, "kernel must be 'fused'"),
    "kernel type": ({"kernel": 1}, TypeError, "kernel must be a string"),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of"),
    "backend type": ({"backend": 1}, TypeError, "backend must be a string"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(change, error, message):
    x = torch.zeros(1, 5, 2, 4)
    with pytest.raises(error, match=message):
        ft.attention(**{"q": x, "k": x, "v": x, **change})


def test_forge_does_not_import_torch():
    run_script("import forge; assert 'torch' not in sys.modules")


def test_without_torch_the_error_says_what_to_install():
    done = run_script("sys.modules['torch'] = None; import forge.torch", check=False)
    assert "forge.torch needs PyTorch: pip install torch, or pip install '.[torch]'" in done.stderr
    assert sys.modules["torch"] is torch


SHAPES = {
    "batch": ((2, 4, 5, 8), (2, 4, 7, 8)),
    "no batch": ((4, 5, 8), (4, 7, 8)),
    "no heads": ((5, 8), (7, 8)),
    "more axes": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8)),
    "broadcast": ((3, 1, 5, 8), (4, 7, 8)),
    "more queries than keys": ((1, 2, 9, 8), (1, 2, 4, 8)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_shape", "k_shape"), SHAPES.values(), ids=SHAPES)
def test_the_drop_in_equals_torch(q_shape, k_shape, is_causal):
    """Also where Tq != Tk: torch aligns its causal mask at the top left."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(s, generator=generator) for s in (q_shape, k_shape, k_shape))
    results = []
    for function, dtype in ((ft.scaled_dot_product_attention, q.dtype), (sdpa, torch.float64)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = function(*inputs, is_causal=is_causal, scale=0.3)
        results.append((out, *grads_of((out * out).sum(), *inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_the_drop_in_groups_heads_as_torch_does(leading):
    q, k, v = (torch.randn(*leading, heads, 6, 8) for heads in (4, 2, 2))
    for is_causal in (False, True):
        got, want = (
            function(q, k, v, is_causal=is_causal, enable_gqa=True)
            for function in (ft.scaled_dot_product_attention, sdpa)
        )
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_drop_in_compiles():
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))

    def function(q, k, v):
        return ft.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v), rtol=0, atol=0)


DROP_IN_WRONG = {
    "mask": ({"attn_mask": torch.ones(5, 4, dtype=torch.bool)}, ValueError, "attn_mask must broad"),
    "an array for a mask": ({"attn_mask": np.ones((5, 5), bool)}, TypeError, "attn_mask must be a"),
    "a mask of ints": ({"attn_mask": torch.ones(5, 5).long()}, TypeError, "attn_mask must be bool"),
    "causal with a mask": (
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True},
        ValueError,
        "as in torch",
    ),
    "dropout": ({"dropout_p": 0.1}, ValueError, "dropout_p must be 0, got 0.1"),
    "gqa": ({"query": torch.zeros(1, 4, 5, 4)}, ValueError, "enable_gqa"),
    "ratio": ({"query": torch.zeros(1, 3, 5, 4), "enable_gqa": True}, ValueError, "multiple"),
    "rank": ({"key": torch.zeros(4)}, ValueError, "key must be"),
    "causal": ({"is_causal": 1}, TypeError, "is_causal must be a bool"),
    "array": ({"query": np.zeros(4)}, TypeError, "query must be a torch.Tensor"),
}


@pytest.mark.parametrize(("change", "error", "message"), DROP_IN_WRONG.values(), ids=DROP_IN_WRONG)
def test_the_drop_in_refuses_what_it_cannot_do(change, error, message):
    x = torch.zeros(1, 2, 5, 4)
    with pytest.raises(error, match=message):
        ft.scaled_dot_product_attention(**{"query": x, "key": x, "value": x, **change})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("position", range(3))
def test_forward_mode_is_refused_not_zero(position):
    """A custom operator without a rule hands on tangents of zero, and says nothing."""
    tensors = [torch.randn(1, 5, 2, 8) for _ in range(3)]

    def call(x):
        return ft.attention(*tensors[:position], x, *tensors[position + 1 :])

    x = tensors[position]
    with pytest.raises(NotImplementedError, match=r"^[qkv] must have no forward-mode tangent"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jacfwd(lambda x: call(x).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            call(dual)
