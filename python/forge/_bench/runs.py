"""Goes through the cases: prepares and checks the peers, times them, collects the records."""

from __future__ import annotations

import gc
import importlib.metadata
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forge._bench.cases import Case
from forge._bench.limits import Limits
from forge._bench.machine import Threads
from forge._bench.measure import Call, Measured, Method, Stopwatch
from forge._bench.peers import PEERS, Runner, Unsupported
from forge._bench.progress import Progress
from forge._bench.truth import WrongAnswerError, check_rows, check_whole
from forge._check.halves import DTYPES


@dataclass
class Plan:
    """What to run."""

    cases: list[Case]
    modes: list[str]
    peers: list[str]
    threads: int
    method: Method
    dtypes: list[str]

    def turns(self) -> int:
        """Rounds over all cases and modes: the length of the progress bar."""
        return self.method.rounds * sum(len(case.modes(self.modes)) for case in self.cases)


@dataclass
class Results:
    """What came out; as_json gives the file's content."""

    head: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.head, "records": self.records, "left_out": self.left_out}


def versions(peers: list[str]) -> dict[str, str]:
    """Versions of the packages that the peers come from."""
    found = {}
    for package in sorted({package for name in peers for package in PEERS[name].packages}):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Benchmark:
    """Runs a plan; `results` grows with every case and mode."""

    def __init__(self, plan: Plan, results: Results, limits: Limits, progress: Progress):
        self.plan = plan
        self.results = results
        self.progress = progress
        self.say = progress.say
        self.threads = Threads(plan.threads)
        self.threads.place_new()  # those that importing NumPy has started
        self.stopwatch = Stopwatch(plan.method, self.threads, limits)
        self.prepare = {}
        for name in plan.peers:
            try:
                self.prepare[name] = PEERS[name].load()
            except Unsupported as reason:
                self._leave_out(name, "", str(reason))
        results.head["peak_target"] = limits.target
        results.head["versions"] = versions(list(self.prepare))
        if limits.reason:
            self.say(f"no shares of peak: {limits.reason}")

    def run(self) -> None:
        """All cases, all modes."""
        describe, progress = self.progress.describe, self.progress.round_done
        for case in self.plan.cases:
            describe(f"{case.name} check")
            runners, errors = self._runners(case)
            for mode in case.modes(self.plan.modes):
                calls = _calls(runners, mode)
                if not calls:
                    self.say(f"{case.name} {mode}: no peer can do it")
                    for _ in range(self.plan.method.rounds):
                        progress(True)
                    continue
                describe(f"{case.name} {'causal' if case.causal else 'full'} {mode}")
                measured = self.stopwatch.measure(calls, case.is_decode, progress)
                record = make_record(case, mode, measured)
                for name in calls:
                    record["peers"][name] |= {"note": runners[name].note, "error": errors[name]}
                self.results.records.append(record)
                self.say(summary(record))
            del runners
            gc.collect()

    def _runners(self, case: Case) -> tuple[dict[str, Runner], dict[str, float]]:
        """Peers that can do the case and do it right, by column."""
        runners: dict[str, Runner] = {}
        errors: dict[str, float] = {}
        for dtype in self.plan.dtypes:
            self._runners_in(replace(case, dtype=dtype), runners, errors)
        return runners, errors

    def _runners_in(self, case: Case, runners: dict[str, Runner], errors: dict[str, float]) -> None:
        inputs, small = case.inputs(), case.miniature()
        small_inputs = small.inputs(seed=1)
        for peer, prepare in self.prepare.items():
            if case.dtype not in PEERS[peer].dtypes:
                continue
            name = column(peer, case.dtype)
            try:
                small_runner = prepare(small, small_inputs, self.plan.threads)
                error = check_whole(small_runner, small, small_inputs)
                runner = prepare(case, inputs, self.plan.threads)
                errors[name] = max(error, check_rows(runner, case, inputs))
                runners[name] = runner
            except (Unsupported, WrongAnswerError) as reason:
                self._leave_out(name, case.name, str(reason))
            except Exception as error:  # one library's trouble must not end the run
                self._leave_out(name, case.name, f"{type(error).__name__}: {error}"[:300])
            self.threads.place_new()

    def _leave_out(self, peer: str, case: str, reason: str) -> None:
        entry = {"peer": peer, "case": case, "reason": reason}
        if entry not in self.results.left_out:
            self.results.left_out.append(entry)
            self.say(f"{peer}{' on ' + case if case else ''}: left out, {reason}")


