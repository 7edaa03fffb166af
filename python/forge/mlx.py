"""forge's attention for MLX: arrays in MLX's memory, gradients for mx.grad.

On an Apple GPU a part of MLX's graph, lazily. Elsewhere inputs are read and results are written
where MLX keeps them, without a copy; bfloat16 results are copied once.

    import forge.mlx
    out = forge.mlx.attention(q, k, v, causal=True, window=1024, softcap=50.0)
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

try:
    import mlx.core as mx
except ImportError as error:
    raise ImportError(
        "forge.mlx needs MLX: pip install 'mlx[cpu]', or pip install '.[mlx]' in a checkout of "
        "forge"
    ) from error

from forge import _mlx_stream
from forge._attention import attention_backward, attention_forward
from forge._dtypes import BFloat16Bits, check_dtypes, wrong_dtype
from forge._mlx_derivatives import once_differentiable
from forge._options import MaskAndScale, Window, backend_name, head_counts, kernel_name

__all__ = ["attention"]

Positions: TypeAlias = npt.ArrayLike | mx.array | None


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions = None,
    key_start: Positions = None,
    key_end: Positions = None,
    bias: mx.array | None = None,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
) -> mx.array:
    """Exact attention on MLX arrays, differentiable once; see :func:`forge.attention`.

    The options are those of :func:`forge.attention`, and so is the layout: ``[B, T, heads, hd]``,
    not ``[B, heads, T, hd]`` as in ``mx.fast.scaled_dot_product_attention``. Where
    MLX computes on an Apple GPU, float32 arrays go to forge's kernels in its stream, lazily, also
    inside ``mx.compile``. Otherwise it computes at once: q, k and v are evaluated first, so it
    cannot stand inside ``mx.compile``. Nowhere can it stand inside ``mx.vmap``.

    Args:
        q: queries, ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]``: float32, float16 or bfloat16, or
            float64 with ``kernel="materialized"``.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``.
        v: values, of k's shape but for the last axis.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: key position of query ``i``, less ``i``: an int, or ints ``[B]`` or
            ``[B, Tq]`` as an array, MLX's or NumPy's, or a list; ``Tk - Tq`` by default.
        key_start: first visible key, an int or ints ``[B]`` or ``[B, Tq]``.
        key_end: one past the last visible key, likewise; give ``query_offset`` with it where
            :func:`forge.attention` asks for it.
        bias: added to the scores after the softcap, differentiable: float32 or q's dtype, four
            axes, each 1 or that of ``[B, H, Tq, Tk]``; -inf hides a key.
        mask: bool, likewise four axes; True: visible. Or ``"causal"``, as in
            ``mx.fast.scaled_dot_product_attention``: what ``causal=True`` says.
        sinks: one more logit for each row, with a value of 0, differentiable: ``[H]``, ``[B, H]``
            or ``[B, H, Tq]``, float32 or q's dtype.
        num_heads: ``H``; needed for 3-D arrays.
        num_kv_heads: ``Hkv``; for 3-D arrays, ``H`` by default.
        kernel: ``"fused"`` (the default) or ``"materialized"``.
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves.

    Returns:
        An array of q's dtype, and of its shape but for v's head size. Rows that see no key are 0.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, a combination that kernel or backend cannot serve, or
            arrays that ``mx.vmap`` traces, or ``mx.compile`` outside MLX's GPU stream.
        MemoryError: the results do not fit.
        NotImplementedError: a second derivative, or ``mx.jvp``.
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, value in arrays.items():
        _check_array(name, value)
    dtypes = {name: str(value.dtype).rpartition(".")[2] for name, value in arrays.items()}
    family = kernel_name(kernel)
    check_dtypes(dtypes, family, dict(arrays))
    scores = {name: x for name, x in (("bias", bias), ("sinks", sinks)) if x is not None}
    for name, value in scores.items():
        _check_score_array(name, value)
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"mask must be an mx.array or 'causal', got {mask!r}")
        causal, mask = True, None
    if mask is not None and not (isinstance(mask, mx.array) and mask.dtype == mx.bool_):
        got = mask.dtype if isinstance(mask, mx.array) else type(mask).__name__
        floats = isinstance(mask, mx.array) and mx.issubdtype(mask.dtype, mx.floating)
        raise TypeError(
            f"mask must be an mx.array of bool, or 'causal', got {got}"
            f"{'; that is bias=mask' * floats}"
        )
    given = MaskAndScale(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        query_offset=_as_positions("query_offset", query_offset),
        key_start=_as_positions("key_start", key_start),
        key_end=_as_positions("key_end", key_end),
    )
    sizes = head_counts(q, k, v, num_heads, num_kv_heads)
    on_gpu = _mlx_stream.serves(sizes, given, family, backend_name(backend), q, k, v)
    if on_gpu and not scores and mask is None:
        return _mlx_stream.attention(q, k, v, given, sizes)
    _evaluate(q, k, v, *scores.values(), *([] if mask is None else [mask]))
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    options["kernel"] = kernel
    for field in fields(given):
        options[field.name] = getattr(given, field.name)
    if mask is not None:
        options["mask"] = np.asarray(mask)
    return _differentiable({**options, "backend": backend}, list(scores))(
        q, k, v, *scores.values()
    )[0]


