"""Half precision on Metal: what runs, what it moves, what is compiled for it."""

import forge
import numpy as np
import pytest
from oracle import GRADIENTS

ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 from ml_dtypes only")

T, HD = 1024, 64
TILE = 32
every_half = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])

pytestmark = pytest.mark.usefixtures("metal")


def arrays(rng, dtype, Tq=T, Tk=T, H=1, Hkv=1, hd=HD):
    shapes = [(1, Tq, H, hd), (1, Tk, Hkv, hd), (1, Tk, Hkv, hd), (1, Tq, H, hd)]
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def causal_forward(q, k, v):
    return forge.attention_forward(q, k, v, causal=True, backend="metal")


@every_half
def test_metal_comes_first_for_halves_too(rng, dtype):
    q, k, v, dout = arrays(rng, dtype, Tq=6, Tk=9, H=2, Hkv=1, hd=12)
    out, saved = forge.attention_forward(q, k, v)
    last = forge.last_run()
    assert (last["backend"], last["kernel"], out.dtype) == ("metal", "fused", dtype)
    assert set(last["arrays"].values()) == {"wrapped"}
    gradients = forge.attention_backward(dout, saved)
    assert forge.last_run()["backend"] == "metal"
    assert {x.dtype for x in gradients} == {np.dtype(dtype)}


@every_half
def test_the_bits_repeat(rng, dtype):
    q, k, v, dout = arrays(rng, dtype, Tq=150, Tk=700, H=4, Hkv=2, hd=40)
    first = None
    for _ in range(10):
        out, saved = causal_forward(q, k, v)
        results = [out, saved.out, *forge.attention_backward(dout, saved)]
        first = first or results
        for got, want in zip(results, first, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@every_half
def test_each_array_is_read_and_written_in_its_own_type(software, rng, dtype):
    """The bytes of float32's tests, at two an element where an array holds halves."""
    q, k, v, dout = arrays(rng, dtype)
    met = sum(i + TILE for i in range(0, T, TILE))  # keys that the tiles of queries see
    runs = sum(-(-(i + TILE) // 512) for i in range(0, T, TILE))  # of 512 keys, a tile
    sums = (2 * runs - T // TILE) * TILE * 4 * HD  # o in float32: read again after the first run

    def moved():
        return software.get("device_bytes_loaded") + software.get("device_bytes_stored")

    _, saved = causal_forward(q, k, v)
    least = 2 * (2 * T * HD + 2 * HD * met) + sums + 8 * T
    assert least <= moved() <= 1.1 * least
    software.reset()
    forge.attention_backward(dout, saved)
    d_row = 6 * T * HD + 4 * T
    dq = 2 * (3 * T * HD + 2 * HD * met) + 12 * T
    dkv = 2 * (4 * T * HD + 2 * HD * met) + 12 * met
    assert d_row + dq + dkv <= moved() <= 1.1 * (d_row + dq + dkv)


@every_half
def test_decode_reads_half_the_bytes(software, rng, dtype):
    q, k, v, _ = arrays(rng, dtype, Tq=1, Tk=8192, H=8)

    def loaded(q, k, v):
        software.reset()
        forge.attention(q, k, v, backend="metal")
        return software.get("device_bytes_loaded")

    wide = loaded(*(x.astype(np.float32) for x in (q, k, v)))
    keys = 2 * 8192 * HD
    assert loaded(q, k, v) <= wide - 1.9 * keys
    assert loaded(q.astype(np.float32), k, v) <= wide - 1.9 * keys


@every_half
def test_gradients_may_have_different_types(rng, dtype):
    q, k, v, dout = arrays(rng, dtype, Tq=40, Tk=50, H=2, Hkv=2, hd=20)
    _, saved = causal_forward(q, k, v)
    want = forge.attention_backward(dout, saved)
    for wide in GRADIENTS:
        given = {
            name: np.empty(x.shape, np.float32 if name == wide else dtype)
            for name, x in zip(GRADIENTS, (q, k, v), strict=True)
        }
        results = forge.attention_backward(dout, saved, **given)
        for got, x in zip(results, want, strict=True):
            np.testing.assert_array_equal(got.astype(dtype).view(np.uint8), x.view(np.uint8))


@every_half
def test_halves_that_are_not_aligned_to_four(rng, dtype):
    q, k, v, dout = arrays(rng, dtype, Tq=37, Tk=45, H=2, Hkv=2, hd=16)
    want = causal_forward(q, k, v)[0]
    packed = np.zeros((1, 45, 2, 2, 17), dtype)
    packed[:, :, 0, :, 1:], packed[:, :, 1, :, 1:] = k, v
    k, v = packed[:, :, 0, :, 1:], packed[:, :, 1, :, 1:]
    got, saved = causal_forward(q, k, v)
    assert forge.last_run()["arrays"]["k"] == "wrapped"
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    assert all(
        np.isfinite(x.astype(np.float32)).all() for x in forge.attention_backward(dout, saved)
    )


def test_all_types_share_the_text_that_is_compiled(software, rng):
    software.lose_device()
    forge.attention(*arrays(rng, np.float32, Tq=9)[:3], backend="metal")
    texts = software.get("source_libraries")
    made = software.get("pipelines")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        forge.attention(*arrays(rng, dtype, Tq=9)[:3], backend="metal")
    assert software.get("source_libraries") == texts
    assert software.get("pipelines") == made + 2
