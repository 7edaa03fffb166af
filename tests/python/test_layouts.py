"""Memory layouts: any strides in place, outputs plain, out= the very array handed in."""

import mmap
import sys

import forge
import numpy as np
import pytest
from calls import IN_PLACE, assert_same_bits, run
from oracle import GRADIENTS, random_inputs

B, T, H, HD = 3, 33, 2, 4


def slice_of_packed(x):
    packed = np.full((*x.shape[:2], 3, *x.shape[2:]), np.nan, np.float32)
    packed[:, :, 1] = x
    return packed[:, :, 1]


def transposed(x):
    return np.ascontiguousarray(x.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)


def heads_first(x):
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def fortran_but_for_the_last_axis(x):
    return np.ascontiguousarray(x.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)


def reversed_rows(x):
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]


def reversed_everything_but_the_last_axis(x):
    return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


def every_other_row(x):
    return x.repeat(2, axis=1)[:, ::2]


def inside_a_bigger_buffer(x):
    buffer = np.full([n + 3 for n in x.shape], np.nan, np.float32)
    view = buffer[1:-2, 2:-1, 1:-2, 2:-1]
    view[...] = x
    return view


def read_only(x):
    y = x.copy()
    y.setflags(write=False)
    return y


def from_bytes(x):
    return np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)


# Python 3.13 names it in mmap.
NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
METAL = forge.build_config()["metal"]

IN_PLACE_LAYOUTS = [
    slice_of_packed,
    transposed,
    heads_first,
    fortran_but_for_the_last_axis,
    reversed_rows,
    reversed_everything_but_the_last_axis,
    every_other_row,
    inside_a_bigger_buffer,
    read_only,
    from_bytes,
]


def fortran(x):
    return np.asfortranarray(x)


def every_other_channel(x):
    return x.repeat(2, axis=-1)[..., ::2]


def reversed_channels(x):
    return np.ascontiguousarray(x[..., ::-1])[..., ::-1]


def same_channel(x):
    return np.broadcast_to(x[..., :1], x.shape)


def misaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)
    view = raw[1:].view(np.float32).reshape(x.shape)
    view[...] = x
    return view


def big_endian(x):
    return x.astype(">f4")


COPIED_LAYOUTS = [
    fortran,
    every_other_channel,
    reversed_channels,
    same_channel,
    misaligned,
    big_endian,
]


@pytest.fixture
def inputs(rng):
    return dict(
        zip(("q", "k", "v", "dout"), random_inputs(rng, B=B, Tq=T, H=H, hd=HD), strict=True)
    )


def run_named(arrays, backend, kernel):
    result = run(**arrays, causal=True, window=20, backend=backend, kernel=kernel)
    return result, forge.last_run()["arrays"]


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("layout", IN_PLACE_LAYOUTS)
def test_strides_are_followed_in_place(name, layout, inputs, backend, kernel):
    laid_out = inputs | {name: layout(inputs[name])}
    np.testing.assert_array_equal(laid_out[name], inputs[name])
    got, how = run_named(laid_out, backend, kernel)
    assert how[name] == IN_PLACE[backend]
    assert_same_bits(got, run_named(inputs, backend, kernel)[0])
    np.testing.assert_array_equal(laid_out[name], inputs[name])


@pytest.mark.parametrize("layout", IN_PLACE_LAYOUTS)
def test_all_inputs_laid_out_alike(layout, inputs, backend, kernel):
    got, how = run_named({name: layout(x) for name, x in inputs.items()}, backend, kernel)
    assert set(how.values()) == {IN_PLACE[backend]}
    assert_same_bits(got, run_named(inputs, backend, kernel)[0])


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("layout", COPIED_LAYOUTS)
def test_what_cannot_be_read_in_place_is_copied_and_said_so(name, layout, inputs, backend, kernel):
    laid_out = inputs | {name: layout(inputs[name])}
    before = laid_out[name].copy()
    got, how = run_named(laid_out, backend, kernel)
    assert how[name].startswith("copied: ")
    assert all(how[other] == IN_PLACE[backend] for other in inputs if other != name)
    plain = inputs | {name: np.ascontiguousarray(laid_out[name], np.float32)}
    assert_same_bits(got, run_named(plain, backend, kernel)[0])
    np.testing.assert_array_equal(laid_out[name], before)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_broadcast_axes(name, axis, inputs, backend, kernel):
    """A stride of 0 over the batch, the rows or the heads."""
    x = np.broadcast_to(inputs[name].take([0], axis), inputs[name].shape)
    assert x.strides[axis] == 0
    got, how = run_named(inputs | {name: x}, backend, kernel)
    assert how[name] == IN_PLACE[backend]
    assert_same_bits(got, run_named(inputs | {name: x.copy()}, backend, kernel)[0])


