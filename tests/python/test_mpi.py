"""forge.mpi in processes that mpirun starts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from optional import need
from ring_cases import CASES, EXCHANGED, REPEATED, check

need("mpi4py")

SIZES = (2, 3, 4)
HERE = Path(__file__).parent
BESIDE_PYTHON = Path(sys.executable).parent / "mpirun"
MPIRUN = str(BESIDE_PYTHON) if BESIDE_PYTHON.exists() else shutil.which("mpirun")

if MPIRUN is None:
    if os.environ.get("FORGE_REQUIRE_MPI"):
        raise RuntimeError("mpirun is not there: pip install -r tests/requirements-mpi.txt")
    pytest.skip("mpirun is not there", allow_module_level=True)

# A container's root is nobody's root, and it has fewer cores than the tests have ranks.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "FORGE_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def mpirun(size, *command):
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    return subprocess.run(
        [MPIRUN, "-n", str(size), sys.executable, *map(str, command)],
        env={**env, **SETTINGS}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What the ranks left: arrays and words, by size and rank. One set of processes a size."""
    folder, found = tmp_path_factory.mktemp("mpi"), {}
    for size in SIZES:
        done = mpirun(size, HERE / "mpi_processes.py", folder)
        assert done.returncode == 0, done.stderr[-4000:]
        for rank in range(size):
            said = json.loads((folder / f"{size}-{rank}.json").read_text())
            found[size, rank] = dict(np.load(folder / f"{size}-{rank}.npz")), said
    return found


def parts_of(left, size, prefix):
    parts = []
    for rank in range(size):
        arrays = left[size, rank][0]
        parts.append({n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)})
    assert {"out", "dq", "dk", "dv"} <= parts[0].keys()
    return parts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_single_process(left, name, size):
    check(name, parts_of(left, size, f"{name}/"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EXCHANGED)
def test_rows_exchanged_for_heads_give_the_same(left, name, size):
    check(name, parts_of(left, size, f"ulysses {name}/"))


@pytest.mark.parametrize("size", SIZES)
def test_two_runs_have_equal_bits(left, size):
    for rank in range(size):
        assert left[size, rank][1]["same bits"] == REPEATED


@pytest.mark.parametrize("size", SIZES)
def test_a_split_cache_gives_what_a_whole_one_does(left, size):
    for rank in range(size):
        arrays = left[size, rank][0]
        np.testing.assert_array_equal(arrays["decode/got"], left[size, 0][0]["decode/got"])
        np.testing.assert_allclose(arrays["decode/got"], arrays["decode/want"], atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_a_window_sends_to_the_next_rank_alone(left, size):
    nbytes = CASES["window contiguous"].T // size * 2 * 2 * (8 + 8) * 4
    for rank in range(size):
        wanted = [nbytes] * 2 * (rank < size - 1) + [nbytes + 8] * (rank > 0)
        assert sorted(left[size, rank][1]["sent"]) == wanted


def test_mpi_gets_to_work_while_a_rank_computes(left):
    """Most MPI libraries move long messages only inside of their calls."""
    before, during, after = left[3, 0][1].get("looks", (0, 1, 0))
    assert (before, after) == (0, 0)
    assert during > 0


def test_positions_are_all_rows_once(left):
    held = [row for rank in range(4) for row in left[4, rank][1]["positions"]]
    assert sorted(held) == list(range(51))


ERRORS = {
    "window": ("ValueError", "window must be the same on all ranks, got 4 on ranks 0, 2 and 5 on"),
    "refused": ("ValueError", "rank 1 refused its arguments: TypeError: v must be float32"),
    "dout": ("ValueError", "rank 1 refused its arguments: ValueError: dout must have shape"),
    "dsinks": ("ValueError", "dsinks must be left out where the forward had no sinks"),
    "comm": ("TypeError", "comm must be an mpi4py.MPI.Intracomm, got str"),
    "saved": ("TypeError", "saved must come from ulysses_attention_forward, got RingSaved"),
    "served on": ("none", ""),
}


@pytest.mark.parametrize("what", ERRORS)
def test_wrong_calls_are_refused_in_words_on_every_rank(left, what):
    for rank in (0, 2):
        kind, message = left[3, rank][1]["errors"][what]
        assert kind == ERRORS[what][0], message
        assert message.startswith(ERRORS[what][1])


def test_a_rank_that_dies_ends_the_job(tmp_path):
    """mpirun sees to it, well before any of the others would have waited for long."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, numpy as np, forge.mpi\n"
        "from mpi4py import MPI\n"
        "x = np.zeros((1, 4, 2, 8), np.float32)\n"
        "forge.mpi.ring_attention_forward(MPI.COMM_WORLD, x, x, x)\n"
        "if MPI.COMM_WORLD.rank == 1: os._exit(3)\n"
        "forge.mpi.ring_attention_forward(MPI.COMM_WORLD, x, x, x)\n"
    )
    assert mpirun(3, script).returncode != 0
