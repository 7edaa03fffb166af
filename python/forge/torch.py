"""forge's attention for PyTorch: CPU and MPS tensors, gradients, torch.compile.

Tensors are read and gradients are handed back on their own memory, without a copy; on MPS in
PyTorch's own Metal stream, without a wait.

Example::

    import forge.torch
    out = forge.torch.attention(q, k, v, causal=True, window=1024, softcap=50.0)
"""

from __future__ import annotations

from typing import Any

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError(
        "forge.torch needs PyTorch: pip install torch, or pip install '.[torch]' in a checkout of "
        "forge"
    ) from error

from forge._arrays import as_bool, as_int
from forge._dtypes import check_dtypes
from forge._options import Positions, Window, as_window, kernel_name
from forge._torch_ops import Options, forward_op
from forge._torch_ring import ring_attention, ring_positions
from forge._torch_split import decode_attention, ulysses_attention
from forge._torch_tensors import (
    as_float,
    as_positions,
    autocast,
    boundaries,
    check_devices,
    check_score_tensor,
    check_tensor,
    dtype_name,
    plain_attention,
)

__all__ = [
    "attention",
    "decode_attention",
    "ring_attention",
    "ring_positions",
    "scaled_dot_product_attention",
    "ulysses_attention",
    "varlen_attention",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions | Tensor = None,
    key_start: Positions | Tensor = None,
    key_end: Positions | Tensor = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention on CPU and MPS tensors, differentiable once; see :func:`forge.attention`.

    The options are those of :func:`forge.attention`, and so is the layout: ``[B, T, heads, hd]``,
    not torch's ``[B, heads, T, hd]`` (:func:`scaled_dot_product_attention` takes that one). Strided
    tensors are read in place as long as their last axis has unit stride.

    Args:
        q: queries, ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]``: float32, float16 or bfloat16
            (float64 with ``kernel="materialized"``). Under ``torch.autocast`` all
            three are cast to its dtype, as torch's own function does.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``, of q's dtype, or of half precision
            under a float32 q.
        v: values, of k's shape but for the last axis.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: key position of query ``i``, less ``i``: an int, or ints ``[B]`` or
            ``[B, Tq]`` as a tensor, an array or a list; ``Tk - Tq`` by default.
        key_start: first visible key, an int or ints ``[B]`` or ``[B, Tq]``.
        key_end: one past the last visible key, likewise; give ``query_offset`` with it where
            :func:`forge.attention` asks for it.
        bias: added to the scores after the softcap, differentiable: float32 or q's dtype, four
            axes, each 1 or that of ``[B, H, Tq, Tk]``; -inf hides a key.
        mask: bool, likewise four axes; True: visible.
        sinks: one more logit for each row, with a value of 0, differentiable: ``[H]``, ``[B, H]``
            or ``[B, H, Tq]``, float32 or q's dtype.
        num_heads: ``H``; needed for 3-D tensors.
        num_kv_heads: ``Hkv``; for 3-D tensors, ``H`` by default.
        kernel: ``"fused"`` (the default) or ``"materialized"``.
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves. On
            MPS ``"metal"`` is the only one.
        return_lse: return the log-sum-exp of each row as well; gradients flow through it.

    Returns:
        ``out``, in q's shape but for v's head size; with ``return_lse`` ``(out, lse)``, ``lse``
        being ``[B, H, Tq]``.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, tensors on other devices or on several, or a combination
            that kernel or backend cannot serve.
        NotImplementedError: forward-mode differentiation (torch.func.jvp and the like).
        MemoryError: the results do not fit.
    """
    if return_lse is False and bias is None and mask is None and sinks is None:
        plain = plain_attention(
            q,
            k,
            v,
            causal,
            window,
            softcap,
            scale,
            query_offset,
            key_start,
            key_end,
            bias,
            mask,
            sinks,
            num_heads,
            num_kv_heads,
            kernel,
            backend,
        )
        if plain is not None:
            return plain
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
    for name, given in (("bias", bias), ("mask", mask), ("sinks", sinks)):
        if given is not None:
            check_score_tensor(name, given)
    causal, return_lse = as_bool("causal", causal), as_bool("return_lse", return_lse)
    kernel = kernel_name(kernel)
    q, k, v = autocast(kernel, q, k, v)
    values = {"q": q, "k": k, "v": v}
    check_devices(values)
    check_dtypes({name: dtype_name(x) for name, x in values.items()}, kernel, values)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    window_pair = as_window(window)
    options = Options(
        query_offset=as_positions("query_offset", query_offset),
        key_start=as_positions("key_start", key_start),
        key_end=as_positions("key_end", key_end),
        bias=bias,
        mask=mask,
        sinks=sinks,
        causal=causal,
        window=window_pair,
        softcap=as_float("softcap", softcap),
        scale=as_float("scale", scale),
        num_heads=None if num_heads is None else as_int("num_heads", num_heads),
        num_kv_heads=None if num_kv_heads is None else as_int("num_kv_heads", num_kv_heads),
        kernel=kernel,
        backend=backend,
    )
    out, lse, *_ = forward_op(q, k, v, *options)
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What ``torch.nn.functional.scaled_dot_product_attention`` computes, by forge.

    Args:
        query: ``[..., H, Tq, hd]``, float32, float16 or bfloat16 on the CPU or on MPS.
        key: ``[..., Hkv, Tk, hd]``; its leading axes broadcast with those of query and value.
        value: ``[..., Hkv, Tk, hv]``.
        attn_mask: broadcasts to ``[..., H, Tq, Tk]``: bool, True being visible, or of query's dtype
            or float32, added to the scores; its gradient is computed where it is asked for.
        dropout_p: must be 0.
        is_causal: query ``i`` sees keys 0 to ``i``: aligned at the top left, as in torch, also
            where ``Tq != Tk``.
        scale: ``1 / sqrt(hd)`` by default.
        enable_gqa: query head ``h`` reads key/value head ``h // (H / Hkv)``.

    Returns:
        ``[..., H, Tq, hv]``.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, a mask together with ``is_causal``, or dropout. The message says
            what to do instead.
    """
    _check_sdpa_options(attn_mask, dropout_p, is_causal, enable_gqa)
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.ndim < (3 if enable_gqa else 2):
            raise ValueError(
                f"{name} must be [..., T, hd] ([..., heads, T, hd] with enable_gqa), got shape "
                f"{tuple(tensor.shape)}"
            )
    shape, (q, k, v) = _batched(tensors, enable_gqa)
    given = None if attn_mask is None else _mask_pairs(attn_mask, shape, k.shape[1], q.dtype)
    is_mask = given is not None and given.dtype == torch.bool
    out = attention(
        q,
        k,
        v,
        causal=is_causal,
        scale=scale,
        query_offset=0 if is_causal else None,
        bias=None if is_mask else given,
        mask=given if is_mask else None,
    )
    return out.transpose(1, 2).reshape(shape)


