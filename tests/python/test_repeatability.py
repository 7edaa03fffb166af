"""The same input gives the same bits: at any number of threads, and every time."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, run

# (B, Tq, Tk, H, Hkv, hd): many row blocks of one head, many heads, short queries over split keys.
SHAPES = [(1, 700, 700, 2, 1, 64), (2, 130, 190, 6, 3, 33), (1, 3, 2500, 4, 2, 48)]
OPTIONS = {"causal": True, "window": 300, "softcap": 20.0}


def inputs(rng, shape):
    B, Tq, Tk, H, Hkv, hd = shape
    q, dout = rng.standard_normal((2, B, Tq, H, hd)).astype(np.float32)
    k, v = rng.standard_normal((2, B, Tk, Hkv, hd)).astype(np.float32)
    return q, k, v, dout, rng.standard_normal((B, H, Tq)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(shape, backend, kernel, rng, restore_threads):
    arrays = inputs(rng, shape)
    results = []
    for threads in (1, 2, 3, 8, 16):
        forge.set_num_threads(threads)
        results.append(run(*arrays, backend=backend, kernel=kernel, **OPTIONS))
    for got in results[1:]:
        assert_same_bits(got, results[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_runs_give_the_same_bits(shape, fused_backend, rng, restore_threads):
    """Three threads on fewer CPUs take turns in ever new orders."""
    arrays = inputs(rng, shape)
    forge.set_num_threads(3)
    first = run(*arrays, backend=fused_backend, kernel="fused", **OPTIONS)
    for _ in range(49):
        assert_same_bits(run(*arrays, backend=fused_backend, kernel="fused", **OPTIONS), first)
