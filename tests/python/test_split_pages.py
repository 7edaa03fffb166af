"""The pages on split sequences: their programs print the same alone and over four ranks, and the
tables of the cost are those that its program prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from optional import need

ROOT = Path(__file__).resolve().parents[2]

if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)

from test_docs import program  # noqa: E402


def printed(command, **more):
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    env |= {"FORGE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        [str(part) for part in command],
        env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_the_tables_of_the_cost_are_what_its_program_prints():
    page = ROOT / "docs" / "distributed-cost.md"
    lines = printed([sys.executable, "-c", program(page)])
    assert len(lines) == 18
    shown = page.read_text().splitlines()
    for line in lines:
        assert {line, f"    {line}", f"**{line}**"} & set(shown), line


def numbers(lines):
    words = " ".join(lines).replace(":", " ").split()
    return [float(word) for word in words if word[-1].isdigit()]


def test_training_prints_the_same_losses_over_four_processes(tmp_path):
    need("torch")
    need("transformers")
    script = tmp_path / "train.py"
    code = program(ROOT / "docs" / "how-to" / "split-a-sequence.md")
    assert "T, steps = 1024, 12\n" in code
    script.write_text(code.replace("T, steps = 1024, 12\n", "T, steps = 256, 3\n"))
    alone = printed([sys.executable, script])
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    split = printed([*launch, script])
    assert len(alone) == len(split) == 3
    assert numbers(split) == pytest.approx(numbers(alone), abs=2e-3)


def test_ranks_of_mpi_print_what_one_prints(tmp_path):
    need("mpi4py")
    from test_mpi import MPIRUN, SETTINGS

    script = tmp_path / "split.py"
    script.write_text(program(ROOT / "docs" / "how-to" / "split-a-sequence-with-mpi.md"))
    alone = printed([sys.executable, script], **SETTINGS)
    split = printed([MPIRUN, "-n", "4", sys.executable, script], **SETTINGS)
    assert len(alone) == len(split) == 2
    assert numbers(split) == pytest.approx(numbers(alone), rel=1e-4)
