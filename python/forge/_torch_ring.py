"""Ring attention on torch tensors, over torch.distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge._arrays import as_int
from forge._options import Window
from forge._ring import ring_backward, ring_forward
from forge._ring_call import Call, Given, RingOptions, agree_on_backward, begin, check_given
from forge._ring_plan import layout_name, layout_positions
from forge._torch_ops import as_array, as_tensor
from forge._torch_ranks import TorchTransport, checked_tensors, wants_gradient
from forge._torch_tensors import as_float


class _RingAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        transport: TorchTransport,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        o, ctx.saved = ring_forward(transport, call)
        ctx.transport, out = transport, as_tensor(o)
        ctx.save_for_backward(q, k, v, sinks, out)  # not to be written to
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        def checked() -> Tensor | None:
            sinks: Tensor | None = ctx.saved_tensors[3]
            return sinks

        sinks = agree_on_backward(ctx.transport, checked, ctx.saved.call.number)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            dsinks = np.zeros(sinks.shape, np.float32)
        gradients = ring_backward(ctx.transport, ctx.saved, as_array(dout), dsinks)
        dq, dk, dv = map(as_tensor, gradients)
        of_sinks = None if dsinks is None or sinks is None else as_tensor(dsinks).to(sinks.dtype)
        return None, None, dq, dk, dv, of_sinks


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    layout: str = "zigzag",
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    positions: Any = None,
) -> Tensor:
    """Attention over a sequence that the ranks of a process group hold in parts.

    Every rank calls it with its own rows, and gets its own rows of the result. Keys and values go
    around the ring of ranks while each computes; ranks whose keys no query sees are left out. The
    backward sends the gradients of keys and values around in float32. The same bits every time for
    a given number of ranks.

    Args:
        q: this rank's queries, ``[B, T, H, hd]``, on the CPU: float32, float16 or bfloat16.
        k: its keys, ``[B, T, Hkv, hd]``, of q's dtype, or of half precision under a float32 q.
        v: its values, ``[B, T, Hkv, hv]``.
        group: a process group of torch.distributed; None: all processes.
        layout: which rows of a sequence of ``N`` a rank of ``n`` holds. ``"zigzag"``: of ``2 n``
            equal parts number ``rank``, then number ``2 n - 1 - rank``, so that all have the same
            work under a causal mask. ``"contiguous"``: number ``rank`` of ``n``.
            :func:`ring_positions` says it in rows.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``, as :func:`attention` takes it.
        softcap: ``s = softcap * tanh(x / softcap)``; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        sinks: one more logit for each row: ``[H]`` or ``[B, H]``, the same on all ranks, or
            ``[B, H, T]`` for this rank's rows. A rank's gradient of them is of its own rows, as
            that of any weight: their sum over the ranks is the whole.
        positions: ints ``[T]`` or ``[B, T]``, where this rank's rows stand, instead of ``layout``:
            any order, -1 for padding, which sees nothing and is not seen. All ranks give them or
            none does.

    Returns:
        ``[B, T, H, hv]``, q's dtype.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, here or on another rank, or ranks that make different
            calls: on every rank, naming what differs.
        RuntimeError: a rank does not answer within the time-out of the group, which cannot be used
            any more then; torch.distributed is not initialized.
    """
    transport = TorchTransport(group)
    tensors: list[Tensor] = []

    def checked() -> Given:
        tensors.extend(checked_tensors(q, k, v, sinks))
        options = RingOptions(
            layout=layout,
            causal=causal,
            window=window,
            softcap=as_float("softcap", softcap),
            scale=as_float("scale", scale),
            sinks=None if sinks is None else as_array(sinks),
            positions=positions,
        )
        arrays = [as_array(tensor) for tensor in tensors]
        return check_given(arrays[0], arrays[1], arrays[2], options)

    call = begin(transport, checked, gradients=wants_gradient(q, k, v, sinks))
    out: Tensor = _RingAttention.apply(transport, call, *tensors, sinks)
    return out


def ring_positions(total: int, *, group: Any = None, layout: str = "zigzag") -> Tensor:
    """Which rows of a sequence of ``total`` this rank holds, in the order of its tensors.

    ``x[:, ring_positions(x.shape[1])]`` is its part of ``x``; rotary embeddings take the positions.

    Args:
        total: rows of the whole sequence.
        group: a process group; None: all processes.
        layout: ``"zigzag"`` or ``"contiguous"``, see :func:`ring_attention`.

    Returns:
        int64, ``[T]``.

    Raises:
        TypeError: no int.
        ValueError: another layout, or a negative total.
    """
    count = as_int("total", total)
    if count < 0:
        raise ValueError(f"total must not be negative, got {count}")
    transport = TorchTransport(group)
    return as_tensor(layout_positions(layout_name(layout), count, transport.size, transport.rank))
