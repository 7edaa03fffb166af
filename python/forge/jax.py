"""forge's attention for JAX, by a callback: under jit, grad, vmap, scan and checkpoint.

import forge.jax
out = forge.jax.attention(q, k, v, causal=True, window=1024, softcap=50.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

try:
    import jax
except ImportError as error:
    raise ImportError(
        "forge.jax needs JAX: pip install jax, or pip install '.[jax]' in a checkout of forge"
    ) from error

from forge._arrays import Array
from forge._attention import attention_backward, attention_forward
from forge._calls import restored
from forge._dtypes import HALF, check_dtypes, wrong_dtype
from forge._options import (
    MaskAndScale,
    Window,
    as_int_array,
    backend_name,
    compiled_options,
    head_counts,
    kernel_name,
)
from forge._saved import Kept

__all__ = ["attention"]

Positions: TypeAlias = npt.ArrayLike | jax.Array | None


class _Static(NamedTuple):
    """What is known when JAX traces a call: hashable, one compiled program for each."""

    ndim: int
    B: int
    options: tuple[tuple[str, Any], ...]
    """Keyword arguments of forge.attention_forward but for the positions."""


class _Positions(NamedTuple):
    """Operands all, so that one program serves every position: a decode loop outside jit too."""

    known: dict[str, Array]
    """Those given as ints: words of int64, which JAX would cut to int32."""
    traced: dict[str, jax.Array]


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
        v: values, of k's shape.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: key position of query 0, an int, or ints ``[B]`` as an array or a list;
            ``Tk - Tq`` by default.
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
        TypeError: wrong types or dtypes. A forward-mode
            derivative.
        ValueError: wrong shapes or values, or a combination that kernel or backend cannot serve.
        NotImplementedError: a second derivative.
        jax.errors.JaxRuntimeError: what is found while it runs: traced positions out of range,
            results that do not fit into memory. Its text has forge's message.
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, value in arrays.items():
        _check_array(name, value)
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
    fixed = _checked(arrays, options, known, traced)
    words = {n: _words(as_int_array(n, x)) for n, x in known.items() if x is not None}
    # Under jax.shard_map an input that all devices share has the sum of their gradients: by way of
    # this mark, whose transpose adds up.
    axes = _varying_axes(q, k, v, *traced.values())
    q, k, v, traced = _varying((q, k, v, traced), axes)
    out: jax.Array = _attention(fixed, q, k, v, _Positions(words, traced))
    return out


def _varying_axes(*arrays: Any) -> frozenset[str]:
    """Axes of a jax.shard_map's mesh along which an array differs from device to device."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        aval = jax.typeof(x)
        known = getattr(aval, "manual_axis_type", None)  # JAX 0.10; before, and from 0.7 on: vma
        axes |= frozenset(getattr(aval, "vma", ()) if known is None else known.varying)
    return axes


def _varying(tree: Any, axes: frozenset[str]) -> Any:
    """The same arrays, known to differ along these axes."""

    def mark(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying_axes(x)))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # JAX 0.7

    return jax.tree.map(mark, tree)


def _checked(
    arrays: dict[str, Any], options: dict[str, Any], known: dict[str, Any], traced: dict[str, Any]
) -> _Static:
    """Check what can be checked before anything runs, so that errors name the caller's line."""
    q, k, v = arrays.values()
    kernel = kernel_name(options["kernel"])
    check_dtypes({name: array.dtype.name for name, array in arrays.items()}, kernel, arrays)
    heads = head_counts(q, k, v, options["num_heads"], options["num_kv_heads"])
    shaping = {name: options[name] for name in ("causal", "window", "softcap", "scale")}
    backend = backend_name(options["backend"])
    given = {**known, **dict.fromkeys(traced, 0)}  # given, with a value that is always in range
    compiled_options(MaskAndScale(**shaping, **given), heads, _sums(q), kernel, backend)
    for name, value in traced.items():
        _check_positions(name, value, heads.B)
    fixed = {**options, "kernel": kernel}
    return _Static(q.ndim, heads.B, tuple(fixed.items()))


def _check_array(name: str, value: object) -> None:
    if not isinstance(value, jax.Array):
        raise TypeError(f"{name} must be a jax.Array, got {type(value).__name__}")
    if value.dtype.name not in ("float32", "float64", *HALF):
        raise TypeError(wrong_dtype(name, value.dtype, value))


def _sums(q: Any) -> np.dtype[Any]:
    """The dtype of row statistics."""
    return np.dtype(np.float32) if q.dtype.name in HALF else np.dtype(q.dtype)


def _words(positions: int | Array) -> Array:
    """Positions as two words each, on a last axis."""
    return np.asarray(positions).astype(np.int64)[..., None].view(np.int32)


def _whole(words: Array) -> Array:
    positions: Array = np.ascontiguousarray(words).view(np.int64)[..., 0]
    return positions


def _check_positions(name: str, value: Any, B: int) -> None:
    if value.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an int or an int array [B], got {value.dtype}")
    if value.shape not in ((), (B,)):
        raise ValueError(f"{name} must have shape () or ({B},), got {value.shape}")


def _folded(x: Any, leading: int) -> Array:
    """The axes that vmap put in front, and the batch axis, as one."""
    array = np.asarray(x)
    return array.reshape(math.prod(array.shape[: leading + 1]), *array.shape[leading + 1 :])


