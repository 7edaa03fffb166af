"""The materialized kernels on the GPU are the CPU's, bit for bit.

They share one text of exp and tanh and one order of operations.
"""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, run, same_bits
from forge import _cli, kernels
from hypothesis import given
from hypothesis import strategies as st
from oracle import random_inputs
from test_cases import INDEX, load, options_of

pytestmark = pytest.mark.usefixtures("software")  # a GPU flushes denormals and need not agree

NAMES = ("out", "lse", "row_max", "row_sum", "probs", "dq", "dk", "dv")


def both(*arrays, **options):
    return [run(*arrays, backend=b, kernel="materialized", **options) for b in ("metal", "cpu")]


@pytest.mark.parametrize("case", INDEX, ids=[case["id"] for case in INDEX])
def test_cases_of_other_projects_give_the_same_bits(case):
    arrays = load(case)
    given = [arrays[name] for name in ("q", "k", "v", "dO")]
    assert_same_bits(*both(*given, **options_of(case, arrays)), NAMES)


def problems():
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32 - 1),
            "shape": st.fixed_dictionaries(
                {
                    "B": st.integers(1, 3),
                    "Tq": st.integers(1, 20),
                    "Tk": st.integers(1, 20),
                    "Hkv": st.integers(1, 3),
                    "hd": st.integers(1, 20),
                }
            ),
            "rep": st.integers(1, 4),
            "spread": st.sampled_from([0.0, 1.0, 8.0]),
            "options": st.fixed_dictionaries(
                {
                    "causal": st.booleans(),
                    "window": st.sampled_from([None, 1, 3, (2, 1), (0, -1)]),
                    "softcap": st.sampled_from([None, 0.5, 20.0]),
                    "scale": st.sampled_from([None, -0.7, 0.0]),
                    "query_offset": st.sampled_from([None, 0, -3, 2**62]),
                }
            ),
            "dlse": st.booleans(),
        }
    )


@given(problem=problems())
def test_random_problems_give_the_same_bits(problem):
    rng = np.random.default_rng(problem["seed"])
    shape = dict(problem["shape"], H=problem["shape"]["Hkv"] * problem["rep"])
    q, k, v, dout = random_inputs(rng, **shape, spread=problem["spread"])
    rows = (q.shape[0], q.shape[2], q.shape[1])
    dlse = rng.standard_normal(rows).astype(np.float32) if problem["dlse"] else None
    assert_same_bits(*both(q, k, v, dout, dlse, **problem["options"]), NAMES)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", range(4))
def test_hostile_values_give_the_same_bits(bad, where, rng):
    arrays = list(random_inputs(rng, B=1, Tq=9, Tk=11, H=4, Hkv=2, hd=6))
    arrays[where][0, 4, 0, 3] = bad
    assert_same_bits(*both(*arrays, causal=True, softcap=3.0), NAMES)


@pytest.fixture
def parts(rng):
    """Inputs of the four kernels with uninitialized memory told apart: outputs start as 0.5."""
    q, k, v, dout = random_inputs(rng, B=2, Tq=7, Tk=9, H=6, Hkv=2, hd=5, spread=2)
    rows = (2, 6, 7)
    parts = {"q": q, "k": k, "v": v, "dout": dout}
    parts["dlse"] = rng.standard_normal(rows).astype(np.float32)
    o, p, m, s = (np.empty(n, np.float32) for n in (q.shape, (*rows, 9), rows, rows))
    kernels.attention_fwd_f32(q, k, v, o, p, m, s, causal=True, softcap=2.0, backend="cpu")
    parts |= {"o": o, "p": p, "d_row": rng.standard_normal(rows).astype(np.float32)}
    return parts


def on_both(kernel, inputs, shapes, **options):
    for backend in ("metal", "cpu"):
        outputs = [np.full(shape, 0.5, np.float32) for shape in shapes]
        kernel(*inputs, *outputs, **options, backend=backend)
        yield outputs


def assert_same(kernel, inputs, shapes, **options):
    for got, want in zip(*on_both(kernel, inputs, shapes, **options), strict=True):
        same_bits(got, want)


OPTIONS = {"causal": True, "softcap": 2.0, "window": 4}


def test_the_forward_kernel_alone(parts):
    shapes = [parts["o"].shape, parts["p"].shape, (2, 6, 7), (2, 6, 7)]
    inputs = [parts[name] for name in ("q", "k", "v")]
    assert_same(kernels.attention_fwd_f32, inputs, shapes, **OPTIONS)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_d_kernel_alone(parts, with_dlse):
    inputs = [parts["o"], parts["dout"]]
    dlse = parts["dlse"] if with_dlse else None
    assert_same(kernels.attention_bwd_d_f32, inputs, [(2, 6, 7)], dlse=dlse)


def test_the_dq_kernel_alone_adds(parts):
    inputs = [parts[name] for name in ("q", "k", "v", "p", "dout", "d_row")]
    assert_same(kernels.attention_bwd_dq_f32, inputs, [parts["q"].shape], **OPTIONS)


def test_the_dkv_kernel_alone_adds(parts):
    inputs = [parts[name] for name in ("q", "k", "v", "p", "dout", "d_row")]
    shapes = [parts["k"].shape, parts["v"].shape]
    assert_same(kernels.attention_bwd_dkv_f32, inputs, shapes, **OPTIONS)


def test_it_really_ran_on_the_device(software, rng):
    forge.attention(*random_inputs(rng)[:3], backend="metal", kernel="materialized")
    assert forge.last_run()["backend"] == "metal"
    assert software.get("dispatches") == 1


def test_every_problem_of_forge_check_passes(capsys):
    """What is asked of owners of Macs, on software devices that are like theirs as well."""
    assert _cli.main(["check", "--backend", "metal"]) == 0, capsys.readouterr().out
