"""The Metal backend in a process with others: long grids, threads, fork, its library, leaks."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forge
import numpy as np
import pytest
from calls import same_bits
from oracle import random_inputs
from scripts import run_script

pytestmark = pytest.mark.usefixtures("metal")

FMAS_PER_COMMAND_BUFFER = 4e9
ROOT = Path(__file__).resolve().parents[2]


def attend(q, k, v, **options):
    return forge.attention(q, k, v, backend="metal", kernel="materialized", **options)


def backward(q, k, v, dout, **options):
    _, saved = forge.attention_forward(q, k, v, backend="metal", kernel="materialized", **options)
    return forge.attention_backward(dout, saved)


def long_problem(rng, Tq, Tk, hd):
    """Much work by its sizes, little in truth: two keys are seen, and all keys are one row."""
    q = rng.standard_normal((1, Tq, 1, hd)).astype(np.float32)
    row = rng.standard_normal((1, 1, 1, hd)).astype(np.float32)
    return q, np.broadcast_to(row, (1, Tk, 1, hd)), {"key_end": 2}


def test_a_long_grid_is_split_below_the_watchdog_limit(software, rng):
    Tq, Tk, hd = 60, 1000, 1 << 16
    q, k, options = long_problem(rng, Tq, Tk, hd)
    got = attend(q, k, k, **options)
    fmas = 2.0 * Tq * Tk * hd
    rows = int(FMAS_PER_COMMAND_BUFFER // (2.0 * Tk * hd))  # at most, in one command buffer
    assert fmas / FMAS_PER_COMMAND_BUFFER <= software.get("command_buffers") <= Tq // rows + 2
    assert software.get("most_fmas") <= rows * (2 * 2 * hd + 64)  # of the two keys that are seen
    assert software.get("threads") == Tq
    want = forge.attention(q, k, k, backend="cpu", kernel="materialized", **options)
    same_bits(got, want)


@pytest.mark.parametrize("fault", ["command_buffer_error", "device_lost", "nil_command_buffer"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_split_call_that_fails_in_any_piece_leaves_nothing_running(software, rng, fault, nth):
    q, k, options = long_problem(rng, 60, 1000, 1 << 16)
    software.lose_device()
    want = attend(q, k, k, **options)
    before = software.get("live")
    software.set(fault, 2)
    software.set("nth", nth)
    with pytest.raises(RuntimeError, match="Metal device"):
        attend(q, k, k, **options)
    software.reset()
    same_bits(attend(q, k, k, **options), want)
    assert software.get("live") == before


def test_a_call_that_fails_between_its_pieces_waits_for_those_on_the_way(software, rng):
    """They read and write the caller's arrays, which may be gone after the error."""
    q, k, options = long_problem(rng, 60, 1000, 1 << 16)
    software.set("nil_command_buffer")
    software.set("nth", 2)
    with pytest.raises(RuntimeError, match="gives no command buffer"):
        attend(q, k, k, **options)
    done = software.get("fmas")  # counted when a dispatch has ended
    time.sleep(0.3)
    assert software.get("fmas") == done > 0


def test_an_interrupted_call_waits_for_what_is_in_flight_and_sends_no_more(software, rng):
    class AlarmError(Exception):
        pass

    def ring(*_):
        raise AlarmError

    q, k, options = long_problem(rng, 3000, 1000, 1 << 16)
    want = attend(q[:, :5], k, k, **options)
    live = software.get("live")
    software.reset()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(AlarmError):
            attend(q, k, k, **options)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    done = software.get("fmas")
    assert 2 <= software.get("command_buffers") < 50  # of a hundred
    time.sleep(0.3)
    assert software.get("fmas") == done
    assert software.get("live") == live
    same_bits(attend(q[:, :5], k, k, **options), want)


def test_a_short_call_is_one_command_buffer(software, rng):
    q, k, v, dout = random_inputs(rng)
    _, saved = forge.attention_forward(q, k, v, backend="metal", kernel="materialized")
    assert (software.get("command_buffers"), software.get("dispatches")) == (1, 1)
    software.reset()
    forge.attention_backward(dout, saved)
    assert (software.get("command_buffers"), software.get("dispatches")) == (1, 3)


