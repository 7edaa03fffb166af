"""Attention on MLX arrays in MLX's own Metal stream, by mx.fast.metal_kernel.

Lazy: what comes back is not computed yet, and inputs need not be. So it stands inside mx.compile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from forge import _forge
from forge._mlx_derivatives import once_differentiable
from forge._options import MaskAndScale, Sizes
from forge._shader_text import WORDS, Switches, body_text
from forge._streams import Call, planned, record, stream_options

WHERE = "MLX arrays on the GPU"
Arrays = dict[str, mx.array]
# MLX hands an input of fewer elements over in another address space.
_LEAST_SIZE = 8
_MOST_THREADS = 2**31 - 1


def serves(sizes: Sizes, given: MaskAndScale, kernel: str, backend: str, *arrays: mx.array) -> bool:
    """Whether a call goes into MLX's stream: MLX computes on the GPU, and the kernels take it."""
    return (
        _is_on_gpu()
        and _forge.build_config()["metal"] != "off"
        and kernel == "fused"
        and backend in ("", "metal")
        and sizes.hd == sizes.hv <= 256
        and not any(
            np.ndim(x) == 2  # type: ignore[arg-type]  # None has no axes
            for x in (given.query_offset, given.key_start, given.key_end)
        )
        and all(x.dtype == mx.float32 for x in arrays)
    )


def _is_on_gpu() -> bool:
    return bool(mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu))


def attention(q: mx.array, k: mx.array, v: mx.array, given: MaskAndScale, sizes: Sizes) -> mx.array:
    """Return ``out``, in q's shape, not computed yet."""
    options = stream_options(given, sizes, "fused", "metal", WHERE)

    def forward(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        rows = (sizes.B, sizes.H, sizes.Tq)
        made = {"o": q.shape, "row_max": rows, "row_sum": rows}
        return list(_encoded("forward", {"q": q, "k": k, "v": v}, made, options).values())

    def backward(*arrays: mx.array) -> list[mx.array]:
        read = dict(zip(("q", "k", "v", "dout", "o", "row_max", "row_sum"), arrays, strict=True))
        made = {f"d{name}": read[name].shape for name in ("q", "k", "v")}
        return list(_encoded("backward", read, made, options).values())

    queries = (sizes.B, sizes.Tq, sizes.H, sizes.hd)
    keys = (sizes.B, sizes.Tk, sizes.Hkv, sizes.hd)
    function = once_differentiable(forward, backward)
    out = function(q.reshape(queries), k.reshape(keys), v.reshape(keys))[0]
    record("MLX's GPU stream")
    return out.reshape(q.shape)


def _encoded(
    call: Call, read: Arrays, made: dict[str, tuple[int, ...]], options: _forge.Options
) -> Arrays:
    """Return the arrays that the call writes, by their names, in the order of ``made``."""
    shapes = {name: tuple(x.shape) for name, x in read.items()} | made
    plan = planned(
        call, {name: _bound(shape) for name, shape in shapes.items()}, options, WHERE, cut=False
    )
    shapes |= {name: (floats,) for name, floats in plan["scratch"].items()}
    # Where there are no rows, nobody writes scratch memory.
    arrays = read | {name: mx.zeros(_LEAST_SIZE) for name in plan["scratch"]}
    for dispatch in plan["dispatches"]:
        across, heads, batch = dispatch["groups"]
        threads = across * dispatch["threads"]
        if max(threads, heads, batch) > _MOST_THREADS:
            raise ValueError(f"q, k and v must fit one grid of MLX's, got {threads} threads")
        kernel, inputs, outputs = _kernel(dispatch["kernel"], dispatch["switches"])
        words = np.array(plan["params"] + dispatch["grid"] + plan["ranges"], np.int64)
        results = kernel(
            inputs=[mx.array(words), *(_large_enough(arrays[name]) for name in inputs)],
            output_shapes=[shapes[name] for name in outputs],
            output_dtypes=[mx.float32] * len(outputs),
            grid=(threads, heads, batch),
            threadgroup=(dispatch["threads"], 1, 1),
            stream=mx.gpu,
        )
        arrays |= zip(outputs, results, strict=True)
    return {
        name: arrays[name] if name in arrays else mx.zeros(shape) for name, shape in made.items()
    }


def _bound(shape: tuple[int, ...]) -> _forge.Bound:
    """Describe an array that MLX hands over: in C order, at an offset that it does not tell."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return "float32", shape, strides, 4


def _large_enough(x: mx.array) -> mx.array:
    if x.size >= _LEAST_SIZE:
        return x
    return mx.concatenate([x.reshape(-1), mx.zeros(_LEAST_SIZE - x.size)])


@functools.cache
def _kernel(
    name: str, switches: Switches
) -> tuple[Callable[..., list[mx.array]], tuple[str, ...], tuple[str, ...]]:
    body = body_text(name, switches)
    on = "_".join(str(index) for index, value in switches if value)
    kernel = mx.fast.metal_kernel(
        name=f"{name}_{on}",
        input_names=[WORDS, *(f"given_{name}" for name in body.inputs)],
        output_names=[f"made_{name}" for name in body.outputs],
        source=body.source,
        header=body.header,
    )
    return kernel, body.inputs, body.outputs
