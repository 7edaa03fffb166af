"""The public functions: attention, attention_forward and attention_backward."""

from __future__ import annotations

from forge import _forge
from forge._arrays import Array, as_bool, as_input
from forge._calls import (
    gradient_arrays,
    of_the_whole,
    plain_gradients,
    prepare,
    run_backward,
    run_forward,
)
from forge._dtypes import wrong_precision
from forge._options import MaskAndScale, Positions, Window
from forge._saved import Saved, saved_plainly
from forge._scores import ScoreArrays


def attention(
    q: object,
    k: object,
    v: object,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions = None,
    key_start: Positions = None,
    key_end: Positions = None,
    bias: object = None,
    mask: object = None,
    sinks: object = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    out: Array | None = None,
) -> Array:
    """Exact attention, ``softmax(mask(cap(scale * q k^T) + bias)) v``.

    Args:
        q: queries, ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]``, float32, float16 or bfloat16 (of
            ml_dtypes), or float64 with ``kernel="materialized"``. Any strides are read in place
            as long as the last axis has unit stride; byte-swapped, misaligned or last-axis-strided
            arrays are copied, and :func:`last_run` says so. Other libraries' arrays that speak
            DLPack and are on the CPU are read in place as well.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``, of q's rank and dtype, or of half
            precision under a float32 q. Query head ``h`` reads key/value head ``h // (H / Hkv)``.
        v: values, of k's dtype, ``[B, Tk, Hkv, hv]`` or ``[B, Tk, Hkv * hv]``; ``hv`` need not be
            ``hd``, and ``v`` may be a view of ``k``.
        causal: a query sees no key after its own position.
        window: an int >= 1: that many keys up to and including the query's position;
            ``(left, right)``: so many keys on either side, itself not counted, -1 for no limit.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: query ``i`` stands at key position ``i + query_offset``; an int, ints ``[B]``
            or ints ``[B, Tq]``, one for each query, as an array, a list or whatever else NumPy
            makes an integer array of. By default ``Tk - Tq``: the last query stands at the last
            key.
        key_start: first visible key, an int or ints ``[B]`` or ``[B, Tq]`` in ``[0, Tk]``. With
            ``key_end`` a run of keys for each query, in any order: packed sequences
            (:func:`packed`), chunks, blocks, prefixes.
        key_end: one past the last visible key, likewise. It moves no query: where ``Tq != Tk`` and
            a window, or ``causal`` with ``Tq > 1``, counts positions, ``query_offset`` must be
            given with it (``key_end - Tq`` for a cache, ``Tk - Tq`` for padding).
        bias: added to the scores after the softcap; float32 or q's dtype, four axes, each 1 or
            that of ``[B, H, Tq, Tk]``, of any strides. -inf hides a key.
        mask: bool, likewise four axes; True: visible, where the other options leave it so.
        sinks: one more logit for each row, with a value of 0: ``[H]``, ``[B, H]`` or
            ``[B, H, Tq]``, float32 or q's dtype; not scaled, capped or masked, -inf for none.
        num_heads: ``H``; needed for 3-D arrays.
        num_kv_heads: ``Hkv``; for 3-D arrays, ``H`` by default.
        kernel: ``"fused"`` (the default; O(T) memory) or ``"materialized"`` (keeps ``p``;
            a plain loop nest in a fixed order, float32 and float64).
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves.
        out: array to write the result into, of q's dtype, or float32 under half precision; it may
            overlap no input.

    Returns:
        ``o`` in q's rank and dtype, ``[B, Tq, H, hv]`` or ``[B, Tq, H * hv]``. Rows that see no
        key, or nothing but scores of -inf, are 0.

    Raises:
        TypeError: wrong types or dtypes.
        ImportError: bfloat16 of another library, and ml_dtypes is not there.
        ValueError: wrong shapes or values, or a combination that kernel or backend cannot serve.
        MemoryError: ``p`` or the result does not fit; raised before anything is allocated.
        RuntimeError: the device failed; the content of ``out`` is then undefined.
    """
    plain = _forge.attention(
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
        out,
    )
    if plain is not None:
        return plain
    given = MaskAndScale(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        query_offset=query_offset,
        key_start=key_start,
        key_end=key_end,
    )
    values = {"q": q, "k": k, "v": v}
    shaping = ScoreArrays(bias=bias, mask=mask, sinks=sinks)
    call = prepare(values, given, (num_heads, num_kv_heads), kernel, backend, shaping)
    return run_forward(call, out, keep=False)[0]


