"""attention, attention_forward, attention_backward and what is saved between them."""

from __future__ import annotations

import numpy as np

from forge import _forge, _run
from forge._arrays import (
    IN_PLACE,
    Array,
    as_bool,
    as_input,
    as_output,
    check_overlap,
    float64_for_fused,
    new_array,
    split_heads,
    wrong_precision,
)
from forge._memory import check_memory
from forge._options import (
    MaskAndScale,
    Positions,
    Window,
    backend_name,
    compiled_options,
    head_counts,
    kernel_name,
)
from forge._saved import ALL_IN_PLACE, Call, Kept, Saved, saved_plainly


def _check_dtype(arrays: dict[str, Array], kernel: str, values: dict[str, object]) -> None:
    """Check the dtypes of the arrays, and name the way out in the words of the caller's values."""
    dtype = arrays["q"].dtype
    if dtype == np.float64 and kernel == "fused":
        raise TypeError(float64_for_fused(values["q"]))
    for name, array in arrays.items():
        if array.dtype != dtype:
            raise TypeError(wrong_precision(name, array.dtype, dtype, values[name]))


def _prepare(
    values: dict[str, object],
    given: MaskAndScale,
    head_counts_given: tuple[int | None, int | None],
    kernel: object,
    backend: object,
) -> Call:
    family = kernel_name(kernel)
    inputs = {name: as_input(name, value) for name, value in values.items()}
    arrays = {name: taken.array for name, taken in inputs.items()}
    q, k, v = arrays.values()
    _check_dtype(arrays, family, values)
    sizes = head_counts(q, k, v, *head_counts_given)
    return Call(
        q=split_heads(q, sizes.H),
        k=split_heads(k, sizes.Hkv),
        v=split_heads(v, sizes.Hkv),
        ndim=q.ndim,
        sizes=sizes,
        options=compiled_options(given, sizes, q.dtype, family, backend_name(backend)),
        kernel=family,
        given={name: taken.given for name, taken in inputs.items()},
        arrays={name: taken.how for name, taken in inputs.items()},
    )


def _forward(call: Call, out: object) -> tuple[Array, Saved]:
    shape, dtype = call.query_shape(), call.q.dtype
    sizes = call.sizes
    needed: dict[str, tuple[int, ...]] = {"row_max": call.row_shape(), "row_sum": call.row_shape()}
    if call.kernel == "materialized":
        needed["p"] = (sizes.B, sizes.H, sizes.Tq, sizes.Tk)
    if out is None:
        needed["out"] = shape
    else:
        as_output("out", out, shape, dtype)
        check_overlap({"out": np.asarray(out)}, call.given)
    check_memory(needed, dtype, _less_memory(call))
    new = {name: new_array(extents, dtype) for name, extents in needed.items()}
    result: Array = new["out"] if out is None else out  # type: ignore[assignment]
    o = np.asarray(result)
    arrays = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "o": split_heads(o, sizes.H),
        "row_max": new["row_max"],
        "row_sum": new["row_sum"],
    }
    if "p" in new:
        arrays["p"] = new["p"]
    ran = _forge.run("forward", arrays, False, call.options)
    _run.record_call(ran, call.kernel, call.arrays)
    return result, Saved(call, o, new["row_max"], new["row_sum"], new.get("p"), ran["backend"])


def restored(
    values: dict[str, object],
    kept: Kept,
    given: MaskAndScale,
    *,
    heads: tuple[int | None, int | None],
    kernel: str | None,
    backend: str | None,
) -> Saved:
    """Return what attention_forward saved, from what it was given and what was kept of it."""
    call = _prepare(values, given, heads, kernel, backend)
    materialized = call.kernel == "materialized"
    return Saved(
        call,
        as_input("out", kept.out).array,
        np.ascontiguousarray(kept.row_max),
        np.ascontiguousarray(kept.row_sum),
        np.ascontiguousarray(kept.probs) if materialized else None,
        call.options["backend"],
    )


