"""The results as Markdown: one table a mode, and what the figures mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge._bench.runs import column, lead, peer_and_dtype
from forge._check.halves import DTYPES

Record = dict[str, Any]

HALF = DTYPES[1:]
READING = """\
Each peer's answers were held against float64 first. GFLOP/s, counted over visible (query, key)
pairs only; medians over rounds in which all peers took turns. `x` is the time of the fastest other
peer of the same dtype over forge's: above 1 forge is faster. `of float32` is forge's time over its
time in float32. Figures of different runs do not compare; those of one row do.
"""
DECODE = """
Time of a call, GB/s of keys and values; in brackets, where it was measured, the share of the rate
at which the same threads read memory in the same rounds.
"""
PEAK = """
In brackets the share of the FMA peak, which was measured in the same rounds with independent fused
multiply-adds on the same threads.
"""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(share: float | None) -> str:
    return "" if share is None else f" ({100 * share:.0f} %)"


def _ratio(record: Record) -> str:
    ratio = lead(record)
    return "" if ratio is None else f"{ratio:.2f}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"


def _speed(row: Record) -> str:
    return f"{row['gflops']:.1f}{_percent(row['peak_share'])}"


def _decode(row: Record) -> str:
    return f"{1e3 * row['seconds']:.3f} ms, {row['kv_gbs']:.1f}{_percent(row['read_share'])}"


def _case_table(
    records: list[Record], limit: str, limit_title: str, cell: Callable[[Record], str]
) -> str:
    """A row a case: the limit, where it was measured, and each peer in float32."""
    peers = columns_of(records, "float32")
    known = any(record[limit] is not None for record in records)
    rows = []
    for record in records:
        row = [f"**{record['case']}** {record['label']}"]
        row += [_number(record[limit])] if known else []
        row += [cell(record["peers"][peer]) if peer in record["peers"] else "" for peer in peers]
        rows.append([*row, _ratio(record)])
    return _table(["case", *([limit_title] if known else []), *peers, "x"], rows)


def columns_of(records: list[Record], dtype: str) -> list[str]:
    """The columns of a dtype that were measured, in the order of the run."""
    found = dict.fromkeys(name for record in records for name in record["peers"])
    return [name for name in found if peer_and_dtype(name)[1] == dtype]


def _half_table(records: list[Record], cell: Callable[[Record], str]) -> str:
    """A row a case: of each half type the peers, forge's lead, and its time over float32's."""
    header, rows = ["case"], [[f"**{record['case']}** {record['label']}"] for record in records]
    for dtype in HALF:
        columns = columns_of(records, dtype)
        if not columns:
            continue
        header += [*columns, "x", "of float32"]
        for row, record in zip(rows, records, strict=True):
            peers = record["peers"]
            row += [cell(peers[name]) if name in peers else "" for name in columns]
            ratio, share = lead(record, dtype), of_float32(record, dtype)
            row += ["" if value is None else f"{value:.2f}" for value in (ratio, share)]
    return _table(header, rows) if len(header) > 1 else ""


def of_float32(record: Record, dtype: str) -> float | None:
    """Forge's time in that dtype over its time in float32."""
    own, single = (record["peers"].get(column("forge", x)) for x in (dtype, "float32"))
    return own["seconds"] / single["seconds"] if own and single else None


def _tables(
    records: list[Record], title: str, limit: tuple[str, str], cell: Callable[[Record], str]
) -> list[str]:
    """Float32, then half precision, under a title each."""
    tables = {
        title: _case_table(records, *limit, cell) if columns_of(records, "float32") else "",
        f"{title}, half precision": _half_table(records, cell),
    }
    return [f"## {name}\n\n{table}" for name, table in tables.items() if table]


def _sections(records: list[Record]) -> list[str]:
    parts = []
    for mode in ("forward", "backward"):
        for causal in (True, False):
            chosen = [
                record
                for record in records
                if record["mode"] == mode
                and record["causal"] == causal
                and record["kv_bytes"] is None
            ]
            if chosen:
                title = f"{mode.capitalize()}, {'causal' if causal else 'full'}"
                parts += _tables(chosen, title, ("peak_gflops", "peak"), _speed)
    decode = [record for record in records if record["kv_bytes"] is not None]
    if decode:
        title = "Decode: one query a head"
        parts += [*_tables(decode, title, ("read_gbs", "read rate"), _decode), DECODE.lstrip()]
    return parts


def foreign_cpus(results: dict[str, Any]) -> float | None:
    """The CPUs that others used, at worst over the cases."""
    loads = [record["foreign_cpus"] for record in results["records"]]
    return max((load for load in loads if load is not None), default=None)


def caveats(results: dict[str, Any]) -> list[str]:
    """Why the figures should not be quoted; nothing if they may be."""
    found = []
    load, most = foreign_cpus(results), results["settings"]["most_foreign_cpus"]
    if load is not None and load > most:
        found.append(f"the machine was not quiet: others used up to {load:.1f} CPUs")
    if results["settings"]["quick"]:
        found.append("a quick run: short turns, few rounds")
    if results.get("interrupted"):
        found.append("interrupted: some cases are missing")
    return found


def _head(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    load = foreign_cpus(results)
    others = "unknown" if load is None else f"{load:.2f} CPUs at most (medians of the cases)"
    lines = [
        f"# Attention on {settings['threads']} CPU threads, {results['date']}",
        "",
        f"- machine: {machine['cpu']}, {machine['usable_cpus']} usable CPUs, {machine['system']}",
        *([f"- peak measured with: {results['peak_target']}"] if results["peak_target"] else []),
        f"- versions: {versions}; Python {machine['python']}",
        f"- rounds: {settings['rounds']}, turns of {1e3 * settings['turn_seconds']:.0f} ms",
        f"- others' load during the rounds that count: {others}",
    ]
    lines += [f"- **{caveat}**" for caveat in caveats(results)]
    return "\n".join(lines) + "\n"


def markdown(results: dict[str, Any], picture: str | None = None) -> str:
    """The whole report; `picture` is the file name of the picture beside it."""
    parts = [_head(results), READING + (PEAK if results["peak_target"] else "")]
    if picture:
        parts.append(f"![Speed of each peer]({picture})\n")
    parts += _sections(results["records"])
    if results["left_out"]:
        lines = [
            f"- {entry['peer']}{', ' + entry['case'] if entry['case'] else ''}: {entry['reason']}"
            for entry in results["left_out"]
        ]
        parts.append("## Left out\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)
