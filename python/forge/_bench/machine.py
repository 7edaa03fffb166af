"""The machine under the benchmark: its CPUs, who else uses them, and where threads run.

Only Linux tells and obeys; elsewhere placement does nothing and the load of others is unknown.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "FORGE_NUM_THREADS",
)
TASKS = Path("/proc/self/task")


def usable_cpus() -> list[int]:
    """Numbers of the CPUs that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def set_up_environment(threads: int) -> None:
    """Before any library is imported: thread counts, and nothing that slows a peer down."""
    for name in [name for name in os.environ if name.startswith("OPENBLAS_")]:
        del os.environ[name]  # OPENBLAS_CORETYPE of another machine costs half the speed
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ.pop("FORGE_CPU_TARGET", None)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if threads == 1 and hasattr(os, "sched_setaffinity"):  # XLA has no option for it
        os.sched_setaffinity(0, {usable_cpus()[-1]})


class Threads:
    """Spreads the threads that libraries start over the CPUs.

    Kernels of virtual machines may wake a worker on its waker's CPU and move it only milliseconds
    later; parallel regions shorter than that would then run one after the other, and the figures
    would be about the scheduler. The main thread stays on the first CPU, workers get the others in
    turn. Threads that their library has pinned or named (XLA's) are left alone.
    """

    def __init__(self, threads: int):
        self.cpus = usable_cpus()
        self.active = threads > 1 and len(self.cpus) > 1 and TASKS.exists()
        self.others = self.cpus[1 : max(2, threads)]
        self.known: set[int] = {os.getpid()}

    def place_new(self) -> None:
        """Pin the workers that have appeared since the last call."""
        if not self.active:
            return
        own_name = Path("/proc/self/comm").read_text()
        found = {int(task.name) for task in TASKS.iterdir()} - self.known
        self.known |= found
        placed = 0
        for thread in sorted(found):
            try:
                named = (TASKS / str(thread) / "comm").read_text() != own_name
                if named or len(os.sched_getaffinity(thread)) == 1:
                    continue
                os.sched_setaffinity(thread, {self.others[placed % len(self.others)]})
                placed += 1
            except OSError:
                continue  # it has ended

    def hold_main(self, held: bool) -> None:
        """Hold the main thread on the first CPU, or let it go: workers inherit where it may run."""
        if self.active:
            os.sched_setaffinity(0, self.cpus[:1] if held else self.cpus)


class Load:
    """How many CPUs other processes have used since the last look."""

    def __init__(self) -> None:
        self.last = self._read()

    @staticmethod
    def _read() -> tuple[float, float] | None:
        """Wall clock, and CPU seconds of everybody but this process."""
        try:
            with open("/proc/stat") as stat:
                ticks = [int(field) for field in stat.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        user, nice, system, _idle, _iowait, irq, softirq, _steal = ticks
        everybody = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return time.perf_counter(), everybody - own.user - own.system

    def look(self) -> float | None:
        """CPUs in use by others, on average since the last look; None where nobody tells."""
        before, self.last = self.last, self._read()
        if before is None or self.last is None or self.last[0] <= before[0]:
            return None
        return max(0.0, (self.last[1] - before[1]) / (self.last[0] - before[0]))


def describe() -> dict[str, object]:
    """What to know about the machine when reading the figures."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "usable_cpus": len(usable_cpus()),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }
