"""Time forge against other attention implementations on the CPU, side by side.

`python -m forge bench` on more shapes and beside the machine's limits. Writes a table (JSON and
Markdown) and a picture. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge._bench import command
from forge._bench.cases import CASES, QUICK
from forge._bench.measure import Method

from benchmarks.probe import Probe

RESULTS = Path(__file__).resolve().parent / "results"


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, command.Plan]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    command.add_options(parser, causal="both", rounds="9, with --quick 3")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument(
        "--quick", action="store_true", help="few shapes, short turns: to see it run, not to quote"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        method = Method(rounds=options.rounds or 3, turn_seconds=0.005, patience=0)
    else:
        method = Method(rounds=options.rounds or 9)
    try:
        return options, command.make_plan(options, QUICK if options.quick else list(CASES), method)
    except ValueError as error:
        parser.error(str(error))


def main(arguments: list[str]) -> int:
    options, plan = parse_arguments(arguments)
    command.in_own_environment(options.threads, ["-m", "benchmarks", *arguments])
    results = command.perform(plan, Probe(plan.threads), options.quick)
    if results["records"]:
        for path in command.write(results, options.out):
            print(path)
    return command.exit_status(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
