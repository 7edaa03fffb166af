"""The four materialized kernels one by one, for parity tests and for porting training loops.

Each computes in a fixed order, one rounding an operation, on the caller's float32 arrays: nothing
is copied, nothing allocated. float64 and half precision are TypeErrors: those are for
``forge.attention`` (float64 with ``kernel="materialized"``, float16 and bfloat16 with
``kernel="fused"``). An array that the kernels cannot use in place is an error here. The
three backward kernels add to what their outputs hold: zero them first, or hand in gradients to add
to.

Arrays are ``[B, T, heads, hd]``, or ``[B, T, heads * hd]`` with ``num_heads``. ``p`` is
``[B, H, Tq, Tk]``; ``row_max``, ``row_sum``, ``d_row`` and ``dlse`` are ``[B, H, Tq]``; these are
C-contiguous.
"""

from __future__ import annotations

from forge import _forge
from forge._arrays import (
    IN_PLACE,
    Array,
    as_input,
    as_output,
    check_overlap,
    split_heads,
)
from forge._dtypes import FLOAT32, as_float
from forge._options import (
    MaskAndScale,
    Positions,
    Sizes,
    Window,
    backend_name,
    compiled_options,
    head_counts,
)
from forge._run import record
from forge._scores import ScoreArrays, score_inputs

__all__ = [
    "attention_bwd_d_f32",
    "attention_bwd_dkv_f32",
    "attention_bwd_dq_f32",
    "attention_fwd_f32",
]


def attention_fwd_f32(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    p: Array,
    row_max: Array,
    row_sum: Array,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions = None,
    key_start: Positions = None,
    key_end: Positions = None,
    bias: Array | None = None,
    mask: Array | None = None,
    sinks: Array | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    backend: str | None = None,
) -> None:
    """Write ``o``, ``p`` and the row statistics ``m`` and ``l``; options as in forge.attention.

    Raises:
        TypeError: an array that is no float32 ndarray, or an option of the wrong type.
        ValueError: a wrong shape, value or layout, or outputs that overlap.
    """
    given = MaskAndScale(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        query_offset=query_offset,
        key_start=key_start,
        key_end=key_end,
    )
    inputs = _inputs(q=q, k=k, v=v)
    heads = head_counts(inputs["q"], inputs["k"], inputs["v"], num_heads, num_kv_heads)
    rows = (heads.B, heads.H, heads.Tq)
    inputs |= _scores(ScoreArrays(bias=bias, mask=mask, sinks=sinks), heads)
    outputs = _outputs(
        inputs,
        o=(o, _output_shape(inputs["q"], heads)),
        p=(p, (*rows, heads.Tk)),
        row_max=(row_max, rows),
        row_sum=(row_sum, rows),
    )
    _run("forward", inputs, outputs, heads, _options(given, heads, backend))


def attention_bwd_d_f32(
    o: Array,
    dout: Array,
    d_row: Array,
    *,
    dlse: Array | None = None,
    num_heads: int | None = None,
    backend: str | None = None,
) -> None:
    """Write ``d_row = dout . o - dlse``, ``[B, H, Tq]``.

    Raises:
        TypeError: an array that is no float32 ndarray.
        ValueError: a wrong shape or layout, or an output that overlaps an input.
    """
    inputs = _inputs(o=o, dout=dout)
    o = inputs["o"]
    heads = head_counts(o, o, o, num_heads, None, names=("o", "o", "o"))
    if inputs["dout"].shape != inputs["o"].shape:
        raise ValueError(
            f"dout must have the shape of o, got {inputs['dout'].shape} and {inputs['o'].shape}"
        )
    rows = (heads.B, heads.H, heads.Tq)
    if dlse is not None:
        inputs.update(_inputs(dlse=dlse))
        _require_shape("dlse", inputs["dlse"], rows)
    outputs = _outputs(inputs, d_row=(d_row, rows))
    _run("bwd_d", inputs, outputs, heads, _options(MaskAndScale(), heads, backend))


def attention_bwd_dq_f32(
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    dout: Array,
    d_row: Array,
    dq: Array,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions = None,
    key_start: Positions = None,
    key_end: Positions = None,
    bias: Array | None = None,
    mask: Array | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    backend: str | None = None,
) -> None:
    """Add the gradient of q to ``dq``; options as in the forward, where sinks are in ``p``.

    Raises:
        TypeError: an array that is no float32 ndarray, or an option of the wrong type.
        ValueError: a wrong shape, value or layout, or an output that overlaps an input.
    """
    given = MaskAndScale(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        query_offset=query_offset,
        key_start=key_start,
        key_end=key_end,
    )
    inputs = _inputs(q=q, k=k, v=v, p=p, dout=dout, d_row=d_row)
    heads = _backward_heads(inputs, num_heads, num_kv_heads)
    inputs |= _scores(ScoreArrays(bias=bias, mask=mask), heads)
    outputs = _outputs(inputs, dq=(dq, inputs["q"].shape))
    _run("bwd_dq", inputs, outputs, heads, _options(given, heads, backend))


