"""Every way in which the device can fail: an exception that says so, and the next call works."""

import forge
import numpy as np
import pytest
from calls import same_bits
from oracle import random_inputs

OPTIONS = {"causal": True, "softcap": 2.0, "backend": "metal", "kernel": "materialized"}


VALUES = {"command_buffer_error": 2}  # the code of a timeout; other faults are on or off


def set_fault(software, fault, nth=0):
    software.set(fault, VALUES.get(fault, 1))
    software.set("nth", nth)


def step(arrays):
    q, k, v, dout = arrays
    out, saved = forge.attention_forward(q, k, v, **OPTIONS)
    return out, *forge.attention_backward(dout, saved)


@pytest.fixture
def arrays(rng):
    return random_inputs(rng, B=2, Tq=9, Tk=12, H=4, Hkv=2, hd=5)


@pytest.fixture
def want(software, arrays):
    """The right results, from a context that has the pipelines of one step and no more."""
    software.lose_device()
    return step(arrays)


def assert_works(arrays, want):
    for got, right in zip(step(arrays), want, strict=True):
        same_bits(got, right)


# Fault, exception, what it says. Those that only strike while a context is made have `anew`.
CALL = [
    ("command_buffer_error", RuntimeError, r"Metal device failed: .*Timeout"),
    ("device_lost", RuntimeError, r"Metal device failed: .*the device is lost"),
    ("nil_buffer", MemoryError, r"no memory for a buffer of \d+ bytes for \w+"),
    ("nil_command_buffer", RuntimeError, "gives no command buffer"),
    ("nil_encoder", RuntimeError, "gives no command encoder"),
]
ANEW = [
    ("no_device", ValueError, "this machine has no Metal device"),
    ("nil_queue", ValueError, "gives no command queue"),
    ("bad_source", RuntimeError, "the shaders do not compile: .+"),
    ("bad_function", RuntimeError, r"attention_fwd_f32 does not compile: .+"),
    ("bad_pipeline", RuntimeError, r"attention_fwd_f32 does not compile: .+"),
]


@pytest.mark.parametrize(("fault", "error", "text"), CALL, ids=[row[0] for row in CALL])
@pytest.mark.parametrize("times", [1, 3])
def test_a_call_that_fails(software, arrays, want, fault, error, text, times):
    before = software.get("live")
    for _ in range(times):
        set_fault(software, fault)
        with pytest.raises(error, match=text):
            step(arrays)
        software.reset()
    assert_works(arrays, want)
    assert software.get("live") == before
    assert software.get("autoreleases_without_pool") == 0


@pytest.mark.parametrize(("fault", "error", "text"), ANEW, ids=[row[0] for row in ANEW])
def test_a_context_that_cannot_be_made(software, arrays, want, fault, error, text):
    before = software.get("live")
    software.lose_device()
    set_fault(software, fault)
    for _ in range(2):  # not only the first time
        with pytest.raises(error, match=text):
            step(arrays)
    software.reset()
    assert_works(arrays, want)
    assert software.get("live") == before
    assert software.get("autoreleases_without_pool") == 0


def test_a_lost_device_is_replaced_without_being_asked(software, arrays, want):
    set_fault(software, "device_lost", nth=1)
    with pytest.raises(RuntimeError, match="the next call starts anew"):
        step(arrays)
    assert_works(arrays, want)


@pytest.mark.parametrize("nth", [1, 2])
def test_the_backward_can_fail_after_the_forward(software, arrays, want, nth):
    set_fault(software, "command_buffer_error", nth + 1)
    q, k, v, dout = arrays
    if nth == 1:
        _, saved = forge.attention_forward(q, k, v, **OPTIONS)
        with pytest.raises(RuntimeError, match="Metal device failed"):
            forge.attention_backward(dout, saved)
    else:
        step(arrays)
        with pytest.raises(RuntimeError, match="Metal device failed"):
            step(arrays)
    software.reset()
    assert_works(arrays, want)


def test_a_failed_call_writes_nothing_to_outputs_it_has_copied(software, arrays):
    q, k, v, _ = arrays
    out = np.full((2, 9, 4, 6), 7, np.float32)[..., :5]
    set_fault(software, "command_buffer_error")
    with pytest.raises(RuntimeError, match="Metal device failed"):
        forge.attention(q, k, v, out=out, **OPTIONS)
    assert (out == 7).all()


def test_a_failed_call_is_not_recorded_as_the_last_run(software, arrays, want):
    before = forge.last_run()
    set_fault(software, "command_buffer_error")
    with pytest.raises(RuntimeError, match="Metal device failed"):
        step(arrays)
    assert forge.last_run() == before


def test_no_kernel_leaves_its_arrays(software, arrays, want):
    """The device checks every access against the bytes of each array."""
    assert software.get("dispatches") == 4
    assert software.get("misuses") == 0


@pytest.mark.parametrize("fault", ["bad_source", "bad_pipeline"])
def test_a_device_without_the_fused_kernels_leaves_them_to_the_cpu(
    software, arrays, fault, monkeypatch
):
    """No simdgroup matrices, say: found out by compiling a kernel, not by the device's name."""
    monkeypatch.delenv("FORGE_BACKEND", raising=False)
    q, k, v, _ = arrays
    software.lose_device()
    set_fault(software, fault)
    forge.attention(q, k, v)
    assert forge.last_run()["backend"] == "cpu"
    assert "not compile" in forge.last_run()["passed_over"]["metal"]
    with pytest.raises(ValueError, match="not compile"):
        forge.attention(q, k, v, backend="metal")
    software.reset()
    forge.attention(q, k, v)
    assert forge.last_run()["backend"] == "metal"
