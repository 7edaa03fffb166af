"""query_offset, key_start and key_end: what they may be, and when they must come together."""

import array
import itertools

import forge
import numpy as np
import pytest
from optional import need
from oracle import visible

B, TQ, TK = 2, 3, 7
LIMITS = ({"causal": True}, {"window": 2}, {"window": (-1, 1)}, {"causal": True, "window": (4, 0)})


def zeros(T, batch=B):
    return np.zeros((batch, T, 1, 2), np.float32)


def seen(Tq=TQ, Tk=TK, **options):
    """How many keys each query sees, [B, Tq]: all scores are equal."""
    _, saved = forge.attention_forward(zeros(Tq), zeros(Tk), zeros(Tk), **options)
    return np.rint(np.exp(saved.lse[:, 0])).astype(int)


class Series:
    """Like a column of a data frame: an array only to those who ask by __array__."""

    def __init__(self, values, dtype=np.int64):
        self.values = np.array(values, dtype)

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


class Index:
    """No array, but an int to those who ask by __index__."""

    def __index__(self):
        return 4


INTEGERS = {
    "list": [2, 5],
    "tuple": (2, 5),
    "range": range(2, 6, 3),
    "list of NumPy ints": [np.int8(2), np.int32(5)],
    "array.array": array.array("q", [2, 5]),
    "memoryview": memoryview(array.array("i", [2, 5])),
    "strided": np.array([2, 9, 5, 9], np.int16)[::2],
    "big-endian": np.array([2, 5], ">i4"),
    "unsigned": np.array([2, 5], np.uint64),
    "Series": Series([2, 5]),
    "masked, nothing hidden": np.ma.array([2, 5], mask=False),
}


@pytest.mark.parametrize("name", ["query_offset", "key_start", "key_end"])
@pytest.mark.parametrize("value", INTEGERS.values(), ids=INTEGERS)
def test_whatever_numpy_makes_an_integer_array_of(name, value):
    options = {"causal": True, "query_offset": 4}
    want = visible(B, TQ, TK, **(options | {name: np.array([2, 5])})).sum(-1)
    np.testing.assert_array_equal(seen(**(options | {name: value})), want)


@pytest.mark.parametrize(
    "value",
    [4, np.uint8(4), np.array(4), Index(), Series(4)],
    ids=["int", "uint8", "array", "index", "series"],
)
def test_one_int_for_all_sequences(value):
    np.testing.assert_array_equal(seen(key_end=value), 4)


@pytest.mark.parametrize("library", ["torch", "jax.numpy", "mlx.core"])
def test_integer_arrays_of_other_libraries(library):
    module = need(library)
    make = module.tensor if library == "torch" else module.array
    np.testing.assert_array_equal(seen(key_end=make([2, 5])), [[2] * TQ, [5] * TQ])
    np.testing.assert_array_equal(seen(key_end=make(5)), 5)
    for wrong in ([2.0, 5.0], [True, False], 1.0, True):
        with pytest.raises(
            TypeError, match=r"^key_end must be an int or an int array, \[B\] or \[B, Tq\]"
        ):
            seen(key_end=make(wrong))
    with pytest.raises(
        ValueError, match=r"^key_end must have shape \(2,\) or \(2, 3\), got \(1,\)"
    ):
        seen(key_end=make([2]))


NO_INTEGERS = {
    "floats": Series([2, 5], float),
    "bools": Series([True, False], bool),
    "objects": Series([2, None], object),
    "complex": 1j,
    "set": {2, 5},
    "a generator": (x for x in (2, 5)),
    "ragged": [[1], [1, 2]],
    "strings": ["2", "5"],
    "no dtype holds both": [2**64, 5],
}


@pytest.mark.parametrize("value", NO_INTEGERS.values(), ids=NO_INTEGERS)
def test_what_is_no_integer_array_is_refused(value):
    for name in ("query_offset", "key_start", "key_end"):
        with pytest.raises(
            TypeError, match=rf"^{name} must be an int or an int array, \[B\] or \[B, Tq\], got "
        ):
            seen(**{name: value})


def test_what_cannot_be_read_as_an_array_says_why():
    class Elsewhere:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("it is on a GPU")

    with pytest.raises(TypeError, match=r"^key_end must be .* got Elsewhere: it is on a GPU"):
        seen(key_end=Elsewhere())


@pytest.mark.parametrize("options", LIMITS, ids=str)
def test_key_end_needs_an_offset_where_positions_matter(options):
    """The last query could stand at the last filled row, or at the last row that there is."""
    for end in (5, [5, 7], TK):  # whatever the values
        with pytest.raises(ValueError, match=r"^query_offset must be given with key_end") as caught:
            seen(key_end=end, **options)
        assert "query_offset = key_end - Tq" in str(caught.value)
        assert f"Tk - Tq ({TK - TQ})" in str(caught.value)
    for offset in (5 - TQ, TK - TQ):
        got = seen(key_end=5, query_offset=offset, **options)
        want = visible(B, TQ, TK, key_end=5, query_offset=offset, **options)
        np.testing.assert_array_equal(got, want.sum(-1))


