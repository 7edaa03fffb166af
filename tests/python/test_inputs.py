"""Wrong calls: each raises the right exception, names its argument and leaves outputs untouched."""

import forge
import numpy as np
import pytest
from oracle import random_inputs


def arrays(dtype=np.float32, shape=(2, 5, 2, 4)):
    return [np.zeros(shape, dtype) for _ in range(3)]


def refuse(error, match, q, k, v, **options):
    """All three ways in refuse alike, and write nothing into out."""
    for function in (forge.attention, forge.attention_forward):
        with pytest.raises(error, match=match):
            function(q, k, v, **options)
        if "out" not in options:
            out = np.full(np.shape(q), 7, np.float32)
            with pytest.raises(error, match=match):
                function(q, k, v, out=out, **options)
            assert (out == 7).all()


WRONG_TYPES = {
    "list": [[[[0.0]]]],
    "tuple": ((0.0,),),
    "float": 1.0,
    "int": 1,
    "None": None,
    "str": "q",
    "bytes": b"q",
    "object": object(),
    "memoryview": memoryview(b"0000"),
    "array type": np.ndarray,
}


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_what_is_no_array(position, value):
    given = arrays()
    given[position] = value
    with pytest.raises(TypeError, match=f"^{'qkv'[position]} "):
        forge.attention(*given)


WRONG_DTYPES = ["u2", "i4", "i8", "u1", "?", "c8", "c16", "O", "S4", "U1", "M8[s]", "m8[s]", "V4"]


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("dtype", WRONG_DTYPES)
@pytest.mark.parametrize("kernel", ["fused", "materialized"])
def test_dtypes_are_never_cast(position, dtype, kernel):
    given = arrays()
    given[position] = np.zeros((2, 5, 2, 4), dtype)
    with pytest.raises(TypeError, match=f"^{'qkv'[position]} .*float32"):
        forge.attention(*given, kernel=kernel)


def test_long_doubles_and_records_are_no_floats():
    for dtype in (np.longdouble, np.dtype([("x", "f4")])):
        if np.dtype(dtype).itemsize == 8:
            continue  # here long double is float64
        with pytest.raises(TypeError, match=r"^q "):
            forge.attention(*arrays(dtype), kernel="materialized")


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kernel", ["fused", "materialized"])
def test_float32_and_float64_do_not_mix(position, kernel):
    given = arrays()
    given[position] = given[position].astype(np.float64)
    with pytest.raises(TypeError, match=r"float32.*float64|float64.*float32"):
        forge.attention(*given, kernel=kernel)


@pytest.mark.parametrize("kernel", [None, "fused"])
def test_float64_names_the_kernel_that_takes_it(kernel):
    refuse(TypeError, r"materialized", *arrays(np.float64), kernel=kernel)


def test_masked_elements_are_refused():
    for position in range(3):
        given = arrays()
        mask = np.zeros((2, 5, 2, 4), bool)
        mask[1, 2, 1, 3] = True
        given[position] = np.ma.array(given[position], mask=mask)
        with pytest.raises(TypeError, match=f"^{'qkv'[position]} .*mask"):
            forge.attention(*given)


WRONG_SHAPES = [
    ("q", (), {}),
    ("q", (4,), {}),
    ("q", (5, 4), {}),
    ("q", (1, 2, 5, 2, 4), {}),
    ("k", (2, 5, 8), {}),
    ("v", (2, 5, 8), {}),
    ("k", (3, 5, 2, 4), {}),
    ("v", (2, 6, 2, 4), {}),
    ("v", (2, 5, 1, 4), {}),
    ("v", (1, 5, 2, 4), {}),
]


@pytest.mark.parametrize(("name", "shape", "options"), WRONG_SHAPES, ids=str)
def test_shapes_that_do_not_fit(name, shape, options):
    given = arrays()
    given["qkv".index(name)] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"^[qkv] "):
        forge.attention(*given, **options)


def test_head_dims_that_differ():
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"^k .*head dim.* 3 and 4"):
        forge.attention(q, k[..., :3].copy(), v[..., :3].copy())


