"""forge.torch.ring_attention in processes of their own, which gloo connects."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from optional import need
from ring_cases import CASES, EXCHANGED, REPEATED, cases_of, check

torch = need("torch")

import forge.torch as ft  # noqa: E402

if not torch.distributed.is_available() or not hasattr(os, "fork"):
    pytest.skip("torch.distributed or fork is not here", allow_module_level=True)

SIZES = (2, 3, 4, 8)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What the ranks left: arrays and words, by size and rank. One set of processes a size."""
    folder = tmp_path_factory.mktemp("ring")
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    done = subprocess.run(
        [sys.executable, str(HERE / "ring_processes.py"), str(folder), *map(str, SIZES)],
        env={**env, "FORGE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for size in SIZES:
        for rank in range(size):
            arrays = dict(np.load(folder / f"{size}-{rank}.npz"))
            said = folder / f"{size}-{rank}.json"
            found[size, rank] = arrays, json.loads(said.read_text()) if said.exists() else None
    return found


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for size in SIZES for name in cases_of(size)]
)
def test_outputs_and_gradients_are_those_of_the_single_process(left, name, size):
    parts = []
    for rank in range(size):
        arrays = left[size, rank][0]
        names = [key for key in arrays if key.startswith(f"{name}/")]
        parts.append({key.partition("/")[2]: arrays[key] for key in names})
    assert {"out", "dq", "dk", "dv"} <= parts[0].keys()
    check(name, parts)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EXCHANGED)
def test_rows_exchanged_for_heads_give_the_same(left, name, size):
    parts = []
    for rank in range(size):
        arrays, of = left[size, rank][0], f"ulysses {name}/"
        parts.append({key.removeprefix(of): x for key, x in arrays.items() if key.startswith(of)})
    assert {"out", "dq", "dk", "dv"} <= parts[0].keys()
    check(name, parts)


@pytest.mark.parametrize("size", SIZES)
def test_a_split_cache_gives_what_a_whole_one_does(left, size):
    for dtype, bound in (("float32", 1e-6), ("bfloat16", 2.0**-7)):
        of_ranks = [left[size, rank][0][f"decode {dtype}/got"] for rank in range(size)]
        for got in of_ranks:
            np.testing.assert_array_equal(got, of_ranks[0])
        want = left[size, 0][0][f"decode {dtype}/want"]
        np.testing.assert_allclose(of_ranks[0], want, rtol=bound, atol=bound)


def test_decode_has_no_gradient_and_says_so(left):
    for said in words(left, 3)[:2]:
        kind, message, _ = said["errors"]["decode"]
        assert kind == "ValueError"
        assert message.startswith("q, k, v and sinks must not require a gradient in decode")


def words(left, size):
    return [left[size, rank][1] for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_two_runs_have_equal_bits(left, size):
    for said in words(left, size):
        if said is not None:
            assert said["same bits"] == REPEATED


@pytest.mark.parametrize("size", SIZES)
def test_a_window_sends_to_the_next_rank_alone(left, size):
    """9 keys back are in the shard before, of 96 / size rows: keys and values twice, to the next
    rank, and their gradients once, to the one before."""
    case, sent = CASES["window contiguous"], [said and said["sent"] for said in words(left, size)]
    nbytes = case.T // size * 2 * 2 * (8 + 8) * 4
    for rank, sizes in enumerate(sent):
        if sizes is not None:
            wanted = [nbytes] * 2 * (rank < size - 1) + [nbytes + 8] * (rank > 0)
            assert sorted(sizes) == wanted


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_positions_are_all_rows_once(left, layout):
    held = [said[layout] for said in words(left, 4)]
    assert sorted(itertools.chain(*held)) == list(range(51))
    assert (held[0][-1] == 50) == (layout == "zigzag")


ERRORS = {
    "window": "window must be the same on all ranks, got 4 on ranks 0, 2 and 5 on rank 1",
    "heads": "hv must be the same on all ranks, got 4 on rank 0 and 8 on ranks 1, 2",
    "gradient": "a gradient must be the same on all ranks, got wanted on rank 0 and not wanted on",
    "order of backwards": "of call must be the same on all ranks, got ",
}


@pytest.mark.parametrize("what", ERRORS)
def test_ranks_that_differ_say_so(left, what):
    for said in words(left, 3)[:2]:
        kind, message, _ = said["errors"][what]
        assert kind == "ValueError"
        assert message.startswith(ERRORS[what])


def test_a_rank_that_refuses_is_named_to_the_others(left):
    first, second = (said["errors"]["refused"] for said in words(left, 3)[:2])
    assert first[0] == "ValueError"
    assert first[1].startswith("rank 1 refused its arguments: TypeError: v must be float32 as q is")
    assert second[0] == "TypeError"
    assert second[1].startswith("v must be float32 as q is")


def test_the_group_serves_on_after_such_errors(left):
    for said in words(left, 3)[:2]:
        assert said["after errors"][:2] == ["none", ""]


def test_a_rank_that_dies_is_an_error_in_time(left):
    assert left[3, 2][1] is None
    for said in words(left, 3)[:2]:
        kind, message, seconds = said["dying"]
        assert kind == "TransportError"
        assert "does not answer" in message
        assert seconds < 60


def test_without_torch_distributed_it_says_what_to_do():
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(RuntimeError, match=r"^group must be of torch\.distributed, .* call torch"):
        ft.ring_attention(x, x, x)
    with pytest.raises(RuntimeError, match=r"^group must be of torch\.distributed"):
        ft.ring_positions(4)
    with pytest.raises(ValueError, match=r"^total must not be negative, got -1"):
        ft.ring_positions(-1)
