"""Do the kernels give right numbers on this machine? What ``python -m forge check`` runs.

Every backend that serves, with both kernel families, forward and backward, against float64 NumPy;
the fused family in half precision too; the materialized kernels also one by one, and bit for bit
against the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import forge
from forge import kernels
from forge._arrays import Array
from forge._check.halves import widened
from forge._check.plain import GRADIENTS, OF_SCORES, Answer, Inputs
from forge._check.problems import (
    HALF_PROBLEMS,
    KERNELS,
    PROBLEMS,
    SINGLE_KERNEL_PROBLEMS,
    Problem,
)
from forge._forge import NotServedError

IN_HALF = "fused, half precision"
SINGLE = "single kernels"
SECTIONS = ("fused", IN_HALF, "materialized", SINGLE)
_SMALLEST = 2.0**-126  # the smallest normal float32: Apple's GPUs flush what is below

Results = dict[str, Array]


@dataclass(frozen=True)
class Device:
    """A backend; for the CPU with one of its targets, each of which has kernels of its own."""

    backend: str
    cpu_target: str | None = None

    @property
    def name(self) -> str:
        return f"{self.backend} ({self.cpu_target})" if self.cpu_target else self.backend

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Make calls use the CPU target."""
        before = os.environ.get("FORGE_CPU_TARGET")
        if self.cpu_target:
            os.environ["FORGE_CPU_TARGET"] = self.cpu_target
        try:
            yield
        finally:
            if before is None:
                os.environ.pop("FORGE_CPU_TARGET", None)
            else:
                os.environ["FORGE_CPU_TARGET"] = before


@dataclass
class Outcome:
    """What became of one problem, or of one single kernel on it."""

    device: Device
    kernel: str
    """A family, or a single kernel."""
    problem: str
    in_half: bool = False
    options: tuple[str, ...] = ()
    """Those of the problem."""
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For each array the error of the element nearest to its bound, and this bound."""
    same_bits: bool | None = None
    """Whether a fused kernel repeats itself, a materialized one repeats the CPU's, in every bit."""
    refused: str = ""
    """Why the backend does not serve this call."""
    fault: str = ""
    """The exception, where the call raised one."""

    @property
    def section(self) -> str:
        """Where a report shows it, one of SECTIONS."""
        if self.in_half:
            return IN_HALF
        return self.kernel if self.kernel in KERNELS else SINGLE

    @property
    def ok(self) -> bool:
        within = all(error <= bound for error, bound in self.errors.values())
        return within and not self.fault and self.same_bits is not False

    @property
    def worst(self) -> float:
        """The largest error as a share of its bound; infinite if there is a NaN."""
        shares = [error / bound if bound else error for error, bound in self.errors.values()]
        return max((math.inf if math.isnan(x) else x for x in shares), default=0)


@dataclass
class Report:
    """All outcomes, and what last_run() said for each device and section."""

    backends: dict[str, dict[str, Any]]
    reference: str
    outcomes: list[Outcome] = field(default_factory=list)
    runs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    """Backends that were asked for and are not there, with the reason."""

    @property
    def ran(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.refused]

    @property
    def ok(self) -> bool:
        return bool(self.ran) and not self.unusable and all(outcome.ok for outcome in self.outcomes)

    @property
    def verdict(self) -> str:
        """One line: OK or FAILED, and what that rests on."""
        failed = [outcome for outcome in self.outcomes if not outcome.ok]
        missing = [f"{name} is not usable: {reason}" for name, reason in self.unusable.items()]
        refused = len(self.outcomes) - len(self.ran)
        parts = [*missing]
        if failed:
            parts.append(f"{len(failed)} of {len(self.ran)} checks failed")
        elif self.ran:
            parts.append(f"{len(self.ran)} checks, {self._worst()}, all bits as promised")
        if refused:
            parts.append(f"{refused} not served")
        return ("OK: " if self.ok else "FAILED: ") + "; ".join(parts)

    def _worst(self) -> str:
        worst = {
            half: max((x.worst for x in self.ran if x.in_half == half), default=0.0)
            for half in (False, True)
        }
        said = f"largest error {worst[False]:.0%} of its bound"
        return said + (f" ({worst[True]:.0%} where it is rounded to a half)" if worst[True] else "")


