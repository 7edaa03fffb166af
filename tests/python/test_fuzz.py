"""The random problems of tests/fuzz.py: a sample of them, and that a wrong result is found."""

import sys
from pathlib import Path

import forge
import pytest

pytest.importorskip("ml_dtypes", reason="the problems have bfloat16 arrays")
sys.path.insert(0, str(Path(__file__).parents[1]))
import fuzz
import random_problems


def test_random_problems_are_within_their_bounds(backend, monkeypatch):
    monkeypatch.setenv("FORGE_CPU_TARGET", "")  # each problem sets its own
    count = 400 if backend == "cpu" else 40
    failed, kinds = fuzz.try_batch(0, count, backend)
    assert failed == []
    assert kinds["fused"] + kinds["materialized"] == count


def test_a_problem_follows_from_its_number(cpu):
    one, other = random_problems.Drawn(7, cpu), random_problems.Drawn(7, cpu)
    assert str(one) == str(other)
    assert all((a.tobytes() == b.tobytes()) for a, b in zip(one.arrays, other.arrays, strict=True))


def test_a_wrong_gradient_is_found(cpu, monkeypatch):
    right = forge.attention_backward

    def wrong(*args, **options):
        gradients = right(*args, **options)
        if gradients[0].size:
            gradients[0].reshape(-1)[-1] += gradients[0].dtype.type(0.5)
        return gradients

    monkeypatch.setenv("FORGE_CPU_TARGET", "")
    monkeypatch.setattr(forge, "attention_backward", wrong)
    failed, _ = fuzz.try_batch(0, 40, cpu)
    assert len(failed) > 20
    assert all("dq: " in message for _, _, message in failed)
