"""Packages that forge works with and does not need: tests skip without them, unless they must run.

With FORGE_REQUIRE_TORCH set, as in continuous integration, a missing package is a failure.
"""

import importlib
import os

import pytest


def need(module):
    """Import `module`, or skip the calling test module."""
    if os.environ.get("FORGE_REQUIRE_TORCH"):
        return importlib.import_module(module)
    reason = f"{module} is not installed: pip install -r tests/requirements-torch.txt"
    return pytest.importorskip(module, reason=reason)
