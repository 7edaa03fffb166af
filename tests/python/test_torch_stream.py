"""forge.torch on MPS tensors, in PyTorch's own stream: the calls it makes, run by a stand-in."""

import forge
import numpy as np
import pytest
from optional import need
from oracle import Problem, random_inputs

torch = need("torch")

if forge.build_config()["metal"] != "software":
    pytest.skip("needs a build for the software Metal device", allow_module_level=True)

import forge.torch as ft  # noqa: E402
import torch_stream  # noqa: E402
from forge import _torch_mps, _torch_ops  # noqa: E402
from stream_cases import CASES, DIALECT_CASES, check_dialect  # noqa: E402

if torch_stream.live.compiler() is None:
    pytest.skip("needs clang++ or the ziglang package", allow_module_level=True)

GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture
def stream(monkeypatch):
    """PyTorch's stream on a Mac, by its stand-in; CPU tensors take the road of MPS tensors."""
    stream = torch_stream.Stream()
    for name, stands_for in stream.patches().items():
        monkeypatch.setattr(torch._C, name, stands_for, raising=False)
    monkeypatch.setattr(ft, "plain_attention", lambda *_: None)
    monkeypatch.delenv("FORGE_BACKEND", raising=False)
    _torch_mps._compiled.cache_clear()
    _torch_ops.forward_op.register_kernel("cpu", _torch_ops._run_forward_mps)
    _torch_ops.backward_op.register_kernel("cpu", _torch_ops._run_backward_mps)
    yield stream
    _torch_ops.forward_op.register_kernel("cpu", _torch_ops._run_forward)
    _torch_ops.backward_op.register_kernel("cpu", _torch_ops._run_backward)
    _torch_mps._compiled.cache_clear()


@pytest.fixture
def no_host(monkeypatch):
    """Whatever would wait for the GPU or copy from it is an error."""

    def refused(*_, **__):
        raise AssertionError("that waits for the GPU")

    for name in ("cpu", "item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    monkeypatch.setattr(torch.mps, "synchronize", refused)
    monkeypatch.setattr(torch.mps.event.Event, "synchronize", refused)


def on_cpu(q, k, v, dout, dlse, options):
    """out, lse and the gradients, by forge's CPU backend."""
    out, saved = forge.attention_forward(q, k, v, backend="cpu", **options)
    gradients = forge.attention_backward(dout, saved, dlse=dlse)
    return out, saved.lse, *gradients


def run(arrays, dlse, options, **more):
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays[:3])
    out, lse = ft.attention(q, k, v, return_lse=True, **options, **more)
    results = (out, lse), (torch.from_numpy(arrays[3]), torch.from_numpy(dlse))
    return out, lse, *torch.autograd.grad(results[0], (q, k, v), results[1])


