"""What ``python -m forge check`` prints: a summary, or each check, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from forge._check.run import SECTIONS, SINGLE, Outcome, Report

NOTHING = "-"
NO_OPTION = "no option"
_SHOWN_FAULTS = 3
_LONGEST_LINE = 200


def pairs(values: dict[str, Any]) -> str:
    """Return names and values in words; no value is said to be none."""
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items())


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return f"({pairs(value)})" if value else "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value) or "none"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(header), rule, *cells])


def _faults(outcome: Outcome) -> str:
    failed = [name for name, (error, bound) in outcome.errors.items() if not error <= bound]
    faults = [f"{name} beyond its bound" for name in failed]
    if outcome.same_bits is False:
        faults.append("other bits")
    return ", ".join(faults) or outcome.fault


def _row(outcome: Outcome, names: Sequence[str]) -> list[str]:
    message = outcome.fault or outcome.refused
    if message:
        verdict = "**error**" if outcome.fault else "not served"
        return [*([NOTHING] * len(names)), NOTHING, f"{verdict}: {message}"]
    cells = []
    for name in names:
        error, bound = outcome.errors.get(name, (math.nan, math.nan))
        cells.append(f"{error:.1e} / {bound:.1e}" if name in outcome.errors else NOTHING)
    result = "ok" if outcome.ok else f"**FAILED**: {_faults(outcome)}"
    return [*cells, "yes" if outcome.same_bits else "**no**", result]


def _section(report: Report, device: str, section: str) -> str:
    """Return the table of one device and section."""
    single = section == SINGLE
    found = [x for x in report.outcomes if x.device.name == device and x.section == section]
    if found and all(outcome.refused == found[0].refused != "" for outcome in found):
        return f"## {device}, {section}\n\nnot served: {found[0].refused}"
    names = list(dict.fromkeys(name for outcome in found for name in outcome.errors))
    lines = [f"## {device}, {section}"]
    run = report.runs.get((device, section))
    if run is not None:
        lines.append(f"last_run: {pairs(run)}")
    repeats = all(outcome.kernel == "fused" for outcome in found)
    bits = "repeats" if repeats else f"bits of {report.reference}"
    first = ["kernel", "problem"] if single else ["problem"]
    rows = [
        [*([outcome.kernel] if single else []), outcome.problem, *_row(outcome, names)]
        for outcome in found
    ]
    lines.append(_table([*first, *names, bits, "result"], rows))
    return "\n\n".join(lines)


def all_lines(info: str, report: Report) -> str:
    """Return every check as Markdown."""
    parts = ["# forge check", info]
    if report.outcomes:
        parts.append(
            "Cells: largest error against float64 / bound it is held to. fused: 2x (gradients 3x) "
            "the error of plain float32 NumPy, plus 4 * 2^-24 of the largest sum of terms; "
            "materialized: double that. In half precision each element is held to its own bound, "
            "fused's and one rounding: 2^-11 (float16) or 2^-8 (bfloat16) of the value, and half "
            "the type's smallest number; the cell shows the element that comes nearest to it."
        )
    for device in dict.fromkeys(outcome.device.name for outcome in report.outcomes):
        for section in SECTIONS:
            parts.append(_section(report, device, section))
    parts.append(f"**{report.verdict}**")
    return "\n\n".join(parts)


def as_json(about: dict[str, Any], report: Report) -> dict[str, Any]:
    """Return every check as one object for ``json.dumps``."""

    def number(x: float) -> float | None:
        return x if math.isfinite(x) else None  # JSON has no infinity

    return {
        **about,
        "ok": report.ok,
        "verdict": report.verdict,
        "reference": report.reference,
        "runs": [
            {"device": device, "section": section, "last_run": run}
            for (device, section), run in report.runs.items()
        ],
        "checks": [
            {
                "device": outcome.device.name,
                "kernel": outcome.kernel,
                "half_precision": outcome.in_half,
                "problem": outcome.problem,
                "ok": outcome.ok,
                "errors": {
                    name: {"error": number(error), "bound": number(bound)}
                    for name, (error, bound) in outcome.errors.items()
                },
                "same_bits": outcome.same_bits,
                "refused": outcome.refused or None,
                "fault": outcome.fault or None,
            }
            for outcome in report.outcomes
        ],
    }


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."


def _share(outcomes: Iterable[Outcome]) -> str:
    """Return the largest error as a share of its bound."""
    found = list(outcomes)
    ran = [outcome for outcome in found if not outcome.refused]
    if not ran:
        return "not served" if found else NOTHING
    if any(outcome.fault for outcome in ran):
        return "**error**"
    worst = max(outcome.worst for outcome in ran)
    said = f"{worst:.0%}" if math.isfinite(worst) else "NaN or inf"
    return said if all(outcome.ok for outcome in ran) else f"**{said}**"


def _by_option(report: Report) -> str:
    """Return the table of the largest errors; a problem with two options counts for both."""
    options = [*dict.fromkeys(o for outcome in report.outcomes for o in outcome.options)]
    sections = [s for s in SECTIONS if any(x.section == s for x in report.outcomes)]
    rows = []
    for option in (NO_OPTION, *sorted(options)):
        found = [x for x in report.outcomes if option in (x.options or (NO_OPTION,))]
        if found:
            cells = [_share(x for x in found if x.section == section) for section in sections]
            rows.append([option, *cells])
    return _table(["largest error / bound", *sections], rows)


def _what_failed(report: Report) -> list[str]:
    bad = [outcome for outcome in report.outcomes if not outcome.ok]
    lines = [
        _short(f"- **FAILED** {x.device.name}, {x.kernel}, {x.problem}: {_faults(x)}")
        for x in bad[:_SHOWN_FAULTS]
    ]
    if len(bad) > _SHOWN_FAULTS:
        lines.append(f"- and {len(bad) - _SHOWN_FAULTS} more: --verbose shows each check")
    return lines


def _about_lines(about: dict[str, Any], report: Report) -> list[str]:
    """Return what was run where; a backend that is not usable, or serves nothing, says why."""
    lines = [
        f"- forge {about['forge']}, {about['python']}, numpy {about['numpy']}, {about['system']}",
        f"- {about['processor']} ({about['machine']}), {about['threads']} threads, "
        f"environment {pairs(about['environment']) or 'without FORGE_ variables'}",
    ]
    for name, state in about["backends"].items():
        ran = [x for x in report.ran if x.device.backend == name]
        refused = [x for x in report.outcomes if x.device.backend == name and x.refused]
        if not state["ok"]:
            lines.append(f"- backend {name}: no, {state['reason']}")
        elif ran:
            targets = dict.fromkeys(x.device.cpu_target for x in ran if x.device.cpu_target)
            where = f" on {', '.join(targets)}" if targets else ""
            where = where or f" on {pairs(about['runs_on'].get(name, {})) or 'it'}"
            lines.append(f"- backend {name}: {len(ran)} checks{where}")
        elif not refused:
            lines.append(f"- backend {name}: not asked for")
        if refused:
            reasons = dict.fromkeys(x.refused for x in refused)
            lines.append(f"- {name} does not serve {len(refused)} checks: {'; '.join(reasons)}")
    return [_short(line) for line in lines]


def summary(about: dict[str, Any], report: Report) -> str:
    """Return at most 30 lines: what was run, the largest errors by kernel and option, verdict."""
    parts = ["# forge check", "\n".join(_about_lines(about, report))]
    if report.outcomes:
        parts.append(_by_option(report))
    failed = _what_failed(report)
    if failed:
        parts.append("\n".join(failed))
    return "\n\n".join([*parts, f"**{report.verdict}**"])
