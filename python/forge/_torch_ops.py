"""The operators ``forge::attention`` and ``forge::attention_backward`` of PyTorch.

As operators torch.compile can put them into a graph: it asks the fake ones for shapes, and the
autograd rule for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge import _torch_mps
from forge._arrays import Array
from forge._attention import attention_backward, attention_forward
from forge._calls import restored
from forge._dtypes import BFloat16Bits
from forge._options import MaskAndScale, head_counts, kernel_name
from forge._saved import Kept
from forge._scores import ScoreArrays


class Options(NamedTuple):
    """What the operators take behind their tensors, in the order of _OPTIONS."""

    query_offset: Tensor | None
    key_start: Tensor | None
    key_end: Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    causal: bool
    window: Sequence[int]
    """(left, right), -1 for no limit."""
    softcap: float | None
    scale: float | None
    num_heads: int | None
    num_kv_heads: int | None
    kernel: str | None
    backend: str | None

    def mask_and_scale(self) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "window": tuple(self.window),
            "softcap": self.softcap,
            "scale": self.scale,
            "query_offset": _optional_array(self.query_offset),
            "key_start": _optional_array(self.key_start),
            "key_end": _optional_array(self.key_end),
        }

    def score_arrays(self) -> dict[str, Any]:
        return {
            "bias": _optional_array(self.bias),
            "mask": _optional_array(self.mask),
            "sinks": _optional_array(self.sinks),
        }


_OPTIONS = (
    "Tensor? query_offset, Tensor? key_start, Tensor? key_end, Tensor? bias, Tensor? mask, "
    "Tensor? sinks, bool causal, int[] window, float? softcap, float? scale, int? num_heads, "
    "int? num_kv_heads, str? kernel, str? backend"
)
_FORWARD = (
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS})"
    " -> (Tensor out, Tensor lse, Tensor row_max, Tensor row_sum, Tensor probs, Tensor kept)"
)
# dbias and dsinks are empty where they are not asked for.
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor row_max, "
    f"Tensor row_sum, Tensor probs, bool want_dbias, bool want_dsinks, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)


def as_array(tensor: Tensor) -> Array:
    """The tensor's own memory as an array."""
    tensor = tensor.detach().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(np.uint16).view(BFloat16Bits)
    array: Array = tensor.numpy()
    return array


