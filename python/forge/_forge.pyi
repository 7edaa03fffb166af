from typing import Any, TypedDict

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

class Options(TypedDict):
    causal: bool
    window_left: int
    window_right: int
    scale: float
    softcap: float
    ranges: Array | None
    kernel: str
    backend: str
    cpu_target: str

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