def _devices(backends: Iterable[str]) -> list[Device]:
    target = os.environ.get("FORGE_CPU_TARGET")
    targets = [target] if target else forge.build_config()["cpu_targets"]
    devices = []
    for backend in backends:
        if backend == "cpu":
            devices += [Device("cpu", name) for name in targets]
        else:
            devices.append(Device(backend))
    return devices


def _reference_device() -> Device:
    """The plainest code that this machine runs."""
    return Device("cpu", forge.build_config()["cpu_targets"][-1])


def _whole(problem: Problem, inputs: Inputs, device: Device, kernel: str) -> Results:
    """Forward and backward through the public functions; results in float32."""
    q, k, v, dout = problem.call_arrays(inputs)
    with device.chosen():
        out, saved = forge.attention_forward(
            q, k, v, **problem.call_options, kernel=kernel, backend=device.backend
        )
        more = [name for name in OF_SCORES if name[1:] in problem.options]
        gradients = forge.attention_backward(
            dout,
            saved,
            dlse=inputs.dlse,
            dbias="dbias" in more or None,
            dsinks="dsinks" in more or None,
        )
    names = (*GRADIENTS, *more)
    results = {"out": out, "lse": saved.lse, **dict(zip(names, gradients, strict=True))}
    results = {name: widened(x, problem.dtype_of(name)) for name, x in results.items()}
    return results if kernel == "fused" else {**results, "p": saved.probs}


def _single_kernels(
    inputs: Inputs, device: Device, given: Results
) -> dict[str, Callable[[], Results]]:
    """The four kernels by name; each takes what comes before it from ``given``, a CPU's results."""
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    options = {**inputs.options, "backend": device.backend}
    of_backward = {name: value for name, value in options.items() if name != "sinks"}
    rows = (q.shape[0], q.shape[2], q.shape[1])

    def fwd() -> Results:
        shapes = ((*q.shape[:3], v.shape[3]), (*rows, k.shape[1]), rows, rows)
        new = [np.empty(shape, np.float32) for shape in shapes]
        out, p, row_max, row_sum = new
        kernels.attention_fwd_f32(q, k, v, out, p, row_max, row_sum, **options)
        with np.errstate(divide="ignore"):
            lse = row_max + np.log(row_sum)
        return {"out": out, "p": p, "lse": lse}

    def bwd_d() -> Results:
        d_row = np.empty(rows, np.float32)
        kernels.attention_bwd_d_f32(
            given["out"], dout, d_row, dlse=inputs.dlse, backend=device.backend
        )
        return {"d_row": d_row}

    def bwd_dq() -> Results:
        dq = np.zeros(q.shape, np.float32)
        kernels.attention_bwd_dq_f32(q, k, v, given["p"], dout, given["d_row"], dq, **of_backward)
        return {"dq": dq}

    def bwd_dkv() -> Results:
        dk, dv = np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)
        read = (q, k, v, given["p"], dout, given["d_row"])
        kernels.attention_bwd_dkv_f32(*read, dk, dv, **of_backward)
        return {"dk": dk, "dv": dv}

    steps = {
        "attention_fwd_f32": fwd,
        "attention_bwd_d_f32": bwd_d,
        "attention_bwd_dq_f32": bwd_dq,
        "attention_bwd_dkv_f32": bwd_dkv,
    }
    return {name: device.chosen()(step) for name, step in steps.items()}


def same_bits(got: Results, want: Results) -> bool:
    """Equal in every bit, but for numbers too small to be normal: a GPU may take them for zeros.

    Sums and products of such numbers are then zeros of either sign.
    """
    for name in got:
        a, b = np.ascontiguousarray(got[name]), np.ascontiguousarray(want[name])
        tiny = (np.abs(a) < _SMALLEST) & (np.abs(b) < _SMALLEST)
        if not ((a.view(np.uint32) == b.view(np.uint32)) | tiny).all():
            return False
    return True


