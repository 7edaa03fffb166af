"""What forge says about itself: backends, last_run, build_config, and the variables it reads."""

import os
import re
import subprocess
import sys

import forge
import numpy as np
import pytest
from calls import IN_PLACE, run, same_bits
from oracle import random_inputs
from scripts import run_script

PRINT_LAST_RUN = """
import json, forge
x = np.arange(2 * 70 * 4 * 8, dtype=np.float32).reshape(2, 70, 4, 8) / 1000
out = forge.attention(x, x, x, kernel={kernel!r})
last = forge.last_run()
print(json.dumps([last, out.tobytes().hex()]))
"""


def last_run_with(kernel="fused", **environment):
    import json

    done = run_script(PRINT_LAST_RUN.format(kernel=kernel), **environment)
    return json.loads(done.stdout)


def test_backends_come_in_order_of_preference_with_reasons():
    backends = forge.backends()
    assert list(backends) == ["metal", "cpu"]
    for state in backends.values():
        assert set(state) == {"ok", "reason"}
        assert type(state["ok"]) is bool
        assert bool(state["reason"]) != state["ok"]


def test_backends_is_a_fresh_answer():
    forge.backends()["cpu"]["ok"] = False
    assert forge.backends()["cpu"]["ok"] is True


@pytest.mark.parametrize("name", [n for n, s in forge.backends().items() if not s["ok"]])
def test_a_backend_that_is_not_there_raises_its_reason(name, rng):
    q, k, v, _ = random_inputs(rng)
    with pytest.raises(ValueError, match=re.escape(forge.backends()[name]["reason"])):
        forge.attention(q, k, v, backend=name)


def test_passed_over_backends_are_told(cpu, rng, monkeypatch):
    """Without a name the first backend that can serve does; last_run keeps why others did not."""
    monkeypatch.delenv("FORGE_BACKEND", raising=False)
    q, k, v, _ = random_inputs(rng, dtype=np.float64)
    forge.attention(q, k, v, kernel="materialized")
    last = forge.last_run()
    assert last["backend"] == cpu
    assert list(last["passed_over"]) == ["metal"]
    assert last["passed_over"]["metal"]


def test_a_named_backend_passes_over_nobody(fused_backend, rng):
    q, k, v, _ = random_inputs(rng)
    forge.attention(q, k, v, backend=fused_backend)
    assert forge.last_run()["passed_over"] == {}


def test_last_run_tells_what_ran(backend, kernel, rng):
    q, k, v, dout = random_inputs(rng)
    run(q, k, v.astype(">f4"), dout, backend=backend, kernel=kernel)
    last = forge.last_run()
    assert last["backend"] == backend
    assert last["requested_kernel"] == kernel
    assert last["kernel"] in ("fused", "materialized")
    assert last["threads"] >= 1
    assert last["arrays"]["q"] == last["arrays"]["dout"] == IN_PLACE[backend]
    assert last["arrays"]["v"].startswith("copied: ")
    if backend == "cpu":
        assert last["cpu_target"] in ("baseline", "avx2", "avx512", "neon")


def test_materialized_is_never_anything_else(backend, rng):
    q, k, v, _ = random_inputs(rng)
    forge.attention(q, k, v, backend=backend, kernel="materialized")
    assert forge.last_run()["kernel"] == "materialized"


def test_last_run_is_a_copy(rng):
    q, k, v, _ = random_inputs(rng)
    forge.attention(q, k, v)
    forge.last_run()["arrays"]["q"] = "gone"
    forge.last_run().clear()
    assert forge.last_run()["arrays"]["q"] in IN_PLACE.values()


def test_last_run_is_none_before_the_first_call():
    assert run_script("import forge\nprint(forge.last_run())").stdout == "None\n"


def test_build_config_tells_how_it_was_built():
    config = forge.build_config()
    assert config["version"] == forge.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", forge.__version__)
    assert config["compiler"]
    assert "metal" in config
    targets = list(config["cpu_targets"])
    assert targets
    assert set(targets) <= {"baseline", "avx2", "avx512", "neon"}


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert version("forge-attention") == forge.__version__


@pytest.mark.parametrize("shape", [(), 0, 1, 5, (3, 4), (2, 0, 4), (1, 33, 2, 64), np.int64(7)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, "i1", np.complex64])
def test_empty_gives_whole_pages(shape, dtype):
    import mmap

    x = forge.empty(shape, dtype)
    plain = np.empty(shape, dtype)
    assert (x.shape, x.dtype) == (plain.shape, plain.dtype)
    assert type(x) is np.ndarray
    if not x.size:
        return  # no elements, no pages
    assert x.ctypes.data % mmap.PAGESIZE == 0
    assert x.flags.c_contiguous
    assert x.flags.writeable
    x[...] = 1
    assert (x == 1).all()
    last_page = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    assert (
        owner.ctypes.data + owner.nbytes >= x.ctypes.data + last_page
    )  # the rest is nobody else's


def test_empty_is_float32_by_default_and_serves_as_output(rng):
    q, k, v, _ = random_inputs(rng)
    out = forge.empty(q.shape)
    assert out.dtype == np.float32
    assert forge.attention(q, k, v, out=out) is out


def test_two_empties_share_no_page():
    import mmap

    x, y = forge.empty(1), forge.empty(1)
    assert x.ctypes.data // mmap.PAGESIZE != y.ctypes.data // mmap.PAGESIZE


