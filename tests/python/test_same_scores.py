"""The backward computes the very scores that the forward did, bit for bit.

Where each query sees one key, m is its score, l is 1, and p = exp(s - m) is exactly 1 if the
backward's s is the forward's, less if it is smaller; s and m change sign with scale, so the other
sign tells of a larger one. With p = 1, dv is dout itself.
"""

import forge
import numpy as np
import pytest

# Tq, Tk: tiles, off the tile, few queries (split over keys), more queries than keys.
LENGTHS = [(200, 200), (67, 131), (3, 2500), (1, 700), (130, 70)]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("hd", [5, 64, 96, 130])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_score_is_the_same_float(lengths, hd, softcap, fused_backend, rng):
    Tq, Tk = lengths
    q, dout = rng.standard_normal((2, 1, Tq, 2, hd)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, Tk, 2, hd)).astype(np.float32)
    for offset in (Tk - Tq, 0, (Tk - Tq) // 2):
        seen = np.arange(max(0, -offset), min(Tq, Tk - offset))
        for scale in (1.7, -1.7):
            _, saved = forge.attention_forward(
                q,
                k,
                v,
                window=(0, 0),
                query_offset=offset,
                scale=scale,
                softcap=softcap,
                kernel="fused",
                backend=fused_backend,
            )
            _, _, dv = forge.attention_backward(dout, saved)
            np.testing.assert_array_equal(saved.row_sum[:, :, seen], 1)
            np.testing.assert_array_equal(dv[:, seen + offset], dout[:, seen])
