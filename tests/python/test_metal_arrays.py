"""What the GPU does with NumPy's memory: pages wrapped where they lie, copies where that cannot be.

A page that the GPU writes must belong to the output's owner alone; inputs are always wrapped.
"""

import ctypes
import mmap
import threading

import forge
import numpy as np
import pytest
from calls import same_bits
from oracle import random_inputs

PAGE = mmap.PAGESIZE
FLOATS = PAGE // 4
HIDDEN = "copied: other memory lies on its pages"

pytestmark = pytest.mark.usefixtures("metal")


def attend(q, k, v, **options):
    return forge.attention(q, k, v, backend="metal", kernel="materialized", **options)


def fate(name):
    return forge.last_run()["arrays"][name]


def forward_and_backward(q, k, v, dout, **gradients):
    _, saved = forge.attention_forward(q, k, v, causal=True, backend="metal", kernel="materialized")
    return forge.attention_backward(dout, saved, **gradients)


def packed(rng, hd=8, H=2, T=33):
    """q, k and v as slices of one array, [1, T, 3, H, hd]."""
    together = rng.standard_normal((1, T, 3, H, hd)).astype(np.float32)
    return [together[:, :, part] for part in range(3)]


def test_inputs_sliced_from_one_array_are_wrapped_in_place(rng):
    q, k, v = packed(rng)
    got = attend(q, k, v)
    assert [fate(name) for name in "qkv"] == ["wrapped"] * 3
    same_bits(got, attend(*(np.ascontiguousarray(x) for x in (q, k, v))))


def test_arrays_on_the_same_pages_share_a_buffer(software, rng):
    q, k, v = packed(rng)
    attend(q, k, v)
    shared = software.get("no_copy_buffers")
    software.reset()
    far_apart = [forge.empty(x.shape) for x in (q, k, v)]
    attend(*far_apart)
    assert software.get("no_copy_buffers") == shared + 2


def test_results_of_forge_are_wrapped(rng):
    q, k, v, dout = random_inputs(rng, Tq=9, H=4, Hkv=2, hd=5)
    forward_and_backward(q, k, v, dout)
    arrays = forge.last_run()["arrays"]
    assert set(arrays) == {"q", "k", "v", "dout", "probs", "out", "dq", "dk", "dv"}
    assert set(arrays.values()) == {"wrapped"}
    attend(q, k, v)
    arrays = forge.last_run()["arrays"]
    assert set(arrays) == {"q", "k", "v", "out", "probs", "row_max", "row_sum"}
    assert set(arrays.values()) == {"wrapped"}


