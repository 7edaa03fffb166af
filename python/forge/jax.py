"""forge's attention for JAX, by a callback: under jit, grad, vmap, scan and checkpoint.

import forge.jax
out = forge.jax.attention(q, k, v, causal=True, window=1024, softcap=50.0)
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

try:
    import jax
except ImportError as error:
    raise ImportError(
        "forge.jax needs JAX: pip install jax, or pip install '.[jax]' in a checkout of forge"
    ) from error

from forge._dtypes import HALF, check_dtypes
from forge._jax_axes import OnHost, check_array, varying, varying_axes
from forge._jax_host import Positions as HostPositions
from forge._jax_host import (
    Static,
    backward_on_host,
    differentiable_scores,
    forward_on_host,
    words_of,
)
from forge._jax_ring import ring_attention
from forge._options import (
    MaskAndScale,
    Sizes,
    Window,
    as_int_array,
    backend_name,
    compiled_options,
    head_counts,
    kernel_name,
)
from forge._scores import check_extents, check_precision

__all__ = ["attention", "ring_attention"]

Positions: TypeAlias = npt.ArrayLike | jax.Array | None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions = None,
    key_start: Positions = None,
    key_end: Positions = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Exact attention on JAX arrays, differentiable once in reverse; see :func:`forge.attention`.

    The options are those of :func:`forge.attention`. Positions may be traced; all other options are
    fixed when the call is traced. Causal attention is aligned at the bottom right, unlike that of
    ``jax.nn.dot_product_attention``: where ``Tq != Tk``, ``query_offset=0`` gives JAX's.

    Args:
        q: queries, ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]``: float32, float16 or bfloat16, or
            float64 (where JAX has it enabled) with ``kernel="materialized"``.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``.
        v: values, of k's shape but for the last axis.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: key position of query ``i``, less ``i``: an int, or ints ``[B]`` or
            ``[B, Tq]`` as an array or a list; ``Tk - Tq`` by default.
        key_start: first visible key, an int or ints ``[B]`` or ``[B, Tq]``.
        key_end: one past the last visible key, likewise; give ``query_offset`` with it where
            :func:`forge.attention` asks for it.
        bias: added to the scores after the softcap, differentiable: float32 or q's dtype, four
            axes, each 1 or that of ``[B, H, Tq, Tk]``; -inf hides a key. Its gradient is computed
            wherever q's is.
        mask: bool, likewise four axes; True: visible.
        sinks: one more logit for each row, with a value of 0, differentiable: ``[H]``, ``[B, H]``
            or ``[B, H, Tq]``, float32 or q's dtype.
        num_heads: ``H``; needed for 3-D arrays.
        num_kv_heads: ``Hkv``; for 3-D arrays, ``H`` by default.
        kernel: ``"fused"`` (the default) or ``"materialized"``.
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves.

    Returns:
        An array of q's dtype, and of its shape but for v's head size. Rows that see no key are 0.

    Raises:
        TypeError: wrong types or dtypes. A forward-mode
            derivative.
        ValueError: wrong shapes or values, or a combination that kernel or backend cannot serve.
        NotImplementedError: a second derivative.
        jax.errors.JaxRuntimeError: what is found while it runs: traced positions out of range,
            results that do not fit into memory. Its text has forge's message.
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, value in arrays.items():
        check_array(name, value)
    shaping = {"bias": bias, "mask": mask, "sinks": sinks}
    shaping = {name: value for name, value in shaping.items() if value is not None}
    for name, value in shaping.items():
        _check_score_array(name, value)
    positions = {"query_offset": query_offset, "key_start": key_start, "key_end": key_end}
    traced = {name: value for name, value in positions.items() if isinstance(value, jax.Array)}
    known = {name: value for name, value in positions.items() if name not in traced}
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "kernel": kernel,
        "backend": backend,
    }
    fixed = _checked(arrays, shaping, options, known, traced)
    words = {n: words_of(as_int_array(n, x)) for n, x in known.items() if x is not None}
    # Under jax.shard_map an input that all devices share has the sum of their gradients: by way of
    # this mark, whose transpose adds up.
    axes = varying_axes(q, k, v, *shaping.values(), *traced.values())
    q, k, v, shaping, traced = varying((q, k, v, shaping, traced), axes)
    out: jax.Array = _attention(fixed, q, k, v, shaping, HostPositions(words, traced))
    return out


def _checked(
    arrays: dict[str, Any],
    shaping: dict[str, Any],
    options: dict[str, Any],
    known: dict[str, Any],
    traced: dict[str, Any],
) -> Static:
    """Check what can be checked before anything runs, so that errors name the caller's line."""
    q, k, v = arrays.values()
    kernel = kernel_name(options["kernel"])
    check_dtypes({name: array.dtype.name for name, array in arrays.items()}, kernel, arrays)
    heads = head_counts(q, k, v, options["num_heads"], options["num_kv_heads"])
    of_scores = {name: options[name] for name in ("causal", "window", "softcap", "scale")}
    backend = backend_name(options["backend"])
    given = {**known, **dict.fromkeys(traced, 0)}  # given, with a value that is always in range
    compiled_options(MaskAndScale(**of_scores, **given), heads, _sums(q), kernel, backend)
    for name, value in traced.items():
        _check_positions(name, value, (heads.B, heads.Tq))
    for name, value in shaping.items():
        check_extents(name, tuple(value.shape), heads)
        if name != "mask":
            check_precision(name, value.dtype.name, q.dtype.name, value)
    fixed = {**options, "kernel": kernel}
    return Static(q.ndim, heads.B, tuple(fixed.items()))


