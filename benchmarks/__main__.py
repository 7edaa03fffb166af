"""Time forge against other attention implementations on the CPU, side by side.

Writes a table (JSON and Markdown) and a picture. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, set_up_environment, usable_cpus

RESULTS = Path(__file__).resolve().parent / "results"
MODES = ("forward", "backward")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--peers", type=_names, default=[], help="comma list; default: all")
    parser.add_argument(
        "--shapes", type=_names, default=[], help="comma list of names or BxTxHxHkvxhd"
    )
    parser.add_argument("--causal", choices=("both", "on", "off"), default="both")
    parser.add_argument("--modes", type=_names, default=list(MODES), help="forward,backward")
    parser.add_argument("--rounds", type=_positive, help="default: 9, with --quick 3")
    parser.add_argument("--threads", type=_positive, default=len(usable_cpus()))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument(
        "--quick", action="store_true", help="few shapes, short turns: to see it run, not to quote"
    )
    options = parser.parse_args(arguments)
    unknown = [mode for mode in options.modes if mode not in MODES]
    if unknown or not options.modes:
        parser.error(f"--modes must be of {', '.join(MODES)}, got {','.join(options.modes)!r}")
    return options


def make_plan(options: argparse.Namespace) -> Any:
    """The plan that the options ask for. Imports NumPy, so only after set_up_environment."""
    from benchmarks.cases import CASES, QUICK, parse_shape, variants
    from benchmarks.measure import Method
    from benchmarks.peers import PEERS
    from benchmarks.runs import Plan

    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        raise ValueError(f"peers must be of {', '.join(PEERS)}, got {unknown[0]!r}")
    shapes = options.shapes or (QUICK if options.quick else list(CASES))
    cases = [case for text in shapes for case in variants(parse_shape(text), options.causal)]
    if options.quick:
        method = Method(rounds=options.rounds or 3, turn_seconds=0.005, patience=0)
    else:
        method = Method(rounds=options.rounds or 9)
    peers = options.peers or list(PEERS)
    return Plan(cases, options.modes, peers, options.threads, method)


def free_stem(folder: Path, date: str) -> Path:
    """Path without ending for today's results; earlier ones of the day stay."""
    number, stem = 1, folder / date
    while stem.with_suffix(".json").exists():
        number += 1
        stem = folder / f"{date}-{number}"
    return stem


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    from benchmarks.picture import draw
    from benchmarks.report import markdown

    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, results["date"])
    paths = [stem.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
    paths[0].write_text(json.dumps(results, indent=1) + "\n")
    paths[1].write_text(markdown(results, paths[2].name))
    draw(results, paths[2])
    return paths


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    set_up_environment(options.threads)
    try:
        plan = make_plan(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from tqdm import tqdm

    from benchmarks.runs import Benchmark, Results

    results = Results(
        {
            "format": 1,
            "date": datetime.date.today().isoformat(),
            "machine": describe(),
            "settings": {
                "threads": plan.threads,
                "rounds": plan.method.rounds,
                "turn_seconds": plan.method.turn_seconds,
                "most_foreign_cpus": plan.method.most_foreign_cpus,
                "quick": options.quick,
            },
        }
    )
    with tqdm(total=plan.turns(), unit="round", dynamic_ncols=True) as bar:
        disturbed = 0

        def progress(counts: bool) -> None:
            nonlocal disturbed
            disturbed += not counts
            if disturbed:
                bar.set_postfix_str(f"{disturbed} rounds repeated, others use the CPUs")
            bar.update(counts)

        try:
            Benchmark(plan, results, tqdm.write).run(progress, bar.set_description)
        except KeyboardInterrupt:
            results.head["interrupted"] = True
            tqdm.write("interrupted: writing what there is")
    if not results.records:
        print("nothing was measured", file=sys.stderr)
        return 1
    for path in write(results.as_json(), options.out):
        print(path)
    return 130 if results.head.get("interrupted") else 0


if __name__ == "__main__":
    sys.exit(main())
