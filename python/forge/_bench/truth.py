"""Answers in float64, and the check that every implementation passes before it is timed."""

from __future__ import annotations

import numpy as np

from forge._bench.cases import Array, Case, Inputs
from forge._bench.peers import Runner

TOLERANCE = 1e-5  # of the largest value; float32 over these lengths stays well below
SPOT_ROWS = 5


class WrongAnswerError(Exception):
    """An implementation computes something else than attention."""


def _scores(case: Case, q: Array, k: Array, mask: Array | None) -> tuple[Array, Array | None]:
    """Probabilities and, with softcap, the tanh of the scores; over the last two axes."""
    scores = q @ k.swapaxes(-1, -2) * case.scale
    tanh = None
    if case.softcap:
        tanh = np.tanh(scores / case.softcap)
        scores = case.softcap * tanh
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True), tanh


def _score_gradient(case: Case, p: Array, tanh: Array | None, do: Array, v: Array) -> Array:
    dp = do @ v.swapaxes(-1, -2)
    ds: Array = p * (dp - (p * dp).sum(-1, keepdims=True)) * case.scale
    return ds if tanh is None else np.asarray(ds * (1 - tanh**2))


def solve(case: Case, inputs: Inputs) -> dict[str, Array]:
    """Output and gradients of the whole problem, in float64."""
    group = case.H // case.Hkv

    def heads(x: Array, repeat: int = 1) -> Array:
        return np.asarray(x.astype(np.float64).transpose(0, 2, 1, 3).repeat(repeat, axis=1))

    def grouped(x: Array) -> Array:
        return np.asarray(x.reshape(case.B, case.Hkv, group, case.Tk, case.hd).sum(2))

    q, do = heads(inputs.q), heads(inputs.dout)
    k, v = heads(inputs.k, group), heads(inputs.v, group)
    p, tanh = _scores(case, q, k, case.mask())
    ds = _score_gradient(case, p, tanh, do, v)
    answers = {
        "out": p @ v,
        "dq": ds @ k,
        "dk": grouped(ds.swapaxes(-1, -2) @ q),
        "dv": grouped(p.swapaxes(-1, -2) @ do),
    }
    return {name: x.transpose(0, 2, 1, 3) for name, x in answers.items()}


def _compare(name: str, got: Array, want: Array, where: str) -> float:
    if got.shape != want.shape:
        raise WrongAnswerError(f"{name} has shape {got.shape}, not {want.shape} ({where})")
    error = float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))
    if not error <= TOLERANCE:
        raise WrongAnswerError(f"{name} is off by {error:.1e} of its largest value ({where})")
    return error


def check_whole(runner: Runner, case: Case, inputs: Inputs) -> float:
    """Compare everything with float64; the largest relative error. For small cases."""
    answers = solve(case, inputs)
    worst = _compare("out", runner.as_output(runner.forward()), answers["out"], case.label)
    if runner.backward is not None and not case.is_decode:
        gradients = runner.as_gradients(runner.backward())
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            worst = max(worst, _compare(name, gradient, answers[name], case.label))
    return worst


def check_rows(runner: Runner, case: Case, inputs: Inputs) -> float:
    """Compare some rows of out and dq, which need no other row, on the problem that is timed."""
    out = runner.as_output(runner.forward())
    dq = None
    if runner.backward is not None and not case.is_decode:
        dq = runner.as_gradients(runner.backward())[0]
    mask, worst, b = case.mask(), 0.0, case.B - 1
    rows = np.unique(np.linspace(0, case.Tq - 1, SPOT_ROWS).astype(int))
    for h in {0, case.H - 1}:
        q, do, k, v = (
            x[b, :, head].astype(np.float64)
            for x, head in (
                (inputs.q[:, rows], h),
                (inputs.dout[:, rows], h),
                (inputs.k, h * case.Hkv // case.H),
                (inputs.v, h * case.Hkv // case.H),
            )
        )
        p, tanh = _scores(case, q, k, None if mask is None else mask[rows])
        worst = max(worst, _compare("out", out[b, rows, h], p @ v, case.label))
        if dq is not None:
            ds = _score_gradient(case, p, tanh, do, v)
            worst = max(worst, _compare("dq", dq[b, rows, h], ds @ k, case.label))
    return worst
