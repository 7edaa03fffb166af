"""float16 and bfloat16: every element is the float32 kernel's, rounded once."""

import sys

import forge
import numpy as np
import pytest
from bits_problems import PROBLEMS
from calls import IN_PLACE, device_flushes, run
from oracle import GRADIENTS, Problem

ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 from ml_dtypes only")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}
UNIT_OF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY_OF = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
SUBNORMAL_OF = {"float16": 2.0**-24, "bfloat16": 2.0**-133}

every_half = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
every_few = pytest.mark.parametrize("problem", PROBLEMS[::3], ids=[p.name for p in PROBLEMS[::3]])


def attend(backend, *arrays, **options):
    return run(*arrays, backend=backend, **options)


def in_half(x, dtype):
    """The array in half precision, in the same layout."""
    if x is None:
        return None
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)
    return np.broadcast_to(rounded(x[once], dtype), x.shape)


def widened(x):
    return x.astype(np.float32)


def rounded(x, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def assert_equal(got, want, name=""):
    """Bit for bit; NaN equals NaN."""
    assert got.dtype == want.dtype, name
    nan = np.isnan(widened(want))
    assert (np.isnan(widened(got)) == nan).all(), name
    bits = f"u{got.dtype.itemsize}"
    same = (np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want).view(bits)) | nan
    if device_flushes() and got.dtype.name in TINY_OF:
        tiny = TINY_OF[got.dtype.name]
        same |= (np.abs(widened(want)) < tiny) & (np.abs(widened(got)) < tiny)
    assert same.all(), f"{name}: {np.argwhere(~same)[:3]}"


def random_halves(seed, dtype, *shapes, scale=1.0):
    rng = np.random.default_rng(seed)
    return [
        (scale * rng.standard_normal(shape)).astype(np.float32).astype(dtype) for shape in shapes
    ]


@every_half
@every_few
def test_results_are_the_float32_kernels_rounded_once(problem, dtype, fused_backend):
    given = problem.inputs()
    if fused_backend == "metal" and given.q.shape[-1] > 256:
        pytest.skip("a head dim for the CPU")
    arrays = [in_half(getattr(given, name), dtype) for name in ("q", "k", "v", "dout")]
    options = problem.call_options()
    got = attend(fused_backend, *arrays, given.dlse, **options)
    want = attend(fused_backend, *map(widened, arrays), given.dlse, **options)
    for name in ("row_max", "row_sum"):
        assert_equal(getattr(got, name), getattr(want, name), name)
    assert_equal(got.saved.out, want.out, "saved.out")
    for name in ("out", *GRADIENTS):
        assert_equal(getattr(got, name), rounded(getattr(want, name), dtype), name)
    assert_equal(
        forge.attention(*arrays[:3], backend=fused_backend, **options), got.out, "attention"
    )


@every_half
def test_a_float32_query_reads_a_cache_of_halves(dtype, fused_backend):
    for Tq, Tk in ((1, 300), (3, 64), (70, 150)):
        k, v = random_halves(1, dtype, *[(2, Tk, 2, 24)] * 2)
        q, dout = random_halves(2, np.float32, *[(2, Tq, 4, 24)] * 2)
        got = attend(fused_backend, q, k, v, dout, causal=True)
        want = attend(fused_backend, q, widened(k), widened(v), dout, causal=True)
        assert_equal(got.out, want.out)
        assert got.saved.out is got.out
        assert_equal(got.dq, want.dq)
        assert_equal(got.dk, rounded(want.dk, dtype))
        assert_equal(got.dv, rounded(want.dv, dtype))


@every_half
def test_float32_outputs_take_what_is_not_rounded(dtype, fused_backend):
    q, k, v, dout = random_halves(3, dtype, (1, 40, 4, 20), *[(1, 50, 2, 20)] * 2, (1, 40, 4, 20))
    want = attend(fused_backend, *map(widened, (q, k, v, dout)), causal=True)
    out = np.empty(q.shape, np.float32)
    got, saved = forge.attention_forward(q, k, v, causal=True, backend=fused_backend, out=out)
    assert got is out
    assert saved.out.base is out or saved.out is out
    assert_equal(out, want.out)
    gradients = [np.empty(x.shape, np.float32) for x in (q, k, v)]
    results = forge.attention_backward(dout, saved, **dict(zip(GRADIENTS, gradients, strict=True)))
    for name, given, result in zip(GRADIENTS, gradients, results, strict=True):
        assert result is given
        assert_equal(given, getattr(want, name), name)


