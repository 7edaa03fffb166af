"""forge.mlx in MLX's GPU stream: the kernels it asks MLX for, run by a stand-in for the GPU."""

import forge
import numpy as np
import pytest
from optional import need
from oracle import Problem, random_inputs

mx = need("mlx.core")

if forge.build_config()["metal"] != "software":
    pytest.skip("needs a build for the software Metal device", allow_module_level=True)

import forge.mlx as fm  # noqa: E402
import mlx_stream  # noqa: E402
from forge import _mlx_stream  # noqa: E402
from stream_cases import CASES, DIALECT_CASES, check_dialect  # noqa: E402

if mlx_stream.live.compiler() is None:
    pytest.skip("needs clang++ or the ziglang package", allow_module_level=True)

GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture
def on_gpu(monkeypatch):
    """MLX computes on a GPU as far as forge can tell."""
    monkeypatch.setattr(_mlx_stream, "_is_on_gpu", lambda: True)
    monkeypatch.delenv("FORGE_BACKEND", raising=False)
    _mlx_stream._kernel.cache_clear()
    yield
    _mlx_stream._kernel.cache_clear()


@pytest.fixture
def gpu(on_gpu, monkeypatch):
    """And kernels are run as they are called."""
    gpu = mlx_stream.Gpu()
    monkeypatch.setattr(mx.fast, "metal_kernel", gpu.metal_kernel)
    return gpu


def gradients(function, q, k, v, dout):
    return mx.grad(lambda *x: (function(*x) * dout).sum(), argnums=(0, 1, 2))(q, k, v)


def on_cpu(q, k, v, dout, options):
    out, saved = forge.attention_forward(q, k, v, backend="cpu", **options)
    return out, *forge.attention_backward(dout, saved)


def assert_parity(got, want):
    for name, x, expected in zip(("out", *GRADIENTS), got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), expected, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_forward_and_gradient_are_the_cpus(rng, gpu, sizes, options):
    arrays = random_inputs(rng, **sizes)
    q, k, v, dout = map(mx.array, arrays)

    def attention(q, k, v):
        return fm.attention(q, k, v, **options)

    got = attention(q, k, v), *gradients(attention, q, k, v, dout)
    assert len(gpu.calls) >= 5
    assert forge.last_run()["device"] == "MLX's GPU stream"
    assert_parity(got, on_cpu(*arrays, options))
    named = dict(zip(("out", *GRADIENTS), map(np.asarray, got), strict=True))
    Problem(*arrays, **options).check("fused", **named)


@pytest.mark.parametrize("case", ["plain", "dead rows", "decode"])
def test_it_is_a_part_of_mlxs_graph(rng, on_gpu, monkeypatch, case):
    """Traced without values, by MLX's own metal_kernel, among MLX's own operations."""
    sizes, options = CASES[case]
    arrays = random_inputs(rng, **sizes)[:3]
    # MLX cannot export a function with a gradient of its own.
    monkeypatch.setattr(_mlx_stream, "once_differentiable", lambda forward, _: forward)

    def scaled(q, k, v):
        return 2 * fm.attention(q, k, v + 1, **options)

    graph = mlx_stream.graph_of(scaled, *map(mx.array, arrays))
    (got,), calls = mlx_stream.run_graph(graph, *arrays, seed=3)
    q, k, v = arrays
    want = forge.attention(q, k, v + 1, backend="cpu", **options)
    np.testing.assert_allclose(got, 2 * want, rtol=2e-5, atol=2e-5)
    assert len(calls) == (2 if case == "decode" else 1)


@pytest.mark.parametrize("case", ["plain", "decode"])
def test_it_stands_inside_compile_and_is_not_evaluated_there(rng, gpu, case):
    sizes, options = CASES[case]
    q, k, v, dout = map(mx.array, random_inputs(rng, **sizes))

    def attention(q, k, v):
        return fm.attention(q, k, v, **options)

    assert mx.compile(attention)(q, k, v).shape == q.shape
    forward = gpu.traced
    compiled = mx.compile(lambda *x: gradients(attention, *x))
    for _ in range(2):
        assert [x.shape for x in compiled(q, k, v, dout)] == [q.shape, k.shape, v.shape]
    assert gpu.traced == 2 * forward + 3  # once, the second call is MLX's alone
    assert not gpu.calls


def test_what_the_kernels_are_handed(rng, gpu):
    arrays = random_inputs(rng, B=2, Tq=37, Tk=45, H=2, hd=32)
    fm.attention(*map(mx.array, arrays[:3]))
    (call,) = gpu.calls
    assert call.kernel.startswith("custom_kernel_attention_fused_fwd_hd32")
    assert (call.threads, call.group) == ((2 * 128, 2, 2), (128, 1, 1))
    words, *inputs = call.inputs
    assert words.dtype == np.int64
    assert words[:3].tolist() == [2, 37, 45]
    assert words[-6:].tolist() == [45 - 37, 0, 45] * 2
    for x, expected in zip(inputs, arrays, strict=False):
        np.testing.assert_array_equal(x, expected)