def test_gradients_sliced_from_one_array_on_pages_of_its_own_are_wrapped(rng):
    q, k, v = packed(rng)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    want = forward_and_backward(q, k, v, dout)
    together = forge.empty((1, 33, 3, 2, 8))
    whole_pages = forge.empty(-(-together.size // FLOATS) * FLOATS)
    for owner, expected in ((whole_pages, "wrapped"), (np.empty(together.size, "f4"), HIDDEN)):
        together = owner[: together.size].reshape(together.shape)
        together[:] = np.nan
        slices = [together[:, :, part] for part in range(3)]
        forward_and_backward(q, k, v, dout, dq=slices[0], dk=slices[1], dv=slices[2])
        assert [fate(name) for name in ("dq", "dk", "dv")] == [expected] * 3
        for got, right in zip(slices, want, strict=True):
            same_bits(got, right)


def test_a_copied_output_leaves_what_lies_between_its_elements_alone(rng):
    q, k, v, _ = random_inputs(rng, Tq=7, H=2, hd=3)
    around = np.full((1, 9, 2, 5), 77, np.float32)
    out = around[:, 1:8, :, 1:4]
    attend(q, k, v, out=out)
    assert fate("out") == HIDDEN
    same_bits(out, attend(q, k, v))
    out[:] = 77
    assert (around == 77).all()


def test_accumulating_into_copies_adds_to_what_is_there(rng):
    q, k, v, dout = random_inputs(rng, Tq=7, H=2, hd=3)
    want = forward_and_backward(q, k, v, dout)
    begun = [np.full(x.shape, 0.25, np.float32) for x in want]
    forward_and_backward(q, k, v, dout, **dict(zip(("dq", "dk", "dv"), begun, strict=True)),
                         accumulate=True)  # fmt: skip
    assert fate("dq") == HIDDEN
    wrapped = [forge.empty(x.shape) for x in want]
    for x in wrapped:
        x[:] = 0.25
    forward_and_backward(q, k, v, dout, **dict(zip(("dq", "dk", "dv"), wrapped, strict=True)),
                         accumulate=True)  # fmt: skip
    assert fate("dq") == "wrapped"
    for got, right, plain in zip(begun, wrapped, want, strict=True):
        same_bits(got, right)
        np.testing.assert_allclose(got - 0.25, plain, atol=1e-5)


def test_two_threads_with_outputs_in_one_page(rng):
    q, k, v, _ = random_inputs(rng, Tq=5, H=1, hd=4)
    want = attend(q, k, v)
    owner = forge.empty(FLOATS)
    outputs = [owner[start : start + 20].reshape(q.shape) for start in range(0, 160, 20)]
    failures = []

    def work(out):
        try:
            for _ in range(20):
                attend(q, k, v, out=out)
                assert fate("out") == "wrapped"
                same_bits(out, want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(out,)) for out in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_read_only_memory_maps_are_read_in_place(rng, tmp_path):
    q, k, v, _ = random_inputs(rng, Tq=40, H=2, hd=8)
    file = tmp_path / "qkv.bin"
    file.write_bytes(b"".join(x.tobytes() for x in (q, k, v)))
    mapped = np.memmap(file, np.float32, "r").reshape(3, *q.shape)
    got = attend(*mapped)
    assert [fate(name) for name in "qkv"] == ["wrapped"] * 3
    same_bits(got, attend(q, k, v))


def protect(address, size, protection):
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection) == 0


def between_guards(floats):
    """Pages that end with the last of `floats` floats, between two that may not be touched."""
    pages = -(-floats * 4 // PAGE)
    block = np.frombuffer(mmap.mmap(-1, (pages + 3) * PAGE), np.uint8)
    block = block[-block.ctypes.data % PAGE :]
    for edge in (0, (pages + 1) * PAGE):
        protect(block.ctypes.data + edge, PAGE, 0)
    inside = block[PAGE : (pages + 1) * PAGE].view(np.float32)
    return inside[inside.size - floats :]


@pytest.mark.parametrize("shape", [(1, FLOATS // 4, 1, 4), (1, 5, 1, 3)], ids=str)
def test_arrays_that_end_at_the_edge_of_a_page(shape, rng):
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
    want = forward_and_backward(q, k, v, dout)
    names = ["q", "k", "v", "dout", "dq", "dk", "dv"]
    guarded = {name: between_guards(q.size).reshape(shape) for name in names}
    for name, value in zip(names, (q, k, v, dout), strict=False):
        guarded[name][:] = value
    forward_and_backward(*(guarded[name] for name in names[:4]),
                         **{name: guarded[name] for name in names[4:]})  # fmt: skip
    assert {fate(name) for name in names} == {"wrapped"}
    for name, right in zip(names[4:], want, strict=True):
        same_bits(guarded[name], right)


def test_reversed_and_broadcast_inputs_are_read_in_place(rng):
    base = rng.standard_normal((1, 12, 2, 6)).astype(np.float32)
    for view in (base[:, ::-1], base[:, :, ::-1], np.broadcast_to(base[:, :1], base.shape)):
        got = attend(view, view, view, causal=True)
        assert [fate(name) for name in "qkv"] == ["wrapped"] * 3
        same_bits(got, attend(*[np.ascontiguousarray(view)] * 3, causal=True))


def test_an_array_that_numpy_copied_says_so(rng):
    q, k, v, _ = random_inputs(rng)
    attend(q.astype(">f4"), k, v)
    assert fate("q") == "copied: byte-swapped"
    assert fate("k") == "wrapped"


def test_memory_that_the_device_does_not_wrap_is_copied(software, rng):
    q, k, v, dout = random_inputs(rng, Tq=9, H=4, Hkv=2, hd=5)
    want = forward_and_backward(q, k, v, dout)
    software.set("nil_no_copy_buffer")
    got = forward_and_backward(q, k, v, dout)
    assert set(forge.last_run()["arrays"].values()) == {
        "copied: the Metal device does not wrap its pages"
    }
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)


def test_arrays_above_the_buffer_limit_are_a_memory_error(software, rng):
    q, k, v, _ = random_inputs(rng, Tq=2000, H=1, hd=4)
    software.set("max_buffer_length", 4 * PAGE)
    with pytest.raises(MemoryError, match=r"^\w+ takes a buffer of \d+ bytes"):
        attend(q, k, v)
    software.reset()
    attend(q, k, v)


def test_rows_further_apart_than_a_buffer_is_long_are_copied(software, rng):
    q, k, v, _ = random_inputs(rng, Tq=3, Tk=20, H=1, hd=4)
    far_apart = np.zeros((1, 20, FLOATS, 4), np.float32)[:, :, :1]
    far_apart[:] = k
    want = attend(q, k, v)
    software.set("max_buffer_length", 4 * PAGE)
    got = attend(q, far_apart, v)
    assert fate("k") == "copied: it lies within more bytes than a Metal buffer takes"
    same_bits(got, want)


def test_empty_arrays_take_no_buffer(rng):
    for shape in ({"B": 0}, {"Tq": 0}, {"Tk": 0}):
        q, k, v, dout = random_inputs(rng, **({"Tq": 3, "Tk": 4} | shape))
        gradients = forward_and_backward(q, k, v, dout)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in gradients)


def test_more_keys_than_positions_of_32_bits_are_refused(metal):
    q = np.ones((1, 1, 1, 4), np.float32)
    k = np.broadcast_to(q, (1, 0x3FFFFF01, 1, 4))
    with pytest.raises(ValueError, match=r"take up to 1073741568 keys.* got 1073741569"):
        forge.attention(q, k, k, backend=metal, kernel="fused")