def _differentiable(options: dict[str, Any], scores: list[str]) -> Any:
    """Return attention with these options as a function that MLX can differentiate.

    Of q, k, v and what ``scores`` names, of bias and sinks. One call, one function: what the
    forward saves waits in it for the backward.
    """
    kept = {}

    def forward(q: mx.array, k: mx.array, v: mx.array, *more: mx.array) -> list[mx.array]:
        of_scores = {name: _readable(x) for name, x in zip(scores, more, strict=True)}
        given: dict[str, Any] = {**options, **of_scores}
        out = None
        if q.dtype != mx.bfloat16 and v.shape == k.shape:  # else its shape is not known yet
            out = _new(q)
        into = None if out is None else np.asarray(out)
        inputs = (_readable(x) for x in (q, k, v))
        made, kept["saved"] = attention_forward(*inputs, out=into, **given)
        if out is not None:
            return [out]
        return [_bfloat16(made) if q.dtype == mx.bfloat16 else mx.array(made)]

    def backward(*given: mx.array) -> list[mx.array]:
        *inputs, dout, _ = given
        _evaluate(dout)
        gradients = {
            name: None if x.dtype == mx.bfloat16 else _new(x)
            for name, x in zip(("dq", "dk", "dv"), inputs, strict=False)
        }
        into: dict[str, Any] = {
            name: None if x is None else np.asarray(x) for name, x in gradients.items()
        }
        into |= {f"d{name}": True for name in scores}
        made = attention_backward(_readable(dout), kept["saved"], **into)
        of_inputs = (
            _bfloat16(array) if x is None else x
            for array, x in zip(made, gradients.values(), strict=False)
        )
        of_scores = (
            mx.array(array).astype(x.dtype) for array, x in zip(made[3:], inputs[3:], strict=True)
        )
        return [*of_inputs, *of_scores]

    return once_differentiable(forward, backward)


def _check_array(name: str, value: object) -> None:
    if not isinstance(value, mx.array):
        raise TypeError(f"{name} must be an mx.array, got {type(value).__name__}")
    if value.dtype not in (mx.float32, mx.float64, mx.float16, mx.bfloat16):
        raise TypeError(wrong_dtype(name, value.dtype, value))


def _check_score_array(name: str, value: object) -> None:
    if isinstance(value, mx.array) and value.dtype == mx.bool_:
        raise TypeError(f"{name} must be of floating-point numbers, got bool; that is mask={name}")
    _check_array(name, value)


def _evaluate(*arrays: mx.array) -> None:
    try:
        mx.eval(*arrays)
    except ValueError as error:
        raise ValueError(
            "forge.mlx.attention must be called outside mx.compile and mx.vmap where it does not "
            "run in MLX's GPU stream, got arrays that have no values yet; compile what stands "
            "before and after it, and put what vmap would map into the batch axis"
        ) from error


def _as_positions(name: str, value: Positions) -> npt.ArrayLike | None:
    if not isinstance(value, mx.array):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name} must have values before the call, which checks them, got an array that "
            "mx.compile or mx.vmap traces; give ints or a NumPy array there"
        ) from error


def _new(like: mx.array) -> mx.array:
    """Return an array with memory of its own, to be written into through NumPy."""
    array = mx.zeros(like.shape, like.dtype, stream=mx.cpu)
    mx.eval(array)
    return array


def _readable(x: mx.array) -> Any:
    """Return the array, or the bits of bfloat16, which NumPy has not."""
    if x.dtype != mx.bfloat16:
        return x
    return np.asarray(x.view(mx.uint16)).view(BFloat16Bits)


def _bfloat16(bits: Any) -> mx.array:
    """Return a copy of bits as MLX's bfloat16; NumPy cannot write into that."""
    return mx.array(bits.view(np.ndarray).view(np.uint16)).view(mx.bfloat16)