@pytest.mark.parametrize("limit", [1, 32, 96, 1000])
def test_threadgroups_stay_within_the_limit_of_the_pipeline(software, limit, rng):
    arrays = random_inputs(rng, B=2, Tq=150, H=4, Hkv=2, hd=3)
    want = backward(*arrays)
    software.lose_device()  # pipelines keep the limit that they were made with
    software.set("max_threads", limit)
    got = backward(*arrays)
    software.lose_device()
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)


def test_a_kernel_that_needs_larger_threadgroups_than_there_are_says_so(software, rng):
    q, k, v, _ = random_inputs(rng, Tq=20, hd=32)
    software.lose_device()
    software.set("max_threads", 96)
    with pytest.raises(RuntimeError, match=r"hd32 needs threadgroups of 128 threads, .* runs 96"):
        forge.attention(q, k, v, backend="metal", kernel="fused")
    assert software.get("misuses") == 0  # an encoder that is left open ends the process on a Mac
    software.lose_device()


def test_nothing_is_left_behind(software, rng):
    arrays = random_inputs(rng, Tq=9)
    backward(*arrays)  # the context and its pipelines stay
    before = software.get("live")
    for _ in range(10):
        backward(*arrays)
    assert software.get("live") == before
    assert software.get("autoreleases_without_pool") == 0


