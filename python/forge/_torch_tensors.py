"""Tensors at the door of forge.torch: what is taken, what is refused, what needs no operator."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from forge import _forge
from forge._arrays import Array
from forge._dtypes import wrong_dtype
from forge._options import Positions, as_int_array
from forge._torch_ops import BY_TORCH

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def autocast(kernel: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of torch.autocast, where one is on: what torch's own function does.

    Not for the materialized family, which has no half precision to be cast to.
    """
    device = tensors[0].device.type
    if kernel == "materialized" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.device.type not in ("cpu", "mps"):
        raise ValueError(
            f"{name} must be a CPU tensor, or an MPS tensor, got one on {value.device}; move it "
            f"with {name}.cpu(), or use F.scaled_dot_product_attention there"
        )
    if value.dtype not in _DTYPES:
        raise TypeError(wrong_dtype(name, value.dtype, value))
    # A custom operator without a forward-mode rule would hand on tangents of zero.
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            f"{name} must have no forward-mode tangent; forge has no jvp: use reverse mode "
            f"(backward, torch.autograd.grad), or {BY_TORCH}"
        )


def check_score_tensor(name: str, value: object) -> None:
    """Check a tensor that shapes the scores, but for its shape and its precision."""
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        if name != "mask":
            raise TypeError(
                f"{name} must be of floating-point numbers, got bool; that is mask={name}"
            )
        if value.layout != torch.strided or value.device.type != "cpu":
            raise ValueError(f"{name} must be a dense CPU tensor, got one on {value.device}")
        return
    if name == "mask":
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        way_out = (
            "; that is bias=mask" if isinstance(value, Tensor) and value.is_floating_point() else ""
        )
        raise TypeError(f"mask must be a torch.Tensor of bool, got {got}{way_out}")
    check_tensor(name, value)


# How many modes watch what PyTorch dispatches (fake tensors, tracers, counters).
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)


def _array_of(x: Any) -> Array | None:
    """Return the memory of a tensor that nobody differentiates or traces; None for any other."""
    if type(x) is not Tensor or forward_ad.unpack_dual(x).tangent is not None:
        return None
    if x.requires_grad:
        if torch.is_grad_enabled():
            return None
        x = x.detach()
    try:
        array: Array = x.numpy()
    except (RuntimeError, TypeError):  # no CPU tensor, no dtype of NumPy's, a tensor of torch.func
        return None
    return array


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *options: object) -> Tensor | None:
    """Call the compiled module on the tensors' memory; None where that would miss something.

    An operator of PyTorch costs more than a small attention does.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if _dispatch_modes is None or _dispatch_modes() or torch.is_autocast_enabled("cpu"):
        return None
    arrays = [_array_of(x) for x in (q, k, v)]
    if any(array is None for array in arrays):
        return None
    out = _forge.attention(*arrays, *options, None)  # type: ignore[call-arg]  # as many as it takes
    return None if out is None else torch.from_numpy(out)


def check_devices(tensors: dict[str, Tensor]) -> None:
    device = tensors["q"].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on the device of q, {device}, got {tensor.device}")


def as_positions(name: str, value: Positions | Tensor) -> Tensor | None:
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ValueError(
            f"{name} must be a CPU tensor, got one on {value.device}: its values are checked "
            f"before the call. {name}.cpu() waits for the GPU"
        )
    if value is None or isinstance(value, Tensor):
        return value
    if torch.compiler.is_compiling() and isinstance(value, (list, tuple, range, np.ndarray)):
        # The operator checks it. NumPy's functions would break the graph.
        return torch.as_tensor(value if isinstance(value, np.ndarray) else list(value))
    positions = as_int_array(name, value)
    every = [positions] if isinstance(positions, int) else positions.ravel().tolist()
    for position in every:
        if not -(2**63) <= position < 2**63:
            raise ValueError(f"{name} must be within int64, got {position}")
    if isinstance(positions, int):
        return torch.tensor(positions)
    return torch.from_numpy(positions.astype(np.int64))


def as_float(name: str, value: object) -> float | None:
    """Only the type is checked; the range is, where the dtype is known."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def boundaries(name: str, value: object, total: int, longest: int | None = None) -> Tensor:
    """Return where packed sequences begin and end, int64; values are checked outside of graphs."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a torch.Tensor of ints, got {got}")
    if value.ndim != 1 or not len(value):
        raise ValueError(f"{name} must be [n + 1], got shape {tuple(value.shape)}")
    found = value.to(torch.int64)
    if torch.compiler.is_compiling():
        return found
    if found[0] != 0 or found[-1] != total:
        raise ValueError(
            f"{name} must begin with 0 and end with {total}, got {found[0]} and {found[-1]}"
        )
    lengths = found.diff()
    if (lengths < 0).any():
        raise ValueError(f"{name} must not descend, got {found.tolist()}")
    if longest is not None and len(lengths) and int(lengths.max()) > longest:
        raise ValueError(
            f"max_seqlen_{name[-1]} must be at least {int(lengths.max())}, the longest sequence, "
            f"got {longest}"
        )
    return found
