"""forge: the fused kernels on the CPU."""

from __future__ import annotations

import forge

from benchmarks.cases import Case, Inputs
from benchmarks.peers import Runner


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    forge.set_num_threads(threads)
    options = {
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "backend": "cpu",
        "kernel": "fused",
    }
    _, saved = forge.attention_forward(inputs.q, inputs.k, inputs.v, **options)
    ran = forge.last_run()
    return Runner(
        forward=lambda: forge.attention(inputs.q, inputs.k, inputs.v, **options),
        as_output=lambda out: out,
        backward=lambda: forge.attention_backward(inputs.dout, saved),
        note=f"{ran['kernel']} kernels, {ran['cpu_target']}",
    )
