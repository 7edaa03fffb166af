"""What python -m forge check prints: the summary, its table, the ways to ask for more or less."""

import os
import subprocess
import sys

import forge
import pytest
from forge import _cli, _forge
from forge._check import report as _report
from forge._check import run as _check
from forge._check.problems import HALF_PROBLEMS, PROBLEMS

OPTIONS = {name for problem in PROBLEMS for name in problem.options}


def printed(capsys, *arguments):
    status = _cli.main(["check", *arguments])
    return status, capsys.readouterr().out


def cells(line):
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def table(out):
    rows = [cells(line.strip()) for line in out.splitlines() if line.startswith("|")]
    return {row[0].strip(): dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


@pytest.fixture
def few(monkeypatch):
    problems = [p for p in PROBLEMS if p.name in ("no options", "causal, window 17")]
    halves = [p for p in HALF_PROBLEMS if p.name.endswith("16: all together")]
    monkeypatch.setattr(_check, "PROBLEMS", tuple(problems))
    monkeypatch.setattr(_check, "HALF_PROBLEMS", tuple(halves))
    monkeypatch.setattr(_check, "SINGLE_KERNEL_PROBLEMS", tuple(problems[1:]))


def test_the_summary_is_short_and_has_every_option_and_kernel(capsys):
    status, out = printed(capsys)
    lines = out.splitlines()
    assert status == 0
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 200
    assert lines[0] == "# forge check"
    assert lines[-1].startswith("**OK: ")
    assert f"- forge {forge.__version__}, " in out
    errors = table(out)
    assert set(errors) == {_report.NO_OPTION, *OPTIONS}
    for option, row in errors.items():
        assert tuple(row) == _check.SECTIONS
        for section, cell in row.items():
            # The kernels one by one are not run without options.
            assert cell.endswith("%") or (option, section) == (_report.NO_OPTION, _check.SINGLE)
    for name, state in forge.backends().items():
        assert f"- backend {name}: " in out
        assert state["ok"] or state["reason"].split()[0] in out


def test_a_cell_is_the_largest_error_over_its_bound_on_any_device():
    def outcome(device, errors, options=("window",)):
        return _check.Outcome(_check.Device(device), "fused", "x", options=options, errors=errors)

    outcomes = [
        outcome("cpu", {"out": (1.0, 10.0), "dq": (3.0, 10.0)}),
        outcome("metal", {"out": (0.8, 1.0)}),
        outcome("metal", {"out": (0.25, 1.0)}, ("causal", "softcap")),
        outcome("metal", {"out": (2.0, 1.0)}, ()),
    ]
    report = _check.Report({}, "cpu", outcomes)
    assert _report._by_option(report).splitlines()[2:] == [
        f"| {_report.NO_OPTION} | **200%** |",
        "| causal | 25% |",
        "| softcap | 25% |",
        "| window | 80% |",
    ]
    outcomes[1].errors["lse"] = (float("nan"), 1.0)
    assert "| window | **NaN or inf** |" in _report._by_option(report)
    outcomes[1].fault = "RuntimeError: lost"
    assert "| window | **error** |" in _report._by_option(report)


def test_failures_are_named_and_the_summary_stays_short(monkeypatch, capsys):
    real = _forge.run

    def spoiled(which, arrays, *others):
        ran = real(which, arrays, *others)
        if which == "forward":
            arrays["o"][..., :1] += 1
        return ran

    monkeypatch.setattr(_forge, "run", spoiled)
    status, out = printed(capsys, "--backend", "cpu")
    assert status == 1
    assert len(out.splitlines()) <= 30
    assert max(map(len, out.splitlines())) <= 200
    assert "- **FAILED** cpu (" in out
    assert "out beyond its bound" in out
    assert " more: --verbose shows each check" in out
    assert out.splitlines()[-1].startswith("**FAILED: ")


def test_a_backend_that_serves_a_part_says_which_not_and_why(few, monkeypatch, capsys):
    real = _forge.run

    def no_fused(*arguments):
        if arguments[-1]["kernel"] == "fused":
            raise _forge.NotServedError("backend must be one that has fused kernels")
        return real(*arguments)

    monkeypatch.setattr(_forge, "run", no_fused)
    status, out = printed(capsys, "--backend", "cpu")
    assert status == 0
    assert "checks: backend must be one that has fused kernels\n" in out
    assert {row["fused"] for row in table(out).values()} <= {"not served", "-"}
    assert table(out)["window"]["materialized"].endswith("%")


def test_quiet_prints_the_verdict_alone(few, capsys):
    status, out = printed(capsys, "--backend", "cpu", "--quiet")
    assert status == 0
    assert out.startswith("OK: ")
    assert out.count("\n") == 1


@pytest.mark.parametrize("amount", ["--verbose", ""])
def test_no_field_is_empty(few, amount, capsys):
    _, out = printed(capsys, "--backend", "cpu", *filter(None, [amount]))
    for line in out.splitlines():
        assert not line.startswith("|") or all(cell.strip() for cell in line[1:-1].split("|"))
    assert _report.pairs({"a": "", "b": [], "c": {}}) == "a none, b none, c none"


@pytest.mark.parametrize("command", ["info", "check"])
def test_a_pipe_that_closes_is_no_error(command, tmp_path):
    """What `python -m forge check | true` does: the reader is gone before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "forge", command],
        stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 128 + 13
