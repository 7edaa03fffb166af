"""What the last call of this thread ran on, and what became of its arrays."""

from __future__ import annotations

import threading
from typing import Any

_state = threading.local()


def record(ran: dict[str, Any], requested_kernel: str, arrays: dict[str, str]) -> None:
    """Keep the compiled module's report of a call, with what happened to each input."""
    _state.last = {**ran, "requested_kernel": requested_kernel, "arrays": arrays}


def last_run() -> dict[str, Any] | None:
    """Say what the last forge call of this thread ran on; None before the first.

    Returns:
        A dict with ``backend``, ``kernel`` (the family that ran), ``requested_kernel``,
        ``cpu_target`` (the instruction set), ``threads`` (the most it could use),
        ``passed_over`` (backends that were asked first and could not serve, with their reasons) and
        ``arrays`` (for each input ``"in place"`` or ``"copied: <reason>"``).
    """
    last = getattr(_state, "last", None)
    if last is None:
        return None
    return {key: dict(value) if isinstance(value, dict) else value for key, value in last.items()}
