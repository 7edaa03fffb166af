"""What the last call of this thread ran on, and what became of its arrays."""

from __future__ import annotations

import threading
from typing import Any

from forge import _forge
from forge._arrays import IN_PLACE

_state = threading.local()


def record(ran: dict[str, Any], requested_kernel: str, arrays: dict[str, str]) -> None:
    """Keep the compiled module's report of a call, with what happened to each input."""
    used = dict(arrays)
    for name, how in ran["arrays"].items():
        if arrays.get(name, IN_PLACE) == IN_PLACE:  # a copy was one before it got to the device
            used[name] = how
    _state.last = {**ran, "requested_kernel": requested_kernel, "arrays": used}


def record_call(ran: dict[str, Any], requested_kernel: str, arrays: dict[str, str]) -> None:
    """Keep the report of a whole call, arrays by the names that its caller knows."""
    names = {"o": "out", "p": "probs"}
    used = {names.get(name, name): how for name, how in ran["arrays"].items()}
    record({**ran, "arrays": used}, requested_kernel, arrays)


def last_run() -> dict[str, Any] | None:
    """Say what the last forge call of this thread ran on; None before the first.

    Returns:
        A dict with ``backend``, ``kernel`` (the family that ran), ``requested_kernel``,
        ``cpu_target`` (the instruction set) and ``threads`` (the most it could use) of the CPU,
        ``device`` (its name) and ``library`` (``"metallib"``, or ``"source: <why>"``) of a GPU,
        ``passed_over`` (backends that were asked first and could not serve, with their reasons) and
        ``arrays``: for each input ``"in place"`` or ``"copied: <reason>"``; on a GPU, for each
        input and output, ``"wrapped"`` (its memory is the GPU's buffer) or ``"copied: <reason>"``.
    """
    last = _forge.last_plain_run() or getattr(_state, "last", None)
    if last is None:
        return None
    return {key: dict(value) if isinstance(value, dict) else value for key, value in last.items()}