@pytest.mark.parametrize(("error", "shape", "dtype"), [
    (ValueError, -1, "f4"),
    (ValueError, (2, -3), "f4"),
    (TypeError, 1.5, "f4"),
    (TypeError, "3", "f4"),
    (TypeError, None, "f4"),
    (TypeError, (2, 1.5), "f4"),
    (TypeError, 3, object),
    (MemoryError, 2**60, "f4"),
    ((MemoryError, ValueError), (2**40, 2**40), "f4"),
])  # fmt: skip
def test_impossible_empties(error, shape, dtype):
    with pytest.raises(error):
        forge.empty(shape, dtype)


@pytest.mark.parametrize("n", [1, 2, 7, np.int64(3)])
def test_the_number_of_threads_is_taken(n, cpu, rng, restore_threads):
    forge.set_num_threads(n)
    forge.attention(*random_inputs(rng, B=4, Tq=64, H=4)[:3], backend=cpu)
    assert forge.last_run()["threads"] == n


@pytest.mark.parametrize(("error", "n"), [
    (TypeError, 1.0), (TypeError, True), (TypeError, "2"), (TypeError, None),
    (ValueError, 0), (ValueError, -1), (ValueError, 2**40), (ValueError, 2**70),
])  # fmt: skip
def test_wrong_numbers_of_threads(error, n):
    with pytest.raises(error, match=r"^n "):
        forge.set_num_threads(n)


def test_the_environment_sets_the_number_of_threads(cpu):
    assert last_run_with(FORGE_NUM_THREADS="3", FORGE_BACKEND=cpu)[0]["threads"] == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "99999999999999999999"])
def test_a_wrong_number_of_threads_in_the_environment(text):
    done = run_script(PRINT_LAST_RUN.format(kernel=None), check=False, FORGE_NUM_THREADS=text)
    assert done.returncode == 1
    assert re.search(rf"ValueError: FORGE_NUM_THREADS .*{re.escape(text)}", done.stderr)


def test_the_environment_names_the_backend(fused_backend):
    assert last_run_with(FORGE_BACKEND=fused_backend)[0]["backend"] == fused_backend


@pytest.mark.parametrize("text", ["cuda", "CPU"])
def test_a_wrong_backend_in_the_environment(text):
    done = run_script(PRINT_LAST_RUN.format(kernel=None), check=False, FORGE_BACKEND=text)
    assert done.returncode == 1
    assert re.search(f"ValueError: FORGE_BACKEND .*{text}", done.stderr)


def test_empty_variables_are_unset_ones(cpu):
    variables = dict.fromkeys(["FORGE_BACKEND", "FORGE_CPU_TARGET", "FORGE_NUM_THREADS"], "")
    assert last_run_with(**variables) == last_run_with()


def test_an_argument_goes_before_the_environment(cpu):
    done = run_script(
        f"""
        import forge
        x = np.zeros((1, 1, 1, 1), np.float32)
        forge.attention(x, x, x, backend={cpu!r})
        print(forge.last_run()["backend"])
        """,
        FORGE_BACKEND="nonsense",
    )
    assert done.stdout.strip() == cpu


@pytest.mark.parametrize("target", forge.build_config()["cpu_targets"])
def test_the_environment_names_the_cpu_target(target, kernel, cpu):
    last, _ = last_run_with(kernel=kernel, FORGE_CPU_TARGET=target, FORGE_BACKEND=cpu)
    # The materialized kernels have no AVX-512 text of their own.
    allowed = (
        {target}
        if last["kernel"] == "fused"
        else {target, "avx2" if target == "avx512" else target}
    )
    assert last["cpu_target"] in allowed


def test_materialized_results_are_the_same_bits_on_every_cpu_target(cpu):
    results = {
        last_run_with(kernel="materialized", FORGE_CPU_TARGET=target, FORGE_BACKEND=cpu)[1]
        for target in forge.build_config()["cpu_targets"]
    }
    assert len(results) == 1


@pytest.mark.parametrize(
    "text",
    ["sse9", "AVX2", "neon" if "neon" not in forge.build_config()["cpu_targets"] else "avx2"],
)
def test_a_wrong_cpu_target_in_the_environment(text, cpu):
    done = run_script(
        PRINT_LAST_RUN.format(kernel=None), check=False, FORGE_CPU_TARGET=text, FORGE_BACKEND=cpu
    )
    assert done.returncode == 1
    assert re.search(f"ValueError: FORGE_CPU_TARGET .*{text}", done.stderr)


def test_the_public_names():
    for name in ("attention", "attention_forward", "attention_backward", "Saved", "backends",
                 "last_run", "empty", "build_config", "set_num_threads", "kernels"):  # fmt: skip
        assert name in forge.__all__
        assert hasattr(forge, name)
        assert getattr(forge, name).__doc__


def test_type_information_is_installed():
    folder = os.path.dirname(forge.__file__)
    assert os.path.exists(os.path.join(folder, "py.typed"))
    assert os.path.exists(os.path.join(folder, "_forge.pyi"))


def test_it_works_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import forge; print(forge.__version__)"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == forge.__version__


def test_a_saved_forward_prints_what_it_is(backend, kernel, rng):
    q, k, v, _ = random_inputs(rng)
    saved = run(q, k, v, backend=backend, kernel=kernel).saved
    assert kernel in repr(saved)
    assert backend in repr(saved)
    assert len(repr(saved)) < 300  # no arrays


def test_row_statistics_come_from_the_forward_not_from_lse(rng):
    q, k, v, _ = random_inputs(rng)
    saved = run(q, k, v).saved
    same_bits(saved.lse, saved.row_max + np.log(saved.row_sum))
