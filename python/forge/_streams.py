"""Attention in a framework's own Metal command stream: what the frameworks share."""

from __future__ import annotations

from typing import Literal

import numpy as np

from forge import _forge, _run
from forge._options import MaskAndScale, Sizes, backend_name, compiled_options

Call = Literal["forward", "backward"]


def stream_options(
    given: MaskAndScale, sizes: Sizes, kernel: str, backend: str | None, where: str
) -> _forge.Options:
    """Check the options of a call whose arrays lie on the GPU; ``where`` says where, in errors.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option out of its range, or a kernel or backend that does not run there.
    """
    if kernel != "fused":
        raise ValueError(f"kernel must be 'fused' for {where}, got {kernel!r}")
    name = backend_name(backend)
    if name not in ("", "metal"):
        raise ValueError(
            f"{'FORGE_BACKEND' if backend is None else 'backend'} must be 'metal' for {where}, "
            f"got {name!r}"
        )
    return compiled_options(given, sizes, np.dtype(np.float32), kernel, "metal")


def planned(
    call: Call, arrays: dict[str, _forge.Bound], options: _forge.Options, where: str, *, cut: bool
) -> _forge.StreamPlan:
    """Return what to dispatch; see the compiled module's ``plan_stream``.

    Raises:
        ValueError: the kernels do not take these arrays, or this build has none.
    """
    try:
        return _forge.plan_stream(call, arrays, options, cut)
    except _forge.NotServedError as error:
        raise ValueError(f"kernel must be one that serves {where}, got 'fused': {error}") from error


def record(stream: str) -> None:
    """Let last_run() tell of a call that was encoded in that stream."""
    ran = {
        "backend": "metal",
        "kernel": "fused",
        "cpu_target": "",
        "threads": 1,
        "device": stream,
        "library": "source: compiled by the framework",
        "arrays": {},
        "passed_over": {},
    }
    _run.record(ran, "fused", {})
