"""forge: the fused kernels on the CPU."""

from __future__ import annotations

import forge
from forge._bench.cases import Case
from forge._bench.peers import Runner
from forge._check.plain import Inputs


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    forge.set_num_threads(threads)
    options = {**case.options, "backend": "cpu", "kernel": "fused"}
    _, saved = forge.attention_forward(inputs.q, inputs.k, inputs.v, **options)
    ran = forge.last_run() or {}
    return Runner(
        forward=lambda: forge.attention(inputs.q, inputs.k, inputs.v, **options),
        as_output=lambda out: out,
        backward=lambda: forge.attention_backward(inputs.dout, saved),
        note=f"{ran['kernel']} kernels, {ran['cpu_target']}",
    )
