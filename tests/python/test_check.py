"""python -m forge check finds what is wrong, and only that."""

import json
import os
import sys
import types

import forge
import numpy as np
import oracle
import pytest
from forge import _cli, _forge
from forge._check import run as _check
from forge._check.halves import from_bfloat16, to_bfloat16
from forge._check.plain import Answer
from forge._check.problems import HALF_PROBLEMS, PROBLEMS

FEW = tuple(p for p in PROBLEMS if p.name in ("causal, window 17", "all together"))
FEW_HALF = tuple(p for p in HALF_PROBLEMS if p.name.endswith("16: all together"))

REFUSAL = "backend must be one that can serve this call"


@pytest.fixture
def few(monkeypatch):
    """A few problems, and one for the kernels one by one, are enough to see a fault."""
    monkeypatch.setattr(_check, "PROBLEMS", FEW)
    monkeypatch.setattr(_check, "HALF_PROBLEMS", FEW_HALF)
    monkeypatch.setattr(_check, "SINGLE_KERNEL_PROBLEMS", FEW[1:])


def checked(capsys, *arguments):
    """Runs check in this process; returns exit status and the printed report."""
    status = _cli.main(["check", "--backend", "cpu", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def failed(report, kernel):
    return [x for x in report["checks"] if not x["ok"] and x["kernel"] == kernel]


def test_check_prints_markdown_to_paste(few, capsys):
    assert _cli.main(["check", "--verbose", "--backend", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# forge check"
    assert lines[-1].startswith("**OK: ")
    tables = [line for line in lines if line.startswith("|")]
    assert any("all together" in line and line.endswith("| ok |") for line in tables)
    assert any(line.startswith("| attention_fwd_f32 |") for line in tables)
    assert any(line.startswith("last_run: ") and "cpu_target" in line for line in lines)


def test_the_problems_cover_every_option():
    used = {name for problem in PROBLEMS for name in problem.options}
    assert used == {*oracle.OPTIONS, *oracle.ARRAYS}
    assert any(problem.hv not in (None, problem.hd) for problem in PROBLEMS)
    assert {problem.layout for problem in PROBLEMS} == {"contiguous", "packed", "strided", "flat"}
    dead = [p for p in PROBLEMS if not Answer(p.inputs()).seen.any(-1).all()]
    assert dead
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("float32_query", [False, True])
def test_half_precision_covers_tiles_decode_and_every_option(dtype, float32_query):
    found = [p for p in HALF_PROBLEMS if (p.dtype, p.float32_query) == (dtype, float32_query)]
    used = {name for problem in found for name in problem.options}
    assert used == {*oracle.OPTIONS, *(() if float32_query else oracle.ARRAYS)}
    assert {problem.Tq for problem in found} >= {1, 67}


@pytest.mark.parametrize(
    "problem", [p for p in PROBLEMS if not p.hidden_nan], ids=lambda problem: problem.name
)
def test_the_plain_evaluation_agrees_with_the_oracle(problem):
    """Two float64 evaluations written apart from each other."""
    given = problem.inputs()
    mine = Answer(given).results
    exact = oracle.Problem(
        given.q, given.k, given.v, given.dout, given.dlse, **problem.options
    ).exact
    for name in mine.keys() - {"p"}:
        want = getattr(exact, name)
        np.testing.assert_allclose(mine[name], want, 1e-9, 1e-9 * np.abs(exact.out).max())


def spoil_runs(monkeypatch, call, spoil, *, single=False):
    """Spoils the arrays after runs of `call`: of whole calls, or of kernels run one by one."""
    real = _forge.run

    def run(which, arrays, accumulate, options):
        ran = real(which, arrays, accumulate, options)
        if which == call and accumulate is single:  # single kernels add to gradients
            spoil(arrays, options)
        return ran

    monkeypatch.setattr(_forge, "run", run)


def spoil_output(arrays, _):
    arrays["o"][-1, -1, -1, -1] += 1e-3


def spoil_with_nan(arrays, _):
    arrays["o"][0, 0, 0, 0] = np.nan


def spoil_gradient(arrays, _):
    arrays["dk"] *= 1 + 1e-4


@pytest.mark.parametrize(
    ("call", "spoil", "array"),
    [
        ("forward", spoil_output, "out"),
        ("forward", spoil_with_nan, "out"),
        ("backward", spoil_gradient, "dk"),
    ],
)
def test_a_wrong_number_fails_the_check(few, call, spoil, array, monkeypatch, capsys):
    spoil_runs(monkeypatch, call, spoil)
    status, report = checked(capsys)
    assert status == 1
    assert not report["ok"]
    assert report["verdict"].startswith("FAILED: ")
    for kernel in ("fused", "materialized"):
        [first, *_] = failed(report, kernel)
        error, bound = first["errors"][array]["error"], first["errors"][array]["bound"]
        assert error is None or error > bound  # None: a NaN
    assert not failed(report, "attention_fwd_f32")


@pytest.mark.parametrize("wrong", ["rounded", "dv"])
def test_a_half_that_is_not_the_nearest_fails_the_check(few, wrong, monkeypatch, capsys):
    def to_the_next(arrays, _):
        if wrong in arrays and arrays[wrong].dtype.itemsize == 2:
            bits = arrays[wrong].view(np.uint16)
            bits[-1, 40] += 1

    spoil_runs(monkeypatch, "forward" if wrong == "rounded" else "backward", to_the_next)
    status, report = checked(capsys)
    assert status == 1
    wrong_ones = [x for x in report["checks"] if not x["ok"]]
    assert {x["half_precision"] for x in wrong_ones} == {True}
    assert len({x["problem"] for x in wrong_ones}) == (2 if wrong == "rounded" else 4)


def test_half_precision_is_checked_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr(_check, "PROBLEMS", ())
    monkeypatch.setattr(_check, "SINGLE_KERNEL_PROBLEMS", ())
    report = _check.run("cpu")
    assert report.ok
    assert {outcome.section for outcome in report.outcomes} == {_check.IN_HALF}


def test_half_precision_is_rounded_to_nearest_ties_to_even():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 from ml_dtypes only")
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    x = np.concatenate([bits, bits | 0x8000, bits & 0xFFFF0000 | 0x8000]).view(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(ml_dtypes.bfloat16)
    number = ~np.isnan(x)
    assert (to_bfloat16(x)[number] == want.view(np.uint16)[number]).all()
    every = np.arange(2**16, dtype=np.uint16)
    assert np.isnan(from_bfloat16(to_bfloat16(x))[~number]).all()
    np.testing.assert_array_equal(
        from_bfloat16(every), every.view(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_a_wrong_single_kernel_fails_the_check(few, monkeypatch, capsys):
    def spoil(arrays, _):
        arrays["dq"][0, 0, 0, 0] += 1e-3

    spoil_runs(monkeypatch, "bwd_dq", spoil, single=True)
    status, report = checked(capsys)
    assert status == 1
    assert {x["kernel"] for x in report["checks"] if not x["ok"]} == {"attention_bwd_dq_f32"}


def test_one_other_bit_fails_the_check(few, monkeypatch, capsys):
    """Every second call of a kernel is off by one ulp: nobody's bound, but not the same bits."""
    calls = {"fused": 0, "materialized": 0}

    def spoil(arrays, options):
        kernel, o = options["kernel"], arrays["o"]
        calls[kernel] += 1
        if calls[kernel] % 2:
            o[0, -1, 0, 0] = np.nextafter(o[0, -1, 0, 0], np.float32(np.inf))

    spoil_runs(monkeypatch, "forward", spoil)
    status, report = checked(capsys)
    assert status == 1
    for kernel in ("fused", "materialized"):
        [first, *_] = failed(report, kernel)
        assert first["same_bits"] is False
        assert all(held["error"] <= held["bound"] for held in first["errors"].values())
    _cli.main(["check", "--verbose", "--backend", "cpu"])
    assert "**FAILED**: other bits" in capsys.readouterr().out


def test_a_backend_that_raises_is_an_error_in_the_table(few, monkeypatch, capsys):
    real = _forge.run

    def lost(call, *others):
        if call in ("forward", "bwd_d"):
            raise RuntimeError("the device was lost | restart")
        return real(call, *others)

    monkeypatch.setattr(_forge, "run", lost)
    assert _cli.main(["check", "--verbose", "--backend", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "**error**: RuntimeError: the device was lost \\| restart |" in out
    assert "Traceback" not in out
    status, report = checked(capsys)
    assert status == 1
    assert "RuntimeError: the device was lost | restart" in {x["fault"] for x in report["checks"]}


def test_what_a_backend_does_not_serve_is_said_and_is_no_failure(few, monkeypatch, capsys):
    wide = np.zeros((1, 1, 1, 600), np.float32)
    with pytest.raises(ValueError, match=f"^{REFUSAL}") as refusal:
        forge.attention(wide, wide, wide, backend="cpu")
    real = _forge.run

    def no_fused(*arguments):
        if arguments[-1]["kernel"] == "fused":
            raise refusal.value
        return real(*arguments)

    monkeypatch.setattr(_forge, "run", no_fused)
    status, report = checked(capsys)
    assert status == 0
    assert "not served" in report["verdict"]
    fused = [x for x in report["checks"] if x["kernel"] == "fused"]
    assert fused
    assert all(x["refused"] == str(refusal.value) for x in fused)
    _cli.main(["check", "--verbose", "--backend", "cpu"])
    assert f"fused\n\nnot served: {refusal.value}\n" in capsys.readouterr().out


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU without fused kernels: the CPU under another name."""
    present = {name: {"ok": True, "reason": ""} for name in ("metal", "cpu")}
    monkeypatch.setattr(forge, "backends", lambda: present)

    real = _forge.run

    def stand_in(*arguments):
        *call, options = arguments
        if options["backend"] != "metal":
            return real(*arguments)
        if options["kernel"] == "fused":
            raise _forge.NotServedError(f"{REFUSAL} with kernel='fused', got 'metal': none yet")
        ran = real(*call, {**options, "backend": "cpu"})
        gpu = {"backend": "metal", "device": "Stand-in GPU", "library": "source: a test"}
        return {**ran, **gpu, "arrays": {"q": "wrapped"}}

    monkeypatch.setattr(_forge, "run", stand_in)


def test_a_gpu_that_serves_one_family_is_checked_for_that(few, gpu, capsys):
    assert _cli.main(["check", "--verbose", "--backend", "metal"]) == 0
    out = capsys.readouterr().out
    assert "device Stand-in GPU, library source: a test" in out
    assert "q wrapped" in out
    assert f"## metal, fused\n\nnot served: {REFUSAL}" in out
    assert "## metal, materialized" in out
    assert f"| bits of cpu ({forge.build_config()['cpu_targets'][-1]}) |" in out
    assert "## metal, single kernels" in out


def test_a_gpu_with_other_bits_than_the_cpu_fails(few, gpu, monkeypatch, capsys):
    on_gpu = _forge.run

    def one_ulp_off(call, arrays, *others):
        ran = on_gpu(call, arrays, *others)
        if ran["backend"] == "metal" and call == "bwd_dkv":
            dv = arrays["dv"]
            dv[0, 60, 0, 0] = np.nextafter(dv[0, 60, 0, 0], np.float32(np.inf))
        return ran

    monkeypatch.setattr(_forge, "run", one_ulp_off)
    assert _cli.main(["check", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    wrong = {(x["device"], x["kernel"]) for x in report["checks"] if not x["ok"]}
    assert wrong == {("metal", "attention_bwd_dkv_f32")}


def test_numbers_too_small_to_be_normal_may_be_flushed():
    """Apple's GPUs do, and sums of zeros have any sign; all from 2^-126 up must be the same."""

    def same(a, b):
        return _check.same_bits({"x": np.array(a, np.float32)}, {"x": np.array(b, np.float32)})

    assert same([1.0, 0.0, -0.0, 2.0**-126], [1.0, 2.0**-130, -(2.0**-140), 2.0**-126])
    assert same([0.0, -0.0, 0.0], [-(2.0**-130), 2.0**-140, -0.0])
    assert not same([0.0], [2.0**-126])
    assert not same([2.0**-126], [-(2.0**-126)])
    assert not same([1.0], [np.nextafter(np.float32(1), np.float32(2))])
    assert same([np.nan, -np.inf], [np.nan, -np.inf])


NO_HALF = "half precision is not served yet"


def test_a_gpu_without_half_precision_says_so_in_one_line(few, gpu, monkeypatch, capsys):
    on_gpu = _forge.run

    def refuse_half(call, arrays, *others):
        if others[-1]["backend"] == "metal" and "k" in arrays and arrays["k"].dtype.itemsize == 2:
            raise _forge.NotServedError(f"{REFUSAL}, got 'metal': {NO_HALF}")
        return on_gpu(call, arrays, *others)

    monkeypatch.setattr(_forge, "run", refuse_half)
    assert _cli.main(["check", "--verbose", "--backend", "metal"]) == 0
    assert f"half precision\n\nnot served: {REFUSAL}, got 'metal': {NO_HALF}\n" in (
        capsys.readouterr().out
    )


def test_a_backend_that_is_gone_half_way_is_a_fault(few, monkeypatch, capsys):
    there = forge.backends()
    gone = {**there, "cpu": {"ok": False, "reason": "unplugged"}}

    def refuse(*_, **__):
        monkeypatch.setattr(forge, "backends", lambda: gone)
        raise _forge.NotServedError(f"{REFUSAL} with kernel='fused', got 'cpu': unplugged")

    monkeypatch.setattr(_check, "_whole", refuse)
    status, report = checked(capsys)
    assert status == 1
    assert "unplugged" in failed(report, "fused")[0]["fault"]


def test_nothing_served_is_no_success(few, monkeypatch, capsys):
    def refuse(*_, **__):
        raise _forge.NotServedError(f"{REFUSAL} with kernel='fused'")

    monkeypatch.setattr(_check, "_whole", refuse)
    monkeypatch.setattr(_check, "SINGLE_KERNEL_PROBLEMS", ())
    status, _ = checked(capsys)
    assert status == 1


def test_any_other_value_error_is_a_fault(few, monkeypatch, capsys):
    def refuse(*_):
        raise ValueError("q must have shape (1, 2), got (3, 4)")

    monkeypatch.setattr(_forge, "run", refuse)
    status, report = checked(capsys)
    assert status == 1
    assert failed(report, "fused")[0]["fault"].startswith("ValueError: q must have shape")


def test_a_named_backend_that_is_not_usable_fails(few, monkeypatch, capsys):
    gone = {"metal": {"ok": False, "reason": "no GPU here"}, "cpu": {"ok": True, "reason": ""}}
    monkeypatch.setattr(forge, "backends", lambda: gone)
    assert _cli.main(["check", "--verbose", "--backend", "metal"]) == 1
    assert "**FAILED: metal is not usable: no GPU here**" in capsys.readouterr().out
    assert _cli.main(["check", "--verbose"]) == 0
    assert "backend metal: no, no GPU here" in capsys.readouterr().out


def test_the_environment_is_as_it_was(few, monkeypatch):
    monkeypatch.delenv("FORGE_CPU_TARGET", raising=False)
    assert _check.run("cpu").ok
    assert "FORGE_CPU_TARGET" not in os.environ
    target = forge.build_config()["cpu_targets"][-1]
    monkeypatch.setenv("FORGE_CPU_TARGET", target)
    assert {x.device.name for x in _check.run("cpu").outcomes} == {f"cpu ({target})"}
    assert os.environ["FORGE_CPU_TARGET"] == target


def test_progress_goes_to_standard_error_where_tqdm_is_there(few, monkeypatch, capsys):
    seen = {"steps": 0}

    class Bar:
        def __init__(self, total, file, **_):
            seen.update(total=total, file=file)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self):
            seen["steps"] += 1

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    status, _ = checked(capsys)  # standard output is JSON and nothing else
    assert status == 0
    assert seen["steps"] == seen["total"] > 0
    assert seen["file"] is sys.stderr
    monkeypatch.setitem(sys.modules, "tqdm", None)
    status, _ = checked(capsys)
    assert status == 0
