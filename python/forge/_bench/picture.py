"""The results as one picture: speed over sequence length, each peer a line, the FMA peak above.

Half precision has panels of its own, with forge's float32 beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from forge._bench.report import HALF, caveats, columns_of
from forge._bench.runs import peer_and_dtype

Record = dict[str, Any]

# Okabe and Ito's colours, which the colour-blind tell apart, and a marker each.
STYLES: dict[str, dict[str, Any]] = {
    "forge": {"color": "#D55E00", "marker": "o", "linewidth": 2.6, "zorder": 5},
    "torch": {"color": "#0072B2", "marker": "s"},
    "torch-bhtd": {"color": "#56B4E9", "marker": "D", "linestyle": "--"},
    "torch-flex": {"color": "#999999", "marker": "*"},
    "onnxruntime": {"color": "#009E73", "marker": "^"},
    "jax": {"color": "#CC79A7", "marker": "v"},
    "numpy": {"color": "#E69F00", "marker": "P"},
}
NAMES = {"torch-bhtd": "torch, own layout [B, H, T, hd]", "torch": "torch, forge's layout"}
# A colour is a peer, in half precision a line is a dtype.
LINES = {"float32": "-", "bfloat16": (0, (5, 1)), "float16": (0, (1, 1))}
FILLS = {"float32": 1.0, "bfloat16": 0.75, "float16": 0.45}
HALF_NAME = "half precision"
OTHER = {"color": "#666666", "marker": "x"}
LIMIT: dict[str, Any] = {"color": "black", "linewidth": 1.6, "linestyle": (0, (4, 2))}


class Panel(NamedTuple):
    """One place of the picture; ``draw`` is None where it is empty."""

    draw: Callable[[Axes, list[Record], list[str], str], None] | None
    title: str
    records: list[Record]
    columns: list[str]


def _style(name: str) -> dict[str, Any]:
    peer, dtype = peer_and_dtype(name)
    style = STYLES.get(peer, OTHER)
    return style if dtype == "float32" else {**style, "linestyle": LINES[dtype]}


def _length(record: Record) -> int:
    return int(record["shape"]["Tk"])


def _heads(shape: dict[str, Any]) -> str:
    return f"{shape['H']}" if shape["H"] == shape["Hkv"] else f"{shape['H']}/{shape['Hkv']}"


def _tick(record: Record) -> str:
    shape = record["shape"]
    batch = f"B {shape['B']}, " if shape["B"] > 1 else ""
    return f"{shape['Tk']}\n{batch}H {_heads(shape)}\nhd {shape['hd']}"


def _limits(ax: Axes, records: list[Record], key: str, half: float = 0.42) -> None:
    for x, record in enumerate(records):
        if record[key] is not None:
            ax.hlines(record[key], x - half, x + half, **LIMIT)


def _top(ax: Axes, records: list[Record], limit: str, value: str) -> None:
    values = [row[value] for record in records for row in record["peers"].values()]
    values += [record[limit] for record in records if record[limit] is not None]
    ax.set_ylim(0, 1.14 * max(values, default=1))
    ax.set_xlim(-0.6, len(records) - 0.4)


def _finish(ax: Axes, title: str, ylabel: str, ticks: list[str], xlabel: str) -> None:
    ax.set_title(title, fontsize=11, loc="left", fontweight="bold")
    ax.set_ylabel(ylabel)
    ax.set_xlabel(xlabel)
    ax.set_xticks(range(len(ticks)), ticks, fontsize=8)
    ax.grid(axis="y", color="#dddddd", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _lines(ax: Axes, records: list[Record], peers: list[str], title: str) -> None:
    """Speed over T; a number at each of forge's points is its share of the peak, in per cent."""
    _limits(ax, records, "peak_gflops")
    for peer in peers:
        points = [
            (x, record["peers"][peer]["gflops"])
            for x, record in enumerate(records)
            if peer in record["peers"]
        ]
        if points:
            style = {"linewidth": 1.5, "markersize": 6, **_style(peer)}
            ax.plot(*zip(*points, strict=True), **style)
    for x, record in enumerate(records):
        row = record["peers"].get(peers[0])
        if row and peer_and_dtype(peers[0])[0] == "forge" and row["peak_share"] is not None:
            ax.annotate(
                f"{100 * row['peak_share']:.0f} %",
                (x, row["gflops"]),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=STYLES["forge"]["color"],
                zorder=6,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
    _top(ax, records, "peak_gflops", "gflops")
    ticks = [_tick(record) for record in records]
    _finish(ax, title, "GFLOP/s (visible pairs)", ticks, "T; heads (query/key-value); head dim")


def _bars(
    ax: Axes, records: list[Record], peers: list[str], value: str, limit: str, share: str
) -> None:
    shown = [peer for peer in peers if any(peer in record["peers"] for record in records)]
    width = 0.8 / max(len(shown), 1)
    for at, peer in enumerate(shown):
        for x, record in enumerate(records):
            row = record["peers"].get(peer)
            if row is None:
                continue
            left = x - 0.4 + (at + 0.5) * width
            fill = {"color": _style(peer)["color"], "alpha": FILLS[peer_and_dtype(peer)[1]]}
            ax.bar(left, row[value], 0.92 * width, **fill)
            if row[share] is not None:
                text = f" {100 * row[share]:.0f} %"
                turn = 90 if len(records) > 2 else 0  # so that narrow bars' labels stay apart
                ax.text(left, row[value], text, ha="center", va="bottom", fontsize=7, rotation=turn)
    _limits(ax, records, limit)
    _top(ax, records, limit, value)


def _feature_panel(ax: Axes, records: list[Record], peers: list[str], title: str) -> None:
    ticks = []
    for record in records:
        shape = record["shape"]
        what = f"window {shape['window']}" if shape["window"] else f"softcap {shape['softcap']:g}"
        ticks.append(f"{what}\n{record['mode']}")
    _bars(ax, records, peers, "gflops", "peak_gflops", "peak_share")
    lengths = ", ".join(str(length) for length in sorted({_length(record) for record in records}))
    _finish(ax, f"{title}, T {lengths}", "GFLOP/s (visible pairs)", ticks, "")


def _decode_panel(ax: Axes, records: list[Record], peers: list[str], title: str) -> None:
    ticks = []
    for record in records:
        shape = record["shape"]
        ticks.append(f"{shape['Tk']} keys\nH {_heads(shape)}, hd {shape['hd']}")
    _bars(ax, records, peers, "kv_gbs", "read_gbs", "read_share")
    _finish(ax, title, "GB/s of keys and values", ticks, "")


def _panels(records: list[Record]) -> list[Panel]:
    """All panels, in reading order, two a row."""
    single, half = columns_of(records, "float32"), [c for x in HALF for c in columns_of(records, x)]
    rows = _speed_rows(records, single, "")
    last = []
    features = [r for r in records if r["shape"]["window"] or r["shape"]["softcap"]]
    features.sort(key=lambda r: (r["shape"]["softcap"] or 0, r["mode"] == "backward"))
    decode = [r for r in records if r["kv_bytes"]]
    if features and single:
        last.append(Panel(_feature_panel, "Window and softcap, causal", features, single))
    if decode and single:
        last.append(Panel(_decode_panel, "Decode, one query a head", decode, single))
    if half:
        beside = [name for name in single if name == "forge"] + half
        rows += _speed_rows(records, beside, f", {HALF_NAME}")
        if decode:
            title = f"Decode, one query a head, {HALF_NAME}"
            last.append(Panel(_decode_panel, title, decode, beside))
    return rows + last + [Panel(None, "", [], [])] * (len(last) % 2)


def _speed_rows(records: list[Record], columns: list[str], suffix: str) -> list[Panel]:
    """A row causal, a row full: forward and backward."""
    plain = [
        record
        for record in records
        if not (record["kv_bytes"] or record["shape"]["window"] or record["shape"]["softcap"])
    ]
    panels = []
    for causal in (True, False):
        for mode in ("forward", "backward"):
            chosen = [r for r in plain if r["mode"] == mode and r["causal"] == causal]
            chosen.sort(key=lambda r: (_length(r), r["shape"]["hd"], r["shape"]["B"]))
            title = f"{mode.capitalize()}, {'causal' if causal else 'full'}{suffix}"
            panels.append(Panel(_lines if chosen else None, title, chosen, columns))
        if not (panels[-1].records or panels[-2].records):
            del panels[-2:]
    return panels if columns else []


def _legend(figure: plt.Figure, columns: list[str], results: dict[str, Any]) -> None:
    handles = []
    for peer in dict.fromkeys(peer_and_dtype(name)[0] for name in columns):
        style = {"linewidth": 1.5, **_style(peer)}
        style.pop("zorder", None)
        handles.append(plt.Line2D([], [], label=NAMES.get(peer, peer), **style))
    for dtype in dict.fromkeys(peer_and_dtype(name)[1] for name in columns):
        if dtype in HALF:
            label = f"{dtype} ({'paler' if dtype == 'bfloat16' else 'palest'} bars)"
            handles.append(
                plt.Line2D([], [], label=label, color=OTHER["color"], linestyle=LINES[dtype])
            )
    target = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON"}.get(results["peak_target"], "")
    if any(record["peak_gflops"] is not None for record in results["records"]):
        label = f"limit: FMA peak{f' ({target})' if target else ''}"
        if any(record["kv_bytes"] for record in results["records"]):
            label += ", memory read rate"
        handles.append(plt.Line2D([], [], label=label, **LIMIT))
    shown = min(4, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=shown, frameon=False)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    panels = _panels(results["records"])
    rows = max(1, len(panels) // 2)
    figure, axes = plt.subplots(
        rows, 2, figsize=(12, 3.9 * rows + 0.9), squeeze=False, layout="constrained"
    )
    for ax, panel in zip(axes.flat, panels, strict=True):
        if panel.draw is None:
            ax.set_axis_off()
        else:
            panel.draw(ax, panel.records, panel.columns, panel.title)
    columns = list(dict.fromkeys(name for panel in panels for name in panel.columns))
    machine, threads = results["machine"], results["settings"]["threads"]
    figure.suptitle(
        f"Attention on {threads} CPU thread{'s' if threads > 1 else ''} of {machine['cpu']}"
        f", {results['date']}: higher is better"
        + ("; labels are shares of the limit" if results["peak_target"] else "")
        + "".join(f"\n{caveat}" for caveat in caveats(results)),
        fontsize=12,
    )
    _legend(figure, columns, results)
    figure.savefig(path, dpi=110)
    plt.close(figure)
