"""What is computed in the same call changes no bit: other sequences of the batch, other key/value
heads and, in the forward, other queries."""

import forge
import numpy as np
import pytest
from calls import assert_same_bits, run, same_bits

# Each option, and all of them. Positions are those of a problem with as many queries as keys.
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 130},
    "two-sided window": {"window": (200, 31)},
    "softcap": {"softcap": 2.5},
    "scale": {"scale": -0.4},
    "all": {"causal": True, "window": 300, "softcap": 4.0, "scale": 0.3},
}
# Tq, Tk, query heads a key/value head, head size: around blocks of rows, tiles of keys and chains.
GROUPS = [
    (1, 130, 1, 64),
    (1, 1100, 4, 32),
    (3, 700, 2, 130),
    (16, 300, 1, 48),
    (17, 300, 1, 48),
    (25, 2100, 1, 16),
    (130, 130, 1, 64),
    (150, 400, 3, 40),
    (390, 390, 1, 256),
    (600, 600, 1, 33),
    (40, 70, 1, 20),
    (300, 90, 2, 24),
]


def fitted(group, backend):
    """No more than the software device computes in a second."""
    Tq, Tk, rep, hd = group
    return group if backend == "cpu" else (min(Tq, 40), min(Tk, 280), rep, hd)


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def inputs(rng, B, Tq, Tk, Hkv, rep, hd):
    q, dout = floats(rng, 2, B, Tq, Hkv * rep, hd)
    k, v = floats(rng, 2, B, Tk, Hkv, hd)
    return q, k, v, dout, floats(rng, B, Hkv * rep, Tq)


def one_sequence(arrays, b):
    return [x[b : b + 1] for x in arrays]


def one_group(arrays, head, rep):
    """A key/value head and its query heads."""
    q, k, v, dout, dlse = arrays
    heads = slice(head * rep, (head + 1) * rep)
    own = slice(head, head + 1)
    return q[:, :, heads], k[:, :, own], v[:, :, own], dout[:, :, heads], dlse[:, heads]


def part_of(results, cut):
    """The results' share of what `cut` takes from arrays like the inputs."""
    names = ("out", "dk", "dv", "dq", "lse")
    parts = dict(zip(names, cut([getattr(results, name) for name in names]), strict=True))
    for name in ("row_max", "row_sum"):
        values = [results.out, results.dk, results.dv, results.dq, getattr(results, name)]
        parts[name] = cut(values)[-1]
    return parts


