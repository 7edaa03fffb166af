"""forge.split: bytes and messages as they are counted, and the model of the time."""

import dataclasses
import itertools

import numpy as np
import pytest
import test_ring
import test_ulysses
from forge import split
from oracle import visible
from ring_cases import CASES, inputs_of
from ring_double import World

NAMES = [name for name in test_ulysses.NAMES if name != "sinks of rows"]
FRAME = 72


def problem_of(name, size, backward):
    case, ((q, k, v, _), _) = CASES[name], inputs_of(name)
    return split.Problem(
        T=case.T, ranks=size, H=q.shape[2], Hkv=k.shape[2], hd=q.shape[3], hv=v.shape[3],
        B=q.shape[0], itemsize=np.dtype(case.dtypes[1]).itemsize, layout=case.layout,
        backward=backward, **{n: x for n, x in case.options.items() if n in ("causal", "window")},
    )  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("how", "module", "size"), [
    ("ring", test_ring, 2), ("ring", test_ring, 3), ("ring", test_ring, 8),
    ("ulysses", test_ulysses, 2), ("ulysses", test_ulysses, 4),
])  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_it_counts_what_is_sent(name, how, module, size, backward):
    if how == "ulysses" and CASES[name].sizes.get("H", 4) % size:
        return
    world = World(size)
    world.results(lambda transport: module.run_rank(transport, name, backward))
    said = split.traffic(problem_of(name, size, backward), how)
    counted = [(sum(t.bytes.values()), sum(t.messages.values())) for t in world.transports]
    frames = FRAME * sum(messages for _, messages in counted)
    assert said.total_bytes <= sum(nbytes for nbytes, _ in counted) <= said.total_bytes + frames
    most, messages = max(counted)
    assert said.bytes <= most <= said.bytes + FRAME * messages
    assert said.messages in {of for nbytes, of in counted if nbytes + FRAME * of >= most}


def test_pairs_are_those_of_the_mask():
    for layout, causal, window, T, n in itertools.product(
        ("zigzag", "contiguous"),
        (False, True),
        (None, 1, 5, (3, 2), (0, 40)),
        (1, 7, 33),
        (1, 2, 5),
    ):
        problem = split.Problem(
            T=T, ranks=n, H=1, Hkv=1, hd=1, layout=layout, causal=causal, window=window
        )
        mask = visible(1, T, T, causal, window, 0)[0]
        at = [np.concatenate([np.arange(*run) for run in runs] or [[]]).astype(int)
              for runs in problem.runs()]  # fmt: skip
        want = [[mask[np.ix_(at[r], at[s])].sum() for s in range(n)] for r in range(n)]
        np.testing.assert_array_equal(problem.pairs(), want)


BASE = split.Problem(T=2**17, ranks=8, H=32, Hkv=32, hd=128, itemsize=2, causal=True)


def test_the_exchange_of_heads_sends_less_where_ranks_are_many_and_heads_too():
    """A ring sends keys and values n - 1 times, the exchange all arrays once. A window and few
    key/value heads speak for the ring."""
    assert split.fewer_bytes(BASE) == "ulysses"
    window = dataclasses.replace(BASE, Hkv=8, layout="contiguous", window=1024)
    assert split.fewer_bytes(window) == "ring"
    few = dataclasses.replace(BASE, Hkv=1)
    assert split.fewer_bytes(few) == "ring"
    assert split.fewer_bytes(dataclasses.replace(BASE, ranks=3)) == "ring"  # 32 heads


def test_the_time_is_the_longer_of_computing_and_sending():
    fast = split.Machine(flops=1e12, bandwidth=1e15, latency=0)
    slow = split.Machine(flops=1e18, bandwidth=1e9, latency=0)
    for backward in (False, True):
        problem = dataclasses.replace(BASE, backward=backward)
        found = split.estimate(problem, "ring", fast)
        assert found.total == pytest.approx(found.computing, rel=1e-3)
        found = split.estimate(problem, "ring", slow)
        assert found.total == pytest.approx(found.sending, rel=1e-3)
        sent = split.traffic(problem, "ring").bytes / 1e9
        assert found.sending == pytest.approx(sent, rel=0.01)


def test_ranks_share_the_work():
    machine = split.Machine(flops=1e12, bandwidth=1e15, latency=0)
    alone = split.estimate(dataclasses.replace(BASE, ranks=1), "ring", machine).total
    shared = split.estimate(BASE, "ring", machine).total
    assert alone / shared == pytest.approx(8, rel=0.01)
    uneven = split.estimate(dataclasses.replace(BASE, layout="contiguous"), "ring", machine).total
    assert alone / uneven == pytest.approx(4.27, rel=0.01)  # ranks wait for the last, full blocks
    heads = split.estimate(BASE, "ulysses", machine).total
    assert alone / heads == pytest.approx(8, rel=0.01)


def test_wrong_problems_are_refused_in_words():
    given = {"T": 8, "ranks": 2, "H": 2, "Hkv": 2, "hd": 4}
    for changed, error, words in (
        ({"ranks": 0}, ValueError, "^ranks must be at least 1, got 0"),
        ({"T": 1.5}, TypeError, "^T must be an int"),
        ({"hv": 0}, ValueError, "^hv must be at least 1"),
        ({"itemsize": 8}, ValueError, "^itemsize must be 2 or 4, got 8"),
        ({"layout": "striped"}, ValueError, "^layout must be 'zigzag' or 'contiguous'"),
        ({"window": 0}, ValueError, "^window must be at least 1"),
    ):
        with pytest.raises(error, match=words):
            split.Problem(**{**given, **changed})
    with pytest.raises(ValueError, match=r"^how must be 'ring' or 'ulysses', got 'star'"):
        split.traffic(split.Problem(**given), "star")
    with pytest.raises(ValueError, match=r"^how must be 'ring' where ranks cannot share out"):
        split.traffic(split.Problem(**{**given, "ranks": 3}), "ulysses")