def _check_score_array(name: str, value: object) -> None:
    if isinstance(value, jax.Array) and value.dtype == np.bool_:
        if name != "mask":
            raise TypeError(
                f"{name} must be of floating-point numbers, got bool; that is mask={name}"
            )
    elif name == "mask":
        floats = isinstance(value, jax.Array) and value.dtype.kind == "f"
        got = value.dtype if isinstance(value, jax.Array) else type(value).__name__
        raise TypeError(
            f"mask must be a jax.Array of bool, got {got}{'; that is bias=mask' * floats}"
        )
    else:
        check_array(name, value)


def _sums(q: Any) -> np.dtype[Any]:
    """The dtype of row statistics."""
    return np.dtype(np.float32) if q.dtype.name in HALF else np.dtype(q.dtype)


def _check_positions(name: str, value: Any, rows: tuple[int, int]) -> None:
    if value.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an int or an int array, [B] or [B, Tq], got {value.dtype}")
    if value.shape not in ((), rows[:1], rows):
        raise ValueError(f"{name} must have shape () or {rows[:1]} or {rows}, got {value.shape}")


def _forward_callback(
    fixed: Static, q: Any, k: Any, v: Any, shaping: dict[str, Any], positions: HostPositions
) -> Any:
    options = dict(fixed.options)
    sizes = head_counts(q, k, v, options["num_heads"], options["num_kv_heads"])
    shapes: list[tuple[int, ...]] = [(sizes.B, sizes.H, sizes.Tq), (sizes.B, sizes.H, sizes.Tq)]
    if options["kernel"] == "materialized":
        shapes.append((sizes.B, sizes.H, sizes.Tq, sizes.Tk))
    if q.dtype.name in HALF:  # o as exact as its sums are, for the backward
        shapes.append(_output_shape(q, sizes))
    kept = [jax.ShapeDtypeStruct(shape, _sums(q)) for shape in shapes]
    results = jax.pure_callback(
        OnHost(forward_on_host, fixed),
        [jax.ShapeDtypeStruct(_output_shape(q, sizes), q.dtype), *kept],
        q,
        k,
        v,
        shaping,
        positions,
        vmap_method="broadcast_all",
    )
    return varying(results, varying_axes(q))


def _output_shape(q: Any, sizes: Sizes) -> tuple[int, ...]:
    return (*q.shape[:-1], sizes.hv if q.ndim == 4 else sizes.H * sizes.hv)


def _backward_callback(
    fixed: Static,
    inputs: tuple[Any, ...],
    shaping: dict[str, Any],
    positions: HostPositions,
    kept: list[Any],
    dout: Any,
) -> Any:
    like = [*inputs, *differentiable_scores(shaping).values()]
    gradients = jax.pure_callback(
        OnHost(backward_on_host, fixed),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        inputs,
        shaping,
        positions,
        kept,
        dout,
        vmap_method="broadcast_all",
    )
    return varying(gradients, varying_axes(*inputs))


def _without_derivative(callback: Any) -> Any:
    """The callback, with a clear error where JAX asks for its derivative."""

    def refuse(fixed: Static, residuals: None, cotangents: Any) -> Any:
        raise NotImplementedError(
            "forge.jax.attention has first derivatives only, got a derivative of its gradient; "
            "where second derivatives are needed, use jax.nn.dot_product_attention"
        )

    function = jax.custom_vjp(callback, nondiff_argnums=(0,))
    function.defvjp(lambda fixed, *given: (callback(fixed, *given), None), refuse)
    return function


_forward = _without_derivative(_forward_callback)
_backward = _without_derivative(_backward_callback)


def _value(
    fixed: Static, q: Any, k: Any, v: Any, shaping: dict[str, Any], positions: HostPositions
) -> Any:
    return _forward(fixed, q, k, v, shaping, positions)[0]


def _value_and_residuals(
    fixed: Static, q: Any, k: Any, v: Any, shaping: dict[str, Any], positions: HostPositions
) -> Any:
    kept = _forward(fixed, q, k, v, shaping, positions)
    return kept[0], ((q, k, v), shaping, positions, kept)


def _gradients(fixed: Static, residuals: Any, dout: Any) -> Any:
    shaping = residuals[1]
    dq, dk, dv, *more = _backward(fixed, *residuals, dout)
    of_scores = dict.fromkeys(shaping)  # a mask has no gradient, nor have positions
    of_scores |= dict(zip(differentiable_scores(shaping), more, strict=True))
    return dq, dk, dv, of_scores, None


_differentiable = jax.custom_vjp(_value, nondiff_argnums=(0,))
_differentiable.defvjp(_value_and_residuals, _gradients)
# Outside a traced program, JAX finds what it has traced and compiled by the options.
_attention = jax.jit(_differentiable, static_argnums=(0,))
