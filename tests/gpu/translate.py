"""Turn the flattened shaders into CUDA C++ for an NVIDIA GPU.

    translate.py forge.metal forge.cu

Kernels keep their text. Address spaces vanish (one pointer type serves them all), but arrays that a
kernel declares in threadgroup memory become shared ones; function constants become constants in
device memory; what a kernel gets from the grid becomes its first lines. metal_cuda.h has the rest of
the language. Whatever this does not know stops it, with the line of the shader.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r'#line (\d+) "(.*)"')
INCLUDE = re.compile(r"\s*#include <metal_\w+>")
CONSTANT = re.compile(r"constant bool (\w+) \[\[function_constant\([\w:]+\)\]\];")
THREADGROUP_ARRAY = re.compile(r"^(\s+)threadgroup (\w+ \w+\[.*\];)$", re.MULTILINE)
KERNEL = re.compile(
    r"(?P<template>(?:template <[^>]*>\n)?)"
    r"(?:kernel|\[\[kernel, max_total_threads_per_threadgroup\((?P<threads>.*)\)\]\]) "
    r"void\s+(?P<name>\w+)\("
)
INSTANCE = re.compile(
    r'template \[\[host_name\("(\w+)"\)\]\] \[\[kernel\]\] decltype\((\w+<\w+>)\) (\w+<\w+>);'
)
POINTER = re.compile(
    r"device ((?:const )?\w+)\* (\w+) \[\[buffer\((\w+)\)(?:, function_constant\(\w+\))?\]\]"
)
VALUE = re.compile(r"constant (\w+)& (\w+) \[\[buffer\((\w+)\)\]\]")
COMMENT = re.compile(r"//.*")
ADDRESS_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread) +(?=\w)")
BUILTIN = re.compile(r"uint (\w+) \[\[(\w+)\]\]")
FROM_GRID = {
    "thread_position_in_grid": "blockIdx.x * blockDim.x + threadIdx.x",
    "threadgroup_position_in_grid": "blockIdx.x",
    "simdgroup_index_in_threadgroup": "threadIdx.x / 32",
    "thread_index_in_simdgroup": "threadIdx.x % 32",
}


@dataclass
class Argument:
    """One buffer of a kernel: its parameter in CUDA and its slot."""

    parameter: str
    slot: str
    by_value: bool


@dataclass
class Kernel:
    """A kernel's signature, taken apart."""

    arguments: list[Argument]
    first_lines: list[str]


def where(text: str, position: int) -> str:
    """Return file:line of the shader that `position` of the flattened text came from."""
    name, number = "?", 0
    for line in text[:position].split("\n"):
        mark = LINE.match(line)
        name, number = (mark[2], int(mark[1]) - 1) if mark else (name, number + 1)
    return f"{name}:{number}"


def closing(text: str, start: int) -> int:
    """Return where the parenthesis that was opened before `start` closes."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise SystemExit(f"{where(text, start)}: a parenthesis is not closed")


def parse_signature(signature: str, place: str) -> Kernel:
    """Take apart what stands between a kernel's parentheses."""
    kernel = Kernel([], [])
    for raw in re.split(r",(?![^\[]*\]\])", signature):
        piece = " ".join(raw.split())
        if match := POINTER.fullmatch(piece):
            kernel.arguments.append(Argument(f"{match[1]}* {match[2]}", match[3], False))
        elif match := VALUE.fullmatch(piece):
            kernel.arguments.append(Argument(f"const {match[1]} {match[2]}", match[3], True))
        elif (match := BUILTIN.fullmatch(piece)) and match[2] in FROM_GRID:
            kernel.first_lines.append(f"const uint {match[1]} = {FROM_GRID[match[2]]};")
        else:
            raise SystemExit(f"{place}: cannot translate the argument '{piece}'")
    return kernel


def table_entry(host_name: str, function: str, kernel: Kernel) -> str:
    """Return the C++ initializer that tells the launcher about one kernel."""
    slots = ", ".join(
        f"{{forge::{a.slot}, {'true' if a.by_value else 'false'}}}" for a in kernel.arguments
    )
    return (
        f'    {{"{host_name}", reinterpret_cast<const void*>(&{function}), '
        f"{len(kernel.arguments)}, {{{slots}}}}},"
    )


def translate(text: str) -> str:
    """Return the CUDA C++ source of the flattened shaders."""
    text = COMMENT.sub("", text)
    kernels: dict[str, Kernel] = {}
    out, at, entries = [], 0, []
    for match in KERNEL.finditer(text):
        end = closing(text, match.end())
        kernel = parse_signature(text[match.end() : end], where(text, match.start()))
        name, bounds = match["name"], match["threads"]
        kernels[name] = kernel
        body = text.index("{", end) + 1
        parameters = ", ".join(a.parameter for a in kernel.arguments)
        lines = " ".join(kernel.first_lines)
        limit = f"__launch_bounds__(({bounds})) " if bounds else ""
        out += [text[at : match.start()], match["template"]]
        out.append(f"__global__ void {limit}{name}({parameters}) {{ ")
        out.append(lines + "\n" * text.count("\n", match.end(), body))
        at = body
        if not match["template"]:
            entries.append(table_entry(name, name, kernel))
    result = "".join([*out, text[at:]])
    for match in INSTANCE.finditer(result):
        if match[2] != match[3]:
            raise SystemExit(f"{where(result, match.start())}: instantiates another kernel")
        entries.append(table_entry(match[1], match[2], kernels[match[2].split("<")[0]]))
    constants = CONSTANT.findall(result)
    result = INSTANCE.sub("", result)
    result = CONSTANT.sub(r"__constant__ bool \1;", result)
    result = THREADGROUP_ARRAY.sub(r"\1__shared__ \2", result)
    result = ADDRESS_SPACE.sub("", result)
    result = INCLUDE.sub("", result).replace("static inline", "static __device__ inline")
    if left := re.search(r"\[\[.*", result):
        raise SystemExit(f"{where(result, left.start())}: cannot translate '{left[0]}'")
    table = ['#line 1 "table"', '#include "launcher.h"', "static const GpuKernel kGpuKernels[] = {"]
    table += [*entries, "};", "static const GpuConstant kGpuConstants[] = {"]
    table += [f'    {{"{name}", &{name}}},' for name in constants]
    return (
        '#include "metal_cuda.h"\n'
        + result
        + "\n".join([*table, "};", '#include "launcher.inc"', ""])
    )


def main() -> None:
    """Translate one file into another."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    Path(sys.argv[2]).write_text(translate(text), encoding="utf-8")


if __name__ == "__main__":
    main()