@every_half
def test_halves_are_written_where_they_are_asked_for(dtype, fused_backend):
    q, k, v, dout = random_halves(4, dtype, (2, 9, 4, 20), *[(2, 33, 2, 20)] * 2, (2, 9, 4, 20))
    want = attend(fused_backend, q, k, v, dout)
    around = np.zeros((2, 9, 6, 20), dtype)
    out = around[:, :, 1:5]
    got, saved = forge.attention_forward(q, k, v, backend=fused_backend, out=out)
    assert got is out
    assert_equal(out, want.out)
    assert not around[:, :, [0, 5]].any()
    dq = np.empty((2, 4, 9, 20), dtype).swapaxes(1, 2)
    result = forge.attention_backward(dout, saved, dq=dq)
    assert result[0] is dq
    for name, x in zip(GRADIENTS, result, strict=True):
        assert_equal(x, getattr(want, name), name)


@every_half
def test_accumulating_into_halves_rounds_once(dtype, fused_backend):
    q, k, v, dout = random_halves(
        5, dtype, (1, 200, 2, 16), *[(1, 170, 1, 16)] * 2, (1, 200, 2, 16)
    )
    want = attend(fused_backend, *map(widened, (q, k, v, dout)))
    begun = random_halves(6, dtype, q.shape, k.shape, v.shape, scale=30)
    given = {name: x.copy() for name, x in zip(GRADIENTS, begun, strict=True)}
    _, saved = forge.attention_forward(q, k, v, backend=fused_backend)
    forge.attention_backward(dout, saved, **given, accumulate=True)
    for name, before in zip(GRADIENTS, begun, strict=True):
        assert_equal(given[name], rounded(widened(before) + getattr(want, name), dtype), name)


@every_half
@pytest.mark.parametrize("Tq", [40, 1], ids=["tiles", "decode"])
def test_every_half_comes_through_unchanged(dtype, Tq, fused_backend):
    """One key: o is v, whatever that is."""
    v = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(1024, 1, 1, 64)
    q = np.zeros((1024, Tq, 1, 64), dtype)
    out = forge.attention(q, np.zeros_like(v), v, backend=fused_backend)
    want = np.where(v == 0, dtype.type(0), v)  # a sum has no -0
    assert_equal(out, np.broadcast_to(want, out.shape))


@every_half
def test_sums_are_rounded_to_nearest_ties_to_even(dtype, fused_backend):
    """The mean of two halves is exact in float32, and often lies in the middle of two halves."""
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**16, (64, 2, 1, 64), dtype=np.uint16)
    neighbours = bits[:, :1] + rng.integers(0, 3, (64, 1, 1, 64), dtype=np.uint16)
    v = np.concatenate([bits[:, :1], neighbours], axis=1).view(dtype)
    v[~(np.abs(widened(v)) < 1e37)] = 1  # sums stay within float32
    q = np.zeros((64, 1, 1, 64), dtype)
    mean = widened(v).astype(np.float64).mean(1, keepdims=True).astype(np.float32)
    assert_equal(
        forge.attention(q, np.zeros_like(v), v, backend=fused_backend), rounded(mean, dtype)
    )


def test_a_sum_beyond_float16_is_infinity(fused_backend):
    v = np.full((1, 2, 1, 8), 60000, np.float16)
    q = np.zeros((1, 1, 1, 8), np.float16)
    dout = np.full((1, 1, 1, 8), 60000, np.float16)
    x = np.full((1, 2, 1, 8), 1.0, np.float16)
    assert (forge.attention(q, x, v, backend=fused_backend) == np.float16(60000)).all()
    _, saved = forge.attention_forward(np.repeat(q, 4, 2), x, v, backend=fused_backend)
    assert (forge.attention_backward(np.repeat(dout, 4, 2), saved)[2] == np.inf).all()


@every_half
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_promise_holds_for_every_element(dtype, softcap, spread, fused_backend):
    """Half a unit of the half type, and what float32 itself may be off by."""
    q, dout = random_halves(8, dtype, *[(2, 130, 4, 33)] * 2)
    k, v = random_halves(9, dtype, *[(2, 150, 2, 33)] * 2)
    q = (widened(q) * spread).astype(dtype)
    options = {"causal": True, "window": 90, "softcap": softcap, "key_start": [0, 20]}
    got = attend(fused_backend, q, k, v, dout, **options)
    problem = Problem(*map(widened, (q, k, v, dout)), **options)
    for name in ("out", *GRADIENTS):
        want = np.asarray(getattr(problem.exact, name))
        error = np.abs(getattr(got, name).astype(np.float64) - want)
        allowed = UNIT_OF[dtype.name] * np.abs(want) + SUBNORMAL_OF[dtype.name] / 2
        assert (error <= allowed + problem.tolerance(name, "fused")).all(), name


