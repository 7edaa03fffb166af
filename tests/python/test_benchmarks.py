"""The benchmark command on one tiny shape: what it writes, and that it refuses wrong answers."""

import json
import subprocess
import sys
from pathlib import Path

import forge
import numpy as np
import pytest
from oracle import Problem

from benchmarks.cases import CASES, Case, Inputs, parse_shape, variants
from benchmarks.measure import Measured
from benchmarks.peers import PEERS
from benchmarks.report import caveats
from benchmarks.runs import fastest_other, lead, make_record
from benchmarks.truth import WrongAnswerError, check_rows, check_whole, solve

ROOT = Path(__file__).parents[2]


def benchmark(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--out", str(folder), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def need_what_draws():
    """The command needs them; the rest of the benchmarks does not."""
    for module in ("matplotlib", "tqdm"):
        pytest.importorskip(module, reason=f"make bench installs {module}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The files of one quick run."""
    need_what_draws()
    folder = tmp_path_factory.mktemp("results")
    run = benchmark(
        folder, "--quick", "--peers", "numpy,forge", "--shapes", "1x24x4x2x8", "--threads", "1"
    )
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
        assert set(record["peers"]) == {"numpy", "forge"}
        for row in record["peers"].values():
            assert len(row["samples"]) == 3
            assert row["seconds"] == sorted(row["samples"])[1]
            assert row["gflops"] == pytest.approx(record["gflop"] / row["seconds"])
            assert row["error"] < 1e-5
            if record["peak_gflops"] is not None:
                assert row["peak_share"] == pytest.approx(row["gflops"] / record["peak_gflops"])
    if data["peak_target"] is not None:
        assert all(len(r["peak_gflops_samples"]) == 3 for r in data["records"])
        assert all(1 < r["peak_gflops"] < 1e5 for r in data["records"])


def test_the_table_shows_every_case_and_peer(results):
    text = results[".md"].read_text()
    for heading in ("Forward, causal", "Forward, full", "Backward, causal", "Backward, full"):
        assert f"## {heading}\n" in text
    assert text.count("| **1x24x4x2x8** B 1, T 24, H 4/2, hd 8 |") == 4
    assert text.count("| case | peak | numpy | forge | x |") == 4
    assert f"]({results['.png'].name})" in text
    assert "- **a quick run: short turns, few rounds**\n" in text


def test_the_picture_shows_the_peers(results):
    colors, image = (
        pytest.importorskip("matplotlib.colors"),
        pytest.importorskip("matplotlib.image"),
    )
    from benchmarks.picture import STYLES

    pixels = image.imread(results[".png"])[..., :3].reshape(-1, 3)
    assert pixels.shape[0] > 500_000
    for peer, shown in (("forge", True), ("numpy", True), ("torch", False)):
        near = np.abs(pixels - np.array(colors.to_rgb(STYLES[peer]["color"]))).max(1) < 0.02
        assert (near.sum() > 100) == shown, peer


def test_a_second_run_of_the_day_keeps_the_first(tmp_path):
    from benchmarks.__main__ import free_stem

    assert free_stem(tmp_path, "2026-01-31").name == "2026-01-31"
    (tmp_path / "2026-01-31.json").touch()
    assert free_stem(tmp_path, "2026-01-31").name == "2026-01-31-2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "abacus"], "peers must be of forge"),
        (["--shapes", "1x2x3"], "shape must be BxTxHxHkvxhd or one of 128"),
        (["--shapes", "1x8x3x2x8"], "shape must be"),
        (["--modes", "sideways"], "--modes must be of forward, backward"),
        (["--rounds", "0"], "must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(arguments, message, tmp_path):
    run = benchmark(tmp_path, *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert not list(tmp_path.iterdir())


def test_a_peer_that_is_not_installed_is_left_out(tmp_path):
    """The others run, and the report says why one did not."""
    need_what_draws()
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from benchmarks.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = "--quick --peers torch,numpy --shapes 1x4x1x1x4 --modes forward"
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments.split(), "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    data = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [entry["peer"] for entry in data["left_out"]] == ["torch"]
    assert "not installed" in data["left_out"][0]["reason"]
    assert "- torch: not installed" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.parametrize("name", CASES)
def test_the_truth_agrees_with_the_oracle(name):
    """Two float64 implementations that share nothing, on a small case with the same features."""
    case = CASES[name].miniature()
    inputs = Inputs.random(case)
    answers = solve(case, inputs)
    exact = Problem(
        inputs.q, inputs.k, inputs.v, inputs.dout,
        causal=case.causal, window=case.window, softcap=case.softcap,
    ).exact  # fmt: skip
    for answer in ("out", "dq", "dk", "dv"):
        np.testing.assert_allclose(answers[answer], getattr(exact, answer), atol=1e-12)


@pytest.mark.parametrize("name", ["numpy", "forge"])
@pytest.mark.parametrize("case", ["512g", "2kwin", "2kcap", "decg"])
def test_the_peers_pass_the_checks(name, case):
    small = CASES[case].miniature()
    inputs = Inputs.random(small)
    runner = PEERS[name].load()(small, inputs, 1)
    assert check_whole(runner, small, inputs) < 1e-5
    assert check_rows(runner, small, inputs) < 1e-5


@pytest.mark.parametrize("wrong", ["out", "dq", "dk", "dv"])
def test_a_wrong_answer_is_found(wrong):
    small = CASES["512g"].miniature()
    inputs = Inputs.random(small)
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
    for case in (*CASES.values(), Case("", 1, 3, 7, 1, 1, 1), Case("", 1, 9, 9, 1, 1, 1, window=4)):
        mask = case.mask()
        seen = case.Tq * case.Tk if mask is None else int(mask.sum())
        assert case.visible_pairs() == seen
    assert CASES["decg"].kv_bytes() == 2 * 4 * 4096 * 8 * 128


def test_masks_are_switched_only_where_that_makes_sense():
    assert [case.causal for case in variants(CASES["1k"], "both")] == [True, False]
    assert [case.causal for case in variants(CASES["1k"], "off")] == [False]
    assert len(variants(CASES["2kwin"], "both")) == len(variants(CASES["dec"], "on")) == 1
    assert variants(CASES["2kcap"], "off") == []
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
