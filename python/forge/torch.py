"""forge's attention for PyTorch: CPU tensors, gradients, torch.compile.

Tensors are read and gradients are handed back on their own memory, without a copy.

Example::

    import forge.torch
    out = forge.torch.attention(q, k, v, causal=True, window=1024, softcap=50.0)
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

try:
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad
except ImportError as error:
    raise ImportError(
        "forge.torch needs PyTorch: pip install torch, or pip install '.[torch]' in a checkout of "
        "forge"
    ) from error

from forge import _forge
from forge._arrays import Array, as_bool, as_int
from forge._dtypes import check_dtypes, wrong_dtype
from forge._options import Positions, Window, as_int_array, as_window, kernel_name
from forge._torch_ops import BY_TORCH, Options, forward_op

__all__ = ["attention", "scaled_dot_product_attention"]


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _autocast(kernel: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of torch.autocast, where one is on: what torch's own function does.

    Not for the materialized family, which has no half precision to be cast to.
    """
    if kernel == "materialized" or not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.device.type != "cpu":
        raise ValueError(
            f"{name} must be a CPU tensor, got one on {value.device}; move it with {name}.cpu(), "
            "or use F.scaled_dot_product_attention there"
        )
    if value.dtype not in _DTYPES:
        raise TypeError(wrong_dtype(name, value.dtype, value))
    # A custom operator without a forward-mode rule would hand on tangents of zero.
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            f"{name} must have no forward-mode tangent; forge has no jvp: use reverse mode "
            f"(backward, torch.autograd.grad), or {BY_TORCH}"
        )


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


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, *options: object) -> Tensor | None:
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


def _as_positions(name: str, value: Positions | Tensor) -> Tensor | None:
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


def _as_float(name: str, value: object) -> float | None:
    """Only the type is checked; the range is, where the dtype is known."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


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
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention on CPU tensors, differentiable once; see :func:`forge.attention`.

    The options are those of :func:`forge.attention`, and so is the layout: ``[B, T, heads, hd]``,
    not torch's ``[B, heads, T, hd]`` (:func:`scaled_dot_product_attention` takes that one). Strided
    tensors are read in place as long as their last axis has unit stride.

    Args:
        q: queries, ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]`` on the CPU: float32, float16 or
            bfloat16 (float64 with ``kernel="materialized"``). Under ``torch.autocast`` all three
            are cast to its dtype, as torch's own function does.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``, of q's dtype, or of half precision
            under a float32 q.
        v: values, of k's shape.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: key position of query 0, an int, or ints ``[B]`` as a tensor, an array or a
            list; ``Tk - Tq`` by default.
        key_start: first visible key, an int or ints ``[B]``.
        key_end: one past the last visible key, likewise; give ``query_offset`` with it where
            :func:`forge.attention` asks for it.
        num_heads: ``H``; needed for 3-D tensors.
        num_kv_heads: ``Hkv``; for 3-D tensors, ``H`` by default.
        kernel: ``"fused"`` (the default) or ``"materialized"``.
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves.
        return_lse: return the log-sum-exp of each row as well; gradients flow through it.

    Returns:
        ``out``, in q's shape; with ``return_lse`` ``(out, lse)``, ``lse`` being ``[B, H, Tq]``.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, tensors that are not on the CPU, or a combination that
            kernel or backend cannot serve.
        NotImplementedError: forward-mode differentiation (torch.func.jvp and the like).
        MemoryError: the results do not fit.
    """
    if return_lse is False:
        plain = _plain_attention(
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
            num_heads,
            num_kv_heads,
            kernel,
            backend,
        )
        if plain is not None:
            return plain
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, value)
    causal, return_lse = as_bool("causal", causal), as_bool("return_lse", return_lse)
    kernel = kernel_name(kernel)
    q, k, v = _autocast(kernel, q, k, v)
    values = {"q": q, "k": k, "v": v}
    check_dtypes({name: _dtype_name(x) for name, x in values.items()}, kernel, values)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    window_pair = as_window(window)
    options = Options(
        query_offset=_as_positions("query_offset", query_offset),
        key_start=_as_positions("key_start", key_start),
        key_end=_as_positions("key_end", key_end),
        causal=causal,
        window=window_pair,
        softcap=_as_float("softcap", softcap),
        scale=_as_float("scale", scale),
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
        query: ``[..., H, Tq, hd]``, float32, float16 or bfloat16 on the CPU.
        key: ``[..., Hkv, Tk, hd]``; its leading axes broadcast with those of query and value.
        value: ``[..., Hkv, Tk, hd]``.
        attn_mask: must be None; see Raises.
        dropout_p: must be 0.
        is_causal: query ``i`` sees keys 0 to ``i``: aligned at the top left, as in torch, also
            where ``Tq != Tk``.
        scale: ``1 / sqrt(hd)`` by default.
        enable_gqa: query head ``h`` reads key/value head ``h // (H / Hkv)``.

    Returns:
        ``[..., H, Tq, hd]``.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, or what forge has no kernel for: a mask given as a tensor,
            dropout, values of another head size. The message says what to do instead.
    """
    _check_sdpa_options(attn_mask, dropout_p, is_causal, enable_gqa)
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
        if tensor.ndim < (3 if enable_gqa else 2):
            raise ValueError(
                f"{name} must be [..., T, hd] ([..., heads, T, hd] with enable_gqa), got shape "
                f"{tuple(tensor.shape)}"
            )
    if value.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"value must have the head size of key, got {value.shape[-1]} and {key.shape[-1]}; "
            "use F.scaled_dot_product_attention, or pad value with zeros and cut the result"
        )
    shape, (q, k, v) = _batched(tensors, enable_gqa)
    out = attention(q, k, v, causal=is_causal, scale=scale, query_offset=0 if is_causal else None)
    return out.transpose(1, 2).reshape(shape)


def _check_sdpa_options(
    attn_mask: object, dropout_p: object, is_causal: object, enable_gqa: object
) -> None:
    if attn_mask is not None:
        raise ValueError(
            "attn_mask must be None, got a mask; forge takes no mask tensors. For a causal mask "
            "give is_causal=True; for padding, windows and caches use forge.torch.attention with "
            "key_start, key_end, window and query_offset; for any other mask use "
            "F.scaled_dot_product_attention"
        )
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p}; forge has no dropout on probabilities: set it "
            "to 0 (and in evaluation pass 0 as with torch), or use F.scaled_dot_product_attention"
        )
    as_bool("is_causal", is_causal)
    as_bool("enable_gqa", enable_gqa)


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
    query = tensors["query"]
    return (*common, *query.shape[-own:]), (views[0], views[1], views[2])
