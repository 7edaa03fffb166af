"""What forge.jax computes on the host: JAX's operands as arrays, with vmap's axes folded."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from forge._arrays import Array
from forge._attention import attention_backward, attention_forward
from forge._calls import restored
from forge._dtypes import HALF
from forge._options import MaskAndScale
from forge._saved import Kept
from forge._scores import ScoreArrays


class Static(NamedTuple):
    """What is known when JAX traces a call: hashable, one compiled program for each."""

    ndim: int
    B: int
    options: tuple[tuple[str, Any], ...]
    """Keyword arguments of forge.attention_forward but for the positions."""


class Positions(NamedTuple):
    """Operands all, so that one program serves every position: a decode loop outside jit too."""

    known: dict[str, Array]
    """Those given as ints: words of int64, which JAX would cut to int32."""
    traced: dict[str, jax.Array]


def words_of(positions: int | Array) -> Array:
    """Positions as two words each, on a last axis."""
    return np.asarray(positions).astype(np.int64)[..., None].view(np.int32)


def _whole(words: Array) -> Array:
    positions: Array = np.ascontiguousarray(words).view(np.int64)[..., 0]
    return positions


def _folded(x: Any, leading: int) -> Array:
    """The axes that vmap put in front, and the batch axis, as one."""
    array = np.asarray(x)
    return array.reshape(math.prod(array.shape[: leading + 1]), *array.shape[leading + 1 :])


def _keywords(fixed: Static, given: Positions, leading: int, batch: int) -> dict[str, Any]:
    """Options and positions of a call whose batch is ``batch`` sequences, vmap's included."""
    arrays = {name: _whole(np.asarray(words)) for name, words in given.known.items()}
    arrays |= {name: np.asarray(value) for name, value in given.traced.items()}
    positions = {}
    for name, array in arrays.items():
        if array.ndim == leading:  # one int for a whole batch
            array = np.broadcast_to(array[..., None], (*array.shape, fixed.B))
        positions[name] = array.reshape(batch, *array.shape[leading + 1 :])
    return {**dict(fixed.options), **positions}


def _batched_sinks(sinks: Any, leading: int) -> Any:
    """Sinks with a batch axis, of 1 where they have none."""
    return sinks[..., None, :] if sinks.ndim == leading + 1 else sinks


def _folded_scores(fixed: Static, shaping: dict[str, Any], leading: int) -> dict[str, Array]:
    """bias, mask and sinks: under vmap for every sequence of all batches."""
    if leading == 0:
        return {name: np.asarray(x) for name, x in shaping.items()}
    arrays = {}
    for name, x in shaping.items():
        array = _batched_sinks(np.asarray(x), leading) if name == "sinks" else np.asarray(x)
        shape = (*array.shape[:leading], fixed.B, *array.shape[leading + 1 :])
        arrays[name] = _folded(np.broadcast_to(array, shape), leading)
    return arrays


def _unfolded(gradient: Array, like: Any, name: str, leading: int) -> Array:
    """A gradient of bias or sinks, summed over what vmap's folding has repeated."""
    if leading:
        own = _batched_sinks(like, leading) if name == "sinks" else like
        gradient = gradient.reshape(*own.shape[:leading], -1, *own.shape[leading + 1 :])
        if own.shape[leading] == 1:
            gradient = gradient.sum(leading, keepdims=True)
    found: Array = gradient.reshape(like.shape).astype(like.dtype)
    return found


def forward_on_host(
    fixed: Static, q: Any, k: Any, v: Any, shaping: dict[str, Any], positions: Positions
) -> list[Array]:
    leading = q.ndim - fixed.ndim
    arrays = [_folded(x, leading) for x in (q, k, v)]
    keywords = _keywords(fixed, positions, leading, arrays[0].shape[0])
    keywords |= _folded_scores(fixed, shaping, leading)
    out, saved = attention_forward(*arrays, **keywords)
    results = [out, saved.row_max, saved.row_sum]
    if saved._probs is not None:
        results.append(saved._probs)
    if saved.out is not out:
        results.append(saved.out)
    return [x.reshape(*q.shape[: leading + 1], *x.shape[1:]) for x in results]


def backward_on_host(
    fixed: Static,
    inputs: tuple[Any, ...],
    shaping: dict[str, Any],
    positions: Positions,
    kept: list[Any],
    dout: Any,
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
        shaping=ScoreArrays(**_folded_scores(fixed, shaping, leading)),
    )
    wanted = differentiable_scores(shaping)
    gradients = attention_backward(
        _folded(dout, leading),
        saved,
        dbias="bias" in wanted or None,
        dsinks="sinks" in wanted or None,
    )
    results = [x.reshape(*dout.shape[: leading + 1], *x.shape[1:]) for x in gradients[:3]]
    of_scores = zip(wanted.items(), gradients[3:], strict=True)
    return results + [_unfolded(x, like, name, leading) for (name, like), x in of_scores]


def differentiable_scores(shaping: dict[str, Any]) -> dict[str, Any]:
    return {name: shaping[name] for name in ("bias", "sinks") if name in shaping}
