"""forge.jax.ring_attention inside jax.shard_map, on eight devices of a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from optional import need
from ring_cases import CASES, check, put_together, rows_of

jax = need("jax")

if not hasattr(jax, "shard_map"):
    pytest.skip("jax.shard_map is not here", allow_module_level=True)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    done = subprocess.run(
        [sys.executable, str(HERE / "jax_devices.py"), str(folder)],
        env={**env, "FORGE_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(np.load(folder / "found.npz")), json.loads((folder / "said.json").read_text())


def test_outputs_and_gradients_are_those_of_the_single_process(left):
    arrays, said = left
    assert len(said["runs"]) > 15
    assert {size for _, size in said["runs"]} == {2, 3, 4, 8}
    for name, size in said["runs"]:
        of = f"{name}/{size}/"
        whole = {key.removeprefix(of): x for key, x in arrays.items() if key.startswith(of)}
        assert {"out", "dq", "dk", "dv"} <= whole.keys()
        assert ("dsinks" in whole) == bool(CASES[name].sinks)
        check(name, split(name, size, whole))


def split(name, size, whole):
    """What each device had of it; the gradient of sinks that all share is whole already."""
    parts = []
    for rank in range(size):
        rows = rows_of(CASES[name], rank, size)[0]
        part = {key: x[:, rows] for key, x in whole.items() if key != "dsinks"}
        if "dsinks" in whole:
            sinks = whole["dsinks"]
            part["dsinks"] = sinks[:, :, rows] if sinks.ndim == 3 else sinks * (rank == 0)
        parts.append(part)
    for key, x in put_together(name, parts).items():
        np.testing.assert_array_equal(x, whole[key])
    return parts


def test_two_runs_have_equal_bits(left):
    assert left[1]["same bits"] == left[1]["runs"]


def test_what_nobody_sees_is_not_moved(left):
    """Pairs of devices: keys and values once in the forward; once more in the backward, and their
    gradients as often."""
    pairs = {"whole": 4 * 3, "causal contiguous": 6, "window contiguous": 7}
    for name, each in pairs.items():
        assert left[1]["moved"][name] == [2 * each, 6 * each]


ERRORS = {
    "layout": ("ValueError", "layout must be 'zigzag' or 'contiguous', got 'striped'"),
    "rank": ("ValueError", "k must be [B, T, heads, hd], got shape (8, 2, 4)"),
    "rows": ("ValueError", "k must have the rows of q, got 2 and 4"),
    "dtype": ("TypeError", "k must be float32, float16 or bfloat16"),
    "sinks": ("ValueError", "sinks must have shape (2,) or (1, 2) or (1, 2, 4), got (3,)"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_wrong_arguments_are_refused_in_words(left, what):
    kind, message = left[1]["errors"][what]
    assert kind == ERRORS[what][0]
    assert message.startswith(ERRORS[what][1])
