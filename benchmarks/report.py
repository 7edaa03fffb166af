"""The results as Markdown: one table a mode, and what the figures mean."""

from __future__ import annotations

from typing import Any

from benchmarks.runs import lead

Record = dict[str, Any]

READING = """\
GFLOP/s, counted over visible (query, key) pairs only, and the share of the FMA peak; medians over
rounds in which all peers took turns. The peak was measured in the same rounds with independent
fused multiply-adds on the same threads. `x` is the time of the fastest other peer over forge's:
above 1 forge is faster. Figures of different runs do not compare; those of one row do.
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


def _speed_table(records: list[Record], peers: list[str]) -> str:
    rows = []
    for record in records:
        cells = []
        for peer in peers:
            row = record["peers"].get(peer)
            cells.append(f"{row['gflops']:.1f}{_percent(row['peak_share'])}" if row else "")
        name = f"**{record['case']}** {record['label']}"
        rows.append([name, _number(record["peak_gflops"]), *cells, _ratio(record)])
    return _table(["case", "peak", *peers, "x"], rows)


def _decode_table(records: list[Record], peers: list[str]) -> str:
    rows = []
    for record in records:
        cells = []
        for peer in peers:
            row = record["peers"].get(peer)
            cells.append(
                f"{1e3 * row['seconds']:.3f} ms, {row['kv_gbs']:.1f}{_percent(row['read_share'])}"
                if row
                else ""
            )
        name = f"**{record['case']}** {record['label']}"
        rows.append([name, _number(record["read_gbs"]), *cells, _ratio(record)])
    return _table(["case", "read rate", *peers, "x"], rows)


def _present(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(peer for record in records for peer in record["peers"]))


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
                parts.append(f"## {title}\n\n{_speed_table(chosen, _present(chosen))}")
    decode = [record for record in records if record["kv_bytes"] is not None]
    if decode:
        parts.append(
            "## Decode: one query a head\n\n"
            + _decode_table(decode, _present(decode))
            + "\nTime of a call, GB/s of keys and values, and the share of the rate at which the"
            "\nsame threads read memory, measured in the same rounds.\n"
        )
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
        f"- peak measured with: {results['peak_target'] or 'nothing, no probe'}",
        f"- versions: {versions}; Python {machine['python']}",
        f"- rounds: {settings['rounds']}, turns of {1e3 * settings['turn_seconds']:.0f} ms",
        f"- others' load during the rounds that count: {others}",
    ]
    lines += [f"- **{caveat}**" for caveat in caveats(results)]
    return "\n".join(lines) + "\n"


def markdown(results: dict[str, Any], picture: str) -> str:
    """The whole report; `picture` is the file name of the picture beside it."""
    parts = [_head(results), READING, f"![Speed of each peer]({picture})\n"]
    parts += _sections(results["records"])
    if results["left_out"]:
        lines = [
            f"- {entry['peer']}{', ' + entry['case'] if entry['case'] else ''}: {entry['reason']}"
            for entry in results["left_out"]
        ]
        parts.append("## Left out\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)
