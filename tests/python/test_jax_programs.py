"""forge.jax: what JAX compiles for a call, and calls under jax.shard_map."""

import forge
import numpy as np
import pytest
from optional import need
from oracle import random_inputs
from scripts import run_script

jax = need("jax")

import forge.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402


@pytest.fixture
def compiled():
    """Counts the programs that JAX compiles."""
    names = []

    def note(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield lambda: len(names)
    jax.monitoring.unregister_event_duration_listener(note)


def arrays(rng, **sizes):
    return [jnp.asarray(x) for x in random_inputs(rng, **sizes)]


def loss(q, k, v, **options):
    return fj.attention(q, k, v, **options).sum()


CALLS = {
    "the call": lambda q, k, v, i: fj.attention(q, k, v, causal=True),
    "a position": lambda q, k, v, i: fj.attention(q, k, v, causal=True, query_offset=i),
    "a position each": lambda q, k, v, i: fj.attention(q, k, v, query_offset=[i, 1], window=3),
    "its gradient": lambda q, k, v, i: jax.grad(loss, (0, 1, 2))(q, k, v, softcap=2.0),
    "its vjp": lambda q, k, v, i: jax.vjp(fj.attention, q, k, v)[1](q),
    "vmap": lambda q, k, v, i: jax.vmap(fj.attention)(q[None], k[None], v[None]),
    "checkpoint": lambda q, k, v, i: jax.grad(jax.checkpoint(loss))(q, k, v),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_outside_jit_a_call_is_compiled_once(rng, compiled, call):
    q, k, v, _ = arrays(rng, B=2, Tq=7, H=4, hd=8)
    for i in range(3):
        jax.block_until_ready(call(q, k, v, i))
    before = compiled()
    for i in range(3, 8):
        jax.block_until_ready(call(q, k, v, i))
    assert compiled() == before


def test_another_option_is_another_result(rng):
    q, k, v, _ = arrays(rng, B=2, Tq=7, H=4, hd=8)
    for causal in (True, False, True):
        want = forge.attention(*map(np.asarray, (q, k, v)), causal=causal)
        np.testing.assert_array_equal(fj.attention(q, k, v, causal=causal), want)


def test_positions_beyond_int32_arrive_whole(rng):
    q, k, v, _ = arrays(rng, B=2, Tq=3)
    for offset in (2**40, -(2**40), [2**40, 0]):
        want = forge.attention(*map(np.asarray, (q, k, v)), causal=True, query_offset=offset)
        np.testing.assert_array_equal(fj.attention(q, k, v, causal=True, query_offset=offset), want)


SHARDED = """
import jax, jax.numpy as jnp, forge.jax
from jax.sharding import PartitionSpec as P

rng = np.random.default_rng(0)
q, k, v, w = (jnp.asarray(rng.standard_normal((2, 7, 4, 8), np.float32)) for _ in range(4))
mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))

def attend(q, k, v):
    return forge.jax.attention(q, k, v, causal=True)

def gradients(function, *x):
    return jax.grad(lambda *x: (function(*x) * w).sum(), (0, 1, 2))(*x)

def shared(q, k, v):  # one sequence of keys for all
    return attend(q, *(jnp.broadcast_to(x, (2, *x.shape[1:])) for x in (k, v)))

for specs, whole, x in (
    ((P("b"), P("b"), P("b")), attend, (q, k, v)),
    ((P("b"), P(), P()), shared, (q, k[:1], v[:1])),
):
    part = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("b"))
    for jit in (jax.jit, lambda f: f):
        np.testing.assert_array_equal(jit(part)(*x), whole(*x))
        got = jit(lambda *x: gradients(part, *x))(*x)
        for a, b in zip(got, gradients(whole, *x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
print("equal")
"""


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has no jax.shard_map")
def test_gradients_inside_shard_map_with_its_checks():
    done = run_script(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.stdout.split()[-1] == "equal"
