"""Build the shaders for an NVIDIA GPU, check them there and report.

    python3 tests/gpu/run.py [--report FILE] [--quick] [--only TEXT] [--skip-sanitizers]
                             [--library FILE]

Needs nvcc, compute-sanitizer and NumPy. The shaders are those of the Metal backend, translated by
translate.py. What is checked: parity with float64 (tests/python/oracle.py and its error rule),
equal bits over 50 runs, and three of compute-sanitizer's tools on small problems. Exit code 1: a
check failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/python")]

from cases import Case, parity_cases, small_cases  # noqa: E402
from gpu import Gpu  # noqa: E402

RUNS = 50
TOOLS = {  # and what a clean run ends with
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


class Report:
    """Lines for people, printed as they come and kept for the file."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failures = 0

    def say(self, line: str = "") -> None:
        """Add a line."""
        self.lines.append(line)
        print(line, flush=True)

    def check(self, what: str, run: Callable[[], str]) -> None:
        """Run one check; its text, or what went wrong, becomes a row of the table."""
        start = time.monotonic()
        try:
            outcome = run()
        except (AssertionError, RuntimeError, subprocess.SubprocessError) as error:
            self.failures += 1
            outcome = "**FAILED** " + " ".join(str(error).split())[:300]
        self.say(f"| {what} | {outcome} | {time.monotonic() - start:.1f} s |")


def flattened(folder: Path) -> str:
    """Return the shaders as one text, which `folder` then holds as forge.metal."""
    metal = folder / "forge.metal"
    flatten = [sys.executable, ROOT / "cmake/flatten_shaders.py", "--root", ROOT, "--metal", metal]
    subprocess.run(flatten, check=True)
    return metal.read_text(encoding="utf-8")


def build(folder: Path, arch: str) -> Path:
    """Compile the shaders and return the library."""
    flattened(folder)
    metal, cuda = folder / "forge.metal", folder / "forge.cu"
    subprocess.run([sys.executable, HERE / "translate.py", metal, cuda], check=True)
    return compile_cuda(cuda, folder / "libforge_gpu.so", arch)


def compile_cuda(cuda: Path, library: Path, arch: str) -> Path:
    """Return the library that nvcc makes of a translated text."""
    # As the shaders are built for Apple GPUs: no contraction, no approximations.
    flags = ["-O3", "-std=c++17", f"-arch={arch}", "-fmad=false", "-lineinfo", "-Xcompiler=-fPIC"]
    flags += ["--split-compile=0", "-shared", f"-I{HERE}"]
    subprocess.run(["nvcc", *flags, cuda, "-o", library], check=True)
    return library


def version_of(tool: str) -> str:
    """Return the line of `tool --version` that names a version."""
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return next(line for line in text.splitlines() if "ersion" in line or "release" in line).strip()


def run_parity(gpu: Gpu, report: Report, cases: list[Case]) -> None:
    """Hold each case to the error rule."""
    report.say("| problem | largest error / bound | time |")
    report.say("|---|---|---|")
    for case in cases:
        report.check(case.name, lambda case=case: case.check(gpu))


def run_repeats(gpu: Gpu, report: Report, cases: list[Case]) -> None:
    """Compare the bits of many runs."""
    report.say(f"\n## Equal bits over {RUNS} runs\n\n| problem | outcome | time |\n|---|---|---|")
    for case in cases:
        report.check(case.name, lambda case=case: case.repeat(gpu, RUNS))


def run_sanitizers(library: Path, report: Report) -> None:
    """Run the small cases under each tool."""
    report.say("\n## compute-sanitizer\n\n| tool | outcome | time |\n|---|---|---|")
    small = [sys.executable, __file__, "--library", library, "--small", "--skip-sanitizers"]
    for tool, clean in TOOLS.items():

        def run(tool: str = tool, clean: str = clean) -> str:
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
            done = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-500:]
            assert clean in done.stdout, done.stdout[-500:]
            return clean

        report.check(tool, run)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="where the report goes, as Markdown")
    parser.add_argument("--quick", action="store_true", help="no problem beyond T = 1024")
    parser.add_argument("--only", default="", help="problems whose names hold this")
    parser.add_argument("--small", action="store_true", help="only the sanitizers' problems")
    parser.add_argument("--skip-sanitizers", action="store_true")
    parser.add_argument("--library", type=Path, help="built before")
    parser.add_argument("--arch", default="native", help="nvcc's -arch")
    return parser.parse_args()


def main() -> int:
    """Return the exit code."""
    options, report = parse_arguments(), Report()
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        library = options.library or build(Path(folder), options.arch)
        gpu = Gpu(library)
        report.say("# The shaders on an NVIDIA GPU\n")
        said = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
        report.say(f"Command: `python3 tests/gpu/run.py {' '.join(said)}`\n")
        report.say(f"Device: {gpu.name}; NumPy {np.__version__}; {os.cpu_count()} CPUs")
        if not options.library:
            report.say(f"Built in {time.monotonic() - start:.0f} s with nvcc: {version_of('nvcc')}")
        report.say("\n## Parity with float64\n")
        longest = 1024 if options.quick else 8192
        cases = list(small_cases() if options.small else parity_cases(longest))
        cases = [case for case in cases if options.only in case.name]
        run_parity(gpu, report, cases)
        if not options.small:
            run_repeats(gpu, report, [case for case in cases if case.repeated])
        if not options.skip_sanitizers:
            run_sanitizers(library, report)
    report.say(f"\n{report.failures} checks failed." if report.failures else "\nAll checks passed.")
    if options.report:
        options.report.write_text("\n".join(report.lines) + "\n", encoding="utf-8")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