def _less_memory(call: Call) -> str:
    if call.kernel == "fused":
        return ""
    return "kernel='fused' needs no p" + (" (in float32)" if call.q.dtype == np.float64 else "")


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
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    kernel: str | None = None,
    backend: str | None = None,
    out: Array | None = None,
) -> Array:
    """Exact attention, ``softmax(mask(cap(scale * q k^T))) v``.

    Args:
        q: queries, float32 ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]``. Any strides are read in place
            as long as the last axis has unit stride; byte-swapped, misaligned or last-axis-strided
            arrays are copied, and :func:`last_run` says so. Other libraries' arrays that speak
            DLPack and are on the CPU are read in place as well.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``, of q's rank and dtype. Query head
            ``h`` reads key/value head ``h // (H / Hkv)``.
        v: values, of k's shape.
        causal: a query sees no key after its own position.
        window: an int >= 1: that many keys up to and including the query's position;
            ``(left, right)``: so many keys on either side, itself not counted, -1 for no limit.
        softcap: ``s = softcap * tanh(x / softcap)`` before the mask; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        query_offset: key position of query 0, an int, or ints ``[B]`` as an array, a list or
            whatever else NumPy makes an integer array of. By default ``Tk - Tq``: the last query
            stands at the last key.
        key_start: first visible key, an int or ints ``[B]`` in ``[0, Tk]``.
        key_end: one past the last visible key, likewise. It moves no query: where ``Tq != Tk`` and
            a window, or ``causal`` with ``Tq > 1``, counts positions, ``query_offset`` must be
            given with it (``key_end - Tq`` for a cache, ``Tk - Tq`` for padding).
        num_heads: ``H``; needed for 3-D arrays.
        num_kv_heads: ``Hkv``; for 3-D arrays, ``H`` by default.
        kernel: ``"fused"`` (the default; O(T) memory, float32) or ``"materialized"`` (keeps ``p``;
            a plain loop nest in a fixed order, float32 and float64).
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves.
        out: array to write the result into; it may overlap no input.

    Returns:
        ``o`` in q's rank and dtype. Rows that see no key are 0.

    Raises:
        TypeError: wrong types or dtypes.
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
    return _forward(_prepare(values, given, (num_heads, num_kv_heads), kernel, backend), out)[0]


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
    return _forward(_prepare(values, given, (num_heads, num_kv_heads), kernel, backend), out)


def attention_backward(
    dout: object,
    saved: Saved,
    *,
    dlse: object = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    accumulate: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v.

    ``ds = p * (dp - d)`` with ``dp = dout . v`` and ``d = dout . o - dlse`` (FlashAttention-2,
    Dao 2023, section 3.1.2), times ``1 - tanh(x / softcap)^2`` under a softcap.

    Args:
        dout: gradient of ``o``; o's shape and dtype.
        saved: from :func:`attention_forward`; the options, the kernel and the backend are its own.
        dlse: gradient of ``saved.lse``, ``[B, H, Tq]``; None is 0.
        dq: array to write the gradient of q into; q's shape, overlapping nothing else.
        dk: likewise for k.
        dv: likewise for v.
        accumulate: add to what dq, dk and dv hold; all three must then be given.

    Returns:
        ``(dq, dk, dv)``: new arrays in the rank of q, or the very arrays handed in. Keys that
        nobody sees get exact zeros.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, overlapping outputs, or accumulate without outputs.
        MemoryError: the gradients do not fit.
        RuntimeError: the device failed; the content of the outputs is then undefined.
    """
    if not isinstance(saved, Saved):
        raise TypeError(f"saved must come from attention_forward, got {type(saved).__name__}")
    accumulate = as_bool("accumulate", accumulate)
    call = saved._call
    if dlse is None and dq is None and dk is None and dv is None and not accumulate:
        plain = _plain_gradients(dout, saved)
        if plain is not None:
            return plain
    dtype = call.q.dtype
    given = {"dout": as_input("dout", dout)}
    if dlse is not None:
        given["dlse"] = as_input("dlse", dlse)
    inputs = {name: taken.array for name, taken in given.items()}
    arrays = {**call.arrays, **{name: taken.how for name, taken in given.items()}}
    for name, array in inputs.items():
        if array.dtype != dtype:
            value = dout if name == "dout" else dlse
            raise TypeError(wrong_precision(name, array.dtype, dtype, value))
        expected = call.query_shape() if name == "dout" else call.row_shape()
        if array.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
    read = {name: taken.given for name, taken in given.items()}
    outputs, results = _gradients(saved, read, {"dq": dq, "dk": dk, "dv": dv}, accumulate)
    _run_backward(saved, inputs, outputs, accumulate, arrays)
    return results["dq"], results["dk"], results["dv"]


def _plain_gradients(dout: object, saved: Saved) -> tuple[Array, Array, Array] | None:
    """Return new gradients where the compiled module takes the call as it is, else None."""
    call = saved._call
    if saved.backend != "cpu" or call.arrays != ALL_IN_PLACE:
        return None
    return _forge.attention_backward(
        dout, call.q, call.k, call.v, saved.out, saved.row_max, saved.row_sum, call.options
    )


def _gradients(
    saved: Saved, read: dict[str, Array], given: dict[str, Array | None], accumulate: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the arrays to write into and those to return: views of, or the very arrays given."""
    call, dtype = saved._call, saved._call.q.dtype
    shapes = {"dq": call.query_shape(), "dk": call.key_shape(), "dv": call.key_shape()}
    outputs, results = {}, {}
    for name, value in given.items():
        if value is not None:
            outputs[name] = as_output(name, value, shapes[name], dtype)
            results[name] = value
        elif accumulate:
            raise ValueError(f"{name} must be given to accumulate into, got None")
    if outputs:
        check_overlap(outputs, {**call.given, **read, **saved._arrays()})
    needed = {name: shape for name, shape in shapes.items() if name not in outputs}
    own = {"d_row": call.row_shape()} if call.kernel == "materialized" else {}
    check_memory({**needed, **own}, dtype)
    for name, shape in needed.items():
        outputs[name] = results[name] = new_array(shape, dtype)
    return outputs, results


def _run_backward(
    saved: Saved,
    inputs: dict[str, Array],
    outputs: dict[str, Array],
    accumulate: bool,
    arrays: dict[str, str],
) -> None:
    call = saved._call
    H, Hkv = call.sizes.H, call.sizes.Hkv
    options: _forge.Options = {**call.options, "backend": saved.backend}
    given = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "o": split_heads(saved.out, H),
        "dout": split_heads(inputs["dout"], H),
        "row_max": saved.row_max,
        "row_sum": saved.row_sum,
        "dq": split_heads(outputs["dq"], H),
        "dk": split_heads(outputs["dk"], Hkv),
        "dv": split_heads(outputs["dv"], Hkv),
    }
    if saved._probs is not None:
        given["p"] = saved._probs
    if "dlse" in inputs:
        given["dlse"] = np.ascontiguousarray(inputs["dlse"])
        if given["dlse"] is not inputs["dlse"] and arrays["dlse"] == IN_PLACE:
            arrays["dlse"] = "copied: not C-contiguous"
    ran = _forge.run("backward", given, accumulate, options)
    _run.record_call(ran, call.kernel, arrays)
