"""The command line: ``python -m forge info``, ``check`` and ``bench``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forge
from forge import _forge
from forge._bench import cli as _bench
from forge._check import report as _report
from forge._check import run as _check
from forge._check.problems import KERNELS

_CHECK_HELP = """\
Run forge's kernels, forward and backward, on this machine: every backend that is usable here (the
CPU with each of its instruction sets), every kernel family, one problem for each option and for odd
sizes, in float32 and, of the fused family, in float16 and bfloat16 (ml_dtypes need not be there).
Results are held against a float64 evaluation in plain NumPy; the materialized kernels also against
the CPU's, bit for bit. Takes well under a minute. The output is Markdown: a summary of at most 30
lines, or with --verbose each check, made to be pasted into a bug report."""
_CLOSED_PIPE = 128 + 13  # what a shell says of a program that SIGPIPE ended


def machine() -> dict[str, Any]:
    """Say what a bug report must: versions, system, processor, how forge was built, variables."""
    return {
        "forge": forge.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "build": forge.build_config(),
        "backends": forge.backends(),
        "runs_on": {name: _runs_on(name) for name, s in forge.backends().items() if s["ok"]},
        "threads": _forge.num_threads(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("FORGE_")},
    }


def _runs_on(backend: str) -> dict[str, Any]:
    """Say what a call on the backend ends up on: the CPU target, or the GPU and its library."""
    x = np.zeros((1, 1, 1, 1), np.float32)
    for kernel in KERNELS:
        try:
            forge.attention(x, x, x, kernel=kernel, backend=backend)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            continue
        run = forge.last_run() or {}
        return {name: run[name] for name in ("cpu_target", "device", "library") if run.get(name)}
    return {"fault": fault}


def _processor() -> str:
    try:
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or "unknown"


def _info_markdown(about: dict[str, Any]) -> str:
    lines = [f"- {name}: {about[name]}" for name in ("forge", "python", "numpy", "system")]
    lines.append(
        f"- processor: {about['processor']} ({about['machine']}), {about['threads']} threads"
    )
    lines.append(f"- build: {_report.pairs(about['build'])}")
    for name, state in about["backends"].items():
        where = about["runs_on"].get(name)
        said = f"no, {state['reason']}" if where is None else f"usable, {_report.pairs(where)}"
        lines.append(f"- backend {name}: {' '.join(said.split())}")
    lines.append(
        f"- environment: {_report.pairs(about['environment']) or 'no FORGE_ variable set'}"
    )
    return "\n".join(lines)


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error where tqdm is installed and somebody looks."""
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=steps, file=sys.stderr, disable=None, leave=False, desc="check") as bar:
        yield lambda: bar.update()


def _run_info(arguments: argparse.Namespace) -> int:
    about = machine()
    print(json.dumps(about, indent=2) if arguments.json else _info_markdown(about))
    return 0


def _run_check(arguments: argparse.Namespace) -> int:
    about = machine()
    report = _check.run(arguments.backend, _progress)
    if arguments.json:
        print(json.dumps(_report.as_json(about, report), indent=2))
    elif arguments.quiet:
        print(report.verdict)
    elif arguments.verbose:
        print(_report.all_lines(_info_markdown(about), report))
    else:
        print(_report.summary(about, report))
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forge",
        description="Exact attention for NumPy arrays: what is here, is it right, how fast?",
        epilog="Exit status: 0 all is well, 1 a check failed, 2 a wrong command line.",
    )
    parser.add_argument("--version", action="version", version=f"forge {forge.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    as_json = {"action": "store_true", "help": "print one JSON object instead of Markdown"}

    info = commands.add_parser(
        "info",
        help="versions, backends and why one does not serve, CPU targets, build",
        description="Print versions, backends (where one does not serve, why), CPU targets and how "
        "forge was built.",
    )
    info.add_argument("--json", **as_json)  # type: ignore[arg-type]
    info.set_defaults(run=_run_info)

    check = commands.add_parser(
        "check",
        help="run the kernels on this machine and compare with float64",
        description=_CHECK_HELP,
        epilog="Exit status: 0 every result within its bound, 1 not, or the named backend is not "
        "usable, 2 a wrong command line.",
    )
    check.add_argument("--backend", choices=list(forge.backends()), help="check this backend only")
    amount = check.add_mutually_exclusive_group()
    amount.add_argument("--verbose", action="store_true", help="show each check, not the summary")
    amount.add_argument("--quiet", action="store_true", help="print the verdict and nothing else")
    amount.add_argument("--json", **as_json)  # type: ignore[arg-type]
    check.set_defaults(run=_run_check)

    bench = commands.add_parser(
        "bench",
        help="time forge beside the other implementations that are installed",
        description=_bench.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 measured, 1 nothing was, or forge gave wrong answers, 2 a wrong "
        "command line, 130 interrupted.",
    )
    _bench.configure(bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv, argparse.Namespace(argv=list(argv)))
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has what they wanted. Python flushes once more at its end, into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    return status