THREE_AXES = [
    ("num_heads", 8, 8, {}),
    ("q", 8, 8, {"num_heads": 3}),
    ("k", 8, 8, {"num_heads": 4, "num_kv_heads": 3}),
    ("k", 8, 6, {"num_heads": 4, "num_kv_heads": 2}),
    ("k", 8, 4, {"num_heads": 4}),
    ("num_heads", 8, 8, {"num_heads": 0}),
    ("num_heads", 8, 8, {"num_heads": -2}),
    ("num_kv_heads", 8, 8, {"num_heads": 2, "num_kv_heads": 0}),
    ("num_kv_heads", 8, 8, {"num_heads": 2, "num_kv_heads": -1}),
    ("q", 8, 8, {"num_heads": 2**40, "num_kv_heads": 2**40}),
    ("q", 0, 0, {"num_heads": 2}),
]


@pytest.mark.parametrize(("named", "q_width", "k_width", "options"), THREE_AXES, ids=str)
def test_widths_and_head_counts_that_do_not_fit(named, q_width, k_width, options):
    q, k = np.zeros((1, 3, q_width), np.float32), np.zeros((1, 3, k_width), np.float32)
    refuse(ValueError, named, q, k, k, **options)


@pytest.mark.parametrize("options", [{"num_heads": 3}, {"num_kv_heads": 1}, {"num_heads": 0}])
def test_head_counts_that_contradict_four_axes(options):
    refuse(ValueError, rf"^{next(iter(options))} ", *arrays(), **options)


