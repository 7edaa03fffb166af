"""forge: exact attention, forward and backward, for NumPy arrays."""

from __future__ import annotations

import os as _os
from typing import Any

from forge import _interpreter as _interpreter  # first: it refuses where the others would hang

# isort: split
from forge import _forge, kernels, plot
from forge._arrays import as_int as _as_int
from forge._arrays import empty
from forge._attention import attention, attention_backward, attention_forward
from forge._merge import merge, packed
from forge._run import last_run
from forge._saved import Saved

__all__ = [
    "Saved",
    "attention",
    "attention_backward",
    "attention_forward",
    "backends",
    "build_config",
    "empty",
    "kernels",
    "last_run",
    "merge",
    "packed",
    "plot",
    "set_num_threads",
]


def backends() -> dict[str, dict[str, Any]]:
    """Say which backends there are, in order of preference.

    Returns:
        ``{name: {"ok": bool, "reason": str}}``; the reason says why a backend does not serve.
    """
    return _forge.backends()


def build_config() -> dict[str, Any]:
    """Say how the compiled module was built, and which CPU targets this machine can run."""
    return _forge.build_config()


def set_num_threads(n: int) -> None:
    """Set how many threads later calls use, the calling one included. Results do not depend on it.

    By default FORGE_NUM_THREADS, else the CPUs that the process may use (affinity, cgroup quota).

    Raises:
        TypeError: not an int.
        ValueError: below 1 or above 1024.
    """
    threads = _as_int("n", n)
    if not 1 <= threads <= 1024:
        raise ValueError(f"n must be within [1, 1024], got {threads}")
    _forge.set_num_threads(threads)


def _threads_from_environment() -> None:
    text = _os.environ.get("FORGE_NUM_THREADS", "")
    if not text:
        return
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError(f"FORGE_NUM_THREADS must be an int within [1, 1024], got {text!r}")
    _forge.set_num_threads(int(text))


__version__: str = _forge.build_config()["version"]
_threads_from_environment()
