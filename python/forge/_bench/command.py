"""A run from its options to its files: what ``python -m forge bench`` and ``make bench`` share."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from forge._bench.cases import CASES, parse_shape, variants
from forge._bench.limits import Limits
from forge._bench.machine import describe, set_up_environment, usable_cpus
from forge._bench.measure import Method
from forge._bench.peers import PEERS
from forge._bench.progress import Progress
from forge._bench.report import markdown
from forge._bench.runs import Benchmark, Plan, Results, peer_and_dtype
from forge._check.halves import DTYPES

MODES = ("forward", "backward")
_SET_UP = "FORGE_BENCH_SET_UP"  # in the environment once thread counts are


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_options(parser: argparse.ArgumentParser, causal: str, rounds: str) -> None:
    """Add what both commands take; ``causal`` is the default, ``rounds`` what help says."""
    add = parser.add_argument
    add("--peers", type=_names, default=[], metavar="A,B",
        help=f"of {', '.join(PEERS)}; all that are installed by default")  # fmt: skip
    add("--shapes", type=_names, default=[], metavar="A,B",
        help=f"of {', '.join(CASES)}, or BxTxHxHkvxhd such as 1x512x8x2x64")  # fmt: skip
    add("--causal", choices=("both", "on", "off"), default=causal,
        help="with the causal mask, without, or both (default: %(default)s)")  # fmt: skip
    add("--modes", type=_names, default=list(MODES), metavar="A,B",
        help="of forward, backward; both by default; decode has no backward")  # fmt: skip
    add("--dtypes", type=_names, default=list(DTYPES), metavar="A,B",
        help=f"of {', '.join(DTYPES)}; all by default; not every peer has every one")  # fmt: skip
    add("--rounds", type=_positive, metavar="N", help=f"default: {rounds}")
    add("--threads", type=_positive, metavar="N", default=len(usable_cpus()),
        help="of every peer; the CPUs that the process may use by default")  # fmt: skip


def make_plan(options: argparse.Namespace, shapes: Sequence[str], method: Method) -> Plan:
    """Return the plan that the options ask for; ``shapes`` where they name none.

    Raises:
        ValueError: a mode, peer, dtype or shape that is not there.
    """
    for option, known in (("modes", MODES), ("peers", PEERS), ("dtypes", DTYPES)):
        unknown = [name for name in getattr(options, option) if name not in known]
        if unknown:
            raise ValueError(f"{option} must be of {', '.join(known)}, got {unknown[0]!r}")
    for option, known in (("modes", MODES), ("dtypes", DTYPES)):
        if not getattr(options, option):
            raise ValueError(f"{option} must be of {', '.join(known)}, got none")
    named = options.shapes or shapes
    cases = [case for text in named for case in variants(parse_shape(text), options.causal)]
    peers = options.peers or list(PEERS)
    return Plan(cases, options.modes, peers, options.threads, method, options.dtypes)


def in_own_environment(threads: int, command: Sequence[str]) -> None:
    """Start the command again where thread counts are set, which libraries read when imported.

    Returns in the process that has them. ``command`` is what follows ``python``.
    """
    if os.environ.pop(_SET_UP, None) == str(threads):
        set_up_environment(threads)
        return
    set_up_environment(threads)
    os.environ[_SET_UP] = str(threads)
    sys.stdout.flush()
    sys.stderr.flush()
    _become([sys.executable, *command])


def _become(command: list[str]) -> NoReturn:
    if os.name == "posix":
        os.execv(command[0], command)
    import subprocess

    sys.exit(subprocess.run(command, check=False).returncode)


def perform(plan: Plan, limits: Limits, quick: bool) -> dict[str, Any]:
    """Run the plan; what has been measured when the user interrupts it is returned too."""
    results = Results(
        {
            "format": 2,
            "date": datetime.date.today().isoformat(),
            "machine": describe(),
            "settings": {
                "threads": plan.threads,
                "rounds": plan.method.rounds,
                "turn_seconds": plan.method.turn_seconds,
                "most_foreign_cpus": plan.method.most_foreign_cpus,
                "quick": quick,
            },
        }
    )
    with Progress(plan.turns()) as progress:
        try:
            Benchmark(plan, results, limits, progress).run()
        except KeyboardInterrupt:
            results.head["interrupted"] = True
            progress.say("interrupted: this is what there is")
    return results.as_json()


def exit_status(results: dict[str, Any]) -> int:
    """Return 130 after an interrupt, 1 if nothing was measured or forge was left out, else 0."""
    if results.get("interrupted"):
        return 130
    forge_failed = any(peer_and_dtype(x["peer"])[0] == "forge" for x in results["left_out"])
    return 1 if forge_failed or not results["records"] else 0


def free_stem(folder: Path, date: str) -> Path:
    """Return a path without ending for today's results; earlier ones of the day stay."""
    number, stem = 1, folder / date
    while stem.with_suffix(".json").exists():
        number += 1
        stem = folder / f"{date}-{number}"
    return stem


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write JSON, Markdown and, where matplotlib is installed, a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, results["date"])
    paths = [stem.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
    try:
        from forge._bench.picture import draw
    except ImportError:  # no matplotlib
        paths.pop()
    else:
        draw(results, paths[2])
    paths[0].write_text(json.dumps(results, indent=1) + "\n")
    paths[1].write_text(markdown(results, stem.name + ".png" if len(paths) > 2 else None))
    return paths
