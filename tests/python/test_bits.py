"""Float32 results are, bit for bit, those whose digests bits.json holds: of the materialized family
once for all of them, of the fused family for each CPU target and for the software Metal device.

A change that alters bits on purpose renews the digests, in a commit of its own that says why:

    python tests/python/test_bits.py --renew

It renews those of what the installed package has and this machine can run, and keeps the others.
NEON has none: there the fused family is tested in C++ alone.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

import forge
import numpy as np
import pytest
from bits_problems import PROBLEMS, floats

FILE = Path(__file__).with_name("bits.json")
DIGESTS = json.loads(FILE.read_text()) if FILE.exists() else {}
CPU_TARGETS = ("baseline", "avx2", "avx512")
COLUMNS = ("materialized", *CPU_TARGETS, "metal")


def problems_of(column):
    """All, but for those that would take too long or that the device does not serve."""
    most = 1.2e7 if column in ("materialized", "metal") else np.inf
    head_size = 256 if column == "metal" else 512
    return [problem for problem in PROBLEMS if problem.products <= most and problem.hd <= head_size]


def runs():
    """What can run here: (column of the digests, backend, CPU target)."""
    config = forge.build_config()
    backends = os.environ.get("FORGE_TEST_BACKEND", "cpu,metal").split(",")
    targets = [os.environ.get("FORGE_CPU_TARGET")]
    if not targets[0]:
        targets = config["cpu_targets"]
    if "cpu" in backends:
        yield from (("materialized", "cpu", target) for target in targets)
        yield from ((target, "cpu", target) for target in targets if target in CPU_TARGETS)
    if "metal" in backends and config["metal"] == "software":
        yield "materialized", "metal", ""
        yield "metal", "metal", ""


def cases():
    return [(*run, problem) for run in runs() for problem in problems_of(run[0])]


def name_of(value):
    return getattr(value, "name", value)


def digest(x):
    """Of the shape and the bits; all NaN are the same, -0 is not 0."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), bits).astype("<u4")
    return hashlib.sha256(repr(x.shape).encode() + bits.tobytes()).hexdigest()[:8]


def output(problem, name, shape):
    """The array to hand in for a result, None if forge is to make one."""
    adds = problem.accumulate and name != "out"
    if not adds and problem.outputs == "new":
        return None
    x = floats(f"{problem.name}: {name}", shape) if adds else np.full(shape, np.float32(np.nan))
    if problem.outputs == "new":
        return x
    B, T, H, hd = shape
    strided = np.zeros((B, H, T, hd + 3), np.float32)[..., :hd].swapaxes(1, 2)
    strided[:] = x
    return strided


def results(problem, kernel, backend):
    x, options = problem.inputs(), problem.call_options()
    options |= {"kernel": kernel, "backend": backend}
    out = output(problem, "out", x.q.shape)
    out, saved = forge.attention_forward(x.q, x.k, x.v, out=out, **options)
    names = {"dq": x.q.shape, "dk": x.k.shape, "dv": x.v.shape}
    given = {name: output(problem, name, shape) for name, shape in names.items()}
    gradients = forge.attention_backward(
        x.dout, saved, dlse=x.dlse, accumulate=problem.accumulate, **given
    )
    found = {"out": out, "row_max": saved.row_max, "row_sum": saved.row_sum}
    if kernel == "materialized":
        found["probs"] = saved.probs
    found |= dict(zip(names, gradients, strict=True))
    alone = forge.attention(x.q, x.k, x.v, **options)
    return {name: digest(value) for name, value in found.items()}, digest(alone)


def compute(column, backend, target, problem):
    """The digests of the results by name, and that of what forge.attention gives."""
    kernel = "materialized" if column == "materialized" else "fused"
    with mock.patch.dict(os.environ, FORGE_CPU_TARGET=target):
        found = results(problem, kernel, backend)
    ran = forge.last_run()
    assert (ran["kernel"], ran["backend"]) == (kernel, backend)
    assert column not in CPU_TARGETS or ran["cpu_target"] == column
    return found


@pytest.mark.parametrize(("column", "backend", "target", "problem"), cases(), ids=name_of)
def test_the_bits_are_those_recorded(column, backend, target, problem):
    found, alone = compute(column, backend, target, problem)
    recorded = DIGESTS[column][problem.name].split()
    assert found == dict(zip(found, recorded, strict=True))
    assert alone == found["out"], "attention and attention_forward differ"


def test_digests_and_problems_belong_together():
    for column in COLUMNS:
        assert list(DIGESTS[column]) == [problem.name for problem in problems_of(column)]
    assert list(DIGESTS) == list(COLUMNS)


def test_every_cpu_target_has_digests():
    assert set(forge.build_config()["cpu_targets"]) <= {*CPU_TARGETS, "neon"}


def renew():
    """Writes the digests of what can run here into the file."""
    columns = dict(DIGESTS)
    for column, (backend, target) in {run[0]: run[1:] for run in runs()}.items():
        before, columns[column] = DIGESTS.get(column, {}), {}
        for problem in problems_of(column):
            found, _ = compute(column, backend, target, problem)
            columns[column][problem.name] = " ".join(found.values())
        changed = sum(before.get(name) != text for name, text in columns[column].items())
        print(f"{column}: {changed} of {len(columns[column])} problems have other digests now")
    kept = set(COLUMNS) - {column for column, *_ in runs()}
    if kept:
        print(f"kept, not to be had here: {', '.join(sorted(kept))}")
    ordered = {column: columns[column] for column in COLUMNS if column in columns}
    FILE.write_text(json.dumps(ordered, indent=0) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--renew"]:
        sys.exit("usage: python tests/python/test_bits.py --renew")
    renew()
