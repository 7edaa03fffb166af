"""Random problems of every option, shape, layout, dtype and kind of value against float64.

    python tests/fuzz.py --count 10000                       # problems 0 to 9999
    python tests/fuzz.py --first 4711 --count 1             # one of them again
    python tests/fuzz.py --backend metal --count 1000        # on the device of this build

A problem follows from its number alone: its options, its arrays and the CPU target it runs on.
Forward and backward are held against the float64 answer, within the bound for any order of
summation (``Problem.tolerance``); half precision may be one rounding further away. Ends with 1
where a problem failed, and prints the number of each.
"""

import argparse
import collections
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before NumPy is loaded: a process has one core
sys.path.insert(0, str(Path(__file__).parent / "python"))

import forge  # noqa: E402
import numpy as np  # noqa: E402
from random_problems import Drawn  # noqa: E402

BATCH = 500  # problems that a process takes at a time


def try_batch(first, count, backend):
    failed, kinds = [], collections.Counter()
    for number in range(first, first + count):
        drawn = None
        try:
            drawn = Drawn(number, backend)
            with np.errstate(all="ignore"):
                drawn.check()
        except Exception as error:
            failed.append((number, str(drawn), f"{type(error).__name__}: {error}"))
        if drawn:
            kinds.update(
                [drawn.target or backend, drawn.kernel, f"q {drawn.q_dtype}, kv {drawn.kv_dtype}"]
            )
            kinds.update(name for name in drawn.options if name != "causal" or drawn.options[name])
    return failed, kinds


def batches(first, count):
    for at in range(first, first + count, BATCH):
        yield at, min(BATCH, first + count - at)


def try_all(args):
    """How many problems were tried, the failed ones, and how many there were of each kind."""
    began, tried, failed, kinds = time.monotonic(), 0, [], collections.Counter()
    todo, waiting = batches(args.first, args.count), collections.deque()
    fresh = multiprocessing.get_context("spawn")  # a forked process has no GPU
    with ProcessPoolExecutor(args.processes, fresh, forge.set_num_threads, (1,)) as pool:
        while True:
            while len(waiting) < 2 * args.processes and time.monotonic() - began < args.seconds:
                batch = next(todo, None)
                if batch is None:
                    break
                waiting.append((batch[1], pool.submit(try_batch, *batch, args.backend)))
            if not waiting:
                return tried, failed, kinds
            count, future = waiting.popleft()
            wrong, seen = future.result()
            tried += count
            failed += wrong
            kinds += seen


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem")
    parser.add_argument("--count", type=int, default=1000, help="how many problems")
    parser.add_argument("--backend", choices=("cpu", "metal"), default="cpu")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args()
    began = time.monotonic()
    tried, failed, kinds = try_all(args)
    seconds = time.monotonic() - began
    for number, drawn, message in failed:
        print(f"problem {number}: {drawn}\n    {message}")
    print(
        f"{tried} problems from {args.first} on, {len(failed)} failed, "
        f"{seconds:.0f} s, {args.processes} processes"
    )
    print("\n".join(f"  {kind}: {count}" for kind, count in sorted(kinds.items())))
    if args.json:
        figures = {"first": args.first, "problems": tried, "failed": failed}
        figures |= {"seconds": seconds, "kinds": kinds}
        args.json.write_text(json.dumps(figures, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
