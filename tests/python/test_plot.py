"""What a drawn attention map shows: panels, numbers, labels, masks and groups of heads."""

import importlib.util
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import forge
import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason="forge.plot draws with matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "attention_map.py"
WORDS = ("the", "quick", "brown", "fox", "costs", "$5", "or", "$6")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def forward(rng, B=2, Tq=8, Tk=8, H=4, Hkv=2, kernel="materialized", **options):
    q = rng.standard_normal((B, Tq, H, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, B, Tk, Hkv, 16), dtype=np.float32)
    return forge.attention_forward(q, k, v, kernel=kernel, backend="cpu", **options)[1]


def panels(figure):
    """The panels by head, as they are titled."""
    found = {}
    for axes in figure.axes:
        words = axes.get_title().split()
        if words[:1] == ["head"]:
            found[int(words[1])] = axes
    return found


def bands(figure):
    """The heads in each titled band of the figure."""
    return {
        band.get_suptitle(): sorted(panels(band))
        for band in figure.subfigs[0].subfigs
        if band.get_suptitle()
    }


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def legend(figure):
    return [text.get_text() for box in figure.subfigs[1].legends for text in box.get_texts()]


def colour_of(axes, i, j):
    """What is painted in the cell of query i and key j."""
    axes.figure.canvas.draw()
    pixels = np.asarray(axes.figure.canvas.buffer_rgba())
    x, y = axes.transData.transform((j, i))
    return tuple(pixels[pixels.shape[0] - 1 - round(y), round(x)][:3] / 255)


def test_there_is_a_panel_for_each_head_and_it_shows_its_probabilities(rng):
    saved = forward(rng, causal=True)
    shown = panels(forge.plot.attention_map(saved, batch=1))
    assert sorted(shown) == [0, 1, 2, 3]
    for head, axes in shown.items():
        [image] = axes.images
        np.testing.assert_array_equal(image.get_array().data, saved.probs[1, head])


def test_all_panels_and_the_colour_bar_share_one_scale(rng):
    figure = forge.plot.attention_map(forward(rng))
    [norm] = {image.norm for axes in panels(figure).values() for image in axes.images}
    assert (norm.vmin, norm.vmax) == (0, 1)
    assert "probability" in [axes.get_ylabel() for axes in figure.axes]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (2, 1)},
        {"causal": True, "window": 3},
        {"key_start": np.array([0, 2]), "key_end": np.array([8, 7])},
        {"causal": True, "query_offset": 2},
        {"causal": True, "query_offset": -3},
        {"causal": True, "window": 2**62, "query_offset": 2**62},
    ],
    ids=str,
)
def test_masked_cells_are_those_that_the_kernel_skips(rng, options):
    saved = forward(rng, **options)
    for axes in panels(forge.plot.attention_map(saved, batch=1)).values():
        masked = np.ma.getmaskarray(axes.images[0].get_array())
        np.testing.assert_array_equal(masked, saved.probs[1, 0] == 0)  # random p is never 0


def test_a_masked_cell_does_not_look_like_a_probability_of_zero():
    q = np.zeros((1, 3, 1, 1), np.float32)
    k = np.array([0, -1, 0], np.float32).reshape(1, 3, 1, 1)
    q[:] = 1000  # the second key gets exactly 0
    _, saved = forge.attention_forward(q, k, k, causal=True, kernel="materialized", backend="cpu")
    assert saved.probs[0, 0, 2, 1] == 0
    figure = forge.plot.attention_map(saved)
    axes = panels(figure)[0]
    zero, masked, half = (colour_of(axes, i, j) for i, j in ((2, 1), (0, 2), (2, 0)))
    assert min(zero) > 0.95
    assert max(abs(a - b) for a, b in zip(masked, (0.82, 0.82, 0.82), strict=True)) < 0.01
    assert max(half) - min(half) > 0.2
    assert legend(figure) == ["masked"]


