"""Arrays that are not what they seem: subclasses, memory of ctypes, strides beyond all measure."""

import ctypes

import forge
import numpy as np
import pytest
from forge._arrays import check_overlap
from oracle import random_inputs


class Overriding(np.ndarray):
    """A subclass whose attributes say nothing about its memory."""

    flags = shape = None
    strides = (0, 0, 0, 4)

    def view(self, *_):
        raise AssertionError("the array itself was not asked for")


def test_subclasses_are_taken_for_the_arrays_they_are(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng)
    options = {"backend": backend, "kernel": kernel}
    want = forge.attention(q, k, v, **options)
    out = np.empty_like(want)
    forge.attention(*(np.ndarray.view(x, Overriding) for x in (q, k, v)),
                    out=np.ndarray.view(out, Overriding), **options)  # fmt: skip
    np.testing.assert_array_equal(out, want)


def test_a_subclass_cannot_hide_that_it_overlaps_itself():
    q, k, v = (np.zeros((1, 3, 1, 4), np.float32) for _ in range(3))

    class Lying(np.ndarray):
        strides = (48, 16, 16, 4)

    folded = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), q.shape, (0, 4, 4, 4))
    with pytest.raises(ValueError, match=r"^out must not overlap itself"):
        forge.attention(q, k, v, out=folded.view(Lying))


def test_an_explicit_byte_order_that_is_the_machines_own(backend, kernel, rng):
    """NumPy keeps it in arrays that come from ctypes and other buffers."""
    q, k, v, _ = random_inputs(rng)
    memory = [np.ctypeslib.as_array((ctypes.c_float * x.size)()) for x in (q, k, v, q)]
    assert memory[0].dtype.byteorder in "<>"
    q_, k_, v_, out = (m.reshape(x.shape) for m, x in zip(memory, (q, k, v, q), strict=True))
    for to, x in ((q_, q), (k_, k), (v_, v)):
        to[:] = x
    options = {"backend": backend, "kernel": kernel}
    forge.attention(q_, k_, v_, out=out, **options)
    assert all(forge.last_run()["arrays"][name] in ("in place", "wrapped") for name in "qkv")
    np.testing.assert_array_equal(out, forge.attention(q, k, v, **options))


def test_the_search_for_an_overlap_ends():
    """Strides that take NumPy 10 seconds and more; no element is ever touched."""
    base = np.zeros(1, np.float32)
    strided = np.lib.stride_tricks.as_strided
    out = strided(base, (535, 1043, 152, 2), (16, 8624, 8994804, 4))
    away = strided(base, (1 << 20,), (4,))[89762:]
    k = strided(away, (709, 1233, 482, 1), (3020488, 2464, 9944, 4))
    with pytest.raises(ValueError, match=r"^out must not overlap k, got strides too intricate"):
        check_overlap({"out": out}, {"k": k})
