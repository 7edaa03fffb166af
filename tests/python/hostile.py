"""Calls the compiled module with arguments that the Python layer would never let through.

Run as a script in a process of its own: whatever is passed, the process must end with exit code 0.
Prints one line for each call that should have been refused but was not, and then "done".
"""

import functools
import itertools

import forge
import numpy as np

REFUSALS = (TypeError, ValueError, MemoryError)
OUTPUTS = {  # o, p and d_row are read by some and written by others
    "forward": {"o", "p", "row_max", "row_sum"},
    "backward": {"dq", "dk", "dv"},
    "bwd_d": {"d_row"},
    "bwd_dq": {"dq"},
    "bwd_dkv": {"dk", "dv"},
}
NOT_ARRAYS = (None, 0, 1.5, "x", b"x", [1.0], (), {}, object(), np.ndarray, np.float32(1))
INTS = (-2, -(2**31), -(2**63), 2**63, 2**64, 2**70, 1.5, None, "x", [])
BAD = {
    "window": (
        *((left, 3) for left in INTS),
        *((-1, right) for right in INTS),
        (),
        (1,),
        [1, 2],
        None,
        5,
    ),
    "scale": (np.nan, np.inf, -np.inf, 1e39, 1e-50, None, "x", []),
    "softcap": (-1.0, np.nan, np.inf, 1e39, 1e-50, None, "x", []),
    "kernel": ("", "x", "fused\0", None, 1, [], "\ud800"),
    "backend": ("x", "cpu\0", None, 1, [], "\ud800"),
    "cpu_target": ("x", "avx2\0", None, 1, []),
}
LEGAL = {"causal": (True, False), "window": ((-1, -1), (0, 0), (2**63 - 1, 2**63 - 1)),
         "scale": (0.0, -1e30, 1e-30), "softcap": (0.0, 1e-30, 1e30)}  # fmt: skip


def bad_ranges(B, Tk):
    good = np.tile(np.array([0, 0, Tk], np.int64), (B, 1))
    yield from (0, "x", [], [[0, 0, 1]], object())
    yield from (
        good.astype(np.int32),
        good.astype(np.float64),
        good.astype(">i8"),
        good.astype(object),
    )
    yield from (good[:, :2].copy(), good[:-1], np.vstack([good, good]), good[0], good[None], good.T)
    yield from (np.asfortranarray(good), np.tile(good, 2)[:, ::2], good[::-1])
    for column, value in itertools.product((1, 2), (-1, Tk + 1, 2**31, 2**62, -(2**63), 2**63 - 1)):
        wrong = good.copy()
        wrong[-1, column] = value
        yield wrong


def bad_arrays(x, output):
    """Arrays that cannot stand in for x."""
    for dtype in ("f8" if x.dtype == np.float32 else "f4", "f2", "i4", "c8", "?", "O", "V4", ">f4"):
        yield np.zeros(x.shape, dtype)
    for axis in range(x.ndim):
        for extent in {x.shape[axis] - 1, x.shape[axis] + 1, 0, 2**40}:
            shape = (*x.shape[:axis], extent, *x.shape[axis + 1 :])
            if extent == 2**40:
                yield np.broadcast_to(np.float32(1), shape)
            else:
                yield np.ones(shape, x.dtype)
    yield from (x[0], x[None], x.ravel(), np.float32(1).reshape(()), np.zeros(0, np.float32))
    yield x.repeat(2, -1)[..., ::2]
    yield x[..., ::-1]
    raw = np.zeros(x.nbytes + 1, np.uint8)
    yield raw[1:].view(x.dtype).reshape(x.shape)
    if output:
        read_only = x.copy()
        read_only.setflags(write=False)
        yield read_only
        yield np.broadcast_to(x[:1, :1, :1].copy(), x.shape) if x.ndim > 2 else read_only