def _keywords(fixed: _Static, given: _Positions, leading: int, batch: int) -> dict[str, Any]:
    """Options and positions of a call whose batch is ``batch`` sequences, vmap's included."""
    arrays = {name: _whole(np.asarray(words)) for name, words in given.known.items()}
    arrays |= {name: np.asarray(value) for name, value in given.traced.items()}
    positions = {}
    for name, array in arrays.items():
        if array.ndim == leading:  # one int for a whole batch
            array = np.broadcast_to(array[..., None], (*array.shape, fixed.B))
        positions[name] = array.reshape(batch)
    return {**dict(fixed.options), **positions}


def _host_forward(fixed: _Static, q: Any, k: Any, v: Any, positions: _Positions) -> list[Array]:
    leading = q.ndim - fixed.ndim
    arrays = [_folded(x, leading) for x in (q, k, v)]
    keywords = _keywords(fixed, positions, leading, arrays[0].shape[0])
    out, saved = attention_forward(*arrays, **keywords)
    results = [out, saved.row_max, saved.row_sum]
    if saved._probs is not None:
        results.append(saved._probs)
    if saved.out is not out:
        results.append(saved.out)
    return [x.reshape(*q.shape[: leading + 1], *x.shape[1:]) for x in results]


def _host_backward(
    fixed: _Static, inputs: tuple[Any, ...], positions: _Positions, kept: list[Any], dout: Any
) -> list[Array]:
    leading = dout.ndim - fixed.ndim
    arrays = {name: _folded(x, leading) for name, x in zip("qkv", inputs, strict=True)}
    keywords = _keywords(fixed, positions, leading, arrays["q"].shape[0])
    heads = keywords.pop("num_heads"), keywords.pop("num_kv_heads")
    kernel, backend = keywords.pop("kernel"), keywords.pop("backend")
    out, row_max, row_sum, *more = (_folded(x, leading) for x in kept)
    if arrays["q"].dtype.name in HALF:
        out = more.pop()
    saved = restored(
        dict(arrays),
        Kept(out, row_max, row_sum, *more),
        MaskAndScale(**keywords),
        heads=heads,
        kernel=kernel,
        backend=backend,
    )
    gradients = attention_backward(_folded(dout, leading), saved)
    return [x.reshape(*dout.shape[: leading + 1], *x.shape[1:]) for x in gradients]


@dataclass(frozen=True)
class _OnHost:
    """A function of the host's for one set of options.

    Equal for equal options, which is what JAX keys compiled programs on: a closure would be another
    function at every call, compiled again and never let go.
    """

    function: Callable[..., list[Array]]
    fixed: _Static

    def __call__(self, *given: Any) -> list[Array]:
        return self.function(self.fixed, *given)


def _forward_callback(
    fixed: _Static, q: jax.Array, k: jax.Array, v: jax.Array, positions: _Positions
) -> Any:
    options = dict(fixed.options)
    sizes = head_counts(q, k, v, options["num_heads"], options["num_kv_heads"])
    shapes: list[tuple[int, ...]] = [(sizes.B, sizes.H, sizes.Tq), (sizes.B, sizes.H, sizes.Tq)]
    if options["kernel"] == "materialized":
        shapes.append((sizes.B, sizes.H, sizes.Tq, sizes.Tk))
    if q.dtype.name in HALF:  # o as exact as its sums are, for the backward
        shapes.append(q.shape)
    kept = [jax.ShapeDtypeStruct(shape, _sums(q)) for shape in shapes]
    results = jax.pure_callback(
        _OnHost(_host_forward, fixed),
        [jax.ShapeDtypeStruct(q.shape, q.dtype), *kept],
        q,
        k,
        v,
        positions,
        vmap_method="broadcast_all",
    )
    return _varying(results, _varying_axes(q))


def _backward_callback(
    fixed: _Static, inputs: tuple[Any, ...], positions: _Positions, kept: list[Any], dout: Any
) -> Any:
    gradients = jax.pure_callback(
        _OnHost(_host_backward, fixed),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs],
        inputs,
        positions,
        kept,
        dout,
        vmap_method="broadcast_all",
    )
    return _varying(gradients, _varying_axes(*inputs))


def _without_derivative(callback: Any) -> Any:
    """The callback, with a clear error where JAX asks for its derivative."""

    def refuse(fixed: _Static, residuals: None, cotangents: Any) -> Any:
        raise NotImplementedError(
            "forge.jax.attention has first derivatives only, got a derivative of its gradient; "
            "where second derivatives are needed, use jax.nn.dot_product_attention"
        )

    function = jax.custom_vjp(callback, nondiff_argnums=(0,))
    function.defvjp(lambda fixed, *given: (callback(fixed, *given), None), refuse)
    return function


_forward = _without_derivative(_forward_callback)
_backward = _without_derivative(_backward_callback)


def _value(fixed: _Static, q: Any, k: Any, v: Any, positions: _Positions) -> Any:
    return _forward(fixed, q, k, v, positions)[0]


def _value_and_residuals(fixed: _Static, q: Any, k: Any, v: Any, positions: _Positions) -> Any:
    kept = _forward(fixed, q, k, v, positions)
    return kept[0], ((q, k, v), positions, kept)


def _gradients(fixed: _Static, residuals: Any, dout: Any) -> Any:
    return *_backward(fixed, *residuals, dout), None  # positions have no gradient


_differentiable = jax.custom_vjp(_value, nondiff_argnums=(0,))
_differentiable.defvjp(_value_and_residuals, _gradients)
# Outside a traced program, JAX finds what it has traced and compiled by the options.
_attention = jax.jit(_differentiable, static_argnums=(0,))
