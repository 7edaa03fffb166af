"""forge: the fused kernels on the CPU."""

from __future__ import annotations

import forge
from forge._bench.cases import Case
from forge._bench.peers import Runner
from forge._check.halves import for_call, stored, widened
from forge._check.plain import Inputs


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    forge.set_num_threads(threads)
    options = {**inputs.options, "backend": "cpu", "kernel": "fused"}
    q, k, v, dout = (
        for_call(stored(x, case.dtype)) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    _, saved = forge.attention_forward(q, k, v, **options)
    dbias = True if "dbias" in case.gradients else None
    ran = forge.last_run() or {}
    return Runner(
        forward=lambda: forge.attention(q, k, v, **options),
        as_output=lambda out: widened(out, case.dtype),
        backward=lambda: forge.attention_backward(dout, saved, dbias=dbias),
        as_gradients=lambda gradients: tuple(widened(x, case.dtype) for x in gradients),
        note=f"{ran['kernel']} kernels, {ran['cpu_target']}",
        rounds_once=True,
    )