def test_arrays_too_small_for_the_address_space_of_the_others(rng, gpu):
    """MLX hands inputs of less than eight elements over in constant memory."""
    arrays = random_inputs(rng, B=1, Tq=1, Tk=1, H=1, Hkv=1, hd=3)
    q, k, v, dout = map(mx.array, arrays)
    assert_parity(
        (fm.attention(q, k, v), *gradients(fm.attention, q, k, v, dout)), on_cpu(*arrays, {})
    )


@pytest.mark.parametrize("shape", [{"B": 0}, {"Tq": 0}, {"Tk": 0}], ids=["B", "Tq", "Tk"])
def test_nothing_to_attend_to(rng, gpu, shape):
    arrays = random_inputs(rng, **{"B": 2, "Tq": 3, "Tk": 4, "H": 2, "Hkv": 2, "hd": 32} | shape)
    q, k, v, dout = map(mx.array, arrays)
    assert_parity(
        (fm.attention(q, k, v), *gradients(fm.attention, q, k, v, dout)), on_cpu(*arrays, {})
    )


def test_any_order_in_memory_and_three_axes(rng, gpu):
    arrays = random_inputs(rng, B=2, Tq=40, H=4, Hkv=2, hd=32)
    want = forge.attention(*arrays[:3], causal=True, backend="cpu")
    heads_first = [
        mx.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in arrays[:3]
    ]
    flat = [mx.array(x.reshape(2, 40, -1)) for x in arrays[:3]]
    got = fm.attention(*heads_first, causal=True)
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-5)
    got = fm.attention(*flat, causal=True, num_heads=4, num_kv_heads=2)
    np.testing.assert_allclose(np.asarray(got), want.reshape(2, 40, -1), rtol=2e-5, atol=2e-5)


def test_positions_may_be_arrays_with_values(rng, gpu):
    arrays = random_inputs(rng, B=2, Tq=3, Tk=5, H=2, hd=32)[:3]
    options = {"causal": True, "query_offset": [1, 2], "key_end": [4, 5]}
    want = forge.attention(*arrays, backend="cpu", **options)
    positions = {n: mx.array(x) if isinstance(x, list) else x for n, x in options.items()}
    got = fm.attention(*map(mx.array, arrays), **positions)
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-5)
    q, k, v = map(mx.array, arrays)
    with pytest.raises(ValueError, match="key_end must have values before the call"):
        mx.compile(lambda end: fm.attention(q, k, v, key_end=end))(mx.array([4, 5]))


@pytest.mark.parametrize(
    "other",
    [
        {"backend": "cpu"},
        {"kernel": "materialized", "backend": "cpu"},
        {"dtype": "float16"},
        {"hd": 260},
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take_is_computed_by_the_host(rng, gpu, other):
    options = {name: value for name, value in other.items() if name in ("backend", "kernel")}
    arrays = random_inputs(rng, B=1, Tq=3, H=1, hd=other.get("hd", 8))
    q, k, v = (mx.array(x.astype(other.get("dtype", "float32"))) for x in arrays[:3])
    fm.attention(q, k, v, **options)
    assert not gpu.calls
    assert forge.last_run()["device"] != "MLX's GPU stream"


def test_a_gpu_that_mlx_does_not_compute_on(rng, gpu, monkeypatch):
    monkeypatch.undo()
    assert not _mlx_stream._is_on_gpu()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key_end": [9, 9]}, ValueError, r"key_end must be within \[0, 4\], got 9"),
        ({"softcap": -1.0}, ValueError, "softcap must not be negative, got -1.0"),
        ({"scale": "1"}, TypeError, "scale must be a real number, got str"),
        ({"num_heads": 3}, ValueError, "num_heads must agree with q's shape, got 3"),
    ],
)
def test_wrong_options(rng, gpu, change, error, message):
    q, k, v = map(mx.array, random_inputs(rng, B=2, Tq=4, H=2, Hkv=2, hd=8)[:3])
    with pytest.raises(error, match=message):
        fm.attention(q, k, v, **change)
    assert not gpu.calls


def test_derivatives_that_are_not_there(rng, gpu):
    q, k, v, dout = map(mx.array, random_inputs(rng, B=2, Tq=4, H=2, Hkv=2, hd=32))

    def squares(q):
        return (mx.grad(lambda q: (fm.attention(q, k, v) * dout).sum())(q) ** 2).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        mx.grad(squares)(q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        mx.jvp(lambda q: fm.attention(q, k, v), [q], [q])
    with pytest.raises(ValueError, match=r"outside mx\.vmap; put what it would map into the batch"):
        mx.vmap(lambda q: fm.attention(q[None], k[:1], v[:1]))(q)


@pytest.mark.parametrize(("sizes", "options"), DIALECT_CASES.values(), ids=DIALECT_CASES)
def test_the_texts_are_what_apples_compiler_takes(rng, gpu, sizes, options):
    q, k, v, dout = map(mx.array, random_inputs(rng, **sizes))
    gradients(lambda *x: fm.attention(*x, **options), q, k, v, dout)
    check_dialect({call.text for call in gpu.calls})