NO_POSITIONS = (
    {},
    {"causal": False},
    {"window": (-1, -1)},
    {"window": 2**70},
    {"softcap": 2.0, "scale": 0.5},
)


@pytest.mark.parametrize("options", NO_POSITIONS, ids=str)
def test_key_end_alone_where_positions_do_not_matter(options):
    np.testing.assert_array_equal(seen(key_end=5, **options), 5)


def test_key_end_alone_where_there_is_one_reading():
    """One causal query sees all that is filled; with Tq = Tk rows and keys are the same."""
    np.testing.assert_array_equal(seen(Tq=1, key_end=5, causal=True), 5)
    np.testing.assert_array_equal(seen(Tq=7, key_end=2, causal=True)[0], [1, 2, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(seen(Tq=7, key_end=2, window=2)[0], [2, 2, 1, 0, 0, 0, 0])
    with pytest.raises(ValueError, match=r"^query_offset must be given"):
        seen(Tq=1, key_end=5, causal=True, window=2)


@pytest.mark.parametrize("options", LIMITS, ids=str)
def test_key_start_needs_no_offset(options):
    """Left padding: the last query stands at the last key in any case."""
    want = visible(B, TQ, TK, key_start=2, **options).sum(-1)
    np.testing.assert_array_equal(seen(key_start=2, **options), want)


def adapter(name):
    if name == "torch":
        torch = need("torch")
        import forge.torch as module

        return torch.from_numpy, torch.tensor, module.attention
    if name == "jax":
        need("jax")
        import forge.jax as module
        import jax.numpy as jnp

        return jnp.asarray, jnp.array, module.attention
    mx = need("mlx.core")
    import forge.mlx as module

    return mx.array, mx.array, module.attention


@pytest.mark.parametrize("name", ["torch", "jax", "mlx"])
def test_the_adapters_ask_for_an_offset_too(name):
    """With key_end as an int, a list or an array of the library's, traced by JAX or not."""
    array_of, ints, attention = adapter(name)
    q, k = array_of(zeros(TQ)), array_of(zeros(TK))
    for end, options in itertools.product((5, [5, 7], ints([5, 7])), LIMITS):
        with pytest.raises(ValueError, match=r"^query_offset must be given with key_end"):
            attention(q, k, k, key_end=end, **options)
        for offset in (2, [2, 4], ints([2, 4])):
            out = attention(q, k, k, key_end=end, query_offset=offset, **options)
            assert tuple(out.shape) == (B, TQ, 1, 2)
    assert attention(q, k, k, key_end=ints([5, 7])).shape == q.shape


def test_jax_asks_for_an_offset_when_a_call_is_traced():
    array_of, _, attention = adapter("jax")
    import jax

    q, k = array_of(zeros(TQ)), array_of(zeros(TK))
    with pytest.raises(ValueError, match=r"^query_offset must be given with key_end"):
        jax.jit(lambda end: attention(q, k, k, causal=True, key_end=end)).lower(5)
    both = jax.jit(lambda end, at: attention(q, k, k, causal=True, key_end=end, query_offset=at))
    assert both(5, 2).shape == q.shape


@pytest.mark.parametrize("name", ["torch", "jax", "mlx"])
@pytest.mark.parametrize("value", INTEGERS.values(), ids=INTEGERS)
def test_the_adapters_take_the_same_integers(name, value):
    array_of, ints, attention = adapter(name)
    rng = np.random.default_rng(3)
    q, k = (array_of(rng.standard_normal((B, T, 1, 2), dtype=np.float32)) for T in (TQ, TK))
    want = attention(q, k, k, key_end=ints([2, 5]))
    np.testing.assert_array_equal(attention(q, k, k, key_end=value), want)


@pytest.mark.parametrize("value", [[2, 5], (2, 5), range(2, 6, 3), np.array([2, 5])], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_lists_stay_in_one_graph_of_torch(value):
    torch = need("torch")
    _, _, attention = adapter("torch")
    q, k = torch.randn(B, TQ, 1, 2), torch.randn(B, TK, 1, 2)

    def function(q, k):
        return attention(q, k, k, key_end=value)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), function(q, k), rtol=0, atol=0)


def test_the_single_kernels_ask_for_an_offset_too():
    q, k, rows = zeros(TQ), zeros(TK), np.zeros((B, 1, TQ), np.float32)
    p, o = np.zeros((B, 1, TQ, TK), np.float32), np.zeros_like(q)
    calls = {
        "attention_fwd_f32": (q, k, k, o, p, rows, rows.copy()),
        "attention_bwd_dq_f32": (q, k, k, p, q.copy(), rows, o),
        "attention_bwd_dkv_f32": (q, k, k, p, o, rows, k.copy(), k.copy()),
    }
    for name, arrays in calls.items():
        with pytest.raises(ValueError, match=r"^query_offset must be given with key_end"):
            getattr(forge.kernels, name)(*arrays, causal=True, key_end=[5, 7])
        getattr(forge.kernels, name)(*arrays, causal=True, key_end=[5, 7], query_offset=[2, 4])
