"""A call on NumPy's own arrays of float32 or half precision with plain options goes straight to the
kernels; every other call goes through Python's checks. What comes of it is the same."""

import tracemalloc
from unittest import mock

import forge
import numpy as np
import pytest
from forge import _forge

OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "window pair": {"causal": True, "window": (2, -1)},
    "softcap": {"softcap": 5.0},
    "ints for reals": {"softcap": 5, "scale": 2},
    "scale 0": {"scale": 0.0},
    "NumPy's float64": {"scale": np.float64(0.7)},
    "negative scale": {"scale": -0.5},
    "positions": {"causal": True, "query_offset": 2, "key_start": 1, "key_end": 6},
    "key_end": {"key_end": 4},
    "all": {
        "causal": True, "window": (4, 2), "softcap": 2.0, "scale": 0.3, "query_offset": 3,
        "key_start": 1, "key_end": 7, "kernel": "fused", "backend": "cpu",
    },
}  # fmt: skip
# Of q, and of k and v.
TYPES = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16 under float32": ("float32", "float16"),
    "bfloat16 under float32": ("float32", "bfloat16"),
}
every_type = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
NAMES = (
    "causal", "window", "softcap", "scale", "query_offset", "key_start", "key_end", "bias",
    "mask", "sinks", "num_heads", "num_kv_heads", "kernel", "backend", "out",
)  # fmt: skip


@pytest.fixture
def plain(cpu):
    """Skips where a call that names no backend does not go to the CPU at once."""
    if forge.build_config()["metal"] != "off":
        pytest.skip("this build asks Metal first")
    return cpu


@pytest.fixture
def unset(monkeypatch):
    for name in ("FORGE_BACKEND", "FORGE_CPU_TARGET"):
        monkeypatch.delenv(name, raising=False)


def inputs(rng, Tq=5, Tk=7, H=4, Hkv=2, hd=8, B=2):
    shapes = ((B, Tq, H, hd), (B, Tk, Hkv, hd), (B, Tk, Hkv, hd), (B, Tq, H, hd))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def typed(arrays, types):
    """q, k, v and, where there is one, dout."""
    if "bfloat16" in types:
        pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 from ml_dtypes only")
    of_q, of_k = types
    return [x.astype(kind) for x, kind in zip(arrays, (of_q, of_k, of_k, of_q), strict=False)]


def straight(function, q, k, v, **options):
    """The compiled module's answer to a call of forge.attention or forge.attention_forward."""
    given = {"causal": False} | options
    return function(q, k, v, *(given.get(name) for name in NAMES))


def through_python():
    """Every plain call is declined, as if it were none."""
    names = ("attention", "attention_forward", "attention_backward")
    return mock.patch.multiple(_forge, **{name: lambda *_: None for name in names})


def everything(q, k, v, dout, options):
    """Results, gradients and reports of the three functions."""
    found, reports = [forge.attention(q, k, v, **options)], [forge.last_run()]
    out, saved = forge.attention_forward(q, k, v, **options)
    reports.append(forge.last_run())
    found += [out, saved.out, saved.row_max, saved.row_sum, saved.lse, saved.q, saved.k, saved.v]
    found += forge.attention_backward(dout, saved)
    return found, [*reports, forge.last_run()], (repr(saved), saved.kernel, saved.backend)


@every_type
@pytest.mark.parametrize("layout", ["4-D", "3-D", "strided", "broadcast"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results_and_reports_are_those_of_the_way_through_python(
    rng, plain, options, layout, types
):
    arrays = typed(inputs(rng), types)
    if layout == "3-D":
        arrays = [x.reshape(*x.shape[:2], -1) for x in arrays]
        options = options | {"num_heads": 4, "num_kv_heads": 2}
    elif layout == "strided":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)[::-1] for x in arrays]
    elif layout == "broadcast":
        arrays = [np.broadcast_to(x[:, :1], x.shape) for x in arrays]
    found, reports, saved = everything(*arrays, options)
    with through_python():
        expected, expected_reports, expected_saved = everything(*arrays, options)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.flags.c_contiguous == y.flags.c_contiguous
        np.testing.assert_array_equal(x, y)
    assert reports == expected_reports
    assert saved == expected_saved


@every_type
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_plain_calls_are_taken(rng, plain, unset, options, types):
    q, k, v = typed(inputs(rng)[:3], types)
    assert straight(_forge.attention, q, k, v, **options) is not None
    assert straight(_forge.attention_forward, q, k, v, **options) is not None


