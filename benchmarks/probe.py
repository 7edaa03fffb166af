"""The machine's limits, from loops in C++ (benchmarks/probe) that are built on first use."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

from forge._bench.limits import Limits
from forge._bench.machine import usable_cpus

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "benchmarks" / "probe"
BUILD = ROOT / "build" / "probe"
WARM_SECONDS = 0.005
FLOPS_SECONDS = 0.02
READ_SECONDS = 0.1
READ_BYTES = 1 << 29  # beyond every cache


def _build() -> Path:
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None:
        raise OSError("no cmake")
    commands = [[cmake, "-S", SOURCE, "-B", BUILD], [cmake, "--build", BUILD]]
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")
    if ninja and not (BUILD / "CMakeCache.txt").exists():
        commands[0] += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise OSError((result.stderr or result.stdout).strip().splitlines()[-1])
    return next(BUILD.glob("libforge_probe.*"))


class Probe(Limits):
    """Measures, on as many threads as the peers get, what the machine can do right now."""

    def __init__(self, threads: int):
        self.threads = threads
        cpus = usable_cpus()
        self.count = len(cpus)
        self.cpus = (ctypes.c_int * self.count)(*cpus)
        self.library: ctypes.CDLL | None = None
        try:
            self.library = ctypes.CDLL(str(_build()))
        except (OSError, StopIteration) as error:
            self.reason = f"the probe does not build here: {error}"
            return
        self.library.forge_probe_target.restype = ctypes.c_char_p
        self.library.forge_probe_flops.restype = ctypes.c_double
        self.library.forge_probe_read.restype = ctypes.c_double
        self.target = self.library.forge_probe_target().decode()  # the best this machine has

    def gflops(self) -> float | None:
        """Billions of operations a second in independent fused multiply-adds: the FMA peak."""
        if self.library is None:
            return None
        for seconds in (WARM_SECONDS, FLOPS_SECONDS):
            rate = self.library.forge_probe_flops(
                self.threads, self.cpus, self.count, ctypes.c_double(seconds)
            )
        return rate / 1e9

    def read_gbs(self) -> float | None:
        """Billions of bytes a second read from memory."""
        if self.library is None:
            return None
        rate = self.library.forge_probe_read(
            self.threads,
            self.cpus,
            self.count,
            ctypes.c_double(READ_SECONDS),
            ctypes.c_int64(READ_BYTES),
        )
        return rate / 1e9
