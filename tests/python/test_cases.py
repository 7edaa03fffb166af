"""Problems whose answers come from other projects: PyTorch, FlexAttention, Hugging Face, JAX, ONNX,
onnxruntime. Each is one call of forge: padding is key_start and key_end, alignment query_offset."""

import json
from pathlib import Path

import numpy as np
import pytest
from calls import run
from oracle import distance

FOLDER = Path(__file__).parent / "cases"
INDEX = json.loads((FOLDER / "index.json").read_text())
NAMES = {"O": "out", "P": "probs"}  # the cases' names of arrays, where they differ from forge's


def load(case):
    with np.load(FOLDER / case["file"]) as arrays:
        return {name: arrays[name] for name in arrays.files}


def options_of(case, arrays):
    params = case["params"]
    window = (params["window_left"], params["window_right"])
    options = {
        "causal": params["causal"],
        "window": None if window == (-1, -1) else window,
        "softcap": params["softcap"],
        "scale": None if params["scale_is_default"] else params["scale"],
        "query_offset": np.array(params["q_offset"], np.int64),
    }
    if "k_start" in arrays:
        options["key_start"] = arrays["k_start"].astype(np.int64)
    if "k_lens" in arrays:
        options["key_end"] = arrays["k_lens"].astype(np.int64)
    return options


def keep_rows(name, x, ignored):
    """Zero in the query rows that the peer gives no meaning to; dk and dv have none."""
    if ignored is None or name in ("dk", "dv"):
        return x
    rows = ignored[:, None, :] if name in ("lse", "P") else ignored
    return np.where(rows.reshape(rows.shape + (1,) * (x.ndim - rows.ndim)), 0, x)


def test_all_cases_are_here():
    assert len(INDEX) == 107
    assert len({case["id"] for case in INDEX}) == 107


@pytest.mark.parametrize("case", INDEX, ids=[case["id"] for case in INDEX])
def test_a_case_of_another_project(case, backend, kernel):
    arrays = load(case)
    ignored = arrays.get("ignore_rows")
    if ignored is not None:
        ignored = ignored.astype(bool)
        assert not arrays["dO"][ignored].any()  # padding queries add nothing to dk and dv
    result = run(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        arrays["dO"],
        backend=backend,
        kernel=kernel,
        **options_of(case, arrays),
    )
    # A fixed order of operations may cost half as much again as a plain float32 implementation.
    factor = 1.5 if result.family == "materialized" else 1.0
    for name in case["expected"]["arrays"]:
        if name == "P" and kernel != "materialized":
            continue  # the fused kernels keep no probabilities
        want = keep_rows(name, arrays[name], ignored)
        got = keep_rows(name, getattr(result, NAMES.get(name, name)), ignored)
        error, bound = distance(got, want), factor * case["tol"][name]["atol_f32"]
        assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g}"
