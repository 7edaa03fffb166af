"""The demo does its job on a few steps, and leaves a picture behind when it is interrupted."""

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import forge
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_char_lm.py"

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytest.importorskip("tqdm", reason="the demo shows its progress with tqdm")


def environment():
    # Two pools of BLAS threads that spin on two cores would take most of the time.
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def demo(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def picture_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("kernel", ["fused", "materialized"])
def test_a_few_steps_check_gradients_learn_and_draw(tmp_path, kernel):
    steps, learnt = (12, 0.5) if forge.build_config()["metal"] != "software" else (2, 0.0)  # slow
    said = demo("--steps", steps, "--seed", 1, "--out", tmp_path, "--kernel", kernel)
    assert "float64" in said
    [losses] = [line for line in said.splitlines() if line.split()[:1] == ["held-out"]]
    before, after = (float(word) for word in losses.replace(",", "").split() if "." in word)
    assert before > 4
    assert after < before - learnt
    assert "plain NumPy" in said
    [picture] = tmp_path.glob("*.png")
    width, height = picture_size(picture)
    assert width > 800
    assert height > 400
    assert picture.stat().st_size > 30_000


def test_an_interrupt_leaves_a_picture_and_a_clear_last_line(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), "--steps", "100000", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as process:
        for line in process.stdout:
            if line.startswith("gradients:"):  # training starts
                process.send_signal(signal.SIGINT)
                break
        said = process.stdout.read()
        assert process.wait(timeout=120) == 130
    assert "interrupted" in said.splitlines()[-1]
    assert len(list(tmp_path.glob("*.png"))) == 1


@pytest.mark.parametrize("arguments", [("--steps", "-1"), ("--kernel", "x"), ("--backend", "x")])
def test_wrong_options_are_refused(tmp_path, arguments):
    assert arguments[0].strip("-") in demo("--out", tmp_path, *arguments, code=2)
