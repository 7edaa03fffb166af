"""Over torch.distributed: the exchange of rows for heads, and decode over a split cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge import _split_decode, _ulysses
from forge._options import Window
from forge._ring_call import Call, Given, RingOptions, agree_on_backward, begin, check_given
from forge._torch_ops import as_array, as_tensor
from forge._torch_ranks import TorchTransport, checked_tensors, wants_gradient
from forge._torch_tensors import as_float


class _Ulysses(torch.autograd.Function):  # type: ignore[misc]
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
        o, ctx.saved = _ulysses.ulysses_forward(transport, call)
        ctx.transport = transport
        ctx.save_for_backward(q, k, v, sinks)
        return as_tensor(o)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        number = ctx.saved.call.number
        sinks = agree_on_backward(
            ctx.transport, lambda: ctx.saved_tensors[3], number, _ulysses.CALL
        )
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            dsinks = np.zeros(sinks.shape, np.float32)
        gradients = _ulysses.ulysses_backward(ctx.transport, ctx.saved, as_array(dout), dsinks)
        dq, dk, dv = map(as_tensor, gradients)
        of_sinks = None if dsinks is None else as_tensor(dsinks).to(sinks.dtype)
        return None, None, dq, dk, dv, of_sinks


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    layout: str = "contiguous",
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What :func:`ring_attention` computes, by an exchange of rows for heads.

    Every rank sends every other the heads that it computes, gets all rows of its own, and sends the
    results back. ``H`` must be a multiple of the number of ranks, ``Hkv`` a multiple or a divisor
    of it: then a key/value head goes to all ranks that need it. Where ``Hkv`` is a multiple, the
    bits are those of the single process. :func:`forge.split.fewer_bytes` says which of the two
    functions sends less.

    Args:
        q: this rank's queries, ``[B, T, H, hd]``, on the CPU: float32, float16 or bfloat16.
        k: its keys, ``[B, T, Hkv, hd]``, of q's dtype, or of half precision under a float32 q.
        v: its values, ``[B, T, Hkv, hv]``.
        group: a process group of torch.distributed; None: all processes.
        layout: which rows of the sequence a rank holds, ``"contiguous"`` or ``"zigzag"``, see
            :func:`ring_attention`. The work is even in both.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``, as :func:`attention` takes it.
        softcap: ``s = softcap * tanh(x / softcap)``; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        sinks: one more logit for each row: ``[H]`` or ``[B, H]``, the same on all ranks. A rank's
            gradient of them is of the heads that it computes: their sum over the ranks is the
            whole.

    Returns:
        ``[B, T, H, hv]``, q's dtype.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, here or on another rank, heads that the ranks cannot
            share out, or ranks that make different calls.
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
        )
        arrays = [as_array(tensor) for tensor in tensors]
        given = check_given(arrays[0], arrays[1], arrays[2], options)
        _ulysses.check_heads(transport.size, given)
        return given

    wanted = wants_gradient(q, k, v, sinks)
    call = begin(transport, checked, gradients=wanted, call=_ulysses.CALL)
    out: Tensor = _Ulysses.apply(transport, call, *tensors, sinks)
    return out


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    positions: Any = None,
    key_positions: Any = None,
) -> Tensor:
    """Attention of a few queries, the same on all ranks, to a cache whose rows are split over them.

    Each rank attends to its own rows; what is sent is the result of each, not keys or values. No
    gradient.

    Args:
        q: the queries, ``[B, Tq, H, hd]``, on the CPU: float32, float16 or bfloat16.
        k: this rank's keys, ``[B, Tk, Hkv, hd]``, any number of rows, of q's dtype, or of half
            precision under a float32 q.
        v: its values, ``[B, Tk, Hkv, hv]``.
        group: a process group of torch.distributed; None: all processes.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``, as :func:`attention` takes it.
        softcap: ``s = softcap * tanh(x / softcap)``; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        sinks: one more logit for each row, the same on all ranks: ``[H]``, ``[B, H]`` or
            ``[B, H, Tq]``.
        positions: where the queries stand, ints ``[Tq]`` or ``[B, Tq]``, -1 for padding; by default
            the last one at the last key.
        key_positions: where this rank's keys stand, ints ``[Tk]`` or ``[B, Tk]``, each once on all
            ranks, -1 for rows not filled; by default the ranks' rows follow one another.

    Returns:
        ``[B, Tq, H, hv]``, q's dtype, the same bits on every rank.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, a tensor that requires a gradient, or ranks that make
            different calls.
        RuntimeError: a rank does not answer, or could not compute its part.
    """

    def checked() -> Any:
        tensors = checked_tensors(q, k, v, sinks)
        if wants_gradient(q, k, v, sinks):
            raise ValueError(
                "q, k, v and sinks must not require a gradient in decode, which has none; call it "
                "under torch.no_grad(), or use ring_attention"
            )
        options = _split_decode.DecodeOptions(
            causal=causal,
            window=window,
            softcap=as_float("softcap", softcap),
            scale=as_float("scale", scale),
            sinks=None if sinks is None else as_array(sinks),
            positions=positions,
            key_positions=key_positions,
        )
        arrays = [as_array(tensor) for tensor in tensors]
        return _split_decode.check_decode(arrays[0], arrays[1], arrays[2], options)

    return as_tensor(_split_decode.decode(TorchTransport(group), checked))
