"""python -m forge as a command: what it prints, and its exit status."""

import json
import os
import subprocess
import sys

import forge
import numpy as np
import pytest
from forge._check.problems import HALF_PROBLEMS, PROBLEMS


def command(*arguments, folder):
    """The real command, away from the source tree."""
    return subprocess.run(
        [sys.executable, "-m", "forge", *arguments],
        capture_output=True, text=True, cwd=folder, timeout=60, check=False,
    )  # fmt: skip


def test_info_says_what_is_here_and_what_is_not(tmp_path):
    done = command("info", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"forge: {forge.__version__}" in done.stdout
    assert f"numpy: {np.__version__}" in done.stdout
    for name, state in forge.backends().items():
        said = "usable, " if state["ok"] else " ".join(f"no, {state['reason']}".split())
        assert f"- backend {name}: {said}" in done.stdout
    for target in forge.build_config()["cpu_targets"]:
        assert target in done.stdout


def test_info_as_json(tmp_path):
    about = json.loads(command("info", "--json", folder=tmp_path).stdout)
    assert about["backends"] == forge.backends()
    assert about["build"] == forge.build_config()
    assert set(about["runs_on"]) == {b for b, s in forge.backends().items() if s["ok"]}
    target = os.environ.get("FORGE_CPU_TARGET", forge.build_config()["cpu_targets"][0])
    assert about["runs_on"]["cpu"] == {"cpu_target": target}
    assert {"forge", "python", "numpy", "system", "machine", "processor", "threads"} <= set(about)
    assert about["environment"] == {k: v for k, v in os.environ.items() if k.startswith("FORGE_")}


def test_check_passes_here_on_all_there_is_within_a_minute(tmp_path):
    done = command("check", "--json", folder=tmp_path)  # 60 s at most
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["verdict"].startswith("OK: ")
    ran = {(x["device"].split()[0], x["kernel"]) for x in report["checks"] if not x["refused"]}
    assert {("cpu", "fused"), ("cpu", "materialized"), ("cpu", "attention_bwd_dkv_f32")} <= ran
    assert {backend for backend, _ in ran} == {b for b, s in forge.backends().items() if s["ok"]}
    target = os.environ.get("FORGE_CPU_TARGET")
    targets = [target] if target else forge.build_config()["cpu_targets"]
    for name in targets:
        problems = {
            x["problem"]
            for x in report["checks"]
            if x["device"] == f"cpu ({name})" and x["kernel"] == "fused"
        }
        assert problems == {problem.name for problem in (*PROBLEMS, *HALF_PROBLEMS)}
    for outcome in report["checks"]:
        assert outcome["refused"] or (outcome["ok"] and outcome["same_bits"] and outcome["errors"])
        for name, held in outcome["errors"].items():
            assert held["error"] <= held["bound"], (outcome, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["chekc"], "invalid choice: 'chekc'"),
        (["check", "--backend", "cuda"], "invalid choice: 'cuda'"),
        (["info", "--yaml"], "unrecognized arguments: --yaml"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments, message, tmp_path):
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_tells_of_the_commands(tmp_path):
    done = command("--help", folder=tmp_path)
    assert done.returncode == 0
    assert {"info", "check"} <= set(done.stdout.split())
    assert "bug report" in " ".join(command("check", "--help", folder=tmp_path).stdout.split())
    assert command("--version", folder=tmp_path).stdout == f"forge {forge.__version__}\n"
