"""Ring attention over ranks that are threads: results, messages, overlap, faults."""

import itertools
import re
import time

import forge
import numpy as np
import pytest
from forge import _ring, _ring_call, _ring_plan, _ring_travel
from forge._dtypes import FLOAT32
from forge._ring_handshake import TransportError
from oracle import visible
from ring_cases import CASES, GRADIENTS, check, inputs_of, part_of, problem_of, rows_of
from ring_double import Gone, World

SIZES = (1, 2, 3, 4, 8)
IN_NUMPY = [name for name, case in CASES.items() if "bfloat16" not in case.dtypes]


def run_rank(transport, name, backward=True, **changed):
    case = CASES[name]
    (q, k, v, dout), sinks, options = part_of(name, transport.rank, transport.size)
    q, dout = q.astype(case.dtypes[0]), dout.astype(case.dtypes[0])
    k, v = k.astype(case.dtypes[1]), v.astype(case.dtypes[1])

    def build():
        return _ring_call.check_given(
            q, k, v, _ring_call.RingOptions(**{**options, "sinks": sinks, **changed})
        )

    call = _ring_call.begin(transport, build, gradients=backward)
    out, saved = _ring.ring_forward(transport, call)
    results = {"out": out}
    if backward:
        dsinks = None if sinks is None else np.zeros(sinks.shape, np.float32)
        gradients = _ring.ring_backward(transport, saved, dout, dsinks)
        results |= dict(zip(GRADIENTS, gradients, strict=True))
        if dsinks is not None:
            results["dsinks"] = dsinks
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", IN_NUMPY)
def test_the_parts_are_those_of_the_whole(name, size):
    world = World(size)
    check(name, world.results(lambda transport: run_rank(transport, name)))
    assert not world.in_flight


@pytest.mark.parametrize("name", ["causal zigzag", "window zigzag", "padding", "sinks"])
def test_two_runs_have_equal_bits(name):
    first = World(4).results(lambda transport: run_rank(transport, name))
    second = World(4, delay=0.003).results(lambda transport: run_rank(transport, name))
    for one, other in zip(first, second, strict=True):
        for result, array in one.items():
            np.testing.assert_array_equal(array, other[result])


def seen(name, size):
    """seen[r][s]: whether a query of rank r sees a key of rank s; from the whole mask."""
    case = CASES[name]
    options = {"causal": False, "window": None, **case.options}
    ends = [*case.lengths] or [case.T]
    mask = np.zeros((case.T, case.T), bool)
    for end in ends:
        of_one = visible(1, case.T, case.T, options["causal"], options["window"], 0)[0]
        of_one[end:], of_one[:, end:] = False, False
        mask |= of_one
    rows = [rows_of(case, rank, size)[0] for rank in range(size)]
    return [[bool(mask[np.ix_(rows[r], rows[s])].any()) for s in range(size)] for r in range(size)]


def kept_rows(name, rank, size):
    """Rows that a rank has for others: without padding."""
    case = CASES[name]
    rows = rows_of(case, rank, size)[0]
    if not case.lengths:
        return len(rows)
    return max(int((rows < length).sum()) for length in case.lengths)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", IN_NUMPY)
def test_messages_and_bytes_are_those_of_the_schedule(name, size):
    """Each rank hands on a block once if anybody further round the ring sees it: the forward sends
    keys and values, the backward these and float32 gradients, once for each rank that reads."""
    case = CASES[name]
    (_, k, v, _), _ = inputs_of(name)
    sees = seen(name, size)
    itemsize = np.dtype(case.dtypes[1]).itemsize
    elements = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    messages, nbytes = [0] * size, [0] * size
    grads, grad_bytes = [0] * size, [0] * size
    for owner in range(size):
        readers = [(owner + d) % size for d in range(1, size) if sees[(owner + d) % size][owner]]
        rows = kept_rows(name, owner, size)
        for sender in [owner, *readers[:-1]] if readers else []:
            messages[sender] += 1
            nbytes[sender] += rows * elements * itemsize
        for sender in readers:
            grads[sender] += 1
            grad_bytes[sender] += rows * elements * 4
    for backward in (False, True):
        world = World(size)
        world.results(lambda transport, b=backward: run_rank(transport, name, b))
        times = 1 + backward
        for rank, transport in enumerate(world.transports):
            assert transport.messages["keys"] == times * messages[rank]
            assert transport.messages["gradients"] == (grads[rank] if backward else 0)
            sent, scheduled = sum(transport.bytes.values()), times * nbytes[rank]
            scheduled += grad_bytes[rank] if backward else 0
            # Small problems: up to 72 bytes of each message are its frame.
            assert scheduled <= sent <= scheduled + 72 * sum(transport.messages.values())


