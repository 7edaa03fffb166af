"""What the fused Metal kernels cost, as the software device counts it: products, bytes, barriers.

The least that a causal mask or a window needs is 2 hd FMAs a visible pair in the forward, 3 hd in
dq, 4 hd in dk and dv. The least of device bytes is that of tiles of 32 rows, or of 16 keys beyond
hd 128 in dk and dv: every visible row on the other side read once a tile, outputs written once.
"""

import forge
import numpy as np
import pytest
from oracle import random_inputs

T = 1024
TILE = 32
WINDOWS = [None, 256]


def first_key(i, window):
    return 0 if window is None else max(0, i - window + 1)


def visible_pairs(window):
    return sum(i - first_key(i, window) + 1 for i in range(T))


def rows_met(window, tile=TILE):
    """Rows on the other side that the tiles of queries, or of keys, see; the mask is even."""
    return sum(min(i + tile, T) - first_key(i, window) for i in range(0, T, tile))


@pytest.fixture(params=[32, 64, 80, 96, 128, 192, 256])
def inputs(request, rng):
    return random_inputs(rng, Tq=T, H=1, hd=request.param)


def forward(inputs, window):
    return forge.attention_forward(*inputs[:3], causal=True, window=window,
                                   backend="metal", kernel="fused")[1]  # fmt: skip


def counted(software):
    names = ("fmas", "device_bytes_loaded", "device_bytes_stored", "threadgroup_barriers")
    fmas, loaded, stored, barriers = (software.get(name) for name in names)
    return fmas, loaded + stored, barriers


@pytest.mark.parametrize("window", WINDOWS)
def test_the_forward(software, inputs, window):
    hd = inputs[0].shape[3]
    forward(inputs, window)
    fmas, moved, barriers = counted(software)
    assert fmas <= 1.15 * visible_pairs(window) * 2 * hd
    own = 4 * (2 * T * hd + 2 * T)  # q, o, row_max, row_sum
    assert moved <= 1.25 * (own + 4 * 2 * hd * rows_met(window))
    keys = {32: 32, 64: 32, 80: 32, 96: 32, 128: 16, 192: 16, 256: 8}[hd]  # a tile, fused_tiling.h
    tiles = sum(
        -(-(min(i + TILE, T) - first_key(i, window) // keys * keys) // keys)
        for i in range(0, T, TILE)
    )
    assert barriers <= 2 * tiles


@pytest.mark.parametrize("window", WINDOWS)
def test_the_backward(software, inputs, window):
    """d_row, dq, and dk with dv: two of the three loop over what they see."""
    hd = inputs[0].shape[3]
    saved = forward(inputs, window)
    software.reset()
    forge.attention_backward(inputs[3], saved)
    fmas, moved, _ = counted(software)
    assert fmas <= 1.15 * (visible_pairs(window) * 7 * hd + T * hd)
    d_row = 4 * (2 * T * hd + T)
    dq = 4 * (3 * T * hd + 3 * T + 2 * hd * rows_met(window))
    keys = 32 if hd <= 128 else 16
    dkv = 4 * (4 * T * hd + (2 * hd + 3) * rows_met(window, keys))
    assert moved <= 1.25 * (d_row + dq + dkv)


def test_the_bits_repeat(metal, rng):
    inputs = random_inputs(rng, B=2, Tq=150, H=4, Hkv=2, hd=40)
    first = None
    for _ in range(50):
        saved = forward(inputs, 33)
        results = [saved.out, saved.lse, *forge.attention_backward(inputs[3], saved)]
        first = first or results
        for got, want in zip(results, first, strict=True):
            np.testing.assert_array_equal(got, want)
