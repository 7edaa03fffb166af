"""python -m benchmarks.models on models of a toy's size: its files, its figures, its caveats."""

import json
from pathlib import Path

import pytest
from optional import need
from scripts import run_script

need("torch")
need("transformers")

ROOT = Path(__file__).parents[2]
SCRIPT = """
sys.path.insert(0, ROOT)
from benchmarks import models

known = models.configurations()
for configuration in known.values():
    for name, value in {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
    }.items():
        if hasattr(configuration, name):
            setattr(configuration, name, value)
models.configurations = lambda: known
sys.exit(models.main(ARGUMENTS))
"""


def run(*arguments, check=True):
    names = f"ROOT, ARGUMENTS = {str(ROOT)!r}, {list(map(str, arguments))!r}\n"
    return run_script(names + SCRIPT, timeout=300, check=check)


def test_the_files_hold_every_job_and_peer(tmp_path):
    sizes = ["--length", "24", "--tokens", "3", "--rounds", "2", "--threads", "1"]
    run(*sizes, "--out", tmp_path)
    data = json.loads(next(tmp_path.glob("*.json")).read_text())
    text = next(tmp_path.glob("*.md")).read_text()
    jobs = ["attention, forward and backward", "training step", "generation of 3 after 24"]
    assert [(r["model"], r["job"]) for r in data["records"]] == [
        (model, job) for model in ("gemma2", "mistral") for job in jobs
    ]
    for record in data["records"]:
        assert set(record["seconds"]) | set(record["left_out"]) == {"eager", "sdpa", "forge"}
        assert {"eager", "forge"} <= set(record["seconds"])
        assert all(len(samples) == 2 for samples in record["samples"].values())
        assert all(seconds > 0 for seconds in record["seconds"].values())
        assert record["errors"]["forge"] < 1e-4
        ratio = record["seconds"]["eager"] / record["seconds"]["forge"]
        assert f"| {ratio:.2f} |" in text
    assert "sdpa" in data["records"][-1]["seconds"]
    assert "- sdpa on gemma2: " in text
    assert "1 threads; batch 1, T = 24; medians of 2 rounds" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "abacus"], "--peers must be of eager, sdpa, forge, got 'abacus'"),
        (["--models", "abacus"], "--models must be of gemma2, mistral, got 'abacus'"),
        (["--rounds", "0"], "--rounds and --threads must be at least 1"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    done = run(*arguments, check=False)
    assert done.returncode == 2
    assert message in done.stderr
