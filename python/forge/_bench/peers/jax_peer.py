"""JAX: jax.nn.dot_product_attention under jit; softcap, which it lacks, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner
from forge._check.plain import Inputs


def _with_softcap(case: Case) -> Callable[..., jax.Array]:
    mask, group = case.mask(), case.H // case.Hkv

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        grouped = q.reshape(case.B, case.Tq, case.Hkv, group, case.hd)
        scores = jnp.einsum("bikgd,bjkd->bkgij", grouped, k) * case.scale
        scores = case.softcap * jnp.tanh(scores / case.softcap)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        return jnp.einsum("bkgij,bjkd->bikgd", jax.nn.softmax(scores, -1), v).reshape(q.shape)

    return attention


def _library_call(case: Case) -> Callable[..., jax.Array]:
    options: dict[str, Any] = {"is_causal": case.causal and not case.is_decode}
    if case.window:
        options["local_window_size"] = (case.window - 1, 0)
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def prepare(case: Case, inputs: Inputs, threads: int) -> Runner:
    del threads  # XLA uses the CPUs that the process may use
    q, k, v, dout = (jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    attention = _with_softcap(case) if case.softcap else _library_call(case)
    forward = jax.jit(attention)
    save = jax.jit(lambda q, k, v: jax.vjp(attention, q, k, v)[1])
    pull = jax.jit(lambda saved, dout: saved(dout))
    saved: list[object] = []

    def backward() -> tuple[jax.Array, ...]:
        if not saved:
            saved.append(jax.block_until_ready(save(q, k, v)))
        return tuple(jax.block_until_ready(pull(saved[0], dout)))

    def arrays(gradients: tuple[jax.Array, ...]) -> tuple[Array, ...]:
        return tuple(np.asarray(x) for x in gradients)

    return Runner(
        forward=lambda: forward(q, k, v).block_until_ready(),
        as_output=np.asarray,
        backward=backward,
        as_gradients=arrays,
        note="XLA, whole score matrix",
    )
