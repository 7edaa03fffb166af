"""Refuses a second interpreter of the process before NumPy is imported, which hangs there.

Raises:
    ImportError: in a sub-interpreter.
"""

from __future__ import annotations

import importlib


def in_main_interpreter() -> bool:
    """Whether this is the interpreter that the process began with."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # from Python 3.13 on; before
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        current: object = interpreters.get_current()
        return bool(current == interpreters.get_main())
    return True  # a Python that has no others


if not in_main_interpreter():
    raise ImportError(
        "forge must be imported in the main interpreter of a process, got a sub-interpreter, where "
        "NumPy does not work; use threads or processes instead"
    )
