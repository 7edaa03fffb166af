"""Decode over a cache that ranks hold in parts, over ranks that are threads."""

import re

import numpy as np
import pytest
from forge import _split_decode
from oracle import UNIT, Problem, distance, random_inputs
from ring_double import World

SIZES = (1, 2, 3, 8)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 11},
    "two-sided window": {"window": (4, 0)},
    "softcap and scale": {"softcap": 2.0, "scale": -0.6},
}


def cut(T, size):
    """Rows of each rank: uneven, and one rank has none."""
    edges = np.sort(np.random.default_rng(size).integers(0, T + 1, size - 1))
    return np.split(np.arange(T), edges)


def decode(transport, q, k, v, **options):
    given = _split_decode.DecodeOptions(**options)
    return _split_decode.decode(transport, lambda: _split_decode.check_decode(q, k, v, given))


def check(problem, outs, unit=0.0):
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    want = problem.exact.out
    bound = problem.tolerance("out", "fused")
    bound += 2 * (len(outs) + 2) * UNIT * problem.exact.term_sums(scores_too=False)["out"]
    bound += unit * np.abs(want).max()
    assert distance(outs[0].astype(np.float64), want) <= bound


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("Tq", [1, 3])
def test_parts_of_a_cache_make_the_whole(options, size, Tq, rng):
    q, k, v, _ = random_inputs(rng, B=2, Tq=Tq, Tk=50, H=4, Hkv=2, hd=8, hv=6)
    rows, world = cut(50, size), World(size)
    outs = world.results(lambda t: decode(t, q, k[:, rows[t.rank]], v[:, rows[t.rank]], **options))
    check(Problem(q, k, v, **options), outs)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_may_lie_anywhere_and_be_unfilled(size, rng):
    """New tokens go to the ranks in turns; a row that holds none yet says -1."""
    q, k, v, _ = random_inputs(rng, B=2, Tq=2, Tk=40, H=4, Hkv=2, hd=8)
    filled = 33
    place = rng.permutation(40)
    at = np.where(place < filled, place, -1)
    rows = np.array_split(np.arange(40), size)
    sinks = rng.standard_normal(4).astype(np.float32)
    options = {"causal": True, "window": 20, "sinks": sinks}
    outs = World(size).results(
        lambda t: decode(
            t, q, k[:, rows[t.rank]], v[:, rows[t.rank]], **options,
            positions=[filled - 2, filled - 1], key_positions=at[rows[t.rank]],
        )
    )  # fmt: skip
    order = np.argsort(np.where(at < 0, 99, at))
    problem = Problem(
        q, k[:, order], v[:, order], **options, key_end=filled, query_offset=filled - 2
    )
    check(problem, outs)


def test_halves_and_what_is_sent(rng):
    q, k, v, _ = (x.astype(np.float16) for x in random_inputs(rng, Tq=1, Tk=64, H=4, Hkv=2, hd=8))
    rows, world = np.array_split(np.arange(64), 4), World(4)
    outs = world.results(lambda t: decode(t, q, k[:, rows[t.rank]], v[:, rows[t.rank]]))
    assert outs[0].dtype == np.float16
    check(Problem(*(x.astype(np.float32) for x in (q, k, v))), outs, unit=2.0**-11)
    for transport in world.transports:
        assert transport.gathered == 2  # the hash, and 4 heads of 8 channels with their sums
        assert not transport.messages
    assert world.records[2][0].nbytes == 4 * (8 + 2) * 4 + 8


def test_ranks_that_differ_say_so(rng):
    q, k, v, _ = random_inputs(rng, Tq=1, Tk=8)
    for changed, words in (
        ({"q": q + 1}, "q must be the same on all ranks, got shape (1, 1, 2, 4) with values"),
        ({"window": 3}, "window must be the same on all ranks, got None on rank 0 and 3 on rank 1"),
        ({"causal": 2}, "rank 1 refused its arguments: TypeError: causal must be"),
        ({"key_positions": range(8)}, "rank 1 refused its arguments: ValueError: positions must"),
    ):

        def work(transport, changed=changed):
            mine = {"q": q, **(changed if transport.rank else {})}
            return decode(transport, mine.pop("q"), k, v, **mine)

        first, _ = World(2).run(work)
        assert re.match(re.escape(words), str(first)), first
    for error in World(2).run(lambda t: decode(t, np.repeat(q, 9, 1), k[:, :4], v[:, :4])):
        assert str(error).startswith("positions must be given where there are fewer keys, 8, than")


def test_a_rank_that_fails_to_compute_hangs_nobody(monkeypatch, rng):
    q, k, v, _ = random_inputs(rng, Tq=1, Tk=8)
    real = _split_decode.attention_forward

    def failing(q, k, *rest, **options):
        if k.shape[1] == 3:
            raise MemoryError("no memory")
        return real(q, k, *rest, **options)

    monkeypatch.setattr(_split_decode, "attention_forward", failing)
    rows = [slice(0, 3), slice(3, 8)]
    first, second = World(2).run(lambda t: decode(t, q, k[:, rows[t.rank]], v[:, rows[t.rank]]))
    assert isinstance(first, MemoryError)
    assert str(second) == "rank 0 could not compute its part"
