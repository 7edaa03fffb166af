"""JAX: jax.nn.dot_product_attention under jit; softcap and sinks, which it lacks, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner, Unsupported
from forge._check.plain import Inputs


def _in_steps(case: Case, inputs: Inputs) -> Callable[..., jax.Array]:
    mask, group = case.mask(), case.H // case.Hkv
    sinks = jnp.asarray(inputs.options["sinks"]) if case.sinks else None

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        grouped = q.reshape(case.B, case.Tq, case.Hkv, group, case.hd)
        scores = jnp.einsum("bikgd,bjkd->bkgij", grouped, k) * case.scale
        if case.softcap:
            scores = case.softcap * jnp.tanh(scores / case.softcap)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        if sinks is not None:
            column = sinks.reshape(1, case.Hkv, group, 1, 1)
            column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, column], -1)
        p = jax.nn.softmax(scores, -1)[..., : case.Tk]
        return jnp.einsum("bkgij,bjkd->bikgd", p, v).reshape(*q.shape[:3], -1)

    return attention


def _library_call(case: Case) -> Callable[..., jax.Array]:
    options: dict[str, Any] = {"is_causal": case.causal and not case.is_decode}
    if case.window:
        options["local_window_size"] = (case.window - 1, 0)
    if case.kept or case.packed:
        options = {"mask": jnp.asarray(case.mask())[None, None]}
    call = jax.nn.dot_product_attention
    return lambda q, k, v, bias=None: call(q, k, v, bias=bias, **options)


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    del threads  # XLA uses the CPUs that the process may use
    given = [jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v)]
    dout = jnp.asarray(inputs.dout)
    if case.hv:
        raise Unsupported("dot_product_attention wants values of the keys' head dim")
    attention = _library_call(case)
    if case.softcap or case.sinks:
        attention = _in_steps(case, inputs)
    if case.bias:
        given.append(jnp.asarray(inputs.options["bias"]))
    forward = jax.jit(attention)
    save = jax.jit(lambda *given: jax.vjp(attention, *given)[1])
    pull = jax.jit(lambda saved, dout: saved(dout)[: len(case.gradients)])
    saved: list[object] = []

    def backward() -> tuple[jax.Array, ...]:
        if not saved:
            saved.append(jax.block_until_ready(save(*given)))
        return tuple(jax.block_until_ready(pull(saved[0], dout)))

    def arrays(gradients: tuple[jax.Array, ...]) -> tuple[Array, ...]:
        return tuple(np.asarray(x) for x in gradients)

    return Runner(
        forward=lambda: forward(*given).block_until_ready(),
        as_output=np.asarray,
        backward=backward,
        as_gradients=arrays,
        note="XLA, whole score matrix",
    )