def assert_parity(got, want):
    for name, x, expected in zip(("out", "lse", *GRADIENTS), got, want, strict=True):
        np.testing.assert_allclose(x.detach().numpy(), expected, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("seed", [0, 3])
def test_forward_and_backward_are_the_cpus(rng, stream, no_host, sizes, options, seed):
    stream.seed = seed
    arrays = random_inputs(rng, **sizes)
    dlse = rng.standard_normal((sizes["B"], sizes["H"], sizes["Tq"])).astype(np.float32)
    got = run(arrays, dlse, options)
    assert len(stream.calls) >= 4
    assert_parity(got, on_cpu(*arrays, dlse, options))
    without = run(arrays, np.zeros_like(dlse), options)
    problem = Problem(*arrays, **options)
    problem.check(
        "fused", out=without[0].detach(), **dict(zip(GRADIENTS, without[2:], strict=True))
    )


@pytest.mark.parametrize("case", ["causal, grouped heads, channels left over", "decode"])
@pytest.mark.parametrize(
    "dtypes",
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
    ids=" and ".join,
)
def test_half_precision_is_the_cpus(rng, stream, no_host, case, dtypes):
    sizes, options = CASES[case]
    of_q, of_kv = (getattr(torch, name) for name in dtypes)
    types = of_q, of_kv, of_kv, of_q
    arrays = random_inputs(rng, **sizes)
    q, k, v, dout = (torch.from_numpy(x).to(t) for x, t in zip(arrays, types, strict=True))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = ft.attention(*inputs, **options)
    got = out, *torch.autograd.grad(out, inputs, dout)
    wide = [x.detach().float().numpy() for x in (q, k, v, dout)]
    want_out, saved = forge.attention_forward(*wide[:3], backend="cpu", **options)
    want = want_out, *forge.attention_backward(wide[3], saved)
    for x, expected, dtype in zip(got, want, (of_q, of_q, of_kv, of_kv), strict=True):
        assert x.dtype == dtype
        unit = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        np.testing.assert_allclose(x.detach().float().numpy(), expected, rtol=unit, atol=unit / 8)


def test_a_kernel_is_compiled_once_and_takes_its_arguments_in_their_order(rng, stream):
    arrays = random_inputs(rng, **CASES["plain"][0])
    dlse = np.zeros((2, 2, 37), np.float32)
    run(arrays, dlse, {})
    run(arrays, dlse, {})
    names = ["attention_fused_fwd_hd32", "attention_fused_bwd_d", "attention_fused_bwd_dq_hd32"]
    names.append("attention_fused_bwd_dkv_hd32")
    assert [call.kernel for call in stream.calls] == names * 2
    assert len(stream.texts) == len(set(stream.texts)) == len(names)
    forward = stream.calls[0]
    assert forward.threads == (2 * 128, 2, 2)  # tiles of 32 rows, kv heads, sequences
    assert forward.group == (128, 1, 1)
    q, k, v, o, rounded_o, row_max, row_sum, *options, ranges, params, grid = forward.arguments
    assert [tuple(x.shape) for x in (q, k, v, o)] == [
        (2, 37, 2, 32),
        *[(2, 45, 2, 32)] * 2,
        (2, 37, 2, 32),
    ]
    assert rounded_o is q  # which float32 has no use for
    assert len(options) == 3  # bias, mask and sinks
    assert all(x is q for x in options)
    assert row_max.shape == row_sum.shape == (2, 2, 37)
    assert ranges == [45 - 37, 0, 45] * 2
    assert params[:3] == [2, 37, 45]
    assert len(grid) == 4
    assert forge.last_run()["device"] == "PyTorch's MPS stream"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # copied: no unit stride
        lambda x: torch.cat([x, x], 1)[:, 1::2],
        lambda x: x[:1, :1].expand(2, 40, -1, -1),
        lambda x: torch.cat([torch.zeros(3), x.flatten()])[3:].view(x.shape),  # unaligned
    ],
    ids=["heads first", "channels last but one", "every second", "expanded", "unaligned"],
)
def test_inputs_of_any_strides(rng, stream, view):
    q, k, v, dout = (
        view(torch.from_numpy(x)) for x in random_inputs(rng, B=2, Tq=40, H=4, Hkv=4, hd=32)
    )
    leaves = [x.clone(memory_format=torch.preserve_format) for x in (q, k, v)]
    for leaf, x in zip(leaves, (q, k, v), strict=True):
        leaf.set_(x.detach()).requires_grad_()
    out = ft.attention(*leaves, causal=True)
    got = out, None, *torch.autograd.grad(out, leaves, dout)
    arrays = [np.ascontiguousarray(x) for x in (q, k, v, dout)]
    want = on_cpu(*arrays, None, {"causal": True})
    assert_parity((got[0], torch.tensor(0.0), *got[2:]), (want[0], 0.0, *want[2:]))