WRONG_OPTIONS = [
    ("causal", TypeError, [1, 0, "yes", None, 1.0, np.array([True])]),
    ("window", TypeError, [1.5, True, np.True_, "3", [1, 2], (1.0, 2), (True, 1), (None, 1)]),
    ("window", ValueError, [0, -1, -5, (-2, 0), (0, -2), (1,), (1, 2, 3), ()]),
    ("softcap", TypeError, [True, "1", 1j, [1.0], np.array([1.0])]),
    ("softcap", ValueError, [-1.0, np.nan, np.inf, -np.inf, 1e39, 1e-50, 10**400]),
    ("scale", TypeError, [True, "1", 1j, [1.0]]),
    ("scale", ValueError, [np.nan, np.inf, -np.inf, 1e39, -1e39, 1e-50, 10**400]),
    ("query_offset", TypeError, [1.0, True, "0", [0, 0.0], np.ones(2), [True, False], b"0"]),
    ("query_offset", ValueError, [2**63, -(2**63) - 1, np.zeros(3, int), np.zeros((2, 1), int),
                                  np.array([0, 2**63], np.uint64)]),
    ("key_start", TypeError, [1.0, True, "0", [[0], [0, 1]], np.array([0.0, 1.0]), {0, 1}]),
    ("key_start", ValueError, [-1, 6, 2**63, np.array([0, 6]), np.array([-1, 0]), np.array([0])]),
    ("key_end", TypeError, [1.0, np.True_, "0", (1.5, 2), ["1", "2"], [None, 1], [2**64, 1]]),
    ("key_end", ValueError, [-1, 6, 2**64, np.array([0, 6]), np.array([-1, 0]), np.zeros(3, int)]),
    ("num_heads", TypeError, [2.0, True, "2", np.array([2])]),
    ("num_kv_heads", TypeError, [2.0, True, "2"]),
    ("kernel", TypeError, [1, b"fused", True]),
    ("kernel", ValueError, ["flash", "", "FUSED"]),
    ("backend", TypeError, [1, b"cpu", True]),
    ("backend", ValueError, ["cuda", "CPU", "cpu "]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [(name, error, value) for name, error, values in WRONG_OPTIONS for value in values],
    ids=lambda x: x.__name__ if isinstance(x, type) else repr(x)[:40],
)
def test_wrong_options(name, error, value):
    refuse(error, rf"^{name}\b", *arrays(), **{name: value})


@pytest.mark.parametrize("name", ["is_causal", "dropout", "attn_mask"])
def test_options_that_do_not_exist(name):
    refuse(TypeError, name, *arrays(), **{name: None})


def test_messages_say_what_came_and_what_was_expected():
    x = np.zeros((1, 2, 6, 4), np.float32)
    with pytest.raises(ValueError, match=r"6 and 4"):
        forge.attention(x, x[:, :, :4], x[:, :, :4])
    with pytest.raises(ValueError, match=r"key_end must be within \[0, 2\], got 3"):
        forge.attention(x, x, x, key_end=3)
    with pytest.raises(TypeError, match=r"q must be float32.*got int64"):
        forge.attention(x.astype(np.int64), x, x)


def test_the_fused_kernel_says_how_many_channels_it_takes(cpu):
    x = np.zeros((1, 1, 1, 513), np.float32)
    refuse(ValueError, r"512.*513", x, x, x, backend=cpu, kernel="fused")
    forge.attention(x, x, x, backend=cpu, kernel="materialized")


def overlapping(x):
    buffer = np.zeros(x.size + 1, np.float32)
    return buffer[:-1].reshape(x.shape), buffer[1:].reshape(x.shape)


def wrong_outputs(shape):
    """(error, output) of everything that a result of `shape` cannot be written into."""
    read_only = np.zeros(shape, np.float32)
    read_only.setflags(write=False)
    misaligned = np.zeros(4 * int(np.prod(shape)) + 1, np.uint8)[1:].view(np.float32).reshape(shape)
    masked = np.ma.array(np.zeros(shape, np.float32), mask=np.ones(shape, bool))
    return {
        "list": (TypeError, np.zeros(shape).tolist()),
        "number": (TypeError, 0.0),
        "float64": (TypeError, np.zeros(shape)),
        "int32": (TypeError, np.zeros(shape, np.int32)),
        "masked": (TypeError, masked),
        "another length": (ValueError, np.zeros((shape[0], shape[1] + 1, *shape[2:]), np.float32)),
        "another rank": (ValueError, np.zeros((*shape[:2], shape[2] * shape[3]), np.float32)),
        "read-only": (ValueError, read_only),
        "big-endian": ((TypeError, ValueError), np.zeros(shape, ">f4")),
        "misaligned": (ValueError, misaligned),
        "strided channels": (ValueError, np.zeros(shape, np.float32).repeat(2, -1)[..., ::2]),
        "zero stride": (ValueError, np.lib.stride_tricks.as_strided(
            np.zeros(shape, np.float32), shape, (0, *np.zeros(shape, np.float32).strides[1:]))),
    }  # fmt: skip


SHAPE = (2, 5, 2, 4)


@pytest.mark.parametrize("fault", wrong_outputs(SHAPE))
@pytest.mark.parametrize("kernel", ["fused", "materialized"])
def test_outputs_that_cannot_be_written(fault, kernel):
    error, out = wrong_outputs(SHAPE)[fault]
    before = np.array(out)
    with pytest.raises(error, match=r"^out "):
        forge.attention(*arrays(shape=SHAPE), out=out, kernel=kernel)
    np.testing.assert_array_equal(np.array(out), before)


@pytest.mark.parametrize("fault", wrong_outputs(SHAPE))
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_gradients_that_cannot_be_written(fault, name, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, H=2, hd=4)
    _, saved = forge.attention_forward(q, k, v)
    given = {x: np.full(SHAPE, 7, np.float32) for x in ("dq", "dk", "dv")}
    error, given[name] = wrong_outputs(SHAPE)[fault]
    for accumulate in (False, True):
        with pytest.raises(error, match=f"^{name} "):
            forge.attention_backward(dout, saved, **given, accumulate=accumulate)
    assert all((given[x] == 7).all() for x in given if x != name)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_output_that_overlaps_an_input(position, rng):
    given = list(random_inputs(rng, B=2, Tq=5, H=2, hd=4)[:3])
    given[position], shifted = overlapping(given[position])
    for out in (given[position], shifted, given[position][::-1]):
        with pytest.raises(ValueError, match=rf"^out .*\b{'qkv'[position]}\b"):
            forge.attention(*given, out=out)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (name, other)
        for name in ("dq", "dk", "dv")
        for other in ("dq", "dk", "dv", "dout", "q", "k", "v", "out")
        if name != other
    ],
)
def test_a_gradient_that_overlaps_another_array(name, other, rng):
    given = dict(zip("qkv", random_inputs(rng, B=2, Tq=5, H=2, hd=4), strict=False))
    out, saved = forge.attention_forward(**given)
    given |= {"out": out, "dout": np.ones(SHAPE, np.float32)}
    gradients = {x: np.full(SHAPE, 7, np.float32) for x in ("dq", "dk", "dv")}
    gradients[name] = gradients[other] if other in gradients else given[other]
    before = {x: y.copy() for x, y in gradients.items()}
    with pytest.raises(ValueError, match=r"^d[qkv] .*overlap"):
        forge.attention_backward(given["dout"], saved, **gradients)
    for x, y in gradients.items():
        np.testing.assert_array_equal(y, before[x])


