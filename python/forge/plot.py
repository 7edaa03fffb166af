"""Pictures of attention. Needs matplotlib: ``pip install matplotlib``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forge._arrays import Array, as_int
from forge._check.plain import visible
from forge._saved import Saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["attention_map"]

_MASKED = "0.82"
_BROKEN = "crimson"
_GROUP_SHADES = ("#f3f0e8", "#e6edf3")
_MOST_COLUMNS = 8
_MOST_LABELS = 40  # an axis; of more, every second, third, ... is written
_LABEL_SIZE = 8  # points
_WHITE_SPACE = {"\n": "\\n", "\t": "\\t", "\r": "\\r", " ": "\u2423"}

Labels = Sequence[str] | None


def attention_map(
    saved: Saved,
    *,
    batch: int = 0,
    heads: Sequence[int] | None = None,
    tokens: Labels = None,
    query_tokens: Labels = None,
) -> Figure:
    """Draw which keys (across) the queries (down) of one sequence look at, a panel a head.

    All panels share one colour scale, the square root of the probability from 0 to 1, so that
    pictures can be compared. Probability 0 is white, a masked key is grey, NaN is red. Query heads
    that share a key/value head stand in one shaded band named after it.

    Args:
        saved: from :func:`forge.attention_forward` with ``kernel="materialized"``, so of float32
            or float64 arrays: half precision has no such forward; pass ``x.astype(np.float32)``.
        batch: which sequence.
        heads: which query heads; all by default.
        tokens: a label for each of the ``Tk`` keys. A string is a label a character.
        query_tokens: a label for each of the ``Tq`` queries. By default the label of the key at
            whose position a query stands (``query_offset``).

    Returns:
        A pyplot figure; ``plt.show()`` shows it, ``plt.close(figure)`` lets it go.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: wrong types.
        ValueError: saved has no ``p``; a batch or head that is not there; a wrong number of labels.
    """
    if not isinstance(saved, Saved):
        raise TypeError(f"saved must come from attention_forward, got {type(saved).__name__}")
    if saved.kernel != "materialized":
        element = saved._call.kv_element
        half = f" of {element.name}, which it does not take: pass x.astype(np.float32)"
        raise ValueError(
            "saved must come from a forward with kernel='materialized', which keeps p, "
            f"got kernel={saved.kernel!r}{half if element.is_half else ''}"
        )
    sizes = saved._call.sizes
    if not sizes.Tq or not sizes.Tk:
        raise ValueError(
            f"saved must hold at least one query and one key, got Tq={sizes.Tq} and Tk={sizes.Tk}"
        )
    b = _index("batch", batch, sizes.B)
    shown = _shown_heads(heads, sizes.H)
    keys = _labels("tokens", tokens, sizes.Tk, "keys")
    queries = _labels("query_tokens", query_tokens, sizes.Tq, "queries")
    if queries is None and keys is not None:
        queries = _labels_at(keys, _offset(saved, b), sizes.Tq)
    groups: dict[int, list[int]] = {}
    for head in shown:
        groups.setdefault(head * sizes.Hkv // sizes.H, []).append(head)
    panels = _Panels(saved.probs[b], _seen(saved, b), keys, queries)
    if sizes.Hkv == sizes.H:
        return panels.draw([("", shown)])
    return panels.draw([(f"key/value head {g}", groups[g]) for g in sorted(groups)])


def _index(name: str, value: object, count: int) -> int:
    index = as_int(name, value)
    if not 0 <= index < count:
        raise ValueError(f"{name} must be within [0, {count - 1}], got {index}")
    return index


def _shown_heads(heads: object, H: int) -> list[int]:
    if heads is None:
        return list(range(H))
    if not isinstance(heads, (Sequence, np.ndarray)) or isinstance(heads, str):
        raise TypeError(f"heads must be a sequence of ints, got {type(heads).__name__}")
    shown = [_index("heads", head, H) for head in heads]
    if not shown or len(set(shown)) < len(shown):
        raise ValueError(f"heads must name at least one head, each once, got {shown}")
    return shown


def _labels(name: str, labels: object, count: int, of: str) -> list[str] | None:
    if labels is None:
        return None
    if not isinstance(labels, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a sequence of strings, got {type(labels).__name__}")
    if len(labels) != count:
        raise ValueError(f"{name} must label each of the {count} {of}, got {len(labels)} labels")
    for label in labels:
        if not isinstance(label, str):
            raise TypeError(f"{name} must hold strings, got {type(label).__name__}")
    return ["".join(_WHITE_SPACE.get(letter, letter) for letter in label) for label in labels]


def _offset(saved: Saved, b: int) -> int:
    """Return the key position of query 0 of a sequence."""
    sizes, ranges = saved._call.sizes, saved._call.options["ranges"]
    return sizes.Tk - sizes.Tq if ranges is None else int(ranges[b, 0])


def _labels_at(keys: list[str], offset: int, Tq: int) -> list[str]:
    positions = range(offset, offset + Tq)
    return [keys[pos] if 0 <= pos < len(keys) else str(pos) for pos in positions]


def _seen(saved: Saved, b: int) -> Array:
    """Return which keys each query of a sequence sees, ``[Tq, Tk]``."""
    sizes, options = saved._call.sizes, saved._call.options
    asked = {"causal": options["causal"], "window": options["window"]}
    if options["ranges"] is not None:
        names = ("query_offset", "key_start", "key_end")
        asked |= zip(names, options["ranges"][b].tolist(), strict=True)
    return np.asarray(visible(1, sizes.Tq, sizes.Tk, asked)[0])


class _Panels:
    """The panels of one sequence: ``p`` is ``[H, Tq, Tk]``, ``seen`` ``[Tq, Tk]``."""

    def __init__(self, p: Array, seen: Array, keys: list[str] | None, queries: list[str] | None):
        try:
            from matplotlib.colors import PowerNorm
        except ImportError as error:
            raise ImportError(
                "forge.plot needs matplotlib: pip install matplotlib, or pip install '.[plot]' in "
                "a checkout of forge"
            ) from error
        self.p, self.seen = p, seen
        self.keys, self.queries = keys, queries
        self.norm: Any = PowerNorm(0.5, 0, 1)
        self.image: Any = None
        self.broken = False

    def draw(self, groups: list[tuple[str, list[int]]]) -> Figure:
        """Draw the bands one below the other, and the colour scale beside them."""
        from matplotlib import pyplot as plt

        most = max(len(heads) for _, heads in groups)
        columns = min(most, _MOST_COLUMNS)
        if not groups[0][0]:  # no bands: nearly square
            columns = min(columns, int(np.ceil(np.sqrt(most))))
        rows = [-(-len(heads) // columns) for _, heads in groups]
        width, height = self._panel_size(columns)
        titles = 0.35 * sum(bool(name) for name, _ in groups)
        figure: Figure = plt.figure(
            figsize=(columns * width + 1.3, max(2.6, sum(rows) * height + titles + 0.3)),
            layout="constrained",
        )
        halves: Any = figure.subfigures(1, 2, width_ratios=[columns * width, 1.3])
        left, right = halves
        heights = zip(rows, groups, strict=True)
        ratios = [height * n + (0.35 if name else 0) for n, (name, _) in heights]
        bands = left.subfigures(len(groups), 1, height_ratios=ratios, squeeze=False)[:, 0]
        for at, (band, n, (name, heads)) in enumerate(zip(bands, rows, groups, strict=True)):
            if name:
                band.set_facecolor(_GROUP_SHADES[at % 2])
                band.suptitle(name, fontsize=11, fontweight="bold")
            self._band(band, n, columns, heads)
        self._scale(right)
        return figure

    def _panel_size(self, columns: int) -> tuple[float, float]:
        """Inches of one panel with its labels: larger where there are more cells to tell apart."""
        Tq, Tk = self.seen.shape
        across = float(np.clip(0.16 * Tk, 1.6, min(6.4, 18 / columns)))
        down = float(np.clip(across * Tq / Tk, 0.5, 2 * across))
        letter = _LABEL_SIZE / 72 * 0.65
        return (
            across + 0.35 + letter * max(map(len, self.queries or ["999"])),
            down + 0.6 + letter * (max(map(len, self.keys)) if self.keys else 1),
        )

    def _band(self, band: SubFigure, rows: int, columns: int, heads: list[int]) -> None:
        grid = band.add_gridspec(rows, columns)
        for at, head in enumerate(heads):
            row, column = divmod(at, columns)
            panel = band.add_subplot(grid[row, column])
            self._panel(panel, head)
            lowest = at + columns >= len(heads)
            panel.tick_params(labelleft=column == 0, labelbottom=lowest)
        band.supxlabel("key", fontsize=9)
        band.supylabel("query", fontsize=9)

    def _panel(self, panel: Axes, head: int) -> None:
        p = self.p[head]
        panel.set_title(f"head {head}", fontsize=10)
        panel.set_facecolor(_MASKED)  # shows where the image has no colour
        self.image = panel.imshow(
            np.ma.masked_array(p, ~self.seen),
            cmap="Blues",
            norm=self.norm,
            interpolation="nearest",
            aspect="equal" if self.p.shape[1] * 8 > self.p.shape[2] else "auto",
        )
        nan = np.isnan(p) & self.seen
        if nan.any():
            self.broken = True
            panel.imshow(
                np.ma.masked_array(np.ones_like(p), ~nan),
                cmap=_one_colour(_BROKEN),
                interpolation="nearest",
                aspect=panel.get_aspect(),
            )
        Tq, Tk = self.seen.shape
        _write(panel.xaxis, self.keys, Tk, rotation=90)
        _write(panel.yaxis, self.queries, Tq, rotation=0)

    def _scale(self, side: SubFigure) -> None:
        """Draw the colour scale, and what the colours beside it mean."""
        from matplotlib.patches import Patch

        colours = side.add_subplot()
        bar = side.colorbar(self.image, cax=colours, ticks=[0, 0.01, 0.05, 0.2, 0.5, 1])
        bar.set_label("probability")
        patches = []
        if not self.seen.all():
            patches.append(Patch(facecolor=_MASKED, edgecolor="0.5", label="masked"))
        if self.broken:
            patches.append(Patch(facecolor=_BROKEN, label="NaN"))
        if patches:
            side.legend(handles=patches, loc="outside lower center", frameon=False, fontsize=9)


def _one_colour(name: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([name])


def _write(axis: Any, labels: list[str] | None, cells: int, rotation: int) -> None:
    """Write labels at the cells of an axis, or numbers where there are none."""
    from matplotlib.ticker import MaxNLocator

    axis.set_tick_params(length=2, labelsize=_LABEL_SIZE)
    if labels is None and cells > 1:
        axis.set_major_locator(MaxNLocator(nbins=min(8, cells), integer=True))
        return
    labels = labels or ["0"]
    step = -(-len(labels) // _MOST_LABELS)
    axis.set_ticks(
        range(0, len(labels), step),
        labels[::step],
        rotation=rotation,
        family="monospace",
        parse_math=False,  # a dollar sign is a token, not a formula
    )
