"""``python -m forge bench``."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from forge._bench import command
from forge._bench.limits import Limits
from forge._bench.measure import Method
from forge._bench.report import markdown

HELP = """\
Time forge on the CPU beside the other attention implementations that are installed: PyTorch (on
forge's arrays and in its own layout), onnxruntime, JAX, plain NumPy; in float32, bfloat16 and
float16, as far as each has them. Takes a minute or two, with --dtypes float32 half of that, and
wants an otherwise quiet machine.

How it measures: all peers live in one process. Each first computes a small problem of the same kind
and some rows of the timed one, and is left out where it differs from float64. Then come rounds: in
each round every peer has one turn, a few untimed calls and then enough timed ones to fill 30 ms;
the order moves on from round to round. A peer's figure is the median over the rounds. GFLOP/s count
the (query, key) pairs that the mask leaves visible, whoever computes the others too."""
SHAPES = ("512g", "1k", "2kwin", "dec")
ROUNDS = 5


def configure(parser: argparse.ArgumentParser) -> None:
    """Give the parser its options and what runs them."""
    command.add_options(parser, causal="on", rounds=str(ROUNDS))
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="write <date>.json, .md and, with matplotlib, .png there",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of Markdown"
    )
    parser.set_defaults(run=functools.partial(_run, parser))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    method = Method(rounds=options.rounds or ROUNDS, patience=10)
    try:
        plan = command.make_plan(options, SHAPES, method)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    command.in_own_environment(options.threads, ["-m", "forge", *options.argv])
    results = command.perform(plan, Limits(), quick=False)
    print(json.dumps(results, indent=1) if options.json else markdown(results))
    if options.out is not None and results["records"]:
        paths = command.write(results, options.out)
        if not options.json:
            print("\n".join(map(str, paths)))
    return command.exit_status(results)
