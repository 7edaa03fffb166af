"""forge in a process with others: threads, the GIL, fork, first calls, the state of the FPU."""

import gc
import os
import signal
import sys
import threading

import forge
import numpy as np
import pytest
from calls import IN_PLACE, assert_same_bits, run
from oracle import GRADIENTS, random_inputs
from scripts import run_script

JOBS = [
    ({"B": 2, "Tq": 17, "H": 4, "Hkv": 2, "hd": 8}, {"causal": True}),
    ({"Tq": 5, "Tk": 40, "H": 2, "hd": 3}, {"window": (3, 2), "softcap": 2.0}),
    ({"Tq": 33, "H": 1, "hd": 16}, {"scale": -0.5, "key_end": 20}),
    ({"B": 3, "Tq": 1, "Tk": 9}, {"query_offset": np.array([0, 5, -3]), "causal": True}),
    ({"Tq": 12, "hd": 8, "dtype": np.float64}, {"kernel": "materialized", "causal": True}),
]


def prepare(rng, backend):
    """(inputs, options, expected results) of each job; big-endian inputs force the copying path."""
    jobs = []
    for shape, options in JOBS:
        if shape.get("dtype") == np.float64 and backend != "cpu":
            continue
        arrays = random_inputs(rng, **shape)
        options = options | {"backend": backend}
        want = run(*arrays, **options)
        jobs.append((arrays, options, want))
        jobs.append(([x.astype(x.dtype.newbyteorder(">")) for x in arrays], options, want))
    return jobs


def test_calls_from_many_threads_give_the_same_bits(fused_backend, rng):
    jobs = prepare(rng, fused_backend)
    failures = []
    start = threading.Barrier(8)

    def work(seed):
        order = np.random.default_rng(seed)
        start.wait()
        try:
            for turn in range(30):
                arrays, options, want = jobs[order.integers(len(jobs))]
                assert_same_bits(run(*arrays, **options), want)
                with pytest.raises(ValueError, match=r"^window"):
                    forge.attention(*arrays[:3], window=0, kernel="materialized")
                with pytest.raises(TypeError, match=r"^k "):
                    forge.attention(arrays[0], None, arrays[2], kernel="materialized")
                if turn % 10 == seed:
                    gc.collect()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_each_thread_has_its_own_last_run(rng):
    q, k, v, _ = random_inputs(rng)
    forge.attention(q, k, v, kernel="materialized")
    seen = []

    def work():
        seen.append(forge.last_run())
        forge.attention(q.astype(">f4"), k, v, kernel="fused")
        seen.append(forge.last_run())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] is None
    assert seen[1]["requested_kernel"] == "fused"
    assert forge.last_run()["requested_kernel"] == "materialized"
    assert forge.last_run()["arrays"]["q"] in IN_PLACE.values()


