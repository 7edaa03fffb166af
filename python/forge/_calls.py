"""A call between the public functions and the compiled module: checked, given its arrays, run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forge import _forge, _run
from forge._arrays import (
    IN_PLACE,
    Array,
    as_input,
    as_output,
    check_overlap,
    new_array,
    split_heads,
)
from forge._dtypes import as_float32, check_dtypes
from forge._memory import check_memory
from forge._options import MaskAndScale, backend_name, compiled_options, head_counts, kernel_name
from forge._saved import ALL_IN_PLACE, Call, Kept, Saved
from forge._scores import ScoreArrays, gradient_output, score_inputs, sink_rows

NO_ARRAYS = ScoreArrays()


def prepare(
    values: dict[str, object],
    given: MaskAndScale,
    head_counts_given: tuple[int | None, int | None],
    kernel: object,
    backend: object,
    shaping: ScoreArrays = NO_ARRAYS,
) -> Call:
    family = kernel_name(kernel)
    inputs = {name: as_input(name, value) for name, value in values.items()}
    arrays = {name: taken.array for name, taken in inputs.items()}
    q, k, v = arrays.values()
    check_dtypes({name: taken.element.name for name, taken in inputs.items()}, family, values)
    element = inputs["q"].element
    sizes = head_counts(q, k, v, *head_counts_given)
    scores = score_inputs(shaping, sizes, element)
    inputs |= scores
    return Call(
        element=element,
        kv_element=inputs["k"].element,
        q=split_heads(q, sizes.H),
        k=split_heads(k, sizes.Hkv),
        v=split_heads(v, sizes.Hkv),
        ndim=q.ndim,
        sizes=sizes,
        options=compiled_options(given, sizes, element.sums.stored, family, backend_name(backend)),
        kernel=family,
        given={name: taken.given for name, taken in inputs.items()},
        arrays={name: taken.how for name, taken in inputs.items()},
        scores={name: taken.array for name, taken in scores.items()},
        score_elements={name: taken.element for name, taken in scores.items()},
    )


def run_forward(call: Call, out: object, *, keep: bool) -> tuple[Array, Saved]:
    """Run the forward; ``keep``: for a backward, which wants ``o`` as exact as its sums are."""
    sizes, element = call.sizes, call.element
    needed: dict[str, tuple[int, ...]] = {"row_max": call.row_shape(), "row_sum": call.row_shape()}
    if call.kernel == "materialized":
        needed["p"] = (sizes.B, sizes.H, sizes.Tq, sizes.Tk)
    given = None
    if out is not None:
        given = as_output("out", out, call.output_shape(), element)
        check_overlap({"out": given}, call.given)
    dtypes = dict.fromkeys(needed, element.sums.stored)
    if given is None:
        needed["out"], dtypes["out"] = call.output_shape(), element.stored
    exact = element.sums.stored
    if keep and (given is None or given.dtype != exact) and element.is_half:
        needed["saved.out"], dtypes["saved.out"] = call.output_shape(), exact
    check_memory(needed, dtypes, _less_memory(call))
    new = {name: new_array(extents, dtypes[name]) for name, extents in needed.items()}
    written = new["out"] if given is None else given
    kept = new.get("saved.out", written)
    arrays = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "o": split_heads(kept, sizes.H),
        "row_max": new["row_max"],
        "row_sum": new["row_sum"],
        **call.scores,
    }
    if kept is not written:
        arrays["rounded"] = split_heads(written, sizes.H)
    if "p" in new:
        arrays["p"] = new["p"]
    ran = _forge.run("forward", arrays, False, call.options)
    _run.record_call(ran, call.kernel, call.arrays)
    saved = Saved(call, kept, new["row_max"], new["row_sum"], new.get("p"), ran["backend"])
    return element.show(written) if out is None else out, saved  # type: ignore[return-value]


def restored(
    values: dict[str, object],
    kept: Kept,
    given: MaskAndScale,
    *,
    heads: tuple[int | None, int | None],
    kernel: str | None,
    backend: str | None,
    shaping: ScoreArrays = NO_ARRAYS,
) -> Saved:
    """Return what attention_forward saved, from what it was given and what was kept of it."""
    call = prepare(values, given, heads, kernel, backend, shaping)
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
    return "kernel='fused' needs no p" + (" (in float32)" if call.element.name == "float64" else "")


def plain_gradients(dout: object, saved: Saved) -> tuple[Array, Array, Array] | None:
    """Return new gradients where the compiled module takes the call as it is, else None."""
    call = saved._call
    if saved.backend != "cpu" or call.arrays != ALL_IN_PLACE or call.scores:
        return None
    q, k, v = (call.given[name] for name in ("q", "k", "v"))
    rows = saved.out, saved.row_max, saved.row_sum
    return _forge.attention_backward(
        dout, q, k, v, *rows, call.sizes.H, call.sizes.Hkv, call.options
    )


def gradient_arrays(
    saved: Saved, read: dict[str, Array], given: dict[str, object], accumulate: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the arrays to write into and those to return: views of, or the very arrays given.

    Args:
        saved: the forward's.
        read: what the backward reads besides.
        given: dq, dk and dv, None for new arrays; of dbias and dsinks those that are asked for,
            True for new arrays.
        accumulate: all of them must be arrays.
    """
    call = saved._call
    shapes = {"dq": call.query_shape(), "dk": call.key_shape(), "dv": call.value_shape()}
    elements = {"dq": call.element, "dk": call.kv_element, "dv": call.kv_element}
    for name in given.keys() - shapes.keys():
        of = name.removeprefix("d")
        if of not in call.scores:
            raise ValueError(f"{name} must be left out where the forward had no {of}")
        shapes[name], elements[name] = call.given[of].shape, call.element.sums
    outputs: dict[str, Array] = {}
    results: dict[str, Array] = {}
    for name, value in given.items():
        array = None
        if name in ("dbias", "dsinks"):
            array = gradient_output(
                name, value, shapes[name], call.score_elements[name.removeprefix("d")]
            )
        elif value is not None:
            array = as_output(name, value, shapes[name], elements[name])
        if array is not None:
            outputs[name], results[name] = array, value  # type: ignore[assignment]
        elif accumulate:
            raise ValueError(f"{name} must be given to accumulate into, got {value}")
    if outputs:
        check_overlap(outputs, {**call.given, **read, **saved._arrays()})
    needed = {name: shape for name, shape in shapes.items() if name not in outputs}
    dtypes = {name: elements[name].stored for name in needed}
    own: dict[str, tuple[int, ...]] = {}
    if call.kernel == "materialized":
        own = {"d_row": call.row_shape()}
    if call.kv_element.is_half:
        own = {"the sums of dk": shapes["dk"], "the sums of dv": shapes["dv"]}
    dtypes |= dict.fromkeys(own, call.element.sums.stored)
    check_memory({**needed, **own}, dtypes)
    for name, shape in needed.items():
        outputs[name] = new_array(shape, dtypes[name])
        results[name] = elements[name].show(outputs[name])
    return outputs, results