def assert_part(results, cut, alone):
    for name, want in part_of(results, cut).items():
        same_bits(getattr(alone, name), want, name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_sequence_alone_and_in_a_batch(group, options, fused_backend, rng):
    Tq, Tk, rep, hd = fitted(group, fused_backend)
    for B in (3, 17) if fused_backend == "cpu" else (3,):
        arrays = inputs(rng, B, Tq, Tk, 2, rep, hd if B == 3 else min(hd, 40))
        together = run(*arrays, backend=fused_backend, **options)
        for b in (0, B - 1):
            alone = run(*one_sequence(arrays, b), backend=fused_backend, **options)
            assert_part(together, lambda x, b=b: one_sequence(x, b), alone)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_key_value_head_alone_and_among_others(group, options, fused_backend, rng):
    Tq, Tk, rep, hd = fitted(group, fused_backend)
    for Hkv in (3, 16) if fused_backend == "cpu" else (3,):
        arrays = inputs(rng, 1, Tq, Tk, Hkv, rep, hd if Hkv == 3 else min(hd, 40))
        together = run(*arrays, backend=fused_backend, **options)
        for head in (0, Hkv - 1):
            alone = run(*one_group(arrays, head, rep), backend=fused_backend, **options)
            assert_part(together, lambda x, head=head: one_group(x, head, rep), alone)


@pytest.mark.parametrize("causal", [False, True])
def test_a_short_sequence_and_the_same_padded_to_its_batch(causal, fused_backend, rng):
    """Keys from 0 on, or up to the last: positions stay, so bits do, whatever the padding holds."""
    Tq, Tk, rep, hd = 90, 400, 2, 40
    q, k, v, dout, dlse = inputs(rng, 2, Tq, Tk, 2, rep, hd)
    lengths, offsets = np.array([133, Tk]), np.array([43, Tk - Tq])
    k[0, 133:], v[0, 133:] = np.nan, np.nan
    positions = {"query_offset": offsets, "key_end": lengths, "causal": causal}
    together = run(q, k, v, dout, dlse, backend=fused_backend, **positions)
    alone = run(
        *(q[:1], k[:1, :133], v[:1, :133], dout[:1], dlse[:1]),
        backend=fused_backend,
        causal=causal,
        query_offset=43,
    )
    for name in ("out", "lse", "row_max", "row_sum", "dq"):
        same_bits(getattr(alone, name), getattr(together, name)[:1], name)
    for name in ("dk", "dv"):
        same_bits(getattr(alone, name), getattr(together, name)[:1, :133], name)
        assert not getattr(together, name)[0, 133:].any()


def forward_rows(q, k, v, rows, options, cache=False):
    """What the forward gives for some of the queries. cache: the keys end with the last one."""
    offset = k.shape[1] - q.shape[1] + rows.start
    keys = offset + len(rows) if cache else k.shape[1]
    some = slice(rows.start, rows.stop)
    got, saved = forge.attention_forward(
        q[:, some], k[:, :keys], v[:, :keys], query_offset=offset, **options
    )
    return [got, *(x.swapaxes(1, 2) for x in (saved.lse, saved.row_max, saved.row_sum))]


def assert_same_in_chunks(arrays, sizes, options):
    """All queries at once and `size` at a time, also over a growing cache where causal."""
    q, k, v = arrays
    whole = forward_rows(q, k, v, range(q.shape[1]), options)
    for size in sizes:
        begins = range(0, q.shape[1], size)
        if options["backend"] != "cpu":  # the software device takes as long for one row as for 32
            begins = {*begins[:: max(1, len(begins) // 4)], begins[-1]}
        for begin in begins:
            rows = range(begin, min(begin + size, q.shape[1]))
            for cache in (False, True) if options.get("causal") else (False,):
                got = forward_rows(q, k, v, rows, options, cache)
                for x, want in zip(got, whole, strict=True):
                    same_bits(x, want[:, begin : rows.stop], f"queries {rows}, cache {cache}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "group", [(530, 530, 1, 64), (70, 600, 2, 136), (100, 100, 3, 20)], ids=str
)
def test_queries_whole_in_chunks_and_one_by_one(group, options, fused_backend, rng):
    Tq, Tk, rep, hd = group
    q, k, v, _, _ = inputs(rng, 1, Tq, Tk, 2, rep, hd)
    assert_same_in_chunks((q, k, v), (1, 7, 33, 512), {**options, "backend": fused_backend})


# One task for all keys, a task for some of them, and so many parts that they are made in rounds.
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 5000, 1, 8, 64),
        (1, 30, 3000, 1, 1, 64),
        (1, 16, 700, 8, 1, 500),
        (1, 50, 1500, 2, 2, 130),
    ],
    ids=str,
)
def test_keys_split_among_tasks_give_the_bits_of_one_task(shape, cpu, rng, restore_threads):
    q, k, v, dout, dlse = inputs(rng, *shape)
    lengths = np.array([shape[2] - 150])
    options = {"backend": cpu, "causal": True, "query_offset": lengths - shape[1]}
    forge.set_num_threads(1)
    alone = run(q, k, v, dout, dlse, key_end=lengths, **options)
    for threads in (2, 16):
        forge.set_num_threads(threads)
        assert_same_bits(run(q, k, v, dout, dlse, key_end=lengths, **options), alone)
    for B in (2, 9):  # not all of one length
        arrays = [np.broadcast_to(x, (B, *x.shape[1:])) for x in (q, k, v, dout, dlse)]
        ends = np.array([*lengths, *[shape[2] // 3] * (B - 2), *lengths])
        offsets = ends - shape[1]
        together = run(*arrays, backend=cpu, causal=True, query_offset=offsets, key_end=ends)
        for b in (0, B - 1):
            assert_part(together, lambda x, b=b: one_sequence(x, b), alone)


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_sign_of_zeros_is_no_exception(scale, fused_backend, rng):
    """Scores, maxima, values and gradients that are zeros of both signs, or too small for float32;
    as a whole and query by query, with and without a neighbour."""
    Tq, hd = 40, 8
    signs = rng.choice([-1.0, 1.0], (5, 2, Tq, 2, hd)).astype(np.float32)
    tiny = np.float32(1e-30)
    q, k, v, dout = (
        signs[n] * np.where(rng.random((2, Tq, 2, hd)) < 0.5, 0, tiny).astype(np.float32)
        for n in range(4)
    )
    options = {"causal": True, "scale": scale, "backend": fused_backend}
    together = run(q, k, v, dout, **options)
    alone = run(q[:1], k[:1], v[:1], dout[:1], **options)
    for name in ("out", "row_max", "lse", "dq", "dk", "dv"):
        same_bits(getattr(alone, name), getattr(together, name)[:1], name)
    assert_same_in_chunks([np.tile(x, (1, 5, 1, 1)) for x in (q, k, v)], (1, 7), options)


def with_planted(value, rng):
    q, k, v, dout, dlse = inputs(rng, 2, 200, 200, 2, 2, 24)
    k[0, 140, 0, 3], v[0, 70, 1, 5], q[0, 20, 1, 0] = value, value, value
    return q, k, v, dout, dlse


NOT_FINITE = pytest.mark.parametrize("planted", [np.nan, np.inf, -np.inf], ids=str)


@NOT_FINITE
def test_not_finite_values_of_a_sequence_alone_and_in_a_batch(planted, fused_backend, rng):
    arrays = with_planted(planted, rng)
    options = {"causal": True, "window": 100, "backend": fused_backend}
    together = run(*arrays, **options)
    for b in (0, 1):
        alone = run(*one_sequence(arrays, b), **options)
        assert_part(together, lambda x, b=b: one_sequence(x, b), alone)


@NOT_FINITE
def test_not_finite_values_with_queries_in_chunks(planted, fused_backend, rng):
    options = {"causal": True, "window": 100, "backend": fused_backend}
    assert_same_in_chunks(with_planted(planted, rng)[:3], (1, 33), options)
