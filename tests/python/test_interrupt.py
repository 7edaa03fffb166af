"""Ctrl-C, and whatever other signal has a handler that raises, in the middle of a long call."""

import os
import signal
import sys
import threading
import time

import forge
import numpy as np
import pytest
from calls import assert_same_bits, run
from oracle import random_inputs
from scripts import run_script


class AlarmError(Exception):
    pass


@pytest.fixture
def alarm():
    """Makes SIGALRM raise; alarm(seconds) sends one then."""

    def ring(*_):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def small():
    arrays = random_inputs(np.random.default_rng(3), B=2, Tq=70, H=4, Hkv=2, hd=8)
    return arrays, [run(*arrays, kernel=name) for name in ("fused", "materialized")]


def ones(T, H, hd):
    return np.ones((1, T, H, hd), np.float32)


def long_forward(kernel):
    """A call of seconds on any machine."""
    x = ones(40000, 2, 128) if kernel == "fused" else ones(6000, 2, 64)
    forge.attention(x, x, x, kernel=kernel, backend="cpu")


def gives_way(alarm, call):
    """Whether the alarm's exception ends the call; how long after the alarm, in seconds."""
    seconds = 0.2
    start = time.perf_counter()
    alarm(seconds)
    with pytest.raises(AlarmError):
        call()
    return time.perf_counter() - start - seconds


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_forward_gives_way(alarm, cpu, kernel, threads, small, restore_threads):
    forge.set_num_threads(threads)
    # 0.2 s by themselves; the rest is for machines that are busy.
    assert gives_way(alarm, lambda: long_forward(kernel)) < 1.5
    arrays, want = small
    for name, results in zip(("fused", "materialized"), want, strict=True):
        assert_same_bits(run(*arrays, kernel=name), results)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("Tq", [20000, 60])  # many blocks that wait for one another; one, split
def test_a_long_backward_gives_way(alarm, cpu, threads, Tq, small, restore_threads):
    forge.set_num_threads(threads)
    B, Tk = (100, 20000) if Tq == 60 else (1, Tq)
    q, k = (np.broadcast_to(np.float32(1), (B, T, 1, 64)) for T in (Tq, Tk))
    # Scores are all 8, which needs no forward to know.
    rows = (B, 1, Tq)
    call = forge._calls.prepare(
        {"q": q, "k": k, "v": k}, forge._options.MaskAndScale(), (None, None), "fused", "cpu"
    )
    saved = forge.Saved(
        call, np.ones(q.shape, np.float32), np.full(rows, 8, np.float32),
        np.full(rows, Tk, np.float32), None, "cpu",
    )  # fmt: skip
    assert gives_way(alarm, lambda: forge.attention_backward(q, saved)) < 1.5
    arrays, (want, _) = small
    assert_same_bits(run(*arrays), want)


def test_a_long_materialized_backward_gives_way(alarm, cpu):
    x, rows = ones(6000, 1, 64), (1, 1, 6000)
    p, d_row = np.ones((*rows, 6000), np.float32), np.ones(rows, np.float32)
    dk, dv = np.zeros_like(x), np.zeros_like(x)

    def call():
        for _ in range(20):
            forge.kernels.attention_bwd_dkv_f32(x, x, x, p, x, d_row, dk, dv, backend="cpu")

    assert gives_way(alarm, call) < 1.5


def test_a_handler_that_returns_changes_nothing(cpu, rng):
    arrays = random_inputs(rng, Tq=3000, H=4, hd=32)
    want = run(*arrays)
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        got = run(*arrays)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung
    assert_same_bits(got, want)


def test_a_call_from_another_thread_is_left_alone(alarm, cpu, rng):
    q, k, v, _ = random_inputs(rng, Tq=6000, H=8, hd=64)
    want = forge.attention(q, k, v)
    got = []
    thread = threading.Thread(target=lambda: got.append(forge.attention(q, k, v)))
    thread.start()
    alarm(0.02)
    with pytest.raises(AlarmError):
        time.sleep(30)
    assert thread.is_alive()
    thread.join()
    np.testing.assert_array_equal(got[0], want)


@pytest.mark.skipif(not hasattr(os, "kill"), reason="this platform sends no signals")
def test_ctrl_c_is_a_keyboard_interrupt(cpu):
    done = run_script("""
    import forge, signal, time
    x = np.ones((1, 40000, 2, 128), np.float32)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        forge.attention(x, x, x, backend="cpu")
    except KeyboardInterrupt:
        print("interrupted")
    print(float(forge.attention(x[:, :2], x[:, :2], x[:, :2])[0, 1, 1, 7]))
    """)
    assert done.stdout.split() == ["interrupted", "1.0"]


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="CPython's sub-interpreters")
def test_a_sub_interpreter_is_told_at_once():
    done = run_script(
        """
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    run = getattr(interpreters, "exec", interpreters.run_string)
    try:
        print(run(interpreters.create(), "import forge"))
    except Exception as error:
        print(error)
    """,
        timeout=30,
    )
    assert "ImportError: forge must be imported in the main interpreter" in done.stdout.replace(
        "<class 'ImportError'>", "ImportError"
    )
