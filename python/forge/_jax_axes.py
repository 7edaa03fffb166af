"""Arrays and callbacks within what JAX traces: the axes of a mesh, functions on the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax

from forge._arrays import Array
from forge._dtypes import HALF, wrong_dtype


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Axes of a jax.shard_map's mesh along which an array differs from device to device."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        aval = jax.typeof(x)
        known = getattr(aval, "manual_axis_type", None)  # JAX 0.10; before, and from 0.7 on: vma
        axes |= frozenset(getattr(aval, "vma", ()) if known is None else known.varying)
    return axes


def varying(tree: Any, axes: frozenset[str]) -> Any:
    """The same arrays, known to differ along these axes."""

    def mark(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # JAX 0.7

    return jax.tree.map(mark, tree)


@dataclass(frozen=True)
class OnHost:
    """A function of the host's for one set of options.

    Equal for equal options, which is what JAX keys compiled programs on: a closure would be another
    function at every call, compiled again and never let go.
    """

    function: Callable[..., list[Array]]
    fixed: Hashable

    def __call__(self, *given: Any) -> list[Array]:
        return self.function(self.fixed, *given)


def check_array(name: str, value: object) -> None:
    if not isinstance(value, jax.Array):
        raise TypeError(f"{name} must be a jax.Array, got {type(value).__name__}")
    if value.dtype.name not in ("float32", "float64", *HALF):
        raise TypeError(wrong_dtype(name, value.dtype, value))
