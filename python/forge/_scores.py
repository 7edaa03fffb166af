"""The arrays that shape the scores: bias, mask and sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forge._arrays import Array, Input, as_input, as_mask, as_output
from forge._dtypes import BOOL, as_float

if TYPE_CHECKING:
    from forge._dtypes import Element
    from forge._options import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreArrays:
    """Those arrays as the caller gave them; None where there is none."""

    bias: object = None
    mask: object = None
    sinks: object = None

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.bias, self.mask, self.sinks))


def score_inputs(given: ScoreArrays, sizes: Sizes, element: Element) -> dict[str, Input]:
    """Check the arrays; return those that are given, in the axes that the compiled module takes.

    Raises:
        TypeError: no arrays, or of another dtype.
        ValueError: shapes that the sizes do not fit.
    """
    inputs = {}
    if given.bias is not None:
        _refuse_bool(given.bias)
        inputs["bias"] = as_input("bias", given.bias, any_strides=True)
        check_precision("bias", inputs["bias"].element.name, element.name, given.bias)
    if given.mask is not None:
        inputs["mask"] = as_mask("mask", given.mask)
    if given.sinks is not None:
        taken = as_input("sinks", given.sinks, any_strides=True)
        check_precision("sinks", taken.element.name, element.name, given.sinks)
        inputs["sinks"] = taken
    for name, taken in inputs.items():
        check_extents(name, taken.array.shape, sizes)
        if name == "sinks":
            inputs[name] = taken._replace(array=sink_rows(taken.array, sizes))
    return inputs


def check_extents(name: str, shape: tuple[int, ...], sizes: Sizes) -> None:
    """Check the shape of bias, mask or sinks.

    Raises:
        ValueError: naming what it may be.
    """
    if name == "sinks":
        shapes = _sink_shapes(sizes)
        if shape not in shapes:
            takes = " or ".join(str(each) for each in shapes)
            raise ValueError(f"{name} must have shape {takes}, got {shape}")
        return
    pairs = (sizes.B, sizes.H, sizes.Tq, sizes.Tk)
    if len(shape) == 4 and all(
        extent in (1, full) for extent, full in zip(shape, pairs, strict=True)
    ):
        return
    way_out = {
        2: f"; write {name}[None, None] for [Tq, Tk]",
        3: (
            f"; write {name}[:, None] for [B, Tq, Tk], {name}[None] for [H, Tq, Tk] "
            f"({name}[None, None] is for two axes)"
        ),
    }.get(len(shape), "")
    raise ValueError(
        f"{name} must have shape {pairs} ([B, H, Tq, Tk]) or 1 on some axes, got {shape}{way_out}"
    )


def check_precision(name: str, got: str, of_q: str, value: object) -> None:
    """Check the dtype of bias or sinks: float32 or q's; float64 where q is float64.

    Raises:
        TypeError: naming both, and what would be taken.
    """
    sums = "float64" if of_q == "float64" else "float32"
    if got in (of_q, sums):
        return
    other = f" or {sums}" if of_q != sums else ""
    raise TypeError(
        f"{name} must be {of_q}{other} where q is {of_q}, got {got}; pass "
        f"{as_float(name, value, sums)}, a copy"
    )


def _sink_shapes(sizes: Sizes) -> dict[tuple[int, ...], tuple[int, int, int]]:
    return {
        (sizes.H,): (1, sizes.H, 1),
        (sizes.B, sizes.H): (sizes.B, sizes.H, 1),
        (sizes.B, sizes.H, sizes.Tq): (sizes.B, sizes.H, sizes.Tq),
    }


def sink_rows(array: Array, sizes: Sizes) -> Array:
    """View ``[H]``, ``[B, H]`` or ``[B, H, Tq]`` as three axes, 1 where the array has none."""
    return array.reshape(_sink_shapes(sizes)[array.shape])


def gradient_output(
    name: str, value: object, shape: tuple[int, ...], element: Element
) -> Array | None:
    """Return the array that dbias or dsinks is to be written into; None where it is asked for.

    Raises:
        TypeError: neither True nor an array, or one of another dtype.
        ValueError: an array that cannot be written.
    """
    if isinstance(value, (bool, np.bool_)):
        if value:
            return None
        raise ValueError(f"{name} must be True or an array to write into, got False; leave it out")
    return as_output(name, value, shape, element)


def _refuse_bool(bias: object) -> None:
    dtype = getattr(bias, "dtype", None)
    if str(dtype).rpartition(".")[2] == BOOL.name:
        raise TypeError("bias must be of floating-point numbers, got bool; that is mask=bias")
