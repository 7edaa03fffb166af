"""Time the fused kernels on an NVIDIA GPU, float32 beside half precision.

    python3 tests/gpu/times.py

The table of docs/metal-fused.md. Function constants are compiled in, as Metal has it, for causal
problems whose arrays are aligned. Each figure is the best of nine launches by the host's clock.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu import Call, Gpu, stored
from run import HERE, compile_cuda, flattened

LAUNCHES = 9
HEAD_DIMS = (64, 128)
ELEMENTS = ("float32", "float16", "bfloat16")
SWITCHES = {"has_causal", "is_aligned", "is_whole"}
HALVES = {"is_half_q", "is_half_kv", "has_rounded", "is_half_dq", "is_half_dk", "is_half_dv"}
INSTANCE = re.compile(r"^template \[\[host_name\(\"\w+_hd(\d+)\"\).*$", re.M)
CONSTANT = re.compile(r"__constant__ bool (\w+);")


class Timed(Gpu):
    """A library whose tiled kernels are launched whole, and timed."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.times: dict[str, float] = {}

    def launch_tiles(
        self, kernel: str, tiles: tuple[int, int, int], threads: int, slots: dict[str, Any]
    ) -> None:
        """Run a kernel in one dispatch, several times."""
        for _ in range(LAUNCHES):
            start = time.perf_counter()
            self.launch(kernel, tiles, threads, slots)
            taken = 1000 * (time.perf_counter() - start)
            self.times[kernel] = min(taken, self.times.get(kernel, taken))


def build(folder: Path, element: str) -> Path:
    """Compile the kernels for one element type."""
    metal, cuda = folder / f"{element}.metal", folder / f"{element}.cu"
    text = INSTANCE.sub(
        lambda found: found[0] if int(found[1]) in HEAD_DIMS else "", flattened(folder)
    )
    metal.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, HERE / "translate.py", metal, cuda], check=True)
    on = SWITCHES | (HALVES if element != "float32" else set())
    on |= {"is_bfloat"} if element == "bfloat16" else set()
    code = CONSTANT.sub(
        lambda found: (
            f"__constant__ bool set_{found[1]}; "
            f"constexpr bool {found[1]} = {str(found[1] in on).lower()};"
        ),
        cuda.read_text(encoding="utf-8"),
    )
    code = re.sub(r'(\{"(\w+)", &)\2\}', r"\1set_\2}", code)
    cuda.write_text(code, encoding="utf-8")
    return compile_cuda(cuda, folder / f"{element}.so", "native")


def arrays(element: str, hd: int, Tq: int, Tk: int, heads: tuple[int, int], B: int) -> list:
    """Return random q, k, v and dout."""
    rng = np.random.default_rng(0)
    shapes = [(B, Tq, heads[0], hd), *[(B, Tk, heads[1], hd)] * 2, (B, Tq, heads[0], hd)]
    return [stored(rng.standard_normal(shape, np.float32), element) for shape in shapes]


def call(gpu: Gpu, given: list, decode: bool) -> None:
    """Run the forward and the backward once."""
    q, k, v, dout = given
    rounded = np.empty_like(q) if q.itemsize == 2 else None
    with Call(gpu, q, k, v, causal=True) as one:
        one.fused_forward(np.empty(q.shape, np.float32), rounded, decode=decode)
        if not decode:
            gradients = {"dq": q, "dk": k, "dv": v}
            one.gradients(dout, None, **{n: np.empty_like(x) for n, x in gradients.items()})
            one.fused_backward(accumulate=False)


def rows(times: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the table."""
    yield "| kernel | " + " | ".join(f"{element}: hd 64, 128" for element in times) + " |"
    yield "|---" * (len(times) + 1) + "|"
    for kernel in ("fused_fwd", "fused_bwd_dq", "fused_bwd_dkv", "decode"):
        cells = (
            ", ".join(f"{found[f'attention_{kernel}_hd{hd}']:.2f}" for hd in HEAD_DIMS)
            for found in times.values()
        )
        yield f"| {kernel} | " + " | ".join(cells) + " |"


def main() -> None:
    """Build, time, print."""
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for element in ELEMENTS:
            gpu = Timed(build(Path(folder), element))
            for hd in HEAD_DIMS:
                call(gpu, arrays(element, hd, 2048, 2048, (8, 8), 2), decode=False)
                call(gpu, arrays(element, hd, 1, 16384, (8, 1), 4), decode=True)
            times[element] = gpu.times
    print("\n".join(rows(times)))


if __name__ == "__main__":
    main()