class _Checker:
    """Runs the checks of one problem after the other, and keeps what came out."""

    def __init__(self, report: Report, reference: Device, tick: Callable[[], None]):
        self.report = report
        self.reference = reference
        self.tick = tick

    def measure(
        self,
        outcome: Outcome,
        held: Callable[[str, Array], tuple[float, float]],
        call: Callable[[], Results],
        again: Callable[[], Results],
    ) -> None:
        """Hold what ``call`` gives against float64 and, bit for bit, against ``again``.

        ``held`` gives a result's error and its bound.
        """
        self.report.outcomes.append(outcome)
        try:
            got = call()
            where = (outcome.device.name, outcome.section)
            self.report.runs.setdefault(where, forge.last_run() or {})
            outcome.errors = {name: held(name, value) for name, value in got.items()}
            outcome.same_bits = same_bits(got, again())
        except Exception as error:
            # Any other ValueError is a fault, the problems here being valid.
            if isinstance(error, NotServedError) and forge.backends()[outcome.device.backend]["ok"]:
                outcome.refused = str(error)
            else:
                outcome.fault = _words(error)

    def whole(self, problem: Problem, devices: Iterable[Device]) -> None:
        """Forward and backward, on every device with the families that take the problem."""
        inputs = problem.inputs()
        answer = Answer(inputs)

        @functools.cache
        def reference() -> Results:
            return _whole(problem, inputs, self.reference, "materialized")

        def held(name: str, value: Array, kernel: str) -> tuple[float, float]:
            return answer.worst(name, value, kernel, problem.dtype_of(name))

        for device in devices:
            for kernel in problem.kernels:
                call = functools.partial(_whole, problem, inputs, device, kernel)
                again = call if kernel == "fused" else reference
                outcome = Outcome(
                    device, kernel, problem.name, problem.in_half, tuple(problem.options)
                )
                self.measure(outcome, functools.partial(held, kernel=kernel), call, again)
                self.tick()

    def single(self, problem: Problem, devices: Iterable[Device]) -> None:
        """The four materialized kernels, each on what the reference's earlier ones gave."""
        inputs = problem.inputs()
        answer = Answer(inputs)
        exact: Results = {}
        try:
            for step in _single_kernels(inputs, self.reference, exact).values():
                exact.update(step())
        except Exception as error:
            fault = Outcome(self.reference, SINGLE, problem.name)
            fault.fault = _words(error)
            self.report.outcomes.append(fault)
            return

        def held(name: str, value: Array) -> tuple[float, float]:
            return answer.worst(name, value, "materialized", "float32")

        for device in devices:
            for name, step in _single_kernels(inputs, device, exact).items():
                outcome = Outcome(device, name, problem.name, options=tuple(problem.options))
                self.measure(outcome, held, step, lambda: exact)
            self.tick()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def run(
    only: str | None = None,
    progress: Callable[[int], contextlib.AbstractContextManager[Callable[[], None]]] | None = None,
) -> Report:
    """Check every backend that serves here, or the one named; nothing the kernels do raises.

    Args:
        only: the backend to check, one of ``forge.backends()``.
        progress: given the number of steps, a context manager of a function to call after each.
    """
    backends = forge.backends()
    reference = _reference_device()
    report = Report(backends, reference.name)
    asked = list(backends) if only is None else [only]
    devices = _devices(name for name in asked if backends[name]["ok"])
    if only is not None and not backends[only]["ok"]:
        report.unusable[only] = backends[only]["reason"]
    whole = (*PROBLEMS, *HALF_PROBLEMS)
    calls = sum(len(problem.kernels) for problem in whole)
    steps = len(devices) * (calls + len(SINGLE_KERNEL_PROBLEMS))
    with (progress or _no_progress)(steps) as tick:
        checker = _Checker(report, reference, tick)
        for problem in whole if devices else ():
            checker.whole(problem, devices)
        for problem in SINGLE_KERNEL_PROBLEMS if devices else ():
            checker.single(problem, devices)
    return report


@contextlib.contextmanager
def _no_progress(_steps: int) -> Iterator[Callable[[], None]]:
    yield lambda: None
