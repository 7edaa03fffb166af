"""The benchmark commands on one tiny shape: what they say, and that they refuse wrong answers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import forge
import numpy as np
import pytest
from forge._bench import command
from forge._bench.cases import CASES, Case, parse_shape, variants
from forge._bench.measure import Measured
from forge._bench.peers import PEERS, Unsupported
from forge._bench.report import caveats, of_float32
from forge._bench.runs import fastest_other, lead, make_record, peer_and_dtype
from forge._bench.truth import WrongAnswerError, check_rows, check_whole
from forge._check.halves import UNITS
from forge._check.plain import evaluate
from oracle import Problem

ROOT = Path(__file__).parents[2]


TINY = ("--peers", "numpy,forge", "--shapes", "1x24x4x2x8", "--threads", "1")


def call(command, *arguments, without=(), hidden_in=None):
    """A command line in a process of its own, where some packages are missing."""
    hidden = []
    for package in without:
        (hidden_in / "hidden").mkdir(exist_ok=True)
        (hidden_in / "hidden" / f"{package}.py").write_text("raise ImportError('hidden')")
        hidden = [str(hidden_in / "hidden")]
    return subprocess.run(
        [sys.executable, "-m", command, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(hidden), "MPLBACKEND": "Agg"},
    )


def benchmark(folder, *arguments, **options):
    return call("benchmarks", "--out", folder, *arguments, **options)


def need(*modules):
    for module in modules:
        pytest.importorskip(module, reason=f"make bench installs {module}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The files of one quick run."""
    need("matplotlib", "tqdm")
    folder = tmp_path_factory.mktemp("results")
    run = benchmark(folder, "--quick", *TINY)
    assert run.returncode == 0, run.stderr
    files = {path.suffix: path for path in folder.iterdir()}
    assert set(files) == {".json", ".md", ".png"}
    assert all(str(path) in run.stdout for path in files.values())
    assert "1x24x4x2x8 causal forward" in run.stderr + run.stdout
    return files


def test_the_json_holds_samples_and_shares(results):
    data = json.loads(results[".json"].read_text())
    assert data["left_out"] == []
    assert data["settings"]["threads"] == 1
    assert data["versions"]["forge-attention"] == forge.__version__
    assert data["versions"]["numpy"] == np.__version__
    records = {(r["causal"], r["mode"]): r for r in data["records"]}
    assert len(records) == len(data["records"]) == 4
    for (causal, mode), record in records.items():
        pairs = 24 * 25 // 2 if causal else 24 * 24
        flops = {"forward": 4, "backward": 10}[mode] * 4 * 8 * pairs
        assert record["gflop"] == pytest.approx(flops / 1e9)
        assert set(record["peers"]) == {"numpy", "forge", "forge bfloat16", "forge float16"}
        for name, row in record["peers"].items():
            assert len(row["samples"]) == 3
            assert row["seconds"] == sorted(row["samples"])[1]
            assert row["gflops"] == pytest.approx(record["gflop"] / row["seconds"])
            unit = UNITS.get(peer_and_dtype(name)[1], (0.0,))[0]
            assert unit / 16 < row["error"] < 1e-5 + unit
            if record["peak_gflops"] is not None:
                assert row["peak_share"] == pytest.approx(row["gflops"] / record["peak_gflops"])
    if data["peak_target"] is not None:
        assert all(len(r["peak_gflops_samples"]) == 3 for r in data["records"])
        assert all(1 < r["peak_gflops"] < 1e5 for r in data["records"])


def test_the_table_shows_every_case_and_peer(results):
    text = results[".md"].read_text()
    for heading in ("Forward, causal", "Forward, full", "Backward, causal", "Backward, full"):
        assert f"## {heading}\n" in text
    assert text.count("| **1x24x4x2x8** B 1, T 24, H 4/2, hd 8 |") == 8  # in half precision too
    assert text.count("| case | peak | numpy | forge | x |") == 4
    half = ["forge bfloat16 | x | of float32", "forge float16 | x | of float32"]
    assert text.count(f"| case | {half[0]} | {half[1]} |") == 4
    assert "## Backward, full, half precision\n" in text
    assert f"]({results['.png'].name})" in text
    assert "- **a quick run: short turns, few rounds**\n" in text


