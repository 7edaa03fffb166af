"""forge's attention for MLX: arrays in MLX's memory, gradients for mx.grad.

Inputs are read and results are written where MLX keeps them, without a copy; bfloat16 results are
copied once.

    import forge.mlx
    out = forge.mlx.attention(q, k, v, causal=True, window=1024, softcap=50.0)
"""

from __future__ import annotations

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

from forge._attention import attention_backward, attention_forward
from forge._dtypes import BFloat16Bits, check_dtypes, wrong_dtype
from forge._options import Window, kernel_name

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
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
) -> mx.array:
    """Exact attention on MLX arrays, differentiable once; see :func:`forge.attention`.

    The options are those of :func:`forge.attention`, and so is the layout: ``[B, T, heads, hd]``,
    not ``[B, heads, T, hd]`` as in ``mx.fast.scaled_dot_product_attention``. It computes at once:
    q, k and v are evaluated first, so it cannot stand inside ``mx.compile`` or ``mx.vmap``.

    Args:
        q: queries, ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]``: float32, float16 or bfloat16, or
            float64 with ``kernel="materialized"``.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``.
        v: values, of k's shape.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: key position of query 0, an int, or ints ``[B]`` as an array, MLX's or
            NumPy's, or a list; ``Tk - Tq`` by default.
        key_start: first visible key, an int or ints ``[B]``.
        key_end: one past the last visible key, likewise; give ``query_offset`` with it where
            :func:`forge.attention` asks for it.
        num_heads: ``H``; needed for 3-D arrays.
        num_kv_heads: ``Hkv``; for 3-D arrays, ``H`` by default.
        kernel: ``"fused"`` (the default) or ``"materialized"``.
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves.

    Returns:
        An array of q's shape and dtype. Rows that see no key are 0.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, a combination that kernel or backend cannot serve, or
            arrays that ``mx.compile`` or ``mx.vmap`` traces.
        MemoryError: the results do not fit.
        NotImplementedError: a second derivative, or ``mx.jvp``.
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, value in arrays.items():
        _check_array(name, value)
    dtypes = {name: str(value.dtype).rpartition(".")[2] for name, value in arrays.items()}
    check_dtypes(dtypes, kernel_name(kernel), dict(arrays))
    positions = {"query_offset": query_offset, "key_start": key_start, "key_end": key_end}
    _evaluate(q, k, v, *(value for value in positions.values() if isinstance(value, mx.array)))
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "kernel": kernel,
        "backend": backend,
        **{
            name: np.asarray(value) if isinstance(value, mx.array) else value
            for name, value in positions.items()
        },
    }
    out: mx.array = _differentiable(options)(q, k, v)
    return out


def _differentiable(options: dict[str, Any]) -> Any:
    """Return attention with these options as a function of q, k and v that MLX can differentiate.

    One call, one function: what the forward saves waits in it for the backward.
    """
    kept = {}

    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        out = None if q.dtype == mx.bfloat16 else _new(q)
        into = None if out is None else np.asarray(out)
        inputs = (_readable(x) for x in (q, k, v))
        made, kept["saved"] = attention_forward(*inputs, out=into, **options)
        return _bfloat16(made) if out is None else out

    def backward(
        q: mx.array, k: mx.array, v: mx.array, dout: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        _evaluate(dout)
        gradients = {
            name: None if x.dtype == mx.bfloat16 else _new(x)
            for name, x in (("dq", q), ("dk", k), ("dv", v))
        }
        into: dict[str, Any] = {
            name: None if x is None else np.asarray(x) for name, x in gradients.items()
        }
        made = attention_backward(_readable(dout), kept["saved"], **into)
        dq, dk, dv = (
            _bfloat16(array) if x is None else x
            for array, x in zip(made, gradients.values(), strict=True)
        )
        return dq, dk, dv

    # Without these two MLX would take the results for constants: second derivatives of zero.
    first_derivative = mx.custom_function(backward)
    first_derivative.vjp(_refuse_second_derivative)
    first_derivative.jvp(_refuse_second_derivative)
    function = mx.custom_function(forward)
    function.vjp(lambda primals, dout, out: first_derivative(*primals, dout))
    function.jvp(_refuse_forward_mode)
    return function


def _check_array(name: str, value: object) -> None:
    if not isinstance(value, mx.array):
        raise TypeError(f"{name} must be an mx.array, got {type(value).__name__}")
    if value.dtype not in (mx.float32, mx.float64, mx.float16, mx.bfloat16):
        raise TypeError(wrong_dtype(name, value.dtype, value))


def _evaluate(*arrays: mx.array) -> None:
    try:
        mx.eval(*arrays)
    except ValueError as error:
        raise ValueError(
            "forge.mlx.attention must be called outside mx.compile and mx.vmap, got arrays that "
            "have no values yet; compile what stands before and after it, and put what vmap would "
            "map into the batch axis"
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


def _refuse_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "forge.mlx.attention has first derivatives only, got a derivative of its gradient; where "
        "second derivatives are needed, use mx.fast.scaled_dot_product_attention"
    )


def _refuse_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "forge.mlx.attention has no forward-mode derivative, got mx.jvp; use mx.vjp or mx.grad"
    )