def test_one_element_of_all_strides_zero(backend, kernel):
    one = np.broadcast_to(np.float32(2), (2, 5, 2, 1))
    got = run(one, one, one, one, backend=backend, kernel=kernel)
    np.testing.assert_allclose(got.out, 2, rtol=1e-6)
    np.testing.assert_allclose(got.dv, 2, rtol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_axes_of_one_may_have_any_stride(name, rng, backend, kernel):
    inputs = dict(zip(("q", "k", "v", "dout"), random_inputs(rng, Tq=1, H=1, hd=4), strict=True))
    for shape_axis in range(3):
        strides = [16, 16, 16, 4]
        strides[shape_axis] = 12345 * 4 + 2
        odd = np.lib.stride_tricks.as_strided(inputs[name], (1, 1, 1, 4), strides)
        got = run(**inputs | {name: odd}, backend=backend, kernel=kernel)
        assert_same_bits(got, run(**inputs, backend=backend, kernel=kernel))


def test_a_head_dim_of_one_may_have_any_stride(rng, backend, kernel):
    q, k, v, dout = random_inputs(rng, Tq=5, H=2, hd=1)
    wide = q.repeat(3, -1)[..., :1]
    assert_same_bits(
        run(wide, k, v, dout, backend=backend, kernel=kernel),
        run(q, k, v, dout, backend=backend, kernel=kernel),
    )


def test_packed_qkv_on_three_axes(rng, backend, kernel):
    packed = rng.standard_normal((2, 9, 3 * 8)).astype(np.float32)
    q, k, v = packed[..., :8], packed[..., 8:16], packed[..., 16:]
    got = run(q, k, v, q, num_heads=2, backend=backend, kernel=kernel)
    assert set(forge.last_run()["arrays"].values()) == {IN_PLACE[backend]}
    want = run(q.copy(), k.copy(), v.copy(), q.copy(), num_heads=2, backend=backend, kernel=kernel)
    assert_same_bits(got, want)


def test_the_same_array_three_times(rng, backend, kernel):
    x = random_inputs(rng, Tq=9)[0]
    assert_same_bits(
        run(x, x, x, x, backend=backend, kernel=kernel),
        run(x.copy(), x.copy(), x.copy(), x.copy(), backend=backend, kernel=kernel),
    )


def test_dlse_in_any_layout(inputs, rng, backend, kernel):
    dlse = rng.standard_normal((B, H, T)).astype(np.float32)
    options = {"backend": backend, "kernel": kernel}
    want = run(*inputs.values(), dlse, **options)
    other_order = np.ascontiguousarray(dlse.transpose(2, 0, 1)).transpose(1, 2, 0)
    for other in (other_order, dlse[:, ::-1].copy()[:, ::-1], dlse.astype(">f4"), misaligned(dlse)):
        assert_same_bits(run(*inputs.values(), other, **options), want)


def test_results_are_plain_arrays_of_their_own(inputs, backend, kernel):
    class Tagged(np.ndarray):
        pass

    tagged = {name: transposed(x).view(Tagged) for name, x in inputs.items()}
    got = run(**tagged, backend=backend, kernel=kernel)
    for name in ("out", *GRADIENTS, "lse"):
        x = getattr(got, name)
        assert type(x) is np.ndarray
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert (
            x.flags.owndata or METAL != "off"
        )  # there they lie on whole pages, in a block of theirs
        assert x.flags.aligned
        assert x.dtype == np.float32
        assert x.dtype.isnative
        assert not any(np.shares_memory(x, y) for y in inputs.values())
    assert_same_bits(got, run(**inputs, backend=backend, kernel=kernel))


def test_memory_maps_open_for_reading(tmp_path, inputs, backend, kernel):
    maps = {}
    for name, x in inputs.items():
        x.tofile(tmp_path / name)
        maps[name] = np.memmap(tmp_path / name, np.float32, "r", shape=x.shape)
    assert_same_bits(
        run(**maps, backend=backend, kernel=kernel), run(**inputs, backend=backend, kernel=kernel)
    )


def test_masked_arrays_without_masked_elements(inputs, backend, kernel):
    masked = {name: np.ma.array(x, mask=np.zeros(x.shape, bool)) for name, x in inputs.items()}
    unmasked = {name: np.ma.array(x) for name, x in inputs.items()}
    want = run(**inputs, backend=backend, kernel=kernel)
    for arrays in (masked, unmasked):
        got = run(**arrays, backend=backend, kernel=kernel)
        assert type(got.out) is np.ndarray
        assert_same_bits(got, want)


def test_objects_that_are_arrays_by_protocol(inputs, backend, kernel):
    class Tensor:
        def __init__(self, x):
            self.x = x

        def __array__(self, dtype=None, copy=None):
            return self.x

    tensors = {name: Tensor(x) for name, x in inputs.items()}
    assert_same_bits(
        run(**tensors, backend=backend, kernel=kernel),
        run(**inputs, backend=backend, kernel=kernel),
    )


@pytest.mark.parametrize(
    "layout",
    [
        slice_of_packed,
        transposed,
        heads_first,
        inside_a_bigger_buffer,
        reversed_rows,
        reversed_everything_but_the_last_axis,
    ],
)
def test_outputs_in_any_layout(layout, inputs, backend, kernel):
    want = run(**inputs, backend=backend, kernel=kernel)
    out = layout(np.full((B, T, H, HD), np.nan, np.float32))
    given = {name: layout(np.full((B, T, H, HD), np.nan, np.float32)) for name in GRADIENTS}
    q, k, v, dout = inputs.values()
    returned, saved = forge.attention_forward(q, k, v, out=out, backend=backend, kernel=kernel)
    assert returned is out
    np.testing.assert_array_equal(out, want.out)
    for x, (name, y) in zip(
        forge.attention_backward(dout, saved, **given), given.items(), strict=True
    ):
        assert x is y
        np.testing.assert_array_equal(y, getattr(want, name))


def test_writing_a_view_leaves_its_surroundings_alone(inputs, backend, kernel):
    q, k, v, _ = inputs.values()
    buffer = np.full((B + 2, T + 2, H + 2, HD + 2), 7, np.float32)
    out = buffer[1:-1, 1:-1, 1:-1, 1:-1]
    forge.attention(q, k, v, out=out, backend=backend, kernel=kernel)
    outside = np.ones(buffer.shape, bool)
    outside[1:-1, 1:-1, 1:-1, 1:-1] = False
    assert (buffer[outside] == 7).all()


def test_gradients_into_one_packed_array(inputs, backend, kernel):
    """dq, dk and dv interleave in memory without sharing any of it."""
    q, k, v, dout = inputs.values()
    want = run(q, k, v, dout, backend=backend, kernel=kernel)
    packed = np.full((B, T, 3, H, HD), np.nan, np.float32)
    _, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel)
    forge.attention_backward(
        dout, saved, dq=packed[:, :, 0], dk=packed[:, :, 1], dv=packed[:, :, 2]
    )
    for at, name in enumerate(GRADIENTS):
        np.testing.assert_array_equal(packed[:, :, at], getattr(want, name))