def attention_forward(
    q: object,
    k: object,
    v: object,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions = None,
    key_start: Positions = None,
    key_end: Positions = None,
    bias: object = None,
    mask: object = None,
    sinks: object = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    out: Array | None = None,
) -> tuple[Array, Saved]:
    """Exact attention, and what its backward needs.

    Takes what :func:`attention` takes, raises what it raises.

    Returns:
        ``(o, saved)``: :func:`attention_backward` takes ``saved``, options and all.
    """
    plain = _forge.attention_forward(
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
        out,
    )
    if plain is not None:
        return saved_plainly(q, k, v, plain)  # type: ignore[arg-type]  # plain: they are arrays
    given = MaskAndScale(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        query_offset=query_offset,
        key_start=key_start,
        key_end=key_end,
    )
    values = {"q": q, "k": k, "v": v}
    shaping = ScoreArrays(bias=bias, mask=mask, sinks=sinks)
    call = prepare(values, given, (num_heads, num_kv_heads), kernel, backend, shaping)
    return run_forward(call, out, keep=True)


def attention_backward(
    dout: object,
    saved: Saved,
    *,
    dlse: object = None,
    whole: tuple[object, object] | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dbias: Array | bool | None = None,
    dsinks: Array | bool | None = None,
    accumulate: bool = False,
) -> tuple[Array, ...]:
    """Gradients of q, k and v, and of bias and sinks where they are asked for.

    ``ds = p * (dp - d)`` with ``dp = dout . v`` and ``d = dout . o - dlse`` (FlashAttention-2,
    Dao 2023, section 3.1.2), times ``1 - tanh(x / softcap)^2`` under a softcap.

    Args:
        dout: gradient of ``o``; o's shape and dtype.
        saved: from :func:`attention_forward`; the options, the kernel and the backend are its own.
        dlse: gradient of ``saved.lse``, ``[B, H, Tq]``; None is 0.
        whole: ``(o, lse)`` over all keys, where ``saved`` is of a part of them (:func:`merge`): the
            gradients are the part's share, and those of all parts add up. ``o`` in float32 or q's
            dtype, ``lse`` in float32. ``p = exp(s - lse)`` then, with a relative error of about
            ``2^-24 |lse|``.
        dq: array to write the gradient of q into; q's shape and dtype, or float32 under half
            precision, overlapping nothing else.
        dk: likewise for k.
        dv: likewise for v.
        dbias: True, or an array of bias's shape, in its dtype or float32: ``p * (dp - d)``, summed
            over the axes where bias has 1, in an order that positions alone decide.
        dsinks: likewise for sinks: ``-p_sink * d``, ``p_sink = exp(sink - lse)``.
        accumulate: add to what the gradients hold; all of them must then be arrays.

    Returns:
        ``(dq, dk, dv)``, then ``dbias`` and ``dsinks`` where they are asked for: new arrays in the
        rank of q (those two in float32, or float64), or the very arrays handed in. Keys that no
        query sees get exact zeros.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, overlapping outputs, accumulate without outputs, ``dbias``
            without a bias, ``dsinks`` without sinks, ``whole`` with ``kernel="materialized"``.
        MemoryError: the gradients do not fit.
        RuntimeError: the device failed; the content of the outputs is then undefined.
    """
    if not isinstance(saved, Saved):
        raise TypeError(f"saved must come from attention_forward, got {type(saved).__name__}")
    accumulate = as_bool("accumulate", accumulate)
    call = saved._call
    given_outputs = (dlse, whole, dq, dk, dv, dbias, dsinks)
    if all(value is None for value in given_outputs) and not accumulate:
        plain = plain_gradients(dout, saved)
        if plain is not None:
            return plain
    if whole is not None:
        saved = of_the_whole(saved, whole)
    given = {"dout": as_input("dout", dout)}
    if dlse is not None:
        given["dlse"] = as_input("dlse", dlse)
    inputs = {name: taken.array for name, taken in given.items()}
    arrays = {**call.arrays, **{name: taken.how for name, taken in given.items()}}
    for name, array in inputs.items():
        element, got = call.element, given[name].element.name
        if name == "dlse":
            element = element.sums
        if got != element.name:
            value, like = (dout, "q") if name == "dout" else (dlse, "saved.lse")
            raise TypeError(wrong_precision(name, got, element.name, value, like))
        expected = call.output_shape() if name == "dout" else call.row_shape()
        if array.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
    read = {name: taken.given for name, taken in given.items()}
    wanted: dict[str, object] = {"dq": dq, "dk": dk, "dv": dv}
    wanted |= {
        name: value for name, value in (("dbias", dbias), ("dsinks", dsinks)) if value is not None
    }
    outputs, results = gradient_arrays(saved, read, wanted, accumulate)
    run_backward(saved, inputs, outputs, accumulate, arrays)
    return tuple(results[name] for name in wanted)
