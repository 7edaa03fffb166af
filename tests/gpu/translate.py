"""Turn the flattened shaders into CUDA C++ for an NVIDIA GPU.

    translate.py forge.metal forge.cu

The shaders are read by the parser of the software Metal device. Address spaces vanish (one pointer
type serves them all), but a kernel's arrays in threadgroup memory become shared ones, and function
constants become constants in device memory. A kernel becomes a device function, and each of its
instantiations gets an entry that hands over what Metal takes from the grid. metal_cuda.h has the
rest of the language; what neither knows stops the translation or the compiler.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "softmetal"))

import msl

FROM_GRID = {
    "thread_position_in_grid": "blockIdx.x * blockDim.x + threadIdx.x",
    "threadgroup_position_in_grid": "blockIdx",  # a uint3
    "simdgroup_index_in_threadgroup": "threadIdx.x / 32",
    "thread_index_in_simdgroup": "threadIdx.x % 32",
}
INCLUDE = re.compile(r"#include <metal_\w+>")
UNROLL = {"full": "#pragma unroll", "disable": "#pragma unroll 1"}
PRAGMA = re.compile(r"#pragma clang loop unroll\((full|disable)\)")


def declared(declarator: msl.Declarator) -> str:
    """Return the C++ of a type with an address space; what is constant comes by value."""
    const = "const " if declarator.const or declarator.space == "constant" else ""
    if declarator.space == "threadgroup" and not declarator.form:
        sizes = "".join(f"[{size}]" for size in declarator.sizes)
        return f"__shared__ {declarator.type} {declarator.name}{sizes}"
    if declarator.space == "constant":
        return f"{const}{declarator.type} "
    return f"{const}{declarator.type}{declarator.form}"


def device_code(program: msl.Program) -> str:
    """Return the text of the shaders as device functions, on the same lines."""
    kernels = {kernel.at.begin for kernel in program.kernels}
    pieces = [(b, e, "__device__" if b in kernels else "") for b, e in program.removed]
    pieces += [(d.begin, d.end, declared(d)) for d in program.declarators]
    pieces += [(c.begin, c.end, f"__constant__ {c.type} {c.name};") for c in program.constants]
    out, at = [], 0
    for begin, end, text in sorted(pieces):
        lines = program.text.count("\n", begin, end) - text.count("\n")
        out += [program.text[at:begin], text, "\n" * lines]
        at = end
    code = INCLUDE.sub("", "".join([*out, program.text[at:]]))
    return PRAGMA.sub(lambda found: UNROLL[found[1]], code)


def entry(kernel: msl.Kernel, host_name: str, function: str) -> tuple[str, str]:
    """Return the kernel that CUDA launches, and its row of the launcher's table."""
    parameters, given, slots = [], [], []
    for parameter in kernel.parameters:
        if parameter.kind == "buffer" and parameter.declarator:
            parameters.append(f"{declared(parameter.declarator)} {parameter.name}")
            given.append(parameter.name)
            by_value = "true" if parameter.declarator.space == "constant" else "false"
            slots.append(f"{{{parameter.index}, {by_value}}}")
        elif parameter.kind in FROM_GRID:
            given.append(FROM_GRID[parameter.kind])
        else:
            raise msl.fail(parameter.at, f"attribute [[{parameter.kind}]] is not understood")
    threads = f"max_threads_of_{function}" if kernel.max_threads else "0"
    limit = f"__launch_bounds__({threads}) " if kernel.max_threads else ""
    code = (
        f'extern "C" __global__ void {limit}{host_name}_entry({", ".join(parameters)}) '
        f"{{ {function}({', '.join(given)}); }}"
    )
    row = (
        f'    {{"{host_name}", reinterpret_cast<const void*>(&{host_name}_entry), '
        f"{threads}, {len(slots)}, {{{', '.join(slots)}}}}},"
    )
    return code, row


def translate(text: str, name: str) -> str:
    """Return the CUDA C++ source of the flattened shaders."""
    program = msl.parse(text, name)
    by_name = {kernel.name: kernel for kernel in program.kernels}
    found = [entry(k, k.name, k.name) for k in program.kernels if not k.template]
    found += [entry(by_name[i.kernel], i.host_name, i.function) for i in program.instantiations]
    lines = [
        '#include "metal_cuda.h"',
        device_code(program),
        '#line 1 "entries"',
        *(
            f"{k.template} constexpr int max_threads_of_{k.name} = {k.max_threads};"
            for k in program.kernels
            if k.max_threads
        ),
        *(code for code, _ in found),
        '#include "launcher.h"',
        "static const GpuKernel kGpuKernels[] = {",
        *(row for _, row in found),
        "};",
        "static const GpuConstant kGpuConstants[] = {",
        *(f'    {{"{constant.name}", &{constant.name}}},' for constant in program.constants),
        "};",
        '#include "launcher.inc"',
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Translate one file into another."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(sys.argv[1])
    try:
        code = translate(source.read_text(encoding="utf-8"), source.name)
    except msl.MslError as error:
        print(error, file=sys.stderr)
        return 1
    Path(sys.argv[2]).write_text(code, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
