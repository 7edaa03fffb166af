"""One forward and backward through forge's public functions, collected in one object."""

import functools
from types import SimpleNamespace

import forge
import numpy as np
import softmetal
from oracle import GRADIENTS, MORE_GRADIENTS, SMALLEST, Problem

# How last_run() says that an array was used where it lies: on the CPU, on a GPU.
IN_PLACE = {"cpu": "in place", "metal": "wrapped"}
RESULTS = ("out", "lse", "row_max", "row_sum", *GRADIENTS, *MORE_GRADIENTS)


def run(q, k, v, dout=None, dlse=None, **options):
    """out, lse, row_max, row_sum, probs (materialized), family (the kernel family that ran) and,
    where dout is given, dq, dk, dv."""
    out, saved = forge.attention_forward(q, k, v, **options)
    result = SimpleNamespace(
        out=out,
        lse=saved.lse,
        row_max=saved.row_max,
        row_sum=saved.row_sum,
        saved=saved,
        family=forge.last_run()["kernel"],
        backend=forge.last_run()["backend"],
    )
    if options.get("kernel") == "materialized":
        result.probs = saved.probs
    if dout is not None:
        wanted = {name: True for name in MORE_GRADIENTS if options.get(name[1:]) is not None}
        gradients = forge.attention_backward(dout, saved, dlse=dlse, **wanted)
        for name, gradient in zip((*GRADIENTS, *wanted), gradients, strict=True):
            setattr(result, name, gradient)
    return result


def check(q, k, v, dout=None, dlse=None, *, bound=None, backend=None, kernel=None, **options):
    """Runs the problem and holds every result against the oracle; returns the results.

    bound: the family whose error rule to apply; by default that of the family that ran.
    """
    result = run(q, k, v, dout, dlse, backend=backend, kernel=kernel, **options)
    problem = Problem(q, k, v, dout, dlse, **options)
    names = ["out", "lse"] + (["probs"] if hasattr(result, "probs") else [])
    names += [name for name in (*GRADIENTS, *MORE_GRADIENTS) if hasattr(result, name)]
    problem.check(bound or result.family, **{name: getattr(result, name) for name in names})
    return result


def assert_same_bits(got, want, names=RESULTS):
    """Equal bit for bit in every result that both have; NaN equals NaN."""
    for name in names:
        if hasattr(want, name):
            same_bits(getattr(got, name), getattr(want, name), name)


@functools.cache
def device_flushes():
    """Whether a GPU of this build takes numbers too small to be normal for zeros."""
    metal = forge.build_config()["metal"]
    return metal == "metal" or (metal == "software" and softmetal.get("flush_subnormals") != 0)


@functools.cache
def orders_sums():
    """Whether a GPU of this build may take the sums of a matrix product in an order of its own."""
    metal = forge.build_config()["metal"]
    return metal == "metal" or (metal == "software" and softmetal.get("seed") != 0)


def unchanged(result, got, want):
    """What NaN elsewhere must not change. Bit for bit, unless it chooses another way to the sums:
    a tile that holds NaN is not multiplied by a GPU's matrix product."""
    if result.backend == "metal" and result.family == "fused" and orders_sums():
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(got, want)


def same_bits(got, want, name=""):
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.dtype == want.dtype, name
    assert got.shape == want.shape, name
    if device_flushes() and got.dtype == np.float32:
        tiny = (np.abs(got) < SMALLEST) & (np.abs(want) < SMALLEST)
        got = np.where(tiny, want, got)
    np.testing.assert_array_equal(got, want, err_msg=name)  # NaN as equal, whatever its payload
    live = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[live]), np.signbit(want[live]), err_msg=name)
