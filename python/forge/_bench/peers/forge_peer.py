"""forge: the fused kernels on the CPU."""

from __future__ import annotations

from typing import Any

import forge
from forge._bench.cases import Case, Inputs
from forge._bench.peers import Runner


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    forge.set_num_threads(threads)
    options: dict[str, Any] = {
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "backend": "cpu",
        "kernel": "fused",
    }
    _, saved = forge.attention_forward(inputs.q, inputs.k, inputs.v, **options)
    ran = forge.last_run() or {}
    return Runner(
        forward=lambda: forge.attention(inputs.q, inputs.k, inputs.v, **options),
        as_output=lambda out: out,
        backward=lambda: forge.attention_backward(inputs.dout, saved),
        note=f"{ran['kernel']} kernels, {ran['cpu_target']}",
    )
