"""The picture: loss curve, one head's attention map over real text, times against NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from char_lm.comparison import LayerTimes

# Okabe and Ito's colours, told apart by colour-blind readers too.
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
VISIBLE = {" ": "\N{MIDDLE DOT}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"}


@dataclass(frozen=True)
class AttentionMap:
    """Probabilities of one head over a piece of text, p [len(text), len(text)]."""

    text: str
    p: np.ndarray
    label: str


@dataclass
class Results:
    """What there is to draw; a run that was cut short has only some of it."""

    train: list[float] = field(default_factory=list)  # one loss a step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    attention: AttentionMap | None = None
    times: list[LayerTimes] = field(default_factory=list)


def pick_head(layers: list[np.ndarray]) -> tuple[int, int]:
    """The (layer, head) that looks most firmly at single characters further back than three.

    layers: probabilities [H, T, T] of each layer.
    """
    T = layers[0].shape[-1]
    far = np.tri(T, k=-4, dtype=bool)
    scores = [np.where(far, p, 0).max(axis=-1).mean(axis=-1) for p in layers]
    n, h = np.unravel_index(np.argmax(scores), (len(layers), layers[0].shape[0]))
    return int(n), int(h)


def speed_in_words(times: list[LayerTimes]) -> str:
    """How forge compares with NumPy over all layers, either way round."""
    mine, numpys = (sum(sum(getattr(t, who)) for t in times) for who in ("forge", "numpy"))
    if mine <= numpys:
        return f"forge is {numpys / mine:.2f}x as fast as plain NumPy"
    return f"forge takes {mine / numpys:.2f}x the time of plain NumPy"


def smooth(values: list[float]) -> np.ndarray:
    """Centred moving average over about a twentieth of the run, narrower at the ends."""
    n = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    steps = np.arange(n)
    reach = np.minimum(n // 40, np.minimum(steps, n - 1 - steps))
    return (sums[steps + reach + 1] - sums[steps - reach]) / (2 * reach + 1)


def say_nothing_yet(ax: Axes, text: str) -> None:
    """An empty panel that says why it is empty."""
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, color=GREY)
    ax.set_xticks([])
    ax.set_yticks([])


def draw_loss(ax: Axes, results: Results, symbols: int) -> None:
    """Loss against steps: every step, smoothed, and the held-out points."""
    ax.set_title("Loss")
    if not results.train and not results.held_out:
        say_nothing_yet(ax, "training had not begun")
        return
    steps = np.arange(len(results.train))
    if len(steps):
        ax.plot(steps, results.train, color=BLUE, alpha=0.25, linewidth=0.8)
        ax.plot(steps, smooth(results.train), color=BLUE, linewidth=1.8, label="train, smoothed")
    if results.held_out:
        ax.plot(*zip(*results.held_out, strict=True), "o", color=ORANGE, markeredgecolor="black",
                markersize=6, label="held-out files")  # fmt: skip
    ax.axhline(np.log(symbols), color=GREY, linestyle=":", linewidth=1.2,
               label=f"uniform guess, ln {symbols}")  # fmt: skip
    ax.set_xlabel("step")
    ax.set_ylabel("nats per character")
    ax.set_ylim(bottom=min(1.0, *results.train, *(y for _, y in results.held_out)) - 0.1)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)


def draw_times(ax: Axes, times: list[LayerTimes]) -> None:
    """Forward and backward of each layer, forge beside NumPy."""
    ax.set_title("Attention of one training step")
    if not times:
        say_nothing_yet(ax, "not measured")
        return
    width = 0.36
    for side, (who, colour, name) in enumerate(
        [("forge", BLUE, "forge"), ("numpy", ORANGE, "plain NumPy")]
    ):
        at = np.arange(len(times)) + (side - 0.5) * (width + 0.04)
        forward, backward = np.array([getattr(t, who) for t in times]).T
        ax.bar(at, forward, width, color=colour, edgecolor="black", linewidth=0.6,
               label=f"{name}, forward")  # fmt: skip
        ax.bar(at, backward, width, bottom=forward, color=colour, alpha=0.45, edgecolor="black",
               linewidth=0.6, hatch="///", label=f"{name}, backward")  # fmt: skip
        for x, total in zip(at, forward + backward, strict=True):
            ax.annotate(f"{total:.1f}", (x, total), (0, 2), textcoords="offset points",
                        ha="center", va="bottom", fontsize=9)  # fmt: skip
    ax.set_xticks(range(len(times)), [t.label for t in times])
    ax.set_ylabel("milliseconds, median")
    ax.set_ylim(top=1.55 * max(sum(w) for t in times for w in (t.forge, t.numpy)))
    ax.legend(frameon=False, ncols=2, loc="upper center", fontsize=9)
    ax.set_title("Attention of one training step\n" + speed_in_words(times))


def draw_attention(fig: Figure, ax: Axes, attention: AttentionMap | None) -> None:
    """Which character (across) each character (down) looks at."""
    if attention is None:
        ax.set_title("Attention map")
        say_nothing_yet(ax, "the model had not been built")
        return
    n = len(attention.text)
    p = np.ma.masked_where(~np.tri(n, dtype=bool), attention.p)
    ax.set_facecolor("#e4e4e4")
    image = ax.imshow(p, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    characters = [VISIBLE.get(c, c) for c in attention.text]
    for axis, set_ticks in ((ax.xaxis, ax.set_xticks), (ax.yaxis, ax.set_yticks)):
        set_ticks(range(n), characters, family="DejaVu Sans Mono", fontsize=9)
        axis.set_tick_params(length=0, pad=2)
    ax.set_xlabel("key: the character looked at")
    ax.set_ylabel("query: the character that looks")
    ax.set_title(f"Attention of {attention.label}")
    bar = fig.colorbar(image, ax=ax, fraction=0.04, pad=0.02, ticks=[0, 0.05, 0.2, 0.5, 1])
    bar.set_label("probability (square-root colour scale)")


def save_picture(results: Results, symbols: int, path: Path) -> None:
    """Draws all there is into one PNG."""
    fig = Figure(figsize=(14, 7.4), dpi=120, layout="constrained")
    grid = fig.add_gridspec(2, 2, width_ratios=[1, 1.25])
    draw_loss(fig.add_subplot(grid[0, 0]), results, symbols)
    draw_times(fig.add_subplot(grid[1, 0]), results.times)
    draw_attention(fig, fig.add_subplot(grid[:, 1]), results.attention)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