def as_tensor(array: Array) -> Tensor:
    """The array's own memory as a tensor."""
    if isinstance(array, BFloat16Bits):
        return torch.from_numpy(array.view(np.ndarray).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _optional_array(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else as_array(tensor)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    given = Options(*options)
    out, saved = attention_forward(
        as_array(q),
        as_array(k),
        as_array(v),
        **given.mask_and_scale(),
        **given.score_arrays(),
        num_heads=given.num_heads,
        num_kv_heads=given.num_kv_heads,
        kernel=given.kernel,
        backend=given.backend,
    )
    probs = np.empty(0, saved.row_max.dtype) if saved._probs is None else saved._probs
    kept = (
        saved.out if _is_half(q) else np.empty(0, np.float32)
    )  # an operator returns no array twice
    results = (out, saved.lse, saved.row_max, saved.row_sum, probs, kept)
    return tuple(as_tensor(array) for array in results)


def _run_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    out, row_max, row_sum, probs = (as_array(tensor) for tensor in rest[:4])
    given = Options(*rest[6:])
    saved = restored(
        {"q": as_array(q), "k": as_array(k), "v": as_array(v)},
        Kept(out, row_max, row_sum, probs),
        MaskAndScale(**given.mask_and_scale()),
        heads=(given.num_heads, given.num_kv_heads),
        kernel=given.kernel,
        backend=given.backend,
        shaping=ScoreArrays(**given.score_arrays()),
    )
    wanted = _wanted(*rest[4:6])
    gradients = attention_backward(
        as_array(dout),
        saved,
        dlse=_optional_array(dlse),
        dbias="dbias" in wanted or None,
        dsinks="dsinks" in wanted or None,
    )
    made = dict(zip(("dq", "dk", "dv", *wanted), map(as_tensor, gradients), strict=True))
    for name, like in (("dbias", given.bias), ("dsinks", given.sinks)):
        nothing = dout.new_empty(0)
        made[name] = nothing if name not in made or like is None else made[name].to(like.dtype)
    return tuple(made[name] for name in ("dq", "dk", "dv", "dbias", "dsinks"))


def _wanted(want_dbias: bool, want_dsinks: bool) -> list[str]:
    return ["dbias"] * want_dbias + ["dsinks"] * want_dsinks


def _run_forward_mps(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    sizes, compiled = _prepared_mps(q, k, v, Options(*options))
    out, row_max, row_sum, kept = _torch_mps.forward(q, k, v, sizes, compiled)
    if kept is out:
        kept = row_max.new_empty(0)  # an operator returns no tensor twice
    return out, row_max + row_sum.log(), row_max, row_sum, row_max.new_empty(0), kept


def _run_backward_mps(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    out, row_max, row_sum, _ = rest[:4]
    sizes, compiled = _prepared_mps(q, k, v, Options(*rest[6:]))
    inputs = {
        "q": q, "k": k, "v": v, "o": out, "dout": dout, "row_max": row_max, "row_sum": row_sum
    }  # fmt: skip
    if dlse is not None:
        inputs["dlse"] = dlse
    nothing = dout.new_empty(0), dout.new_empty(0)  # neither bias nor sinks are taken
    return *_torch_mps.backward(inputs, sizes, compiled), *nothing


def _prepared_mps(q: Tensor, k: Tensor, v: Tensor, given: Options) -> Any:
    for name in ("bias", "mask", "sinks"):
        if getattr(given, name) is not None:
            raise ValueError(
                f"{name} must be None for MPS tensors, whose kernels do not take it; move q, k and "
                "v to the CPU"
            )
    return _torch_mps.prepared(
        q,
        k,
        v,
        MaskAndScale(**given.mask_and_scale()),
        heads=(given.num_heads, given.num_kv_heads),
        kernel=given.kernel,
        backend=given.backend,
    )


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    given = Options(*options)
    sizes = head_counts(q, k, v, given.num_heads, given.num_kv_heads)
    sums = torch.float32 if _is_half(q) else q.dtype
    rows = [q.new_empty((sizes.B, sizes.H, sizes.Tq), dtype=sums) for _ in range(3)]
    materialized = kernel_name(given.kernel) == "materialized"
    pairs = (sizes.B, sizes.H, sizes.Tq, sizes.Tk) if materialized else (0,)
    width = sizes.hv if q.ndim == 4 else sizes.H * sizes.hv
    shape = (*q.shape[:-1], width)
    kept = q.new_empty(shape if _is_half(q) else (0,), dtype=torch.float32)
    return q.new_empty(shape), *rows, q.new_empty(pairs, dtype=sums), kept


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    given, gradients = Options(*rest[6:]), [x.new_empty(x.shape) for x in (q, k, v)]
    for want, like in zip(rest[4:6], (given.bias, given.sinks), strict=True):
        nothing = dout.new_empty(0)
        gradients.append(nothing if not want or like is None else like.new_empty(like.shape))
    return tuple(gradients)


_TENSORS = 6  # of the options, which come first
_INPUTS = ("q", "k", "v", *Options._fields)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *options = inputs
    out, _, row_max, row_sum, probs, kept = output
    out = kept if _is_half(q) else out
    tensors, ctx.options = options[:_TENSORS], options[_TENSORS:]
    ctx.save_for_backward(q, k, v, out, row_max, row_sum, probs, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, k, v, out, row_max, row_sum, probs, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out, dtype=q.dtype)
    needed = dict(zip(_INPUTS, ctx.needs_input_grad, strict=True))
    gradients = backward_op(
        dout, dlse, q, k, v, out, row_max, row_sum, probs, needed["bias"], needed["sinks"],
        *tensors, *ctx.options,
    )  # fmt: skip
    of = dict(zip(("q", "k", "v", "bias", "sinks"), gradients, strict=True))
    return tuple(of[name] if needed[name] and name in of else None for name in _INPUTS)


# Of PyTorch's kernels on the CPU, this one alone is differentiable twice and forward.
BY_TORCH = (
    "F.scaled_dot_product_attention within torch.nn.attention.sdpa_kernel("
    "torch.nn.attention.SDPBackend.MATH)"
)


def _refuse_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "forge.torch.attention has first derivatives only, got a backward through its backward; "
        f"where second derivatives are needed, use {BY_TORCH}"
    )


forward_op = torch.library.custom_op(
    "forge::attention", _run_forward, mutates_args=(), device_types="cpu", schema=_FORWARD
)
backward_op = torch.library.custom_op(
    "forge::attention_backward",
    _run_backward,
    mutates_args=(),
    device_types="cpu",
    schema=_BACKWARD,
)
forward_op.register_kernel("mps", _run_forward_mps)
backward_op.register_kernel("mps", _run_backward_mps)
forward_op.register_fake(_fake_forward)
backward_op.register_fake(_fake_backward)
forward_op.register_autograd(_differentiate, setup_context=_keep)
backward_op.register_autograd(_refuse_second_derivative)
