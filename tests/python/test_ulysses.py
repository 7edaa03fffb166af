"""Rows exchanged for heads and back, over ranks that are threads."""

import forge
import numpy as np
import pytest
from forge import _ring_call, _ulysses
from ring_cases import CASES, GRADIENTS, check, inputs_of, part_of, put_together
from ring_double import World

NAMES = [
    name
    for name, case in CASES.items()
    if case.layout is not None and len(case.sinks) < 3 and "bfloat16" not in case.dtypes
]


def run_rank(transport, name, backward=True, **changed):
    case = CASES[name]
    (q, k, v, dout), sinks, options = part_of(name, transport.rank, transport.size)
    q, dout = q.astype(case.dtypes[0]), dout.astype(case.dtypes[0])
    k, v = k.astype(case.dtypes[1]), v.astype(case.dtypes[1])

    def build():
        given = _ring_call.RingOptions(**{**options, "sinks": sinks, **changed})
        checked = _ring_call.check_given(q, k, v, given)
        _ulysses.check_heads(transport.size, checked)
        return checked

    call = _ring_call.begin(transport, build, gradients=backward, call=_ulysses.CALL)
    out, saved = _ulysses.ulysses_forward(transport, call)
    results = {"out": out}
    if backward:
        dsinks = None if sinks is None else np.zeros(sinks.shape, np.float32)
        gradients = _ulysses.ulysses_backward(transport, saved, dout, dsinks)
        results |= dict(zip(GRADIENTS, gradients, strict=True))
        if dsinks is not None:
            results["dsinks"] = dsinks
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "grouped heads"])
def test_the_parts_are_those_of_the_whole(name, size):
    world = World(size)
    check(name, world.results(lambda transport: run_rank(transport, name)))
    assert not world.in_flight


@pytest.mark.parametrize("size", [2, 6])
def test_a_key_head_of_several_ranks_goes_to_all_of_them(size):
    check("grouped heads", World(size).results(lambda t: run_rank(t, "grouped heads")))


@pytest.mark.parametrize("name", ["causal contiguous", "window zigzag", "float16"])
def test_the_bits_are_those_of_the_single_process(name):
    """Where no key/value head is shared: kernels see the very rows of a head."""
    case, ((q, k, v, dout), _) = CASES[name], inputs_of(name)
    q, k, v, dout = (
        x.astype(case.dtypes[at]) for x, at in zip((q, k, v, dout), (0, 1, 1, 0), strict=True)
    )
    out, saved = forge.attention_forward(q, k, v, **case.options, backend="cpu")
    want = dict(zip(GRADIENTS, forge.attention_backward(dout, saved), strict=True), out=out)
    got = put_together(name, World(2).results(lambda transport: run_rank(transport, name)))
    for result, array in got.items():
        np.testing.assert_array_equal(array, want[result])


@pytest.mark.parametrize("size", [2, 4])
def test_two_runs_have_equal_bits(size):
    first, second = (
        World(size, delay=delay).results(lambda transport: run_rank(transport, "sinks"))
        for delay in (0, 0.003)
    )
    for one, other in zip(first, second, strict=True):
        for result, array in one.items():
            np.testing.assert_array_equal(array, other[result])


def test_heads_that_ranks_cannot_share_out_are_refused_on_all():
    for size, words in ((3, "q must have a multiple of 3 heads, one for each rank, got 4;"),
                        (8, "q must have a multiple of 8 heads")):  # fmt: skip
        for error in World(size).run(lambda transport: run_rank(transport, "whole")):
            assert isinstance(error, ValueError)
            assert str(error).startswith(words)
    for error in World(3).run(lambda transport: run_rank(transport, "grouped heads")):
        assert str(error).startswith("k must have a multiple or a divisor of 3 heads, the ranks")
    for error in World(2).run(lambda transport: run_rank(transport, "sinks of rows")):
        assert str(error).startswith("sinks must be [H] or [B, H], got [B, H, T]")


def test_it_is_not_ring_attention():
    from test_ring import run_rank as run_ring

    def work(transport):
        (run_ring if transport.rank else run_rank)(transport, "causal zigzag")

    for error in World(2).run(work):
        assert str(error) == (
            "call must be the same on all ranks, got ulysses_attention on rank 0 and "
            "ring_attention on rank 1"
        )


@pytest.mark.parametrize("which", ["attention_forward", "attention_backward"])
def test_a_rank_that_fails_to_compute_hangs_nobody(which, monkeypatch):
    import threading

    real, failing = getattr(_ulysses, which), {}

    def sometimes(*arguments, **options):
        if threading.get_ident() == failing.get(1):
            raise MemoryError("no memory")
        return real(*arguments, **options)

    monkeypatch.setattr(_ulysses, which, sometimes)
    world = World(4)

    def work(transport):
        failing.setdefault(transport.rank, threading.get_ident())
        return run_rank(transport, "causal contiguous")

    for rank, error in enumerate(world.run(work)):
        if rank == 1:
            assert isinstance(error, MemoryError)
        else:
            assert str(error) == "rank 1 could not compute its part"
    assert not world.in_flight