def attention_bwd_dkv_f32(
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    dout: Array,
    d_row: Array,
    dk: Array,
    dv: Array,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: Positions = None,
    key_start: Positions = None,
    key_end: Positions = None,
    bias: Array | None = None,
    mask: Array | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    backend: str | None = None,
) -> None:
    """Add the gradients of k and v, summed over each group's query heads, to ``dk`` and ``dv``.

    Raises:
        TypeError: an array that is no float32 ndarray, or an option of the wrong type.
        ValueError: a wrong shape, value or layout, or outputs that overlap.
    """
    given = MaskAndScale(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        query_offset=query_offset,
        key_start=key_start,
        key_end=key_end,
    )
    inputs = _inputs(q=q, k=k, v=v, p=p, dout=dout, d_row=d_row)
    heads = _backward_heads(inputs, num_heads, num_kv_heads)
    inputs |= _scores(ScoreArrays(bias=bias, mask=mask), heads)
    outputs = _outputs(inputs, dk=(dk, inputs["k"].shape), dv=(dv, inputs["v"].shape))
    _run("bwd_dkv", inputs, outputs, heads, _options(given, heads, backend))


_OF_KEYS = frozenset({"k", "v", "dk", "dv"})
_OF_HEADS = frozenset({"q", "o", "dout", "dq"}) | _OF_KEYS
_CONTIGUOUS = frozenset({"p", "row_max", "row_sum", "d_row", "dlse"})


def _inputs(**values: object) -> dict[str, Array]:
    arrays = {}
    for name, value in values.items():
        array, _, how, element = as_input(name, value)
        if element is not FLOAT32:
            other = "fused" if element.is_half else "materialized"
            raise TypeError(
                f"{name} must be float32, got {element.name}; pass {as_float(name, value)}, a "
                f"copy, or use forge.attention with kernel='{other}', which takes {element.name}"
            )
        if how != IN_PLACE:
            raise ValueError(f"{name} must be used in place, got an array to be {how}")
        _require_contiguous(name, array)
        arrays[name] = array
    return arrays


def _scores(given: ScoreArrays, heads: Sizes) -> dict[str, Array]:
    inputs = score_inputs(given, heads, FLOAT32)
    for name, taken in inputs.items():
        if taken.how != IN_PLACE:
            raise ValueError(f"{name} must be used in place, got an array to be {taken.how}")
    return {name: taken.array for name, taken in inputs.items()}


def _output_shape(q: Array, heads: Sizes) -> tuple[int, ...]:
    if q.ndim == 4:
        return heads.B, heads.Tq, heads.H, heads.hv
    return heads.B, heads.Tq, heads.H * heads.hv


def _outputs(
    inputs: dict[str, Array], **values: tuple[object, tuple[int, ...]]
) -> dict[str, Array]:
    arrays = {}
    for name, (value, shape) in values.items():
        arrays[name] = as_output(name, value, shape, FLOAT32)
        _require_contiguous(name, arrays[name])
    check_overlap(arrays, inputs)
    return arrays


def _require_contiguous(name: str, array: Array) -> None:
    if name in _CONTIGUOUS and not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous, got strides {array.strides}")


def _require_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")


def _backward_heads(
    inputs: dict[str, Array], num_heads: int | None, num_kv_heads: int | None
) -> Sizes:
    heads = head_counts(inputs["q"], inputs["k"], inputs["v"], num_heads, num_kv_heads)
    rows = (heads.B, heads.H, heads.Tq)
    _require_shape("p", inputs["p"], (*rows, heads.Tk))
    _require_shape("dout", inputs["dout"], _output_shape(inputs["q"], heads))
    _require_shape("d_row", inputs["d_row"], rows)
    return heads


def _options(given: MaskAndScale, heads: Sizes, backend: str | None) -> _forge.Options:
    return compiled_options(given, heads, FLOAT32.stored, "materialized", backend_name(backend))


def _run(
    call: _forge.Pass,
    inputs: dict[str, Array],
    outputs: dict[str, Array],
    sizes: Sizes,
    options: _forge.Options,
) -> None:
    """Run one kernel, which adds to gradients, and keep its report."""
    arrays = inputs | outputs
    for name in _OF_HEADS & arrays.keys():
        heads = sizes.Hkv if name in _OF_KEYS else sizes.H
        arrays[name] = split_heads(arrays[name], heads)
    ran = _forge.run(call, arrays, True, options)
    record(ran, "materialized", dict.fromkeys(inputs, IN_PLACE))