def test_calls_from_a_thread_without_a_pool_leave_nothing_behind(software, rng):
    arrays = random_inputs(rng, Tq=9)
    backward(*arrays)
    before = software.get("live")
    threads = [threading.Thread(target=backward, args=arrays) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert software.get("live") == before
    assert software.get("autoreleases_without_pool") == 0


def test_every_option_pair_has_a_pipeline_of_its_own(rng):
    """A cache that forgot a constant would serve the first pipeline to all."""
    q, k, v, dout = random_inputs(rng, Tq=6, hd=3)
    dlse = rng.standard_normal((1, 2, 6)).astype(np.float32)
    for _ in range(2):
        for softcap in (None, 1.0):
            for d in (None, dlse):
                results = []
                for backend in ("metal", "cpu"):
                    _, saved = forge.attention_forward(
                        q, k, v, softcap=softcap, backend=backend, kernel="materialized"
                    )
                    results.append(forge.attention_backward(dout, saved, dlse=d))
                for a, b in zip(*results, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_interpreter_is_free_while_the_gpu_works(rng):
    q, k, v, _ = random_inputs(rng, Tq=700, H=2, hd=16)
    turns = 0
    thread = threading.Thread(target=attend, args=(q, k, v))
    thread.start()
    while thread.is_alive():
        turns += 1
    assert turns > 1000


FORKED = """
import signal
import forge
x = np.ones((1, 2, 1, 4), np.float32)
def call(backend):
    return forge.attention(x, x, x, backend=backend, kernel="materialized")
if BEFORE:
    call("metal")
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    state = forge.backends()["metal"]
    assert not state["ok"] and "forked" in state["reason"], state
    try:
        call("metal")
    except ValueError as error:
        assert "spawn" in str(error), error
    else:
        os._exit(4)
    assert (call(None) == 1).all()
    last = forge.last_run()
    os._exit(0 if last["backend"] == "cpu" and "forked" in last["passed_over"]["metal"] else 5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (call("metal") == 1).all()
"""


@pytest.mark.parametrize("used_before", [False, True])
def test_a_forked_child_gets_an_error_and_the_cpu(used_before):
    """Used or not: Apple's frameworks came with the import, and do not survive a fork."""
    run_script(FORKED.replace("BEFORE", str(used_before)))


ONE_CALL = """
import forge
x = np.ones((1, 2, 1, 4), np.float32)
forge.attention(x, x, x, backend="metal", kernel="materialized")
print(forge.last_run()["library"])
"""


def package_with(metallib, folder):
    """A copy of the installed package with that metallib beside the module; its PYTHONPATH."""
    package = Path(forge.__file__).parent
    shutil.copytree(package, folder / "forge", ignore=shutil.ignore_patterns("forge.metallib"))
    if metallib is not None:
        (folder / "forge" / "forge.metallib").write_bytes(metallib)
    return str(folder)


def software_metallib(folder):
    """The file that the software device takes for a compiled library of these shaders."""
    text, target = folder / "forge.metal", folder / "written.metallib"
    scripts = [
        ["cmake/flatten_shaders.py", "--root", ".", "--std", "3.1", "--metal", text,
         "--cpp", folder / "source.cpp"],
        ["tests/softmetal/metallib.py", text, target],
    ]  # fmt: skip
    for script in scripts:
        subprocess.run([sys.executable, *script], cwd=ROOT, check=True)
    return target.read_bytes()


def test_a_metallib_beside_the_module_is_loaded(software, tmp_path):
    path = package_with(software_metallib(tmp_path), tmp_path)
    assert run_script(ONE_CALL, PYTHONPATH=path).stdout == "metallib\n"


def test_a_metallib_that_does_not_load_gives_way_to_the_source(software, tmp_path):
    path = package_with(b"not a metallib", tmp_path)
    said = run_script(ONE_CALL, PYTHONPATH=path).stdout
    assert said.startswith("source: the metallib does not load: ")


def test_without_a_metallib_the_source_is_compiled(software, tmp_path):
    path = package_with(None, tmp_path)
    assert run_script(ONE_CALL, PYTHONPATH=path).stdout == "source: no metallib was built\n"


def test_only_the_pass_of_a_call_is_compiled(software, rng):
    def compiled():
        return tuple(software.get(name) for name in ("source_libraries", "source_templates"))

    def forward(hd, **options):
        q, k, v, dout = random_inputs(rng, Tq=20, hd=hd)
        return dout, forge.attention_forward(q, k, v, backend="metal", **options)[1]

    software.lose_device()
    assert forge.backends()["metal"]["ok"]
    assert compiled() == (0, 0)
    assert software.get("pipelines") == 0
    step = forward(64)
    assert compiled() == (1, 1)
    forge.attention_backward(*step)
    assert compiled() == (2, 3)  # dq, dk and dv in one text
    forward(60, causal=True)
    forward(64, kernel="materialized")
    assert compiled() == (2, 3)
    forward(128)
    assert compiled() == (3, 4)


def test_a_process_without_a_device_says_so_and_computes_on_the_cpu(software):
    run_script("""
    import softmetal
    softmetal.set("no_device")
    import forge
    assert forge.backends()["metal"] == {"ok": False, "reason": "this machine has no Metal device"}
    x = np.ones((1, 2, 1, 4), np.float32)
    forge.attention(x, x, x, kernel="materialized")
    assert forge.last_run()["backend"] == "cpu"
    try:
        forge.attention(x, x, x, kernel="materialized", backend="metal")
    except ValueError as error:
        assert "no Metal device" in str(error)
    else:
        sys.exit(3)
    """, PYTHONPATH=str(Path(__file__).parent))  # fmt: skip


def unseen(rng, T, Hkv, hd):
    """Much work by its sizes, and none in truth: no query sees a key."""
    row = rng.standard_normal((1, 1, 1, hd)).astype(np.float32)
    q, k = (np.broadcast_to(row, (1, T, heads, hd)) for heads in (4 * Hkv, Hkv))
    return q, k, {"key_end": 0, "backend": "metal", "kernel": "fused"}


SLOTS = 80  # threadgroups that run at once on 40 cores


@pytest.mark.parametrize(("T", "Hkv"), [(8192, 4), (32768, 1)])
def test_a_command_buffer_of_a_fused_pass_fills_a_gpu_of_40_cores(software, rng, T, Hkv):
    q, k, options = unseen(rng, T, Hkv, 128)
    _, saved = forge.attention_forward(q, k, k, **options)
    tiles = Hkv * 4 * T // 32
    fwd = 32.0 * T * 2 * 128 * tiles
    assert fwd / 3.1e11 <= software.get("command_buffers") <= fwd / 1e11 + 1
    assert software.get("fewest_threadgroups") >= SLOTS
    assert software.get("threadgroups") == tiles
    software.reset()
    forge.attention_backward(q, saved)
    backward = fwd * 7 / 2
    assert backward / 3.1e11 <= software.get("command_buffers") <= backward / 1e11 + 4
    assert software.get("fewest_threadgroups") >= SLOTS


def test_a_fused_pass_is_cut_into_equal_pieces(software, rng):
    q, k, options = unseen(rng, 8192, 4, 128)
    forge.attention_forward(q, k, k, **options)
    assert software.get("command_buffers") == 2
    assert software.get("fewest_threadgroups") == software.get("most_threadgroups") == 2048
