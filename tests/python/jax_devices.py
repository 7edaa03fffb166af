"""Runs cases of ring_cases.py on eight devices of one process, and leaves what it found in FOLDER.

python jax_devices.py FOLDER
"""

import json
import os
import re
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import forge.jax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from ring_cases import CASES, inputs_of, rows_of

ROWS = PartitionSpec(None, "s")
SINKS = {
    0: PartitionSpec(),
    1: PartitionSpec(),
    2: PartitionSpec(),
    3: PartitionSpec(None, None, "s"),
}
RUNS = [
    *((name, 4) for name in ("whole", "causal zigzag", "causal contiguous", "window contiguous",
                             "window zigzag", "softcap and scale", "sinks", "sinks of rows",
                             "bfloat16", "large logits")),
    *((name, 2) for name in ("grouped heads", "two-sided window", "bfloat16 keys")),
    *((name, 3) for name in ("causal zigzag", "sinks of sequences", "float16")),
    *((name, 8) for name in ("keys ahead only", "window contiguous", "window zigzag")),
]  # fmt: skip


def function_of(name, size):
    case = CASES[name]
    mesh = Mesh(np.array(jax.devices()[:size]), ("s",))

    def attend(q, k, v, *sinks):
        return forge.jax.ring_attention(
            q, k, v, axis_name="s", layout=case.layout, sinks=sinks[0] if sinks else None,
            **case.options,
        )  # fmt: skip

    specs = (ROWS, ROWS, ROWS) + ((SINKS[len(case.sinks)],) if case.sinks else ())
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=ROWS)


def order_of(name, size):
    """Rows of all devices, one after another."""
    return np.concatenate([rows_of(CASES[name], rank, size)[0] for rank in range(size)])


def arguments_of(name, size):
    case, ((q, k, v, dout), sinks), order = CASES[name], inputs_of(name), order_of(name, size)
    of_q, of_k = (getattr(jnp, dtype) for dtype in case.dtypes)
    given = [
        jnp.asarray(x[:, order], d) for x, d in zip((q, k, v), (of_q, of_k, of_k), strict=True)
    ]
    if sinks is not None:
        given.append(jnp.asarray(sinks[:, :, order] if sinks.ndim == 3 else sinks))
    return given, jnp.asarray(dout[:, order], of_q)


def run_case(name, size):
    given, dout = arguments_of(name, size)
    function = function_of(name, size)

    @jax.jit
    def both(given, dout):
        out, back = jax.vjp(function, *given)
        return out, back(dout)

    out, gradients = both(given, dout)
    assert [x.dtype for x in gradients] == [x.dtype for x in given]
    found = {"out": out, **dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))}
    again = jax.tree.leaves(both(given, dout))
    same = all(np.array_equal(x, y) for x, y in zip(found.values(), again, strict=True))
    inverse, arrays = np.argsort(order_of(name, size)), {}
    for result, x in found.items():
        array = np.asarray(x, np.float32)
        if result != "dsinks":
            array = array[:, inverse]
        elif array.ndim == 3:
            array = array[:, :, inverse]
        arrays[result] = array
    return arrays, same


def moved(name, size):
    """Pairs of devices between which something moves, in the forward and in both directions."""
    given, dout = arguments_of(name, size)
    function = function_of(name, size)

    def both(*given):
        return jax.vjp(function, *given)[1](dout)

    found = []
    for traced in (function, both):
        text = re.sub(r"\s+", " ", str(jax.make_jaxpr(traced)(*given)))
        perms = re.findall(r"perm=\(((?: ?\(\d+, ?\d+\),?)+) ?\)", text)
        found.append(sum(perm.count("(") for perm in perms))
    return found


def error_of(function):
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def errors():
    x = jnp.zeros((1, 8, 2, 4))

    def call(k=x, **options):
        spec = (ROWS, ROWS if k.ndim > 3 else PartitionSpec())
        mesh = Mesh(np.array(jax.devices()[:2]), ("s",))
        return jax.shard_map(
            lambda q, k: forge.jax.ring_attention(q, k, k, axis_name="s", **options),
            mesh=mesh, in_specs=spec, out_specs=ROWS,
        )(x, k)  # fmt: skip

    return {
        "layout": error_of(lambda: call(layout="striped")),
        "rank": error_of(lambda: call(k=x[0])),
        "rows": error_of(lambda: call(k=x[:, :4])),
        "dtype": error_of(lambda: call(k=x.astype(int))),
        "sinks": error_of(lambda: call(sinks=jnp.zeros(3))),
    }


def main(folder):
    arrays, said = {}, {"same bits": [], "moved": {}}
    for name, size in RUNS:
        found, same = run_case(name, size)
        arrays |= {f"{name}/{size}/{result}": x for result, x in found.items()}
        if same:
            said["same bits"].append([name, size])
    for name, size in (("whole", 4), ("causal contiguous", 4), ("window contiguous", 8)):
        said["moved"][name] = moved(name, size)
    said["errors"] = errors()
    np.savez(folder / "found.npz", **arrays)
    (folder / "said.json").write_text(json.dumps({**said, "runs": RUNS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
