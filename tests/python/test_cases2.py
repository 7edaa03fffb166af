"""Sinks, biases, masks, runs of keys, other value sizes, half precision and merging: problems whose
answers come from other projects (PyTorch, Hugging Face, xformers, JAX, MLX, ONNX, onnxruntime)."""

import functools
import json
from pathlib import Path

import forge
import numpy as np
import pytest
from oracle import GRADIENTS, MORE_GRADIENTS

FOLDER = Path(__file__).parent / "cases2"
INDEX = json.loads((FOLDER / "index.json").read_text())
UNIT_OF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
TINY_OF = {"bfloat16": 2.0**-126, "float16": 2.0**-14}
POSITIONS = {"q_offset": "query_offset", "key_start": "key_start", "key_end": "key_end"}
SHAPING = ("bias", "mask", "sinks")


def in_layout(x, how):
    """The values of x in the memory layout that a case asks for."""
    kind, axis = how
    if kind == "transposed":
        return np.ascontiguousarray(x.transpose(axis)).transpose(np.argsort(axis))
    if kind == "stride0":
        return np.broadcast_to(x.take([0], axis), x.shape)
    assert kind in ("stepped", "reversed")
    wide = np.zeros([n * (2 if a == axis else 1) for a, n in enumerate(x.shape)], x.dtype)
    step = 2 if kind == "stepped" else -1
    if kind == "reversed":
        wide = np.zeros(x.shape, x.dtype)
    view = wide[tuple(slice(None, None, step if a == axis else None) for a in range(x.ndim))]
    view[...] = x
    return view


def load(case):
    with np.load(FOLDER / case["file"]) as file:
        arrays = {name: file[name] for name in file.files}
    for name, dtype in case["half"].items():
        if dtype == "bfloat16" and arrays[name].dtype == np.uint16:
            arrays[name] = arrays[name].view(pytest.importorskip("ml_dtypes").bfloat16)
    for name, how in case.get("views", {}).items():
        arrays[name] = in_layout(arrays[name], how)
    return arrays


def options_of(case, arrays):
    params = case["params"]
    options = {
        "causal": params["causal"],
        "window": (params["window_left"], params["window_right"]),
        "softcap": params["softcap"],
        "scale": None if params["scale_is_default"] else params["scale"],
        "query_offset": params.get("q_offset"),
    }
    options |= {ours: arrays[name].astype(np.int64) for name, ours in POSITIONS.items()
                if name in arrays}  # fmt: skip
    return options | {name: arrays[name] for name in SHAPING if name in arrays}


def gradients(dout, saved, options, **more):
    wanted = [name for name in MORE_GRADIENTS if name[1:] in options]
    got = forge.attention_backward(dout, saved, **dict.fromkeys(wanted, True), **more)
    return dict(zip((*GRADIENTS, *wanted), got, strict=True))


def attend(arrays, options):
    out, saved = forge.attention_forward(arrays["q"], arrays["k"], arrays["v"], **options)
    results = gradients(arrays["dO"], saved, options, dlse=arrays.get("dlse"))
    return {"O": out, "lse": saved.lse, **results}


def part_of(case, arrays, options, begin, end, number):
    """The problem over the keys [begin, end)."""
    Tk = arrays["k"].shape[1]
    part = dict(options)
    for name in ("bias", "mask"):
        if name in part and part[name].shape[-1] == Tk > 1:
            part[name] = part[name][..., begin:end]
    part["query_offset"] = np.asarray(part["query_offset"]) - begin
    for name in ("key_start", "key_end"):
        if name in part:
            part[name] = np.clip(part[name] - begin, 0, end - begin)
    if number != case.get("sink_part", 0):
        part.pop("sinks", None)
    return part


def attend_in_parts(case, arrays, options):
    """Each part of the keys alone, merged; gradients of the parts from the whole's o and lse."""
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dO"))
    parts = []
    for number, (begin, end) in enumerate(zip(case["cuts"], case["cuts"][1:], strict=False)):
        part = part_of(case, arrays, options, begin, end, number)
        keys = slice(begin, end)
        exact = np.empty(dout.shape, np.float32)  # merged before anything is rounded
        _, saved = forge.attention_forward(q, k[:, keys], v[:, keys], out=exact, **part)
        parts.append((part, saved))
    o, lse = forge.merge([(saved.out, saved.lse) for _, saved in parts])
    results = [
        gradients(dout, saved, part, whole=(o, lse), dlse=arrays.get("dlse"))
        for part, saved in parts
    ]
    wide = functools.partial(np.asarray, dtype=np.float64)
    joined = {
        "O": o,
        "lse": lse,
        "O_parts": np.stack([saved.out for _, saved in parts]),
        "lse_parts": np.stack([saved.lse for _, saved in parts]),
        "dq_parts": np.stack([wide(result["dq"]) for result in results]),
    }
    joined["dq"] = joined["dq_parts"].sum(0)
    for name in ("dk", "dv"):
        joined[name] = np.concatenate([wide(result[name]) for result in results], 1)
    if "bias" in options:
        columns = options["bias"].shape[-1] == k.shape[1] > 1
        shares = [wide(result["dbias"]) for result in results]
        joined["dbias"] = np.concatenate(shares, -1) if columns else sum(shares)
    if "sinks" in options:
        joined["dsinks"] = results[case.get("sink_part", 0)]["dsinks"]
    return joined


def check(case, arrays, results, factor):
    for name in case["expected"]["arrays"]:
        got, want = (np.asarray(x).astype(np.float64) for x in (results[name], arrays[name]))
        assert got.shape == want.shape, name
        if "ignore_rows" in arrays and name in ("O", "dq", "lse"):
            ignored = arrays["ignore_rows"].astype(bool)
            ignored = ignored[:, None] if name == "lse" else ignored[:, :, None, None]
            got, want = (np.where(ignored, 0, x) for x in (got, want))
        finite = np.isfinite(want)
        np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
        tolerance = case["tol"][name]
        bound = np.full(want.shape, factor * tolerance["atol_f32"])
        if (dtype := tolerance.get("rounds_to")) is not None:
            size = np.maximum(np.abs(np.where(finite, want, 0)), TINY_OF[dtype])
            bound += UNIT_OF[dtype] * size
        error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
        assert (error <= bound).all(), f"{name}: {np.max(error - bound):.3g} over {bound.max():.3g}"


def test_all_cases_are_here():
    assert len(INDEX) == 119
    assert len({case["id"] for case in INDEX}) == 119


@pytest.mark.parametrize("case", INDEX, ids=[case["id"] for case in INDEX])
def test_a_case_of_another_project(case, backend, kernel):
    if kernel == "materialized" and case["half"]:
        pytest.skip("the materialized kernels take no half precision")
    arrays = load(case)
    options = options_of(case, arrays) | {"backend": backend, "kernel": kernel}
    if case.get("cuts") is None:
        results = attend(arrays, options)
    elif kernel == "materialized":
        pytest.skip("the materialized kernels keep p of the part: no whole=")
    else:
        results = attend_in_parts(case, arrays, options)
    # A fixed order of operations may cost half as much again as a plain float32 implementation.
    check(case, arrays, results, 1.5 if kernel == "materialized" else 1.0)
