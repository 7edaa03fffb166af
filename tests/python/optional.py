"""Packages that forge works with and does not need: tests skip without them, unless they must run.

With FORGE_REQUIRE_TORCH (transformers too), FORGE_REQUIRE_JAX, FORGE_REQUIRE_MLX or
FORGE_REQUIRE_MPI (mpi4py) set, as in continuous integration, a missing package is a failure.
"""

import importlib
import os

import forge
import pytest

INSTALLED_WITH = {"transformers": "torch", "mpi4py": "mpi"}


def need(module):
    """Import `module`, or skip the calling test module."""
    fastest = forge.build_config()["cpu_targets"][0]
    if os.environ.get("FORGE_CPU_TARGET", fastest) != fastest:
        reason = f"{module} sees no CPU targets: tested on one, {fastest}"
        pytest.skip(reason, allow_module_level=True)
    package = module.partition(".")[0]
    group = INSTALLED_WITH.get(package, package)
    if os.environ.get(f"FORGE_REQUIRE_{group.upper()}"):
        return importlib.import_module(module)
    reason = f"{package} is not installed: pip install -r tests/requirements-{group}.txt"
    return pytest.importorskip(module, reason=reason)
