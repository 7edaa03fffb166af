"""What `make test` did, in words and for a machine, from the reports of CTest and pytest.

    summary.py build [--status 0]

Reads build/*/results/*.xml (ctest.xml is CTest's, the others are pytest's) and build/left-out, a
line for each part that was not run. Writes build/test-summary.json. Its last line says it all; the
exit status is 0 when all passed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

NOT_INSTALLED = re.compile(r"^([\w-]+) is not installed\b")
CANNOT_IMPORT = re.compile(r"^could not import '(\w+)")
LONGEST = 8


@dataclass
class Summary:
    """Counts of all runs."""

    cpp: Counter[str] = field(default_factory=Counter)
    """C++ test programs, by what became of them."""
    python: dict[str, Counter[str]] = field(default_factory=dict)
    """Python tests by where they ran and what became of them."""
    failed: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Python tests that ran somewhere."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of each skip."""
    other_entries: Counter[str] = field(default_factory=Counter)
    """CTest entries that are neither C++ tests nor pytest's."""
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def skipped_everywhere(self) -> Counter[str]:
        """Reasons of tests that ran on no target. A skipped module counts as one test."""
        modules = {name.partition("::")[0] for name in self.names}
        ran = self.names | modules
        reasons = {name: reason for name, reason in self.skipped if name not in ran}
        return Counter(reasons.values())

    @property
    def missing(self) -> dict[str, str]:
        """What was left out, and why: parts of `make test`, and packages that tests need."""
        found = dict(self.left_out)
        for reason in self.skipped_everywhere:
            package = NOT_INSTALLED.match(reason) or CANNOT_IMPORT.match(reason)
            if package:
                found.setdefault(package[1], "not installed")
        return found

    @property
    def python_runs(self) -> int:
        return sum(counts["passed"] + counts["failed"] for counts in self.python.values())

    @property
    def ok(self) -> bool:
        """Something ran, and nothing failed."""
        return not self.failed and bool(self.cpp["passed"] or self.names)

    @property
    def targets(self) -> list[str]:
        return sorted({target for where in self.python for target in where.split(", ") if target})


def outcome(case: ET.Element) -> str:
    """passed, failed or skipped, for a case of CTest or of pytest."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
        return "skipped"
    return "passed"


def name_of(case: ET.Element) -> str:
    """A whole module that is skipped has no class name, and its own for a name."""
    module, name = case.get("classname", ""), case.get("name", "")
    return f"{module}::{name}" if module else name


def skip_reason(case: ET.Element) -> str:
    """pytest says it in the message; of a whole module as a tuple of file, line and reason."""
    skipped = case.find("skipped")
    message, text = skipped.get("message", ""), skipped.text or ""
    if message == "collection skipped" and text.startswith("("):
        message = str(ast.literal_eval(text)[2])
    return message.removeprefix("Skipped: ")


def read_pytest(path: Path, summary: Summary) -> None:
    root = ET.parse(path).getroot()
    properties = root.findall(".//testsuite/properties/property")
    where = ", ".join(
        sorted({p.get("value", "") for p in properties if p.get("name") == "runs_on"})
    )
    counts = summary.python.setdefault(where, Counter())
    for case in root.iter("testcase"):
        became = outcome(case)
        counts[became] += 1
        name = name_of(case)
        if became == "skipped":
            summary.skipped.append((name, " ".join(skip_reason(case).split())))
        else:
            summary.names.add(name)
        if became == "failed":
            summary.failed.append(f"{path.parents[1].name}/{path.stem}: {name}")


def tells(report: Path, became: str) -> bool:
    """Whether pytest's report accounts for what CTest saw; not if it crashed or ran nothing."""
    if not report.is_file():
        return False
    cases = ET.parse(report).getroot().iter("testcase")
    return became != "failed" or any(outcome(case) == "failed" for case in cases)


def read_ctest(path: Path, summary: Summary) -> None:
    """C++ tests carry the label cpp; an entry of pytest counts by its own report, if any."""
    build = path.parents[1].name
    for case in ET.parse(path).getroot().iter("testcase"):
        name, became = case.get("name", ""), outcome(case)
        summary.seconds[f"{build}/{name}"] = round(float(case.get("time", 0)), 1)
        labels = {
            label
            for p in case.iter("property")
            if p.get("name") == "cmake_labels"
            for label in p.get("value", "").split(";")
        }
        told = tells(path.parent / f"{name}.xml", became)
        if "cpp" in labels:
            summary.cpp[became] += 1
        elif not told:
            summary.other_entries[became] += 1
        if became == "failed" and not told:
            summary.failed.append(f"{build}/{name}")


def collect(build: Path) -> Summary:
    summary = Summary()
    for path in sorted(build.glob("*/results/*.xml")):
        if path.name == "ctest.xml":
            read_ctest(path, summary)
        else:
            read_pytest(path, summary)
    left_out = build / "left-out"
    if left_out.is_file():
        for line in left_out.read_text().splitlines():
            part, _, reason = line.partition(": ")
            summary.left_out[part] = reason
    return summary


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def closing_line(summary: Summary, status: int) -> str:
    """One line: what passed, where, and what was left out."""
    cpp = summary.cpp["passed"] + summary.cpp["failed"]
    ran = f"{count(cpp, 'C++ test')}, {count(summary.python_runs, 'Python test')}"
    if summary.targets:
        ran += f" on {count(len(summary.targets), 'target')} ({', '.join(summary.targets)})"
    others = summary.other_entries["passed"] + summary.other_entries["failed"]
    if others:
        ran += f", {count(others, 'other check')}"
    if summary.failed:
        said = f"FAILED: {count(len(summary.failed), 'test')} of {ran}"
    elif status or not summary.ok:
        said = f"FAILED: make stopped before the end, after {ran}"
    else:
        said = f"all passed: {ran}"
    missing = "; ".join(f"{name} ({why})" for name, why in summary.missing.items())
    return f"{said}; left out: {missing or 'nothing'}"


def as_json(summary: Summary, status: int) -> dict:
    return {
        "ok": summary.ok and status == 0,
        "summary": closing_line(summary, status),
        "cpp": dict(summary.cpp),
        "python": {where or "no device": dict(c) for where, c in summary.python.items()},
        "python_tests": len(summary.names),
        "other_entries": dict(summary.other_entries),
        "failed": summary.failed,
        "skipped_everywhere": dict(summary.skipped_everywhere.most_common()),
        "left_out": summary.missing,
        "seconds": summary.seconds,
    }


def report(summary: Summary, status: int) -> str:
    lines = [f"failed: {name}" for name in summary.failed[:20]]
    lines += [
        f"skipped: {number}: {why}" for why, number in summary.skipped_everywhere.most_common()
    ]
    slow = sorted(summary.seconds.items(), key=lambda entry: -entry[1])[:LONGEST]
    lines.append("longest: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in slow))
    return "\n".join([*lines, closing_line(summary, status)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--status", type=int, default=0, help="exit status of the tests")
    arguments = parser.parse_args(argv)
    summary = collect(arguments.build)
    facts = as_json(summary, arguments.status)
    arguments.build.mkdir(exist_ok=True)
    (arguments.build / "test-summary.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(report(summary, arguments.status))
    return 0 if facts["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
