"""The operators on MPS tensors: forge's kernels in PyTorch's own Metal stream.

Nothing waits for the GPU and nothing is copied to the host: kernels are encoded behind what PyTorch
has encoded before, by torch.mps.compile_shader.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge import _forge
from forge._options import MaskAndScale, Sizes, head_counts, kernel_name
from forge._shader_text import Switches, library_text
from forge._streams import Call, planned, record, stream_options

WHERE = "MPS tensors"
# Metal takes up to 4 KB of parameters by value: key ranges of 24 bytes a sequence.
_SEQUENCES = 4096 // 24
_KEYS = ("k", "v", "dk", "dv")  # arrays with Hkv heads
_ROWS = ("row_max", "row_sum", "dlse")  # [B, H, Tq]


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: MaskAndScale,
    *,
    heads: tuple[int | None, int | None],
    kernel: str | None,
    backend: str | None,
) -> tuple[Sizes, _forge.Options]:
    sizes = head_counts(q, k, v, *heads)
    if sizes.hv != sizes.hd:
        raise ValueError(
            f"v must have the head dim of q and k for MPS tensors, got {sizes.hv} and {sizes.hd}; "
            "move them to the CPU"
        )
    return sizes, stream_options(given, sizes, kernel_name(kernel), backend, WHERE)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, options: _forge.Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``out``, ``row_max``, ``row_sum`` and ``out`` in float32, for the backward."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kept = out if q.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    rows = (sizes.B, sizes.H, sizes.Tq)
    row_max, row_sum = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
    arrays = {
        "q": _heads(q, sizes.H),
        "k": _heads(k, sizes.Hkv),
        "v": _heads(v, sizes.Hkv),
        "o": _heads(kept, sizes.H),
        "row_max": row_max,
        "row_sum": row_sum,
    }
    if kept is not out:
        arrays["rounded"] = _heads(out, sizes.H)
    _encode("forward", arrays, options)
    return out, row_max, row_sum, kept


def backward(
    inputs: dict[str, Tensor], sizes: Sizes, options: _forge.Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dq``, ``dk`` and ``dv``; ``inputs`` has what the backward reads, by its names."""
    gradients = {
        f"d{name}": torch.empty_like(inputs[name], memory_format=torch.contiguous_format)
        for name in ("q", "k", "v")
    }
    arrays = {
        name: x.contiguous()
        if name in _ROWS
        else _heads(x, sizes.Hkv if name in _KEYS else sizes.H)
        for name, x in (inputs | gradients).items()
    }
    _encode("backward", arrays, options)
    return gradients["dq"], gradients["dk"], gradients["dv"]


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return ``[B, T, heads, hd]`` with a last axis of unit stride, a view where that can be."""
    x = x.resolve_neg()
    if x.ndim == 3:
        x = x.unflatten(2, (heads, x.shape[2] // heads))
    return x if x.shape[3] < 2 or x.stride(3) == 1 else x.contiguous()


def _encode(call: Call, arrays: dict[str, Tensor], options: _forge.Options) -> None:
    """Encode a call, some sequences at a time."""
    ranges = options["ranges"]
    for first in range(0, arrays["q"].shape[0], _SEQUENCES):
        some = slice(first, first + _SEQUENCES)
        of_some: _forge.Options = {**options, "ranges": None if ranges is None else ranges[some]}
        _encode_some(call, {name: x[some] for name, x in arrays.items()}, of_some)
    record("PyTorch's MPS stream")


def _encode_some(call: Call, arrays: dict[str, Tensor], options: _forge.Options) -> None:
    bound = {name: _bound(x) for name, x in arrays.items()}
    plan = planned(call, bound, options, WHERE, cut=True)
    if not plan["dispatches"]:
        return
    # Nobody reads an array without elements, but something must be bound.
    some = next(x for x in arrays.values() if x.numel())
    arguments: dict[str, Any] = {name: x if x.numel() else some for name, x in arrays.items()}
    for name, floats in plan["scratch"].items():
        arguments[name] = some.new_empty(max(floats, 1), dtype=torch.float32)
    arguments |= {"params": plan["params"], "ranges": plan["ranges"]}
    for dispatch in plan["dispatches"]:
        if dispatch["begins_another"]:
            torch.mps.event.Event().record()  # which commits
        kernel, names = _compiled(dispatch["kernel"], dispatch["switches"])
        arguments["grid"] = dispatch["grid"]
        across, heads, batch = dispatch["groups"]
        kernel(
            *(arguments[name] for name in names),
            threads=(across * dispatch["threads"], heads, batch),
            group_size=(dispatch["threads"], 1, 1),
        )


def _bound(x: Tensor) -> _forge.Bound:
    dtype = str(x.dtype).removeprefix("torch.")
    return dtype, tuple(x.shape), tuple(x.stride()), x.storage_offset() * x.element_size()


@functools.cache
def _compiled(name: str, switches: Switches) -> tuple[Callable[..., None], tuple[str, ...]]:
    library = library_text(name, switches)
    return getattr(torch.mps.compile_shader(library.text), name), library.arguments