def column(peer: str, dtype: str) -> str:
    """What a peer in a dtype is called in results."""
    return peer if dtype == "float32" else f"{peer} {dtype}"


def peer_and_dtype(name: str) -> tuple[str, str]:
    """Take the name of a column apart."""
    peer, _, dtype = name.partition(" ")
    return peer, dtype or "float32"


def _calls(runners: dict[str, Runner], mode: str) -> dict[str, Call]:
    found = {name: getattr(runner, mode) for name, runner in runners.items()}
    return {
        name: Call(run, PEERS[peer_and_dtype(name)[0]].linger)
        for name, run in found.items()
        if run is not None
    }


def make_record(case: Case, mode: str, measured: Measured) -> dict[str, Any]:
    """One case and mode: samples, medians, shares of what the machine could do in those rounds."""
    peak, read = Measured.median(measured.peak_gflops), Measured.median(measured.read_gbs)
    record: dict[str, Any] = {
        "case": case.name,
        "causal": case.causal,
        "mode": mode,
        "shape": asdict(case),
        "label": case.label,
        "gflop": case.gflop(mode),
        "kv_bytes": case.kv_bytes() if case.is_decode else None,
        "peak_gflops": peak,
        "peak_gflops_samples": measured.peak_gflops,
        "read_gbs": read,
        "read_gbs_samples": measured.read_gbs,
        "foreign_cpus": Measured.median(measured.foreign_cpus),
        "rounds_repeated": measured.repeated,
        "peers": {},
    }
    for name, samples in measured.seconds.items():
        seconds: Any = Measured.median(samples)
        gflops = record["gflop"] / seconds
        row = {
            "seconds": seconds,
            "best_seconds": min(samples),
            "samples": samples,
            "gflops": gflops,
            "peak_share": gflops / peak if peak else None,
        }
        if record["kv_bytes"]:
            kv_bytes = replace(case, dtype=peer_and_dtype(name)[1]).kv_bytes()
            row["kv_gbs"] = kv_bytes / seconds / 1e9
            row["read_share"] = row["kv_gbs"] / read if read else None
        record["peers"][name] = row
    return record


def fastest_other(record: dict[str, Any], dtype: str = "float32") -> str | None:
    """The fastest peer in that dtype that is not forge."""
    others = {
        name: row["seconds"]
        for name, row in record["peers"].items()
        if name != column("forge", dtype) and peer_and_dtype(name)[1] == dtype
    }
    return min(others, key=lambda name: others[name]) if others else None


def lead(record: dict[str, Any], dtype: str = "float32") -> float | None:
    """The fastest other peer's time over forge's in that dtype: above 1 where forge is faster."""
    other, own = fastest_other(record, dtype), column("forge", dtype)
    if other is None or own not in record["peers"]:
        return None
    return float(record["peers"][other]["seconds"] / record["peers"][own]["seconds"])


def summary(record: dict[str, Any]) -> str:
    """One line for the terminal."""
    name = f"{record['case']} {'causal' if record['causal'] else 'full'} {record['mode']}"
    parts = []
    for peer, row in sorted(record["peers"].items(), key=lambda item: item[1]["seconds"]):
        share = row.get("read_share", row["peak_share"])
        shown = f" {100 * share:.0f} %" if share is not None else ""
        parts.append(f"{peer} {1e3 * row['seconds']:.3g} ms{shown}")
    leads = {dtype: lead(record, dtype) for dtype in DTYPES}
    said = [f"{column('forge', dtype)} {ratio:.2f}x" for dtype, ratio in leads.items() if ratio]
    return f"{name}: {', '.join(parts)}" + (f"; {', '.join(said)}" if said else "")