def test_bytes_keep_within_a_twentieth_of_the_schedule():
    world, rng, T, size = World(4), np.random.default_rng(0), 256, 4
    x = rng.standard_normal((1, T // size, 2, 32)).astype(np.float32)

    def work(transport):
        call = _ring_call.begin(
            transport, lambda: _ring_call.check_given(x, x, x, _ring_call.RingOptions(causal=True))
        )
        _, saved = _ring.ring_forward(transport, call)
        _ring.ring_backward(transport, saved, x)

    world.results(work)
    for transport in world.transports:
        keys, gradients = 2 * (size - 1) * 2 * x.nbytes, (size - 1) * 2 * x.nbytes
        assert keys <= transport.bytes["keys"] <= 1.05 * keys
        assert gradients <= transport.bytes["gradients"] <= 1.05 * gradients


@pytest.mark.parametrize("size", [4, 8, 16])
def test_messages_follow_the_window_not_the_number_of_ranks(size):
    """A window as long as a shard reaches into one other rank, however many there are."""
    rows = 4
    x = np.random.default_rng(1).standard_normal((1, rows, 1, 4)).astype(np.float32)
    world = World(size)
    options = _ring_call.RingOptions(layout="contiguous", causal=True, window=rows)

    def work(transport):
        call = _ring_call.begin(transport, lambda: _ring_call.check_given(x, x, x, options))
        _ring.ring_forward(transport, call)

    world.results(work)
    sent = [transport.messages["keys"] for transport in world.transports]
    assert sent == [1] * (size - 1) + [0]


def travel(size, delay, seconds, gradients):
    """Seconds that blocks take around a ring where reading one takes so long, and a message too."""
    plan = _ring_plan.layout_plan("zigzag", 16 * size, size, _ring_plan.band_of(True, None))
    blocks = _ring_travel.Blocks(1, 1, 4, 4, (16,) * size, FLOAT32)
    world, logs = World(size, delay=delay), {}

    def work(transport):
        def visit(owner, block, made):
            transport.log.append(("visit", owner))
            time.sleep(seconds)

        own = np.zeros(blocks.nbytes(transport.rank), np.uint8)
        _ring_travel.Travel(transport, plan, blocks).run(own, visit, gradients and blocks)
        logs[transport.rank] = transport.log

    start = time.perf_counter()
    world.results(work)
    return time.perf_counter() - start, logs


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2])
def test_sending_overlaps_computing(delay):
    """Messages and computing sleep, so that a busy machine tells the same: four blocks of 0.1 s and
    three messages take the larger of both, and what cannot overlap, not the sum."""
    took, _ = travel(4, delay, 0.1, None)
    larger, both = max(3 * delay + 0.1, 0.4), 3 * delay + 0.4
    assert took >= larger - 0.01
    assert took < larger + 0.6 * (both - larger)


def test_sending_overlaps_computing_in_the_backward():
    took, _ = travel(4, 0.1, 0.1, True)
    assert took < 0.1 * 4 + 0.1 * 3  # 3 messages of each kind and 4 blocks: 1.0 one by one


@pytest.mark.parametrize("gradients", [None, True])
def test_the_next_block_is_under_way_while_one_is_read(gradients):
    _, logs = travel(4, 0.0, 0.0, gradients)
    for rank, log in logs.items():
        for hop, owner in enumerate((rank - d) % 4 for d in range(4)):
            visited = log.index(("visit", owner))
            if hop < 3:
                assert log.index(("send", 2 * owner)) < visited
                assert log.index(("receive", 2 * ((owner - 1) % 4))) < visited


CHANGES = {
    "window": ({"window": 5}, r"window must be the same on all ranks, got None on ranks 0, 2 and 5"
               " on rank 1"),
    "scale": ({"scale": 0.5}, "scale must be the same"),
    "softcap": ({"softcap": 3.0}, "softcap must be the same"),
    "layout": ({"layout": "contiguous"}, "layout must be the same on all ranks, got zigzag"),
    "causal": ({"causal": False}, "causal must be the same"),
    "sinks": ({"sinks": np.ones(4, np.float32)}, "sinks must be the same"),
    "a wrong option": ({"window": 0}, "rank 1 refused its arguments: ValueError: window must be"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "words"), CHANGES.values(), ids=CHANGES)
def test_ranks_that_differ_are_told_what_differs(changed, words):
    world = World(3)

    def work(transport):
        mine = changed if transport.rank == 1 else {}
        run_rank(transport, "causal zigzag", **mine)

    refused = world.run(work)
    for rank, error in enumerate(refused):
        assert isinstance(error, ValueError)
        if rank != 1 or "refused" not in words:
            assert re.match(words, str(error)), error
    assert not any(transport.messages for transport in world.transports)
    assert not world.in_flight


def test_shapes_gradients_and_rows_that_differ_are_named():
    x = np.zeros((1, 4, 2, 8), np.float32)

    def raised(of_rank):
        def work(transport):
            q, k, gradients = of_rank(transport.rank)
            _ring_call.begin(
                transport,
                lambda: _ring_call.check_given(q, k, k, _ring_call.RingOptions()),
                gradients=gradients,
            )

        return [str(error) for error in World(2).run(work)]

    for message in raised(lambda rank: (x, x[:, :, : 1 + rank], False)):
        assert message == "Hkv must be the same on all ranks, got 1 on rank 0 and 2 on rank 1"
    for message in raised(lambda rank: (x, x, rank == 1)):
        assert message.startswith("a gradient must be the same on all ranks, got not wanted on")
    for message in raised(lambda rank: (x[:, rank * 3 :], x[:, rank * 3 :], False)):
        assert message == (
            "q must have 3 of the 5 rows on rank 0 for layout 'zigzag', got 4; ring_positions says "
            "which, or pass positions"
        )


def test_a_position_that_two_ranks_hold_is_named():
    x = np.zeros((1, 2, 1, 4), np.float32)

    def work(transport):
        at = [[0, 1], [3, 1]][transport.rank]
        _ring_call.begin(
            transport, lambda: _ring_call.check_given(x, x, x, _ring_call.RingOptions(positions=at))
        )

    for error in World(2).run(work):
        assert str(error) == "positions must differ within a sequence, got 1 on ranks 0 and 1"


@pytest.mark.parametrize("step", [1, 3, 5, 9])
def test_a_rank_that_dies_is_an_error_and_leaves_nothing_in_flight(step):
    world = World(4, dies_at={2: step}, timeout=1)
    start = time.monotonic()
    errors = world.run(lambda transport: run_rank(transport, "causal zigzag"))
    assert time.monotonic() - start < 30
    assert isinstance(errors.pop(2), Gone)
    assert any(isinstance(error, TransportError) for error in errors)
    for error in errors:  # ranks that had what they needed may have finished
        assert isinstance(error, (TransportError, dict)), error
    assert not {message for message in world.in_flight if message.key[1:3].count(2) == 0}


def test_a_rank_that_fails_to_compute_hangs_nobody(monkeypatch):
    """Its messages go on; in the backward, where its share is missing, all that want it raise."""
    real = _ring.attention_backward

    def failing(dout, part, **rest):
        if dout.shape[1] == 13:  # the longest rank
            raise MemoryError("no memory for dq")
        return real(dout, part, **rest)

    monkeypatch.setattr(_ring, "attention_backward", failing)
    world = World(4)
    errors = world.run(lambda transport: run_rank(transport, "odd length"))
    lengths = [len(rows_of(CASES["odd length"], rank, 4)[0]) for rank in range(4)]
    assert 0 < lengths.count(13) < 4
    for length, error in zip(lengths, errors, strict=True):
        if length == 13:
            assert isinstance(error, MemoryError)
        else:
            assert isinstance(error, RuntimeError)
            assert "could not compute its gradients" in str(error)
    assert not world.in_flight


def test_the_plan_agrees_with_the_mask():
    for name, size in itertools.product(CASES, (2, 3, 8)):
        case = CASES[name]
        band = _ring_plan.band_of(case.options.get("causal", False), case.options.get("window"))
        if case.layout is not None:
            plan = _ring_plan.layout_plan(case.layout, case.T, size, band)
        else:
            at = [np.atleast_2d(rows_of(case, rank, size)[1]) for rank in range(size)]
            plan = _ring_plan.Plan(tuple(map(_ring_plan.shard_of, at)), band)
        sees = seen(name, size)
        for rank, owner in itertools.product(range(size), repeat=2):
            assert plan.sees(rank, owner) == sees[rank][owner], (name, rank, owner)


def test_layouts_cut_a_sequence_into_all_its_rows():
    for layout, total, size in itertools.product(_ring_plan.LAYOUTS, (0, 1, 7, 64, 101), (1, 2, 5)):
        held = [_ring_plan.layout_positions(layout, total, size, rank) for rank in range(size)]
        np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(total))
        assert max(map(len, held)) - min(map(len, held)) <= 2


def test_zigzag_gives_all_ranks_the_same_work_under_a_causal_mask():
    pairs = [
        int((_ring_plan.layout_positions("zigzag", 256, 8, rank) + 1).sum()) for rank in range(8)
    ]
    assert max(pairs) == min(pairs)


def test_the_single_rank_is_the_single_process():
    """Bit for bit: nothing is merged."""
    [found] = World(1).results(lambda transport: run_rank(transport, "causal zigzag"))
    q, k, v, _ = problem_of("causal zigzag").inputs[:4]
    np.testing.assert_array_equal(found["out"], forge.attention(q, k, v, causal=True))
