"""The public functions: attention, attention_forward and attention_backward."""

from __future__ import annotations

from forge import _forge
from forge._arrays import Array, as_bool, as_input
from forge._calls import gradient_arrays, plain_gradients, prepare, run_backward, run_forward
from forge._dtypes import wrong_precision
from forge._options import MaskAndScale, Positions, Window
from forge._saved import Saved, saved_plainly


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
        q: queries, ``[B, Tq, H, hd]`` or ``[B, Tq, H * hd]``, float32, float16 or bfloat16 (of
            ml_dtypes), or float64 with ``kernel="materialized"``. Any strides are read in place
            as long as the last axis has unit stride; byte-swapped, misaligned or last-axis-strided
            arrays are copied, and :func:`last_run` says so. Other libraries' arrays that speak
            DLPack and are on the CPU are read in place as well.
        k: keys, ``[B, Tk, Hkv, hd]`` or ``[B, Tk, Hkv * hd]``, of q's rank and dtype, or of half
            precision under a float32 q. Query head ``h`` reads key/value head ``h // (H / Hkv)``.
        v: values, of k's shape and dtype.
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
        kernel: ``"fused"`` (the default; O(T) memory) or ``"materialized"`` (keeps ``p``;
            a plain loop nest in a fixed order, float32 and float64).
        backend: ``"cpu"`` or ``"metal"``; by default FORGE_BACKEND, else the first that serves.
        out: array to write the result into, of q's dtype, or float32 under half precision; it may
            overlap no input.

    Returns:
        ``o`` in q's rank and dtype. Rows that see no key are 0.

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
    return run_forward(
        prepare(values, given, (num_heads, num_kv_heads), kernel, backend), out, keep=False
    )[0]


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
    return run_forward(
        prepare(values, given, (num_heads, num_kv_heads), kernel, backend), out, keep=True
    )


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
        dq: array to write the gradient of q into; q's shape and dtype, or float32 under half
            precision, overlapping nothing else.
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
        plain = plain_gradients(dout, saved)
        if plain is not None:
            return plain
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
        expected = call.query_shape() if name == "dout" else call.row_shape()
        if array.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
    read = {name: taken.given for name, taken in given.items()}
    outputs, results = gradient_arrays(saved, read, {"dq": dq, "dk": dk, "dv": dv}, accumulate)
    run_backward(saved, inputs, outputs, accumulate, arrays)
    return results["dq"], results["dk"], results["dv"]