def test_three_axes_and_a_gradient_of_one_number(rng, stream):
    q, k, v, _ = random_inputs(rng, B=2, Tq=40, H=4, Hkv=2, hd=32)
    out, saved = forge.attention_forward(q, k, v, backend="cpu")
    want = forge.attention_backward(np.ones_like(q), saved)
    flat = [torch.from_numpy(x).flatten(2).requires_grad_() for x in (q, k, v)]
    got = ft.attention(*flat, num_heads=4, num_kv_heads=2)
    np.testing.assert_allclose(got.detach().numpy(), out.reshape(got.shape), rtol=2e-5, atol=2e-5)
    got.sum().backward()  # of strides 0
    for x, expected in zip(flat, want, strict=True):
        np.testing.assert_allclose(x.grad, expected.reshape(x.shape), rtol=2e-5, atol=2e-5)


def test_what_the_shaders_do_not_take_is_refused(rng, stream):
    q, k, v, _ = (torch.from_numpy(x) for x in random_inputs(rng, B=1, Tq=3, H=2, hd=32))
    for name, value in (
        ("bias", torch.zeros(1, 1, 3, 3)),
        ("mask", torch.ones(1, 1, 3, 3, dtype=torch.bool)),
        ("sinks", torch.zeros(2)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be None for MPS tensors"):
            ft.attention(q, k, v, **{name: value})
    with pytest.raises(ValueError, match=r"^v must have the head dim .* 8 and 32"):
        ft.attention(q, k, v[..., :8])
    with pytest.raises(ValueError, match="a range of keys for each query"):
        ft.attention(q, k, v, key_end=[[1, 2, 3]])


def test_a_batch_whose_key_ranges_do_not_fit_one_call_takes_two(rng, stream):
    B = 4096 // 24 + 5
    arrays = random_inputs(rng, B=B, Tq=2, Tk=5, H=2, Hkv=2, hd=32)
    options = {
        "causal": True,
        "query_offset": [b % 5 for b in range(B)],
        "key_start": [b % 3 for b in range(B)],
    }
    dlse = np.zeros((B, 2, 2), np.float32)
    assert_parity(run(arrays, dlse, options), on_cpu(*arrays, dlse, options))
    assert [len(call.arguments[-3]) for call in stream.calls[:2]] == [3 * 170, 3 * 5]


@pytest.mark.parametrize("shape", [{"B": 0}, {"Tq": 0}, {"Tk": 0}], ids=["B", "Tq", "Tk"])
def test_nothing_to_attend_to(rng, stream, shape):
    sizes = {"B": 2, "Tq": 3, "Tk": 4, "H": 2, "Hkv": 2, "hd": 32} | shape
    arrays = random_inputs(rng, **sizes)
    dlse = np.zeros((sizes["B"], 2, sizes["Tq"]), np.float32)
    assert_parity(run(arrays, dlse, {}), on_cpu(*arrays, dlse, {}))


def test_much_work_is_committed_in_between(stream):
    """Metal ends a command buffer that takes seconds."""
    stream.runs = False
    x = torch.zeros(1).expand(1, 16384, 8, 128)
    ft.attention(x, x, x)
    assert stream.events.count("commit") == len(stream.calls) - 1 >= 1
    assert stream.events[0] != "commit" != stream.events[-1]
    assert len({call.kernel for call in stream.calls}) == 1
    tiles = sum(np.prod(call.threads) // call.group[0] for call in stream.calls)
    assert tiles == 8 * 16384 // 32


def test_it_is_compiled_with_what_stands_round_it(rng, stream):
    arrays = random_inputs(rng, **CASES["plain"][0])
    q, k, v, dout = (torch.from_numpy(x) for x in arrays)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def twice(q, k, v):
        return 2 * ft.attention(q, k, v + 1, causal=True)

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for function in (twice, compiled):
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, dout)
        if function is twice:
            want = out, *gradients
    for x, expected in zip((out, *gradients), want, strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert len(stream.calls) == 8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"kernel": "materialized"},
            ValueError,
            "kernel must be 'fused' for MPS tensors, got 'mat",
        ),
        ({"backend": "cpu"}, ValueError, "backend must be 'metal' for MPS tensors, got 'cpu'"),
        ({"backend": "tpu"}, ValueError, r"backend must be one of .*got 'tpu'"),
        ({"key_end": [9, 9]}, ValueError, r"key_end must be within \[0, 4\], got 9"),
        (
            {"key_end": torch.empty(2, dtype=torch.int64, device="meta")},
            ValueError,
            "key_end must be a CPU tensor, got one on meta: its values are checked",
        ),
        ({"softcap": -1.0}, ValueError, "softcap must not be negative, got -1.0"),
    ],
)
def test_wrong_options(rng, stream, change, error, message):
    q, k, v, _ = (torch.from_numpy(x) for x in random_inputs(rng, B=2, Tq=4, H=2, Hkv=2, hd=8))
    with pytest.raises(error, match=message):
        ft.attention(q, k, v, **change)
    assert not stream.calls