def test_an_output_of_three_axes(rng, backend, kernel):
    q, k, v, _ = (x.reshape(2, 9, 8) for x in random_inputs(rng, B=2, Tq=9, H=2, hd=4))
    packed = np.full((2, 9, 24), np.nan, np.float32)
    out = packed[..., 8:16]
    assert forge.attention(q, k, v, num_heads=2, out=out, backend=backend, kernel=kernel) is out
    np.testing.assert_array_equal(
        out, forge.attention(q, k, v, num_heads=2, backend=backend, kernel=kernel)
    )
    assert np.isnan(packed[..., :8]).all()
    assert np.isnan(packed[..., 16:]).all()


def test_an_output_that_is_a_subclass_is_returned_itself(inputs, backend, kernel):
    class Tagged(np.ndarray):
        pass

    q, k, v, _ = inputs.values()
    out = np.empty_like(q).view(Tagged)
    assert forge.attention(q, k, v, out=out, backend=backend, kernel=kernel) is out
    np.testing.assert_array_equal(
        np.asarray(out), forge.attention(q, k, v, backend=backend, kernel=kernel)
    )


def test_an_output_between_the_rows_of_an_input(inputs, backend, kernel):
    """out takes the odd rows of a buffer whose even rows are q: no element is shared."""
    q, k, v, _ = inputs.values()
    buffer = q.repeat(2, axis=1)
    forge.attention(buffer[:, ::2], k, v, out=buffer[:, 1::2], backend=backend, kernel=kernel)
    np.testing.assert_array_equal(buffer[:, ::2], q)
    np.testing.assert_array_equal(
        buffer[:, 1::2], forge.attention(q, k, v, backend=backend, kernel=kernel)
    )


@pytest.mark.skipif(METAL == "metal", reason="a GPU may take no buffer of 9 GB")
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dq", "dk", "dv"])
def test_rows_further_apart_than_32_bits_count(name, rng, backend, kernel):
    """Two rows 2**31 elements apart; of the memory between them no page is ever touched."""
    apart = 2**31
    shape = (1, 2, 1, 4)
    size = 4 * (apart + 4)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    whole = np.frombuffer(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags), "f4")
    far = np.lib.stride_tricks.as_strided(whole, shape, (16, 4 * apart, 16, 4))
    inputs = dict(zip(("q", "k", "v", "dout"), random_inputs(rng, Tq=2, H=1, hd=4), strict=True))
    want = run(**inputs, backend=backend, kernel=kernel)
    if name in inputs:
        far[:] = inputs[name]
        assert_same_bits(run(**inputs | {name: far}, backend=backend, kernel=kernel), want)
    else:
        forge.attention_backward(inputs["dout"], want.saved, **{name: far})
        np.testing.assert_array_equal(far, getattr(want, name))