def test_the_picture_shows_the_peers(results):
    colors, image = (
        pytest.importorskip("matplotlib.colors"),
        pytest.importorskip("matplotlib.image"),
    )
    from forge._bench.picture import STYLES

    pixels = image.imread(results[".png"])[..., :3].reshape(-1, 3)
    assert pixels.shape[0] > 500_000
    for peer, shown in (("forge", True), ("numpy", True), ("torch", False)):
        near = np.abs(pixels - np.array(colors.to_rgb(STYLES[peer]["color"]))).max(1) < 0.02
        assert (near.sum() > 100) == shown, peer


def test_a_second_run_of_the_day_keeps_the_first(results, tmp_path):
    data = json.loads(results[".json"].read_text())
    first, second = ({path.name for path in command.write(data, tmp_path)} for _ in range(2))
    assert {name.replace(data["date"], "") for name in first} == {".json", ".md", ".png"}
    assert {name.replace(data["date"], "") for name in second} == {"-2.json", "-2.md", "-2.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "abacus"], "peers must be of forge"),
        (["--shapes", "1x2x3"], "shape must be BxTxHxHkvxhd or one of 128"),
        (["--shapes", "1x8x3x2x8"], "shape must be"),
        (["--modes", "sideways"], "modes must be of forward, backward, got 'sideways'"),
        (["--dtypes", "int8"], "dtypes must be of float32, bfloat16, float16, got 'int8'"),
        (["--dtypes", ""], "dtypes must be of float32, bfloat16, float16, got none"),
        (["--rounds", "0"], "must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("name", ["benchmarks", "forge"])
def test_wrong_options_are_refused(name, arguments, message, tmp_path):
    words = ["bench"] if name == "forge" else []
    run = call(name, *words, "--out", tmp_path / "results", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert not list(tmp_path.iterdir())


def test_a_peer_that_is_not_installed_is_left_out(tmp_path):
    """The others run, and the report says why one did not."""
    arguments = ["--quick", "--peers", "torch,numpy", "--shapes", "1x4x1x1x4", "--modes", "forward"]
    folder = tmp_path / "results"
    run = benchmark(folder, *arguments, without=["torch"], hidden_in=tmp_path)
    assert run.returncode == 0, run.stderr
    data = json.loads(next(folder.glob("*.json")).read_text())
    assert [entry["peer"] for entry in data["left_out"]] == ["torch"]
    assert "not installed" in data["left_out"][0]["reason"]
    assert "- torch: not installed" in next(folder.glob("*.md")).read_text()


@pytest.mark.parametrize("name", CASES)
def test_the_truth_agrees_with_the_oracle(name):
    """Two float64 implementations that share nothing, on a small case with the same features."""
    case = CASES[name].miniature()
    inputs = case.inputs()
    answers = evaluate(inputs)
    exact = Problem(inputs.q, inputs.k, inputs.v, inputs.dout, **inputs.options).exact
    for answer in ("out", *case.gradients):
        np.testing.assert_allclose(answers[answer], getattr(exact, answer), atol=1e-12)


SHAPED = [name for name, case in CASES.items() if case.is_shaped]


@pytest.mark.parametrize("name", [name for name in PEERS if name != "torch-flex"])
@pytest.mark.parametrize("case", ["512g", "2kwin", "2kcap", "decg", *SHAPED])
def test_the_peers_pass_the_checks(name, case):
    small = CASES[case].miniature()
    inputs = small.inputs()
    try:
        runner = PEERS[name].load()(small, inputs, 1)
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert check_whole(runner, small, inputs) < 1e-5
    assert check_rows(runner, small, inputs) < 1e-5


@pytest.mark.parametrize("wrong", ["out", "dq", "dk", "dv"])
def test_a_wrong_answer_is_found(wrong):
    small = CASES["512g"].miniature()
    inputs = small.inputs()
    runner = PEERS["numpy"].load()(small, inputs, 1)
    as_output, as_gradients = runner.as_output, runner.as_gradients

    def moved(x, name):
        return x + (1e-3 * np.abs(x).max() if name == wrong else 0)

    runner.as_output = lambda out: moved(as_output(out), "out")
    runner.as_gradients = lambda gradients: tuple(
        moved(x, name) for x, name in zip(as_gradients(gradients), ("dq", "dk", "dv"), strict=True)
    )
    with pytest.raises(WrongAnswerError, match=f"^{wrong} is off by"):
        check_whole(runner, small, inputs)
    if wrong in ("out", "dq"):
        with pytest.raises(WrongAnswerError, match=f"^{wrong} is off by"):
            check_rows(runner, small, inputs)


def test_work_counts_visible_pairs_only():
    assert Case("", 1, 5, 5, 1, 1, 1).visible_pairs() == 15
    assert Case("", 1, 5, 5, 1, 1, 1, causal=False).visible_pairs() == 25
    assert Case("", 1, 5, 5, 1, 1, 1, window=2).visible_pairs() == 9
    assert Case("", 1, 6, 6, 1, 1, 1, packed=3).visible_pairs() == 9
    small = Case("", 2, 9, 9, 2, 1, 1, causal=False, kept=0.5)
    assert small.visible_pairs() == small.inputs().options["mask"].sum()
    wide = Case("", 1, 4, 4, 1, 1, 6, causal=False, hv=4)
    assert wide.gflop("forward") == pytest.approx(2 * 16 * (6 + 4) / 1e9)
    assert wide.gflop("backward") == pytest.approx(2 * 16 * (3 * 6 + 2 * 4) / 1e9)
    assert CASES["decg"].kv_bytes() == 2 * 4 * 4096 * 8 * 128


def test_masks_are_switched_only_where_that_makes_sense():
    assert [case.causal for case in variants(CASES["1k"], "both")] == [True, False]
    assert [case.causal for case in variants(CASES["1k"], "off")] == [False]
    assert len(variants(CASES["2kwin"], "both")) == len(variants(CASES["dec"], "on")) == 1
    assert variants(CASES["2kcap"], "off") == []
    assert [case.causal for case in variants(CASES["2kmask"], "off")] == [False]
    assert variants(CASES["2kmask"], "on") == []
    assert CASES["dec"].modes(["forward", "backward"]) == ["forward"]
    assert parse_shape("2x16x4x2x8") == Case("2x16x4x2x8", 2, 16, 16, 4, 2, 8)


def test_a_report_says_when_it_should_not_be_quoted():
    settings = {"most_foreign_cpus": 0.15, "quick": False}
    results = {"records": [{"foreign_cpus": 0.1}, {"foreign_cpus": None}], "settings": settings}
    assert caveats(results) == []
    results["records"].append({"foreign_cpus": 0.9})
    assert caveats(results) == ["the machine was not quiet: others used up to 0.9 CPUs"]
    assert caveats({**results, "interrupted": True})[1:] == ["interrupted: some cases are missing"]


def test_the_lead_is_over_the_fastest_other_peer():
    seconds = {"forge": [2.0, 1.0, 9.0], "numpy": [8.0, 8.0, 8.0], "torch": [5.0, 5.0, 7.0]}
    record = make_record(CASES["128"], "forward", Measured(seconds, [100.0], [], [0.0]))
    assert fastest_other(record) == "torch"
    assert lead(record) == 2.5
    share = CASES["128"].gflop("forward") / 2.0 / 100.0
    assert record["peers"]["forge"]["peak_share"] == pytest.approx(share)
    del record["peers"]["numpy"], record["peers"]["torch"]
    assert lead(record) is None


def test_in_half_precision_the_lead_is_over_peers_of_the_same_type():
    seconds = {"forge": 4.0, "torch": 9.0, "forge float16": 2.0, "torch float16": 8.0}
    samples = {name: [value] * 3 for name, value in seconds.items()}
    record = make_record(CASES["decg"], "forward", Measured(samples, [], [2.0], []))
    assert lead(record) == 9.0 / 4
    assert lead(record, "float16") == 4.0
    assert lead(record, "bfloat16") is None
    assert of_float32(record, "float16") == 0.5
    rates = {name: row["kv_gbs"] for name, row in record["peers"].items()}
    assert rates["forge float16"] == rates["forge"] == 4 * rates["torch float16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forge_is_held_to_one_rounding_and_others_to_a_few(dtype):
    small = replace(CASES["512g"].miniature(), dtype=dtype)
    inputs = small.inputs()
    runner = PEERS["forge"].load()(small, inputs, 1)
    assert check_whole(runner, small, inputs) < UNITS[dtype][0]
    assert check_rows(runner, small, inputs) < UNITS[dtype][0]
    as_output, unit = runner.as_output, UNITS[dtype][0]
    runner.as_output = lambda out: as_output(out) * np.float32(1 + 1.5 * unit)
    for check in (check_whole, check_rows):
        with pytest.raises(WrongAnswerError, match=r"^out is off by"):
            check(runner, small, inputs)
    runner.rounds_once = False
    check_whole(runner, small, inputs)
    runner.as_output = lambda out: as_output(out) * np.float32(1 + 6 * unit)
    with pytest.raises(WrongAnswerError, match=r"^out is off by"):
        check_whole(runner, small, inputs)


@pytest.mark.parametrize(
    ("peer", "dtype"),
    [(name, dtype) for name, peer in PEERS.items() for dtype in peer.dtypes if dtype != "float32"],
)
@pytest.mark.parametrize("case", ["128", "2kwin", "2kcap", "decg"])
def test_the_peers_in_half_precision_pass_the_checks(peer, dtype, case):
    small = replace(CASES[case].miniature(), dtype=dtype)
    inputs = small.inputs()
    try:
        runner = PEERS[peer].load()(small, inputs, 1)
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert 0 < check_whole(runner, small, inputs) < 4 * UNITS[dtype][0] + 1e-5
    assert 0 < check_rows(runner, small, inputs) < 4 * UNITS[dtype][0] + 1e-5


def test_forge_bench_prints_a_table():
    run = call("forge", "bench", "--rounds", "2", *TINY)
    assert run.returncode == 0, run.stderr
    assert "## Forward, causal\n" in run.stdout
    assert "| case | numpy | forge | x |" in run.stdout  # no limit is measured, none is shown
    assert "peak" not in run.stdout
    assert "1x24x4x2x8 causal backward: " in run.stderr


def test_forge_bench_prints_json_and_nothing_else():
    few = ("--modes", "forward", "--dtypes", "float32,float16")
    run = call("forge", "bench", "--json", "--rounds", "2", *few, *TINY)
    assert run.returncode == 0, run.stderr
    data = json.loads(run.stdout)
    [record] = data["records"]
    assert set(record["peers"]) == {"numpy", "forge", "forge float16"}
    assert record["peak_gflops"] is None
    assert data["settings"]["threads"] == 1


def test_forge_bench_does_without_tqdm_and_matplotlib(tmp_path):
    out = tmp_path / "results"
    run = call(
        "forge", "bench", "--out", out, "--rounds", "1", *TINY,
        without=["tqdm", "matplotlib"], hidden_in=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert {path.suffix for path in out.iterdir()} == {".json", ".md"}
    assert "![" not in next(out.glob("*.md")).read_text()


def test_forge_bench_says_when_nothing_could_be_measured(tmp_path):
    run = call(
        "forge", "bench", "--peers", "torch", "--shapes", "1x4x1x1x4",
        without=["torch"], hidden_in=tmp_path,
    )  # fmt: skip
    assert run.returncode == 1
    assert "- torch: not installed" in run.stdout


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    run = call("forge", "bench", "--out", tmp_path / "file", *TINY)
    assert run.returncode == 2
    assert "file" in run.stderr.splitlines()[-1]


def test_forge_that_was_left_out_is_a_failure():
    left_out = {"peer": "forge", "case": "1k", "reason": "dq is off by 1e-2"}
    assert command.exit_status({"records": [1], "left_out": [left_out]}) == 1
    half = {**left_out, "peer": "forge bfloat16"}
    assert command.exit_status({"records": [1], "left_out": [half]}) == 1
    assert command.exit_status({"records": [1], "left_out": [{**left_out, "peer": "jax"}]}) == 0
    assert command.exit_status({"records": [1], "left_out": [], "interrupted": True}) == 130


def test_forge_alone_does_not_import_the_benchmark():
    code = (
        "import sys, forge; sys.exit(any(name.startswith('forge._bench') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
