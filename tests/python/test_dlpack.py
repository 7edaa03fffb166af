"""Inputs that come through DLPack: read in place in the CPU's memory, refused elsewhere."""

import forge
import numpy as np
import pytest
from calls import run
from oracle import random_inputs

CPU, CUDA, CUDA_HOST, METAL, ROCM_HOST, HEXAGON = 1, 2, 3, 8, 11, 16


class Exporter:
    """An array of another library: DLPack is all it speaks."""

    def __init__(self, array, device=CPU):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        assert self.device in (CPU, CUDA_HOST, ROCM_HOST), "memory of a device was asked for"
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device, 0


def test_every_input_is_taken_in_place(fused_backend, rng):
    given = random_inputs(rng, B=2, Tq=9, H=4, Hkv=2, hd=8)
    dlse = rng.standard_normal((2, 4, 9), dtype=np.float32)
    want = run(*given, dlse, causal=True, backend=fused_backend)
    got = run(*(Exporter(x) for x in (*given, dlse)), causal=True, backend=fused_backend)
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    used = forge.last_run()["arrays"]
    for name in ("q", "k", "v", "dout", "dlse"):
        assert used[name] in ("in place", "wrapped")


@pytest.mark.parametrize(
    "device", [None, 1, "cpu", (), (1,), (1, 0, 0), (1.5, 0), (None, 0)], ids=str
)
def test_a_device_that_is_not_two_ints_is_named(device, rng):
    q, k, v, _ = random_inputs(rng)

    class Mistaken(Exporter):
        def __dlpack_device__(self):
            return device

    with pytest.raises(TypeError, match=r"^k must say its DLPack device as two ints, got Mistaken"):
        forge.attention(q, Mistaken(k), v)


def test_the_memory_is_the_exporters(rng):
    """saved refers to it: what is written there before the backward, the backward reads."""
    q, k, v, dout = random_inputs(rng)
    k = k.copy()
    _, saved = forge.attention_forward(q, Exporter(k), v, kernel="materialized")
    k[:] = 0
    dq, _, _ = forge.attention_backward(dout, saved)
    assert not dq.any()


def test_strides_are_kept(cpu, rng):
    packed = rng.standard_normal((2, 7, 3, 4, 8), dtype=np.float32)
    q, k, v = (packed[:, ::-1, i] for i in range(3))
    out = forge.attention(*(Exporter(x) for x in (q, k, v)), window=3, backend=cpu)
    assert set(forge.last_run()["arrays"].values()) == {"in place"}
    np.testing.assert_array_equal(out, forge.attention(q, k, v, window=3, backend=cpu))


def test_a_copy_is_reported(rng):
    q, k, v, _ = random_inputs(rng)
    out = forge.attention(Exporter(np.asfortranarray(q)), k, v)
    assert forge.last_run()["arrays"]["q"] == "copied: last axis not of unit stride"
    np.testing.assert_array_equal(out, forge.attention(q, k, v))


@pytest.mark.parametrize("device", [CUDA_HOST, ROCM_HOST])
def test_memory_pinned_for_a_gpu_is_the_cpus(device, rng):
    q, k, v, _ = random_inputs(rng)
    out = forge.attention(q, Exporter(k, device), v)
    np.testing.assert_array_equal(out, forge.attention(q, k, v))


@pytest.mark.parametrize(
    ("device", "said"),
    [(CUDA, "CUDA"), (METAL, "Metal"), (HEXAGON, "DLPack device type 16")],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_memory_of_another_device_is_refused(device, said, position, rng):
    given = list(random_inputs(rng)[:3])
    given[position] = Exporter(given[position], device)
    message = rf"^{'qkv'[position]} must be in the CPU's memory, got Exporter on {said}.* copy it"
    with pytest.raises(TypeError, match=message):
        forge.attention(*given)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64])