@every_type
@pytest.mark.parametrize("ndim", [3, 4])
def test_plain_backwards_are_taken(rng, cpu, unset, ndim, types):
    arrays, heads = typed(inputs(rng), types), {}
    if ndim == 3:
        arrays = [x.reshape(*x.shape[:2], -1) for x in arrays]
        heads = {"num_heads": 4, "num_kv_heads": 2}
    *qkv, dout = arrays
    _, saved = forge.attention_forward(*qkv, **heads, backend="cpu")
    with mock.patch.object(_forge, "run", side_effect=AssertionError("not taken")):
        gradients = forge.attention_backward(dout, saved)
    for gradient, x in zip(gradients, qkv, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("change", [
    lambda x: x.astype(np.float16), lambda x: x[..., ::2], lambda x: x[:1],
])  # fmt: skip
def test_other_dout_is_refused_in_words(rng, cpu, unset, change):
    *qkv, dout = inputs(rng)
    _, saved = forge.attention_forward(*qkv, backend="cpu")
    with pytest.raises((TypeError, ValueError), match=r"^dout must"):
        forge.attention_backward(change(dout), saved)


@pytest.mark.parametrize("types", [
    ("float16", "float32", "float32"), ("float16", "bfloat16", "bfloat16"),
    ("float32", "float16", "float32"), ("float32", "float16", "bfloat16"),
    ("bfloat16", "bfloat16", "float16"), ("float32", "float32", "float16"),
])  # fmt: skip
def test_other_mixtures_of_types_are_declined(rng, cpu, unset, types):
    pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 from ml_dtypes only")
    q, k, v = (x.astype(kind) for x, kind in zip(inputs(rng), types, strict=False))
    assert straight(_forge.attention, q, k, v, backend="cpu") is None


def test_byte_swapped_bfloat16_is_declined(rng, cpu, unset):
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    q, k, v = (x.astype(bfloat16) for x in inputs(rng)[:3])
    swapped = q.view(bfloat16.newbyteorder())
    if swapped.dtype == bfloat16:
        pytest.skip("this ml_dtypes has no other byte order")
    assert straight(_forge.attention, swapped, k, v, backend="cpu") is None


def test_named_cpu_is_taken_in_every_build(rng, cpu, unset):
    q, k, v, _ = inputs(rng)
    assert straight(_forge.attention, q, k, v, backend="cpu") is not None


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(np.float64),
        lambda x: x.view(np.uint32),
        lambda x: x.astype(np.float16).view(np.uint16),
        lambda x: x.astype(np.float16).astype(">f2"),
        lambda x: x.astype(np.float16).view("V2"),
        lambda x: x.astype(x.dtype.newbyteorder()),
        lambda x: x.view(Subclass),
        lambda x: np.ma.masked_array(x),
        lambda x: x.tolist(),
        lambda x: x[:, :0],
        lambda x: x[..., ::2],
        lambda x: x[0],
        lambda x: x[None],
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view("f4").reshape(x.shape),
        lambda x: None,
    ],
)
@pytest.mark.parametrize("at", range(3))
def test_other_arrays_are_declined(rng, cpu, unset, at, change):
    arrays = inputs(rng)[:3]
    arrays[at] = change(arrays[at])
    assert straight(_forge.attention, *arrays, backend="cpu") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", 1), ("causal", np.True_), ("causal", None),
        ("window", 0), ("window", True), ("window", 2.0), ("window", [1, 2]), ("window", (1,)),
        ("window", (-2, 0)), ("window", (0, True)), ("window", 2**70),
        ("softcap", -1.0), ("softcap", float("nan")), ("softcap", 1e-60), ("softcap", "1"),
        ("scale", float("inf")), ("scale", 1e60), ("scale", True), ("scale", np.float32(1)),
        ("query_offset", 1.0), ("query_offset", np.array([0, 1])), ("query_offset", True),
        ("query_offset", 2**63),
        ("key_start", -1), ("key_start", 8), ("key_end", 8), ("key_end", [1, 2]),
        ("num_heads", 4), ("num_kv_heads", 2), ("num_heads", 4.0),
        ("kernel", "materialized"), ("kernel", "fast"), ("kernel", 1),
        ("backend", "metal"), ("backend", 1), ("out", np.zeros((2, 5, 4, 8), np.float32)),
    ],
)  # fmt: skip
def test_other_options_are_declined_or_refused_in_words(rng, cpu, unset, name, value):
    q, k, v, _ = inputs(rng)
    assert straight(_forge.attention, q, k, v, **{"backend": "cpu", name: value}) is None


def test_two_readings_of_key_end_are_declined(rng, cpu, unset):
    q, k, v, _ = inputs(rng)
    for options in ({"causal": True}, {"window": 3}):
        given = {"backend": "cpu", "key_end": 6} | options
        assert straight(_forge.attention, q, k, v, **given) is None
        assert straight(_forge.attention, q, k, v, **given, query_offset=1) is not None
    assert (
        straight(_forge.attention, q[:, :1], k, v, causal=True, key_end=6, backend="cpu")
        is not None
    )


@pytest.mark.parametrize("variable", ["FORGE_BACKEND", "FORGE_CPU_TARGET"])
def test_the_environment_is_asked_at_every_call(rng, cpu, unset, monkeypatch, variable):
    q, k, v, _ = inputs(rng)
    monkeypatch.setenv(variable, "none such")
    with pytest.raises(ValueError, match=variable):
        forge.attention(q, k, v)


def test_a_saved_copy_is_reported_by_the_backward(rng, cpu):
    q, k, v, dout = inputs(rng)
    _, saved = forge.attention_forward(q.astype(">f4"), k, v, backend="cpu")
    forge.attention_backward(dout, saved)
    assert forge.last_run()["arrays"]["q"] == "copied: byte-swapped"


def test_the_last_run_is_the_last_whichever_way_it_went(rng, plain, unset):
    q, k, v, _ = inputs(rng)
    forge.attention(q, k, v)
    forge.attention(q, k, v, kernel="materialized")
    assert forge.last_run()["kernel"] == "materialized"
    forge.attention(q, k, v)
    assert forge.last_run()["kernel"] == "fused"


def test_attention_alone_makes_no_array_but_the_result(rng, plain, unset):
    q, k, v, _ = inputs(rng, Tq=512, H=8, Hkv=8, hd=4)
    forge.attention(q, k, v)
    tracemalloc.start()
    try:
        out = forge.attention(q, k, v)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert out.nbytes <= peak < out.nbytes + 4096


def test_huge_claims_are_declined_without_overflow(cpu, unset):
    one = np.zeros((1, 1, 1, 1), np.float32)
    huge = np.broadcast_to(one, (2**20, 2**20, 2**20, 1))
    assert straight(_forge.attention, huge, huge, huge, backend="cpu") is None


def test_the_wrong_number_of_arguments_is_a_type_error(cpu):
    with pytest.raises(TypeError, match="18 arguments"):
        _forge.attention(1, 2)