def _check_sdpa_options(
    attn_mask: object, dropout_p: object, is_causal: object, enable_gqa: object
) -> None:
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor, got {type(attn_mask).__name__}")
    if attn_mask is not None and is_causal:
        raise ValueError(
            "attn_mask must be None with is_causal=True, as in torch; write the causal mask into "
            "it, or use forge.torch.attention with causal=True and mask= or bias="
        )
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p}; forge has no dropout on probabilities: set it "
            "to 0 (and in evaluation pass 0 as with torch), or use F.scaled_dot_product_attention"
        )
    as_bool("is_causal", is_causal)
    as_bool("enable_gqa", enable_gqa)


def _mask_pairs(attn_mask: Tensor, shape: tuple[int, ...], Tk: int, dtype: torch.dtype) -> Tensor:
    """View a mask that broadcasts to ``[..., H, Tq, Tk]`` as four axes."""
    pairs = (*shape[:-1], Tk)
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        raise TypeError(
            f"attn_mask must be bool, float32 or {dtype} as query is, got {attn_mask.dtype}"
        )
    fits = attn_mask.ndim <= len(pairs) and all(
        extent in (1, full)
        for extent, full in zip(reversed(attn_mask.shape), reversed(pairs), strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask must broadcast to {pairs}, got shape {tuple(attn_mask.shape)}")
    mask = attn_mask[(None,) * (max(4, len(pairs)) - attn_mask.ndim)]
    if mask.ndim == 4:
        return mask
    return mask.expand(*pairs[:-3], *mask.shape[-3:]).flatten(0, -4)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention within each of several sequences that lie end to end, differentiable once.

    The arguments mean what they mean to flash-attention's ``flash_attn_varlen_func``; a window is
    forge's: its ``(left, right)`` is flash-attention's ``window_size``.

    Args:
        q: queries of all sequences, ``[total_q, H, hd]``.
        k: keys, ``[total_k, Hkv, hd]``.
        v: values, ``[total_k, Hkv, hv]``.
        cu_seqlens_q: where the sequences' queries begin, and the last end: ints ``[n + 1]`` from 0
            to ``total_q``, none smaller than the one before.
        cu_seqlens_k: likewise for keys.
        max_seqlen_q: not smaller than the longest sequence; it is not needed.
        max_seqlen_k: likewise.
        causal: a query sees no key after its own position, the last query of a sequence being at
            its last key.
        window: as in :func:`attention`.
        softcap: likewise.
        scale: likewise.
        sinks: likewise, ``[H]``.
        kernel: likewise.
        backend: likewise.
        return_lse: return the log-sum-exp of each row as well, ``[H, total_q]``.

    Returns:
        ``[total_q, H, hv]``, with ``return_lse`` ``(out, lse)``.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
        if value.ndim != 3:
            raise ValueError(f"{name} must be [total, heads, hd], got shape {tuple(value.shape)}")
    of_queries = boundaries("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    of_keys = boundaries("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    if len(of_queries) != len(of_keys):
        raise ValueError(
            f"cu_seqlens_k must have {len(of_queries)} entries as cu_seqlens_q has, got "
            f"{len(of_keys)}"
        )
    sequence = torch.searchsorted(of_queries, torch.arange(q.shape[0]), right=True) - 1
    found = attention(
        q[None],
        k[None],
        v[None],
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        query_offset=(of_keys[1:] - of_queries[1:])[sequence][None],
        key_start=of_keys[:-1][sequence][None],
        key_end=of_keys[1:][sequence][None],
        sinks=sinks,
        kernel=kernel,
        backend=backend,
        return_lse=return_lse,
    )
    return (found[0][0], found[1][0]) if return_lse else found[0]


def _batched(
    tensors: dict[str, Tensor], enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
    """Return the shape of the result, and views ``[B, T, heads, hd]`` of the three tensors."""
    own = 3 if enable_gqa else 2
    leading = [tuple(tensor.shape[:-own]) for tensor in tensors.values()]
    try:
        common = tuple(torch.broadcast_shapes(*leading))
    except RuntimeError as error:
        raise ValueError(
            f"query, key and value must have leading axes that broadcast, got {leading}; "
            "enable_gqa=True is for fewer key/value heads than query heads"
        ) from error
    views = []
    for tensor in tensors.values():
        whole = tensor.expand(*common, *tensor.shape[-own:])
        while whole.ndim < 4:  # without a batch, without heads
            whole = whole.unsqueeze(0)
        views.append(whole.flatten(0, -4).transpose(1, 2))
    query, value = tensors["query"], tensors["value"]
    return (*common, *query.shape[-own:-1], value.shape[-1]), (views[0], views[1], views[2])