def test_wrong_tensors(rng, stream, monkeypatch):
    q, k, v, _ = (torch.from_numpy(x) for x in random_inputs(rng, B=2, Tq=4, H=2, Hkv=2, hd=8))
    with pytest.raises(
        ValueError, match="q must be a CPU tensor, or an MPS tensor, got one on meta"
    ):
        ft.attention(q.to("meta"), k, v)
    wide = torch.zeros(1, 4, 1, 300)
    with pytest.raises(ValueError, match="head dims 1 to 256, got 300"):
        ft.attention(wide, wide, wide)
    monkeypatch.setenv("FORGE_BACKEND", "cpu")
    with pytest.raises(
        ValueError, match="FORGE_BACKEND must be 'metal' for MPS tensors, got 'cpu'"
    ):
        ft.attention(q, k, v)
    assert not stream.calls


def test_mps_tensors_have_kernels_of_their_own():
    for name in ("forge::attention", "forge::attention_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "MPS")


@pytest.mark.parametrize(("sizes", "options"), DIALECT_CASES.values(), ids=DIALECT_CASES)
def test_the_texts_are_what_apples_compiler_takes(rng, stream, sizes, options):
    stream.runs = False
    arrays = random_inputs(rng, **sizes)
    run(arrays, np.zeros((sizes["B"], sizes["H"], sizes["Tq"]), np.float32), options)
    check_dialect(set(stream.texts))


FILL = """#include <metal_stdlib>
using namespace metal;
kernel void fill(device float* out [[buffer(0)]], constant long* at [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[at[0] + i] = 1.0f;
}
"""


@pytest.mark.parametrize(
    ("arguments", "sizes", "message"),
    [
        ([torch.zeros(4), []], {}, "Empty list/tuple can not be an argument"),
        ([torch.zeros(4), ["1"]], {}, "Unexpected argument types"),
        ([torch.zeros(4), [1, 2.5]], {}, "Unexpected argument types"),
        ([torch.zeros(4), [0] * 513], {}, "4104 bytes by value, Metal takes 4096"),
        ([torch.zeros(4, device="meta"), [0]], {}, "a tensor on meta"),
        ([torch.zeros(4)], {}, "argument 'at': nothing is bound at its index"),
        ([[1.0], [0]], {}, "argument 'out' is written, and was given by value"),
        ([torch.zeros(4), [0]], {"group_size": (4, 1)}, r"threads->size\(\) == group_size"),
        ([torch.zeros(4), [0]], {"group_size": (2048,)}, "a threadgroup of 2048 threads"),
        ([torch.zeros(4), [1]], {}, "out"),  # one past the end
    ],
)
def test_the_stand_in_refuses_what_the_interface_refuses(stream, arguments, sizes, message):
    kernel = torch.mps.compile_shader(FILL).fill
    out = torch.zeros(4)
    kernel(out, [2], threads=(2,), group_size=(2,))
    assert out.tolist() == [0, 0, 1, 1]
    with pytest.raises(RuntimeError, match=message):
        kernel(*arguments, **{"threads": (4,), "group_size": (4,)} | sizes)
    with pytest.raises(RuntimeError, match="Failed to create function state object for: empty"):
        torch.mps.compile_shader(FILL).empty  # noqa: B018
