"""The check against float64 that every implementation passes before it is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner
from forge._check.halves import UNITS, share_of
from forge._check.plain import Inputs, evaluate

TOLERANCE = 1e-5  # of the largest value; float32 over these lengths stays well below
MOST_ROUNDINGS = 4  # of the largest value, in half precision, where nobody promises one
SPOT_ROWS = 5


class WrongAnswerError(Exception):
    """An implementation computes something else than attention."""


@dataclass(frozen=True)
class Comparison:
    """How near a runner's answers to a case must be."""

    dtype: str
    rounds_once: bool
    where: str

    def error(self, name: str, got: Array, want: Array) -> float:
        """Return the largest error as a share of the largest value.

        Raises:
            WrongAnswerError: it is too large.
        """
        if got.shape != want.shape:
            raise WrongAnswerError(f"{name} has shape {got.shape}, not {want.shape} ({self.where})")
        largest = max(float(np.abs(want).max()), 1e-30)
        errors = np.abs(got - want)
        error = float(errors.max()) / largest
        if not self._is_near(errors, want, largest):
            raise WrongAnswerError(
                f"{name} is off by {error:.1e} of its largest value ({self.where})"
            )
        return error

    def _is_near(self, errors: Array, want: Array, largest: float) -> bool:
        tolerance = TOLERANCE * largest
        if self.rounds_once or self.dtype not in UNITS:
            shares, _ = share_of(errors, want, tolerance, self.dtype)
            return bool((shares <= 1).all())
        roundings = MOST_ROUNDINGS * UNITS[self.dtype][0] * largest
        return bool((errors <= roundings + tolerance).all())


def check_whole(runner: Runner, case: Case, inputs: Inputs) -> float:
    """Compare everything with float64; the largest relative error. For small cases."""
    answers = evaluate(inputs)
    compare = Comparison(case.dtype, runner.rounds_once, case.label)
    worst = compare.error("out", runner.as_output(runner.forward()), answers["out"])
    if runner.backward is not None and not case.is_decode:
        gradients = runner.as_gradients(runner.backward())
        for name, gradient in zip(case.gradients, gradients, strict=True):
            worst = max(worst, compare.error(name, gradient, answers[name]))
    return worst


def check_rows(runner: Runner, case: Case, inputs: Inputs) -> float:
    """Compare some rows of out and dq, which need no other row, on the problem that is timed."""
    out = runner.as_output(runner.forward())
    dq = None
    if runner.backward is not None and not case.is_decode:
        dq = runner.as_gradients(runner.backward())[0]
    compare = Comparison(case.dtype, runner.rounds_once, case.label)
    worst, b = 0.0, case.B - 1
    rows = np.unique(np.linspace(0, case.Tq - 1, SPOT_ROWS).astype(int))
    for h in {0, case.H - 1}:
        # Each row is a sequence of one query, beside the same keys.
        group = h * case.Hkv // case.H
        q, dout = (x[b, rows, h][:, None, None] for x in (inputs.q, inputs.dout))
        k, v = (
            np.broadcast_to(x[b, :, group : group + 1], (len(rows), case.Tk, 1, x.shape[3]))
            for x in (inputs.k, inputs.v)
        )
        options = _options_of_rows(case, inputs, (b, h), rows)
        answers = evaluate(Inputs(q, k, v, dout, options=options))
        worst = max(worst, compare.error("out", out[b, rows, h], answers["out"][:, 0, 0]))
        if dq is not None:
            worst = max(worst, compare.error("dq", dq[b, rows, h], answers["dq"][:, 0, 0]))
    return worst


def _options_of_rows(
    case: Case, inputs: Inputs, head: tuple[int, int], rows: Array
) -> dict[str, Any]:
    """Return the options under which some rows of head (b, h) are sequences of one query."""
    options = dict(inputs.options)
    b, h = head

    def each(name: str, default: int) -> Array:
        values = np.broadcast_to(options.get(name, default), (case.B, case.Tq))
        return np.asarray(values[b, rows])

    if case.packed:
        options["key_start"], options["key_end"] = each("key_start", 0), each("key_end", case.Tk)
    options["query_offset"] = rows + each("query_offset", case.Tk - case.Tq)
    for name in {"bias", "mask"} & options.keys():
        pairs = np.broadcast_to(options[name], (case.B, case.H, case.Tq, case.Tk))
        options[name] = pairs[b, h, rows][:, None, None]
    if "sinks" in options:
        options["sinks"] = options["sinks"][h : h + 1]
    return options