def test_wrong_arguments_of_the_backward(rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=5, H=2, hd=4)
    _, saved = forge.attention_forward(q, k, v)
    dlse = np.zeros((2, 2, 5), np.float32)
    for error, name, given in [
        (TypeError, "saved", {"saved": None}),
        (TypeError, "saved", {"saved": (q, k, v)}),
        (TypeError, "dout", {"dout": None}),
        (TypeError, "dout", {"dout": dout.astype(np.float64)}),
        (TypeError, "dout", {"dout": dout.astype(np.float16)}),
        (ValueError, "dout", {"dout": dout[:, :4]}),
        (ValueError, "dout", {"dout": dout.reshape(2, 5, 8)}),
        (TypeError, "dout", {"dout": np.ma.array(dout, mask=np.ones(dout.shape, bool))}),
        (TypeError, "dlse", {"dlse": 0.0}),
        (TypeError, "dlse", {"dlse": dlse.astype(np.float64)}),
        (ValueError, "dlse", {"dlse": dlse[..., :4]}),
        (ValueError, "dlse", {"dlse": dlse.transpose(0, 2, 1)}),
        (TypeError, "accumulate", {"accumulate": 1}),
        (TypeError, "accumulate", {"accumulate": None}),
    ]:
        outputs = {x: np.full(SHAPE, 7, np.float32) for x in ("dq", "dk", "dv")}
        with pytest.raises(error, match=rf"^{name} "):
            forge.attention_backward(**({"dout": dout, "saved": saved} | outputs | given))
        assert all((x == 7).all() for x in outputs.values())


def test_accumulate_needs_all_its_outputs(rng):
    q, k, v, dout = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v)
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    for given in ({}, {"dq": dq}, {"dq": dq, "dk": dk}):
        with pytest.raises(ValueError, match="accumulate"):
            forge.attention_backward(dout, saved, accumulate=True, **given)
    assert not dq.any()


@pytest.mark.parametrize("T", [2**20, 2**40])
def test_probabilities_beyond_memory_are_refused_before_they_are_allocated(T):
    """The message says how many bytes it takes and what to use instead; sizes do not overflow."""
    x = np.broadcast_to(np.float32(0), (1, T, 1, 1))
    with pytest.raises(MemoryError, match="fused") as caught:
        forge.attention(x, x, x, kernel="materialized")
    assert str(4 * T * T) in str(caught.value)


def test_a_refused_call_leaves_the_record_of_the_last_run(rng):
    q, k, v, _ = random_inputs(rng)
    forge.attention(q, k, v)
    before = forge.last_run()
    with pytest.raises(ValueError, match=r"^window"):
        forge.attention(q, k, v, window=0)
    assert forge.last_run() == before


def test_positions_must_not_be_masked():
    x = np.ones((2, 3, 1, 4), np.float32)
    masked = np.ma.array([0, 2], mask=[False, True])
    with pytest.raises(TypeError, match=r"^key_start must not have masked elements"):
        forge.attention(x, x, x, key_start=masked)


def test_a_mask_behind_the_array_protocol_is_not_dropped():
    class Wrapper:
        def __array__(self, dtype=None, copy=None):
            return np.ma.array(np.ones((1, 2, 1, 4), np.float32), mask=True)

    x = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(TypeError, match=r"^v must not have masked elements"):
        forge.attention(x, x, Wrapper())


def test_outputs_must_not_overlap_themselves():
    x = np.ones((1, 3, 2, 2), np.float32)
    out = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), x.shape, (0, 4, 8, 4))
    with pytest.raises(ValueError, match=r"^out must not overlap itself"):
        forge.attention(x, x, x, out=out)


def test_out_must_not_overlap_an_input_that_is_copied():
    memory = np.ones((1, 3, 2, 2), np.float32)
    swapped = memory.view(">f4")
    x = np.ones((1, 3, 2, 2), np.float32)
    with pytest.raises(ValueError, match=r"^out must not overlap q"):
        forge.attention(swapped, x, x, out=memory)
    assert (memory == 1).all()
