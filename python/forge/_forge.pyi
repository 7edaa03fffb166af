from typing import Any, TypedDict

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

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
# attention_fwd or attention_bwd.
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
    num_heads: object,
    num_kv_heads: object,
    kernel: object,
    backend: object,
    out: object,
    /,
) -> tuple[Array, Array, Array, Options, tuple[int, int, int, int, int, int]] | None: ...
def attention_backward(
    dout: object,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    row_max: Array,
    row_sum: Array,
    options: Options,
    /,
) -> tuple[Array, Array, Array] | None: ...
def last_plain_run() -> dict[str, Any] | None: ...
def attention_fwd(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    p: Array | None,
    row_max: Array,
    row_sum: Array,
    options: Options,
) -> dict[str, Any]: ...
def attention_bwd(
    arrays: dict[str, Array], accumulate: bool, options: Options
) -> dict[str, Any]: ...
def attention_fwd_f32(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    p: Array,
    row_max: Array,
    row_sum: Array,
    options: Options,
) -> dict[str, Any]: ...
def attention_bwd_d_f32(
    o: Array, dout: Array, dlse: Array | None, d_row: Array, options: Options
) -> dict[str, Any]: ...
def attention_bwd_dq_f32(
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    dout: Array,
    d_row: Array,
    dq: Array,
    options: Options,
) -> dict[str, Any]: ...
def attention_bwd_dkv_f32(
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    dout: Array,
    d_row: Array,
    dk: Array,
    dv: Array,
    options: Options,
) -> dict[str, Any]: ...
def backends() -> dict[str, dict[str, Any]]: ...
def build_config() -> dict[str, Any]: ...
def num_threads() -> int: ...
def set_num_threads(threads: int) -> None: ...