def test_other_threads_run_while_a_call_computes(cpu, kernel, rng):
    """Someone else sees the output half written: the interpreter is free while the call runs."""
    for T in (1000, 2000, 3000, 4000, 5000, 6000):  # long enough for others to get a turn
        q, k, v, _ = random_inputs(rng, Tq=T, H=1, hd=64)
        out = np.full(q.shape, 7, np.float32)
        finished = threading.Event()

        def work(q=q, k=k, v=v, out=out, finished=finished):
            forge.attention(q, k, v, out=out, backend=cpu, kernel=kernel)
            finished.set()

        before = out[0, :: T // 50, 0, 0].tobytes()
        snapshots = set()
        thread = threading.Thread(target=work)
        thread.start()
        while not finished.is_set():
            snapshots.add(out[0, :: T // 50, 0, 0].tobytes())
        thread.join()
        if snapshots - {before, out[0, :: T // 50, 0, 0].tobytes()}:
            return
    pytest.fail("no other thread ever ran between the start and the end of a call")


def test_threads_may_change_the_number_of_threads_while_others_compute(cpu, rng, restore_threads):
    arrays = random_inputs(rng, B=2, Tq=65, H=4, Hkv=2, hd=8)
    want = run(*arrays, backend=cpu)
    stop = threading.Event()

    def change():
        n = 0
        while not stop.is_set():
            forge.set_num_threads(1 + n % 5)
            n += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(50):
            assert_same_bits(run(*arrays, backend=cpu), want)
    finally:
        stop.set()
        thread.join()


SMALL_CALL = """
def call():
    x = np.arange(2 * 70 * 2 * 8, dtype=np.float32).reshape(2, 70, 2, 8) / 1000
    out, saved = forge.attention_forward(x, x, x, causal=True)
    return [out, *forge.attention_backward(x, saved)]

def same(one, other):
    return all((x == y).all() for x, y in zip(one, other))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("children", [1, 4])
def test_a_forked_child_can_call(children, cpu):
    """The thread pool of the parent has no threads in the child."""
    run_script(
        SMALL_CALL
        + f"""
import signal, warnings
import forge
warnings.simplefilter("ignore")  # newer Pythons warn of fork in a process with threads
forge.set_num_threads(4)
want = call()
pids = []
for _ in range({children}):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if same(call(), want) and same(call(), want) else 3)
    pids.append(pid)
for pid in pids:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert same(call(), want)
""",
        FORGE_BACKEND=cpu,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_fork_while_another_thread_computes(cpu):
    run_script(
        SMALL_CALL
        + """
import signal, warnings
import forge
warnings.simplefilter("ignore")
forge.set_num_threads(4)
want = call()
stop = threading.Event()
def work():
    while not stop.is_set():
        call()
thread = threading.Thread(target=work)
thread.start()
codes = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if same(call(), want) else 3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
thread.join()
assert codes == [0] * 10, codes
""",
        FORGE_BACKEND=cpu,
    )


def test_first_calls_from_eight_threads_at_once(fused_backend):
    run_script(
        SMALL_CALL
        + """
import forge
start, results = threading.Barrier(8), []
def work():
    start.wait()
    results.append(call())
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert len(results) == 8
assert all(same(result, results[0]) for result in results)
assert same(call(), results[0])
""",
        FORGE_BACKEND=fused_backend,
    )


@pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="this platform has no sigtimedwait")
def test_signals_that_a_program_waits_for_are_not_taken_by_the_pool(cpu):
    """A worker that does not block SIGUSR1 takes it, and its default action ends the process."""
    run_script(
        SMALL_CALL
        + """
import forge, signal
forge.set_num_threads(4)
call()  # starts the workers
signals = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
for number in signals:
    os.kill(os.getpid(), number)
    taken = signal.sigtimedwait(signals, 20)
    assert taken is not None and taken.si_signo == number, (number, taken)
""",
        FORGE_BACKEND=cpu,
        OPENBLAS_NUM_THREADS="1",  # NumPy's own threads take signals
    )


def test_the_interpreter_ends_while_threads_of_the_pool_wait(cpu):
    done = run_script(SMALL_CALL + "import forge\ncall()\nprint('end')", FORGE_BACKEND=cpu)
    assert done.stdout == "end\n"
    assert done.stderr == ""


def test_the_interpreter_ends_while_daemon_threads_are_in_a_call(backend, kernel):
    done = run_script(
        f"""
        import time
        import forge
        x = np.ones((1, 300, 2, 16), np.float32)
        started = threading.Barrier(4)

        def work():
            started.wait()
            while True:
                forge.attention(x, x, x, backend={backend!r}, kernel={kernel!r})

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        started.wait()
        time.sleep(0.2)
        print("end")
        """
    )
    assert (done.stdout, done.stderr) == ("end\n", "")


def test_import_and_calls_leave_the_floating_point_mode_alone(fused_backend):
    """Linking with fast-math would flush denormals to zero in the whole process."""
    run_script(
        SMALL_CALL
        + """
def denormals_live():
    return sys.float_info.min / 2 != 0 and np.float32(1e-38) * np.float32(0.1) > 0

def in_fresh_thread():
    answers = []
    thread = threading.Thread(target=lambda: answers.append(denormals_live()))
    thread.start()
    thread.join()
    return answers[0]

def check():
    assert denormals_live() and in_fresh_thread()
    assert np.finfo(np.float32).smallest_subnormal > 0

check()
import forge
check()
call()
check()
""",
        FORGE_BACKEND=fused_backend,
    )


def test_import_brings_in_nothing_but_numpy():
    done = run_script("""
    before = set(sys.modules)
    import forge
    print(*{name.split(".")[0] for name in set(sys.modules) - before})
    """)
    imported = set(done.stdout.split())
    own = {*sys.stdlib_module_names, "_xxsubinterpreters"}  # which the list leaves out
    assert imported <= {"forge", "numpy"} | own


def test_inputs_may_die_while_their_gradients_are_computed(backend, kernel, rng):
    arrays = random_inputs(rng, Tq=33)
    want = run(*arrays, backend=backend, kernel=kernel)
    q, k, v, dout = (x.copy() for x in arrays)
    _, saved = forge.attention_forward(q, k, v, backend=backend, kernel=kernel)
    del q, k, v
    gc.collect()
    for name, x in zip(GRADIENTS, forge.attention_backward(dout, saved), strict=True):
        np.testing.assert_array_equal(x, getattr(want, name))