def recorded_calls():
    """The arguments of good calls of each kind, as the public functions make them."""
    calls = []
    original = forge._forge.run

    def recorder(*args):
        calls.append(args)
        return original(*args)

    forge._forge.run = recorder
    rng = np.random.default_rng(5)
    q, dout = (rng.standard_normal((2, 3, 4, 5)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 6, 2, 5)).astype(np.float32) for _ in range(2))
    rows = np.zeros((2, 4, 3), np.float32)
    for kernel in ("fused", "materialized"):
        _, saved = forge.attention_forward(
            q,
            k,
            v,
            causal=True,
            query_offset=2,
            key_end=5,
            softcap=2.0,
            kernel=kernel,
            out=q.copy(),
        )
        forge.attention_backward(dout, saved, dlse=rows)
    o, p, m, d, dq, dk, dv = (x.copy() for x in (q, saved.probs, rows, rows, q, k, v))
    forge.kernels.attention_fwd_f32(q, k, v, o, p, m, d)
    forge.kernels.attention_bwd_d_f32(o, dout, d, dlse=rows)
    forge.kernels.attention_bwd_dq_f32(q, k, v, p, dout, d, dq)
    forge.kernels.attention_bwd_dkv_f32(q, k, v, p, dout, d, dk, dv)
    forge._forge.run = original
    return calls


def fresh(value):
    if isinstance(value, np.ndarray):
        return value.copy()
    return {name: fresh(x) for name, x in value.items()} if isinstance(value, dict) else value


def attempt(label, refused, function, *args):
    try:
        function(*args)
    except REFUSALS:
        return
    if refused:
        print("not refused:", label)


def attack_options(args):
    kind, options = args[0], args[-1]

    def call(refused, **changes):
        def with_changes():
            forge._forge.run(*(fresh(x) for x in args[:-1]), {**options, **changes})

        attempt((kind, changes), refused, with_changes)

    for option, values in BAD.items():
        for value in values:
            call(True, **{option: value})
    for option, values in LEGAL.items():
        for value in values:
            call(False, **{option: value})
    for ranges in bad_ranges(2, 6):
        call(kind != "bwd_d", ranges=ranges)  # which has no keys
    extreme = np.array([[-(2**63), 0, 6], [2**63 - 1, 6, 0]], np.int64)
    call(False, ranges=extreme, causal=True, window=(2**63 - 1, 2**63 - 1))
    for wrong in NOT_ARRAYS:  # {} among them: options without a field
        attempt((kind, "options", wrong), True, forge._forge.run, *args[:-1], wrong)


def attack_arrays(args):
    """Each array replaced by wrong ones, and left out."""
    kind, arrays = args[:2]

    def call(others, **wrong):
        given = {name: fresh(x) for name, x in others.items()}
        forge._forge.run(kind, given | wrong, *args[2:])

    unread = set()  # m and l are in p already
    if kind == "backward" and args[-1]["kernel"] == "materialized":
        unread = {"row_max", "row_sum"}
    for target, good in arrays.items():
        if target in unread:
            continue
        for value in itertools.chain(NOT_ARRAYS, bad_arrays(good, target in OUTPUTS[kind])):
            label = (kind, target, getattr(value, "shape", value), getattr(value, "dtype", None))
            attempt(label, True, functools.partial(call, **{target: value}), arrays)
        rest = {name: x for name, x in arrays.items() if name != target}
        attempt((kind, "missing", target), target != "dlse", call, rest)
    for wrong in NOT_ARRAYS:
        attempt((kind, "arrays", wrong), True, forge._forge.run, kind, wrong, *args[2:])


def main():
    for args in recorded_calls():
        attack_arrays(args)
        attack_options(args)
        for wrong in ("", "x", "forward\0", None, 1, "\ud800"):
            attempt(("call", wrong), True, forge._forge.run, wrong, *args[1:])
        attempt((args[0], "no arguments"), True, forge._forge.run)
        attempt((args[0], "too many arguments"), True, forge._forge.run, *args, None)
    for n in (0, -1, -(2**31), 2**31, 2**63, 2**70, 1.5, None, "x", []):
        attempt(("set_num_threads", n), True, forge._forge.set_num_threads, n)
    for B in (2**50, 2**60):  # no elements, and more sequences than there is memory for
        x = np.zeros((B, 0, 1, 1), np.float32)
        attempt(("attention", B), False, forge.attention, x, x, x)
    x = np.ones((1, 2, 1, 1), np.float32)
    assert (forge.attention(x, x, x) == 1).all()
    print("done")


if __name__ == "__main__":
    main()