def test_dtypes_are_not_cast(dtype, rng):
    q, k, v, _ = random_inputs(rng)
    with pytest.raises(TypeError, match=rf"^v must be float32, .*got {np.dtype(dtype)}"):
        forge.attention(q, k, Exporter(v.astype(dtype)))


class Unreadable(Exporter):
    """What exporters do with a dtype that NumPy lacks, or when they cannot hand out memory."""

    dtype = "float32"

    def __dlpack__(self, **options):
        raise BufferError("not now")


def test_an_exporter_that_fails_says_why(rng):
    q, k, v, _ = random_inputs(rng)
    value = Unreadable(k)
    with pytest.raises(TypeError, match=r"^k must be readable .* got Unreadable: not now"):
        forge.attention(q, value, v)
    value.dtype = "other.float8"
    with pytest.raises(TypeError, match=r"^k must be float32, .*got other.float8"):
        forge.attention(q, value, v)


def test_outputs_must_be_numpy_arrays(rng):
    q, k, v, _ = random_inputs(rng)
    with pytest.raises(TypeError, match=r"^out must be a NumPy array to write into, got Exporter"):
        forge.attention(q, k, v, out=Exporter(np.empty_like(q)))


# Each with its names for: an array from NumPy's, the same in another dtype.
LIBRARIES = {
    "torch": ("torch", "from_numpy", "to"),
    "jax": ("jax.numpy", "asarray", "astype"),
    "mlx": ("mlx.core", "array", "astype"),
}


def library(name):
    """Return (module, from_numpy, cast) of a library, or skip the test."""
    module_name, make, cast = LIBRARIES[name]
    module = pytest.importorskip(module_name, reason=f"{name} is not installed")
    return module, getattr(module, make), lambda array, dtype: getattr(array, cast)(dtype)


@pytest.mark.parametrize("name", LIBRARIES)
def test_arrays_of_other_libraries(name, rng):
    _, array, _ = library(name)
    given = random_inputs(rng, B=2, Tq=9, H=4, Hkv=2, hd=8)
    want = run(*given, window=4, softcap=5.0)
    got = run(*(array(x) for x in given), window=4, softcap=5.0)
    used = forge.last_run()["arrays"]
    assert {used[x] for x in ("q", "k", "v", "dout")} <= {"in place", "wrapped"}
    for x in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, x), getattr(want, x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_half_precision_of_other_libraries(name, dtype, rng):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 from ml_dtypes only")
    module, array, cast = library(name)
    given = [cast(array(x), getattr(module, dtype)) for x in random_inputs(rng)]
    got = run(*given, backend="cpu")
    assert {x.dtype.name for x in (got.out, got.dq, got.dk, got.dv)} == {dtype}
    wide = [np.asarray(cast(x, module.float32)) for x in given]
    want = run(*wide, backend="cpu")
    for x in ("out", "dq", "dk", "dv"):
        exact = getattr(want, x)
        np.testing.assert_array_equal(getattr(got, x), exact.astype(getattr(got, x).dtype))


def test_a_torch_tensor_that_requires_a_gradient_is_refused(rng):
    """Its gradient would be lost in silence."""
    _, array, _ = library("torch")
    q, k, v, _ = random_inputs(rng)
    with pytest.raises(TypeError, match=r"^q must .*use forge.torch.attention.* or .*q.detach\(\)"):
        forge.attention(array(q).requires_grad_(), k, v)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_a_jax_tracer_is_refused(transform, rng):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    q, k, v, _ = random_inputs(rng)
    with pytest.raises(TypeError, match=r"^q must .*Tracer; use forge.jax.attention"):
        getattr(jax, transform)(lambda x: forge.attention(x, k, v))(jax.numpy.asarray(q))


def test_an_mlx_array_that_is_being_compiled_is_refused(rng):
    mx = library("mlx")[0]
    q, k, v, _ = random_inputs(rng)
    with pytest.raises(TypeError, match=r"^q must be readable .*eval"):
        mx.compile(lambda x: mx.array(forge.attention(x, k, v)))(mx.array(q))
