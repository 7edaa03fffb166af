"""PyTorch's flex_attention, compiled, with the mask as a block mask; no backward on a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner, Unsupported
from forge._check.plain import Inputs


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    if not (case.window or case.kept or case.packed) or case.sinks:
        raise Unsupported("timed where there is a mask, without sinks")
    torch.set_num_threads(threads)
    seen = torch.from_numpy(case.mask())
    blocks = create_block_mask(
        lambda b, h, i, j: seen[i, j], None, None, case.Tq, case.Tk, device="cpu"
    )
    q, k, v = (
        torch.from_numpy(x).transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)
    )

    def forward() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = _compiled()(q, k, v, block_mask=blocks, enable_gqa=True)
            return out

    def array(x: torch.Tensor) -> Array:
        return np.asarray(x.transpose(1, 2))

    return Runner(forward=forward, as_output=array, note="flex_attention, compiled")
