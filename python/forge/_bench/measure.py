"""Interleaved timing: in a round each peer has one turn, then the machine's limits are measured.

A turn is a few untimed calls and then enough timed ones to fill a set time; what counts is the mean
of a turn, and the median over rounds. The order of the peers moves on by one from round to round. A
round during which other processes took more than a little of the CPUs is thrown away and repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forge._bench.limits import Limits
from forge._bench.machine import Load, Threads

MOST_CALLS = 2000  # a turn
SLOW_SECONDS = 1.0  # a call that takes longer is timed once a turn, in the first rounds only
SLOW_ROUNDS = 3
WARM_SECONDS = 0.008
QUIET_WAIT = 0.5  # seconds between looks for a quiet machine


@dataclass(frozen=True)
class Method:
    """How long and how strictly to measure."""

    rounds: int = 9
    turn_seconds: float = 0.03
    most_foreign_cpus: float = 0.15
    longest_wait: float = 5.0  # seconds to wait for quiet after a round that was disturbed
    patience: float = 600.0  # seconds spent in all on disturbed rounds and waits; then they count


@dataclass
class Call:
    """One peer's call and how its library behaves."""

    run: Callable[[], object]
    linger: float
    calls: int = 1  # a turn
    seconds: float = 0.0  # estimate of one
    samples: list[float] = field(default_factory=list)  # seconds a call, one a round

    @property
    def slow(self) -> bool:
        """Whether one call alone takes longer than a turn should."""
        return self.seconds > SLOW_SECONDS


@dataclass
class Measured:
    """Samples of one case and mode, by peer, and the machine beside them, by round."""

    seconds: dict[str, list[float]]
    peak_gflops: list[float]
    read_gbs: list[float]
    foreign_cpus: list[float]
    repeated: int = 0

    @staticmethod
    def median(values: list[float]) -> float | None:
        """The median, or None of nothing."""
        return statistics.median(values) if values else None


class Stopwatch:
    """Times the calls of one case and mode."""

    def __init__(self, method: Method, threads: Threads, limits: Limits):
        self.method = method
        self.threads = threads
        self.limits = limits
        self.lost = 0.0  # seconds of patience

    def measure(
        self, calls: dict[str, Call], reads_memory: bool, progress: Callable[[bool], None]
    ) -> Measured:
        """Run the rounds. `progress` is called after each, with whether it counts."""
        self._prepare(calls)
        result = Measured({name: call.samples for name, call in calls.items()}, [], [], [])
        order = list(calls)
        load = Load()
        self.threads.hold_main(True)
        try:
            done = 0
            while done < self.method.rounds:
                start = time.perf_counter()
                load.look()
                timed = self._round(calls, order, done)
                peak = self.limits.gflops()
                read = self.limits.read_gbs() if reads_memory else None
                foreign = load.look()
                order = order[1:] + order[:1]
                if self._is_disturbed(foreign) and self.lost < self.method.patience:
                    result.repeated += 1
                    progress(False)
                    self._wait_for_quiet(load)
                    self.lost += time.perf_counter() - start
                    continue
                for name, seconds in timed.items():
                    calls[name].samples.append(seconds)
                self._note(result, peak, read, foreign)
                done += 1
                progress(True)
        finally:
            self.threads.hold_main(False)
        return result

    def _prepare(self, calls: dict[str, Call]) -> None:
        """First calls, on all CPUs, then an estimate of how long one takes where it will run."""
        for call in calls.values():
            call.run()
            self.threads.place_new()
        self.threads.hold_main(True)
        for call in calls.values():
            call.run()
            start = time.perf_counter()
            call.run()
            call.seconds = time.perf_counter() - start
            fitting = int(self.method.turn_seconds / max(call.seconds, 1e-7))
            call.calls = min(max(fitting, 1), MOST_CALLS)
            time.sleep(call.linger)
        self.threads.hold_main(False)

    def _round(self, calls: dict[str, Call], order: list[str], number: int) -> dict[str, float]:
        timed = {}
        for name in order:
            call = calls[name]
            if call.slow and number >= SLOW_ROUNDS:
                continue
            timed[name] = self._turn(call)
            time.sleep(call.linger)
        return timed

    @staticmethod
    def _turn(call: Call) -> float:
        if not call.slow:  # its caches, the clocks, its workers
            start = time.perf_counter()
            call.run()
            while time.perf_counter() - start < WARM_SECONDS:
                call.run()
        start = time.perf_counter()
        for _ in range(call.calls):
            call.run()
        return (time.perf_counter() - start) / call.calls

    def _is_disturbed(self, foreign: float | None) -> bool:
        return foreign is not None and foreign > self.method.most_foreign_cpus

    def _wait_for_quiet(self, load: Load) -> None:
        deadline = time.perf_counter() + self.method.longest_wait
        while time.perf_counter() < deadline:
            load.look()
            time.sleep(min(QUIET_WAIT, self.method.longest_wait))
            if not self._is_disturbed(load.look()):
                return

    @staticmethod
    def _note(
        result: Measured, peak: float | None, read: float | None, foreign: float | None
    ) -> None:
        for values, value in (
            (result.peak_gflops, peak),
            (result.read_gbs, read),
            (result.foreign_cpus, foreign),
        ):
            if value is not None:
                values.append(value)