def test_nothing_masked_needs_no_legend(rng):
    assert legend(forge.plot.attention_map(forward(rng))) == []


def test_nan_is_red_and_named():
    q = np.ones((1, 2, 1, 1), np.float32)
    k = np.array([1, np.nan], np.float32).reshape(1, 2, 1, 1)
    _, saved = forge.attention_forward(q, k, q, causal=True, kernel="materialized", backend="cpu")
    figure = forge.plot.attention_map(saved)
    red, green, blue = colour_of(panels(figure)[0], 1, 0)
    assert red > 0.8
    assert max(green, blue) < 0.3
    assert legend(figure) == ["masked", "NaN"]


def test_heads_that_share_a_key_value_head_stand_in_one_band(rng):
    figure = forge.plot.attention_map(forward(rng, H=6, Hkv=2))
    assert bands(figure) == {"key/value head 0": [0, 1, 2], "key/value head 1": [3, 4, 5]}
    shades = {band.get_facecolor() for band in figure.subfigs[0].subfigs}
    assert len(shades) == 2


def test_chosen_heads_keep_their_groups(rng):
    figure = forge.plot.attention_map(forward(rng, H=6, Hkv=3), heads=[5, 1, 4])
    assert bands(figure) == {"key/value head 0": [1], "key/value head 2": [4, 5]}


def test_without_groups_there_is_no_band(rng):
    figure = forge.plot.attention_map(forward(rng, H=4, Hkv=4), heads=np.array([2, 0]))
    assert bands(figure) == {}
    assert sorted(panels(figure)) == [0, 2]


def test_tokens_label_keys_and_queries(rng):
    shown = panels(forge.plot.attention_map(forward(rng, causal=True), tokens=WORDS))
    assert labels(shown[0].xaxis) == list(WORDS)
    assert labels(shown[0].yaxis) == list(WORDS)
    assert not any(label.get_parse_math() for label in shown[0].get_xticklabels())


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(None, ["$5", "or", "$6"]), (0, ["the", "quick", "brown"]), (-1, ["-1", "the", "quick"])],
)
def test_a_query_is_labelled_by_the_key_at_its_position(rng, offset, expected):
    saved = forward(rng, Tq=3, causal=True, query_offset=offset)
    shown = panels(forge.plot.attention_map(saved, tokens=WORDS))
    assert labels(shown[0].yaxis) == expected


def test_queries_of_another_text_have_their_own_labels(rng):
    figure = forge.plot.attention_map(forward(rng, Tq=3), tokens=WORDS, query_tokens="a\n ")
    assert labels(panels(figure)[0].yaxis) == ["a", "\\n", "\u2423"]
    assert labels(panels(figure)[0].xaxis) == list(WORDS)


def test_many_labels_are_thinned_out_and_stay_at_their_cells(rng):
    names = [f"t{i}" for i in range(200)]
    axes = panels(forge.plot.attention_map(forward(rng, Tq=200, Tk=200), tokens=names))[0]
    written = labels(axes.xaxis)
    assert 20 <= len(written) <= 40
    assert written == [f"t{round(x)}" for x in axes.get_xticks()]


def test_labels_do_not_overlap(rng):
    figure = forge.plot.attention_map(forward(rng, causal=True), tokens=WORDS)
    figure.canvas.draw()
    for axes in panels(figure).values():
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [label.get_window_extent() for label in axis.get_ticklabels()
                     if label.get_visible()]  # fmt: skip
            assert not any(a.overlaps(b) for a, b in pairwise(boxes))


@pytest.mark.parametrize(("Tq", "Tk", "H", "Hkv"), [(1, 64, 8, 2), (300, 300, 2, 1), (3, 5, 20, 1)])
def test_any_shape_can_be_drawn(rng, Tq, Tk, H, Hkv, tmp_path):
    saved = forward(rng, Tq=Tq, Tk=Tk, H=H, Hkv=Hkv, causal=True)
    figure = forge.plot.attention_map(saved)
    figure.savefig(tmp_path / "map.png")
    assert max(figure.get_size_inches()) < 40
    for axes in panels(figure).values():
        assert axes.bbox.width > 20
        assert axes.bbox.height > 5


def test_three_dimensional_inputs_and_float64(rng):
    q, k, v = rng.standard_normal((3, 1, 5, 6))
    saved = forge.attention_forward(
        q, k, v, num_heads=3, num_kv_heads=3, kernel="materialized", backend="cpu"
    )[1]
    assert sorted(panels(forge.plot.attention_map(saved))) == [0, 1, 2]


def test_a_fused_forward_says_what_to_use_instead(rng):
    with pytest.raises(
        ValueError, match=r"saved must .*kernel='materialized'.* got kernel='fused'"
    ):
        forge.plot.attention_map(forward(rng, kernel="fused"))


def test_a_forward_in_half_precision_says_what_to_convert(rng):
    q = rng.standard_normal((1, 5, 2, 4)).astype(np.float16)
    saved = forge.attention_forward(q, q, q, backend="cpu")[1]
    with pytest.raises(
        ValueError, match=r"got kernel='fused' of float16, .* pass x\.astype\(np\.float32\)$"
    ):
        forge.plot.attention_map(saved)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch": 2}, ValueError, r"batch must be within \[0, 1\], got 2"),
        ({"batch": -1}, ValueError, r"batch must be within \[0, 1\], got -1"),
        ({"batch": 0.5}, TypeError, "batch must be an int, got float"),
        ({"heads": [0, 4]}, ValueError, r"heads must be within \[0, 3\], got 4"),
        ({"heads": []}, ValueError, r"heads must name at least one head, each once, got \[\]"),
        ({"heads": [1, 1]}, ValueError, r"heads must name .* each once, got \[1, 1\]"),
        ({"heads": 1}, TypeError, "heads must be a sequence of ints, got int"),
        ({"heads": "01"}, TypeError, "heads must be a sequence of ints, got str"),
        ({"tokens": ["a"] * 7}, ValueError, "tokens must label each of the 8 keys, got 7 labels"),
        ({"tokens": range(8)}, TypeError, "tokens must hold strings, got int"),
        ({"tokens": 8}, TypeError, "tokens must be a sequence of strings, got int"),
        (
            {"query_tokens": "ab"},
            ValueError,
            "query_tokens must label each of the 8 queries, got 2",
        ),
    ],
)
def test_wrong_arguments_are_named(rng, arguments, error, message):
    with pytest.raises(error, match=message):
        forge.plot.attention_map(forward(rng), **arguments)
    assert plt.get_fignums() == []


def test_something_that_is_not_saved_is_refused():
    with pytest.raises(TypeError, match="saved must come from attention_forward, got ndarray"):
        forge.plot.attention_map(np.zeros(3))


def test_nothing_to_draw_is_an_error(rng):
    with pytest.raises(
        ValueError, match="saved must hold at least one query and one key, got Tq=0"
    ):
        forge.plot.attention_map(forward(rng, Tq=0))


def test_forge_does_without_matplotlib_until_something_is_drawn():
    program = """
import sys
import numpy as np
import forge
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
x = np.zeros((1, 2, 1, 4), np.float32)
saved = forge.attention_forward(x, x, x, kernel="materialized")[1]
try:
    forge.plot.attention_map(saved)
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "pip install matplotlib" in done.stdout


def test_the_example_draws_heads_that_do_what_they_are_made_for():
    spec = importlib.util.spec_from_file_location("attention_map_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    q, k, v = example.inputs()
    _, saved = forge.attention_forward(
        q, k, v, causal=True, scale=1.0, kernel="materialized", backend="cpu"
    )
    p = saved.probs[0]
    i = np.arange(1, len(example.SENTENCE))
    assert (p[1, i].argmax(-1) == i - 1).all()
    assert set(p[4, 11].argsort()[-4:]) == {0, 4, 7, 11}  # the four times "the"