def of_the_whole(saved: Saved, whole: tuple[object, object]) -> Saved:
    """Return what a forward over all keys would have saved, where `saved` is of some of them.

    ``p = exp(s - lse)``: lse stands for m, with a sum of 1.

    Raises:
        TypeError: no pair of arrays, or of other dtypes.
        ValueError: other shapes, or the materialized kernels, which keep p.
    """
    call = saved._call
    if call.kernel == "materialized":
        raise ValueError("whole must be None with kernel='materialized', whose p is of the part")
    if not isinstance(whole, tuple) or len(whole) != 2:
        raise TypeError(f"whole must be a tuple (o, lse), got {type(whole).__name__}")
    exact = call.element.sums
    out, lse = (as_input(f"whole[{at}]", value) for at, value in enumerate(whole))
    for at, (taken, shape, elements) in enumerate(
        ((out, call.output_shape(), (exact, call.element)), (lse, call.row_shape(), (exact,)))
    ):
        names = [element.name for element in elements]
        if taken.element.name not in names:
            raise TypeError(
                f"whole[{at}] must be {' or '.join(dict.fromkeys(names))}, got {taken.element.name}"
            )
        if taken.array.shape != shape:
            raise ValueError(f"whole[{at}] must have shape {shape}, got {taken.array.shape}")
    row_max = np.ascontiguousarray(lse.array)
    return replace(
        saved,
        out=as_float32(out.array, out.element),
        row_max=row_max,
        row_sum=np.where(np.isneginf(row_max), np.float32(0), np.float32(1)),
    )


def run_backward(
    saved: Saved,
    inputs: dict[str, Array],
    outputs: dict[str, Array],
    accumulate: bool,
    arrays: dict[str, str],
) -> None:
    call = saved._call
    sizes = call.sizes
    H, Hkv = sizes.H, sizes.Hkv
    options: _forge.Options = {**call.options, "backend": saved.backend}
    given = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "o": split_heads(saved.out, H),
        "dout": split_heads(inputs["dout"], H),
        **call.scores,
        "dq": split_heads(outputs["dq"], H),
        "dk": split_heads(outputs["dk"], Hkv),
        "dv": split_heads(outputs["dv"], Hkv),
    }
    if "dbias" in outputs:
        given["dbias"] = outputs["dbias"]
    if "dsinks" in outputs:
        given["dsinks"] = sink_rows(outputs["dsinks"], sizes)
    if saved._probs is not None:
        given["p"] = saved._probs
    if saved._probs is None or "dsinks" in outputs:
        given |= {"row_max": saved.row_max, "row_sum": saved.row_sum}
    if "dlse" in inputs:
        given["dlse"] = np.ascontiguousarray(inputs["dlse"])
        if given["dlse"] is not inputs["dlse"] and arrays["dlse"] == IN_PLACE:
            arrays["dlse"] = "copied: not C-contiguous"
    ran = _forge.run("backward", given, accumulate, options)
    _run.record_call(ran, call.kernel, arrays)
