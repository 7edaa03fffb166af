"""The file to run if you run one: forge imports, computes right numbers and refuses wrong calls."""

import forge
import numpy as np
import pytest
from calls import check
from oracle import random_inputs


def test_the_mean_of_the_values_where_all_scores_are_equal():
    q = np.zeros((1, 3, 1, 2), np.float32)
    v = np.array([0, 1, 2], np.float32).repeat(2).reshape(1, 3, 1, 2)
    out = forge.attention(q, q, v, causal=True)
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0.5, 1.0], rtol=1e-6)


def test_forward_and_backward_against_float64(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng, B=2, Tq=17, H=4, Hkv=2, hd=8)
    check(q, k, v, dout, backend=backend, kernel=kernel, causal=True, window=5, softcap=10.0)


def test_packed_heads_give_the_same_bits_as_separate_heads(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng, B=2, Tq=5, H=4, Hkv=2, hd=8)
    whole = forge.attention(q, k, v, backend=backend, kernel=kernel)
    packed = forge.attention(
        q.reshape(2, 5, 32),
        k.reshape(2, 5, 16),
        v.reshape(2, 5, 16),
        num_heads=4,
        num_kv_heads=2,
        backend=backend,
        kernel=kernel,
    )
    assert packed.shape == (2, 5, 32)
    np.testing.assert_array_equal(packed.reshape(whole.shape), whole)


def test_the_cpu_is_always_there():
    assert forge.backends()["cpu"] == {"ok": True, "reason": ""}
    assert list(forge.backends()) == ["metal", "cpu"]


def test_a_wrong_call_names_its_argument():
    x = np.zeros((1, 2, 6, 4), np.float32)
    y = np.zeros((1, 2, 4, 4), np.float32)
    with pytest.raises(
        ValueError, match=r"^num_heads must be a multiple of num_kv_heads, got 6 and 4"
    ):
        forge.attention(x, y, y)
