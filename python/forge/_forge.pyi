from typing import Any, Literal, TypedDict

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Pass = Literal["forward", "backward", "bwd_d", "bwd_dq", "bwd_dkv"]

class NotServedError(ValueError):
    """No backend, or not the one that was named, can serve the call."""

class Options(TypedDict):
    causal: bool
    window: tuple[int, int]
    scale: float
    softcap: float
    ranges: Array | None
    kernel: str
    backend: str
    cpu_target: str

# Calls that cost little. None, with nothing touched: Python is to check everything and to call
# run.
def attention(
    q: object,
    k: object,
    v: object,
    causal: object,
    window: object,
    softcap: object,
    scale: object,
    query_offset: object,
    key_start: object,
    key_end: object,
    bias: object,
    mask: object,
    sinks: object,
    num_heads: object,
    num_kv_heads: object,
    kernel: object,
    backend: object,
    out: object,
    /,
) -> Array | None: ...
def attention_forward(
    q: object,
    k: object,
    v: object,
    causal: object,
    window: object,
    softcap: object,
    scale: object,
    query_offset: object,
    key_start: object,
    key_end: object,
    bias: object,
    mask: object,
    sinks: object,
    num_heads: object,
    num_kv_heads: object,
    kernel: object,
    backend: object,
    out: object,
    /,
) -> (
    tuple[Array, Array, Array, Array, Options, tuple[int, int, int, int, int, int, int]] | None
): ...
def attention_backward(
    dout: object,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    row_max: Array,
    row_sum: Array,
    num_heads: int,
    num_kv_heads: int,
    options: Options,
    /,
) -> tuple[Array, Array, Array] | None: ...
def last_plain_run() -> dict[str, Any] | None: ...

# Arrays by the names in csrc/core/operands.h; what the call does not read or write is left alone.
def run(
    call: Pass, arrays: dict[str, Array], accumulate: bool, options: Options
) -> dict[str, Any]: ...

# An array as a framework binds it: dtype, shape, strides in elements, bytes from where its buffer
# starts.
Bound = tuple[str, tuple[int, ...], tuple[int, ...], int]

class Dispatch(TypedDict):
    kernel: str
    switches: tuple[tuple[int, bool], ...]
    groups: tuple[int, int, int]
    threads: int
    grid: list[int]
    begins_another: bool

class StreamPlan(TypedDict):
    params: list[int]
    ranges: list[int]
    scratch: dict[str, int]
    dispatches: list[Dispatch]

# What to dispatch for a call of the fused family on an Apple GPU; arrays by the same names. Needs
# no GPU, but a build with the shaders. cut: into dispatches as short as Metal's watchdog asks for;
# else each kernel is one.
def plan_stream(
    call: Literal["forward", "backward"], arrays: dict[str, Bound], options: Options, cut: bool
) -> StreamPlan: ...
def shader_text() -> str: ...
def bfloat16_bits(capsule: object) -> Array: ...
def backends() -> dict[str, dict[str, Any]]: ...
def build_config() -> dict[str, Any]: ...
def num_threads() -> int: ...
def set_num_threads(threads: int) -> None: ...
