"""What a GPU's compiler makes of the fused kernels: registers, memory, products, branches, loads.

A stand-in for Apple's compiler, which does not run here. The dialect check rewrites the shaders to
C++ for OpenCL; that text goes through LLVM's back end for another GPU (amdgcn, gfx1030, 32 lanes),
held to the registers that a lane has on Apple's. A simdgroup's matrix product is one opaque
instruction there, and so is each function of Metal's library that has no counterpart. It shows what
the text asks of a compiler: how many values live at once, which loops unroll, which loads are sent
together.
It says nothing of Apple's own figures, nor of results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "dialect"), str(ROOT / "cmake")]

from flatten_shaders import flatten  # noqa: E402
from msl_check import HERE as DIALECT  # noqa: E402
from msl_check import Clang, preprocess  # noqa: E402
from msl_text import Function, Shader  # noqa: E402

REGISTERS = 128  # a lane has at most, on Apple's GPUs
CORE_REGISTERS = 208 * 1024 // 4  # and all threads of a core together
# What is compiled in; the rest is off.
SWITCHES = ("has_causal", "is_aligned", "is_whole")
HALVES = (  # every array holds halves; bfloat16 is what costs most
    *("is_half_q", "is_half_kv", "has_rounded", "is_half_dq", "is_half_dk", "is_half_dv"),
    "is_bfloat",
)
KERNELS = {
    "forward": "attention_fused_fwd",
    "decode": "attention_decode",
    "dq": "attention_fused_bwd_dq",
    "dkv": "attention_fused_bwd_dkv",
}
HEAD_DIMS = (64, 128)
COMPILE = [
    *("-triple", "amdgcn-amd-amdhsa", "-target-cpu", "gfx1030", "-nostdsysteminc"),
    *("-nobuiltininc", "-x", "clcpp", "-cl-std=clc++2021", "-cl-single-precision-constant", "-w"),
    *("-O2", "-emit-llvm", "-o", "-"),
]
GENERATE = [
    *("-triple", "amdgcn-amd-amdhsa", "-target-cpu", "gfx1030", "-x", "ir"),
    *("-O2", "-disable-llvm-passes", "-S", "-o", "-"),
]
AS_TYPE = "#define FORGE_AS_TYPE(To, from) return __builtin_bit_cast(To, from);\n"
# The dialect check has address spaces for what a front end refuses; a back end wants the memory of
# a threadgroup on the chip.
SPACES = {"__local": "__global", "__global": "__local"}
THREADGROUP_ARRAY = re.compile(r"static __local ([\w:]+) (\w+)\[[^;]*\];")
# clang writes each kernel a second time, as a function that others may call.
TWIN = re.compile(r"^define [^\n]*@__clang_ocl_kern_imp_.*?^}$", re.M | re.S)
INSTRUCTION = re.compile(r"^\t([a-z]\w*)[ \t]*(.*)$")
LOAD = re.compile(r"(?:global|flat|buffer)_load_")
LOOP = re.compile(
    r"; +(=> *|Parent Loop |  in Loop: Header=)(?:This (?:Inner )?Loop Header|(BB\w+))"
)
TILING = re.compile(r"hd <= (\d+) *\? FusedTiling\{([\d, ]+)\}")


@dataclass(frozen=True)
class Tiling:
    """A row of fused_tiling, and what one simdgroup has of it."""

    head_dim: int
    parts: int
    forward_parts: int
    forward_keys: int
    dq_keys: int
    dkv_keys: int
    dkv_rows: int

    @classmethod
    def of(cls, head_dim: int) -> Tiling:
        """Read the row of a head dim from the header."""
        text = (ROOT / "csrc/shared/fused_tiling.h").read_text()
        rows = {int(most): numbers for most, numbers in TILING.findall(text)}
        return cls(*map(int, rows[head_dim].split(",")))

    def simdgroups(self, kernel: str) -> int:
        """Return how many a threadgroup has."""
        blocks = {"forward": 4 * self.forward_parts, "dq": 4 * self.parts, "decode": 2}
        return blocks.get(kernel, self.dkv_keys // 8 * self.parts * 2)

    def registers(self, kernel: str) -> int:
        """Return how many a lane may have, so that a threadgroup fits into a core."""
        return min(REGISTERS, CORE_REGISTERS // (32 * self.simdgroups(kernel)))

    def blocks(self, kernel: str) -> int:
        """Return how many blocks of 8 rows a tile of the loop has."""
        rows = {"dq": self.dq_keys, "dkv": self.dkv_rows}
        return rows.get(kernel, self.forward_keys) // 8

    def products(self, kernel: str) -> int:
        """Return how many matrix products stand in the code where all are unrolled."""
        channels = self.head_dim // 8
        return {
            "forward": 2 * self.blocks(kernel) * channels // self.forward_parts,
            "decode": 2 * self.blocks(kernel) * channels,
            "dq": 3 * channels // self.parts,
            "dkv": 2 * channels // self.parts,
        }[kernel]

    def products_a_tile(self, kernel: str) -> int:
        """Return how many a simdgroup runs for each tile."""
        rolled = self.blocks(kernel) if kernel in ("dq", "dkv") else 1
        return self.products(kernel) * rolled

    def threadgroup_bytes(self, kernel: str) -> int:
        """Return the threadgroup memory of a tile and of what is exchanged; flags are left out."""
        tile = 2 * self.blocks(kernel) * 8 * (self.head_dim + 4)
        shared = {
            "forward": 32 * self.forward_keys * self.forward_parts * (self.forward_parts > 1),
            "dq": 64 * self.dq_keys * self.parts * (self.parts > 1),
            "dkv": 2 * self.parts * self.dkv_rows * self.dkv_keys + 3 * self.dkv_rows,
        }
        return 4 * (tile + shared[kernel])

    def staging_turns(self, kernel: str) -> int:
        """Return how many loads a lane sends for one tile of one array."""
        rows = self.blocks(kernel) * 8
        return rows * self.head_dim // 4 // (32 * self.simdgroups(kernel))


@dataclass(frozen=True)
class Figures:
    """One kernel as the back end compiled it."""

    registers: int  # vector registers a lane
    scratch: int  # bytes a lane that did not fit
    products: int  # matrix products in the code
    branches: int
    divisions: int  # of 64 bits, left after optimization
    loads: int  # on their way where one is waited for: at least, in staging; at most, in decode
    code_bytes: int


@dataclass
class CodeBlock:
    """A basic block: its lines, instructions and opaque operations, and the loops it is in."""

    lines: list[str]
    loops: list[str]  # the outermost first


def zig_clang() -> Clang:
    """Return the clang whose figures the tables have. Raises ImportError where it is missing."""
    import ziglang

    return Clang(str(Path(ziglang.__file__).parent / "zig"))


@cache
def rewritten_shaders(clang: Clang) -> tuple[Shader, str]:
    """Return the shaders as C++ for OpenCL, with their parts."""
    source, problems = preprocess(clang, flatten(ROOT), 3.1)
    if problems:
        raise SystemExit("\n".join(map(str, problems)))
    shader = Shader(source.text)
    return shader, shader.rewritten()[0]


def in_device_spaces(text: str) -> str:
    """Exchange the names of device and threadgroup memory."""
    return re.sub(r"__local\b|__global\b", lambda found: SPACES[found[0]], text)


def library() -> str:
    """Return Metal's library: the dialect check's declarations, with the bodies that are needed."""
    text = in_device_spaces((DIALECT / "msl_library.h").read_text())
    return AS_TYPE + text + (HERE / "device_library.h").read_text()


def with_arrays_on_chip(text: str) -> str:
    """Let threadgroup arrays lie at addresses that are given; a function may not hold them here."""
    pointer = r'__local \1* \2; __asm__("; ADDRESS %0" : "=s"(\2));'
    return THREADGROUP_ARRAY.sub(pointer, text)


def entry(kernel: Function, head_dim: int, registers: int) -> str:
    """Return the function that the back end compiles: what the grid gives, it cannot know."""
    parameters, given, setup = [], [], []
    for n, parameter in enumerate(kernel.parameters):
        texts = " ".join(parameter.texts[:-1])
        if parameter.is_indirect:
            space = {"device": "__global", "constant": "__constant"}
            words = [space.get(word, word) for word in parameter.texts[:-1]]
            by_reference = words[-1] == "&"
            kind = " ".join(words[:-1])
            parameters.append(f"{kind}* a{n}")
            given.append(f"*a{n}" if by_reference else f"a{n}")
        else:
            wide = re.search(r"uint([23])\b", texts)
            for part in "xyz"[: int(wide[1])] if wide else "x":
                setup.append(f'uint i{n}{part}; __asm__("; FROM_GRID %0" : "=v"(i{n}{part}));')
            axes = ", ".join(f"i{n}{part}" for part in "xyz"[: int(wide[1])]) if wide else ""
            given.append(f"metal::make_uint{wide[1]}({axes})" if wide else f"i{n}x")
    attributes = (
        f"amdgpu_num_vgpr({registers}), amdgpu_flat_work_group_size(1, 256), "
        f"amdgpu_waves_per_eu({1024 // registers})"
    )
    return (
        f"\nusing namespace forge;\n__attribute__(({attributes})) __kernel void "
        f"compiled({', '.join(parameters)}) {{ {' '.join(setup)} "
        f"{kernel.name}<{head_dim}>({', '.join(given)}); }}\n"
    )


def source(
    clang: Clang, kernel_name: str, head_dim: int, registers: int, switches: tuple[str, ...]
) -> str:
    """Return the whole text for one kernel."""
    shader, text = rewritten_shaders(clang)
    text = with_arrays_on_chip(in_device_spaces(text))
    for name in shader.function_constants:
        value = int(name in switches)
        text = re.sub(
            rf"extern __constant (\w+) {name}\s*;",
            rf"__constant constexpr \1 {name} = {value};",
            text,
        )
    # Only one kernel is wanted, and that as a part of the entry.
    text = re.sub(r"^\s*template\s+decltype.*$", "", text, flags=re.M)
    text = re.sub(r"^(\s*)void (attention_\w+)\(", r"\1static inline void \2(", text, flags=re.M)
    text = text.replace("static inline", "static inline __attribute__((always_inline))")
    kernel = next(f for f in shader.functions if f.name == kernel_name)
    return library() + text + entry(kernel, head_dim, registers)


def blocks_of(body: str) -> Iterator[CodeBlock]:
    """Yield the basic blocks of the code."""
    block = CodeBlock([], [])
    for line in body.split("\n"):
        label = re.match(r"\.L(BB\w+):|; %bb", line)
        if label:
            yield block
            block = CodeBlock([], [])
            name = label[1]
        loop = LOOP.search(line) if not block.lines else None
        if loop:
            block.loops.append(loop[2] or name)
        found = INSTRUCTION.match(line)
        if found:
            block.lines.append(f"{found[1]} {found[2]}")
        elif line.startswith("\t; "):
            block.lines.append(line[1:])
    yield block


def tile_loop(blocks: list[CodeBlock]) -> str:
    """Return the name of the loop over tiles: it has the barriers, or else the products."""
    return next(
        block.loops[-1]
        for block in blocks
        if block.loops and any("BARRIER" in line or "PRODUCT" in line for line in block.lines)
    )


def loads_in_flight(blocks: list[CodeBlock], choose: Callable[..., int]) -> int:
    """Return how many loads are on their way where a tile, having sent some, waits for one."""
    loop = tile_loop(blocks)
    counts = []
    pending = 0
    fresh = False
    for line in (line for block in blocks if loop in block.loops[-1:] for line in block.lines):
        waits = re.match(r"s_waitcnt .*vmcnt\((\d+)\)", line)
        if LOAD.match(line):
            pending += 1
            fresh = True
        elif waits and int(waits[1]) < pending:
            counts += [pending] if fresh else []
            pending = int(waits[1])
            fresh = False
    return choose(counts, default=0)


def compiled(
    kernel: str,
    head_dim: int,
    clang: Clang,
    always: tuple[str, ...] = (),
    switches: tuple[str, ...] = SWITCHES,
) -> tuple[Figures, list[CodeBlock]]:
    """Compile one kernel; `always`: functions that return true at once."""
    registers = Tiling.of(head_dim).registers(kernel)
    text = source(clang, KERNELS[kernel], head_dim, registers, switches)
    for function in always:
        text = returning_true(text, function)
    optimized = clang.run(COMPILE, text)
    middle = TWIN.sub("", optimized.stdout)
    done = clang.run(GENERATE, middle)
    if optimized.returncode or done.returncode:
        raise RuntimeError(f"{kernel} {head_dim}: {(optimized.stderr or done.stderr)[:300]}")
    undefined = set(re.findall(r"call .*@(_Z\w+)", middle))
    if undefined:
        raise RuntimeError(f"device_library.h has no body for {', '.join(sorted(undefined))}")
    found = re.search(r"\ncompiled:(.*?)\.Lfunc_end(.*)", done.stdout, re.S)
    if found is None:
        raise RuntimeError(f"{kernel} {head_dim}: no code")
    body, tail = found[1], found[2]
    blocks = list(blocks_of(body))

    def number(pattern: str) -> int:
        return int(re.search(pattern + r" *(\d+)", tail)[1])  # type: ignore[index]

    figures = Figures(
        registers=number(r"num_vgpr, (?:max\()?"),
        scratch=number("; ScratchSize:"),
        products=body.count("; PRODUCT"),
        branches=sum(line.startswith("s_cbranch") for b in blocks for line in b.lines),
        divisions=len(re.findall(r"= [su](?:div|rem) i64", middle)),
        loads=loads_in_flight(blocks, max if kernel == "decode" else min),
        code_bytes=number("; codeLenInByte ="),
    )
    return figures, blocks


def returning_true(text: str, function: str) -> str:
    """Return the text with the body of a function replaced."""
    begin = text.index("{", text.index(f" {function}("))
    end = begin
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            end = place
            break
    return text[:begin] + "{ return true; " + text[end:]


def table(clang: Clang) -> list[str]:
    """Return the figures as rows of a Markdown table."""
    rows = [
        "| kernel | registers, of | scratch bytes | products | branches | 64-bit divisions "
        "| loads in flight | code KB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for element, more in (("", ()), (", bfloat16", HALVES)):
        for kernel, head_dim in product(KERNELS, HEAD_DIMS):
            f, _ = compiled(kernel, head_dim, clang, switches=(*SWITCHES, *more))
            most = Tiling.of(head_dim).registers(kernel)
            rows.append(
                f"| {kernel} {head_dim}{element} | {f.registers}, {most} | {f.scratch} "
                f"| {f.products} | {f.branches} | {f.divisions} | {f.loads} "
                f"| {f.code_bytes / 1000:.1f} |"
            )
    return rows