@every_half
def test_bits_do_not_depend_on_the_number_of_threads(dtype, cpu, restore_threads):
    arrays = random_halves(10, dtype, (2, 300, 4, 40), *[(2, 310, 2, 40)] * 2, (2, 300, 4, 40))
    results = []
    for threads in (1, 2, 3):
        forge.set_num_threads(threads)
        results.append(attend(cpu, *arrays, causal=True))
    for name in ("out", *GRADIENTS):
        for other in results[1:]:
            assert_equal(getattr(other, name), getattr(results[0], name), name)


@every_half
def test_saved_keeps_o_in_float32(dtype, fused_backend):
    q, k, v = random_halves(11, dtype, *[(1, 8, 2, 16)] * 3)
    out, saved = forge.attention_forward(q, k, v, backend=fused_backend)
    assert saved.out.dtype == np.float32
    assert saved.lse.dtype == np.float32
    assert out.dtype == saved.q.dtype == saved.k.dtype == saved.v.dtype == dtype
    assert_equal(out, rounded(saved.out, dtype))


def test_arrays_of_three_axes_too(fused_backend):
    q, k, v = random_halves(12, BFLOAT16, (2, 8, 4, 16), *[(2, 9, 2, 16)] * 2)
    flat = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
    got = forge.attention(*flat, num_heads=4, num_kv_heads=2, backend=fused_backend)
    assert got.shape == flat[0].shape
    assert_equal(got.reshape(q.shape), forge.attention(q, k, v, backend=fused_backend))


def test_other_dtypes_are_refused_with_both_names():
    x = np.zeros((1, 2, 1, 4), np.float32)
    half, brain = x.astype(np.float16), x.astype(BFLOAT16)
    for given, message in [
        ((half, x, x), r"k must be float16 as q is, got float32; pass k\.astype\(np\.float16\)"),
        (
            (brain, half, half),
            r"k must be bfloat16 as q is, got float16; .*\(ml_dtypes\.b",
        ),
        ((x, half, brain), r"v must be float16 as k is, got bfloat16"),
        ((x, half, x), r"v must be float16 as k is, got float32"),
        (
            (x.view(np.uint32).astype(np.uint16),) * 3,
            r"got uint16; .*q\.view\(ml_dtypes\.bfloat16\)",
        ),
        ((np.zeros(x.shape, "V2"),) * 3, r"got \|V2; .*q\.view\(ml_dtypes\.bfloat16\)"),
    ]:
        with pytest.raises(TypeError, match=message):
            forge.attention(*given)
    with pytest.raises(TypeError, match=r"kernel='materialized', got bfloat16; .*np\.float32"):
        forge.attention(brain, brain, brain, kernel="materialized")
    _, saved = forge.attention_forward(half, half, half)
    with pytest.raises(TypeError, match="dout must be float16 as q is, got float32"):
        forge.attention_backward(x, saved)
    with pytest.raises(TypeError, match="dq must be float16 or float32, got bfloat16"):
        forge.attention_backward(half, saved, dq=brain)


class Exporter:
    """A tensor of a library that NumPy knows nothing of."""

    def __init__(self, tensor):
        self.tensor, self.dtype = tensor, "other.bfloat16"

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_bfloat16_of_other_libraries_is_read_in_place(fused_backend):
    torch = pytest.importorskip("torch")
    q = random_halves(13, np.float32, (2, 6, 2, 16))[0]
    want = forge.attention(*[q.astype(BFLOAT16)] * 3, backend=fused_backend)
    tensor = torch.from_numpy(q).bfloat16()
    for given in (tensor, Exporter(tensor), tensor.transpose(1, 2).contiguous().transpose(1, 2)):
        got = forge.attention(given, given, given, backend=fused_backend)
        assert_equal(got, want)
        assert set(forge.last_run()["arrays"].values()) == {IN_PLACE[fused_backend]}


def test_without_ml_dtypes_the_way_out_is_named(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = torch.zeros(1, 2, 1, 4, dtype=torch.bfloat16)
    with pytest.raises(ImportError, match=r"^q is bfloat16, .*use forge.torch, .*ml_dtypes"):
        forge.attention(x, x, x)


def test_capsules_are_taken_once_and_only_of_bfloat16():
    torch = pytest.importorskip("torch")
    capsule = torch.zeros(2, 3, dtype=torch.bfloat16).__dlpack__()
    bits = forge._forge.bfloat16_bits(capsule)
    assert bits.shape == (2, 3)
    assert not bits.flags.writeable
    with pytest.raises(ValueError, match="nobody has taken"):
        forge._forge.bfloat16_bits(capsule)
    with pytest.raises(ValueError, match="must hold bfloat16, got DLPack type code 2 of 32 bits"):
        forge._forge.bfloat16_bits(torch.zeros(2).__dlpack__())
    with pytest.raises(ValueError, match="must be a DLPack capsule"):
        forge._forge.bfloat16_bits(3)
